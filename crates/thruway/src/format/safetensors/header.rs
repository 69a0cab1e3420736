//! Reading a header: from the JSON text to checked entries.
//!
//! Two steps, so that each failure has the words that fit it. First the JSON is read as a stream, straight
//! into flat records; nothing is allocated from a number that the text claims, and no tree is built, so the
//! memory that a hostile header can take is a small multiple of its length (a shape of one-digit dimensions is
//! the worst: eight bytes for two). Then the records are sorted by place and checked one against the next.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::dtype::{Dtype, shape_text};
use super::json::{Discard, bytes, json_error};
use super::sniff::{FileKind, sniff};
use crate::base::error::{Error, ErrorKind, Result, printable};
use crate::base::units::Extent;

/// The length of the number that a file begins with, in bytes.
pub const PREFIX_BYTES: u64 = 8;

/// The longest JSON text that a header may have, in bytes: the limit of the reference implementation.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The name under which a header keeps the file's own notes; no tensor can have it.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// What a file's header says, checked against the file's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Every tensor, by its place in the file. Where several begin at the same byte (all but the last of them
    /// are empty), the empty ones come first, ordered by name.
    pub entries: Vec<Entry>,
    /// The file's own notes; `None` if the header has none, or has `null` for them.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Where the data begins, in bytes from the file's start.
    pub data_start: u64,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The tensor's name: any Unicode text, even empty. Escape it before printing.
    pub name: String,
    /// What its elements are.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; none for a single number.
    pub shape: Vec<u64>,
    /// Its bytes, counted from the start of the file, not of the data.
    pub extent: Extent,
}

/// Reads the length of the header's JSON text, in bytes.
///
/// `prefix` is the beginning of the file: eight bytes, or all of a shorter file. More are welcome: they help
/// to say what the file is if it is something else. `file_bytes` is the whole file's size.
///
/// # Errors
///
/// - [`ErrorKind::UnexpectedEof`] if the file ends within the number or within the header;
/// - [`ErrorKind::Malformed`] if the header would be longer than [`HEADER_BYTES_MAX`], or the first bytes
///   belong to another format;
/// - [`ErrorKind::InvalidInput`] if `prefix` is shorter than eight bytes although the file is not.
pub fn header_length(prefix: &[u8], file_bytes: u64) -> Result<u64> {
    if file_bytes < PREFIX_BYTES {
        return Err(too_short(prefix, file_bytes));
    }
    let Some((number, _)) = prefix.split_first_chunk::<8>() else {
        return Err(Error::new(ErrorKind::InvalidInput, "a header's length takes the first 8 bytes of the file")
            .with("length", prefix.len()));
    };
    let length = u64::from_le_bytes(*number);
    if length > HEADER_BYTES_MAX {
        return Err(another_format(prefix).unwrap_or_else(|| over_limit(length)));
    }
    let header_end = PREFIX_BYTES + length;
    if header_end > file_bytes {
        let missing = header_end - file_bytes;
        let message = format!("the file is too short by {} or more: it ends within its header", bytes(missing));
        return Err(another_format(prefix)
            .unwrap_or_else(|| Error::new(ErrorKind::UnexpectedEof, message))
            .with("expected_bytes", header_end)
            .with("actual_bytes", file_bytes));
    }
    Ok(length)
}

/// Reads a header: `text` is exactly its JSON, as many bytes from [`PREFIX_BYTES`] on as [`header_length`] said,
/// and `file_bytes` the whole file's size.
///
/// The entries of an accepted header are packed: the first begins at [`Header::data_start`], each one where the
/// one before it ends, and the last ends with the file.
///
/// # Errors
///
/// - [`ErrorKind::Malformed`] if the text breaks a rule of the format or the file goes on after the last
///   tensor;
/// - [`ErrorKind::UnexpectedEof`] if the file ends before its last tensor does.
///
/// Where one tensor is to blame, the fact `tensor` names it. For text that is not the JSON that it should be,
/// `offset` is the place in the file.
pub fn parse(text: &[u8], file_bytes: u64) -> Result<Header> {
    let length = text.len() as u64;
    if length > HEADER_BYTES_MAX {
        return Err(over_limit(length));
    }
    let records = read(text)?;
    let data_start = PREFIX_BYTES + length;
    let data_bytes = check(&records.tensors)?;
    check_size(&records.tensors, data_start, data_bytes, file_bytes)?;
    let place = |record: Record| Entry {
        name: record.name,
        dtype: record.dtype,
        shape: record.shape,
        extent: Extent::new(data_start + record.begin, record.end - record.begin),
    };
    Ok(Header { entries: records.tensors.into_iter().map(place).collect(), metadata: records.metadata, data_start })
}

fn too_short(prefix: &[u8], file_bytes: u64) -> Error {
    let missing = bytes(PREFIX_BYTES - file_bytes);
    let message = match file_bytes {
        0 => "the file is empty".to_owned(),
        _ => format!("the file is too short by {missing} or more: it ends within the length of its header"),
    };
    let error = Error::new(ErrorKind::UnexpectedEof, message).with("actual_bytes", file_bytes);
    match sniff(prefix).remedy() {
        Some(remedy) => error.with_hint(remedy),
        None => error,
    }
}

/// The refusal of a file that is recognisably something else.
fn another_format(prefix: &[u8]) -> Option<Error> {
    let kind = sniff(prefix);
    if matches!(kind, FileKind::Safetensors | FileKind::Unknown) {
        return None;
    }
    let error = Error::new(ErrorKind::Malformed, format!("not a safetensors file: this is {}", kind.describe()));
    Some(match kind.remedy() {
        Some(remedy) => error.with_hint(remedy),
        None => error,
    })
}

fn over_limit(length: u64) -> Error {
    let message = format!("the header is too long: {}, and the limit is {HEADER_BYTES_MAX}", bytes(length));
    Error::new(ErrorKind::Malformed, message)
}

/// What the JSON says about one tensor; offsets count from the start of the data.
struct Record {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

/// Everything that the JSON says, sorted by place.
struct Records {
    tensors: Vec<Record>,
    metadata: Option<BTreeMap<String, String>>,
}

/// Reads the JSON and looks for names given twice.
fn read(text: &[u8]) -> Result<Records> {
    let text = std::str::from_utf8(text).map_err(|error| {
        Error::new(ErrorKind::Malformed, "the header is not UTF-8 text").with("offset", PREFIX_BYTES + error.valid_up_to() as u64)
    })?;
    let mut reader = Reader::default();
    let mut json = serde_json::Deserializer::from_str(text);
    if let Err(error) = (&mut reader).deserialize(&mut json).and_then(|()| json.end()) {
        return Err(reader.blame(json_error("the header", text, 8, &error)));
    }
    let mut names = HashSet::with_capacity(reader.tensors.len());
    if let Some(twice) = reader.tensors.iter().find(|record| !names.insert(record.name.as_str())) {
        return Err(Error::new(ErrorKind::Malformed, "the header lists a tensor twice").with_tensor(&twice.name));
    }
    let mut tensors = reader.tensors;
    tensors.sort_unstable_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    Ok(Records { tensors, metadata: reader.metadata })
}

/// Checks that each tensor's bytes fit its shape and that they lie one after the other; gives their number.
fn check(tensors: &[Record]) -> Result<u64> {
    let mut position = 0;
    for (index, record) in tensors.iter().enumerate() {
        let refuse = |message: String| {
            Error::new(ErrorKind::Malformed, message)
                .with_tensor(&record.name)
                .with("dtype", record.dtype)
                .with("shape", shape_text(&record.shape))
                .with("data_offsets", format_args!("[{}, {}]", record.begin, record.end))
        };
        if record.end < record.begin {
            return Err(refuse("the tensor ends before it begins".to_owned()));
        }
        if record.begin != position {
            let before = index.checked_sub(1).map(|previous| printable(&tensors[previous].name));
            return Err(refuse(misplaced(record.begin, position, before)));
        }
        let needed = record.dtype.size_of(&record.shape).map_err(|fault| refuse(fault.to_string()))?;
        let given = record.end - record.begin;
        if needed != given {
            return Err(refuse(format!("the shape takes {}, but the header gives the tensor {given}", bytes(needed))));
        }
        position = record.end;
    }
    Ok(position)
}

/// Why a tensor cannot begin at `begin` when the data before it ends at `position`.
fn misplaced(begin: u64, position: u64, before: Option<String>) -> String {
    match before {
        None => format!("the first tensor must begin at 0 of the data, not at {begin}"),
        Some(name) if begin < position => format!("the tensor overlaps tensor '{name}', which ends at {position} of the data"),
        Some(name) => format!("there is a hole of {} between the tensor and '{name}' before it", bytes(begin - position)),
    }
}

/// Checks that the file ends where the last tensor does.
fn check_size(tensors: &[Record], data_start: u64, data_bytes: u64, file_bytes: u64) -> Result<()> {
    // A header may claim nearly 2^64 bytes of data; the sum with its own length needs one bit more.
    let (expected, actual) = (u128::from(data_start) + u128::from(data_bytes), u128::from(file_bytes));
    if expected == actual {
        return Ok(());
    }
    let error = if expected > actual {
        let message = format!("the file is too short by {}", bytes(expected - actual));
        let error = Error::new(ErrorKind::UnexpectedEof, message);
        match tensors.iter().find(|record| u128::from(data_start) + u128::from(record.end) > actual) {
            Some(cut) => error.with_tensor(&cut.name),
            None => error,
        }
    } else {
        let (extra, noun) = (actual - expected, if actual - expected == 1 { "byte" } else { "bytes" });
        Error::new(ErrorKind::Malformed, format!("the file has {extra} extra {noun} after the last tensor"))
    };
    Err(error.with("expected_bytes", expected).with("actual_bytes", actual))
}

/// Collects what the JSON says, and remembers where it is for the sake of error messages.
#[derive(Default)]
struct Reader {
    tensors: Vec<Record>,
    metadata: Option<BTreeMap<String, String>>,
    metadata_seen: bool,
    /// The tensor whose entry is being read.
    tensor: Option<String>,
    /// The field of that entry that is being read, or `__metadata__`.
    field: Option<&'static str>,
}

impl Reader {
    /// Adds to a failure what was being read when it came up.
    fn blame(&self, error: Error) -> Error {
        let error = match &self.tensor {
            Some(name) => error.with_tensor(name),
            None => error,
        };
        match self.field {
            Some(field) => error.with("field", field),
            None => error,
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Reader {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                if self.metadata_seen {
                    return Err(A::Error::custom("the key '__metadata__' is given twice"));
                }
                self.metadata_seen = true;
                self.field = Some(METADATA_KEY);
                self.metadata = map.next_value::<Option<Notes>>()?.map(|notes| notes.0);
                self.field = None;
            } else {
                self.tensor = Some(name);
                map.next_value_seed(EntrySeed(self))?;
            }
        }
        Ok(())
    }
}

/// Reads one tensor's entry into the reader.
struct EntrySeed<'a>(&'a mut Reader);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let reader = self.0;
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<Field>()? {
            reader.field = field.name();
            let first = match field {
                Field::Dtype => dtype.replace(map.next_value::<DtypeValue>()?.0).is_none(),
                Field::Shape => shape.replace(map.next_value::<Vec<u64>>()?).is_none(),
                Field::Offsets => offsets.replace(map.next_value::<Offsets>()?).is_none(),
                // What is not used cannot be ambiguous, so it may be given twice, as in the reference.
                Field::Other => map.next_value::<Discard>().map(|Discard| true)?,
            };
            if !first {
                return Err(A::Error::custom("a field is given twice"));
            }
            reader.field = None;
        }
        let missing = |field: &str| A::Error::custom(format_args!("the field '{field}' is missing"));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let mut shape = shape.ok_or_else(|| missing("shape"))?;
        let Offsets(begin, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        // Growing left up to twice the room that is needed, and headers can list millions of shapes.
        shape.shrink_to_fit();
        let name = reader.tensor.take().unwrap_or_default();
        reader.tensors.push(Record { name, dtype, shape, begin, end });
        Ok(())
    }
}

/// A key of a tensor's entry, without its text.
enum Field {
    Dtype,
    Shape,
    Offsets,
    Other,
}

impl Field {
    fn name(&self) -> Option<&'static str> {
        match self {
            Self::Dtype => Some("dtype"),
            Self::Shape => Some("shape"),
            Self::Offsets => Some("data_offsets"),
            Self::Other => None,
        }
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FieldVisitor)
    }
}

struct FieldVisitor;

impl Visitor<'_> for FieldVisitor {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E>(self, name: &str) -> Result<Field, E> {
        Ok(match name {
            "dtype" => Field::Dtype,
            "shape" => Field::Shape,
            "data_offsets" => Field::Offsets,
            _ => Field::Other,
        })
    }
}

struct DtypeValue(Dtype);

impl<'de> Deserialize<'de> for DtypeValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(DtypeVisitor)
    }
}

struct DtypeVisitor;

impl Visitor<'_> for DtypeVisitor {
    type Value = DtypeValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a dtype")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<DtypeValue, E> {
        let unknown = || E::custom(format_args!("unknown dtype '{}'", printable(name)));
        Dtype::from_name(name).map(DtypeValue).ok_or_else(unknown)
    }
}

/// `data_offsets`: where a tensor begins and ends, counted from the start of the data.
struct Offsets(u64, u64);

impl<'de> Deserialize<'de> for Offsets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OffsetsVisitor)
    }
}

struct OffsetsVisitor;

impl<'de> Visitor<'de> for OffsetsVisitor {
    type Value = Offsets;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of exactly two numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Offsets, A::Error> {
        let begin = items.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
        let end = items.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
        match items.next_element::<Discard>()? {
            None => Ok(Offsets(begin, end)),
            Some(_) => Err(A::Error::invalid_length(3, &self)),
        }
    }
}

/// The value of `__metadata__`: text to text, each key once.
struct Notes(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Notes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NotesVisitor)
    }
}

struct NotesVisitor;

impl<'de> Visitor<'de> for NotesVisitor {
    type Value = Notes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Notes, A::Error> {
        let mut notes = Vec::new();
        while let Some(note) = map.next_entry::<String, String>()? {
            notes.push(note);
        }
        // Sorted as a whole: with millions of keys that takes half the time of putting one by one into the map.
        notes.sort_unstable();
        if let Some(pair) = notes.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(A::Error::custom(format_args!("the key '{}' is given twice", printable(&pair[0].0))));
        }
        Ok(Notes(notes.into_iter().collect()))
    }
}
