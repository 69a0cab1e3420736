//! Any bytes, taken for a cufile.json.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| thruway_fuzz::check_cufile(bytes));
