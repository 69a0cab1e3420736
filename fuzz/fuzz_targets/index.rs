//! Any bytes, taken for the index of a sharded model.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| thruway_fuzz::check_index(text));
