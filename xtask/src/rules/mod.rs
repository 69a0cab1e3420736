//! The rules of the house, each a pure function from text to findings.

pub(crate) mod code;
pub(crate) mod layers;
pub(crate) mod paths;
pub(crate) mod size;
pub(crate) mod text;

use crate::lexer::{self, Product, Token};

/// Something that a rule objects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Counted from 1.
    pub(crate) line: usize,
    pub(crate) message: String,
}

impl Finding {
    fn new(line: usize, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

/// A Rust file as the rules see it.
pub(crate) struct RustFile<'a> {
    /// From the root of the workspace, with `/` between its parts.
    pub(crate) path: &'a str,
    /// The whole file's tokens.
    pub(crate) tokens: Vec<Token<'a>>,
    /// The file without its test code; nothing is left of a file that is all test.
    pub(crate) product: Product<'a>,
    pub(crate) lines: usize,
}

impl<'a> RustFile<'a> {
    /// Takes a file apart.
    pub(crate) fn new(path: &'a str, text: &'a str) -> Self {
        let tokens = lexer::lex(text);
        let lines = text.lines().count();
        let product =
            if is_test(path) { Product { tokens: Vec::new(), test_lines: lines } } else { lexer::without_tests(&tokens) };
        Self { path, tokens, product, lines }
    }

    /// The path below the library's source folder, if the file lies there.
    fn in_library(&self) -> Option<&'a str> {
        self.path.strip_prefix(LIBRARY)
    }
}

/// Where the library's source lies.
pub(crate) const LIBRARY: &str = "crates/thruway/src/";

/// Whether a file holds tests and nothing else, by its name.
fn is_test(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// Whether a path below the library's source is the module `module` (`a/b`) or lies in it.
fn is_in_module(below: &str, module: &str) -> bool {
    below.strip_prefix(module).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_its_folder_and_its_file_and_no_namesake() {
        assert!(is_in_module("io/engine/posix.rs", "io/engine"));
        assert!(is_in_module("io/engine.rs", "io/engine"));
        assert!(!is_in_module("io/engines.rs", "io/engine"));
        assert!(!is_in_module("io/policy.rs", "io/engine"));
    }

    #[test]
    fn test_files_are_known_by_their_names() {
        assert!(is_test("crates/thruway/tests/load.rs"));
        assert!(is_test("crates/thruway/src/io/tests.rs"));
        assert!(is_test("crates/thruway/src/io/tests/short.rs"));
        assert!(!is_test("crates/thruway-testkit/src/lib.rs"));
        assert!(!is_test("crates/thruway/src/io/contests.rs"));
    }
}
