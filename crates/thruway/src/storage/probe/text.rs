//! Names as text. A name is bytes, and text goes where bytes cannot: into captures, JSON and terminals.

/// Bytes as text from which [`bytes_of`] makes them again: what is no UTF-8, and a line break, is written as `\xff`, and so is a
/// backslash that would be taken for the beginning of such.
pub fn text_of(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for (at, c) in chunk.valid().char_indices() {
            match c {
                '\n' => text.push_str("\\x0a"),
                '\\' if escape(&chunk.valid().as_bytes()[at..]).is_some() => text.push_str("\\x5c"),
                c => text.push(c),
            }
        }
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

/// The bytes that [`text_of`] wrote.
pub fn bytes_of(text: &str) -> Vec<u8> {
    unescaped(text.as_bytes(), escape)
}

/// The bytes of a name in the kernel's tables, in which some are written as three octal digits: `\040`.
pub fn octal(bytes: &[u8]) -> Vec<u8> {
    unescaped(bytes, |rest| number(rest, b"\\", 3, 8))
}

/// The byte that `\xff` at the beginning stands for, and the length of that.
fn escape(rest: &[u8]) -> Option<(u8, usize)> {
    number(rest, b"\\x", 2, 16)
}

fn number(rest: &[u8], mark: &[u8], length: usize, radix: u32) -> Option<(u8, usize)> {
    let digits = std::str::from_utf8(rest.strip_prefix(mark)?.get(..length)?).ok()?;
    let is_number = digits.chars().all(|digit| digit.is_digit(radix));
    let byte = u8::from_str_radix(digits, radix).ok().filter(|_| is_number)?;
    Some((byte, mark.len() + length))
}

fn unescaped(bytes: &[u8], escape: impl Fn(&[u8]) -> Option<(u8, usize)>) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let (byte, length) = escape(&bytes[at..]).unwrap_or((bytes[at], 1));
        out.push(byte);
        at += length;
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_is_as_it_was_and_other_bytes_can_be_told() {
        assert_eq!(text_of("/mnt/Ä b\\c".as_bytes()), "/mnt/Ä b\\c");
        assert_eq!(text_of(b"/\xff\\\n\\xff\\x"), "/\\xff\\\\x0a\\x5cxff\\x");
        assert_eq!(octal(b"a\\040b\\134\\777\\09"), b"a b\\\\777\\09");
    }

    proptest! {
        #[test]
        fn all_bytes_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..40), text in "[\\\\xf0-9a\n]{0,20}") {
            prop_assert_eq!(bytes_of(&text_of(&bytes)), bytes);
            prop_assert_eq!(bytes_of(&text_of(text.as_bytes())), text.into_bytes());
        }
    }
}
