//! The commands: one file each.

mod bench;
mod copy;
mod demo;
mod inspect;
mod load;
mod verify;

use std::process::ExitCode;

use crate::args::{Args, Command};
use crate::output::Output;

/// Runs the command and gives the exit status.
pub(crate) fn run(args: &Args) -> ExitCode {
    let output = Output::new(args.json);
    let result = match &args.command {
        Command::Demo(args) => demo::run(args, &output),
        Command::Load(args) => load::run(args, &output),
        Command::Copy(args) => copy::run(args, &output),
        Command::Inspect(args) => inspect::run(args, &output),
        Command::Verify(args) => verify::run(args, &output),
        Command::Bench(args) => bench::run(args, &output),
    };
    output.finish(result)
}
