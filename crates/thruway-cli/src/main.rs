//! The `thruway` command as a program.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let again = std::env::current_exe().map_or_else(|_| arguments[..1.min(arguments.len())].to_vec(), |path| vec![path.into()]);
    ExitCode::from(thruway_cli::run(&arguments, &again))
}
