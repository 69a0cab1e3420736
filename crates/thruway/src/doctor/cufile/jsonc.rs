//! JSON with `//` and `/* */` comments, each value with its place in the text.
//!
//! Stricter than most readers: no comma behind the last element, no single quotes, no numbers in hexadecimal. What one
//! reader forgives the next may not, and this text is for another program.

use std::ops::Range;

use super::BYTES_MAX;
use crate::base::{Error, ErrorKind, Result};

/// Values may be nested so deep; `cufile.json` needs four levels.
const DEPTH_MAX: usize = 32;

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Its bytes in the text.
    pub span: Range<usize>,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// An object, its members in the order of the text; a key may stand there twice.
    Object(Vec<Member>),
}

/// A member of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its key.
    pub key: String,
    /// The key's bytes in the text, quotes included.
    pub key_span: Range<usize>,
    /// Its value.
    pub node: Node,
}

impl Node {
    /// The members, of an object.
    pub fn members(&self) -> &[Member] {
        match &self.value {
            Value::Object(members) => members,
            _ => &[],
        }
    }

    /// The last member with this key, which is the one in force.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.members().iter().rev().find(|member| member.key == key).map(|member| &member.node)
    }
}

/// The number of the line, from 1, that holds a byte.
pub fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Reads a text.
///
/// # Errors
/// [`Malformed`](ErrorKind::Malformed), with the line.
pub fn parse(text: &str) -> Result<Node> {
    let mut reader = Reader { text, at: 0 };
    let parsed = reader.begin().and_then(|()| reader.skip()).and_then(|()| reader.node(0)).and_then(|node| {
        reader.skip()?;
        if reader.at < text.len() { Err("something stands behind the end of the object") } else { Ok(node) }
    });
    parsed.map_err(|what| {
        let line = line_of(text, reader.at);
        Error::new(ErrorKind::Malformed, format!("this is no JSON with comments: {what}")).with("line", line)
    })
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

type Step<T> = std::result::Result<T, &'static str>;

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// Refuses what is wrong with the text as a whole. What some editors put before it is no part of JSON.
    fn begin(&mut self) -> Step<()> {
        if self.text.len() > BYTES_MAX {
            return Err("it is longer than 1 MiB");
        }
        // What stands for bytes that are no text.
        if let Some(at) = self.text.find('\u{fffd}') {
            self.at = at;
            return Err("a character cannot be read: save it as UTF-8");
        }
        if self.text.starts_with('\u{feff}') { Err("it begins with a byte order mark: save it without one") } else { Ok(()) }
    }

    /// Behind the comma at `comma`: the end must not follow it.
    fn ensure_no_end(&mut self, comma: usize, mark: u8, otherwise: &'static str) -> Step<()> {
        if self.peek() == Some(mark) {
            self.at = comma;
            return Err(otherwise);
        }
        Ok(())
    }

    /// Goes past blanks and comments.
    fn skip(&mut self) -> Step<()> {
        loop {
            let rest = self.rest();
            let blanks = rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r']).len();
            let rest = &rest[blanks..];
            let length = if rest.starts_with("//") {
                rest.find('\n').unwrap_or(rest.len())
            } else if let Some(inside) = rest.strip_prefix("/*") {
                // Its end shares no star with its beginning.
                inside.find("*/").ok_or("a comment has no end")? + 4
            } else {
                self.at += blanks;
                return Ok(());
            };
            self.at += blanks + length;
        }
    }

    fn take(&mut self, mark: u8, otherwise: &'static str) -> Step<()> {
        if self.peek() == Some(mark) {
            self.at += 1;
            Ok(())
        } else {
            Err(otherwise)
        }
    }

    fn node(&mut self, depth: usize) -> Step<Node> {
        if depth > DEPTH_MAX {
            return Err("it is nested too deep");
        }
        let start = self.at;
        let value = match self.peek() {
            Some(b'{') => self.object(depth)?,
            Some(b'[') => self.list(depth)?,
            Some(b'"') => Value::Text(self.string()?),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            _ => self.word()?,
        };
        Ok(Node { value, span: start..self.at })
    }

    fn word(&mut self) -> Step<Value> {
        let words = [("true", Value::Bool(true)), ("false", Value::Bool(false)), ("null", Value::Null)];
        let found = words.into_iter().find(|(word, _)| self.rest().starts_with(word)).ok_or("a value is missing")?;
        self.at += found.0.len();
        Ok(found.1)
    }

    fn number(&mut self) -> Step<Value> {
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).unwrap_or(rest.len());
        let number: serde_json::Number = serde_json::from_str(&rest[..end]).map_err(|_| "this is no number")?;
        self.at += end;
        number.as_f64().map(Value::Number).ok_or("this is no number")
    }

    fn string(&mut self) -> Step<String> {
        let bytes = self.text.as_bytes();
        let mut end = self.at + 1;
        while bytes.get(end).is_some_and(|byte| *byte != b'"') {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        let quoted = self.text.get(self.at..=end).ok_or("a text has no end")?;
        let text = serde_json::from_str(quoted).map_err(|_| "this text cannot be read")?;
        self.at = end + 1;
        Ok(text)
    }

    fn list(&mut self, depth: usize) -> Step<Value> {
        self.at += 1;
        let mut nodes = Vec::new();
        self.skip()?;
        if self.take(b']', "").is_ok() {
            return Ok(Value::List(nodes));
        }
        loop {
            self.skip()?;
            nodes.push(self.node(depth + 1)?);
            self.skip()?;
            if self.take(b']', "").is_ok() {
                return Ok(Value::List(nodes));
            }
            let comma = self.at;
            self.take(b',', "a comma or ] is missing in a list")?;
            self.skip()?;
            self.ensure_no_end(comma, b']', "a comma stands behind the last value of a list")?;
        }
    }

    fn object(&mut self, depth: usize) -> Step<Value> {
        self.at += 1;
        let mut members = Vec::new();
        self.skip()?;
        if self.take(b'}', "").is_ok() {
            return Ok(Value::Object(members));
        }
        loop {
            self.skip()?;
            let start = self.at;
            if self.peek() != Some(b'"') {
                return Err("a key in quotes is missing");
            }
            let key = self.string()?;
            let key_span = start..self.at;
            self.skip()?;
            self.take(b':', "a colon is missing behind a key")?;
            self.skip()?;
            members.push(Member { key, key_span, node: self.node(depth + 1)? });
            self.skip()?;
            if self.take(b'}', "").is_ok() {
                return Ok(Value::Object(members));
            }
            let comma = self.at;
            self.take(b',', "a comma or } is missing in an object")?;
            self.skip()?;
            self.ensure_no_end(comma, b'}', "a comma stands behind the last key of an object")?;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn comments_are_passed_over_and_places_are_kept() {
        let text = "{ // one\n \"a\": /* two */ [1, -2.5e1, \"x\\\"y\"],\n \"b\": {\"c\": true} }\n";
        let node = parse(text).expect("valid");
        let list = node.get("a").expect("a");
        assert_eq!(&text[list.span.clone()], "[1, -2.5e1, \"x\\\"y\"]");
        assert_eq!(node.get("b").and_then(|b| b.get("c")).map(|c| &c.value), Some(&Value::Bool(true)));
        assert_eq!(line_of(text, node.members()[1].key_span.start), 3);
        let hidden = parse("{/*/ \"a\": 1, /*/ \"b\": 2 /**/}").expect("valid");
        assert_eq!((hidden.get("a"), hidden.members().len()), (None, 1));
    }

    #[test]
    fn what_other_readers_forgive_is_refused_with_its_line() {
        for text in [
            "",
            "{",
            "{\n'a': 1}",
            "{\n\"a\": 1,}",
            "{\n\"a\": 0x10}",
            "{\n\"a\" 1}",
            "{}\n x",
            "/* x",
            "{} /*/",
            "{\"a\": [1 2]}",
        ] {
            let error = parse(text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.context("line").is_some());
        }
        assert_eq!(parse("{\n\n\"a\": tru}").expect_err("no").context("line"), Some("3"));
        for text in ["{\n\"a\": 1,\n\n}", "{\"a\":\n[1, /* x */\n]}"] {
            let error = parse(text).expect_err(text);
            assert!(error.message().contains("a comma stands behind the last"), "{error}");
            assert_eq!(error.context("line"), Some("2"), "that of the comma");
        }
        assert!(parse("\u{feff}{}").expect_err("BOM").message().contains("byte order mark"));
        let deep = "[".repeat(100_000);
        assert!(parse(&deep).expect_err("deep").message().contains("too deep"));
    }

    proptest! {
        #[test]
        fn without_comments_it_agrees_with_a_json_reader(text in "[\\[\\]{}\",:0-9a-e\\\\ ntrufls.-]{0,40}") {
            let reference = serde_json::from_str::<serde_json::Value>(&text);
            // The reference keeps the last of two equal keys; so does `get`.
            prop_assert_eq!(parse(&text).is_ok(), reference.is_ok(), "{:?} {:?}", text, reference);
        }

        #[test]
        fn no_text_makes_it_panic(text in "(.|\n|//|/\\*|\\*/|\"|\\\\){0,60}") {
            drop(parse(&text));
        }
    }
}
