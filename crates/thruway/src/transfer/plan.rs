//! The planner: moves in, aligned requests out. Pure: it sees no file, no clock and no engine, so its rules
//! can be tested against a naive copy with random input.
//!
//! A *chunk* is one request. On the page cache's side any byte can be asked for, so neighbours are joined and
//! cut at the chunk size. On the drive's side offsets, lengths and addresses must be aligned:
//!
//! ```text
//! blocks        |       |       |       |       |       |
//! a tensor          [==============================]          wanted
//! its core              [=======================]             straight to its place (if that is aligned too)
//! head, tail        [===]                       [==]          whole blocks into a ring slot, then copied on
//! ```
//!
//! Many small tensors beside one another are read as one range into a slot and copied to their places; when
//! writing they are gathered in one, and what fills no block at either end is written through the page cache.

use std::sync::Arc;

use super::Move;
use crate::base::{Alignment, Error, ErrorKind, Extent, Result};
use crate::io::Direction;
use crate::io::policy::{FileFacts, Source, Span};
use crate::memory::{MemoryKind, Region};
use crate::storage::DirectRules;

/// How large requests may be, and where the ring pays.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes of one request through the page cache; a multiple of a page.
    pub chunk_bytes: u64,
    /// The same past the page cache.
    pub drive_chunk_bytes: u64,
    /// The most regions of one request.
    pub segments_max: usize,
    /// From this size on a tensor's core goes straight to its place. Below, an extra request for head and tail
    /// would cost more than copying the whole.
    pub straight_bytes_min: u64,
    /// Wanted ranges with at most this many unwanted bytes between them are read as one, through the ring.
    pub gap_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            chunk_bytes: 4 << 20,
            drive_chunk_bytes: 512 << 10,
            segments_max: 256,
            straight_bytes_min: 256 << 10,
            gap_bytes_max: 64 << 10,
        }
    }
}

impl Limits {
    /// These limits with requests of at most so many bytes.
    #[must_use]
    pub fn at_most(self, bytes: u64) -> Self {
        let (chunk_bytes, drive_chunk_bytes) = (self.chunk_bytes.min(bytes), self.drive_chunk_bytes.min(bytes));
        Self { chunk_bytes, drive_chunk_bytes, ..self }
    }
}

/// One request to an engine.
#[derive(Debug)]
pub struct Chunk {
    /// Which of the transfer's files.
    pub file: usize,
    /// Which way.
    pub direction: Direction,
    /// The storage side of the path.
    pub source: Source,
    /// The range that is asked for.
    pub extent: Extent,
    /// How many of its bytes must arrive: fewer than the range holds where the file ends in its last block.
    pub needed: u64,
    /// How many of its bytes were wanted.
    pub wanted: u64,
    /// What offset and length are multiples of.
    pub alignment: Alignment,
    /// The memory side of the path.
    pub placement: Placement,
    /// Why this way.
    pub reason: Arc<str>,
}

/// The memory side of a chunk.
#[derive(Debug)]
pub enum Placement {
    /// The engine moves the bytes straight between the file and these regions, in file order.
    Straight(Vec<Region>),
    /// The bytes pass through a slot of the ring.
    ThroughRing(Vec<Piece>),
}

/// A part of a chunk that passes through the ring.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where it begins in the slot, in bytes.
    pub at: usize,
    /// Its place in memory.
    pub region: Region,
}

/// Pieces of a chunk, in order, dealt into those that one copy can move: equally long, equally far apart in the slot, and without
/// gaps in memory, as the rows of a slice are.
pub fn rows(pieces: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let pitch = rest.get(1).map_or(0, |second| second.at - first.at);
        let belongs = |pair: &&[Piece]| {
            let [before, after] = pair else { return false };
            after.region.len() == first.region.len()
                && after.at - before.at == pitch
                && before.region.is_followed_by(&after.region)
        };
        let (together, others) = rest.split_at(1 + rest.windows(2).take_while(belongs).count());
        rest = others;
        Some(together)
    })
}

impl Chunk {
    /// Whether some of its bytes pass through the ring on their way to or from memory that only a copy engine reaches.
    pub fn is_staged_for_gpu(&self) -> bool {
        let gpu = |piece: &Piece| !piece.region.kind().is_host_accessible();
        matches!(&self.placement, Placement::ThroughRing(pieces) if pieces.iter().any(gpu))
    }

    /// The same bytes as moves, to be planned again another way.
    pub fn wanted_pieces(&self) -> Vec<(Extent, Region)> {
        let (mut offset, mut pieces) = (self.extent.offset, Vec::new());
        match &self.placement {
            Placement::Straight(regions) => {
                for region in regions {
                    pieces.push((Extent::new(offset, region.len() as u64), region.clone()));
                    offset += region.len() as u64;
                }
            }
            Placement::ThroughRing(through) => {
                for Piece { at, region } in through {
                    pieces.push((Extent::new(self.extent.offset + *at as u64, region.len() as u64), region.clone()));
                }
            }
        }
        pieces
    }
}

/// A piece of a move with its place in the file.
#[derive(Debug, Clone)]
struct Wanted {
    extent: Extent,
    region: Region,
}

impl Wanted {
    fn part(&self, extent: Extent) -> Self {
        let start = to_usize(extent.offset - self.extent.offset);
        Self { extent, region: self.region.slice(start..start + to_usize(extent.length)) }
    }
}

/// In-memory lengths come from `usize` values; anything that was checked against a region fits.
fn to_usize(value: u64) -> usize {
    match usize::try_from(value) {
        Ok(value) => value,
        Err(_) => unreachable!("a length within a region fits the address space"),
    }
}

/// Refuses moves that contradict themselves, before a byte is moved.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput): lengths that differ, a read into read-only memory, two moves of
/// one destination.
pub fn check(moves: &[Move]) -> Result<()> {
    let invalid = |what: &str, item: &Move| {
        let Extent { offset, length } = item.extent;
        Err(Error::new(ErrorKind::InvalidInput, what).with_file(&item.file.path).with("offset", offset).with("length", length))
    };
    for item in moves {
        if item.extent.length != item.region.len() as u64 {
            return invalid("the extent and the region of a move differ in length", item);
        }
        if item.extent.offset.checked_add(item.extent.length).is_none() {
            return invalid("the extent of a move ends beyond any length a file can have", item);
        }
        if item.direction == Direction::Write && item.region.access() != crate::memory::Access::ReadOnly {
            return invalid("a write needs a read-only region, which a buffer's `source` gives", item);
        }
        if item.direction == Direction::Read && item.region.access() != crate::memory::Access::Writable {
            return invalid("a read needs a writable region", item);
        }
    }
    let mut reads: Vec<&Move> =
        moves.iter().filter(|item| item.direction == Direction::Read && !item.region.is_empty()).collect();
    reads.sort_unstable_by_key(|item| item.region.address());
    for pair in reads.windows(2) {
        if pair[0].region.address() + pair[0].region.len() > pair[1].region.address() {
            return invalid("two reads have overlapping destinations", pair[1]);
        }
    }
    let mut writes: Vec<&Move> =
        moves.iter().filter(|item| item.direction == Direction::Write && !item.region.is_empty()).collect();
    writes.sort_by(|a, b| (&a.file.path, a.extent.offset).cmp(&(&b.file.path, b.extent.offset)));
    for pair in writes.windows(2) {
        if pair[0].file.path == pair[1].file.path && pair[0].extent.end() > pair[1].extent.offset {
            return invalid("two writes have overlapping extents", pair[1]);
        }
    }
    Ok(())
}

/// Refuses moves of a device's memory whose whole blocks cannot go directly.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable), naming the first.
pub fn check_direct(moves: &[(Extent, Region)], rules: DirectRules) -> Result<()> {
    for (extent, region) in moves {
        let item = Wanted { extent: *extent, region: region.clone() };
        let Some(core) = extent.aligned_core(rules.offset) else { continue };
        let address = address_of(&item, core);
        if !rules.memory.divides(address) {
            let least = rules.memory.bytes();
            let what = format!("the direct path is not to be had: the drive's DMA begins at multiples of {least} only");
            return Err(Error::new(ErrorKind::PathUnavailable, what)
                .with("offset", core.offset)
                .with("length", core.length)
                .with("address", format_args!("{address:#x}"))
                .with_hint("give such memory, let the load allocate, or use auto"));
        }
    }
    Ok(())
}

/// The chunks of one file's moves in one direction. `spans` cover every move, in order and without gaps.
pub fn plan_file(
    file: usize,
    direction: Direction,
    facts: FileFacts,
    spans: &[Span],
    moves: Vec<(Extent, Region)>,
    limits: Limits,
) -> Vec<Chunk> {
    let mut wanted: Vec<Wanted> = moves.into_iter().map(|(extent, region)| Wanted { extent, region }).collect();
    wanted.retain(|item| !item.extent.is_empty());
    wanted.sort_by_key(|item| item.extent.offset);
    let mut chunks = Vec::new();
    let limits = aligned(limits, facts);
    let drive_limits = Limits { chunk_bytes: limits.drive_chunk_bytes, ..limits };
    for layer in layers(wanted) {
        for (span, inside) in spans.iter().zip(by_span(&layer, spans)) {
            let limits = if span.source == Source::PageCache { limits } else { drive_limits };
            let planner = Planner { file, direction, facts, span, limits };
            match span.source {
                _ if inside.is_empty() => {}
                // A request that holds no whole block cannot go past the page cache.
                Source::Drive | Source::Direct if limits.chunk_bytes == 0 => {
                    let limits = Limits { chunk_bytes: 4096, ..limits };
                    Planner { limits, ..planner }.page_cache(&inside, &mut chunks);
                }
                Source::PageCache => planner.page_cache(&inside, &mut chunks),
                Source::Drive => planner.drive(&inside, &mut chunks),
                Source::Direct => planner.direct(&inside, &mut chunks),
            }
        }
    }
    chunks.sort_by_key(|chunk| chunk.extent.offset);
    chunks
}

/// Limits whose chunks past the page cache are whole blocks of the file.
fn aligned(limits: Limits, facts: FileFacts) -> Limits {
    let rules = facts.direct.into_iter().chain(facts.peer);
    let alignment = rules.map(|rules| rules.offset).max().unwrap_or(Alignment::ONE);
    let drive_chunk_bytes = alignment.down(limits.drive_chunk_bytes);
    Limits { drive_chunk_bytes, segments_max: limits.segments_max.max(1), ..limits }
}

/// Sorted ranges dealt into lists in which none overlaps another: nearly always one list. (Two moves may read
/// the same bytes to two places.)
fn layers(sorted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let mut layers: Vec<Vec<Wanted>> = Vec::new();
    for item in sorted {
        let fits = |layer: &&mut Vec<Wanted>| layer.last().is_none_or(|last| last.extent.end() <= item.extent.offset);
        match layers.iter_mut().find(fits) {
            Some(layer) => layer.push(item),
            None => layers.push(vec![item]),
        }
    }
    layers
}

/// The parts of each range that lie in each span.
fn by_span(sorted: &[Wanted], spans: &[Span]) -> Vec<Vec<Wanted>> {
    let mut inside = vec![Vec::new(); spans.len()];
    for item in sorted {
        let first = spans.partition_point(|span| span.extent.end() <= item.extent.offset);
        for (span, list) in spans.iter().zip(&mut inside).skip(first) {
            let start = span.extent.offset.max(item.extent.offset);
            let end = span.extent.end().min(item.extent.end());
            if start >= end {
                break;
            }
            list.push(item.part(Extent::new(start, end - start)));
        }
    }
    inside
}

fn split(item: &Wanted, at: u64) -> (Wanted, Wanted) {
    let left = Extent::new(item.extent.offset, at - item.extent.offset);
    let right = Extent::new(at, item.extent.end() - at);
    (item.part(left), item.part(right))
}

#[derive(Clone, Copy)]
struct Planner<'a> {
    file: usize,
    direction: Direction,
    facts: FileFacts,
    span: &'a Span,
    limits: Limits,
}

impl Planner<'_> {
    fn chunk(&self, source: Source, extent: Extent, wanted: u64, placement: Placement) -> Chunk {
        let alignment = match (source, self.facts.direct) {
            (Source::Drive, Some(rules)) => rules.offset,
            (Source::Direct, _) => self.facts.peer.map_or(Alignment::PAGE, |rules| rules.offset),
            _ => Alignment::ONE,
        };
        let needed = match self.direction {
            Direction::Read => extent.length.min(self.facts.length.saturating_sub(extent.offset)),
            Direction::Write => extent.length,
        };
        let reason = Arc::clone(&self.span.reason);
        Chunk { file: self.file, direction: self.direction, source, extent, needed, wanted, alignment, placement, reason }
    }

    /// Requests through the page cache: any byte can be asked for, so only neighbours need joining. Small runs
    /// with small gaps between them (a slice of a matrix, row by row) are read together through the ring.
    fn page_cache(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
        let runs: Vec<&[Wanted]> = groups(wanted, |previous, next| previous.extent.end() == next.extent.offset).collect();
        for near in runs.chunk_by(|previous, next| self.may_share(whole(previous), whole(next))) {
            match near {
                [run] if reachable(run) => self.straight_in_order(Source::PageCache, run, chunks),
                runs => self.through_ring(Source::PageCache, Alignment::ONE, &joined(&runs.concat()), chunks),
            }
        }
    }

    /// Whether two runs with a gap between them are better read as one request.
    fn may_share(&self, previous: Extent, next: Extent) -> bool {
        let small = previous.length.max(next.length) < self.limits.straight_bytes_min;
        self.direction == Direction::Read && small && next.offset - previous.end() <= self.limits.gap_bytes_max
    }

    /// Cuts neighbours into requests of at most a chunk and at most so many regions.
    fn straight_in_order(&self, source: Source, group: &[Wanted], chunks: &mut Vec<Chunk>) {
        let mut regions: Vec<Region> = Vec::new();
        let mut extent = Extent::new(group[0].extent.offset, 0);
        for item in group {
            let mut done = 0;
            while done < item.extent.length {
                let room = self.limits.chunk_bytes - extent.length;
                if room == 0 || regions.len() == self.limits.segments_max {
                    let full = std::mem::take(&mut regions);
                    chunks.push(self.chunk(source, extent, extent.length, Placement::Straight(full)));
                    extent = Extent::new(extent.end(), 0);
                    continue;
                }
                let take = room.min(item.extent.length - done);
                let part = item.region.slice(to_usize(done)..to_usize(done + take));
                match regions.pop() {
                    Some(last) if last.is_followed_by(&part) => regions.push(last.joined_with(&part)),
                    Some(last) => regions.extend([last, part]),
                    None => regions.push(part),
                }
                extent.length += take;
                done += take;
            }
        }
        chunks.push(self.chunk(source, extent, extent.length, Placement::Straight(regions)));
    }

    /// Requests past the page cache.
    fn drive(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
        let Some(rules) = self.facts.direct else { return self.page_cache(wanted, chunks) };
        let mut loose = Vec::new();
        for item in joined(wanted) {
            match item.extent.aligned_core(rules.offset).filter(|core| self.goes_straight(&item, *core)) {
                Some(core) => {
                    loose.extend(ends_around(&item, core));
                    self.straight_in_order(Source::Drive, &[item.part(core)], chunks);
                }
                None => loose.push(item),
            }
        }
        self.loose(Source::Drive, rules.offset, &loose, chunks);
    }

    /// Requests for what cannot go straight: whole blocks around it, through slots.
    fn loose(&self, source: Source, alignment: Alignment, loose: &[Wanted], chunks: &mut Vec<Chunk>) {
        match self.direction {
            Direction::Read => {
                for group in groups(&joined(loose), |previous, next| self.is_near(previous, next)) {
                    self.through_ring(source, alignment, group, chunks);
                }
            }
            Direction::Write => self.gather(source, alignment, loose, chunks),
        }
    }

    /// Requests by which a drive fills or empties a device's memory. Only whole blocks go so: the rest passes through a window
    /// of the device's memory, or where there is none through the ring.
    fn direct(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
        let Some(rules) = self.facts.peer else { return self.drive(wanted, chunks) };
        let (mut host, mut ends, mut askew) = (Vec::new(), Vec::new(), Vec::new());
        for item in joined(wanted) {
            match item.extent.aligned_core(rules.offset) {
                _ if item.region.kind().is_host() => host.push(item),
                Some(core) if !self.goes_in_place(&item, core, rules) => askew.push(item),
                Some(core) => {
                    ends.extend(ends_around(&item, core));
                    self.straight_in_order(Source::Direct, &[item.part(core)], chunks);
                }
                None => ends.push(item),
            }
        }
        if self.facts.window {
            ends.append(&mut askew);
            ends.sort_by_key(|item| item.extent.offset);
            let taken = std::mem::take(&mut ends);
            let reason = format!("{}; through a window of the device's memory", self.span.reason).into();
            let span = Span { reason, ..self.span.clone() };
            Planner { span: &span, ..*self }.loose(Source::Direct, rules.offset, &taken, chunks);
        }
        let rest =
            [(host, "leads to host memory"), (ends, "fills no whole block"), (askew, "lies where the drive's DMA cannot begin")];
        for (rest, why) in rest {
            let span = Span { source: Source::Drive, reason: why.into(), ..self.span.clone() };
            Planner { span: &span, ..*self }.drive(&rest, chunks);
        }
    }

    /// Whether a drive may fill or empty the core's very place. With a window, small ones are not worth requests of their own.
    fn goes_in_place(&self, item: &Wanted, core: Extent, rules: DirectRules) -> bool {
        let known = item.region.is_registered() || matches!(item.region.kind(), MemoryKind::Peer(_));
        let pays = !self.facts.window || core.length >= self.limits.straight_bytes_min;
        known && pays && rules.memory.divides(address_of(item, core))
    }

    fn goes_straight(&self, item: &Wanted, core: Extent) -> bool {
        let Some(rules) = self.facts.direct else { return false };
        !self.span.ring_only
            && item.region.kind().is_host()
            && core.length >= self.limits.straight_bytes_min
            && rules.memory.divides(address_of(item, core))
    }

    fn is_near(&self, previous: &Wanted, next: &Wanted) -> bool {
        next.extent.offset <= previous.extent.end().saturating_add(self.limits.gap_bytes_max)
    }

    /// Reads the aligned range around each group into slots and scatters from there.
    fn through_ring(&self, source: Source, alignment: Alignment, group: &[Wanted], chunks: &mut Vec<Chunk>) {
        let most = self.limits.chunk_bytes;
        let mut open: Option<(Extent, Vec<Wanted>)> = None;
        let close = |open: Option<(Extent, Vec<Wanted>)>, chunks: &mut Vec<Chunk>| {
            let Some((extent, items)) = open else { return };
            let wanted = items.iter().map(|item| item.extent.length).sum();
            let piece = |item: Wanted| Piece { at: to_usize(item.extent.offset - extent.offset), region: item.region };
            let pieces = items.into_iter().map(piece).collect();
            chunks.push(self.chunk(source, extent, wanted, Placement::ThroughRing(pieces)));
        };
        for item in group {
            let mut left = item.clone();
            loop {
                let superset = left.extent.aligned_superset(alignment);
                let (start, end) = match &open {
                    Some((extent, _)) => (extent.offset, extent.end().max(superset.end())),
                    None => (superset.offset, superset.end()),
                };
                if end - start <= most {
                    let mut items = open.take().map_or_else(Vec::new, |(_, items)| items);
                    items.push(left);
                    open = Some((Extent::new(start, end - start), items));
                    break;
                }
                let cut = start + most;
                if left.extent.offset < cut {
                    let (now, later) = split(&left, cut);
                    let mut items = open.take().map_or_else(Vec::new, |(_, items)| items);
                    items.push(now);
                    close(Some((Extent::new(start, most), items)), chunks);
                    left = later;
                } else {
                    close(open.take(), chunks);
                }
            }
        }
        close(open, chunks);
    }

    /// Gathers neighbours in slots so that whole blocks are written past the page cache; the ends of each run,
    /// which fill no block, go through it.
    fn gather(&self, source: Source, alignment: Alignment, loose: &[Wanted], chunks: &mut Vec<Chunk>) {
        for run in groups(loose, |previous, next| previous.extent.end() == next.extent.offset) {
            let all = whole(run);
            let core = all.aligned_core(alignment).unwrap_or(Extent::new(all.end(), 0));
            let (mut inside, mut ends) = (Vec::new(), [Vec::new(), Vec::new()]);
            for item in run {
                for (part, to) in clip(item, core) {
                    match to {
                        Side::Before => ends[0].push(part),
                        Side::Inside => inside.push(part),
                        Side::After => ends[1].push(part),
                    }
                }
            }
            if !inside.is_empty() {
                self.through_ring(source, alignment, &joined(&inside), chunks);
            }
            let span = Span { reason: "an end that fills no block".into(), ..self.span.clone() };
            let planner = Planner { span: &span, ..*self };
            ends.iter().filter(|end| !end.is_empty()).for_each(|end| planner.page_cache(end, chunks));
        }
    }
}

enum Side {
    Before,
    Inside,
    After,
}

/// The parts of an item before, inside and after `core`.
fn clip(item: &Wanted, core: Extent) -> Vec<(Wanted, Side)> {
    let cut = |from: u64, to: u64| {
        let (start, end) = (item.extent.offset.max(from), item.extent.end().min(to));
        (start < end).then(|| item.part(Extent::new(start, end - start)))
    };
    let parts = [
        (cut(0, core.offset), Side::Before),
        (cut(core.offset, core.end()), Side::Inside),
        (cut(core.end(), u64::MAX), Side::After),
    ];
    parts.into_iter().filter_map(|(part, side)| Some((part?, side))).collect()
}

/// What lies before and after `core`.
fn ends_around(item: &Wanted, core: Extent) -> impl Iterator<Item = Wanted> {
    let ends = [
        Extent::new(item.extent.offset, core.offset - item.extent.offset),
        Extent::new(core.end(), item.extent.end() - core.end()),
    ];
    ends.into_iter().filter(|end| !end.is_empty()).map(|end| item.part(end))
}

/// Where the bytes of `core` begin in memory.
fn address_of(item: &Wanted, core: Extent) -> u64 {
    item.region.address() as u64 + (core.offset - item.extent.offset)
}

/// Neighbours in the file that are neighbours in memory too, made one.
fn joined(wanted: &[Wanted]) -> Vec<Wanted> {
    let mut out: Vec<Wanted> = Vec::with_capacity(wanted.len());
    for item in wanted {
        match out.pop() {
            Some(last) if last.extent.end() == item.extent.offset && last.region.is_followed_by(&item.region) => {
                let extent = Extent::new(last.extent.offset, last.extent.length + item.extent.length);
                out.push(Wanted { extent, region: last.region.joined_with(&item.region) });
            }
            Some(last) => out.extend([last, item.clone()]),
            None => out.push(item.clone()),
        }
    }
    out
}

/// Cuts a sorted list wherever two neighbours do not belong together.
fn groups<'a>(wanted: &'a [Wanted], together: impl Fn(&Wanted, &Wanted) -> bool + 'a) -> impl Iterator<Item = &'a [Wanted]> {
    wanted.chunk_by(move |previous, next| together(previous, next))
}

/// Whether the CPU reaches the memory of all of a run, so that an engine of system calls can.
fn reachable(run: &[Wanted]) -> bool {
    run.iter().all(|item| item.region.kind().is_host_accessible())
}

/// The range from the first byte of a run to its last.
fn whole(run: &[Wanted]) -> Extent {
    let (first, last) = (run[0].extent, run[run.len() - 1].extent);
    Extent::new(first.offset, last.end() - first.offset)
}

#[cfg(test)]
mod tests;
