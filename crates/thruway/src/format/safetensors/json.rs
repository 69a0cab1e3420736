//! What the header and the index need beyond plain JSON reading.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::base::error::{Error, ErrorKind, printable};

/// Any JSON value, checked and thrown away.
///
/// serde's own `IgnoredAny` lets serde_json skip text without looking at it closely: halves of surrogate pairs
/// and numbers beyond every range pass. Here a value that is not needed has to be as valid as one that is,
/// and nesting is bounded by serde_json's recursion limit, so that no text can overflow the stack.
pub(super) struct Discard;

impl<'de> Deserialize<'de> for Discard {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DiscardVisitor)
    }
}

struct DiscardVisitor;

impl<'de> Visitor<'de> for DiscardVisitor {
    type Value = Discard;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_str<E>(self, _: &str) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_unit<E>(self) -> Result<Discard, E> {
        Ok(Discard)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Discard, A::Error> {
        while items.next_element::<Discard>()?.is_some() {}
        Ok(Discard)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Discard, A::Error> {
        while pairs.next_entry::<Discard, Discard>()?.is_some() {}
        Ok(Discard)
    }
}

/// The failure to read `text`, which begins at `text_offset` of its file, as `what`. The fact `offset` says where in
/// the file reading stopped, in bytes.
pub(super) fn json_error(what: &str, text: &str, text_offset: usize, error: &serde_json::Error) -> Error {
    let reason = reason(error);
    let verdict = if error.is_data() { "is not what it should be" } else { "is not valid JSON" };
    Error::new(ErrorKind::Malformed, format!("{what} {verdict}: {}", printable(&reason)))
        .with("offset", text_offset + byte_position(text, error.line(), error.column()))
}

/// What serde_json says without the place, which is given once, as a fact of its own.
pub(super) fn reason(error: &serde_json::Error) -> String {
    let full = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    full.strip_suffix(&place).unwrap_or(&full).to_owned()
}

/// The byte position of a line and column, both counted from 1, columns in bytes.
fn byte_position(text: &str, line: usize, column: usize) -> usize {
    let lines_before = text.split_inclusive('\n').take(line.saturating_sub(1));
    let start: usize = lines_before.map(str::len).sum();
    (start + column.saturating_sub(1)).min(text.len())
}

/// A count with its unit, in the number that English wants: `1 byte`, `2 bytes`.
pub(super) fn bytes(count: impl Into<u128>) -> String {
    match count.into() {
        1 => "1 byte".to_owned(),
        count => format!("{count} bytes"),
    }
}
