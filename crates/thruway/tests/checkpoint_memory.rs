//! Saves under a limit of memory: what was stated is enough, and what cannot be had is refused instead of taken.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use thruway::base::settings::Settings;
use thruway::checkpoint::{CheckpointOptions, CheckpointerOptions, Group, Hold, Json, RestoreOptions};
use thruway::format::safetensors::{Dtype, TensorSpec};
use thruway::{ByteSize, Device, ErrorKind, HostBuffer, Session, Source};
use thruway_testkit::fixtures::scratch_dir;

const STATE_BYTES: usize = 192 << 20;
const TENSORS: usize = 6;
const RING_BYTES: usize = 32 << 20;
/// Far less than the state, so that the copies go in windows.
const POOL_BYTES: u64 = 32 << 20;
/// All that the caller of a save has stated: its state, the pool and the ring.
const STATED_BYTES: u64 = (STATE_BYTES + RING_BYTES) as u64 + POOL_BYTES;
/// The variable that makes a child of this program, and says where it saves; and the one that says how large its pool is.
const CHILD_VARIABLE: &str = "THRUWAY_CHECKPOINT_CHILD";
const POOL_VARIABLE: &str = "THRUWAY_CHECKPOINT_POOL";

/// Not a test of its own: what the others run under a limit.
#[test]
fn child_that_saves() {
    let Some(directory) = std::env::var_os(CHILD_VARIABLE) else { return };
    let pool = std::env::var(POOL_VARIABLE).expect("a pool").parse().expect("a number");
    let session = Session::builder()
        .device(Device::Host)
        .settings(Settings { ring_bytes: RING_BYTES, ..Settings::default() })
        .build()
        .expect("session");
    let bytes = STATE_BYTES / TENSORS;
    let tensors = (0..TENSORS).map(|at| {
        let buffer = HostBuffer::from_vec((0..bytes).map(|byte| ((byte / 4096 + at) % 251).to_le_bytes()[0]).collect());
        let spec = TensorSpec { name: format!("t{at}"), dtype: Dtype::U8, shape: vec![bytes as u64] };
        Source { spec, region: buffer.source(0..bytes).expect("all of it") }
    });
    let groups = [Group::new("model", tensors.collect())];
    let run = session.checkpointer(&directory, CheckpointerOptions::default().pool(ByteSize(pool)));
    let run = match run {
        Ok(run) => run,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            println!("\nrefused: {error}; {}", error.hint().unwrap_or_default());
            return;
        }
    };
    for step in 1..=3 {
        let saving = run.save_async(step, &groups, &Json::default(), CheckpointOptions::default(), &Hold::Now).expect("begun");
        saving.wait().expect("saved");
    }
    run.checkpoints().save(4, &groups, &Json::default(), CheckpointOptions::default()).expect("saved");
    // What is restored takes the place of what was saved, and of the pool.
    drop((groups, run));
    let restored = session.checkpoints(&directory).restore(&RestoreOptions::default()).expect("restored");
    println!("\nsaved and restored {}", restored.checkpoint.step());
}

/// A memory cgroup within this process's own, which goes with it.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `None` where this process may not make one, or not limit it.
    fn new(name: &str, limit_bytes: u64) -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = |controller: &str| own.lines().find_map(|line| line.split_once(controller).map(|(_, path)| path.to_owned()));
        let (root, own, limit) = match path(":memory:") {
            Some(own) => ("/sys/fs/cgroup/memory", own, "memory.limit_in_bytes"),
            None => ("/sys/fs/cgroup", path("0::")?, "memory.max"),
        };
        let directory = Path::new(root).join(own.trim_start_matches('/')).join(format!("thruway-{name}-{}", std::process::id()));
        std::fs::create_dir(&directory).ok()?;
        let cgroup = Self(directory);
        std::fs::write(cgroup.0.join(limit), limit_bytes.to_string()).ok()?;
        // Memory that goes to swap would be no limit.
        drop(std::fs::write(cgroup.0.join("memory.swappiness"), "0"));
        drop(std::fs::write(cgroup.0.join("memory.swap.max"), "0"));
        Some(cgroup)
    }

    fn run(&self, directory: &Path, pool_bytes: u64) -> Output {
        let enter = r#"echo $$ > "$0" && exec "$@""#;
        let mut shell = Command::new("sh");
        shell.args(["-c", enter]).arg(self.0.join("cgroup.procs")).arg(std::env::current_exe().expect("this program"));
        shell.args(["--exact", "child_that_saves", "--nocapture"]);
        shell.env(CHILD_VARIABLE, directory).env(POOL_VARIABLE, pool_bytes.to_string());
        shell.output().expect("sh")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Empty, since its only process has ended.
        drop(std::fs::remove_dir(&self.0));
    }
}

fn limited(name: &str, limit_bytes: u64) -> Option<Cgroup> {
    if std::env::var_os("ASAN_OPTIONS").is_some() {
        println!("skipped: AddressSanitizer keeps memory of its own");
        return None;
    }
    let cgroup = Cgroup::new(name, limit_bytes);
    if cgroup.is_none() {
        println!("skipped: this process may not make a memory cgroup");
    }
    cgroup
}

#[test]
fn a_tenth_more_than_was_stated_is_enough_to_save_in_any_way_and_to_restore() {
    let Some(cgroup) = limited("enough", STATED_BYTES / 10 * 11) else { return };
    let scratch = scratch_dir();
    let output = cgroup.run(&scratch.path().join("run"), POOL_BYTES);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("\nsaved and restored 4"), "{}: {text}{errors}", output.status);
}

#[test]
fn a_pool_that_the_limit_has_no_room_for_is_refused_before_the_kernel_kills() {
    let Some(cgroup) = limited("refused", STATED_BYTES / 10 * 11) else { return };
    let scratch = scratch_dir();
    let output = cgroup.run(&scratch.path().join("run"), 4 * POOL_BYTES);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("\nrefused: "), "{}: {text}", output.status);
    assert!(text.contains("smaller pool"), "{text}");
}
