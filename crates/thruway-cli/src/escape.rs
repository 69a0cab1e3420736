//! Text from files made safe for terminals and logs.

use thruway::base::error::printable;

/// `text` with every character escaped that the library's [`printable`] escapes, and nothing cut.
pub(crate) fn safe(text: &str) -> String {
    if text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return text.to_owned();
    }
    let mut utf8 = [0; 4];
    text.chars().map(|c| printable(c.encode_utf8(&mut utf8))).collect()
}

/// As [`safe`], of a path: bytes that are no text are shown as `\xff`.
pub(crate) fn safe_path(path: &std::path::Path) -> String {
    safe(&crate::facts::as_text(path))
}

/// As [`safe`], line by line: for text whose line breaks are meant.
pub(crate) fn safe_lines(text: &str) -> String {
    text.split('\n').map(safe).collect::<Vec<String>>().join("\n")
}

/// JSON text in which every character that a terminal could obey is written as `\uXXXX`. Outside of strings JSON
/// has no such character, so the meaning stays.
pub(crate) fn safe_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut utf8 = [0; 4];
    for c in json.chars() {
        let one = &*c.encode_utf8(&mut utf8);
        if c.is_ascii() && !c.is_ascii_control() || printable(one) == one {
            out.push(c);
        } else {
            let mut utf16 = [0; 2];
            c.encode_utf16(&mut utf16).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_nothing_is_cut() {
        assert_eq!(safe("a\u{1b}[31m\nb\u{202e}"), "a\\u{1b}[31m\\nb\\u{202e}");
        assert_eq!(safe_lines("a\tb\nc"), "a\\tb\nc");
        let long = "é".repeat(1000);
        assert_eq!(safe(&long), long);
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"a\u{7f}\u{9b}31m\u{202e}\u{1b}": "权重 \u{1f600}"});
        let text = safe_json(&value.to_string());
        assert!(!text.chars().any(|c| c.is_control() || c == '\u{202e}'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("valid"), value);
    }
}
