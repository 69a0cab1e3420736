//! Requests for the ranges of one span: through the page cache, past it, or by a drive's own DMA.

use std::sync::Arc;

use super::wanted::{Side, Wanted, address_of, clip, ends_around, groups, joined, reachable, split, to_usize, whole};
use super::{Chunk, Limits, Piece, Placement};
use crate::base::{Alignment, Extent};
use crate::io::Direction;
use crate::io::policy::{FileFacts, Source, Span};
use crate::memory::{MemoryKind, Region};
use crate::storage::DirectRules;

/// Makes the requests of one span of a file.
#[derive(Clone, Copy)]
pub(super) struct Planner<'a> {
    pub(super) file: usize,
    pub(super) direction: Direction,
    pub(super) facts: FileFacts,
    pub(super) span: &'a Span,
    pub(super) limits: Limits,
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
    pub(super) fn page_cache(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
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
    pub(super) fn drive(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
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
    pub(super) fn direct(&self, wanted: &[Wanted], chunks: &mut Vec<Chunk>) {
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
