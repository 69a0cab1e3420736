//! Any bytes, given to each parser of /proc and /sys by itself, and taken for a name.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| thruway_fuzz::check_parsers(bytes));
