//! The `thruway` command: load, copy, inspect, verify and measure safetensors models.
//!
//! Each command parses (without effects), validates, builds and runs. Data goes to standard output, everything else
//! to standard error.

#![forbid(unsafe_code)]

mod args;
mod command;
mod escape;
mod link;
mod machine;
mod measure;
mod output;
mod place;
mod roofline;
mod scratch;
mod stop;
mod synthetic;

use std::process::ExitCode;

fn main() -> ExitCode {
    match args::parse() {
        Ok(args) => {
            stop::listen();
            command::run(&args)
        }
        Err(usage) => output::report_usage(&usage),
    }
}
