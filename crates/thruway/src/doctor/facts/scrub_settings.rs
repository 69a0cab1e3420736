//! What a `cufile.json` tells beyond settings: comments, keys of transports, names of servers and directories.
//!
//! The text keeps its lines and its shape, well-formed or not, so that the same is wrong with it in the same line. Keys stay,
//! and the values that decide something; every letter and digit of the rest becomes an `x`.

use crate::doctor::cufile::schema::{KEYS, Shape};

/// Words that people write for settings, rightly or not.
const WORDS: [&str; 8] = ["true", "false", "yes", "no", "on", "off", "none", "null"];

/// The text with what is private made unreadable.
pub(super) fn settings(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // The key of each object and list that is open.
    let mut open: Vec<String> = Vec::new();
    let mut key = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = token(rest);
        let (token, behind) = rest.split_at(length);
        match first {
            '/' if length > 1 => out.push_str(&masked(token)),
            '"' => {
                let is_key = behind.trim_start().starts_with(':');
                let inner = token.trim_matches('"');
                let is_private = open.iter().any(|above| above == "mount_table");
                let is_said = is_key || may_stay(inner, &open, &key);
                out.push_str(if is_private || !is_said { masked(token) } else { token.to_owned() }.as_str());
                if is_key {
                    inner.clone_into(&mut key);
                }
            }
            '{' | '[' => {
                open.push(std::mem::take(&mut key));
                out.push(first);
            }
            '}' | ']' => {
                open.pop();
                out.push(first);
            }
            _ => out.push(first),
        }
        rest = behind;
    }
    out
}

/// Whether a value is one that the diagnosis goes by, and nobody's name.
fn may_stay(value: &str, open: &[String], key: &str) -> bool {
    let is_word = WORDS.iter().any(|word| word.eq_ignore_ascii_case(value));
    let is_number = value.len() <= 16 && value.chars().all(|c| c.is_ascii_digit());
    let is_one_of = KEYS.iter().any(|known| {
        known.path.ends_with(key)
            && matches!(known.shape, Shape::OneOf(words) if words.iter().any(|word| word.eq_ignore_ascii_case(value)))
    });
    let denies = open.iter().any(|above| above == "denylist" || above == "blacklist");
    // A number may be the key of a transport.
    is_word || is_number && key != "rdma_dc_key" || is_one_of || denies
}

/// How long a comment or a text at the beginning is; one character for all else.
fn token(rest: &str) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if let Some(inner) = rest.strip_prefix("/*") {
        return inner.find("*/").map_or(rest.len(), |end| end + 4);
    }
    if rest.starts_with('"') {
        let mut is_escaped = false;
        for (at, c) in rest.char_indices().skip(1) {
            match c {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                '"' => return at + 1,
                _ => {}
            }
        }
        return rest.len();
    }
    rest.chars().next().map_or(0, char::len_utf8)
}

/// Letters and digits made unreadable; an escape of JSON stays one.
fn masked(token: &str) -> String {
    let mut out = String::with_capacity(token.len());
    let mut escape = 0_u32;
    let mut chars = token.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                out.push(c);
                if let Some(next) = chars.next() {
                    out.push(next);
                    escape = if next == 'u' { 4 } else { 0 };
                }
            }
            _ if escape > 0 => {
                escape -= 1;
                out.push(if c.is_ascii_hexdigit() { '0' } else { c });
            }
            c if c.is_alphanumeric() => out.push('x'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::doctor::cufile::audit;

    #[test]
    fn settings_stay_and_what_is_private_does_not() {
        let text = "{ // ask alice, extension 42\n\"properties\": {\"rdma_dc_key\": \"0xdeadbeef\", \"allow_compat_mode\": false,\n\
                    \"rdma_peer_type\": \"dmabuf\", \"io_batchsize\": 64}, \"logging\": {\"dir\": \"/home/alice\", \"level\": \"INFO\"},\n\
                    \"fs\": {\"weka\": {\"mount_table\": {\"host17.corp:/x\": {\"rdma_dev_addr_list\": [\"10.1.2.3\"]}}}},\n\
                    \"denylist\": {\"mounts\": [\"/data\"]}}";
        let scrubbed = settings(text);
        for private in ["alice", "42", "deadbeef", "host17", "corp", "10.1.2.3"] {
            assert!(!scrubbed.contains(private), "{private}: {scrubbed}");
        }
        for kept in ["\"rdma_dc_key\": ", "\"allow_compat_mode\": false", "\"dmabuf\"", "64", "\"INFO\"", "[\"/data\"]"] {
            assert!(scrubbed.contains(kept), "{kept}: {scrubbed}");
        }
        assert_eq!(audit(&scrubbed).expect("valid"), audit(text).expect("valid"));
    }

    #[test]
    fn the_same_is_wrong_in_the_same_line() {
        for text in
            ["{\"a\": \"secret\",\n}", "{\n/* secret", "{\"a\":\n\"secret", "{\"secret\\u12\": 1}", "{\n\"logging\": 'secret'}"]
        {
            let wrong = |text: &str| {
                let error = audit(text).expect_err("malformed");
                (error.message().to_owned(), error.context("line").map(str::to_owned))
            };
            assert_eq!(wrong(&settings(text)), wrong(text), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whether_it_is_valid_stays(text in "(.|\n|//|/\\*|\\*/|\"|\\\\|\\{|\\}|:|,){0,60}") {
            prop_assert_eq!(audit(&settings(&text)).is_ok(), audit(&text).is_ok(), "{}", settings(&text));
        }
    }
}
