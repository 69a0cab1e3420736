//! Which way bytes travel, and why.
//!
//! The choice is made range by range from facts: what the destination is, whether the filesystem takes
//! `O_DIRECT`, and what the page cache already holds. A file that is in the page cache is copied from there
//! (a drive read would run at the drive's speed and a copy runs at memory speed); one that is not is read
//! past it (buffered, 8.7 GB cost 20 s of CPU; direct, 0.2 s). The reason is recorded with every range.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::direct::Reach;
use super::profile::Advice;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::memory::MemoryKind;
use crate::storage::{DirectRules, Residency};

/// How bytes travel between storage and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// The drive's DMA engine moves them into or out of a device's memory, with proof.
    Direct,
    /// As `Direct`, for all that the engine reported; nothing proves it.
    Unverified,
    /// Past the page cache into the ring, then copied on.
    Staged,
    /// Through the page cache.
    Cached,
    /// Past the page cache, straight into or out of host memory.
    Plain,
}

impl Path {
    /// The name as it stands in receipts and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Unverified => "unverified",
            Self::Staged => "staged",
            Self::Cached => "cached",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the caller demands of the path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PathPolicy {
    /// The fastest that the machine has; the receipt says which and why.
    #[default]
    Auto,
    /// This one or an error: `Direct`, `Staged` or `Cached`. What fills no whole block at the ends of a range goes as it can.
    Require(Path),
}

impl FromStr for PathPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "direct" => Self::Require(Path::Direct),
            "staged" => Self::Require(Path::Staged),
            "cached" => Self::Require(Path::Cached),
            _ => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("'{}' is no path", crate::base::error::printable(text)))
                    .with_hint("use auto, direct, staged or cached"));
            }
        })
    }
}

/// Where bytes are taken from or brought to on the storage side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The drive, past the page cache.
    Drive,
    /// The page cache.
    PageCache,
    /// The drive, whose DMA engine reads and writes a device's memory by itself.
    Direct,
}

/// A range of a file, where its bytes come from or go to, and why.
#[derive(Clone, Debug)]
pub struct Span {
    /// The range. Spans of a file are in order and leave no gap.
    pub extent: Extent,
    /// The storage side of the path.
    pub source: Source,
    /// Whether even ranges that could go straight must go through the ring.
    pub ring_only: bool,
    /// Why, in words.
    pub reason: Arc<str>,
}

/// The facts of a file that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    /// Its length in bytes.
    pub length: u64,
    /// What `O_DIRECT` demands; `None` where it is refused.
    pub direct: Option<DirectRules>,
    /// What the direct path demands; `None` where there is none.
    pub peer: Option<DirectRules>,
    /// Whether the direct path has a window for what cannot go in place.
    pub window: bool,
}

/// Residency is decided in windows of this many bytes, aligned in the file. Large enough that both kinds of
/// transfer reach full speed within one, small enough that a half-cached file gains.
const WINDOW_BYTES: u64 = 16 << 20;

/// Refuses what can be known to be impossible without looking at a file. `has_direct` says whether the session has an engine
/// for the direct path.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable) with the missing piece, or
/// [`InvalidInput`](ErrorKind::InvalidInput) for a path that cannot be required.
pub fn check(policy: PathPolicy, memory: MemoryKind, has_direct: bool) -> Result<()> {
    let unavailable = |message: &str, hint: &str| Err(Error::new(ErrorKind::PathUnavailable, message).with_hint(hint));
    match policy {
        PathPolicy::Require(Path::Direct) if memory.is_host() => unavailable(
            "the direct path leads to a device's memory, and this is the host's",
            "name a device, require staged or cached, or use auto",
        ),
        PathPolicy::Require(Path::Direct) if !has_direct => unavailable(
            "this version of Thruway has no engine for the direct path to this memory",
            "require staged or cached, or use auto",
        ),
        PathPolicy::Require(path @ (Path::Unverified | Path::Plain)) => {
            Err(Error::new(ErrorKind::InvalidInput, format!("'{path}' is an outcome and cannot be required"))
                .with_hint("require staged or cached, or use auto"))
        }
        _ => Ok(()),
    }
}

/// The spans of a file that is read, covering `extent`.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable) if the policy requires what the filesystem refuses.
pub fn read_spans(
    facts: FileFacts,
    extent: Extent,
    policy: PathPolicy,
    (reach, advice): (&Reach, &Advice),
    residency: &dyn Fn(Extent) -> Residency,
) -> Result<Vec<Span>> {
    if let Some(span) = required(facts, extent, policy, reach)? {
        return Ok(vec![span]);
    }
    if let Reach::Direct { beats_cache: true, reason, .. } = reach {
        return Ok(vec![span(extent, Source::Direct, reason)]);
    }
    let past_cache: &[Path] = match (reach, facts.direct) {
        (Reach::Direct { .. }, Some(_)) => &[Path::Direct, Path::Staged],
        (Reach::Direct { .. }, None) => &[Path::Direct],
        (_, Some(_)) => &[Path::Staged],
        (_, None) => return Ok(vec![span(extent, Source::PageCache, &beside("the filesystem refuses O_DIRECT", reach))]),
    };
    let mut spans: Vec<Span> = Vec::new();
    let decide = |extent: Extent, residency: Residency| {
        let why = match residency {
            Residency::All => "in the page cache",
            Residency::None => "not in the page cache",
            Residency::Some => "only partly in the page cache",
            Residency::Unknown => "the kernel does not tell what the page cache holds",
        };
        let cached: &[Path] = if residency == Residency::All { &[Path::Cached] } else { &[] };
        chosen(extent, why, &[cached, past_cache].concat(), (reach, advice))
    };
    match residency(extent) {
        Residency::Some => {
            let mut start = extent.offset;
            while start < extent.end() {
                let end = ((start / WINDOW_BYTES + 1) * WINDOW_BYTES).min(extent.end());
                let window = Extent::new(start, end - start);
                let next = decide(window, residency(window));
                match spans.last_mut() {
                    Some(last) if last.reason == next.reason => last.extent.length += window.length,
                    _ => spans.push(next),
                }
                start = end;
            }
        }
        uniform => spans.push(decide(extent, uniform)),
    }
    Ok(spans)
}

/// The span of a file that is written, covering `extent`.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable) if the policy requires what the filesystem refuses.
pub fn write_span(facts: FileFacts, extent: Extent, policy: PathPolicy, (reach, advice): (&Reach, &Advice)) -> Result<Span> {
    if let Some(span) = required(facts, extent, policy, reach)? {
        return Ok(span);
    }
    let why = "a new file is written past the page cache";
    Ok(match (reach, facts.direct) {
        (Reach::Direct { .. }, Some(_)) => chosen(extent, why, &[Path::Direct, Path::Staged, Path::Cached], (reach, advice)),
        (Reach::Direct { reason, .. }, None) => span(extent, Source::Direct, reason),
        (_, Some(_)) => chosen(extent, why, &[Path::Staged, Path::Cached], (reach, advice)),
        (_, None) => span(extent, Source::PageCache, &beside("the filesystem refuses O_DIRECT", reach)),
    })
}

/// The span by the first of the paths that are possible, which the rules would take, or by another that a profile has found
/// faster. (To host memory, of which no profile speaks, `Staged` stands for straight past the page cache as well.)
fn chosen(extent: Extent, why: &str, possible: &[Path], (reach, advice): (&Reach, &Advice)) -> Span {
    let (path, said) = advice.choose(possible[0], possible);
    let source = match path {
        Path::Direct => Source::Direct,
        Path::Cached => Source::PageCache,
        _ => Source::Drive,
    };
    let reason = match (source, reach) {
        // Where it would have been possible, nothing is to be said of what was not needed.
        (Source::PageCache | Source::Drive, Reach::Direct { .. }) => why.to_owned(),
        _ => beside(why, reach),
    };
    span(extent, source, &said.map_or_else(|| reason.clone(), |said| format!("{reason}; {said}")))
}

fn required(facts: FileFacts, extent: Extent, policy: PathPolicy, reach: &Reach) -> Result<Option<Span>> {
    match policy {
        PathPolicy::Require(Path::Direct) => match reach {
            Reach::Direct { reason, .. } => Ok(Some(span(extent, Source::Direct, reason))),
            Reach::Refused(refusal) => Err(refusal.to_error()),
            Reach::Moot => Ok(None),
        },
        PathPolicy::Require(Path::Staged) if facts.direct.is_none() => {
            Err(Error::new(ErrorKind::PathUnavailable, "the staged path needs O_DIRECT, which this filesystem refuses")
                .with_hint("use --path cached or auto, or put the file on ext4 or xfs"))
        }
        PathPolicy::Require(Path::Staged) => {
            Ok(Some(Span { ring_only: true, ..span(extent, Source::Drive, "the staged path was required") }))
        }
        PathPolicy::Require(Path::Cached) => Ok(Some(span(extent, Source::PageCache, "the cached path was required"))),
        _ => Ok(None),
    }
}

/// A reason, and beside it what was found out of the direct path.
fn beside(why: &str, reach: &Reach) -> String {
    match reach {
        Reach::Moot => why.to_owned(),
        Reach::Direct { reason, .. } => format!("{why}; {reason}"),
        Reach::Refused(refusal) => format!("{why}; not direct: {}", refusal.reason),
    }
}

fn span(extent: Extent, source: Source, reason: &str) -> Span {
    Span { extent, source, ring_only: false, reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Alignment;
    use crate::io::direct::Refusal;
    use crate::io::profile::SizeClass;

    const RULES: DirectRules = DirectRules { memory: Alignment::PAGE, offset: Alignment::PAGE };
    const DIRECT: FileFacts = FileFacts { length: 100 << 20, direct: Some(RULES), peer: None, window: false };
    const REFUSED: FileFacts = FileFacts { length: 100 << 20, direct: None, peer: None, window: false };
    const ALL: Extent = Extent::new(8, (100 << 20) - 8);

    #[test]
    fn residency_decides_window_by_window_without_gap_or_overlap() {
        // The first 40 MiB are cached: two whole windows and half of the third.
        let cached_bytes = 40 << 20;
        let residency = |extent: Extent| match (extent.end() <= cached_bytes, extent.offset >= cached_bytes) {
            (true, _) => Residency::All,
            (_, true) => Residency::None,
            _ => Residency::Some,
        };
        let spans = read_spans(DIRECT, ALL, PathPolicy::Auto, (&Reach::Moot, &Advice::None), &residency).expect("possible");
        let sources: Vec<Source> = spans.iter().map(|span| span.source).collect();
        assert_eq!(sources, [Source::PageCache, Source::Drive, Source::Drive]);
        assert_eq!(spans[0].extent, Extent::new(8, (32 << 20) - 8));
        assert!(spans.windows(2).all(|pair| pair[0].extent.end() == pair[1].extent.offset));
        assert_eq!(spans.last().map(|span| span.extent.end()), Some(ALL.end()));
    }

    #[test]
    fn what_is_unknown_is_read_from_the_drive() {
        let spans =
            read_spans(DIRECT, ALL, PathPolicy::Auto, (&Reach::Moot, &Advice::None), &|_| Residency::Unknown).expect("possible");
        assert_eq!(spans[0].source, Source::Drive);
    }

    #[test]
    fn a_filesystem_without_o_direct_goes_through_the_page_cache_and_says_so() {
        let spans =
            read_spans(REFUSED, ALL, PathPolicy::Auto, (&Reach::Moot, &Advice::None), &|_| Residency::None).expect("possible");
        assert_eq!(spans[0].source, Source::PageCache);
        assert!(spans[0].reason.contains("O_DIRECT"));
        let error =
            read_spans(REFUSED, ALL, PathPolicy::Require(Path::Staged), (&Reach::Moot, &Advice::None), &|_| Residency::None)
                .expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::PathUnavailable);
        assert_eq!(
            write_span(REFUSED, ALL, PathPolicy::Auto, (&Reach::Moot, &Advice::None)).expect("possible").source,
            Source::PageCache
        );
    }

    #[test]
    fn a_drive_that_reaches_the_device_is_taken_past_the_page_cache_and_over_it_only_where_that_pays() {
        let reach = |beats_cache| Reach::Direct { rules: RULES, beats_cache, is_proven: true, reason: "tried".into() };
        let sources = |policy, beats_cache, residency| {
            let spans = read_spans(DIRECT, ALL, policy, (&reach(beats_cache), &Advice::None), &|_| residency).expect("possible");
            (spans[0].source, spans[0].reason.contains("tried"))
        };
        assert_eq!(sources(PathPolicy::Auto, false, Residency::None), (Source::Direct, true));
        assert_eq!(sources(PathPolicy::Auto, false, Residency::All), (Source::PageCache, false));
        assert_eq!(sources(PathPolicy::Auto, true, Residency::All), (Source::Direct, true));
        assert_eq!(sources(PathPolicy::Require(Path::Direct), false, Residency::All), (Source::Direct, true));
        assert_eq!(sources(PathPolicy::Require(Path::Staged), true, Residency::None), (Source::Drive, false));
        assert_eq!(
            write_span(DIRECT, ALL, PathPolicy::Auto, (&reach(false), &Advice::None)).expect("possible").source,
            Source::Direct
        );
    }

    #[test]
    fn a_drive_that_does_not_reach_the_device_is_an_error_where_it_must_and_a_reason_where_it_need_not() {
        let reach = Reach::Refused(Refusal { reason: "no bridge".into(), hint: "move it".into() });
        let spans = read_spans(DIRECT, ALL, PathPolicy::Auto, (&reach, &Advice::None), &|_| Residency::None).expect("possible");
        assert_eq!((spans[0].source, &*spans[0].reason), (Source::Drive, "not in the page cache; not direct: no bridge"));
        let policy = PathPolicy::Require(Path::Direct);
        for error in [
            read_spans(DIRECT, ALL, policy, (&reach, &Advice::None), &|_| Residency::None).expect_err("it must be direct"),
            write_span(DIRECT, ALL, policy, (&reach, &Advice::None)).expect_err("it must be direct"),
        ] {
            assert_eq!((error.kind(), error.hint()), (ErrorKind::PathUnavailable, Some("move it")));
            assert!(error.message().contains("no bridge"), "{error}");
        }
    }

    #[test]
    fn a_profile_decides_between_what_is_possible_and_is_named() {
        let advice = Advice::Measured {
            name: "p.json".into(),
            size: SizeClass::Large,
            known: vec![(Path::Direct, 3.0), (Path::Staged, 6.0), (Path::Cached, 9.0)],
        };
        let reach = Reach::Direct { rules: RULES, beats_cache: false, is_proven: true, reason: "tried".into() };
        let refused = Reach::Refused(Refusal { reason: "no bridge".into(), hint: "move it".into() });
        let read = |reach, residency| {
            let spans = read_spans(DIRECT, ALL, PathPolicy::Auto, (reach, &advice), &|_| residency).expect("possible");
            (spans[0].source, spans[0].reason.to_string())
        };
        let rates = "by the profile p.json: staged 6.00, direct 3.00 GB/s";
        assert_eq!(read(&reach, Residency::None), (Source::Drive, format!("not in the page cache; {rates}")));
        let (source, reason) = read(&reach, Residency::All);
        assert!(source == Source::PageCache && reason.contains("cached 9.00, staged 6.00, direct 3.00"), "{reason}");
        let (source, reason) = read(&refused, Residency::None);
        assert!(source == Source::Drive && reason.contains("no bridge") && reason.contains("p.json"), "{reason}");
        let span = write_span(DIRECT, ALL, PathPolicy::Auto, (&reach, &advice)).expect("possible");
        assert_eq!(span.source, Source::PageCache, "the fastest of all three");
        let policy = PathPolicy::Require(Path::Direct);
        let spans = read_spans(DIRECT, ALL, policy, (&reach, &advice), &|_| Residency::None).expect("possible");
        assert_eq!((spans[0].source, &*spans[0].reason), (Source::Direct, "tried"), "what is required is taken");
        let ignored = Advice::Ignored("the profile p.json is ignored: it is stale".into());
        let spans = read_spans(DIRECT, ALL, PathPolicy::Auto, (&reach, &ignored), &|_| Residency::None).expect("possible");
        assert_eq!(spans[0].source, Source::Direct);
        assert_eq!(&*spans[0].reason, "not in the page cache; tried; the profile p.json is ignored: it is stale");
    }

    #[test]
    fn the_direct_path_needs_a_device_and_an_engine_and_outcomes_cannot_be_required() {
        let error = check(PathPolicy::Require(Path::Direct), MemoryKind::Host, true).expect_err("the host's memory");
        assert!(error.message().contains("this is the host's"), "{error}");
        let error = check(PathPolicy::Require(Path::Direct), MemoryKind::Gpu(0), false).expect_err("no engine");
        assert!(error.message().contains("no engine"), "{error}");
        assert_eq!(error.kind(), ErrorKind::PathUnavailable);
        check(PathPolicy::Require(Path::Direct), MemoryKind::Gpu(0), true).expect("to be seen file by file");
        for path in [Path::Plain, Path::Unverified] {
            assert_eq!(
                check(PathPolicy::Require(path), MemoryKind::Host, true).expect_err("an outcome").kind(),
                ErrorKind::InvalidInput
            );
        }
        check(PathPolicy::Require(Path::Cached), MemoryKind::Host, false).expect("possible");
    }
}
