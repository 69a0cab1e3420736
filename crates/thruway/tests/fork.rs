//! A child after a fork shares neither rings nor threads with its parent: a session made before goes on in both.

use thruway::{LoadOptions, PathPolicy, Session};

#[test]
fn a_session_works_in_a_forked_child_and_in_its_parent() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files");
    let path = directory.path().join("model.safetensors");
    let header = serde_json::json!({"t": {"dtype": "U8", "shape": [300_000], "data_offsets": [0, 300_000]}}).to_string();
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 300_000]].concat()).expect("write");
    let session = Session::builder().build().expect("session");
    let load = || {
        let policy: PathPolicy = "staged".parse().expect("known");
        let model = session.open(&path).expect("open");
        let (tensors, _) = model.load(LoadOptions::all().path(policy)).expect("load");
        tensors.get("t").expect("loaded").bytes().expect("done") == [7; 300_000]
    };
    assert!(load(), "the parent makes its io_uring");
    // SAFETY: the child calls into this thread's own code only and leaves by `_exit`, without running the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(load)).unwrap_or(false);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local that lives through the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with status {status:#x}");
    assert!(load(), "the parent goes on");
}
