//! What a container's seccomp profile, an old kernel or a sandbox takes away: loads, saves and copies go on by another
//! way, with the same bytes, and the receipt says why.
//!
//! The filter is installed on the test's own thread, which the threads of its session inherit; other tests of the
//! same process are not touched.

use std::path::Path;

use thruway::format::safetensors::Dtype;
use thruway::{HostBuffer, LoadOptions, PathPolicy, Receipt, SaveOptions, Session, Source, VerifyOptions};

/// One classic BPF instruction: `struct sock_filter` of linux/filter.h.
fn op(code: u16, jump_true: u8, jump_false: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: jump_true, jf: jump_false, k }
}

/// Makes the given system calls of this thread, and of those it starts, fail with `errno`.
#[cfg(target_arch = "x86_64")]
fn deny(errno: i32, calls: &[libc::c_long]) {
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ALLOW: u32 = 0x7fff_0000;
    const FAIL: u32 = 0x0005_0000;
    let count = u8::try_from(calls.len()).expect("few");
    let mut program = vec![op(LOAD, 0, 0, 0)];
    for (number, call) in (0_u8..).zip(calls) {
        program.push(op(JUMP_IF_EQUAL, count - number, 0, u32::try_from(*call).expect("a call number")));
    }
    program.push(op(RETURN, 0, 0, ALLOW));
    program.push(op(RETURN, 0, 0, FAIL | u32::try_from(errno).expect("positive")));
    let filter = libc::sock_fprog { len: u16::try_from(program.len()).expect("short"), filter: program.as_mut_ptr() };
    // SAFETY: the program lives through the call, which copies it; no new privileges is what an unprivileged filter needs.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn content(seed: u8) -> Vec<u8> {
    (0..3_000_001_u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
}

fn write_model(path: &Path) {
    let data = content(1);
    let header = serde_json::json!({"t": {"dtype": "U8", "shape": [data.len()], "data_offsets": [0, data.len()]}}).to_string();
    std::fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).expect("write");
}

/// Loads, saves and verifies; gives the receipt of a load past the page cache.
fn all_works(directory: &Path) -> Receipt {
    let path = directory.join("model.safetensors");
    let session = Session::builder().build().expect("session");
    let model = session.open(&path).expect("open");
    for policy in [PathPolicy::Auto, "cached".parse().expect("known")] {
        let (tensors, _) = model.load(LoadOptions::all().path(policy)).expect("load");
        assert!(tensors.get("t").expect("loaded").bytes().expect("done") == content(1));
    }
    let buffer = HostBuffer::from_vec(content(2));
    let source = Source::new("t", Dtype::U8, [3_000_001], buffer.source(0..3_000_001).expect("all"));
    let target = directory.join("saved.safetensors");
    session.save(&[source], &target, SaveOptions::default()).expect("save");
    let (saved, _) = session.open(&target).and_then(|saved| saved.load(LoadOptions::all())).expect("load");
    assert!(saved.get("t").expect("loaded").bytes().expect("done") == content(2));
    let copy = directory.join("copy");
    model.copy_to(&copy, thruway::CopyOptions::default().max_shard_size(thruway::ByteSize(1))).expect("copy");
    let verdict = session.open(&copy).and_then(|copy| model.verify(Some(&copy), &VerifyOptions::default())).expect("verify");
    assert!(verdict.differences.is_empty());
    model.load(LoadOptions::all().path("staged".parse().expect("known"))).expect("staged").1
}

/// Runs [`all_works`] with some calls denied, on a thread of its own.
fn with_denied(errno: i32, calls: &[libc::c_long]) -> Receipt {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files");
    write_model(&directory.path().join("model.safetensors"));
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            deny(errno, calls);
            all_works(directory.path())
        });
        run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

const URING: [libc::c_long; 3] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
/// `cachestat(2)`, which the libc crate does not name everywhere.
const SYS_CACHESTAT: libc::c_long = 451;

fn reasons(receipt: &Receipt) -> String {
    let parts = receipt.files.iter().flat_map(|file| &file.parts);
    parts.map(|part| format!("{} {}", part.engine, part.reason)).collect::<Vec<_>>().join("\n")
}

#[test]
fn without_io_uring_threads_go_on_and_the_receipt_says_why() {
    for (errno, word) in [(libc::EPERM, "blocked"), (libc::ENOSYS, "no io_uring")] {
        let receipt = with_denied(errno, &URING);
        let reasons = reasons(&receipt);
        assert!(reasons.starts_with("posix") && reasons.contains(word), "{reasons}");
    }
}

#[test]
fn with_only_part_of_io_uring_allowed_it_is_not_used() {
    let receipt = with_denied(libc::EPERM, &[libc::SYS_io_uring_enter]);
    assert!(reasons(&receipt).contains("blocked"), "{}", reasons(&receipt));
}

#[test]
fn io_uring_works_without_its_registrations() {
    with_denied(libc::EINVAL, &[libc::SYS_io_uring_register]);
}

#[test]
fn without_a_single_thread_more_everything_is_done_on_the_callers() {
    with_denied(libc::EAGAIN, &[libc::SYS_clone3, libc::SYS_clone]);
}

#[test]
fn an_old_kernel_without_the_newer_calls_does_as_well() {
    with_denied(libc::ENOSYS, &[libc::SYS_statx]);
    with_denied(libc::ENOSYS, &[SYS_CACHESTAT]);
    with_denied(libc::EPERM, &[SYS_CACHESTAT, libc::SYS_preadv2]);
    with_denied(libc::ENOSYS, &[libc::SYS_renameat2, libc::SYS_copy_file_range, libc::SYS_fallocate, libc::SYS_openat2]);
    with_denied(libc::EPERM, &[libc::SYS_mbind, libc::SYS_set_mempolicy, libc::SYS_get_mempolicy, libc::SYS_sched_setaffinity]);
    with_denied(libc::EINVAL, &[libc::SYS_madvise, libc::SYS_fadvise64]);
}
