//! The GPU's checksum kernel itself, compiled for the processor: what it computes is the CRC-64/NVME of any bytes, wherever they lie.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use thruway_testkit::random::Random;

/// The program that runs the kernel.
fn compiled(directory: &Path) -> Command {
    let program = directory.join("kernel");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel/host.cpp");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let done = Command::new(compiler).args(["-std=c++17", "-O2", "-o"]).args([&program, &source]).output();
    let done = done.expect("a C++ compiler runs: CONTRIBUTING.md names one among what the tests need");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Command::new(program)
}

/// The remainders of ranges of `bytes`, by the kernel.
fn remainders(directory: &Path, bytes: &[u8], ranges: &[Range<usize>], blocks: u64) -> Vec<u64> {
    let mut input: Vec<u8> = [blocks, ranges.len() as u64].map(u64::to_le_bytes).concat();
    ranges.iter().for_each(|range| input.extend([range.start as u64, range.len() as u64].map(u64::to_le_bytes).concat()));
    input.extend(bytes);
    let path = directory.join("input");
    std::fs::write(&path, input).expect("written");
    let done = compiled(directory).stdin(File::open(path).expect("there")).output().expect("it was just made");
    assert!(done.status.success(), "{done:?}");
    done.stdout.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("whole words"))).collect()
}

#[test]
fn the_kernel_computes_the_crc_of_every_length_at_every_alignment() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files");
    let mut random = Random::new(23);
    let bytes = random.bytes(3 << 20);
    // Words, rows of 256 words, and one more or less of each.
    let lengths = (0..=300).chain(2040..2060).chain(4090..4110).chain([262_143, 262_144, 262_145, 2_000_003]);
    let mut ranges: Vec<_> = lengths.flat_map(|length| (0..8).map(move |start| 64 + start..64 + start + length)).collect();
    for _ in 0..300 {
        let (start, most) = (random.below(1 << 20), 1 << (3 + random.below(17)));
        ranges.push(start..start + random.below(most));
    }
    // What a register of zeros is after the bytes: the checksum without what ones before and inversion behind make of the length.
    let crc = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes);
    let expected = |range: &Range<usize>| crc(&bytes[range.clone()]) ^ crc(&vec![0; range.len()]);
    for blocks in [1, 3] {
        let found = remainders(directory.path(), &bytes, &ranges, blocks);
        assert_eq!(found.len(), ranges.len());
        for (range, found) in ranges.iter().zip(found) {
            assert_eq!(found, expected(range), "{range:?} by {blocks} blocks");
        }
    }
}
