//! The `thruway` command: load, copy, inspect, verify and measure safetensors models.
//!
//! Each command parses (without effects), validates, builds and runs. Data goes to standard output, everything else
//! to standard error. It is a library so that the Python package can bring the command along.

#![forbid(unsafe_code)]

mod args;
mod command;
mod escape;
mod facts;
mod link;
mod machine;
mod measure;
mod output;
mod place;
mod roofline;
mod scratch;
mod settings_file;
mod stop;
mod synthetic;

use std::ffi::OsString;

/// Runs a command line and gives the exit status. `arguments` begin with the program's name; `again` starts the same
/// program anew, before a command and its arguments: some things are measured in processes of their own.
///
/// From then on this process listens for signals as the command does.
pub fn run(arguments: &[OsString], again: &[OsString]) -> u8 {
    match args::parse(arguments) {
        // It ends with whoever asks it, or is killed, and signals have no other meaning for it.
        Ok(args) if matches!(args.command, args::Command::Look) => u8::from(thruway::doctor::facts::serve().is_err()),
        Ok(args) => {
            stop::listen();
            facts::look_through(again);
            command::run(&args, again)
        }
        Err(usage) => output::report_usage(&usage, arguments),
    }
}
