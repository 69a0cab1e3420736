//! Changing a `cufile.json` without losing what people wrote in it: only the bytes of a value change, or a key is put in.

use std::collections::HashSet;

use super::audit::{at, audit};
use super::jsonc::{Node, Value, parse};
use crate::base::{Error, ErrorKind, Result};

/// The file that is written where there is none.
pub const EMPTY: &str = "{\n}\n";
/// So many faults are named in an error.
const NAMED_MAX: usize = 8;

/// Gives the key at `path` (`properties.allow_compat_mode`) the value that is written in JSON. Comments, order and
/// everything else stay.
///
/// # Errors
/// [`Malformed`](ErrorKind::Malformed) for a text that is no JSON with comments;
/// [`InvalidInput`](ErrorKind::InvalidInput) if something on the way to the key is no object.
pub fn set(text: &str, path: &str, json: &str) -> Result<String> {
    let root = parse(text)?;
    if let Some(node) = at(&root, path) {
        return Ok(spliced(text, node.span.clone(), json));
    }
    let keys: Vec<&str> = path.split('.').collect();
    // As far down as there is something; the rest is made.
    let mut node = &root;
    let mut depth = 0;
    while let Some(next) = keys.get(depth).and_then(|key| node.get(key)) {
        node = next;
        depth += 1;
    }
    if !matches!(node.value, Value::Object(_)) {
        let what = if depth == 0 { "the file".to_owned() } else { keys[..depth].join(".") };
        let message = format!("{path} cannot be set: {what} is no object");
        return Err(Error::new(ErrorKind::InvalidInput, message).with_hint("write { } there by hand, and set it then"));
    }
    let unit = root.members().first().and_then(|member| indent(text, member.key_span.start)).filter(|blanks| !blanks.is_empty());
    let unit = unit.unwrap_or("    ");
    let outer = line_indent(text, node.span.start);
    let own = node.members().first().and_then(|member| indent(text, member.key_span.start));
    let base = own.map_or_else(|| format!("{outer}{unit}"), str::to_owned);
    let made = keys.len() - depth;
    let mut member = String::new();
    for (level, key) in keys[depth..].iter().enumerate() {
        let inner = format!("{base}{}", unit.repeat(level));
        member.push_str(&format!("\n{inner}\"{key}\": {}", if level + 1 == made { json } else { "{" }));
    }
    for level in (0..made - 1).rev() {
        member.push_str(&format!("\n{base}{}}}", unit.repeat(level)));
    }
    let behind = if node.members().is_empty() { outer } else { base.as_str() };
    Ok(inserted(text, node, &member, behind))
}

/// The blanks between the beginning of a line and what stands there first, at `at`; `None` if something stands before it.
fn indent(text: &str, at: usize) -> Option<&str> {
    let begin = text[..at].rfind('\n')? + 1;
    let before = &text[begin..at];
    before.chars().all(|c| c == ' ' || c == '\t').then_some(before)
}

/// The blanks at the beginning of the line that holds `at`.
fn line_indent(text: &str, at: usize) -> &str {
    let line = &text[text[..at].rfind('\n').map_or(0, |end| end + 1)..];
    &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
}

/// The text with all these keys set, or a new one where there is none.
///
/// # Errors
/// As [`set`]; [`InvalidInput`](ErrorKind::InvalidInput) for a change that makes a fault, and
/// [`Malformed`](ErrorKind::Malformed) if the file has faults already, which would stay.
pub fn apply<K: AsRef<str>, V: AsRef<str>>(old: Option<&str>, changes: &[(K, V)]) -> Result<String> {
    let mut text = old.unwrap_or(EMPTY).to_owned();
    for (key, value) in changes {
        text = set(&text, key.as_ref(), value.as_ref())?;
    }
    let faults = |text: &str| -> Result<Vec<(String, String)>> {
        let remarks = audit(text)?.remarks;
        let name = |path: String| if path.is_empty() { "the file".to_owned() } else { path };
        Ok(remarks.into_iter().filter(|remark| remark.is_fault).map(|remark| (name(remark.path), remark.what)).collect())
    };
    let found = faults(&text)?;
    if found.is_empty() {
        return Ok(text);
    }
    let before: HashSet<(String, String)> = old.map_or_else(|| Ok(Vec::new()), faults)?.into_iter().collect();
    if let Some((path, what)) = found.iter().find(|fault| !before.contains(fault)) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{path} is left as it is: {what}")));
    }
    let mut paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    paths.dedup();
    let others = if paths.len() > NAMED_MAX { ", …" } else { "" };
    paths.truncate(NAMED_MAX);
    let message = format!("the file has faults, and would still have them: {}{others}", paths.join(", "));
    Err(Error::new(ErrorKind::Malformed, message).with_hint("see `thruway config check`, and correct them first"))
}

/// Puts a member behind the opening brace: before it there can be no comment that belongs to another. What stood in the same
/// line comes to stand in one of its own, behind the blanks `behind`.
fn inserted(text: &str, object: &Node, member: &str, behind: &str) -> String {
    let at = object.span.start + 1;
    let comma = if object.members().is_empty() { "" } else { "," };
    // An object in one line stays readable.
    let rest = text[at..].trim_start_matches([' ', '\t']);
    if rest.starts_with(['\n', '\r']) || rest.starts_with("//") {
        return spliced(text, at..at, &format!("{member}{comma}"));
    }
    spliced(text, at..text.len() - rest.len(), &format!("{member}{comma}\n{behind}"))
}

fn spliced(text: &str, span: std::ops::Range<usize>, with: &str) -> String {
    format!("{}{with}{}", &text[..span.start], &text[span.end..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "{\n    // about compatibility\n    \"properties\": {\n        \"allow_compat_mode\": true, // why\n        /* x */ \"io_batchsize\": 128\n    }\n}\n";

    #[test]
    fn a_value_changes_and_the_comments_stay() {
        let changed = set(TEXT, "properties.allow_compat_mode", "false").expect("set");
        assert_eq!(changed, TEXT.replace("true", "false"));
        assert_eq!(set(&changed, "properties.allow_compat_mode", "false").expect("set"), changed, "twice is once");
    }

    #[test]
    fn a_key_is_put_where_it_belongs() {
        let mut text = set(TEXT, "properties.use_pci_p2pdma", "true").expect("set");
        text = set(&text, "block.nvme.use_pci_p2pdma", "true").expect("set");
        text = set(&text, "block.raid.use_pci_p2pdma", "true").expect("set");
        let root = parse(&text).expect("valid");
        for path in ["properties.use_pci_p2pdma", "block.nvme.use_pci_p2pdma", "block.raid.use_pci_p2pdma"] {
            assert_eq!(at(&root, path).map(|node| &node.value), Some(&Value::Bool(true)), "{text}");
        }
        for comment in ["// about compatibility", "// why", "/* x */"] {
            assert!(text.contains(comment), "{text}");
        }
        assert_eq!(set("{\"properties\": 1}", "properties.a", "1").expect_err("no object").kind(), ErrorKind::InvalidInput);
        let made = set(EMPTY, "properties.allow_compat_mode", "false").expect("set");
        assert_eq!(made, "{\n    \"properties\": {\n        \"allow_compat_mode\": false\n    }\n}\n");
    }

    #[test]
    fn what_is_put_in_has_the_files_indentation() {
        for (old, path, new) in [
            ("{\n  \"a\": {\n    \"b\": 1\n  }\n}\n", "a.c", "{\n  \"a\": {\n    \"c\": 0,\n    \"b\": 1\n  }\n}\n"),
            ("{\n\t\"a\": {}\n}\n", "a.c.d", "{\n\t\"a\": {\n\t\t\"c\": {\n\t\t\t\"d\": 0\n\t\t}\n\t}\n}\n"),
            ("{\n  \"a\": {\"b\": 1}\n}\n", "a.c", "{\n  \"a\": {\n    \"c\": 0,\n    \"b\": 1}\n}\n"),
            ("{}", "a", "{\n    \"a\": 0\n}"),
        ] {
            assert_eq!(set(old, path, "0").expect("set"), new);
        }
    }

    #[test]
    fn a_change_that_makes_a_fault_is_told_from_faults_that_are_there() {
        let error = apply(None, &[("properties.io_batchsize", "0")]).expect_err("out of range");
        assert_eq!((error.kind(), error.message().contains("from 1 to 256")), (ErrorKind::InvalidInput, true), "{error}");
        let twice = "{\"properties\": {\"io_batchsize\": 0, \"io_batchsize\": 0}}";
        let error = apply(Some(twice), &[("properties.allow_compat_mode", "false")]).expect_err("a fault stays");
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert_eq!(error.message().matches("io_batchsize").count(), 1, "{error}");
    }

    proptest! {
        #[test]
        fn what_was_set_is_there_and_the_rest_is_as_before(
            text in "\\{( |\n|//[a-z]{0,4}\n|/\\*[ab ]{0,3}\\*/){0,3}(\"properties\": ?\\{( |\n|//[a-z]{0,4}\n){0,2}(\"x\": [0-9])?[ \n]{0,2}\\})?( |\n){0,2}\\}"
        ) {
            let before = parse(&text);
            prop_assume!(before.is_ok());
            let changed = set(&text, "properties.allow_compat_mode", "false").expect("set");
            let after = parse(&changed).expect("still valid");
            prop_assert_eq!(at(&after, "properties.allow_compat_mode").map(|node| node.value.clone()), Some(Value::Bool(false)));
            let value = |root: &Node| at(root, "properties.x").map(|node| node.value.clone());
            prop_assert_eq!(value(&after), value(&before.expect("valid")));
            prop_assert_eq!(text.matches("//").count(), changed.matches("//").count());
        }
    }
}
