//! Loads a model to the first GPU a few times, beside the limit of the PCIe link measured in the same run:
//! `cargo run --release -p thruway --example gpu_load -- PATH [TIMES]`.

use std::time::Instant;

use thruway::memory::{Copies, CopyStreams};
use thruway::{Device, GpuBuffer, LoadOptions, PathPolicy, Session};

fn main() -> thruway::Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or_else(|| ".".into());
    let times: usize = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(3);
    let policy: PathPolicy = std::env::args().nth(3).unwrap_or_else(|| "auto".to_owned()).parse()?;
    let start = Instant::now();
    let session = Session::builder().device(Device::Cuda(0)).build()?;
    println!("start-up {:.1} ms: {}", start.elapsed().as_secs_f64() * 1e3, session.device_reason());
    for _ in 0..times {
        let start = Instant::now();
        let model = session.open(&path)?;
        let opened = start.elapsed().as_secs_f64();
        let (tensors, receipt) = model.load(LoadOptions::all().path(policy))?;
        let loaded = start.elapsed().as_secs_f64() - opened;
        println!(
            "open {:.1} ms, load {:.1} ms, {:.2} GB/s; {} tensors; ring {} MiB",
            opened * 1e3,
            loaded * 1e3,
            receipt.bytes as f64 / loaded / 1e9,
            tensors.len(),
            session.ring_bytes() >> 20
        );
        println!("{receipt}");
        let start = Instant::now();
        drop(tensors);
        println!("drop {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    limit(&session)
}

/// The rate of copies from pinned memory that was used before, with many in the queue.
fn limit(session: &Session) -> thruway::Result<()> {
    let Some(gpu) = session.gpu() else { return Ok(()) };
    let ring = thruway::memory::Ring::with_source(
        thruway::memory::RingSettings { slot_bytes: 16 << 20, slab_bytes: 64 << 20, bytes_max: 64 << 20 },
        Box::new(thruway::memory::PinnedSlabs::new(std::sync::Arc::clone(gpu))),
    );
    let slots = [ring.take(16 << 20)?, ring.take(16 << 20)?, ring.take(16 << 20)?, ring.take(16 << 20)?];
    let mut target = GpuBuffer::new(gpu, 64 << 20)?;
    for mib in [1, 4, 16] {
        let mut best = f64::MAX;
        for _ in 0..3 {
            let mut copies = Copies::new(Some(CopyStreams::new(gpu)?));
            let start = Instant::now();
            let each = mib << 20;
            for number in 0..(4_usize << 30) / each {
                let at = number % 4;
                copies.copy(&slots[at].region().slice(0..each), &target.region(at * (16 << 20)..at * (16 << 20) + each)?)?;
            }
            let mut fence = copies.fence()?;
            copies.wait(&mut fence)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("H2D limit, {mib} MiB: {:.1} GB/s", 4.0 * 1.073_741_824 / best);
    }
    Ok(())
}
