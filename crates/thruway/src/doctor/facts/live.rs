//! The machine that this program runs on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Answer, Facts, Kind, Question, Unseen, calls, word_and_path};
use crate::cuda;
use crate::io::engine::Uring;
use crate::storage::probe::{DirectAnswer, Place, Prober};
use crate::storage::{kernel_release, limit_of_locked_memory, limit_of_open_files, runs_as_root};

/// How long one look may take. The kernel's own files answer in microseconds; three dead mounts cost a bit over a second.
pub(super) const PATIENCE: Duration = Duration::from_millis(400);
/// How long the CUDA driver may take to start: 0.2 s for one GPU, more for eight that were asleep.
const CUDA_PATIENCE: Duration = Duration::from_millis(1500);
/// The longest file that is read: the mount table of a machine with thousands of containers.
pub(super) const BYTES_MAX: usize = 4 << 20;
/// Of a binary file the first bytes: PCI configuration space has 4096.
const RAW_BYTES_MAX: usize = 4096;
/// The most names of a directory.
const NAMES_MAX: usize = 20_000;

/// The live machine.
#[derive(Debug)]
pub struct Live {
    prober: Prober,
    cuda_prober: Prober,
    cuda_library: Option<PathBuf>,
}

impl Live {
    /// This machine, with the CUDA driver's library at `cuda_library`, or the system's.
    pub fn new(cuda_library: Option<PathBuf>) -> Self {
        Self { prober: Prober::new(PATIENCE), cuda_prober: Prober::new(CUDA_PATIENCE), cuda_library }
    }

    fn call(&self, name: &str) -> Answer {
        match name {
            calls::KERNEL => Ok(kernel()),
            calls::CUDA => {
                let library = self.cuda_library.clone();
                self.cuda_prober.within(move || cuda(library.as_deref()))?
            }
            calls::LIMITS => Ok(limits()),
            calls::IO_URING => self.prober.within(io_uring),
            calls::USER => Ok(format!("root {}\n", yes(runs_as_root()))),
            _ => Err(Unseen::Absent),
        }
    }
}

impl Facts for Live {
    fn look(&self, question: &Question) -> Answer {
        let path = Path::new(&question.key);
        match question.kind {
            Kind::File => file(&self.prober, path),
            Kind::Bytes => bytes(&self.prober, path),
            Kind::List => list(&self.prober, path),
            Kind::Lines => {
                let (word, path) = word_and_path(&question.key).ok_or(Unseen::Absent)?;
                lines(&self.prober, word, Path::new(path))
            }
            Kind::Link => self.prober.resolve(path).map(|real| format!("{}\n", real.display())),
            Kind::Place => self.prober.place(path).map(|place| place_text(&place)),
            Kind::Env => match std::env::var_os(&question.key) {
                Some(value) => Ok(format!("{}\n", value.to_string_lossy())),
                None => Err(Unseen::Absent),
            },
            Kind::Call => self.call(&question.key),
        }
    }
}

pub(super) fn file(prober: &Prober, path: &Path) -> Answer {
    prober.read(path, BYTES_MAX).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

pub(super) fn lines(prober: &Prober, word: &str, path: &Path) -> Answer {
    let text = file(prober, path)?;
    Ok(text.lines().filter(|line| line.trim_start().starts_with(word)).map(|line| format!("{line}\n")).collect())
}

pub(super) fn bytes(prober: &Prober, path: &Path) -> Answer {
    let bytes = prober.read(path, RAW_BYTES_MAX)?;
    let line = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
    Ok(bytes.chunks(32).map(line).collect())
}

pub(super) fn list(prober: &Prober, path: &Path) -> Answer {
    Ok(prober.list(path, NAMES_MAX)?.iter().map(|name| format!("{}\n", name.replace('\n', "?"))).collect())
}

fn kernel() -> String {
    let (release, machine) = kernel_release();
    format!("release {release}\nmachine {machine}\n")
}

fn limits() -> String {
    let text = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    format!("memlock {}\nnofile {}\n", text(limit_of_locked_memory()), text(limit_of_open_files()))
}

fn io_uring() -> String {
    match Uring::new(1) {
        Ok(_) => "available\n".to_owned(),
        Err(refused) => format!("refused {refused}\n"),
    }
}

fn cuda(library: Option<&Path>) -> Answer {
    let survey = match cuda::survey(library) {
        Ok(Some(survey)) => survey,
        Ok(None) => return Err(Unseen::Absent),
        Err(error) => return Err(Unseen::Failed(error.message().to_owned())),
    };
    let mut text = format!("cuda_version {}\n", survey.cuda_version);
    for gpu in survey.gpus {
        let (major, minor) = gpu.capability;
        text.push_str(&format!(
            "gpu {} memory={} capability={major}.{minor} integrated={} peer_dma={} dma_buf={} name={}\n",
            gpu.facts.pci_address,
            gpu.facts.memory_bytes,
            yes(gpu.is_integrated),
            yes(gpu.has_peer_dma),
            yes(gpu.has_dma_buf),
            gpu.facts.name.replace('\n', " "),
        ));
    }
    Ok(text)
}

fn place_text(place: &Place) -> String {
    let kind = match (place.is_directory, place.is_special) {
        (true, _) => "directory",
        (_, true) => "special",
        _ => "file",
    };
    let mut text = format!("real {}\nkind {kind}\n", place.real.display());
    text.push_str(&format!("device {}:{}\nmagic {:#x}\n", place.device.0, place.device.1, place.magic));
    if let Some(room) = place.room {
        text.push_str(&format!("total_bytes {}\nfree_bytes {}\n", room.total_bytes, room.free_bytes));
    }
    text.push_str(&format!("read_only {}\n", yes(place.is_read_only)));
    text.push_str(&format!("may_read {}\nmay_write {}\n", yes(place.may_read), yes(place.may_write)));
    text.push_str(&match place.direct {
        DirectAnswer::Accepted(rules) => {
            format!("direct yes\nmemory_alignment {}\noffset_alignment {}\n", rules.memory.bytes(), rules.offset.bytes())
        }
        DirectAnswer::Refused => "direct no\n".to_owned(),
        DirectAnswer::Unknown => "direct unknown\n".to_owned(),
    });
    text
}

const fn yes(is_so: bool) -> &'static str {
    if is_so { "yes" } else { "no" }
}
