//! The commands: one file each.

mod bench;
mod checkpoint;
mod config;
mod copy;
mod demo;
mod doctor;
mod explain;
mod inspect;
mod load;
mod setup;
mod topo;
mod verify;
mod verify_direct;

use std::ffi::OsString;

use crate::args::{Args, Command};
use crate::output::Output;

/// Runs the command and gives the exit status. `again` is what starts this program anew.
pub(crate) fn run(args: &Args, again: &[OsString]) -> u8 {
    let output = Output::new(args.json);
    let result = match &args.command {
        Command::Demo(args) => demo::run(args, &output),
        Command::Load(args) => load::run(args, &output),
        Command::Explain(args) => explain::run(args, &output),
        Command::Copy(args) => copy::run(args, &output),
        Command::Inspect(args) => inspect::run(args, &output),
        Command::Verify(args) => verify::run(args, &output),
        Command::Checkpoint(args) => checkpoint::run(args, &output),
        Command::Bench(args) => bench::run(args, &output, again),
        Command::Doctor(args) => doctor::run(args, &output),
        Command::Setup(args) => setup::run(args, &output),
        Command::Topo(args) => topo::run(args, &output),
        Command::VerifyDirect(args) => verify_direct::run(args, &output),
        Command::Config(args) => config::run(args, &output),
        Command::Look => unreachable!("a helper runs no command"),
    };
    output.finish(result)
}
