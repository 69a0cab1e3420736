//! Saves one tensor and loads a slice of it: `cargo run --release --example save -- FILE`.

use thruway::{Dtype, HostBuffer, LoadOptions, SaveOptions, Session, Source};

fn main() -> thruway::Result<()> {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: save FILE");
        std::process::exit(2);
    };
    let path = std::path::PathBuf::from(path);
    let session = Session::builder().device(thruway::Device::Host).build()?;
    let mut buffer = HostBuffer::new(4 * 1024)?;
    buffer.bytes_mut()?.fill(7);
    let source = Source::new("weights", Dtype::U8, [4, 1024], buffer.source(0..buffer.len())?);
    println!("saved {}", session.save(&[source], &path, SaveOptions::default())?);

    let second_row = LoadOptions::all().select(["weights"]).slice("weights", 0, 1..2);
    let (tensors, receipt) = session.open(&path)?.load(second_row)?;
    println!("{} tensor: {receipt}", tensors.len());
    Ok(())
}
