//! Loads a model and prints which way its bytes went: `cargo run --release --example load -- PATH`.

use thruway::{LoadOptions, Session};

fn main() -> thruway::Result<()> {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: load PATH");
        std::process::exit(2);
    };
    let session = Session::builder().build()?;
    let model = session.open(path)?;
    let (tensors, receipt) = model.load(LoadOptions::all())?;
    println!("{} tensors: {receipt}", tensors.len());
    Ok(())
}
