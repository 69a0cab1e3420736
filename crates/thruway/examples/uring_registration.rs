//! Measures what registered buffers and registered files gain over plain io_uring requests past the page cache:
//! `cargo run --release -p thruway --example uring_registration -- FILE [REQUEST_KIB]`. The file should be at
//! least a gigabyte. Prints rate and CPU seconds a gigabyte of each way, medians of five. It is what
//! `docs/decisions/0003-uring-without-registration.md` rests on.

#![expect(unsafe_code, reason = "it measures the raw interface")]

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};
use thruway::HostBuffer;

const DEPTH: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let path = arguments.next().ok_or("usage: uring_registration FILE [REQUEST_KIB]")?;
    let kib: usize = arguments.next().map_or(Ok(4096), |text| text.to_string_lossy().parse())?;
    let file = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut buffer = HostBuffer::new(DEPTH * (kib << 10))?;
    buffer.bytes_mut()?.fill(1);
    for (fixed_buffers, fixed_file) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut runs =
            (0..5).map(|_| read_all(&file, &buffer, kib << 10, fixed_buffers, fixed_file)).collect::<Result<Vec<_>, _>>()?;
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (rate, cpu) = runs[2];
        println!("registered buffers {fixed_buffers:5}, file {fixed_file:5}: {rate:.3} GB/s, {cpu:.4} CPU s/GB");
    }
    Ok(())
}

/// Reads the whole file in requests of `size` bytes. Gives GB/s and CPU seconds a GB.
fn read_all(
    file: &std::fs::File,
    buffer: &HostBuffer,
    size: usize,
    fixed_buffers: bool,
    fixed_file: bool,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let mut ring = IoUring::new(u32::try_from(DEPTH)?)?;
    let address = |slot: usize| (buffer.address() + slot * size) as *mut u8;
    if fixed_buffers {
        let vectors: Vec<libc::iovec> =
            (0..DEPTH).map(|slot| libc::iovec { iov_base: address(slot).cast(), iov_len: size }).collect();
        // SAFETY: the buffer outlives the ring, which is dropped at the end of this function.
        unsafe { ring.submitter().register_buffers(&vectors)? };
    }
    if fixed_file {
        ring.submitter().register_files(&[file.as_raw_fd()])?;
    }
    let length = file.metadata()?.len() / size as u64 * size as u64;
    let (mut next, mut done, mut free) = (0_u64, 0_u64, (0..DEPTH).collect::<Vec<usize>>());
    let (start, cpu) = (Instant::now(), cpu_seconds());
    while done < length {
        while next < length
            && let Some(slot) = free.pop()
        {
            let (bytes, index) = (u32::try_from(size)?, u16::try_from(slot)?);
            let entry = match (fixed_buffers, fixed_file) {
                (false, false) => opcode::Read::new(types::Fd(file.as_raw_fd()), address(slot), bytes).offset(next).build(),
                (false, true) => opcode::Read::new(types::Fixed(0), address(slot), bytes).offset(next).build(),
                (true, false) => {
                    opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), address(slot), bytes, index).offset(next).build()
                }
                (true, true) => opcode::ReadFixed::new(types::Fixed(0), address(slot), bytes, index).offset(next).build(),
            };
            // SAFETY: each slot is a range of the buffer that no other request in flight uses; the loop ends only
            // when all have completed.
            unsafe { ring.submission().push(&entry.user_data(slot as u64))? };
            next += size as u64;
        }
        ring.submit_and_wait(1)?;
        for entry in ring.completion() {
            done += u64::try_from(entry.result()).map_err(|_| std::io::Error::from_raw_os_error(-entry.result()))?;
            free.push(usize::try_from(entry.user_data())?);
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate needs three digits")]
    let gigabytes = length as f64 / 1e9;
    Ok((gigabytes / start.elapsed().as_secs_f64(), (cpu_seconds() - cpu) / gigabytes))
}

fn cpu_seconds() -> f64 {
    thruway::storage::process_cpu_seconds()
}
