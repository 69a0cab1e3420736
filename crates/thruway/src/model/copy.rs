//! Copying a model: to one file, to other shards, or as it is; through two windows of memory whatever its size. The windows
//! lie in the memory of a PCI device if the session is for one, and then the host need not carry the bytes.
//! The copy is laid out for direct I/O, and complete and durable before it is visible.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::open::{Model, ModelFile};
use super::resolve::{INDEX, SINGLE};
use super::save::{index_of, plan_shards};
use super::stream::{StreamOptions, StreamWindow, WINDOW_BYTES, stream};
use super::writer::{Form, ShardPlan, Writer, lay_out};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::format::safetensors::{Index, TensorSpec, shard_file_name};
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::transfer::{Cancel, Move, Progress, Receipt, TransferOptions, run};

/// How to copy.
#[derive(Debug, Default)]
pub struct CopyOptions {
    max_shard_bytes: Option<u64>,
    stripes: Vec<PathBuf>,
    read_policy: Option<PathPolicy>,
    transfer: TransferOptions,
}

impl CopyOptions {
    /// Writes a directory of shards of at most this size with an index, whatever the source's shards are. Each shard gets
    /// the metadata of all the source's files together; where two of them give a key different values, the value of the
    /// first file counts.
    #[must_use]
    pub fn max_shard_size(mut self, size: ByteSize) -> Self {
        self.max_shard_bytes = Some(size.bytes());
        self
    }

    /// Spreads the shards over the target and these directories, best on other drives, which must exist. The target holds links
    /// to what lies there, and its appearance is what counts. Takes a model of several files, or a size of shards.
    #[must_use]
    pub fn stripes(mut self, directories: impl IntoIterator<Item = PathBuf>) -> Self {
        self.stripes.extend(directories);
        self
    }

    /// Which path the source is read by, instead of the session's. If it must be the direct one, the copy is written so too.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.read_policy = Some(policy);
        self
    }

    /// Told the bytes written so far.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.transfer.progress = Some(progress);
        self
    }

    /// Stops it; then nothing at the target has changed.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.transfer.cancel = cancel;
        self
    }
}

impl Model {
    /// Copies the model to `target`: a file if it lies in one file and no shard size is given, else a directory
    /// that must not exist yet (or be empty). Names, dtypes, shapes, bytes and metadata are kept, and the notes of an
    /// index where the copy has one, with the total size counted anew. So are the names of several files, unless one of
    /// them would keep the others from being found: then all are numbered. A link at `target` is itself replaced by a
    /// file, and refused where a directory is to stand.
    ///
    /// # Errors
    /// The first byte that cannot be read or written, with file and tensor. Then nothing at `target` has changed, unless
    /// the error has the fact `published`: then the whole copy stands there, and only a power cut might still undo it.
    pub fn copy_to(&self, target: &Path, options: CopyOptions) -> Result<(Receipt, Receipt)> {
        self.copy_by(target, options, WINDOW_BYTES)
    }

    fn copy_by(&self, target: &Path, options: CopyOptions, window_bytes: u64) -> Result<(Receipt, Receipt)> {
        let (form, shards, index) = self.copy_plan(options.max_shard_bytes)?;
        let cancel = options.transfer.cancel.clone();
        let policy = options.read_policy.unwrap_or(self.policy);
        // What comes from the drive directly goes to one directly too. Else the way to the target is free.
        let write_policy = if policy == PathPolicy::Require(TransferPath::Direct) { policy } else { PathPolicy::Auto };
        let write = TransferOptions { cancel, policy: write_policy, ..TransferOptions::default() };
        let read = TransferOptions { policy, ..write.clone() };
        let files = lay_out(&shards, index.map(|index| (INDEX.to_owned(), index)), 0)?;
        let (writer, mut written) = Writer::begin_striped(&self.context, (target, &options.stripes), form, files, &write)?;
        let mut moved = 0;
        let read = StreamOptions { transfer: read, window_bytes, in_host_memory: false };
        let read = stream(self, &read, |StreamWindow { buffer, parts }| {
            let mut moves: Vec<Move> = Vec::with_capacity(parts.len());
            for part in &parts {
                let region = buffer.source(part.at..part.at + part.length)?;
                moves.push(writer.place(0, &self.entries[part.entry].name, part.offset, region)?);
            }
            let step = run(&self.context, moves, &write).map_err(|error| writer.name_tensor(error))?;
            moved += step.bytes;
            written.merge(step);
            if let Some(progress) = &options.transfer.progress {
                progress(moved);
            }
            Ok(buffer)
        })?;
        writer.finish(&mut written)?;
        Ok((read, written))
    }

    /// The files of the copy: as the source's, or cut anew.
    fn copy_plan(&self, max_shard_bytes: Option<u64>) -> Result<(Form, Vec<ShardPlan>, Option<Index>)> {
        let spec =
            |entry: &super::ModelEntry| TensorSpec { name: entry.name.clone(), dtype: entry.dtype, shape: entry.shape.clone() };
        let with_notes = |index: Index| match &self.index {
            Some(source) => Index { metadata: source.metadata.clone(), ..index },
            None => index,
        };
        if max_shard_bytes.is_some() || (self.files.len() == 1 && self.index.is_none()) {
            let sizes: Vec<u64> = self.entries.iter().map(|entry| entry.extent.length).collect();
            let specs = self.entries.iter().map(spec).collect();
            let (shards, index) = plan_shards("model", specs, &sizes, max_shard_bytes, &self.common_metadata())?;
            let form = if max_shard_bytes.is_some() { Form::Directory } else { Form::File };
            return Ok((form, shards, index.map(with_notes)));
        }
        let metadata = self.files.iter().map(|file| file.metadata.clone().unwrap_or_default());
        let plan = |(file_name, metadata)| ShardPlan { file_name, specs: Vec::new(), metadata };
        let mut shards: Vec<ShardPlan> = std::iter::zip(self.shard_names()?, metadata).map(plan).collect();
        let mut weight_map = BTreeMap::new();
        for entry in &self.entries {
            weight_map.insert(entry.name.clone(), shards[entry.file].file_name.clone());
            shards[entry.file].specs.push(spec(entry));
        }
        Ok((Form::Directory, shards, Some(with_notes(index_of(weight_map, self.bytes())))))
    }

    /// The files' own names, if a directory of files with these names and an index is the model again. Else they are
    /// counted: a file called `model.safetensors` would stand for the whole, files of several directories may share a name,
    /// and a name may be no text.
    fn shard_names(&self) -> Result<Vec<String>> {
        let own = |file: &ModelFile| Some(file.file.path.file_name()?.to_str()?.to_owned());
        if let Some(names) = self.files.iter().map(own).collect::<Option<Vec<String>>>() {
            let taken: HashSet<&str> = names.iter().map(String::as_str).chain([SINGLE, INDEX]).collect();
            if taken.len() == names.len() + 2 {
                return Ok(names);
            }
        }
        let count =
            u32::try_from(self.files.len()).map_err(|_| Error::new(ErrorKind::InvalidInput, "more files than names for them"))?;
        // One file beside an index is counted as well; `shard_file_name` would call it what it must not be called.
        let name = |number| match count {
            1 => "model-00001-of-00001.safetensors".to_owned(),
            _ => shard_file_name("model", number, count),
        };
        Ok((1..=count).map(name).collect())
    }

    /// The metadata of all files together. Where two files give one key different values, the first counts.
    fn common_metadata(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (key, value) in self.files.iter().filter_map(|file| file.metadata.as_ref()).flatten() {
            all.entry(key.clone()).or_insert_with(|| value.clone());
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::format::safetensors::Dtype;
    use crate::io::layer::{Fault, FaultPlan, Faulty};
    use crate::io::policy::Source as StorageSide;
    use crate::io::{EngineFactory, Made, OsEngines};
    use crate::memory::HostBuffer;
    use crate::model::{SaveOptions, Source};
    use crate::session::Session;

    #[derive(Debug)]
    struct FaultyEngines(FaultPlan);

    impl EngineFactory for FaultyEngines {
        fn make(&self, source: StorageSide) -> Result<Made> {
            let choice = crate::base::settings::EngineChoice::Posix;
            let Made { engine, note } = OsEngines { choice, depth: 4, threads: 2, direct: None }.make(source)?;
            Ok(Made { engine: Box::new(Faulty::new(engine, self.0.clone())), note })
        }
    }

    fn copy(plan: &FaultPlan, directory: &Path) -> Result<()> {
        let session = Session::builder().engines(Box::new(FaultyEngines(plan.clone()))).build()?;
        let model = session.open(directory.join("source.safetensors"))?;
        let options = CopyOptions::default().max_shard_size(ByteSize(50_000));
        model.copy_by(&directory.join("target"), options, 20_000).map(drop)
    }

    #[test]
    fn a_failure_at_any_window_of_a_copy_is_reported_at_once_and_leaves_nothing() {
        let directory = tempfile::tempdir_in(std::env::temp_dir()).expect("a directory");
        let root = directory.path().to_owned();
        let buffer = HostBuffer::from_vec(vec![3; 120_000]);
        let source =
            |name: &str, from: usize| Source::new(name, Dtype::U8, [40_000], buffer.source(from..from + 40_000).expect("free"));
        let sources = [source("a", 0), source("b", 40_000), source("c", 80_000)];
        let session = Session::builder().build().expect("session");
        session.save(&sources, root.join("source.safetensors"), SaveOptions::default()).expect("save");

        let counting = FaultPlan::default();
        copy(&counting, &root).expect("nothing is in the way");
        std::fs::remove_dir_all(root.join("target")).expect("it was made");
        assert!(counting.operations() > 12, "six windows, each read and written: {} operations", counting.operations());
        for at in 0..counting.operations() {
            let (done, waiting) = std::sync::mpsc::channel();
            let here = root.clone();
            std::thread::spawn(move || done.send(copy(&FaultPlan::single(at, Fault::Errno(libc::EIO)), &here)));
            let outcome = waiting.recv_timeout(Duration::from_secs(60)).expect("it hangs");
            assert_eq!(outcome.expect_err("an operation failed").kind(), ErrorKind::Io, "operation {at}");
            let left: Vec<_> = std::fs::read_dir(&root).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
            assert_eq!(left, ["source.safetensors"], "operation {at}");
        }
    }
}
