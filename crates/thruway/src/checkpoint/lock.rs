//! One at a time: whoever changes a directory of checkpoints holds its lock, and what others find unfinished there while they
//! hold it belongs to nobody who lives.
//!
//! The lock is the kernel's (`flock`), which releases it when its holder ends, however that happens. The file says who holds
//! it, for people, and for the one case in which the kernel keeps a lock of a process that is gone: a child that it forked
//! (a data loader's worker) shares the lock and lives on. If the record shows beyond doubt that the owner is gone, the file is
//! removed, and the lock with it. All of that is done under a second lock, held for no longer, so that nobody ever reads the
//! record of the owner before last, and no two take the lock from one another.

use std::path::{Path, PathBuf};

use super::names::LOCK;
use crate::base::{Error, ErrorKind, Result};
use crate::storage::{Access, Buffering, Lock, Namespace, Process};

/// The length of the record: written in one piece whatever stood there before.
const RECORD_BYTES: usize = 1024;

/// What the second lock is called, behind the name of the first.
const TAKING: &str = "-taking";

/// Takes the lock of a directory, without waiting.
///
/// # Errors
/// [`AlreadyExists`](ErrorKind::AlreadyExists) with the owner as a fact, if somebody holds it.
pub(super) fn take(namespace: &dyn Namespace, directory: &Path) -> Result<Box<dyn Lock>> {
    let path = directory.join(LOCK);
    let second = PathBuf::from(format!("{}{TAKING}", path.display()));
    let taking = namespace.lock(&second).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => refused(error, None),
        _ => error,
    })?;
    let lock = match namespace.lock(&path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let owner = read_owner(namespace, &path);
            if !owner.as_ref().is_some_and(Process::is_gone) {
                namespace.remove(&second)?;
                return Err(refused(error, owner.as_ref()));
            }
            namespace.remove(&path)?;
            namespace.lock(&path)?
        }
        taken => taken?,
    };
    write_owner(namespace, &path, &Process::this())?;
    namespace.remove(&second)?;
    drop(taking);
    Ok(lock)
}

fn refused(held: Error, owner: Option<&Process>) -> Error {
    let owner = owner.map_or_else(|| "unknown".to_owned(), ToString::to_string);
    held.with("owner", owner).with_hint("wait for it; its lock goes when it ends")
}

/// Whose lock it is; `None` if nobody has said so yet.
fn read_owner(namespace: &dyn Namespace, path: &Path) -> Option<Process> {
    let file = namespace.open(path, Access::Read, Buffering::PageCache).ok()?;
    let mut record = vec![0; RECORD_BYTES];
    let read = file.read_at(&mut record, 0).ok()?;
    serde_json::from_slice(record[..read].trim_ascii_end()).ok()
}

/// Writes the record. A full disk must not keep anybody from making room: then a new lock's file stays empty, and its owner
/// unknown, which nobody takes for gone.
fn write_owner(namespace: &dyn Namespace, path: &Path, owner: &Process) -> Result<()> {
    let failed = |source| Error::from_io("cannot say who holds the lock", source).with_file(path);
    let mut record = serde_json::to_vec(owner).map_err(|error| failed(error.into()))?;
    record.resize(RECORD_BYTES.max(record.len()), b' ');
    let file = namespace.open(path, Access::Write, Buffering::PageCache)?;
    let mut written = 0;
    while written < record.len() {
        match file.write_at(&record[written..], written as u64) {
            Ok(0) => return Err(failed(std::io::ErrorKind::WriteZero.into())),
            Ok(count) => written += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                let error = failed(error);
                return if error.kind() == ErrorKind::NoSpace && file.identity()?.length == 0 { Ok(()) } else { Err(error) };
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::OsNamespace;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in(std::env::temp_dir()).expect("a directory")
    }

    #[test]
    fn the_second_is_refused_and_told_who_holds_it_until_the_first_is_done() {
        let directory = directory();
        let lock = take(&OsNamespace, directory.path()).expect("free");
        let error = take(&OsNamespace, directory.path()).expect_err("it is held");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        let owner = error.context("owner").expect("who holds it");
        assert!(owner.contains(&std::process::id().to_string()), "{owner}");
        drop(lock);
        take(&OsNamespace, directory.path()).expect("free again");
    }

    #[test]
    fn the_lock_of_an_owner_that_is_gone_is_taken_over_though_its_child_still_holds_it() {
        let directory = directory();
        let path = directory.path().join(LOCK);
        // A handle that lives on, as a forked child's would.
        let of_a_child = OsNamespace.lock(&path).expect("free");
        let gone = Process { started: Process::this().started + 1, ..Process::this() };
        write_owner(&OsNamespace, &path, &gone).expect("a small file");
        let lock = take(&OsNamespace, directory.path()).expect("its owner is gone");
        let error = take(&OsNamespace, directory.path()).expect_err("it is held again");
        assert!(error.context("owner").is_some(), "{error}");
        drop(of_a_child);
        take(&OsNamespace, directory.path()).expect_err("what the child held is no lock any more");
        drop(lock);
        take(&OsNamespace, directory.path()).expect("free");
        let names: Vec<_> = OsNamespace.list(directory.path()).expect("a list");
        assert_eq!(names, [LOCK], "the takeover leaves nothing behind");
    }

    #[test]
    fn whoever_comes_while_another_is_taking_it_is_refused_and_never_judges_an_old_record() {
        let directory = directory();
        let path = directory.path().join(LOCK);
        drop(take(&OsNamespace, directory.path()).expect("free"));
        let gone = Process { started: Process::this().started + 1, ..Process::this() };
        write_owner(&OsNamespace, &path, &gone).expect("a small file");
        // Another has taken the lock and not yet signed it.
        let _taking = OsNamespace.lock(&PathBuf::from(format!("{}{TAKING}", path.display()))).expect("free");
        let _lock = OsNamespace.lock(&path).expect("free");
        let error = take(&OsNamespace, directory.path()).expect_err("it is being taken");
        assert_eq!((error.kind(), error.context("owner")), (ErrorKind::AlreadyExists, Some("unknown")));
    }

    #[test]
    fn the_lock_of_an_owner_of_whom_nothing_is_known_is_respected() {
        let directory = directory();
        let path = directory.path().join(LOCK);
        let _held = OsNamespace.lock(&path).expect("free");
        assert_eq!(take(&OsNamespace, directory.path()).expect_err("held").context("owner"), Some("unknown"));
        let far = Process { boot: "elsewhere".to_owned(), pid: u32::MAX, ..Process::this() };
        write_owner(&OsNamespace, &path, &far).expect("a small file");
        let error = take(&OsNamespace, directory.path()).expect_err("it may live");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    }
}
