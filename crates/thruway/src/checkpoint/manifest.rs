//! The manifest: everything about a checkpoint that is not the tensors' bytes. Pure: text to values and back.
//!
//! ```text
//! {"checksum":"<16 hex digits>","manifest":{ … }}⏎
//!                                          └─┬─┘
//!              the checksum is of exactly these bytes
//! ```
//!
//! Nothing outside the inner object may differ from this frame by a byte, so a changed bit anywhere in the file is found. The
//! inner object is the serialized [`Manifest`]. What it says of files must cover them to the byte: a head, then the tensors, one
//! behind the other, up to the end.
//!
//! The parser takes text from strangers. It allocates in proportion to the text alone, never from a number in it, and what it
//! returns has passed every check of `rules`.

mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

use super::checksum::{Checksum, combined};
use crate::base::error::printable;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::format::safetensors::Dtype;

pub(super) use rules::is_plain_name;

/// The manifest's name in a checkpoint's directory.
pub const MANIFEST: &str = "manifest.json";

/// The longest manifest that is read, in bytes: a million tensors with room to spare.
pub const MANIFEST_BYTES_MAX: u64 = 512 << 20;

/// What a manifest of this format says it is.
const FORMAT: &str = "thruway checkpoint";

/// The version of the format that is written, and the only one that is read.
const VERSION: u32 = 1;

const FRAME_START: &str = "{\"checksum\":\"";
const FRAME_MIDDLE: &str = "\",\"manifest\":";
const FRAME_END: &str = "}\n";

/// What a save is known by: 128 random bits, which stand in the manifest and in every shard, so that a shard of another save
/// is recognised wherever it came from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SaveId(u128);

impl SaveId {
    /// A new one.
    ///
    /// # Errors
    /// Whatever the system's random number generator reports.
    pub fn random() -> Result<Self> {
        let mut bytes = [0_u8; 16];
        let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::from_io("cannot get random bits for a save's name", errno.into()))?;
        if got != bytes.len() {
            return Err(Error::new(ErrorKind::Io, "the system gave too few random bits for a save's name"));
        }
        Ok(Self(u128::from_le_bytes(bytes)))
    }

    /// Reads 32 hexadecimal digits, the letters small.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        plain.then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for SaveId {
    /// 32 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for SaveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for SaveId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SaveId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom("a save id is 32 hexadecimal digits in small letters"))
    }
}

/// A JSON value of the caller's, kept as the text that it was given as: numbers keep every digit.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Json(Box<RawValue>);

impl Json {
    /// The value with this text.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if it is not JSON.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let refuse = |error: serde_json::Error| Error::new(ErrorKind::InvalidInput, format!("this is not JSON: {error}"));
        // A raw value is checked by skipping it; a reader of it would be stricter.
        let text = text.into();
        serde_json::from_str::<serde_json::Value>(&text).map_err(refuse)?;
        RawValue::from_string(text).map(Self).map_err(refuse)
    }

    /// Its text.
    pub fn text(&self) -> &str {
        self.0.get()
    }
}

impl Default for Json {
    /// `null`.
    fn default() -> Self {
        Self(RawValue::NULL.to_owned())
    }
}

impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        self.text() == other.text()
    }
}

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// Which save made it.
    pub save_id: SaveId,
    /// The step of training.
    pub step: u64,
    /// The program that wrote it, and its version.
    pub writer: String,
    /// When it was written, in seconds since 1970.
    pub saved_at: u64,
    /// How long it took to write and sync the files, in milliseconds: what the time of the next save is predicted from.
    pub written_in_ms: u64,
    /// How much of a tensor has a checksum of its own, in bytes.
    pub chunk_bytes: u64,
    /// Every file of the checkpoint other than the manifest.
    pub files: Vec<FileRecord>,
    /// The sets of tensors.
    pub groups: Vec<GroupRecord>,
    /// Text pairs of the user's.
    pub metadata: BTreeMap<String, String>,
    /// Who saved.
    pub world: World,
    /// What the caller keeps beside the tensors: the nest of its state. Not looked at.
    pub structure: Json,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name in the directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// How much of it comes before the tensors: a header, or the whole of an index.
    pub head_bytes: u64,
    /// The checksum of those.
    pub head_checksum: Checksum,
}

/// A set of tensors: what a model, an optimizer, … consists of.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRecord {
    /// Its name: any text.
    pub name: String,
    /// Which of the files stands for the whole: the only shard, or the index. `None` without tensors.
    pub opens: Option<usize>,
    /// The tensors.
    pub tensors: Vec<TensorRecord>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// Its name, unique in its group: any text.
    pub name: String,
    /// What its elements are.
    #[serde(with = "dtype_name")]
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Which of the files holds it.
    pub file: usize,
    /// Where it begins there.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// The checksum of all its bytes.
    pub checksum: Checksum,
    /// Those of its chunks, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<Checksum>,
}

impl TensorRecord {
    /// Its bytes in its file.
    pub fn extent(&self) -> Extent {
        Extent::new(self.offset, self.bytes)
    }

    /// The checksums of its chunks: of the whole, if that is one.
    pub(super) fn chunk_sums(&self) -> &[Checksum] {
        if self.chunks.is_empty() { std::slice::from_ref(&self.checksum) } else { &self.chunks }
    }

    /// Puts in the checksums of its chunks.
    pub(super) fn set_chunk_sums(&mut self, sums: Vec<Checksum>, chunk_bytes: u64) {
        self.checksum = combined(&sums, self.bytes, chunk_bytes);
        self.chunks = if sums.len() > 1 { sums } else { Vec::new() };
    }
}

/// Who saved: how many processes, and how the tensors were spread over them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct World {
    /// How many processes saved together.
    pub ranks: u32,
    /// How tensors were sharded, in the caller's terms. Not looked at.
    pub layout: Json,
}

impl Default for World {
    /// One process.
    fn default() -> Self {
        Self { ranks: 1, layout: Json::default() }
    }
}

mod dtype_name {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::format::safetensors::Dtype;

    pub(super) fn serialize<S: Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || serde::de::Error::custom(format!("unknown dtype {}", crate::base::error::printable(&name)));
        Dtype::from_name(&name).ok_or_else(unknown)
    }
}

/// What is read of a manifest before anything else: whether the rest can be.
#[derive(serde::Deserialize)]
struct Kind {
    format: String,
    version: u32,
    #[serde(flatten)]
    _rest: BTreeMap<String, IgnoredAny>,
}

impl Manifest {
    /// A manifest of this library's, without files or tensors.
    pub(super) fn new(save_id: SaveId, step: u64, chunk_bytes: u64) -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            save_id,
            step,
            writer: concat!("thruway ", env!("CARGO_PKG_VERSION")).to_owned(),
            saved_at: since.map_or(0, |since| since.as_secs()),
            written_in_ms: 0,
            chunk_bytes,
            files: Vec::new(),
            groups: Vec::new(),
            metadata: BTreeMap::new(),
            world: World::default(),
            structure: Json::default(),
        }
    }

    /// The group with this name.
    pub fn group(&self, name: &str) -> Option<&GroupRecord> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// The bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.groups.iter().flat_map(|group| &group.tensors).map(|tensor| tensor.bytes).sum()
    }

    /// The bytes of all files but the manifest.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// The manifest as text.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if it breaks a rule that a reader would refuse, or is too long to be read.
    pub fn to_text(&self) -> Result<String> {
        rules::check(self).map_err(|fault| Error::new(ErrorKind::InvalidInput, fault))?;
        let inner = serde_json::to_string(self)
            .map_err(|error| Error::new(ErrorKind::InvalidInput, format!("the manifest cannot be written: {error}")))?;
        let text = format!("{FRAME_START}{}{FRAME_MIDDLE}{inner}{FRAME_END}", Checksum::of(inner.as_bytes()));
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            let message = format!("the manifest would have {} bytes, and {MANIFEST_BYTES_MAX} are the limit", text.len());
            return Err(Error::new(ErrorKind::InvalidInput, message).with_hint("keep large state in tensors"));
        }
        Ok(text)
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch) if its checksum does not match, [`Unsupported`](ErrorKind::Unsupported) for a version
    /// that this library does not know, [`Malformed`](ErrorKind::Malformed) for what breaks a rule of the format.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let malformed = |message: String| Error::new(ErrorKind::Malformed, message);
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(malformed(format!("the manifest has {} bytes, and {MANIFEST_BYTES_MAX} are the limit", text.len())));
        }
        let text = std::str::from_utf8(text)
            .map_err(|error| malformed("the manifest is not UTF-8 text".to_owned()).with("offset", error.valid_up_to()))?;
        let (sum, inner) = unframed(text).ok_or_else(|| {
            malformed("this is not the manifest of a checkpoint".to_owned())
                .with_hint("it was damaged, or edited: a manifest is valid only as it was written")
        })?;
        if Checksum::of(inner.as_bytes()) != sum {
            return Err(Error::new(ErrorKind::Mismatch, "the manifest's checksum does not match its content")
                .with_hint("it was damaged, or edited: a manifest is valid only as it was written"));
        }
        let unreadable = |error: serde_json::Error| malformed(format!("the manifest: {}", printable(&error.to_string())));
        let Kind { format, version, .. } = serde_json::from_str(inner).map_err(unreadable)?;
        if format != FORMAT {
            return Err(malformed(format!("the manifest is of another format: {}", printable(&format))));
        }
        if version != VERSION {
            let message = format!("the checkpoint has version {version} of the format, and {VERSION} is what is known here");
            return Err(Error::new(ErrorKind::Unsupported, message).with_hint("use the version of thruway that wrote it"));
        }
        let manifest: Self = serde_json::from_str(inner).map_err(unreadable)?;
        rules::check(&manifest).map_err(malformed)?;
        Ok(manifest)
    }
}

/// The checksum and the text that it is of.
fn unframed(text: &str) -> Option<(Checksum, &str)> {
    let rest = text.strip_prefix(FRAME_START)?;
    let (sum, rest) = rest.split_at_checked(16)?;
    let inner = rest.strip_prefix(FRAME_MIDDLE)?.strip_suffix(FRAME_END)?;
    Some((Checksum::parse(sum)?, inner))
}
