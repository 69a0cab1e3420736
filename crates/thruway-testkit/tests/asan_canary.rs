//! Proof that AddressSanitizer is on where it is said to be.
//!
//! A sanitizer that was not switched on finds nothing, which looks just like code without faults. `cargo xtask asan` runs
//! this test before all others and goes on only if the sanitizer kills it.

use std::hint::black_box;

/// Not a test of the project's code, and wrong on purpose: ignored everywhere but there.
#[test]
#[ignore = "reads freed memory; `cargo xtask asan` runs it and expects it to be caught"]
fn reading_freed_memory_is_caught_by_the_sanitizer() {
    let freed = {
        let buffer = black_box(vec![1_u8; 64]);
        buffer.as_ptr()
    };
    // SAFETY: none. The buffer is gone: this is the very fault that the sanitizer has to report. Volatile, so that the
    // compiler does not leave the read out.
    let byte = unsafe { black_box(freed).read_volatile() };
    println!("read {byte} from freed memory, and nobody objected");
}
