//! What a file is, by its first bytes.
//!
//! People hand a loader the wrong file: a checkpoint in another format, a pointer that Git LFS left behind, the
//! error page of a download. Such a file begins with eight bytes that, read as a header's length, give
//! nonsense. A refusal that says what the file really is saves the search.

/// What a file's first bytes say it is. The file's name has no say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A safetensors file, as far as its first bytes can tell.
    Safetensors,
    /// JSON text: the index of a sharded model.
    Index,
    /// The text that stands in for a file that Git LFS has not fetched.
    GitLfsPointer,
    /// A zip archive: what PyTorch writes as `.pt`, `.pth` or `.bin`.
    Zip,
    /// A Python pickle: what older PyTorch versions wrote.
    Pickle,
    /// A GGUF file of llama.cpp.
    Gguf,
    /// An HDF5 file of Keras and others.
    Hdf5,
    /// A web page, most often an error page that was saved in place of the file.
    Html,
    /// No bytes at all.
    Empty,
    /// None of these.
    Unknown,
}

impl FileKind {
    /// What the file is, to follow "this is".
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Safetensors => "a safetensors file",
            Self::Index => "JSON text, such as the index of a sharded model",
            Self::GitLfsPointer => "a Git LFS pointer, not the model itself",
            Self::Zip => "a zip archive, which is how PyTorch saves .pt and .bin files",
            Self::Pickle => "a Python pickle, which is how older PyTorch versions save",
            Self::Gguf => "a GGUF file",
            Self::Hdf5 => "an HDF5 file",
            Self::Html => "a web page, not the model itself",
            Self::Empty => "an empty file",
            Self::Unknown => "no file format that is known here",
        }
    }

    /// What to do with such a file where a safetensors file was wanted, if there is something to do.
    pub const fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Index => Some("open the directory or the index under its .index.json name, not as a tensor file"),
            Self::GitLfsPointer => Some("run `git lfs pull` in the repository, or download the file again"),
            Self::Zip | Self::Pickle => Some("load it with PyTorch and save it with safetensors.torch.save_file"),
            Self::Gguf | Self::Hdf5 => Some("convert it to safetensors"),
            Self::Html | Self::Empty => Some("download the file again"),
            Self::Safetensors | Self::Unknown => None,
        }
    }
}

/// Says what a file is from its first bytes. Eight are enough for every kind; up to 64 make it surer.
///
/// Text that begins with `{` is taken for an index, unless one of the first eight bytes is zero: a safetensors
/// length never exceeds 100,000,000, so its upper four bytes are zero, and text holds no zero bytes.
pub fn sniff(first_bytes: &[u8]) -> FileKind {
    if first_bytes.is_empty() {
        return FileKind::Empty;
    }
    if looks_like_safetensors(first_bytes) {
        return FileKind::Safetensors;
    }
    match first_bytes {
        [b'P', b'K', 3 | 5, 4 | 6, ..] => return FileKind::Zip,
        // Protocols 2 to 5. Protocol 1 and older begin with printable text that proves nothing.
        [0x80, 2..=5, ..] => return FileKind::Pickle,
        [b'G', b'G', b'U', b'F', ..] => return FileKind::Gguf,
        [0x89, b'H', b'D', b'F', b'\r', b'\n', 0x1a, b'\n', ..] => return FileKind::Hdf5,
        _ => {}
    }
    let text = first_bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first_bytes).trim_ascii_start();
    if text.first() == Some(&b'{') && !first_bytes.iter().take(8).any(|&byte| byte == 0) {
        return FileKind::Index;
    }
    if begins_like(text, b"version https://git-lfs") {
        return FileKind::GitLfsPointer;
    }
    let pages: [&[u8]; 4] = [b"<!doctype html", b"<html", b"<head", b"<?xml"];
    if pages.iter().any(|page| begins_like(text, page)) { FileKind::Html } else { FileKind::Unknown }
}

/// Whether the bytes could begin a safetensors file: a length within the limit, then text that could be JSON.
fn looks_like_safetensors(first_bytes: &[u8]) -> bool {
    let Some((prefix, text)) = first_bytes.split_first_chunk::<8>() else { return false };
    let within = u64::from_le_bytes(*prefix) <= super::HEADER_BYTES_MAX;
    within && text.first().is_none_or(|byte| matches!(byte, b'{' | b' ' | b'\t' | b'\r' | b'\n'))
}

/// Whether `text` begins with `magic` whatever the case, as far as it goes: at least five characters of it.
fn begins_like(text: &[u8], magic: &[u8]) -> bool {
    let common = text.len().min(magic.len());
    common >= 5 && text[..common].eq_ignore_ascii_case(&magic[..common])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_known_by_eight_bytes_because_more_are_not_always_read() {
        let cases: [(&[u8], FileKind); 14] = [
            (b"", FileKind::Empty),
            (b"\x80\x02\0\0\0\0\0\0", FileKind::Safetensors),
            (b"version https://git-lfs.github.com/spec/v1\n", FileKind::GitLfsPointer),
            (b"PK\x03\x04\0\0\x08\x08", FileKind::Zip),
            (b"\x80\x02\x8a\nl\xfc\x9cF", FileKind::Pickle),
            (b"GGUF\x03\0\0\0", FileKind::Gguf),
            (b"\x89HDF\r\n\x1a\n", FileKind::Hdf5),
            (b"<!DOCTYPE html>", FileKind::Html),
            (b"\n<html><head>", FileKind::Html),
            (b"{\n  \"metadata\": {", FileKind::Index),
            (b"\xef\xbb\xbf{\"a\":1", FileKind::Index),
            (b"{}", FileKind::Index),
            (b"<", FileKind::Unknown),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", FileKind::Unknown),
        ];
        for (bytes, kind) in cases {
            assert_eq!(sniff(bytes), kind, "{bytes:?}");
            assert_eq!(sniff(&bytes[..bytes.len().min(8)]), kind, "the first eight of {bytes:?}");
        }
    }

    #[test]
    fn a_header_whose_length_begins_with_a_brace_is_no_index() {
        // 0x7b is `{`: a header of 123 bytes.
        assert_eq!(sniff(b"{\0\0\0\0\0\0\0{\"w\":"), FileKind::Safetensors);
        // A length of 0x2020207b is beyond the limit; the zero bytes still say that this is no text.
        assert_eq!(sniff(b"{   \0\0\0\0"), FileKind::Unknown);
    }
}
