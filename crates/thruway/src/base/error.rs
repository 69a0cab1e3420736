//! The one error type of the library.
//!
//! An [`Error`] answers four questions: what kind of failure it is ([`ErrorKind`], a closed list that
//! programs match on), what was being done and to what (the message and the context: file, tensor,
//! offset, …), what the system said (the source), and what to do next (the hint).
//!
//! `Display` is one line; `Debug` shows the same facts one a line, for logs.

use std::fmt;
use std::path::Path;

/// The result of every fallible call of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure an [`Error`] is. Closed: a new kind is a breaking change, so match on it freely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// A file or directory that was named does not exist.
    NotFound,
    /// The operating system refused access.
    PermissionDenied,
    /// Something is already there that the call would have had to replace.
    AlreadyExists,
    /// The caller asked for something that makes no sense: an unknown tensor, overlapping regions, …
    InvalidInput,
    /// A file's content breaks the rules of its format.
    Malformed,
    /// A file ends before the bytes that it should hold.
    UnexpectedEof,
    /// A file was changed, replaced or cut while it was being read.
    Changed,
    /// Bytes differ from what they should be.
    Mismatch,
    /// The path that the caller required is not to be had here.
    PathUnavailable,
    /// This machine or this build cannot do what was asked.
    Unsupported,
    /// There is not enough memory, on the host or on the GPU.
    OutOfMemory,
    /// The filesystem is full, or a quota is.
    NoSpace,
    /// A limit was reached: the process's of open files, locked memory or threads, or the caller's of what may be under way.
    LimitReached,
    /// The CUDA driver or a GPU failed to carry out an operation.
    Gpu,
    /// The operating system or a drive failed to carry out an operation.
    Io,
    /// An earlier sync of this file failed, so nothing written to it can be trusted.
    Poisoned,
    /// The caller cancelled the call.
    Cancelled,
}

impl ErrorKind {
    /// All there are.
    const ALL: [Self; 17] = [
        Self::NotFound,
        Self::PermissionDenied,
        Self::AlreadyExists,
        Self::InvalidInput,
        Self::Malformed,
        Self::UnexpectedEof,
        Self::Changed,
        Self::Mismatch,
        Self::PathUnavailable,
        Self::Unsupported,
        Self::OutOfMemory,
        Self::NoSpace,
        Self::LimitReached,
        Self::Gpu,
        Self::Io,
        Self::Poisoned,
        Self::Cancelled,
    ];

    /// The kind with this [name](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The kind's name in words, as it stands in JSON output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::PermissionDenied => "permission denied",
            Self::AlreadyExists => "already exists",
            Self::InvalidInput => "invalid input",
            Self::Malformed => "malformed",
            Self::UnexpectedEof => "unexpected end of file",
            Self::Changed => "changed while read",
            Self::Mismatch => "mismatch",
            Self::PathUnavailable => "path unavailable",
            Self::Unsupported => "unsupported",
            Self::OutOfMemory => "out of memory",
            Self::NoSpace => "no space",
            Self::LimitReached => "limit reached",
            Self::Gpu => "GPU failure",
            Self::Io => "I/O error",
            Self::Poisoned => "poisoned",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A failure: its kind, a message, context, the source, and what to do next.
///
/// The facts sit behind one pointer, so that `Result`s stay small.
pub struct Error(Box<Facts>);

struct Facts {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    hint: Option<String>,
    source: Option<std::io::Error>,
}

impl Error {
    /// A failure of the given kind. `message` says what was attempted or what is wrong, without a full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Facts { kind, message: message.into(), context: Vec::new(), hint: None, source: None }))
    }

    /// A failure that the operating system reported. The kind follows from the error number, and so does
    /// the hint where there is something that the user can do.
    ///
    /// A failure of this library's own that had to travel as one of the system's ([`into_io`](Self::into_io)) is taken out
    /// again: its kind, its facts and its hint stay, and its message follows this one.
    pub fn from_io(message: impl Into<String>, source: std::io::Error) -> Self {
        let source = match source.downcast::<Self>() {
            Ok(mut inner) => {
                inner.0.message = format!("{}: {}", message.into(), inner.0.message);
                return inner;
            }
            Err(source) => source,
        };
        let (kind, hint) = classify(&source);
        let mut error = Self::new(kind, message);
        error.0.source = Some(source);
        error.0.hint = hint.map(str::to_owned);
        error
    }

    /// The same failure for somebody else who is to hear of it.
    #[must_use]
    pub fn copied(&self) -> Self {
        let Facts { kind, message, context, hint, source } = &*self.0;
        let source = source.as_ref().map(|source| match source.raw_os_error() {
            Some(code) => std::io::Error::from_raw_os_error(code),
            None => std::io::Error::new(source.kind(), source.to_string()),
        });
        let (kind, message, context, hint) = (*kind, message.clone(), context.clone(), hint.clone());
        Self(Box::new(Facts { kind, message, context, hint, source }))
    }

    /// The failure as one of the system's, for interfaces that know no other: [`from_io`](Self::from_io) takes it out again.
    pub fn into_io(self) -> std::io::Error {
        std::io::Error::other(self)
    }

    /// Adds a fact. The first value given for a key stays: the innermost caller knows best.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        if self.context(key).is_none() {
            self.0.context.push((key, value.to_string()));
        }
        self
    }

    /// Adds the file that the failure is about, escaped so that it is safe to print.
    #[must_use]
    pub fn with_file(self, path: &Path) -> Self {
        self.with("file", escaped(&path.to_string_lossy()))
    }

    /// Adds the tensor that the failure is about, escaped so that it is safe to print.
    #[must_use]
    pub fn with_tensor(self, name: &str) -> Self {
        self.with("tensor", printable(name))
    }

    /// Says what to do next. The first hint given stays.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        if self.0.hint.is_none() {
            self.0.hint = Some(hint.into());
        }
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was attempted or what is wrong, without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The value of one fact: `file`, `tensor`, `offset`, `length`, `op`, `engine`, …
    pub fn context(&self, key: &str) -> Option<&str> {
        self.0.context.iter().find(|(have, _)| *have == key).map(|(_, value)| value.as_str())
    }

    /// All facts, in the order in which they were added.
    pub fn contexts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.context.iter().map(|(key, value)| (*key, value.as_str()))
    }

    /// What to do next, where there is something to do.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The error number that the operating system gave, if the failure came from there.
    pub fn os_error(&self) -> Option<i32> {
        self.0.source.as_ref().and_then(std::io::Error::raw_os_error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.message)?;
        if !self.0.context.is_empty() {
            let facts: Vec<String> = self.contexts().map(|(key, value)| format!("{key} {value}")).collect();
            write!(f, " ({})", facts.join(", "))?;
        }
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.0.kind.name(), self.0.message)?;
        for (key, value) in self.contexts() {
            writeln!(f, "  {key}: {value}")?;
        }
        if let Some(source) = &self.0.source {
            writeln!(f, "  source: {source}")?;
        }
        if let Some(hint) = self.hint() {
            writeln!(f, "  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| source as _)
    }
}

/// The kind that an operating system error belongs to, and what a user can do about it.
fn classify(source: &std::io::Error) -> (ErrorKind, Option<&'static str>) {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => (ErrorKind::NotFound, None),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
            (ErrorKind::PermissionDenied, Some("check the owner and mode of the file and of each directory above it"))
        }
        Some(libc::EEXIST | libc::ENOTEMPTY) => (
            ErrorKind::AlreadyExists,
            Some("something stands there, or was put there meanwhile: move it away, or choose another name"),
        ),
        Some(libc::ENOSPC | libc::EDQUOT) => {
            (ErrorKind::NoSpace, Some("free space on that filesystem (`df -h`, `quota`), or write elsewhere"))
        }
        Some(libc::EMFILE) => (ErrorKind::LimitReached, Some("raise the limit of open files (`ulimit -n`)")),
        Some(libc::ENFILE) => (ErrorKind::LimitReached, Some("raise the system's limit of open files (`sysctl fs.file-max`)")),
        Some(libc::ENOMEM) => (ErrorKind::OutOfMemory, Some("free memory, raise `ulimit -l` or the container's memory limit")),
        Some(libc::EIO) => (ErrorKind::Io, Some("the drive or the network storage failed: see `dmesg`")),
        _ => match source.kind() {
            std::io::ErrorKind::UnexpectedEof => (ErrorKind::UnexpectedEof, None),
            std::io::ErrorKind::NotFound => (ErrorKind::NotFound, None),
            std::io::ErrorKind::PermissionDenied => (ErrorKind::PermissionDenied, None),
            std::io::ErrorKind::AlreadyExists => (ErrorKind::AlreadyExists, None),
            _ => (ErrorKind::Io, None),
        },
    }
}

/// `text` with everything escaped that could disturb a terminal or a log: control characters, the escape
/// byte, line breaks, and the marks that reverse the direction of text. Very long text is cut.
pub fn printable(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    match text.char_indices().nth(CHARS_MAX) {
        Some((cut, _)) => escaped(&text[..cut]) + "…",
        None => escaped(text),
    }
}

/// As [`printable`], but whole however long: for paths, whose end says most and whose length the system limits.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || is_invisible(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Marks that change how text is laid out or compared without being seen: directions, joiners, separators, tags.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_is_one_line_with_context_and_source() {
        let error = Error::from_io("cannot read", std::io::Error::from_raw_os_error(libc::EIO))
            .with_file(Path::new("/models/a\nb.safetensors"))
            .with("offset", 4096);
        let line = error.to_string();
        assert!(!line.contains('\n'), "{line}");
        assert!(line.starts_with("cannot read (file /models/a\\nb.safetensors, offset 4096): "), "{line}");
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.os_error(), Some(libc::EIO));
    }

    #[test]
    fn a_failure_of_our_own_survives_the_journey_through_an_io_error() {
        let own = Error::new(ErrorKind::PathUnavailable, "no way").with("code", 5008).with_hint("another").into_io();
        let back = Error::from_io("cannot read", own).with("offset", 1);
        assert_eq!(
            (back.kind(), back.message(), back.hint()),
            (ErrorKind::PathUnavailable, "cannot read: no way", Some("another"))
        );
        assert_eq!((back.context("code"), back.context("offset")), (Some("5008"), Some("1")));
    }

    #[test]
    fn the_innermost_context_and_hint_stay() {
        let error =
            Error::new(ErrorKind::InvalidInput, "x").with("op", "inner").with("op", "outer").with_hint("a").with_hint("b");
        assert_eq!(error.context("op"), Some("inner"));
        assert_eq!(error.hint(), Some("a"));
    }

    #[test]
    fn each_errno_that_a_user_can_act_on_has_a_hint() {
        for (errno, kind) in [
            (libc::ENOSPC, ErrorKind::NoSpace),
            (libc::EDQUOT, ErrorKind::NoSpace),
            (libc::EMFILE, ErrorKind::LimitReached),
            (libc::EACCES, ErrorKind::PermissionDenied),
            (libc::ENOMEM, ErrorKind::OutOfMemory),
            (libc::EIO, ErrorKind::Io),
        ] {
            let error = Error::from_io("x", std::io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), kind);
            assert!(error.hint().is_some(), "errno {errno} has no hint");
        }
    }

    #[test]
    fn printable_escapes_what_disturbs_a_terminal_and_keeps_the_rest() {
        assert_eq!(printable("\u{1b}[31mred\n\u{0}\u{202e}x"), "\\u{1b}[31mred\\n\\u{0}\\u{202e}x");
        assert_eq!(printable("权重 café"), "权重 café");
        assert!(printable(&"L".repeat(70_000)).chars().count() <= 201);
        assert_eq!(printable("\u{61c}\u{2028}\u{e0041}"), "\\u{61c}\\u{2028}\\u{e0041}");
        let deep = format!("{}/the-one.safetensors", "d/".repeat(1000));
        let error = Error::new(ErrorKind::Io, "x").with_file(Path::new(&deep));
        assert_eq!(error.context("file"), Some(deep.as_str()), "a path is shown to its end");
    }
}
