//! Layouts: what the writer promises about places, and what it refuses.

use std::collections::BTreeMap;

use crate::base::error::ErrorKind;
use crate::format::safetensors::{ALIGNED_FROM_BYTES, Dtype, HEADER_BYTES_MAX, TensorSpec, layout, parse};

fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

fn none() -> BTreeMap<String, String> {
    BTreeMap::new()
}

#[test]
fn large_files_put_what_can_be_aligned_first_and_leave_no_hole() {
    let tensors = [
        spec("bias", Dtype::F32, &[3]),
        spec("half", Dtype::BF16, &[1024, 512]),
        spec("table", Dtype::F32, &[1024, 8]),
        spec("empty", Dtype::F64, &[0, 4]),
        spec("flags", Dtype::U8, &[4096]),
        spec("scale", Dtype::F64, &[]),
    ];
    let layout = layout(&tensors, &none()).expect("a good model");
    let names: Vec<&str> = layout.entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["table", "half", "flags", "empty", "scale", "bias"]);
    assert_eq!(layout.head.len() % 4096, 0);
    assert!(layout.entries[..3].iter().all(|entry| entry.extent.offset % 4096 == 0 && entry.extent.length % 4096 == 0));
    assert!(layout.order.iter().zip(&layout.entries).all(|(&index, entry)| tensors[index].name == entry.name));
    let header = parse(&layout.head[8..], layout.file_bytes).expect("our own file");
    assert_eq!((header.entries, header.metadata), (layout.entries, None));
}

#[test]
fn the_arrangement_changes_right_above_one_mebibyte() {
    for (bytes, aligned) in [(ALIGNED_FROM_BYTES, false), (ALIGNED_FROM_BYTES + 1, true)] {
        let layout = layout(&[spec("w", Dtype::U8, &[bytes])], &none()).expect("one tensor");
        assert_eq!(layout.head.len().is_multiple_of(4096), aligned, "{bytes} bytes");
        assert_eq!(layout.head.len() % 8, 0);
    }
}

#[test]
fn the_order_of_the_input_does_not_show_in_the_file() {
    let mut tensors = vec![spec("b", Dtype::U8, &[1]), spec("a", Dtype::U8, &[1]), spec("c", Dtype::I64, &[0])];
    let first = layout(&tensors, &none()).expect("three tensors");
    tensors.reverse();
    assert_eq!(layout(&tensors, &none()).expect("the same three").head, first.head);
}

#[test]
fn no_tensors_at_all_make_a_file_of_sixteen_bytes_that_reads_back() {
    let layout = layout(&[], &none()).expect("an empty file");
    assert_eq!((layout.head.as_slice(), layout.file_bytes), (&b"\x08\0\0\0\0\0\0\0{}      "[..], 16));
}

#[test]
fn what_no_reader_could_open_is_refused_before_it_is_written() {
    let refused = [
        (vec![spec("__metadata__", Dtype::U8, &[1])], "__metadata__"),
        (vec![spec("a", Dtype::U8, &[1]), spec("a", Dtype::F32, &[1])], "same name"),
        (vec![spec("a", Dtype::F4, &[3])], "12 bits"),
        (vec![spec("a", Dtype::F32, &[1 << 32, 1 << 32])], "overflows"),
        (vec![spec("a", Dtype::U64, &[1 << 60])], "overflows"),
    ];
    for (tensors, words) in refused {
        let error = layout(&tensors, &none()).expect_err(words);
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.message().contains(words), "{error}");
        assert_eq!(error.context("tensor"), Some(tensors[0].name.as_str()));
    }
    let tensors: Vec<TensorSpec> = (0..9).map(|index| spec(&index.to_string(), Dtype::U8, &[(1 << 61) - 1])).collect();
    assert!(layout(&tensors, &none()).expect_err("2^64 bytes").message().contains("too large"));
}

#[test]
fn a_header_beyond_the_limit_is_refused_because_readers_refuse_it() {
    let text = |length: u64| BTreeMap::from([("k".to_owned(), "x".repeat(usize::try_from(length).expect("64-bit machine")))]);
    // The JSON around the text takes 25 characters.
    let most = layout(&[], &text(HEADER_BYTES_MAX - 25)).expect("exactly the limit");
    assert_eq!(most.head.len() as u64, 8 + HEADER_BYTES_MAX);
    // Not `expect_err`: its panic would print 100 MB.
    let Err(error) = layout(&[], &text(HEADER_BYTES_MAX - 24)) else { panic!("one byte more was accepted") };
    assert!(error.message().contains("100000000"), "{error}");
}
