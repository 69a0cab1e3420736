//! Changing a `cufile.json` without losing what people wrote in it: only the bytes of a value change, or a key is put in.

use super::audit::{at, audit};
use super::jsonc::{Node, Value, parse};
use crate::base::{Error, ErrorKind, Result};

/// The file that is written where there is none.
pub const EMPTY: &str = "{\n}\n";

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
        let message = format!("{path} cannot be set: {} is no object", keys[..depth].join("."));
        return Err(Error::new(ErrorKind::InvalidInput, message).with_hint("correct the file with `thruway config check`"));
    }
    let indent = "    ";
    let mut member = String::new();
    for (level, key) in keys[depth..].iter().enumerate() {
        let inner = indent.repeat(depth + level + 1);
        let is_last = level + 1 == keys.len() - depth;
        member.push_str(&format!("\n{inner}\"{key}\": {}", if is_last { json } else { "{" }));
    }
    for level in (depth + 1..keys.len()).rev() {
        member.push_str(&format!("\n{}}}", indent.repeat(level)));
    }
    Ok(inserted(text, node, &member))
}

/// The text with all these keys set, or a new one where there is none.
///
/// # Errors
/// As [`set`]; and [`Malformed`](ErrorKind::Malformed) if the file would still have faults, which are then not this change's.
pub fn apply<K: AsRef<str>, V: AsRef<str>>(old: Option<&str>, changes: &[(K, V)]) -> Result<String> {
    let mut text = old.unwrap_or(EMPTY).to_owned();
    for (key, value) in changes {
        text = set(&text, key.as_ref(), value.as_ref())?;
    }
    let remarks = audit(&text)?.remarks;
    let faults: Vec<&str> = remarks.iter().filter(|remark| remark.is_fault).map(|remark| remark.path.as_str()).collect();
    if faults.is_empty() {
        return Ok(text);
    }
    let message = format!("the file would still have faults: {}", faults.join(", "));
    Err(Error::new(ErrorKind::Malformed, message).with_hint("see `thruway config check`"))
}

/// Puts a member behind the opening brace: before it there can be no comment that belongs to another.
fn inserted(text: &str, object: &Node, member: &str) -> String {
    let at = object.span.start + 1;
    let comma = if object.members().is_empty() { "" } else { "," };
    // An object in one line stays readable.
    let needs_break = !text[at..].trim_start_matches([' ', '\t']).starts_with('\n');
    let end = if needs_break && !text[at..].trim_start_matches([' ', '\t']).starts_with("//") { "\n" } else { "" };
    spliced(text, at..at, &format!("{member}{comma}{end}"))
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
