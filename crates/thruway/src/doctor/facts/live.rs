//! The machine that this program runs on.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Answer, Facts, Kind, Question, Unseen, calls, word_and_path};
use crate::cuda;
use crate::io::engine::Uring;
use crate::storage::probe::{self, Prober, path_of, text_of};
use crate::storage::{SystemFacts, kernel_release, limit_of_locked_memory, limit_of_open_files, runs_as_root};

/// How long one look may take. The kernel's own files answer in microseconds; three dead mounts cost a bit over a second.
pub(super) const PATIENCE: Duration = Duration::from_millis(400);
/// How long the CUDA driver may take to start: 0.2 s for one GPU, more for eight that were asleep.
const CUDA_PATIENCE: Duration = Duration::from_millis(1500);
/// The longest file that is read: the mount table of a machine with thousands of containers.
pub(super) const BYTES_MAX: usize = 4 << 20;
/// Of a binary file the first bytes: PCI configuration space has 4096.
const RAW_BYTES_MAX: usize = 4096;
/// The most names of a directory.
pub(super) const NAMES_MAX: usize = 20_000;

/// The live machine.
#[derive(Debug)]
pub struct Live {
    prober: Prober,
    cuda_library: Option<PathBuf>,
}

impl Live {
    /// This machine, with the CUDA driver's library at `cuda_library`, or the system's.
    ///
    /// A program that lets helpers do its looks (see [`probe`]) ends at once whatever it looked at; one that does not may be
    /// kept from ending by a mount whose server is dead.
    pub fn new(cuda_library: Option<PathBuf>) -> Self {
        Self { prober: Prober::with_calls(PATIENCE, called), cuda_library }
    }

    fn call(&self, name: &str) -> Answer {
        match name {
            calls::KERNEL => Ok(kernel()),
            calls::CUDA => self.prober.call(name, self.cuda_library.as_deref(), CUDA_PATIENCE),
            calls::LIMITS => Ok(limits()),
            calls::IO_URING | calls::FUNCTIONS => self.prober.call(name, None, PATIENCE),
            calls::USER => Ok(format!("root {}\n", yes(runs_as_root()))),
            _ => Err(Unseen::Absent),
        }
    }
}

/// The calls that are made where it does no harm if they hang, or end the process.
fn called(name: &str, argument: Option<&Path>) -> Answer {
    match name {
        calls::CUDA => cuda(argument),
        calls::IO_URING => Ok(io_uring()),
        calls::FUNCTIONS => {
            SystemFacts::default().kernel_has_p2pdma().map_or(Err(Unseen::Absent), |has| Ok(format!("p2pdma {}\n", yes(has))))
        }
        _ => Err(Unseen::Absent),
    }
}

/// What the main function of a helper calls: answers on standard output, until standard input ends.
///
/// # Errors
/// [`Io`](crate::ErrorKind::Io) if these fail.
pub fn serve() -> crate::Result<()> {
    probe::serve(called).map_err(|error| crate::Error::from_io("cannot answer", error))
}

impl Facts for Live {
    fn look(&self, question: &Question) -> Answer {
        let path = &path_of(&question.key);
        match question.kind {
            Kind::File => file(&self.prober, path),
            Kind::Bytes => bytes(&self.prober, path),
            Kind::List => list(&self.prober, path),
            Kind::Lines => {
                let (word, path) = word_and_path(&question.key).ok_or(Unseen::Absent)?;
                lines(&self.prober, word, &path_of(path))
            }
            Kind::Link => self.prober.resolve(path).map(|real| text_of(real.as_os_str().as_bytes()) + "\n"),
            Kind::Place => self.prober.place(path),
            Kind::Env => match std::env::var_os(&question.key) {
                Some(value) => Ok(text_of(value.as_bytes()) + "\n"),
                None => Err(Unseen::Absent),
            },
            Kind::Call => self.call(&question.key),
        }
    }
}

pub(super) fn file(prober: &Prober, path: &Path) -> Answer {
    // Names of the mount table are asked for again. Elsewhere what is no text is to be seen as such.
    let has_names = path.ends_with("proc/self/mountinfo");
    let text = |bytes: Vec<u8>| if has_names { with_other_bytes(&bytes) } else { String::from_utf8_lossy(&bytes).into_owned() };
    prober.read(path, BYTES_MAX).map(text)
}

/// The text of a file, in which what is no UTF-8 stands as in names.
fn with_other_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.push_str(&text_of(chunk.invalid()));
    }
    text
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
    Ok(prober.list(path, NAMES_MAX)?.iter().map(|name| format!("{name}\n")).collect())
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

const fn yes(is_so: bool) -> &'static str {
    if is_so { "yes" } else { "no" }
}
