//! The fake cuFile: it moves the right bytes, counts as each version does, and notices misuse.

#[allow(dead_code, reason = "other tests use the rest")]
mod support;

use std::ffi::c_void;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::{null_mut, without_provenance_mut};

use support::Driver;
use thruway_sys::cufile::*;
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fake_cufile::FakeCuFile;
use thruway_testkit::fixtures::scratch_dir;
use thruway_testkit::random::Random;

/// A device address as cuFile wants it.
fn at(memory: u64) -> *mut c_void {
    without_provenance_mut(usize::try_from(memory).expect("64-bit machine"))
}

fn code(answer: CUfileError_t) -> CUfileOpError {
    answer.err
}

fn registered(cufile: &CuFile, file: &std::fs::File) -> Result<CUfileHandle_t, CUfileOpError> {
    let (mut handle, mut description) = (null_mut(), CUfileDescr_t::of_descriptor(file.as_raw_fd()));
    // SAFETY: both pointers are to locals that live through the call.
    match code(unsafe { (cufile.cuFileHandleRegister)(&raw mut handle, &raw mut description) }) {
        CU_FILE_SUCCESS => Ok(handle),
        failed => Err(failed),
    }
}

/// A file open past the page cache where that is to be had.
fn open(path: &Path) -> std::fs::File {
    let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    direct.or_else(|_| OpenOptions::new().read(true).write(true).open(path)).expect("the file opens")
}

#[test]
fn bytes_travel_between_files_and_device_memory_at_any_alignment() {
    let fake = FakeCuda::start("");
    let fake_cufile = FakeCuFile::start(&fake, "");
    let driver = Driver::new(&fake);
    let cufile = CuFile::load(Some(fake_cufile.path())).expect("the fake is there and complete");
    let (folder, bytes) = (scratch_dir(), Random::new(5).bytes(100_000));
    std::fs::write(folder.path().join("a"), &bytes).expect("written");
    let file = open(&folder.path().join("a"));
    let memory = driver.alloc(65_536);
    // SAFETY: every range lies in live memory, every handle is registered.
    unsafe {
        assert_eq!(code((cufile.cuFileDriverOpen)()), CU_FILE_SUCCESS);
        assert_eq!(code((cufile.cuFileDriverOpen)()), CU_FILE_DRIVER_ALREADY_OPEN);
        let handle = registered(&cufile, &file).expect("a regular file");
        assert_eq!(registered(&cufile, &file), Err(CU_FILE_HANDLE_ALREADY_REGISTERED));
        assert_eq!(code((cufile.cuFileBufRegister)(at(memory), 65_536, 0)), CU_FILE_SUCCESS);
        let base = at(memory);
        for (offset, from_base, length) in [(0, 0, 65_536), (4_096, 8_192, 4_096), (17, 1_001, 30_003), (99_990, 5, 100)] {
            let moved = (cufile.cuFileRead)(handle, base, length, offset, from_base);
            let (offset, from_base) = (usize::try_from(offset).expect("small"), u64::try_from(from_base).expect("small"));
            let expected = &bytes[offset..(offset + length).min(bytes.len())];
            assert_eq!(moved.unsigned_abs(), expected.len());
            assert!(fake.device_bytes(memory + from_base, expected.len()) == expected, "{length} bytes from {offset}");
        }
        assert_eq!((cufile.cuFileWrite)(handle, base, 10, 200_000, 5), 10);
        assert_eq!(code((cufile.cuFileBufDeregister)(base)), CU_FILE_SUCCESS);
        (cufile.cuFileHandleDeregister)(handle);
        assert_eq!(code((cufile.cuFileDriverClose_v2)()), CU_FILE_SUCCESS);
    }
    fake_cufile.assert_clean();
    driver.try_free(memory);
    driver.close();
}

#[test]
fn each_version_writes_its_own_statistics_and_counters_lie_when_they_are_told_to() {
    for (version, size) in [(1150, 5000), (1180, 5000), (1190, 5112), (1200, 5112)] {
        for (counters, expected) in [("true", 4096), ("half", 2048), ("still", 0), ("other", 0)] {
            let fake = FakeCuda::start("DEVICES=2");
            let fake_cufile = FakeCuFile::start(&fake, &format!("VERSION={version}; WAY=p2p; COUNTERS={counters}"));
            let driver = Driver::new(&fake);
            let cufile = CuFile::load(Some(fake_cufile.path())).expect("the fake is there and complete");
            let folder = scratch_dir();
            std::fs::write(folder.path().join("a"), vec![7; 4096]).expect("written");
            let file = open(&folder.path().join("a"));
            let memory = driver.alloc(4096);
            let function = |found: Option<unsafe extern "C" fn(i32) -> CUfileError_t>| found.expect("1.15 has it");
            let mut room = [0xaa_u8; 8192];
            // SAFETY: every range lies in live memory, every handle is registered, the room is larger than any structure.
            unsafe {
                assert_eq!(code(function(cufile.cuFileSetStatsLevel)(3)), CU_FILE_SUCCESS);
                assert_eq!(code((cufile.cuFileDriverOpen)()), CU_FILE_SUCCESS);
                assert_eq!(code(cufile.cuFileStatsStart.expect("1.15 has it")()), CU_FILE_SUCCESS);
                let handle = registered(&cufile, &file).expect("a regular file");
                assert_eq!((cufile.cuFileRead)(handle, at(memory), 4096, 0, 0), 4096);
                let statistics = cufile.cuFileGetStatsL3.expect("1.15 has it");
                assert_eq!(code(statistics(room.as_mut_ptr().cast())), CU_FILE_SUCCESS);
                let mut buffer = StatsBuffer::default();
                assert_eq!(code(statistics(buffer.as_mut_ptr())), CU_FILE_SUCCESS);
                let gpus = buffer.per_gpu(StatsLayout::of_version(version).expect("known"));
                assert_eq!(gpus.len(), 2);
                assert_eq!((gpus[0].read_bytes, gpus[0].n_p2p_reads), (expected, u64::from(expected > 0)), "{counters}");
                assert_eq!((&gpus[0].uuid[..4], gpus[0].n_posix_reads), (&b"FAKE"[..], 0));
                (cufile.cuFileHandleDeregister)(handle);
            }
            assert!(room[..size].iter().all(|byte| *byte != 0xaa) && room[size..].iter().all(|byte| *byte == 0xaa), "{version}");
            driver.try_free(memory);
            driver.close();
        }
    }
}

#[test]
fn misuse_is_a_fault() {
    let fake = FakeCuda::start("");
    let fake_cufile = FakeCuFile::start(&fake, "");
    let driver = Driver::new(&fake);
    let cufile = CuFile::load(Some(fake_cufile.path())).expect("the fake is there and complete");
    let folder = scratch_dir();
    std::fs::write(folder.path().join("a"), [1; 4096]).expect("written");
    let file = open(&folder.path().join("a"));
    let memory = driver.alloc(4096);
    // SAFETY: what is wrong here the fake finds out by itself.
    unsafe {
        let handle = registered(&cufile, &file).expect("a regular file");
        assert_eq!(code((cufile.cuFileBufRegister)(at(memory), 4096, 0)), CU_FILE_SUCCESS);
        assert_eq!(code((cufile.cuFileDriverClose_v2)()), CU_FILE_SUCCESS);
        drop(file);
        driver.try_free(memory);
        (cufile.cuFileHandleDeregister)(handle);
        (cufile.cuFileHandleDeregister)(handle);
        assert_eq!(code((cufile.cuFileBufDeregister)(at(memory))), CU_FILE_SUCCESS);
    }
    let kinds: Vec<String> = fake_cufile.faults().into_iter().map(|fault| fault.kind).collect();
    assert_eq!(kinds, ["closed_with_registrations", "closed_while_registered", "unknown_handle", "freed_while_registered"]);
    driver.close();
}

#[test]
fn without_a_started_driver_nothing_opens_and_that_is_a_fault() {
    let fake = FakeCuda::start("");
    let fake_cufile = FakeCuFile::start(&fake, "VERSION=1190");
    let cufile = CuFile::load(Some(fake_cufile.path())).expect("the fake is there and complete");
    // SAFETY: it takes nothing.
    assert_eq!(code(unsafe { (cufile.cuFileDriverOpen)() }), CU_FILE_NVFS_SETUP_ERROR);
    assert_eq!(fake_cufile.faults()[0].kind, "called_without_cuda");
}

#[test]
fn rules_give_every_code_as_a_return_value_and_as_an_error_number() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let folder = scratch_dir();
    std::fs::write(folder.path().join("a"), [1; 4096]).expect("written");
    let file = open(&folder.path().join("a"));
    for (wanted, ..) in CODES.iter().filter(|(code, ..)| *code != CU_FILE_SUCCESS) {
        for (written, errno) in [(format!("{}", wanted.0), false), (format!("e{}", wanted.0), true)] {
            let fake_cufile = FakeCuFile::start(&fake, &format!("FAIL=cuFileRead:1:{written}"));
            let cufile = CuFile::load(Some(fake_cufile.path())).expect("the fake is there and complete");
            let memory = driver.alloc(4096);
            // SAFETY: the range lies in live memory, the handle is registered; the thread's error number is its own.
            unsafe {
                let handle = registered(&cufile, &file).expect("a regular file");
                let returned = (cufile.cuFileRead)(handle, at(memory), 4096, 0, 0);
                assert_eq!(returned == -1, errno);
                assert_eq!(IoReturn::decode(returned, *libc::__errno_location()), IoReturn::Code(*wanted));
                assert_eq!((cufile.cuFileRead)(handle, at(memory), 4096, 0, 0), 4096);
                (cufile.cuFileHandleDeregister)(handle);
            }
            fake_cufile.assert_clean();
            driver.try_free(memory);
        }
    }
    driver.close();
}
