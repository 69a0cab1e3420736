//! Our verdict on a file beside the reference crate's.
//!
//! The fuzz targets compile this very file too, so that tests and fuzzing agree on what counts as a difference.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::format::safetensors::{Header, PREFIX_BYTES, header_length, parse};

/// Reads a whole file as a program would: its first bytes, then the header, never the data.
pub(super) fn read(file: &[u8]) -> Result<Header, crate::base::error::Error> {
    let file_bytes = file.len() as u64;
    let length = header_length(&file[..file.len().min(64)], file_bytes)?;
    let end = usize::try_from(PREFIX_BYTES + length).expect("the length was checked against a file in memory");
    parse(&file[8..end], file_bytes)
}

/// Reads a file with both, and panics unless the verdicts agree (or differ as documented) and an accepted file has
/// the same tensors in both and keeps what [`parse`] promises.
pub(super) fn check(file: &[u8]) -> Option<Header> {
    let ours = read(file);
    if let Ok(header) = &ours {
        assert_invariants(header, file.len() as u64);
    }
    if let Some(difference) = header_text(file).and_then(documented_difference) {
        assert!(ours.is_err(), "accepted in spite of {difference}");
        return None;
    }
    // The reference adds up sizes without a check: beyond 64 bits it would panic or wrap instead of refusing.
    let claimed = ours.as_ref().err().and_then(|error| error.context("expected_bytes")?.parse::<u128>().ok());
    if claimed.is_some_and(|bytes| bytes > u128::from(u64::MAX)) {
        return None;
    }
    match (ours, safetensors::SafeTensors::read_metadata(file)) {
        (Ok(header), Ok((length, reference))) => {
            assert_same(&header, length, &reference);
            Some(header)
        }
        (Err(_), Err(_)) => None,
        (Ok(header), Err(error)) => panic!("the reference refuses ({error}) what we accept: {header:?}"),
        (Err(error), Ok((_, reference))) => panic!("we refuse ({error}) what the reference accepts: {reference:?}"),
    }
}

/// The JSON text of a file's header, if the file has all of it.
fn header_text(file: &[u8]) -> Option<&[u8]> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

/// What [`parse`] promises about an accepted header.
fn assert_invariants(header: &Header, file_bytes: u64) {
    let mut position = header.data_start;
    for entry in &header.entries {
        assert_eq!(entry.extent.offset, position, "tensors lie one after the other");
        assert_eq!(entry.dtype.byte_count(&entry.shape).ok(), Some(entry.extent.length), "sizes fit shapes");
        position += entry.extent.length;
    }
    assert_eq!(position, file_bytes, "the last tensor ends with the file");
    let place = |index: usize| (header.entries[index].extent, header.entries[index].name.as_str());
    assert!((1..header.entries.len()).all(|index| place(index - 1) < place(index)), "the order is by place, then name");
}

fn assert_same(header: &Header, length: usize, reference: &safetensors::tensor::Metadata) {
    assert_eq!(header.data_start, PREFIX_BYTES + length as u64);
    let tensors = reference.tensors();
    assert_eq!(header.entries.len(), tensors.len());
    for entry in &header.entries {
        let theirs = tensors[&entry.name];
        assert_eq!(entry.dtype.name(), theirs.dtype.to_string());
        assert!(entry.shape.iter().copied().eq(theirs.shape.iter().map(|&dim| dim as u64)));
        let (begin, end) = (theirs.data_offsets.0 as u64, theirs.data_offsets.1 as u64);
        assert_eq!((entry.extent.offset - header.data_start, entry.extent.length), (begin, end - begin));
    }
    let notes = reference.metadata().as_ref().map(|map| map.clone().into_iter().collect::<BTreeMap<_, _>>());
    assert_eq!(header.metadata, notes);
}

/// Where we are stricter than the reference on purpose: the module documentation of the format lists the same.
fn documented_difference(text: &[u8]) -> Option<&'static str> {
    let Ok(Tree::Object(pairs)) = serde_json::from_slice(text) else { return None };
    if has_duplicates(&pairs) {
        return Some("a name given twice");
    }
    pairs.iter().find_map(|(name, value)| match (name.as_str(), value) {
        ("__metadata__", Tree::Object(notes)) => has_duplicates(notes).then_some("a key given twice"),
        (_, Tree::Object(fields)) => fields
            .iter()
            .any(|(field, value)| field == "dtype" && matches!(value, Tree::Object(_)))
            .then_some("a dtype written as an object"),
        ("__metadata__", _) => None,
        (_, Tree::List) => Some("an entry written as a list"),
        _ => None,
    })
}

fn has_duplicates(pairs: &[(String, Tree)]) -> bool {
    let mut seen = HashSet::new();
    !pairs.iter().all(|(key, _)| seen.insert(key))
}

/// JSON with every key kept, even if it is given twice.
enum Tree {
    Object(Vec<(String, Tree)>),
    List,
    Other,
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_str<E>(self, _: &str) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        while items.next_element::<Tree>()?.is_some() {}
        Ok(Tree::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Tree::Object(pairs))
    }
}
