//! A small lexer for Rust: enough to know what is code and what only looks like it.
//!
//! A rule that searches text for `unsafe` finds it in comments, strings and names. This lexer drops comments and the
//! content of literals, and keeps words and punctuation with their line numbers, so that a rule can ask for *the word*
//! `unsafe`. It accepts every valid file; on an invalid one it does something harmless, since the compiler is the one to
//! complain.

/// What a [`Token`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An identifier or a keyword; raw ones come without their `r#`.
    Word,
    /// `::`, or one other character of punctuation.
    Mark,
    /// A lifetime or a loop label.
    Lifetime,
    /// A string, character or number.
    Literal,
}

/// One word, mark or literal, and the line on which it begins (counted from 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    /// The text of a word or a mark; empty for the rest.
    pub(crate) text: &'a str,
    pub(crate) kind: Kind,
    pub(crate) line: usize,
}

impl Token<'_> {
    /// Whether this is the word `text`.
    pub(crate) fn is_word(&self, text: &str) -> bool {
        self.kind == Kind::Word && self.text == text
    }

    /// Whether this is the mark `text`.
    pub(crate) fn is_mark(&self, text: &str) -> bool {
        self.kind == Kind::Mark && self.text == text
    }
}

/// Splits a source file into tokens.
pub(crate) fn lex(source: &str) -> Vec<Token<'_>> {
    let mut lexer = Lexer { source, at: 0, line: 1, tokens: Vec::new() };
    if source.starts_with("#!") && !source.starts_with("#![") {
        lexer.skip_line();
    }
    while lexer.at < source.len() {
        lexer.step();
    }
    lexer.tokens
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    tokens: Vec<Token<'a>>,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Moves past one character, counting lines.
    fn bump(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        if next == '\n' {
            self.line += 1;
        }
        Some(next)
    }

    /// Moves past `bytes` bytes, which must end on a character boundary.
    fn skip(&mut self, bytes: usize) {
        let end = self.at + bytes;
        while self.at < end && self.bump().is_some() {}
    }

    fn push(&mut self, kind: Kind, text: &'a str, line: usize) {
        self.tokens.push(Token { text, kind, line });
    }

    fn step(&mut self) {
        let (rest, line) = (self.rest(), self.line);
        let Some(next) = self.peek() else { return };
        if next.is_whitespace() {
            self.bump();
        } else if rest.starts_with("//") {
            self.skip_line();
        } else if rest.starts_with("/*") {
            self.block_comment();
        } else if is_word_start(next) {
            self.word();
        } else if next.is_ascii_digit() {
            self.number();
        } else if next == '"' {
            self.bump();
            self.quoted('"', line);
        } else if next == '\'' {
            self.bump();
            self.after_apostrophe(line);
        } else {
            let length = if rest.starts_with("::") { 2 } else { next.len_utf8() };
            self.skip(length);
            self.push(Kind::Mark, &rest[..length], line);
        }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|next| next != '\n') {
            self.bump();
        }
    }

    /// Block comments nest.
    fn block_comment(&mut self) {
        let mut depth = 0_usize;
        loop {
            if self.rest().starts_with("/*") {
                depth += 1;
                self.skip(2);
            } else if self.rest().starts_with("*/") {
                depth -= 1;
                self.skip(2);
                if depth == 0 {
                    return;
                }
            } else if self.bump().is_none() {
                return;
            }
        }
    }

    /// The rest of a string, byte string or character literal, its opening quote already read.
    fn quoted(&mut self, close: char, line: usize) {
        while let Some(next) = self.bump() {
            if next == '\\' {
                self.bump();
            } else if next == close {
                break;
            }
        }
        self.push(Kind::Literal, "", line);
    }

    /// `'a'` is a character, `'a` a lifetime: the character after the next one tells.
    fn after_apostrophe(&mut self, line: usize) {
        let mut ahead = self.rest().chars();
        let (first, second) = (ahead.next(), ahead.next());
        if first == Some('\\') || second == Some('\'') {
            self.quoted('\'', line);
        } else {
            while self.peek().is_some_and(|next| is_word_part(next) || next == '#') {
                self.bump();
            }
            self.push(Kind::Lifetime, "", line);
        }
    }

    /// A word, or the literal that its letters are the prefix of: `r"…"`, `br#"…"#`, `c"…"`, `b'…'`.
    fn word(&mut self) {
        let (start, line) = (self.at, self.line);
        while self.peek().is_some_and(is_word_part) {
            self.bump();
        }
        let text = &self.source[start..self.at];
        let rest = self.rest();
        if matches!(text, "r" | "br" | "cr") {
            let hashes = rest.len() - rest.trim_start_matches('#').len();
            if rest[hashes..].starts_with('"') {
                return self.raw_string(hashes, line);
            }
            if text == "r" && hashes == 1 && rest[1..].starts_with(is_word_start) {
                self.bump();
                return self.word();
            }
        }
        if matches!(text, "b" | "c") && rest.starts_with('"') {
            self.bump();
            return self.quoted('"', line);
        }
        if text == "b" && rest.starts_with('\'') {
            self.bump();
            return self.quoted('\'', line);
        }
        self.push(Kind::Word, text, line);
    }

    /// A raw string knows no escapes; a quote followed by as many `#` as it began with ends it.
    fn raw_string(&mut self, hashes: usize, line: usize) {
        self.skip(hashes + 1);
        let close = format!("\"{}", "#".repeat(hashes));
        let length = self.rest().find(&close).map_or(self.rest().len(), |at| at + close.len());
        self.skip(length);
        self.push(Kind::Literal, "", line);
    }

    /// A number with its suffix. A point belongs to it only before a digit: `0..9` is a range, `1.max(2)` a call.
    fn number(&mut self) {
        let line = self.line;
        loop {
            let mut ahead = self.rest().chars();
            match (ahead.next(), ahead.next()) {
                (Some(next), _) if is_word_part(next) => self.skip(next.len_utf8()),
                (Some('.'), Some(after)) if after.is_ascii_digit() => self.skip(1),
                _ => break,
            }
        }
        self.push(Kind::Literal, "", line);
    }
}

fn is_word_start(next: char) -> bool {
    next == '_' || next.is_alphabetic()
}

fn is_word_part(next: char) -> bool {
    next == '_' || next.is_alphanumeric()
}

/// The tokens of a file less its test code, and how many of its lines that code takes.
pub(crate) struct Product<'a> {
    pub(crate) tokens: Vec<Token<'a>>,
    pub(crate) test_lines: usize,
}

/// Takes away every item under `#[cfg(test)]` or `#[cfg(all(test, …))]`.
pub(crate) fn without_tests<'a>(tokens: &[Token<'a>]) -> Product<'a> {
    let mut product = Product { tokens: Vec::with_capacity(tokens.len()), test_lines: 0 };
    let mut at = 0;
    while at < tokens.len() {
        let end = match test_attribute(&tokens[at..]) {
            Some(Attribute { length, inner: true }) => (length > 0).then_some(tokens.len()),
            Some(Attribute { length, inner: false }) => Some(item_end(tokens, at + length)),
            None => None,
        };
        if let Some(end) = end {
            product.test_lines += tokens[end - 1].line - tokens[at].line + 1;
            at = end;
        } else {
            product.tokens.push(tokens[at]);
            at += 1;
        }
    }
    product
}

struct Attribute {
    /// In tokens.
    length: usize,
    /// `#![…]`: it is about all that encloses it, in practice the file.
    inner: bool,
}

fn test_attribute(tokens: &[Token<'_>]) -> Option<Attribute> {
    let (length, inner) = attribute_length(tokens)?;
    let body = &tokens[if inner { 3 } else { 2 }..];
    let starts = |words: &[&str]| words.len() <= body.len() && words.iter().zip(body).all(|(word, token)| token.text == *word);
    let is_test = starts(&["cfg", "(", "test", ")"]) || starts(&["cfg", "(", "all", "(", "test"]);
    is_test.then_some(Attribute { length, inner })
}

/// How many tokens the attribute takes that begins here, if one does, and whether it is an inner one.
fn attribute_length(tokens: &[Token<'_>]) -> Option<(usize, bool)> {
    if !tokens.first()?.is_mark("#") {
        return None;
    }
    let inner = tokens.get(1)?.is_mark("!");
    let open = if inner { 2 } else { 1 };
    tokens.get(open)?.is_mark("[").then(|| (group_end(tokens, open), inner))
}

/// The index after the bracket that closes the one at `open`.
pub(crate) fn group_end(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        if token.kind == Kind::Mark {
            match token.text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => continue,
            }
            if depth == 0 {
                return index + 1;
            }
        }
    }
    tokens.len()
}

/// The index after the item, statement, field or arm that begins at `start` (further attributes included).
fn item_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut at = start;
    while let Some((length, _)) = attribute_length(&tokens[at..]) {
        at += length;
    }
    if tokens.get(at).is_some_and(|token| token.is_word("pub")) {
        at += 1;
        if tokens.get(at).is_some_and(|token| token.is_mark("(")) {
            at = group_end(tokens, at);
        }
    }
    let first = tokens.get(at).map_or("", |token| token.text);
    let second = tokens.get(at + 1).map_or("", |token| token.text);
    let is_value = matches!(first, "static" | "let" | "type" | "use")
        || (first == "const" && !matches!(second, "fn" | "unsafe" | "extern" | "async"));
    let is_item = ["fn", "mod", "impl", "struct", "enum", "union", "trait", "unsafe", "async", "const", "extern", "macro_rules"];
    let is_item = is_item.contains(&first);
    while let Some(token) = tokens.get(at) {
        if token.kind == Kind::Mark {
            match token.text {
                ";" => return at + 1,
                "," if !is_item && !is_value => return at + 1,
                ")" | "]" | "}" => return at,
                "{" if !is_value => return group_end(tokens, at),
                "(" | "[" | "{" => {
                    at = group_end(tokens, at);
                    continue;
                }
                _ => {}
            }
        }
        at += 1;
    }
    tokens.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_kind(kind: Kind, tokens: Vec<Token<'_>>) -> Vec<&str> {
        tokens.into_iter().filter(|token| token.kind == kind).map(|token| token.text).collect()
    }

    fn words(source: &str) -> Vec<&str> {
        of_kind(Kind::Word, lex(source))
    }

    fn product_words(source: &str) -> Vec<&str> {
        of_kind(Kind::Word, without_tests(&lex(source)).tokens)
    }

    #[test]
    fn comments_are_not_code() {
        assert_eq!(words("a // b\nc /* d /* e */ f */ g /// h\n//! i\nj"), ["a", "c", "g", "j"]);
        assert_eq!(words("a /* never closed"), ["a"]);
        assert_eq!(words("a /**/ b /***/ c"), ["a", "b", "c"]);
    }

    #[test]
    fn strings_are_not_code_whatever_they_hold() {
        assert_eq!(words(r#"a "b" c "\" d" e "\\" f"#), ["a", "c", "e", "f"]);
        assert_eq!(words(r#"a b"x" c"y" b"\"z" d"#), ["a", "d"]);
        assert_eq!(words("a \"// not a comment\" b \"/*\" c"), ["a", "b", "c"]);
        assert_eq!(words("a \"two\nlines\" b"), ["a", "b"]);
    }

    #[test]
    fn raw_strings_end_at_their_own_fence_only() {
        assert_eq!(words(r###"a r"b\" c r#"d " e"# f br##"g "# h"## i cr"j" k"###), ["a", "c", "f", "i", "k"]);
    }

    #[test]
    fn raw_identifiers_are_words() {
        assert_eq!(words("r#type r#fn rr r"), ["type", "fn", "rr", "r"]);
    }

    #[test]
    fn an_apostrophe_begins_a_character_or_a_lifetime() {
        assert_eq!(words(r"a 'b' c '\'' d '\\' e '\u{1F600}' f 'é' g"), ["a", "c", "d", "e", "f", "g"]);
        assert_eq!(words("a<'b, 'static> c 'label: loop d"), ["a", "c", "loop", "d"]);
        assert_eq!(words("a '\"' b \"c\" d b'\"' e b'\\'' f '/' g '/' h"), ["a", "b", "d", "e", "f", "g", "h"]);
    }

    #[test]
    fn numbers_take_their_suffix_and_leave_ranges_and_calls_alone() {
        assert_eq!(words("0..n 1.5e3f64 2usize 0xff_u8 1.max(x) pair.0.name"), ["n", "max", "x", "pair", "name"]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let tokens = lex("a\n/* \n */ b \"\n\n\" c\nr\"\n\" d");
        let words = tokens.iter().filter(|token| token.kind == Kind::Word);
        assert_eq!(words.map(|word| (word.text, word.line)).collect::<Vec<_>>(), [("a", 1), ("b", 3), ("c", 5), ("d", 7)]);
    }

    #[test]
    fn a_shebang_is_skipped_and_an_inner_attribute_is_not() {
        assert_eq!(words("#!/usr/bin/env thing\na"), ["a"]);
        assert_eq!(words("#![a]\nb"), ["a", "b"]);
    }

    #[test]
    fn a_double_colon_is_one_mark() {
        assert_eq!(of_kind(Kind::Mark, lex("a::b : c")), ["::", ":"]);
    }

    #[test]
    fn test_items_are_taken_away_whatever_their_form() {
        assert_eq!(product_words("a #[cfg(test)] mod t { fn x() { {} } } b"), ["a", "b"]);
        assert_eq!(product_words("a #[cfg(test)] mod t; b"), ["a", "b"]);
        assert_eq!(product_words("a #[cfg(test)] use x::{y, z}; b"), ["a", "b"]);
        assert_eq!(product_words("a #[cfg(test)] #[path = \"x\"] pub(crate) fn f<A, B>(c: A) {} b"), ["a", "b"]);
        assert_eq!(product_words("a #[cfg(all(test, unix))] const X: T = T { y: 1 }; b"), ["a", "b"]);
        assert_eq!(product_words("struct s { #[cfg(test)] x: u8, y: u8 }"), ["struct", "s", "y", "u8"]);
        assert_eq!(product_words("struct s { y: u8, #[cfg(test)] x: u8 } b"), ["struct", "s", "y", "u8", "b"]);
        assert_eq!(product_words("#![cfg(test)]\nmod a {}"), [""; 0]);
    }

    #[test]
    fn code_that_the_product_also_has_stays() {
        assert_eq!(product_words("#[cfg(not(test))] a"), ["cfg", "not", "test", "a"]);
        assert_eq!(product_words("#[cfg(any(test, x))] a"), ["cfg", "any", "test", "x", "a"]);
        assert_eq!(product_words("#[test] fn a() {}"), ["test", "fn", "a"]);
    }

    #[test]
    fn the_lines_of_test_code_are_counted() {
        let source = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
        assert_eq!(without_tests(&lex(source)).test_lines, 4);
    }
}
