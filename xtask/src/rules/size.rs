//! A file that fits a sitting, a function that fits a screen. Tests are not counted: many small cases make a long file
//! that nobody has to hold in mind at once.

use super::{Finding, RustFile};
use crate::lexer::{Kind, group_end};

/// The most lines a file may have.
pub(crate) const FILE_LINES: usize = 600;

/// The most lines a function may have, from its `fn` to its closing brace.
pub(crate) const FUNCTION_LINES: usize = 70;

/// Finds a file that has grown too long.
pub(crate) fn long_file(file: &RustFile<'_>) -> Vec<Finding> {
    let lines = file.lines.saturating_sub(file.product.test_lines);
    if lines <= FILE_LINES {
        return Vec::new();
    }
    vec![Finding::new(1, format!("the file has {lines} lines without its tests; {FILE_LINES} are allowed"))]
}

/// Finds functions that have grown too long.
pub(crate) fn long_functions(file: &RustFile<'_>) -> Vec<Finding> {
    let tokens = &file.product.tokens;
    let mut found = Vec::new();
    for (at, pair) in tokens.windows(2).enumerate() {
        // `fn` without a name is a type.
        if !(pair[0].is_word("fn") && pair[1].kind == Kind::Word) {
            continue;
        }
        let Some(open) = body(file, at + 2) else { continue };
        let close = group_end(tokens, open) - 1;
        let lines = tokens[close].line - pair[0].line + 1;
        if lines > FUNCTION_LINES {
            let message = format!("function `{}` has {lines} lines; {FUNCTION_LINES} are allowed", pair[1].text);
            found.push(Finding::new(pair[0].line, message));
        }
    }
    found
}

/// The brace that opens the body of the function whose signature goes on at `at`, if it has a body.
fn body(file: &RustFile<'_>, at: usize) -> Option<usize> {
    let tokens = &file.product.tokens;
    let mut at = at;
    loop {
        let token = tokens.get(at)?;
        if token.is_mark("{") {
            return Some(at);
        }
        if token.is_mark(";") {
            return None;
        }
        at = if token.is_mark("(") || token.is_mark("[") { group_end(tokens, at) } else { at + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(lines: usize) -> String {
        format!("fn f<T: Fn(fn(u8) -> [u8; 2])>(a: T)\nwhere\n    T: Copy,\n{{{}}}\n", "\n".repeat(lines - 4))
    }

    #[test]
    fn a_long_function_is_found_and_one_at_the_limit_is_not() {
        let (long, fits) = (function(FUNCTION_LINES + 1), function(FUNCTION_LINES));
        assert_eq!(long_functions(&RustFile::new("xtask/src/a.rs", &long)).len(), 1);
        assert_eq!(long_functions(&RustFile::new("xtask/src/a.rs", &fits)), []);
    }

    #[test]
    fn functions_are_measured_one_by_one() {
        let source = format!("mod m {{\ntrait T {{ fn a(); }}\n{0}{0}}}", function(40));
        assert_eq!(long_functions(&RustFile::new("xtask/src/a.rs", &source)), []);
    }

    #[test]
    fn a_long_file_is_found_and_one_at_the_limit_is_not() {
        let (long, fits) = ("\n".repeat(FILE_LINES + 1), "\n".repeat(FILE_LINES));
        assert_eq!(long_file(&RustFile::new("xtask/src/a.rs", &long)).len(), 1);
        assert_eq!(long_file(&RustFile::new("xtask/src/a.rs", &fits)), []);
    }

    #[test]
    fn tests_are_not_counted() {
        let inside = format!("{}#[cfg(test)]\nmod tests {{\n{}{}}}\n", "\n".repeat(FILE_LINES), "\n".repeat(500), function(100));
        let file = RustFile::new("xtask/src/a.rs", &inside);
        assert_eq!((long_file(&file), long_functions(&file)), (vec![], vec![]));
        let file = RustFile::new("crates/thruway/tests/a.rs", &inside);
        assert_eq!((long_file(&file), long_functions(&file)), (vec![], vec![]));
    }
}
