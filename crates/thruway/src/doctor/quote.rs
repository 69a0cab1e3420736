//! Words of commands that a person is to type.

/// A word for the shell.
pub(super) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_the_command_as_they_are() {
        for (word, expected) in [
            ("/mnt/a", "/mnt/a"),
            ("", "''"),
            ("/mnt/my data; reboot", "'/mnt/my data; reboot'"),
            ("it's", "'it'\\''s'"),
            ("$(x)", "'$(x)'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
