//! Wanted ranges of a file, each with its place in memory, and how they are joined, cut and dealt.

use crate::base::Extent;
use crate::io::policy::Span;
use crate::memory::Region;

/// A piece of a move with its place in the file.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) extent: Extent,
    pub(super) region: Region,
}

impl Wanted {
    pub(super) fn part(&self, extent: Extent) -> Self {
        let start = to_usize(extent.offset - self.extent.offset);
        Self { extent, region: self.region.slice(start..start + to_usize(extent.length)) }
    }
}

/// In-memory lengths come from `usize` values; anything that was checked against a region fits.
pub(super) fn to_usize(value: u64) -> usize {
    match usize::try_from(value) {
        Ok(value) => value,
        Err(_) => unreachable!("a length within a region fits the address space"),
    }
}

/// Sorted ranges dealt into lists in which none overlaps another: nearly always one list. (Two moves may read
/// the same bytes to two places.)
pub(super) fn layers(sorted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
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
pub(super) fn by_span(sorted: &[Wanted], spans: &[Span]) -> Vec<Vec<Wanted>> {
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

pub(super) fn split(item: &Wanted, at: u64) -> (Wanted, Wanted) {
    let left = Extent::new(item.extent.offset, at - item.extent.offset);
    let right = Extent::new(at, item.extent.end() - at);
    (item.part(left), item.part(right))
}

pub(super) enum Side {
    Before,
    Inside,
    After,
}

/// The parts of an item before, inside and after `core`.
pub(super) fn clip(item: &Wanted, core: Extent) -> Vec<(Wanted, Side)> {
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
pub(super) fn ends_around(item: &Wanted, core: Extent) -> impl Iterator<Item = Wanted> {
    let ends = [
        Extent::new(item.extent.offset, core.offset - item.extent.offset),
        Extent::new(core.end(), item.extent.end() - core.end()),
    ];
    ends.into_iter().filter(|end| !end.is_empty()).map(|end| item.part(end))
}

/// Where the bytes of `core` begin in memory.
pub(super) fn address_of(item: &Wanted, core: Extent) -> u64 {
    item.region.address() as u64 + (core.offset - item.extent.offset)
}

/// Neighbours in the file that are neighbours in memory too, made one.
pub(super) fn joined(wanted: &[Wanted]) -> Vec<Wanted> {
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
pub(super) fn groups<'a>(
    wanted: &'a [Wanted],
    together: impl Fn(&Wanted, &Wanted) -> bool + 'a,
) -> impl Iterator<Item = &'a [Wanted]> {
    wanted.chunk_by(move |previous, next| together(previous, next))
}

/// Whether the CPU reaches the memory of all of a run, so that an engine of system calls can.
pub(super) fn reachable(run: &[Wanted]) -> bool {
    run.iter().all(|item| item.region.kind().is_host_accessible())
}

/// The range from the first byte of a run to its last.
pub(super) fn whole(run: &[Wanted]) -> Extent {
    let (first, last) = (run[0].extent, run[run.len() - 1].extent);
    Extent::new(first.offset, last.end() - first.offset)
}
