//! Finds the paths (`a::b::c`) that a file names, `use` trees multiplied out.

use crate::lexer::{Kind, Token};

/// A path as it stands in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Path<'a> {
    /// Its parts, first to last; a glob ends in `*`.
    pub(crate) parts: Vec<&'a str>,
    /// What it is called here: its last part, or what follows `as`.
    pub(crate) name: &'a str,
    /// Where its last part stands.
    pub(crate) line: usize,
    /// The index of its last token.
    pub(crate) at: usize,
    /// Whether a `!` follows: it names a macro.
    pub(crate) is_macro: bool,
}

/// Every path of two parts or more.
pub(crate) fn paths<'a>(tokens: &[Token<'a>]) -> Vec<Path<'a>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        at = if begins_path(tokens, at) { walk(tokens, at, &[], &mut found) } else { at + 1 };
    }
    found.retain(|path| path.parts.len() > 1);
    found
}

/// A word begins a path unless it is a keyword or continues a path. In `use ::a::b` and `x = ::a::b`, `a` continues none.
fn begins_path(tokens: &[Token<'_>], at: usize) -> bool {
    let is_name = |token: &Token<'_>| token.kind == Kind::Word && !KEYWORDS.contains(&token.text);
    let before = |steps: usize| at.checked_sub(steps).map(|index| &tokens[index]);
    let continues =
        before(1).is_some_and(|token| token.is_mark("::")) && before(2).is_some_and(|token| is_name(token) || token.is_mark(">"));
    is_name(&tokens[at]) && !continues
}

/// Words that may stand right before a path that begins with `::`.
const KEYWORDS: [&str; 11] = ["use", "return", "break", "in", "as", "for", "mut", "dyn", "impl", "match", "if"];

/// Reads one path or `use` tree at `at`, under `prefix`; gives the index after it.
fn walk<'a>(tokens: &[Token<'a>], at: usize, prefix: &[&'a str], found: &mut Vec<Path<'a>>) -> usize {
    let mut parts = prefix.to_vec();
    let mut line = tokens[at].line;
    let mut at = at;
    let is_mark = |index: usize, mark: &str| tokens.get(index).is_some_and(|token: &Token<'_>| token.is_mark(mark));
    loop {
        match tokens.get(at) {
            Some(token) if token.kind == Kind::Word || token.is_mark("*") => {
                parts.push(token.text);
                line = token.line;
                at += 1;
            }
            Some(token) if token.is_mark("{") => return walk_group(tokens, at + 1, &parts, found),
            // `::<` in an expression.
            _ => break,
        }
        if !is_mark(at, "::") {
            break;
        }
        at += 1;
    }
    let mut name = parts.last().copied().unwrap_or_default();
    if let (Some(keyword), Some(alias)) = (tokens.get(at), tokens.get(at + 1))
        && keyword.is_word("as")
        && alias.kind == Kind::Word
    {
        name = alias.text;
    }
    found.push(Path { parts, name, line, at: at - 1, is_macro: is_mark(at, "!") && !is_mark(at + 1, "=") });
    at
}

/// Reads the branches of a `use` tree up to its closing brace.
fn walk_group<'a>(tokens: &[Token<'a>], at: usize, prefix: &[&'a str], found: &mut Vec<Path<'a>>) -> usize {
    let mut at = at;
    while let Some(token) = tokens.get(at) {
        if token.is_mark("}") {
            return at + 1;
        }
        let is_alias = at.checked_sub(1).is_some_and(|before| tokens[before].is_word("as"));
        let begins = (token.kind == Kind::Word && !token.is_word("as") && !is_alias) || token.is_mark("*") || token.is_mark("{");
        at = if begins { walk(tokens, at, prefix, found) } else { at + 1 };
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::lex;

    fn joined(source: &str) -> Vec<String> {
        paths(&lex(source)).into_iter().map(|path| path.parts.join("::")).collect()
    }

    #[test]
    fn plain_paths_are_found_in_uses_types_and_expressions() {
        let source = "use crate::a::B; fn f(x: crate::c::D) { e::f(crate::g::h) }";
        assert_eq!(joined(source), ["crate::a::B", "crate::c::D", "e::f", "crate::g::h"]);
    }

    #[test]
    fn use_trees_are_multiplied_out() {
        assert_eq!(
            joined("use crate::{a::{self, b as q, c::*}, d};"),
            ["crate::a::self", "crate::a::b", "crate::a::c::*", "crate::d"]
        );
        assert_eq!(joined("use {std::fs, std::io};"), ["std::fs", "std::io"]);
    }

    #[test]
    fn an_alias_renames_and_is_no_path_of_its_own() {
        let source = "pub use a::{B as C, d};";
        let tokens = lex(source);
        let names: Vec<_> = paths(&tokens).into_iter().map(|path| path.name).collect();
        assert_eq!(names, ["C", "d"]);
    }

    #[test]
    fn generic_arguments_are_paths_of_their_own() {
        assert_eq!(joined("a::b::<c::D>::e"), ["a::b", "c::D"]);
        assert_eq!(joined("<a::B as c::D>::e()"), ["a::B", "c::D"]);
    }

    #[test]
    fn a_leading_double_colon_names_a_crate() {
        assert_eq!(joined("use ::std::fs; let x = ::std::io::stdin();"), ["std::fs", "std::io::stdin"]);
    }

    #[test]
    fn a_path_across_lines_is_reported_where_it_ends() {
        let tokens = lex("use crate::{\n    a,\n    b,\n};");
        assert_eq!(paths(&tokens).iter().map(|path| path.line).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn macros_are_marked() {
        let tokens = lex("crate::log!(x); crate::a != b; crate::c");
        let marks: Vec<_> = paths(&tokens).iter().map(|path| path.is_macro).collect();
        assert_eq!(marks, [true, false, false]);
    }
}
