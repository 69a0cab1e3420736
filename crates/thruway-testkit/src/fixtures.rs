//! What integration tests share: models with known bytes, files written without the product's writer, and a place on
//! a real disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use thruway::format::safetensors::{Dtype, TensorSpec};
use thruway::{HostBuffer, Source, Tensors};

use crate::random::Random;

/// A tensor with its bytes.
#[derive(Clone, Debug)]
pub struct KnownTensor {
    /// Its name, dtype and shape.
    pub spec: TensorSpec,
    /// What every load must give.
    pub bytes: Vec<u8>,
}

/// A model whose bytes are known.
#[derive(Clone, Debug)]
pub struct KnownModel {
    /// What its bytes were made from; print it when a test fails.
    pub seed: u64,
    /// The tensors, in the order in which [`to_safetensors`](Self::to_safetensors) writes them.
    pub tensors: Vec<KnownTensor>,
    /// The `__metadata__`; none is written if it is empty.
    pub metadata: BTreeMap<String, String>,
}

/// A model of these tensors, filled with random bytes that `seed` decides.
///
/// # Panics
/// If a shape does not fill whole bytes.
pub fn model(seed: u64, specs: &[(&str, Dtype, &[u64])]) -> KnownModel {
    let mut random = Random::new(seed);
    let tensor = |(name, dtype, shape): &(&str, Dtype, &[u64])| {
        let bits = shape.iter().product::<u64>() * dtype.bits();
        assert_eq!(bits % 8, 0, "the shape of {name} does not fill whole bytes");
        let mut bytes = random.bytes(usize::try_from(bits / 8).expect("fits memory"));
        if *dtype == Dtype::Bool {
            bytes.iter_mut().for_each(|byte| *byte &= 1);
        }
        let spec = TensorSpec { name: (*name).to_owned(), dtype: *dtype, shape: shape.to_vec() };
        KnownTensor { spec, bytes }
    };
    KnownModel { seed, tensors: specs.iter().map(tensor).collect(), metadata: BTreeMap::new() }
}

impl KnownModel {
    /// The model as one safetensors file, framed by hand so that a fault of the product's writer cannot hide behind
    /// the same fault of its reader. Tensors follow one another in their own order; the data begins at a multiple of 8.
    pub fn to_safetensors(&self) -> Vec<u8> {
        let multiple = (8 - self.header().len() % 8) % 8;
        self.to_safetensors_padded(multiple)
    }

    /// The same with `spaces` after the header, which decide where the data begins: at any byte whatever, as in files
    /// of foreign writers.
    pub fn to_safetensors_padded(&self, spaces: usize) -> Vec<u8> {
        let mut header = self.header();
        header.extend(std::iter::repeat_n(' ', spaces));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        self.tensors.iter().for_each(|tensor| file.extend(&tensor.bytes));
        file
    }

    /// The model as `count` shards and their index: file names and contents.
    pub fn to_shards(&self, count: usize) -> Vec<(String, Vec<u8>)> {
        let per_shard = self.tensors.len().div_ceil(count.max(1)).max(1);
        let groups: Vec<&[KnownTensor]> = self.tensors.chunks(per_shard).collect();
        let (mut files, mut map) = (Vec::new(), Vec::new());
        for (number, group) in (1..).zip(&groups) {
            let name = format!("model-{number:05}-of-{:05}.safetensors", groups.len());
            map.extend(group.iter().map(|tensor| format!("{}:{}", quoted(&tensor.spec.name), quoted(&name))));
            let part = Self { tensors: group.to_vec(), ..self.clone() };
            files.push((name, part.to_safetensors()));
        }
        let total: usize = self.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        let index = format!("{{\"metadata\":{{\"total_size\":{total}}},\"weight_map\":{{{}}}}}", map.join(","));
        files.push(("model.safetensors.index.json".to_owned(), index.into_bytes()));
        files
    }

    fn header(&self) -> String {
        let mut members = Vec::new();
        if !self.metadata.is_empty() {
            let pairs: Vec<String> =
                self.metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
            members.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
        }
        let mut at = 0;
        for KnownTensor { spec, bytes } in &self.tensors {
            let shape: Vec<String> = spec.shape.iter().map(u64::to_string).collect();
            let (end, name, dtype) = (at + bytes.len(), quoted(&spec.name), spec.dtype.name());
            let shape = shape.join(",");
            members.push(format!("{name}:{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{at},{end}]}}"));
            at = end;
        }
        format!("{{{}}}", members.join(","))
    }

    /// The tensors as what a save takes: page-aligned memory of their own.
    ///
    /// # Panics
    /// Without memory.
    pub fn sources(&self) -> Vec<Source> {
        let source = |KnownTensor { spec, bytes }: &KnownTensor| {
            let mut buffer = HostBuffer::new(bytes.len()).expect("memory for a small tensor");
            buffer.bytes_mut().expect("a buffer of our own").copy_from_slice(bytes);
            let region = buffer.source(0..bytes.len()).expect("a buffer of our own");
            Source { spec: spec.clone(), region }
        };
        self.tensors.iter().map(source).collect()
    }

    /// How what was loaded differs from the model; `None` if names, dtypes, shapes and every byte are the same.
    pub fn difference(&self, loaded: &Tensors) -> Option<String> {
        let expected: BTreeSet<&str> = self.tensors.iter().map(|tensor| tensor.spec.name.as_str()).collect();
        let found: BTreeSet<&str> = loaded.iter().map(thruway::Tensor::name).collect();
        if expected != found {
            return Some(format!("the tensors are {found:?} and should be {expected:?}"));
        }
        self.tensors.iter().find_map(|KnownTensor { spec, bytes }| {
            let name = &spec.name;
            let tensor = loaded.get(name)?;
            if (tensor.dtype(), tensor.shape()) != (spec.dtype, spec.shape.as_slice()) {
                return Some(format!(
                    "{name} is {} {:?} and should be {} {:?}",
                    tensor.dtype(),
                    tensor.shape(),
                    spec.dtype,
                    spec.shape
                ));
            }
            let have = match tensor.to_host() {
                Ok(have) => have,
                Err(error) => return Some(format!("{name} cannot be looked at: {error}")),
            };
            if have.len() != bytes.len() {
                return Some(format!("{name} has {} bytes and should have {}", have.len(), bytes.len()));
            }
            if have == *bytes {
                return None;
            }
            let at = std::iter::zip(&have, bytes).position(|(have, expected)| have != expected).unwrap_or(0);
            Some(format!("{name} differs from byte {at} of {} on", bytes.len()))
        })
    }

    /// Panics unless what was loaded is this model.
    ///
    /// # Panics
    /// If it is not; the message names the first tensor that differs, and the seed.
    pub fn assert_loaded(&self, loaded: &Tensors) {
        if let Some(difference) = self.difference(loaded) {
            panic!("{difference} (seed {})", self.seed);
        }
    }
}

/// `text` as a JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => write!(out, "\\u{:04x}", u32::from(c)).expect("writing to memory cannot fail"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A directory for one test, removed when dropped. It lies beside the program's own build output, which is on a real
/// disk, and not where temporary files usually are, which may be in memory and then knows no `O_DIRECT`.
///
/// # Panics
/// If it cannot be made.
pub fn scratch_dir() -> TempDir {
    let program = std::env::current_exe().expect("a test knows its own program");
    let beside = program.parent().map_or_else(|| PathBuf::from("."), Path::to_owned);
    tempfile::Builder::new().prefix("thruway-test-").tempdir_in(beside).expect("the build directory can be written to")
}

/// Whether the environment demands that nothing is skipped.
pub fn skips_are_failures() -> bool {
    std::env::var_os("THRUWAY_REQUIRE_TEST_INPUTS").is_some_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use thruway::format::safetensors::{header_length, parse};

    use super::*;

    #[test]
    fn what_is_framed_by_hand_is_read_back_wherever_its_data_begins() {
        let mut model = model(5, &[("a\"b\\c\n\u{1}", Dtype::F4, &[3, 2]), ("模型", Dtype::Bool, &[9]), ("", Dtype::F64, &[])]);
        model.metadata.insert("for\tmat".to_owned(), "\"pt\"".to_owned());
        for spaces in 0..9 {
            let file = model.to_safetensors_padded(spaces);
            let end = 8 + usize::try_from(header_length(&file, file.len() as u64).expect("a length")).expect("fits");
            let header = parse(&file[8..end], file.len() as u64).expect("a header");
            assert_eq!(header.metadata.as_ref(), Some(&model.metadata));
            for entry in header.entries {
                let known = model.tensors.iter().find(|known| known.spec.name == entry.name).expect("a name of ours");
                let start = usize::try_from(entry.extent.offset).expect("fits");
                assert_eq!(&file[start..start + known.bytes.len()], known.bytes, "{:?}", entry.name);
                assert_eq!(
                    (entry.dtype, entry.shape, entry.extent.length),
                    (known.spec.dtype, known.spec.shape.clone(), known.bytes.len() as u64)
                );
            }
        }
        let data_start = model.to_safetensors().len() - model.tensors.iter().map(|known| known.bytes.len()).sum::<usize>();
        assert_eq!(data_start % 8, 0);
    }

    #[test]
    fn a_seed_decides_every_byte() {
        let specs: &[(&str, Dtype, &[u64])] = &[("x", Dtype::U8, &[100])];
        assert_eq!(model(1, specs).tensors[0].bytes, model(1, specs).tensors[0].bytes);
        assert_ne!(model(1, specs).tensors[0].bytes, model(2, specs).tensors[0].bytes);
    }
}
