//! The index of a model that is spread over several files, and the names of those files.
//!
//! ```text
//! model.safetensors.index.json:
//! {
//!   "metadata": { "total_size": 141107412992 },
//!   "weight_map": {
//!     "lm_head.weight": "model-00030-of-00030.safetensors",
//!     "model.embed_tokens.weight": "model-00001-of-00030.safetensors",
//!     …
//!   }
//! }
//! ```
//!
//! Indexes in the wild are looser than their description: `metadata` is missing, or lacks `total_size`, or has it
//! as a float, or a wrong one. None of that keeps a model from being loaded, so none of it is refused. What is no JSON, or
//! endless, is refused, and a name that leads out of the model's directory is: a download must not be able to point at
//! other files.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::json::{Discard, bytes, json_error, reason};
use crate::base::error::{Error, ErrorKind, Result, printable};

/// The longest index that is read, in bytes. The largest ones of published models have about 10 MB.
pub const INDEX_BYTES_MAX: u64 = 100_000_000;

/// The longest `metadata` that is kept, in bytes of text. Published models have a few dozen; in memory small JSON values
/// take ten times their text, which of the longest index would be a gigabyte.
pub const INDEX_METADATA_BYTES_MAX: usize = 1 << 20;

const TOTAL_SIZE: &str = "total_size";

/// Which file of a model holds which tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index {
    /// For each tensor the name of its file, relative to the index's directory.
    pub weight_map: BTreeMap<String, String>,
    /// The bytes of all tensors together, as the index claims. Often wrong in the wild: warn, do not fail.
    pub total_size: Option<u64>,
    /// The other notes of the index.
    pub metadata: Map<String, Value>,
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Malformed`] if the text is not the JSON that it should be, a key is given twice, there is no
    /// `weight_map` or an empty one, the `metadata` is longer than [`INDEX_METADATA_BYTES_MAX`], or a file name could lead
    /// out of the directory.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let length = text.len() as u64;
        if length > INDEX_BYTES_MAX {
            let message = format!("the index is too long: {}, and the limit is {INDEX_BYTES_MAX}", bytes(length));
            return Err(Error::new(ErrorKind::Malformed, message));
        }
        let text = std::str::from_utf8(text).map_err(|error| {
            Error::new(ErrorKind::Malformed, "the index is not UTF-8 text").with("offset", error.valid_up_to())
        })?;
        let mut reader = Reader::default();
        let mut json = serde_json::Deserializer::from_str(text);
        if let Err(error) = (&mut reader).deserialize(&mut json).and_then(|()| json.end()) {
            return Err(json_error("the index", text, 0, &error));
        }
        let refuse = |message| Err(Error::new(ErrorKind::Malformed, message));
        let weight_map = match reader.weight_map {
            None => return refuse("the index has no weight_map"),
            Some(map) if map.is_empty() => return refuse("the index's weight_map is empty"),
            Some(map) => map,
        };
        for (tensor, file) in &weight_map {
            check_file_name(file).map_err(|error| error.with_tensor(tensor))?;
        }
        let mut metadata = reader.metadata.unwrap_or_default();
        let total_size = metadata.get(TOTAL_SIZE).and_then(whole_number);
        if total_size.is_some() {
            metadata.remove(TOTAL_SIZE);
        }
        Ok(Self { weight_map, total_size, metadata })
    }

    /// The files of the model, each once, by name.
    pub fn files(&self) -> Vec<&str> {
        let mut files: Vec<&str> = self.weight_map.values().map(String::as_str).collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// The index as text, written as huggingface_hub writes it: two spaces of indentation, ASCII only,
    /// `total_size` before the other notes, no line break at the end. Tensors are in the order of their names.
    pub fn to_json(&self) -> String {
        let mut out = Vec::new();
        let mut serializer = serde_json::Serializer::with_formatter(&mut out, Ascii(PrettyFormatter::with_indent(b"  ")));
        let written = Document(self).serialize(&mut serializer);
        debug_assert!(written.is_ok(), "writing to memory cannot fail, and every key is text");
        String::from_utf8_lossy(&out).into_owned()
    }
}

/// A number that is whole even if it is written as a float. Beyond 2^53 floats skip numbers, so those do not count.
fn whole_number(value: &Value) -> Option<u64> {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    value.as_u64().or_else(|| {
        let float = value.as_f64().filter(|float| float.fract() == 0.0 && (0.0..=EXACT_MAX).contains(float))?;
        format!("{float:.0}").parse().ok()
    })
}

/// Refuses names that are anything else than a plain path downwards from the index's directory.
fn check_file_name(file: &str) -> Result<()> {
    let reason = if file.is_empty() {
        "is empty"
    } else if file.contains('\0') {
        "contains a zero byte"
    } else if file.starts_with('/') {
        "is absolute"
    } else if file.split('/').any(|part| part == "..") {
        "leads out of the directory"
    } else if file.split('/').any(|part| part.is_empty() || part == ".") {
        "is not a plain path"
    } else {
        return Ok(());
    };
    // Not the fact `file`: that one names the index itself, and the first value given for a fact stays.
    Err(Error::new(ErrorKind::Malformed, format!("the index names the file '{}', which {reason}", printable(file))))
}

/// The notes that a text holds, if it is not too long.
fn notes(text: &RawValue) -> std::result::Result<Option<Map<String, Value>>, String> {
    let length = text.get().len();
    if length > INDEX_METADATA_BYTES_MAX {
        let (length, most) = (bytes(length as u64), bytes(INDEX_METADATA_BYTES_MAX as u64));
        return Err(format!("the metadata is too long: {length}, and the limit is {most}"));
    }
    serde_json::from_str(text.get()).map_err(|error| format!("the metadata cannot be read: {}", reason(&error)))
}

/// What the JSON says.
#[derive(Default)]
struct Reader {
    weight_map: Option<BTreeMap<String, String>>,
    metadata: Option<Map<String, Value>>,
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
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata = None;
        while let Some(key) = map.next_key::<String>()? {
            let first = match key.as_str() {
                "weight_map" => self.weight_map.replace(map.next_value::<WeightMap>()?.0).is_none(),
                "metadata" => metadata.replace(notes(map.next_value()?).map_err(A::Error::custom)?).is_none(),
                _ => {
                    map.next_value::<Discard>()?;
                    true
                }
            };
            if !first {
                return Err(A::Error::custom(format_args!("the key '{key}' is given twice")));
            }
        }
        self.metadata = metadata.flatten();
        Ok(())
    }
}

/// The value of `weight_map`: text to text, each key once.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut weights = BTreeMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            if weights.contains_key(&tensor) {
                return Err(A::Error::custom(format_args!("tensor '{}' is given twice", printable(&tensor))));
            }
            weights.insert(tensor, file);
        }
        Ok(WeightMap(weights))
    }
}

/// The index as it is written: always with both parts, since readers exist that want both.
struct Document<'a>(&'a Index);

impl Serialize for Document<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("metadata", &Notes(self.0))?;
        map.serialize_entry("weight_map", &self.0.weight_map)?;
        map.end()
    }
}

struct Notes<'a>(&'a Index);

impl Serialize for Notes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let total = self.0.total_size.map(|size| (TOTAL_SIZE, Value::from(size)));
        let others = self.0.metadata.iter().filter(|(key, _)| total.is_none() || key.as_str() != TOTAL_SIZE);
        let total = total.iter().map(|(key, value)| (*key, value));
        serializer.collect_map(total.chain(others.map(|(key, value)| (key.as_str(), value))))
    }
}

/// The pretty formatter of serde_json, with everything beyond printable ASCII escaped, as Python's `json` does.
struct Ascii<'a>(PrettyFormatter<'a>);

impl Formatter for Ascii<'_> {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut units = [0; 2];
        for c in fragment.chars() {
            if c.is_ascii() && c != '\x7f' {
                write!(writer, "{c}")?;
                continue;
            }
            for unit in c.encode_utf16(&mut units) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

/// The name of file `i` of `n` of a model, counted from 1: `model-00001-of-00003.safetensors`. A model of one file has
/// a name without numbers: `model.safetensors`.
pub fn shard_file_name(stem: &str, i: u32, n: u32) -> String {
    match n {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{i:05}-of-{n:05}.safetensors"),
    }
}

/// Reads a name of the form `model-00001-of-00003.safetensors`: the stem, which file it is, counted from 1, and how
/// many there are. `None` for every other name.
pub fn parse_shard_name(file_name: &str) -> Option<(&str, u32, u32)> {
    let (rest, n) = file_name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, i) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse::<u32>().ok().filter(|_| plain)
    };
    let (i, n) = (number(i)?, number(n)?);
    (1..=n).contains(&i).then_some((stem, i, n))
}

/// Spreads tensors over files of at most `max_shard_bytes`: gives for each file the positions in `sizes` of its tensors.
///
/// The rule is huggingface_hub's, so that the same model gets the same files: tensors are taken in the order given,
/// a file is closed as soon as the next tensor does not fit, and a tensor larger than the limit gets a file of its own
/// while the file before it stays open. No file is empty; no tensors give no files. Sizes are in bytes.
pub fn split_into_shards(sizes: &[u64], max_shard_bytes: u64) -> Vec<Vec<usize>> {
    let mut shards = Vec::new();
    let mut open = Vec::new();
    let mut open_bytes = 0_u64;
    for (index, &size) in sizes.iter().enumerate() {
        if size > max_shard_bytes {
            shards.push(vec![index]);
            continue;
        }
        match open_bytes.checked_add(size).filter(|&sum| sum <= max_shard_bytes) {
            Some(sum) => open_bytes = sum,
            None => {
                shards.push(std::mem::take(&mut open));
                open_bytes = size;
            }
        }
        open.push(index);
    }
    if !open.is_empty() {
        shards.push(open);
    }
    shards
}
