//! What may be written where: `unsafe`, the raw bindings, the filesystem; and what may be left nowhere.

use super::paths::paths;
use super::{Finding, RustFile, is_in_module};
use crate::lexer::Token;

/// Modules of the library that may hold `unsafe`.
const UNSAFE_MODULES: [&str; 4] = ["cuda", "memory", "storage", "io/engine"];

/// Places outside the library's source that may. A test of the library's face is a caller like any other, and part of that
/// face is unsafe to call.
const UNSAFE_PLACES: [&str; 5] =
    ["crates/thruway-sys/", "crates/thruway-testkit/", "python/src/", "crates/thruway/tests/", "crates/thruway/examples/"];

/// Finds `unsafe` outside the modules that are reviewed for it.
pub(crate) fn misplaced_unsafe(file: &RustFile<'_>) -> Vec<Finding> {
    let is_allowed = match file.in_library() {
        Some(below) => UNSAFE_MODULES.iter().any(|module| is_in_module(below, module)),
        None => UNSAFE_PLACES.iter().any(|place| file.path.starts_with(place)),
    };
    if is_allowed {
        return Vec::new();
    }
    let message = format!("`unsafe` belongs in the library's {} only", UNSAFE_MODULES.join(", "));
    words(&file.tokens, |token| token.is_word("unsafe")).map(|line| Finding::new(line, message.clone())).collect()
}

/// Finds the raw bindings named by code that should use the safe layer over them.
pub(crate) fn misplaced_bindings(file: &RustFile<'_>) -> Vec<Finding> {
    let is_allowed = match file.in_library() {
        Some(below) => is_in_module(below, "cuda") || below.starts_with("io/engine/cufile"),
        None => ["crates/thruway-sys/", "crates/thruway-testkit/"].iter().any(|place| file.path.starts_with(place)),
    };
    if is_allowed {
        return Vec::new();
    }
    let message = "`thruway_sys` is for `cuda` and `io/engine/cufile` only";
    words(&file.tokens, |token| token.is_word("thruway_sys")).map(|line| Finding::new(line, message)).collect()
}

/// Finds the library touching the filesystem past `storage`, where a simulated disk could not stand in.
pub(crate) fn misplaced_filesystem(file: &RustFile<'_>) -> Vec<Finding> {
    let Some(below) = file.in_library() else { return Vec::new() };
    if is_in_module(below, "storage") {
        return Vec::new();
    }
    let is_filesystem = |parts: &[&str]| {
        matches!(
            parts,
            ["std" | "rustix", "fs", ..]
                | [.., "File", "open" | "create" | "create_new" | "options"]
                | [.., "OpenOptions", "new"]
        )
    };
    let mut found: Vec<Finding> = Vec::new();
    for path in paths(&file.product.tokens).iter().filter(|path| is_filesystem(&path.parts)) {
        // Two names out of one `use` line are one finding.
        if found.last().is_none_or(|last| last.line != path.line) {
            found.push(Finding::new(path.line, format!("`{}`: files are reached through `storage` only", path.parts.join("::"))));
        }
    }
    found
}

/// Finds macros that mark unfinished work.
pub(crate) fn leftovers(file: &RustFile<'_>) -> Vec<Finding> {
    let pairs = file.tokens.windows(2).enumerate();
    let calls = pairs.filter(|(index, pair)| {
        let is_comparison = file.tokens.get(index + 2).is_some_and(|token| token.is_mark("="));
        ["todo", "unimplemented", "dbg"].iter().any(|name| pair[0].is_word(name)) && pair[1].is_mark("!") && !is_comparison
    });
    calls.map(|(_, pair)| Finding::new(pair[0].line, format!("`{}!` is unfinished work", pair[0].text))).collect()
}

fn words<'a>(tokens: &'a [Token<'a>], wanted: impl Fn(&Token<'a>) -> bool + 'a) -> impl Iterator<Item = usize> + 'a {
    tokens.iter().filter(move |token| wanted(token)).map(|token| token.line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rule: fn(&RustFile<'_>) -> Vec<Finding>, path: &str, source: &str) -> Vec<usize> {
        rule(&RustFile::new(path, source)).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn unsafe_is_found_outside_its_modules_even_in_tests() {
        let source = "fn a() {}\nunsafe fn b() {}\n#[cfg(test)]\nmod t { fn c() { unsafe { d() } } }";
        assert_eq!(lines(misplaced_unsafe, "crates/thruway/src/io/policy.rs", source), [2, 4]);
        assert_eq!(lines(misplaced_unsafe, "crates/thruway-cli/src/main.rs", source), [2, 4]);
    }

    #[test]
    fn unsafe_is_allowed_where_it_is_reviewed() {
        for path in [
            "crates/thruway/src/cuda/stream.rs",
            "crates/thruway/src/memory/mod.rs",
            "crates/thruway/src/storage/open.rs",
            "crates/thruway/src/io/engine/uring.rs",
            "crates/thruway-sys/src/lib.rs",
            "crates/thruway-testkit/src/lib.rs",
            "crates/thruway/tests/borrowed_memory.rs",
            "python/src/lib.rs",
        ] {
            assert_eq!(lines(misplaced_unsafe, path, "unsafe {}"), [0; 0], "{path}");
        }
    }

    #[test]
    fn the_name_of_a_lint_or_a_comment_is_not_unsafe() {
        let source = "#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]\n// unsafe\nconst A: &str = \"unsafe\";";
        assert_eq!(lines(misplaced_unsafe, "crates/thruway/src/lib.rs", source), [0; 0]);
    }

    #[test]
    fn the_raw_bindings_are_named_by_the_layer_over_them_only() {
        let source = "use thruway_sys::cuda;";
        assert_eq!(lines(misplaced_bindings, "crates/thruway/src/memory/gpu.rs", source), [1]);
        assert_eq!(lines(misplaced_bindings, "crates/thruway-cli/src/main.rs", source), [1]);
        assert_eq!(lines(misplaced_bindings, "crates/thruway/src/cuda/mod.rs", source), [0; 0]);
        assert_eq!(lines(misplaced_bindings, "crates/thruway/src/io/engine/cufile.rs", source), [0; 0]);
        assert_eq!(lines(misplaced_bindings, "crates/thruway/src/io/engine/cufile/stats.rs", source), [0; 0]);
        assert_eq!(lines(misplaced_bindings, "crates/thruway/src/memory/gpu.rs", "// thruway_sys"), [0; 0]);
    }

    #[test]
    fn the_filesystem_is_found_however_it_is_reached() {
        let find = |source| lines(misplaced_filesystem, "crates/thruway/src/model/mod.rs", source);
        assert_eq!(find("use std::fs;"), [1]);
        assert_eq!(find("use std::{io, fs::{self, File}};"), [1]);
        assert_eq!(find("fn f() { rustix::fs::fsync(x); }"), [1]);
        assert_eq!(find("fn f() { let a = File::open(b); }"), [1]);
        assert_eq!(find("fn f() {\n::std::fs::remove_file(b); }"), [2]);
    }

    #[test]
    fn storage_and_tests_may_touch_the_filesystem() {
        let source = "use std::fs::File;";
        assert_eq!(lines(misplaced_filesystem, "crates/thruway/src/storage/mod.rs", source), [0; 0]);
        assert_eq!(lines(misplaced_filesystem, "crates/thruway-cli/src/main.rs", source), [0; 0]);
        assert_eq!(lines(misplaced_filesystem, "crates/thruway/src/model/tests.rs", source), [0; 0]);
        let source = "use std::os::fd::OwnedFd;\n#[cfg(test)]\nmod tests { use std::fs; }";
        assert_eq!(lines(misplaced_filesystem, "crates/thruway/src/model/mod.rs", source), [0; 0]);
    }

    #[test]
    fn unfinished_work_is_found_in_code_only() {
        let source = "fn a() { todo!() }\nfn b() { unimplemented!(\"x\") }\nfn c() { dbg!(1); }";
        assert_eq!(lines(leftovers, "xtask/src/main.rs", source), [1, 2, 3]);
        let source = "// todo!()\nfn a() { todo != b; let dbg = \"dbg!(1)\"; not_todo!() }";
        assert_eq!(lines(leftovers, "xtask/src/main.rs", source), [0; 0]);
    }
}
