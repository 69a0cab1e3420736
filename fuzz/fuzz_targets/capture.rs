//! Any bytes, taken for the facts of a captured machine: every reader of /proc and /sys.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| thruway_fuzz::check_capture(bytes));
