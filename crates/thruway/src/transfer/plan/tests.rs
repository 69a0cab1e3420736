//! The planner's promises, for random input: every wanted byte is planned once and to its place, requests are
//! aligned where they must be, and none is larger than it may be.

use proptest::prelude::*;

use super::wanted::to_usize;
use super::*;
use crate::memory::{HostBuffer, PeerBuffer, PeerMemory};
use crate::storage::DirectRules;

const FILE_BYTES: u64 = 300_000;

fn alignment(bytes: u64) -> Alignment {
    Alignment::new(bytes).expect("a power of two")
}

fn span(offset: u64, end: u64, source: Source, ring_only: bool) -> Span {
    Span { extent: Extent::new(offset, end - offset), source, ring_only, reason: "test".into() }
}

#[derive(Debug, Clone)]
struct Case {
    direction: Direction,
    ranges: Vec<(u64, u64, u64)>,
    cuts: Vec<u64>,
    first_is_drive: bool,
    ring_only: bool,
    memory: u64,
    chunk_pages: u64,
    segments_max: usize,
    straight_bytes_min: u64,
    gap_bytes_max: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let ranges = prop::collection::vec((0..FILE_BYTES, 0..40_000_u64, 0..100_u64), 0..30);
    let direction = prop_oneof![Just(Direction::Read), Just(Direction::Write)];
    let limits = (1..8_u64, 1..6_usize, prop_oneof![Just(0), Just(8192), Just(1 << 20)], 0..9000_u64);
    let spans = (
        prop::collection::vec(0..FILE_BYTES, 0..4),
        any::<bool>(),
        any::<bool>(),
        prop_oneof![Just(4_u64), Just(512), Just(4096)],
    );
    (direction, ranges, spans, limits).prop_map(
        |(direction, mut ranges, (mut cuts, first_is_drive, ring_only, memory), limits)| {
            for range in &mut ranges {
                range.1 = range.1.min(FILE_BYTES - range.0);
            }
            if direction == Direction::Write {
                // Writes that overlap are refused before planning.
                ranges.sort_unstable();
                let mut end = 0;
                ranges.retain(|(offset, length, _)| {
                    let keep = *offset >= end;
                    if keep {
                        end = offset + length;
                    }
                    keep
                });
            }
            cuts.extend([0, FILE_BYTES]);
            cuts.sort_unstable();
            cuts.dedup();
            let (chunk_pages, segments_max, straight_bytes_min, gap_bytes_max) = limits;
            Case {
                direction,
                ranges,
                cuts,
                first_is_drive,
                ring_only,
                memory,
                chunk_pages,
                segments_max,
                straight_bytes_min,
                gap_bytes_max,
            }
        },
    )
}

/// The chunks of a case, and for each byte of memory the byte of the file that belongs there.
fn planned(case: &Case) -> (HostBuffer, Vec<Chunk>, Vec<Option<u64>>, Limits) {
    let total: u64 = case.ranges.iter().map(|(_, length, skip)| length + skip).sum();
    let mut buffer = HostBuffer::new(to_usize(total)).expect("memory");
    let (mut moves, mut belongs, mut at) = (Vec::new(), vec![None; to_usize(total)], 0);
    for (offset, length, skip) in &case.ranges {
        at += to_usize(*skip);
        let end = at + to_usize(*length);
        (at..end).zip(*offset..).for_each(|(place, byte)| belongs[place] = Some(byte));
        moves.push((Extent::new(*offset, *length), buffer.region(at..end).expect("in range")));
        at = end;
    }
    let rules = DirectRules { memory: alignment(case.memory), offset: Alignment::PAGE };
    let facts = FileFacts { length: FILE_BYTES, direct: Some(rules), peer: None, window: false };
    let sources = [Source::Drive, Source::PageCache];
    let spans: Vec<Span> = case
        .cuts
        .windows(2)
        .enumerate()
        .map(|(number, cut)| span(cut[0], cut[1], sources[(number + usize::from(!case.first_is_drive)) % 2], case.ring_only))
        .collect();
    let limits = Limits {
        chunk_bytes: case.chunk_pages * 4096,
        // Shorter or longer than the other.
        drive_chunk_bytes: (1 + case.chunk_pages * 7 % 16) * 4096,
        segments_max: case.segments_max,
        straight_bytes_min: case.straight_bytes_min,
        gap_bytes_max: case.gap_bytes_max,
    };
    let chunks = plan_file(0, case.direction, facts, &spans, moves, limits);
    (buffer, chunks, belongs, limits)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn proptest_every_wanted_byte_is_planned_once_and_to_its_place(case in cases()) {
        let (buffer, chunks, mut belongs, _) = planned(&case);
        for chunk in &chunks {
            let mut wanted = 0;
            for (extent, region) in chunk.wanted_pieces() {
                prop_assert!(extent.offset >= chunk.extent.offset && extent.end() <= chunk.extent.end());
                wanted += extent.length;
                let start = region.address() - buffer.address();
                for (place, byte) in (start..start + region.len()).zip(extent.offset..) {
                    prop_assert_eq!(belongs[place].take(), Some(byte), "planned twice, or to the wrong place");
                }
            }
            prop_assert_eq!(wanted, chunk.wanted);
        }
        prop_assert!(belongs.iter().all(Option::is_none), "some byte was not planned");
    }

    #[test]
    fn proptest_requests_are_aligned_and_within_their_limits(case in cases()) {
        let (_buffer, chunks, _, limits) = planned(&case);
        for chunk in &chunks {
            // What fills no block of a drive's request goes through the page cache, and is no longer than that.
            let otherwise = limits.chunk_bytes.max(limits.drive_chunk_bytes);
            let most = if chunk.source == Source::Drive { limits.drive_chunk_bytes } else { otherwise };
            prop_assert!(chunk.extent.length <= most && !chunk.extent.is_empty());
            prop_assert!(chunk.needed <= chunk.extent.length);
            if chunk.direction == Direction::Read {
                prop_assert!(chunk.extent.offset + chunk.needed <= FILE_BYTES, "no more than the file holds can be needed");
            }
            if chunk.source == Source::Drive {
                prop_assert!(Alignment::PAGE.divides(chunk.extent.offset) && Alignment::PAGE.divides(chunk.extent.length));
                prop_assert_eq!(chunk.alignment, Alignment::PAGE);
            }
            if let Placement::Straight(regions) = &chunk.placement {
                prop_assert!(regions.len() <= limits.segments_max);
                prop_assert_eq!(regions.iter().map(|region| region.len() as u64).sum::<u64>(), chunk.extent.length);
                if chunk.source == Source::Drive {
                    prop_assert!(!case.ring_only);
                    prop_assert!(regions.iter().all(|region| alignment(case.memory).divides(region.address() as u64)));
                }
            }
            if chunk.direction == Direction::Write {
                prop_assert_eq!(chunk.wanted, chunk.extent.length, "a write may touch nothing but what was given");
            }
        }
    }
}

#[test]
fn a_large_tensor_goes_straight_but_for_its_ends() {
    let mut buffer = HostBuffer::new(3 << 20).expect("memory");
    let facts = FileFacts {
        length: 4 << 20,
        direct: Some(DirectRules { memory: alignment(512), offset: Alignment::PAGE }),
        peer: None,
        window: false,
    };
    let offset = 1000;
    let region = buffer.region(1000..1000 + (2 << 20)).expect("in range");
    let spans = [span(0, 4 << 20, Source::Drive, false)];
    let chunks = plan_file(0, Direction::Read, facts, &spans, vec![(Extent::new(offset, 2 << 20), region)], Limits::default());
    let straight: u64 = chunks.iter().filter(|c| matches!(c.placement, Placement::Straight(_))).map(|c| c.wanted).sum();
    let staged: u64 = chunks.iter().filter(|c| matches!(c.placement, Placement::ThroughRing(_))).map(|c| c.wanted).sum();
    assert_eq!((straight, staged), ((2 << 20) - 4096, 4096));
    assert_eq!(chunks.len(), 6, "the ends, and four requests of at most 512 KiB");
}

#[test]
fn many_small_neighbours_become_few_requests() {
    let mut buffer = HostBuffer::new(20_000 * 64).expect("memory");
    let facts = FileFacts {
        length: 20_000 * 50,
        direct: Some(DirectRules { memory: alignment(512), offset: Alignment::PAGE }),
        peer: None,
        window: false,
    };
    for source in [Source::Drive, Source::PageCache] {
        let moves: Vec<(Extent, Region)> = (0..20_000)
            .map(|i| (Extent::new(i * 50, 50), buffer.region(to_usize(i * 64)..to_usize(i * 64 + 50)).expect("in range")))
            .collect();
        let chunks = plan_file(0, Direction::Read, facts, &[span(0, 1_000_000, source, false)], moves, Limits::default());
        assert!(chunks.len() <= 20_000 / 256 + 1, "{source:?}: {} requests", chunks.len());
    }
}

#[test]
fn chunks_are_whole_blocks_even_where_blocks_are_larger_than_they_should_be() {
    let mut buffer = HostBuffer::new(1 << 20).expect("memory");
    let halves = [span(0, 400_000, Source::PageCache, true), span(400_000, 1 << 20, Source::Drive, false)];
    let whole = |source| vec![span(0, 1 << 20, source, false)];
    let spans = [whole(Source::Drive), whole(Source::PageCache), halves.into()];
    for (block, chunk_bytes) in [(16384, 4096), (16384, 20480), (65536, 65536)] {
        for spans in &spans {
            let facts = FileFacts {
                length: 1 << 20,
                direct: Some(DirectRules { memory: alignment(512), offset: alignment(block) }),
                peer: None,
                window: false,
            };
            let limits = Limits { chunk_bytes, drive_chunk_bytes: chunk_bytes, ..Limits::default() };
            let moves = vec![(Extent::new(100, 500_000), buffer.region(100..500_100).expect("in range"))];
            let chunks = plan_file(0, Direction::Read, facts, spans, moves, limits);
            assert_eq!(chunks.iter().map(|chunk| chunk.wanted).sum::<u64>(), 500_000);
            for chunk in &chunks {
                assert!(chunk.extent.length <= chunk_bytes);
                assert!(chunk.source == Source::PageCache || alignment(block).divides(chunk.extent.offset));
            }
        }
    }
}

/// A buffer of a device's memory, in whose place fresh shared memory is mapped.
fn peer(bytes: u64) -> PeerBuffer {
    let zero = std::fs::File::options().read(true).write(true).open("/dev/zero").expect("it is there");
    let memory = std::sync::Arc::new(PeerMemory::new("0000:03:00.0".parse().expect("an address"), zero.into()));
    memory.allocate(to_usize(bytes)).expect("memory")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn proptest_of_a_devices_memory_whole_blocks_go_directly_and_the_rest_through_the_ring(case in cases()) {
        let total: u64 = case.ranges.iter().map(|(_, length, skip)| length + skip).sum();
        let mut buffer = peer(total);
        let rules = DirectRules { memory: alignment(case.memory), offset: Alignment::PAGE };
        let facts = FileFacts { length: FILE_BYTES, direct: Some(rules), peer: Some(rules), window: false };
        let limits = Limits { drive_chunk_bytes: case.chunk_pages * 4096, segments_max: case.segments_max, ..Limits::default() };
        let (mut moves, mut belongs, mut at) = (Vec::new(), vec![None; to_usize(total)], 0);
        for (offset, length, skip) in &case.ranges {
            at += to_usize(*skip);
            let end = at + to_usize(*length);
            (at..end).zip(*offset..).for_each(|(place, byte)| belongs[place] = Some(byte));
            moves.push((Extent::new(*offset, *length), buffer.region(at..end).expect("in range")));
            at = end;
        }
        let reachable = check_direct(&moves, rules).is_ok();
        let chunks = plan_file(0, case.direction, facts, &[span(0, FILE_BYTES, Source::Direct, false)], moves, limits);
        for chunk in &chunks {
            for (extent, region) in chunk.wanted_pieces() {
                let start = region.address() - buffer.address();
                for (place, byte) in (start..start + region.len()).zip(extent.offset..) {
                    prop_assert_eq!(belongs[place].take(), Some(byte), "planned twice, or to the wrong place");
                }
            }
            match (chunk.source, &chunk.placement) {
                (Source::Direct, Placement::Straight(regions)) => {
                    let Extent { offset, length } = chunk.extent;
                    prop_assert!(Alignment::PAGE.divides(offset) && Alignment::PAGE.divides(length));
                    prop_assert!(length <= limits.drive_chunk_bytes && regions.len() <= limits.segments_max);
                    prop_assert!(regions.iter().all(|region| rules.memory.divides(region.address() as u64)));
                    prop_assert_eq!((chunk.alignment, chunk.wanted), (Alignment::PAGE, length));
                }
                (Source::Direct, Placement::ThroughRing(_)) => prop_assert!(false, "nothing is staged on the direct path"),
                // No drive reaches the device's memory any other way.
                (Source::Drive, placement) => prop_assert!(matches!(placement, Placement::ThroughRing(_))),
                (Source::PageCache, _) => {}
            }
            let whole_block = |(extent, _): &(Extent, Region)| extent.aligned_core(Alignment::PAGE).is_some();
            if reachable && chunk.source != Source::Direct && case.direction == Direction::Read {
                prop_assert!(!chunk.wanted_pieces().iter().any(whole_block), "a whole block was staged");
            }
        }
        prop_assert!(belongs.iter().all(Option::is_none), "some byte was not planned");
    }
}

#[test]
fn pieces_that_lie_like_the_rows_of_a_slice_are_one_copy() {
    let mut buffer = HostBuffer::new(10_000).expect("memory");
    let mut piece =
        |at: usize, start: usize, length: usize| Piece { at, region: buffer.region(start..start + length).expect("in range") };
    let pieces = [
        // Three rows of 10 bytes, 50 apart.
        piece(0, 100, 10),
        piece(50, 110, 10),
        piece(100, 120, 10),
        // As far apart, and longer.
        piece(150, 130, 11),
        // Not behind it in memory.
        piece(200, 500, 11),
        piece(261, 511, 11),
        // Not as far apart.
        piece(300, 522, 11),
        // Alone.
        piece(400, 1000, 1),
    ];
    let counts: Vec<usize> = rows(&pieces).map(<[Piece]>::len).collect();
    assert_eq!(counts, [3, 1, 2, 1, 1]);
    assert_eq!(rows(&pieces).map(|row| row[0].at).collect::<Vec<usize>>(), [0, 150, 200, 300, 400]);
    assert_eq!(rows(&[]).count(), 0);
}
