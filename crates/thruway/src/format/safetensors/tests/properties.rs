//! Properties over random input, with the reference crate as the judge.

use std::collections::{BTreeMap, HashMap};

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::{Index as Pick, select};

use super::names_and_dtypes::reference_dtype;
use super::{file, oracle};
use crate::format::safetensors::{Dtype, Index, TensorSpec, layout};

/// Without files of past failures: a failing input is printed whole, and becomes a test of its own.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn dtype() -> impl Strategy<Value = Dtype> {
    select(&Dtype::ALL[..])
}

fn name() -> impl Strategy<Value = String> {
    let name = prop_oneof![4 => "[a-c]{0,3}(\\.weight)?", 1 => any::<String>()];
    name.prop_filter("no tensor can have this name", |name| name != "__metadata__")
}

/// Tensors with distinct names whose dimensions are drawn from `dims`.
fn specs(dims: impl Strategy<Value = u64> + Clone, count: usize) -> impl Strategy<Value = Vec<TensorSpec>> {
    btree_map(name(), (dtype(), vec(dims, 0..4)), 0..count).prop_map(|tensors| {
        let spec = |(name, (dtype, mut shape)): (String, (Dtype, Vec<u64>))| {
            if dtype.bits() < 8 {
                shape.push(4);
            }
            TensorSpec { name, dtype, shape }
        };
        tensors.into_iter().map(spec).collect()
    })
}

fn usize_of(value: u64) -> usize {
    usize::try_from(value).expect("64-bit machine")
}

/// Bytes for each tensor that differ from tensor to tensor.
fn contents(tensors: &[TensorSpec]) -> Vec<Vec<u8>> {
    let bytes = |(index, spec): (usize, &TensorSpec)| {
        let length = usize_of(spec.dtype.byte_count(&spec.shape).expect("a small shape"));
        (0..length).map(|at| u8::try_from((at * 31 + index * 17) % 251).expect("below 251")).collect()
    };
    tensors.iter().enumerate().map(bytes).collect()
}

/// The file that a layout describes.
fn write(tensors: &[TensorSpec], contents: &[Vec<u8>], metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let layout = layout(tensors, metadata).expect("a good model");
    let mut file = layout.head;
    for (entry, &index) in layout.entries.iter().zip(&layout.order) {
        assert_eq!(entry.extent.offset, file.len() as u64);
        assert_eq!(entry.name, tensors[index].name);
        file.extend_from_slice(&contents[index]);
    }
    assert_eq!(layout.file_bytes, file.len() as u64);
    file
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn small_files_are_byte_for_byte_the_reference_writers(
        tensors in specs(0..6_u64, 8),
        metadata in btree_map(any::<String>(), any::<String>(), 0..2),
    ) {
        let contents = contents(&tensors);
        let views: Vec<_> = tensors.iter().zip(&contents).map(|(spec, bytes)| {
            let shape = spec.shape.iter().map(|&dim| usize_of(dim)).collect();
            let view = safetensors::tensor::TensorView::new(reference_dtype(spec.dtype), shape, bytes).expect("a fitting shape");
            (spec.name.clone(), view)
        }).collect();
        let notes = (!metadata.is_empty()).then(|| metadata.clone().into_iter().collect::<HashMap<_, _>>());
        let theirs = safetensors::serialize(views, notes).expect("the reference writes it");
        prop_assert_eq!(write(&tensors, &contents, &metadata), theirs);
    }

    #[test]
    fn names_shapes_dtypes_and_notes_come_back_as_they_went(
        tensors in specs(prop_oneof![0..4_u64, Just(1 << 11)], 12),
        metadata in btree_map(any::<String>(), any::<String>(), 0..5),
    ) {
        let total: u128 = tensors.iter().map(|spec| u128::from(spec.dtype.byte_count(&spec.shape).unwrap_or(0))).sum();
        prop_assume!(total < 1 << 40);
        let layout = layout(&tensors, &metadata).expect("a good model");
        let header = super::super::parse(&layout.head[8..], layout.file_bytes).expect("our own file");
        prop_assert_eq!(header.data_start, layout.head.len() as u64);
        prop_assert_eq!(header.metadata.unwrap_or_default(), metadata);
        prop_assert_eq!(&header.entries, &layout.entries);
        let mut indices = layout.order.clone();
        indices.sort_unstable();
        prop_assert!(indices.into_iter().eq(0..tensors.len()));
        for (entry, &index) in header.entries.iter().zip(&layout.order) {
            let spec = TensorSpec { name: entry.name.clone(), dtype: entry.dtype, shape: entry.shape.clone() };
            prop_assert_eq!(&spec, &tensors[index]);
        }
    }

    #[test]
    fn an_index_comes_back_as_it_went(
        weight_map in btree_map(any::<String>(), "[a-z]{1,3}(/[a-z\u{e4}]{1,3})?", 1..5),
        total_size in any::<Option<u64>>(),
    ) {
        let index = Index { weight_map, total_size, metadata: serde_json::Map::new() };
        prop_assert_eq!(Index::parse(index.to_json().as_bytes()).expect("our own index"), index);
    }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn large_files_open_in_the_reference_with_equal_tensors_and_the_promised_alignment(
        tensors in specs(prop_oneof![3 => 0..5_u64, 2 => Just(64), 1 => Just(96)], 10),
        big in (dtype(), 1..4_u64),
    ) {
        let mut tensors = tensors;
        tensors.retain(|spec| spec.dtype.byte_count(&spec.shape).is_ok_and(|bytes| bytes < 4 << 20));
        tensors.push(TensorSpec { name: "the big one".to_owned(), dtype: big.0, shape: vec![big.1 << 21, 2] });
        let contents = contents(&tensors);
        let file = write(&tensors, &contents, &BTreeMap::new());
        let header = oracle::check(&file).expect("a plain safetensors file");
        prop_assert_eq!(header.data_start % 4096, 0);
        for entry in &header.entries {
            let elements = (entry.dtype.bits() / 8).max(1);
            prop_assert_eq!(entry.extent.offset % elements, 0, "aligned for its elements");
            if entry.extent.length != 0 && entry.extent.length % 4096 == 0 {
                prop_assert_eq!(entry.extent.offset % 4096, 0, "aligned for direct I/O");
            }
        }
        let opened = safetensors::SafeTensors::deserialize(&file).expect("the reference opens it");
        for (spec, bytes) in tensors.iter().zip(&contents) {
            prop_assert_eq!(opened.tensor(&spec.name).expect("the tensor is there").data(), bytes.as_slice());
        }
    }
}

/// Pieces of headers, good and bad.
const TOKENS: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    " ",
    "\n",
    "0",
    "1",
    "4",
    "-",
    ".",
    "e9",
    "null",
    "true",
    "NaN",
    "\"\"",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"__metadata__\"",
    "\"U8\"",
    "\"F32\"",
    "\"F4\"",
    "\"a\":",
    "[0,4]",
    "[0,0]",
    "{}",
    "[]",
    "18446744073709551615",
    "1e999",
    "\\ud800",
    "\\u0000",
    "\u{e9}",
    "\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
    "\"dtype\":{\"U8\":null},",
    "\0",
];

/// One change to a text.
#[derive(Clone, Debug)]
enum Edit {
    Insert(Pick, &'static str),
    Delete(Pick, usize),
    Replace(Pick, u8),
    Repeat(Pick, usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        3 => (any::<Pick>(), select(&TOKENS[..])).prop_map(|(at, token)| Edit::Insert(at, token)),
        2 => (any::<Pick>(), 1..8_usize).prop_map(|(at, length)| Edit::Delete(at, length)),
        3 => (any::<Pick>(), prop_oneof![select(&b"0123456789-.eE{}[],:\" "[..]), any::<u8>()]).prop_map(|(at, byte)| Edit::Replace(at, byte)),
        1 => (any::<Pick>(), 1..60_usize).prop_map(|(at, length)| Edit::Repeat(at, length)),
    ]
}

fn apply(text: &mut Vec<u8>, edit: &Edit) {
    let at = |pick: &Pick| pick.index(text.len().max(1)).min(text.len());
    match edit {
        Edit::Insert(pick, token) => {
            let at = at(pick);
            text.splice(at..at, token.bytes());
        }
        Edit::Delete(pick, length) => {
            let at = at(pick);
            text.drain(at..(at + length).min(text.len()));
        }
        Edit::Replace(pick, byte) => {
            let at = at(pick);
            if let Some(old) = text.get_mut(at) {
                *old = *byte;
            }
        }
        Edit::Repeat(pick, length) => {
            let at = at(pick);
            let piece = text[at..(at + length).min(text.len())].to_vec();
            text.splice(at..at, piece);
        }
    }
}

/// The fields of an entry that fits its place, and how the text may leave the rules.
#[derive(Clone, Debug)]
struct Draft {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<u64>,
    shift: i64,
    style: u8,
}

fn draft() -> impl Strategy<Value = Draft> {
    let name = select(&["a", "b", "c", "d", "e", "", "__metadata__ ", "\\u0061", "\\ud83d\\ude00", "dtype"][..]);
    let shift = prop_oneof![12 => Just(0_i64), 1 => -4..5_i64];
    (name, dtype(), vec(0..4_u64, 0..3), shift, 0..24_u8).prop_map(|(name, dtype, shape, shift, style)| Draft {
        name,
        dtype,
        shape,
        shift,
        style,
    })
}

/// A header that is often good, and its number of data bytes.
fn compose(drafts: &[Draft], notes: &str) -> (String, u64) {
    let mut position = 0_u64;
    let mut parts = Vec::new();
    for Draft { name, dtype, shape, shift, style } in drafts {
        let mut shape = shape.clone();
        if dtype.bits() < 8 && *style != 0 {
            shape.push(4);
        }
        let begin = position.saturating_add_signed(*shift);
        position += dtype.byte_count(&shape).unwrap_or(1);
        let (dtype, shape) = (format!(r#""{dtype}""#), format!("{shape:?}"));
        let offsets = format!("[{begin},{position}]");
        parts.push(match style {
            1 => format!(r#""{name}":[{dtype},{shape},{offsets}]"#),
            2 => format!(r#""{name}":{{"dtype":{{{dtype}:null}},"shape":{shape},"data_offsets":{offsets}}}"#),
            3 => format!(r#""{name}":{{"dtype":{dtype},"shape":{shape},"shape":{shape},"data_offsets":{offsets}}}"#),
            4 => format!(r#""{name}":{{"x":{notes},"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#),
            5 => format!(r#""{name}":{{"dtype":{dtype},"data_offsets":{offsets}}}"#),
            6..12 => format!("\"{name}\" :\n{{\"data_offsets\":{offsets},\t\"shape\":{shape}, \"dtype\":{dtype}}}"),
            _ => format!(r#""{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#),
        });
    }
    if !notes.is_empty() {
        parts.insert(parts.len() / 2, format!(r#""__metadata__":{notes}"#));
    }
    (format!("{{{}}}", parts.join(",")), position)
}

proptest! {
    #![proptest_config(config(4096))]

    #[test]
    fn our_verdict_on_composed_headers_is_the_references_or_a_documented_difference(
        drafts in vec(draft(), 0..5),
        notes in select(&["", "", "", "{}", "null", r#"{"k":"v"}"#, r#"{"k":"v","k":"w"}"#, r#"{"k":1}"#, "[]", "1e999", r#""x""#][..]),
        extra in prop_oneof![8 => Just(0_u64), 1 => 1..3_u64],
        cut in prop_oneof![8 => Just(0_u64), 1 => 1..3_u64],
    ) {
        let (text, data_bytes) = compose(&drafts, notes);
        let data = vec![0; usize_of((data_bytes + extra).saturating_sub(cut))];
        oracle::check(&file(text.as_bytes(), &data));
    }

    #[test]
    fn our_verdict_on_damaged_headers_is_the_references_or_a_documented_difference(
        tensors in specs(0..4_u64, 4),
        metadata in btree_map("[a-b]{0,2}", "[a-b]{0,2}", 0..3),
        edits in vec(edit(), 1..4),
    ) {
        let layout = layout(&tensors, &metadata).expect("a good model");
        let mut text = layout.head[8..].to_vec();
        for edit in &edits {
            apply(&mut text, edit);
        }
        let data = vec![0; usize_of(layout.file_bytes) - layout.head.len()];
        oracle::check(&file(&text, &data));
    }

    #[test]
    fn our_verdict_on_random_pieces_of_headers_is_the_references(
        tokens in vec(select(&TOKENS[..]), 0..24),
        length in 0..8_usize,
    ) {
        oracle::check(&file(tokens.concat().as_bytes(), &vec![0; length]));
    }

    #[test]
    fn any_bytes_at_all_get_the_same_verdict_and_never_a_panic(bytes in vec(any::<u8>(), 0..80)) {
        oracle::check(&bytes);
        Index::parse(&bytes).expect_err("random bytes are no index");
    }
}
