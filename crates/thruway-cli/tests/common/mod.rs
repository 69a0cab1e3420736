//! What the tests of the command share: running the built binary, and models to run it on.

#![allow(dead_code, reason = "each test file uses its part of this")]

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use thruway::format::safetensors::Dtype;
use thruway::{ByteSize, HostBuffer, SaveOptions, Session, Source};

/// No command of these tests takes long; one that has not ended by then hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a run of the command ended.
#[derive(Debug)]
pub(crate) struct Run {
    /// The exit status; `None` after a signal.
    pub(crate) status: Option<i32>,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error.
    pub(crate) stderr: String,
}

impl Run {
    /// The one JSON object on standard output.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "one line, one object: {self:?}");
        let value: Value = serde_json::from_str(&self.stdout).expect("valid JSON");
        assert!(value.is_object());
        value
    }

    /// The run, which must have ended well.
    pub(crate) fn fine(self) -> Self {
        assert_eq!(self.status, Some(0), "{self:?}");
        self
    }

    /// The run, which must have failed with one line of error, and a hint at most.
    pub(crate) fn failed(self) -> Self {
        assert_eq!(self.status, Some(1), "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !line.starts_with("note: ")).collect();
        assert!(lines.first().is_some_and(|line| line.starts_with("error: ")), "{self:?}");
        assert!(lines[1..].iter().all(|line| line.starts_with("hint: ")) && lines.len() <= 2, "{self:?}");
        self
    }

    /// The command line must have made no sense.
    pub(crate) fn assert_usage(&self) {
        assert_eq!(self.status, Some(2), "{self:?}");
    }

    /// Fails if a terminal could obey anything of what was printed.
    pub(crate) fn assert_safe_for_terminals(&self) {
        let obeyed = |c: &char| (c.is_control() && *c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        for text in [&self.stdout, &self.stderr] {
            assert_eq!(text.chars().find(obeyed), None, "{text:?}");
        }
    }
}

/// The command, ready to run in `directory`, as on a machine without a GPU whatever this one has.
pub(crate) fn command(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thruway"));
    command.current_dir(directory).stdin(Stdio::null()).env("THRUWAY_CUDA_LIB", "/nonexistent/libcuda.so.1");
    command
}

/// The command as on a machine with one GPU: a driver in software, that checks every use of it.
pub(crate) fn command_with_gpu(directory: &Path) -> Command {
    let mut command = command(directory);
    command.env("THRUWAY_CUDA_LIB", thruway_testkit::fake_cuda::fake_cuda_path()).env("FAKE_CUDA_DELAY_US", "0..200");
    command
}

/// Runs the command in `directory`. Fails if it hangs.
pub(crate) fn run<A: AsRef<OsStr>>(directory: &Path, arguments: impl IntoIterator<Item = A>) -> Run {
    run_command(command(directory), arguments)
}

/// As [`run`], with a GPU.
pub(crate) fn run_with_gpu<A: AsRef<OsStr>>(directory: &Path, arguments: impl IntoIterator<Item = A>) -> Run {
    run_command(command_with_gpu(directory), arguments)
}

/// As [`run_with_gpu`], for commands that move much: the driver does not look at every byte.
pub(crate) fn run_with_fast_gpu<A: AsRef<OsStr>>(directory: &Path, arguments: impl IntoIterator<Item = A>) -> Run {
    let mut command = command_with_gpu(directory);
    command.env("FAKE_CUDA_CHECK", "0").env("FAKE_CUDA_DELAY_US", "0..5");
    run_command(command, arguments)
}

/// A machine with a GPU and cuFile, both in software, whose GPU's driver publishes memory for the DMA of drives if it is to be
/// `direct`.
#[derive(Debug)]
pub(crate) struct CuFileMachine {
    root: tempfile::TempDir,
}

impl CuFileMachine {
    pub(crate) fn new(direct: bool) -> Self {
        let root = scratch();
        let memory = root.path().join("pci/0000:01:00.0/p2pmem");
        if direct {
            std::fs::create_dir_all(&memory).expect("a directory");
            std::fs::write(memory.join("size"), "1048576\n").expect("written");
        }
        Self { root }
    }

    /// Runs the command in `directory`. `settings` are environment variables beside those that make the machine.
    pub(crate) fn run<A: AsRef<OsStr>>(
        &self,
        directory: &Path,
        settings: &[(&str, &str)],
        arguments: impl IntoIterator<Item = A>,
    ) -> Run {
        let report = self.root.path().join("report");
        if report.exists() {
            std::fs::remove_file(&report).expect("removed");
        }
        let mut command = command_with_gpu(directory);
        command
            .env("THRUWAY_CUFILE_LIB", thruway_testkit::fake_cufile::fake_cufile_path())
            .env("THRUWAY_PCI_DEVICES", self.root.path().join("pci"))
            .env("FAKE_CUDA_ALIGNMENT", "65536")
            .env("FAKE_CUFILE_WAY", "p2p")
            .env("FAKE_CUFILE_REPORT", report);
        command.envs(settings.iter().copied());
        run_command(command, arguments)
    }

    /// What the last command made cuFile do; `None` if it never opened and closed it.
    pub(crate) fn report(&self) -> Option<Value> {
        let text = std::fs::read_to_string(self.root.path().join("report")).ok()?;
        Some(serde_json::from_str(&text).expect("valid JSON"))
    }
}

/// As [`run`], of a command made ready by the test.
pub(crate) fn run_command<A: AsRef<OsStr>>(mut command: Command, arguments: impl IntoIterator<Item = A>) -> Run {
    let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start");
    let reader = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            stream.expect("piped").read_to_end(&mut text).expect("read");
            String::from_utf8(text).expect("UTF-8")
        })
    };
    let stdout = reader(child.stdout.take().map(|stream| Box::new(stream) as _));
    let stderr = reader(child.stderr.take().map(|stream| Box::new(stream) as _));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().expect("kill");
            panic!("the command hangs: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (stdout, stderr) = (stdout.join().expect("reader"), stderr.join().expect("reader"));
    Run { status: status.code(), stdout, stderr }
}

/// An empty directory on a real filesystem, where `O_DIRECT` is to be had if anywhere.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary directory")
}

/// Saves tensors of bytes, each `(name, length)` filled with `seed` and its place.
pub(crate) fn save(path: &Path, tensors: &[(&str, usize)], seed: u8) {
    save_with(path, tensors, seed, SaveOptions::default());
}

/// As [`save`], in shards of at most so many bytes.
pub(crate) fn save_sharded(path: &Path, tensors: &[(&str, usize)], seed: u8, shard_bytes: u64) {
    save_with(path, tensors, seed, SaveOptions::default().max_shard_size(ByteSize(shard_bytes)));
}

/// As [`save`], as the options say.
pub(crate) fn save_with(path: &Path, tensors: &[(&str, usize)], seed: u8, options: SaveOptions) {
    let buffers: Vec<HostBuffer> =
        tensors.iter().map(|(name, length)| HostBuffer::from_vec(content(name, *length, seed))).collect();
    let source = |((name, length), buffer): (&(&str, usize), &HostBuffer)| {
        Source::new(*name, Dtype::U8, vec![*length as u64], buffer.source(0..*length).expect("all of it"))
    };
    let sources: Vec<Source> = tensors.iter().zip(&buffers).map(source).collect();
    Session::builder().build().expect("session").save(&sources, path, options).expect("save");
}

/// The bytes that [`save`] gives a tensor.
pub(crate) fn content(name: &str, length: usize, seed: u8) -> Vec<u8> {
    let start = name.bytes().fold(seed, u8::wrapping_add);
    (0..length).map(|at| start.wrapping_add(at.to_le_bytes()[0]).wrapping_mul(31) ^ at.to_le_bytes()[1]).collect()
}

/// A small model: aligned and unaligned, empty, and larger than a page.
pub(crate) const TENSORS: [(&str, usize); 4] =
    [("embed", 300_000), ("layer.0.weight", 2 << 20), ("layer.0.bias", 77), ("nothing", 0)];

/// The bytes of [`TENSORS`].
pub(crate) fn tensor_bytes() -> usize {
    TENSORS.iter().map(|(_, length)| length).sum()
}
