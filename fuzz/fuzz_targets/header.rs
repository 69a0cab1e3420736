//! Any bytes, taken for a whole safetensors file, and once more for the text of a header alone.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    thruway_fuzz::check_header(bytes);
    thruway_fuzz::check_header_text(bytes);
});
