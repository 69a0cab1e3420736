//! The direct path in a transfer: whether a file's bytes can go that way, asked before they move, and whether they did,
//! asked afterwards.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::FileRef;
use super::pipeline::{Outcome, Shared};
use super::plan;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::io::Direction;
use crate::io::direct::{Reach, Refusal, Trial, Verdict, Watch};
use crate::io::policy::{Path, PathPolicy};
use crate::memory::Region;
use crate::storage::{Access, Buffering, File};

/// Whether the drive below a file reaches the memory of its moves, if that is a device's and the policy leaves the choice.
/// `buffered` is the file, `device` its filesystem's number.
pub(super) fn reach(
    shared: &Shared<'_>,
    file: &FileRef,
    direction: Direction,
    moves: &[(Extent, Region)],
    (buffered, device): (&dyn File, u64),
) -> Result<Reach> {
    let required = shared.options.policy == PathPolicy::Require(Path::Direct);
    let may = required || shared.options.policy == PathPolicy::Auto;
    let Some(direct) = shared.context.direct.as_ref().filter(|_| may) else { return Ok(Reach::Moot) };
    let extents: Vec<Extent> = moves
        .iter()
        .filter(|(extent, region)| !extent.is_empty() && !region.kind().is_host())
        .map(|(extent, _)| *extent)
        .collect();
    if extents.is_empty() {
        return Ok(Reach::Moot);
    }
    let Some(rules) = buffered.direct_rules() else {
        let hint = "put the file on ext4 or xfs";
        return Ok(Reach::Refused(Refusal { reason: "the filesystem refuses O_DIRECT".into(), hint: hint.into() }));
    };
    let of_core = extents.iter().find_map(|extent| extent.aligned_core(rules.offset));
    // A window takes the blocks around what fills none.
    let around = || (direct.has_window() && direction == Direction::Read).then(|| extents[0].aligned_superset(rules.offset));
    let Some(core) = of_core.or_else(around) else { return Ok(Reach::Moot) };
    let access = if direction == Direction::Read { Access::Read } else { Access::Write };
    let open = || shared.context.namespace.open(&file.path, access, Buffering::Direct);
    let block = Extent::new(core.offset, rules.offset.bytes());
    let reach = direct.reach(&Trial { direction, block, device, rules, buffered, required, open: &open })?;
    if let Reach::Direct { rules, is_proven, .. } = &reach {
        if !is_proven {
            shared.unproven.store(true, Ordering::Relaxed);
        }
        moves.iter().for_each(|(_, region)| direct.register(region));
        if required && direct.window().is_none() {
            plan::check_direct(moves, *rules)?;
        }
    }
    Ok(reach)
}

/// Calls bytes that went by an engine for the direct path what they may be called after `watch`.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable) if the path was required and nothing proves it.
pub(super) fn judge(outcome: &mut Outcome, watch: Box<dyn Watch + '_>, policy: PathPolicy) -> Result<()> {
    let bytes = outcome.parts.iter().filter(|((_, path, ..), _)| *path == Path::Direct).map(|(_, bytes)| bytes).sum();
    if bytes == 0 {
        return Ok(());
    }
    let Verdict::Unproven(why) = watch.verdict(bytes) else { return Ok(()) };
    if policy == PathPolicy::Require(Path::Direct) {
        let message = format!("the bytes arrived, and nothing proves that they went directly: {why}");
        return Err(Error::new(ErrorKind::PathUnavailable, message)
            .with("bytes", bytes)
            .with_hint("use auto: its receipt says what is known of each part"));
    }
    let parts = std::mem::take(&mut outcome.parts);
    for ((file, path, engine, reason), bytes) in parts {
        let (path, reason): (Path, Arc<str>) = match path {
            Path::Direct => (Path::Unverified, format!("{reason}; unproven: {why}").into()),
            _ => (path, reason),
        };
        *outcome.parts.entry((file, path, engine, reason)).or_default() += bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::EngineName;

    /// Says of any bytes what it was made with, and counts them.
    struct Says(Verdict);

    impl Watch for Says {
        fn verdict(self: Box<Self>, bytes: u64) -> Verdict {
            assert_eq!(bytes, 12, "what went directly, and nothing else");
            self.0
        }
    }

    fn moved() -> Outcome {
        let mut outcome = Outcome::default();
        for (path, bytes) in [(Path::Direct, 12), (Path::Staged, 5)] {
            outcome.parts.insert((0, path, EngineName::P2pDma, "tried".into()), bytes);
        }
        outcome
    }

    #[test]
    fn what_is_not_proven_is_not_called_direct() {
        let mut outcome = moved();
        judge(&mut outcome, Box::new(Says(Verdict::Proven)), PathPolicy::Require(Path::Direct)).expect("proven");
        assert_eq!(outcome.parts, moved().parts);
        let unproven = || Box::new(Says(Verdict::Unproven("nobody counted".into())));
        let error = judge(&mut outcome, unproven(), PathPolicy::Require(Path::Direct)).expect_err("it was required");
        assert_eq!((error.kind(), error.context("bytes")), (ErrorKind::PathUnavailable, Some("12")));
        judge(&mut outcome, unproven(), PathPolicy::Auto).expect("it need not be");
        let expected = (0, Path::Unverified, EngineName::P2pDma, "tried; unproven: nobody counted".into());
        assert_eq!(outcome.parts.get(&expected), Some(&12));
        assert_eq!(outcome.parts.values().sum::<u64>(), 17);
    }
}
