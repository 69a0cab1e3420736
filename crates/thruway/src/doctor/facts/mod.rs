//! Where the doctor's knowledge comes from.
//!
//! All of it comes through one trait, [`Facts`]: a question in, an answer out. The live machine ([`Live`]) answers, a
//! capture of another machine ([`Capture`]) does, a directory laid out as a machine's files ([`Tree`]) does, and what was
//! asked can be written down on the way ([`Recorder`]). An answer is text: of a file its content, of a call such as
//! `statfs` one `name value` a line. So a capture can be read by whoever is asked to send one.

mod capture;
mod live;
mod recorder;
mod scrub;
mod scrub_settings;
mod tree;

use std::fmt;

pub use capture::Capture;
pub use live::{Live, serve};
pub use recorder::Recorder;
pub use tree::Tree;

pub use crate::storage::probe::Unseen;

use live::{BYTES_MAX, NAMES_MAX};

/// No value of one line, and no path, is longer: a path has 4096 bytes, each of which may be written as four.
const LINE_BYTES_MAX: usize = 4 * 4096;

/// What kind of question is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The text of a file. The key is its path.
    File,
    /// The lines of a file that begin with a word. The key is the word, a blank, and the path.
    Lines,
    /// The first bytes of a file, in hexadecimal. The key is its path.
    Bytes,
    /// The names in a directory, one a line. The key is its path.
    List,
    /// A path with all links resolved. The key is the path.
    Link,
    /// What `stat`, `statfs` and `access` say of a place that the user named. The key is the path.
    Place,
    /// An environment variable. The key is its name.
    Env,
    /// Something that no file tells. The key is one of [`calls`].
    Call,
}

/// The calls that are asked for.
pub mod calls {
    /// `uname`: `release`, `machine`.
    pub const KERNEL: &str = "kernel";
    /// The CUDA driver: `cuda_version`, and one `gpu` a line.
    pub const CUDA: &str = "cuda";
    /// `getrlimit`: `memlock`, `nofile`, in bytes and files, or `unlimited`.
    pub const LIMITS: &str = "limits";
    /// Whether io_uring works: `available`, or `refused` and why.
    pub const IO_URING: &str = "io_uring";
    /// `geteuid`: `root yes`, or `root no`.
    pub const USER: &str = "user";
    /// The kernel's list of its functions (/proc/kallsyms, too long to be a fact): `p2pdma yes`, or `p2pdma no`.
    pub const FUNCTIONS: &str = "functions";
}

impl Kind {
    const ALL: [Self; 8] = [Self::File, Self::Lines, Self::Bytes, Self::List, Self::Link, Self::Place, Self::Env, Self::Call];

    /// The word for it in a capture.
    pub const fn word(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Lines => "lines",
            Self::Bytes => "bytes",
            Self::List => "list",
            Self::Link => "link",
            Self::Place => "place",
            Self::Env => "env",
            Self::Call => "call",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Question {
    /// What kind of question it is.
    pub kind: Kind,
    /// What it is about.
    pub key: String,
}

impl Question {
    /// A question of this kind.
    pub fn new(kind: Kind, key: impl Into<String>) -> Self {
        Self { kind, key: key.into() }
    }
}

impl fmt::Display for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.word(), self.key)
    }
}

/// The word and the path in the key of a question for [`Lines`](Kind::Lines). Paths begin with a slash, words have none.
fn word_and_path(key: &str) -> Option<(&str, &str)> {
    key.find(" /").map(|at| (&key[..at], &key[at + 1..]))
}

/// An answer: text, or why there is none.
pub type Answer = Result<String, Unseen>;

/// Whether a question had no answer because the source of the facts does not have it, and not because of the machine.
pub(super) fn is_untold(unseen: &Unseen) -> bool {
    matches!(unseen, Unseen::Failed(why) if why == tree::UNTOLD || why == tree::NOT_PACKED || why == "the capture does not have it")
}

/// What can be asked about a machine.
///
/// To answer changes nothing on the machine and takes bounded time. The same question has the same answer while one
/// diagnosis lasts, as far as the machine stays the same.
pub trait Facts {
    /// The answer to a question.
    fn look(&self, question: &Question) -> Answer;
}

/// Questions in short.
pub trait FactsExt: Facts {
    /// The text of a file.
    fn file(&self, path: &str) -> Answer {
        // Whatever answers: a capture may hold more than any file is read of.
        self.look(&Question::new(Kind::File, path)).and_then(|text| bounded(text, BYTES_MAX))
    }

    /// The first line of a file without the blanks around it.
    fn line(&self, path: &str) -> Answer {
        let text = self.file(path)?;
        bounded(text.lines().next().unwrap_or_default().trim(), LINE_BYTES_MAX).map(str::to_owned)
    }

    /// The lines of a file that begin with `word`.
    fn lines(&self, path: &str, word: &str) -> Answer {
        self.look(&Question::new(Kind::Lines, format!("{word} {path}")))
    }

    /// The first bytes of a file. What is no hexadecimal text in a capture counts as unreadable.
    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unseen> {
        let text = self.look(&Question::new(Kind::Bytes, path))?;
        super::parse::hexadecimal(&text).ok_or_else(|| Unseen::Failed("this is no hexadecimal text".to_owned()))
    }

    /// The names in a directory; none if it cannot be seen.
    fn names(&self, path: &str) -> Vec<String> {
        self.list(path).unwrap_or_default()
    }

    /// The names in a directory.
    fn list(&self, path: &str) -> Result<Vec<String>, Unseen> {
        let text = self.look(&Question::new(Kind::List, path))?;
        let names = || text.lines().filter(|name| !name.is_empty());
        match names().nth(NAMES_MAX) {
            Some(_) => Err(Unseen::Failed(format!("it holds more than {NAMES_MAX} names"))),
            None => Ok(names().map(str::to_owned).collect()),
        }
    }

    /// A path with all links resolved.
    fn link(&self, path: &str) -> Answer {
        let text = self.look(&Question::new(Kind::Link, path))?;
        bounded(text.trim_end_matches('\n'), LINE_BYTES_MAX).map(str::to_owned)
    }

    /// Whether there is something at a path.
    fn exists(&self, path: &str) -> bool {
        // What may not be seen, or does not answer, is there.
        self.link(path) != Err(Unseen::Absent)
    }

    /// An environment variable, if it is set and not empty.
    fn env(&self, name: &str) -> Option<String> {
        let value = self.look(&Question::new(Kind::Env, name)).ok()?.trim_end_matches('\n').to_owned();
        (!value.is_empty()).then_some(value)
    }

    /// The answer of a call.
    fn call(&self, name: &str) -> Answer {
        self.look(&Question::new(Kind::Call, name))
    }
}

impl<T: Facts + ?Sized> FactsExt for T {}

/// An answer, unless it is longer than any that means something.
fn bounded<T: AsRef<str>>(text: T, bytes_max: usize) -> Result<T, Unseen> {
    if text.as_ref().len() > bytes_max {
        return Err(Unseen::Failed(format!("it is longer than {bytes_max} bytes")));
    }
    Ok(text)
}
