//! Text of the kernel's and NVIDIA's files made into values. Pure: text in, values out, and no text is too strange; what
//! cannot be understood is left out or `None`.

pub mod mounts;
pub mod nvidia;
pub mod pci;

/// A version's numbers, as far as they are numbers: `6.8.0-45-generic` is `[6, 8, 0]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub Vec<u32>);

impl Version {
    /// Reads the leading numbers; `None` if there is none.
    pub fn parse(text: &str) -> Option<Self> {
        const PARTS_MAX: usize = 8;
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let parts = text[..end].split('.').take(PARTS_MAX).map_while(|part| part.parse().ok());
        let parts: Vec<u32> = parts.collect();
        (!parts.is_empty()).then_some(Self(parts))
    }

    /// Whether it is `least` or newer; parts that are not given count as 0.
    pub fn at_least(&self, least: &[u32]) -> bool {
        let part = |parts: &[u32], at: usize| parts.get(at).copied().unwrap_or(0);
        let length = self.0.len().max(least.len());
        let order = (0..length).map(|at| part(&self.0, at).cmp(&part(least, at)));
        order.into_iter().find(|order| order.is_ne()).is_none_or(std::cmp::Ordering::is_gt)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.iter().map(u32::to_string).collect::<Vec<String>>().join("."))
    }
}

/// The bytes of hexadecimal text, blanks and line breaks left out; `None` if it is none.
pub fn hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u32> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let byte = |pair: &[u32]| u8::try_from(pair[0] << 4 | pair[1]).ok();
    digits.len().is_multiple_of(2).then(|| digits.chunks_exact(2).map(byte).collect::<Option<_>>())?
}

/// The value behind the first line `name value`.
pub fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let words = text.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
    words.into_iter().find(|(have, _)| *have == name).map(|(_, value)| value.trim())
}

/// The value behind the first line `name: value`, or `name=value` with `mark` `=`.
pub fn field<'a>(text: &'a str, name: &str, mark: char) -> Option<&'a str> {
    let pairs = text.lines().filter_map(|line| line.split_once(mark));
    pairs.into_iter().find(|(have, _)| have.trim() == name).map(|(_, value)| value.trim())
}

/// The numbers of a list such as `0-3,8`, at most `most` of them.
pub fn ranges(text: &str, most: usize) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().take(most).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_compare_part_by_part() {
        let version = Version::parse("6.8.0-45-generic").expect("a version");
        assert_eq!(version.to_string(), "6.8.0");
        assert!(version.at_least(&[6, 8]) && version.at_least(&[6, 2]) && !version.at_least(&[6, 17]));
        assert!(!Version::parse("580.65").expect("a version").at_least(&[580, 65, 6]));
        assert_eq!(Version::parse("none"), None);
    }

    #[test]
    fn small_things_are_read() {
        assert_eq!(hexadecimal("de 10\n00"), Some(vec![0xde, 0x10, 0]));
        assert_eq!((hexadecimal("0"), hexadecimal("xy")), (None, None));
        assert_eq!(value("a 1\nreal /x y\n", "real"), Some("/x y"));
        assert_eq!(field("Model: \t NVIDIA H100\n", "Model", ':'), Some("NVIDIA H100"));
        assert_eq!(ranges("0-2,7\n", 8), [0, 1, 2, 7]);
        assert_eq!(ranges("0-4294967295", 3), [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "(.|\n){0,200}") {
            std::hint::black_box((Version::parse(&text), hexadecimal(&text), ranges(&text, 9)));
            std::hint::black_box((value(&text, "a"), field(&text, "a", ':')));
            std::hint::black_box(mounts::parse(&text));
            std::hint::black_box((nvidia::driver_version(&text), nvidia::registry_words(&text), nvidia::statistics(&text), nvidia::survey(&text)));
            std::hint::black_box((pci::class(&text), pci::speed(&text), pci::registers(&text), pci::port_of(&text), pci::root_of(&text)));
            std::hint::black_box(pci::redirects_upstream(text.as_bytes()));
        }
    }
}
