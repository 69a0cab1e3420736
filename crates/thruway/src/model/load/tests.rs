//! Where tensors and slices lie: in the file, and in memory.

use super::*;
use crate::format::safetensors::Dtype;
use crate::memory::HostBuffer;

fn entry(dtype: Dtype, shape: &[u64], offset: u64) -> ModelEntry {
    let bytes = shape.iter().product::<u64>() * dtype.bits() / 8;
    ModelEntry { name: "t".to_owned(), dtype, shape: shape.to_vec(), file: 0, extent: Extent::new(offset, bytes) }
}

fn slice(dimension: usize, range: Range<u64>) -> Slice {
    Slice { name: "t".to_owned(), dimension, range }
}

#[test]
fn neighbours_in_the_file_stay_neighbours_in_memory_when_aligned() {
    let first = next_place(0, 4096 * 3 + 64, 1 << 20);
    assert_eq!(first, 64);
    assert_eq!(next_place(first + 128, 4096 * 3 + 192, 128), first + 128);
}

#[test]
fn tiny_tensors_take_no_page_each() {
    let mut cursor = 0;
    for number in 0..1000 {
        // Alternately 1 and 63 bytes: every second one begins on a cache line of the file.
        let (offset, bytes) = (number / 2 * 64 + number % 2, if number % 2 == 0 { 1 } else { 63 });
        cursor = next_place(cursor, offset, bytes) + bytes;
    }
    assert!(cursor <= 1000 * 64, "{cursor} bytes of memory for 32,000 of data");
}

#[test]
fn a_tensor_at_an_odd_offset_is_still_aligned_in_memory() {
    for offset in [4, 1001, 4095] {
        assert_eq!(next_place(7, offset, 1 << 20) % TENSOR_ALIGNMENT, 0);
    }
    assert_eq!(next_place(7, 4096 * 5 + 1240, 1 << 20), 1240, "as in its file, and so at a multiple of 8");
}

#[test]
fn only_memory_of_its_own_that_nothing_uses_is_given_to_the_next_load() {
    let groups_of = |lengths: &[u64]| -> Vec<Group> {
        lengths.iter().map(|bytes| Group { given: None, bytes: *bytes, places: Vec::new() }).collect()
    };
    let buffer = |len: usize| HostBuffer::new(len).expect("memory");
    let mut groups = groups_of(&[5000, 5000, 6000, 7000]);
    let (mut claimed, lent) = (buffer(6000), HostBuffer::from_vec(vec![0; 7000]));
    let region = claimed.region(0..1).expect("a claim");
    let buffers = vec![buffer(4000).into(), claimed.into(), lent.into(), buffer(5000).into()];
    reuse(&mut groups, buffers, Home::Host);
    assert_eq!(groups.iter().map(|group| group.given.is_some()).collect::<Vec<_>>(), [true, false, false, false]);
    drop(region);
}

#[test]
fn a_slice_lies_in_memory_as_its_first_byte_lies_in_the_file() {
    let tensor = entry(Dtype::F32, &[1000, 1000], 4096);
    let item = sliced(&tensor, &slice(0, 1..1000)).expect("valid");
    let groups = groups(&[item], vec![None], Home::Host, u64::MAX);
    assert_eq!(groups[0].places[0].1.start, 4000);
}

#[test]
fn a_slice_of_the_first_dimension_is_one_range_and_of_the_last_many() {
    let tensor = entry(Dtype::F32, &[4, 6], 1000);
    let rows = sliced(&tensor, &slice(0, 1..3)).expect("valid");
    assert_eq!((rows.rows, rows.shape.as_slice()), (Rows::one(Extent::new(1024, 48)), [2, 6].as_slice()));
    let columns = sliced(&tensor, &slice(1, 2..3)).expect("valid");
    assert!(columns.rows.iter().eq([1008, 1032, 1056, 1080].map(|offset| Extent::new(offset, 4))));
    assert_eq!(columns.rows.bytes(), 16);
}

#[test]
fn slices_that_cannot_be_are_refused_by_name() {
    let tensor = entry(Dtype::F4, &[2, 6], 0);
    for bad in [slice(2, 0..1), slice(0, 1..3), slice(1, 1..4), slice(1, 0..3)] {
        let error = sliced(&tensor, &bad).err().expect("refused");
        assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::InvalidInput, Some("t")));
    }
    assert_eq!(sliced(&tensor, &slice(1, 2..4)).expect("whole bytes").rows.bytes(), 2);
    assert_eq!(sliced(&tensor, &slice(1, 3..3)).expect("empty").rows.bytes(), 0);
}

#[test]
fn what_goes_to_a_gpu_begins_with_little_and_goes_on_with_few_tensors_or_much() {
    let tensors: Vec<ModelEntry> = (0..20_000).map(|number| entry(Dtype::U8, &[65_536], number * 65_536)).collect();
    let items: Vec<Item<'_>> = tensors.iter().map(whole).collect();
    // As the Python package has them: tensors share 2 MiB.
    let of_items = |chunk: &[usize]| Group {
        given: None,
        bytes: 65_536 * chunk.len() as u64,
        places: chunk.iter().map(|item| (*item, 0..65_536)).collect(),
    };
    let groups = || (0..items.len()).collect::<Vec<_>>().chunks(32).map(of_items).collect::<Vec<_>>();
    let tensors_of = |batches: Vec<Vec<Group>>| -> Vec<usize> {
        batches.iter().map(|batch| batch.iter().map(|group| group.places.len()).sum()).collect()
    };
    assert_eq!(tensors_of(batched(groups(), &items, true, true)), [1024, 4096, 4096, 4096, 4096, 2592]);
    assert_eq!(tensors_of(batched(groups(), &items, false, false)), [20_000], "host memory costs nothing until it is touched");
    let large = (0..100).map(|item| Group { given: None, bytes: 100 << 20, places: vec![(item, 0..100 << 20)] }).collect();
    assert_eq!(tensors_of(batched(large, &items, true, true)), [1, 21, 21, 21, 21, 15]);
}
