//! Any bytes, taken for the manifest of a checkpoint.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    thruway_fuzz::check_manifest(text);
    thruway_fuzz::check_manifest_inside(text);
});
