//! The project's chores, as `cargo xtask <command>`.
//!
//! They are a program rather than scripts so that they are type-checked, tested and the same everywhere. It depends on
//! the standard library alone: it is the first thing that a fresh clone builds, and it has to be quick.

mod asan;
mod ci;
mod lexer;
mod p2pdma;
mod rules;
mod tidy;
mod tree;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask <COMMAND>

Commands:
  tidy   Check the rules of style and layering that compiler and linter do not know
  ci     Run everything that CI runs, in its order; stop at the first failure
  asan   Run the library's tests under AddressSanitizer
  p2pdma Prove the direct path in an emulated machine
  help   Print this text
";

/// The exit status for a command line that makes no sense, as in the product's own program.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["tidy"] => tidy::run(&workspace_root()),
        ["ci"] => ci::run(&workspace_root()),
        ["asan"] => asan::run(&workspace_root()),
        ["p2pdma"] => p2pdma::run(&workspace_root()),
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(USAGE);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The directory of the workspace's `Cargo.toml`.
///
/// Cargo says at run time where this package lies; the path seen when it was compiled is the fallback for a
/// binary started by hand.
fn workspace_root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let package = Path::new(&package);
    package.parent().unwrap_or(package).to_path_buf()
}
