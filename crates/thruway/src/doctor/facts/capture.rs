//! A machine's facts in one text file.
//!
//! ```text
//! thruway-facts 1
//! # a comment, before the first fact only
//! @ file /sys/module/nvidia_fs/version          an answer: the lines up to the next that begins with @
//! 2.28.4
//! @ absent list /sys/class/nvme                 asked for, and not there
//! @ denied bytes /sys/…/config                  asked for, and not allowed
//! @ silent place /mnt/nfs                       asked for, and there was no answer within so many milliseconds
//! 400
//! @ failed file /etc/cufile.json                asked for, and this is what was in the way
//! this is a named pipe, not a regular file
//! @ rest absent                                 what is not listed is not there (for captures written by hand)
//! ```
//! A line of an answer that begins with `@` or `\` has a `\` before it; so has a line break in a key (`\n`). Without
//! `rest absent` what is not listed is unknown: a newer doctor may ask more than the one that wrote the capture.

use std::collections::BTreeMap;
use std::time::Duration;

use super::scrub::private;
use super::{Answer, Facts, Kind, Question, Unseen};
use crate::base::{Error, ErrorKind, Result};

/// The first line.
const HEAD: &str = "thruway-facts 1";
/// No machine needs more; a diagnosis of a capture takes bounded memory.
const FACTS_MAX: usize = 100_000;

/// The facts of a machine, as they were captured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    facts: BTreeMap<Question, Answer>,
    rest_is_absent: bool,
}

impl Capture {
    /// Reads the text of a capture.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), with the line.
    pub fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, head)| head.trim_end() != HEAD) {
            let error = Error::new(ErrorKind::Malformed, format!("this is no capture: its first line is not '{HEAD}'"));
            return Err(error.with_hint("write one with `thruway doctor --capture FILE`"));
        }
        let mut capture = Self::default();
        let mut current: Option<(Question, Option<Unseen>, String)> = None;
        for (number, line) in lines {
            if let Some(head) = line.strip_prefix('@') {
                capture.keep(current.take());
                if capture.facts.len() >= FACTS_MAX {
                    return Err(malformed(number, "there are too many facts"));
                }
                match head.trim() {
                    "rest absent" => capture.rest_is_absent = true,
                    head => current = Some(fact(head).ok_or_else(|| malformed(number, "this is the head of no fact"))?),
                }
            } else if let Some((_, _, body)) = &mut current {
                body.push_str(line.strip_prefix('\\').unwrap_or(line));
                body.push('\n');
            } else if !line.trim().is_empty() && !line.starts_with('#') {
                return Err(malformed(number, "this line belongs to no fact"));
            }
        }
        capture.keep(current);
        Ok(capture)
    }

    /// The text of the capture.
    pub fn to_text(&self) -> String {
        let mut text = format!("{HEAD}\n");
        for (question, answer) in &self.facts {
            let key = question.key.replace('\\', "\\\\").replace('\n', "\\n");
            let waited;
            let (outcome, body) = match answer {
                Ok(body) => ("", body.as_str()),
                Err(Unseen::Absent) => ("absent ", ""),
                Err(Unseen::Silent(time)) => {
                    waited = time.as_millis().to_string();
                    ("silent ", waited.as_str())
                }
                Err(Unseen::Denied) => ("denied ", ""),
                Err(Unseen::Failed(why)) => ("failed ", why.as_str()),
            };
            text.push_str(&format!("@ {outcome}{} {key}\n", question.kind.word()));
            for line in body.lines() {
                let escape = if line.starts_with(['@', '\\']) { "\\" } else { "" };
                text.push_str(&format!("{escape}{line}\n"));
            }
        }
        if self.rest_is_absent {
            text.push_str("@ rest absent\n");
        }
        text
    }

    /// Adds an answer.
    pub fn insert(&mut self, question: Question, answer: Answer) {
        self.facts.insert(question, answer);
    }

    /// Leaves out what is known of other places than these: a capture is for the places that its user named.
    pub fn keep_places(&mut self, paths: &[String]) {
        // A capture calls them what a recorder made of their names.
        let paths: Vec<String> = paths.iter().map(|path| private(path)).collect();
        self.facts.retain(|question, _| question.kind != Kind::Place || paths.contains(&question.key));
    }

    /// The questions that it has an answer to.
    pub fn questions(&self) -> impl Iterator<Item = &Question> {
        self.facts.keys()
    }

    fn keep(&mut self, fact: Option<(Question, Option<Unseen>, String)>) {
        let Some((question, unseen, body)) = fact else { return };
        let answer = match unseen {
            None => Ok(body),
            Some(Unseen::Silent(_)) => Err(Unseen::Silent(Duration::from_millis(body.trim().parse().unwrap_or(0)))),
            Some(Unseen::Failed(_)) => Err(Unseen::Failed(body.trim_end().to_owned())),
            Some(unseen) => Err(unseen),
        };
        self.facts.insert(question, answer);
    }

    pub(super) fn known(&self, question: &Question) -> Option<Answer> {
        match self.facts.get(question) {
            None if self.rest_is_absent => Some(Err(Unseen::Absent)),
            answer => answer.cloned(),
        }
    }
}

impl Facts for Capture {
    fn look(&self, question: &Question) -> Answer {
        self.known(question).unwrap_or_else(|| Err(Unseen::Failed("the capture does not have it".to_owned())))
    }
}

fn malformed(number: usize, what: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("this capture cannot be read: {what}")).with("line", number + 1)
}

/// `[absent |denied |silent |failed ]KIND KEY`.
fn fact(head: &str) -> Option<(Question, Option<Unseen>, String)> {
    let (word, rest) = head.split_once(' ')?;
    let unseen = match word {
        "absent" => Some(Unseen::Absent),
        "denied" => Some(Unseen::Denied),
        "silent" => Some(Unseen::Silent(Duration::ZERO)),
        "failed" => Some(Unseen::Failed(String::new())),
        _ => None,
    };
    let rest = if unseen.is_some() { rest } else { head };
    let (kind, key) = rest.split_once(' ')?;
    Some((Question::new(Kind::from_word(kind)?, unescaped(key)), unseen, String::new()))
}

fn unescaped(key: &str) -> String {
    let mut out = String::with_capacity(key.len());
    let mut chars = key.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => out.push(if chars.next() == Some('n') { '\n' } else { '\\' }),
            (c, false) => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_capture_is_read_with_its_absences_and_refusals() {
        let text = "thruway-facts 1\n# by hand\n\n@ file /a b\none\n\\@two\n@ absent list /x\n@ failed place /m\nno answer\n";
        let capture = Capture::parse(text).expect("valid");
        assert_eq!(capture.look(&Question::new(Kind::File, "/a b")), Ok("one\n@two\n".to_owned()));
        assert_eq!(capture.look(&Question::new(Kind::List, "/x")), Err(Unseen::Absent));
        assert_eq!(capture.look(&Question::new(Kind::Place, "/m")), Err(Unseen::Failed("no answer".to_owned())));
        assert!(matches!(capture.look(&Question::new(Kind::File, "/y")), Err(Unseen::Failed(_))));
        let capture = Capture::parse("thruway-facts 1\n@ rest absent\n").expect("valid");
        assert_eq!(capture.look(&Question::new(Kind::File, "/y")), Err(Unseen::Absent));
    }

    #[test]
    fn what_is_no_capture_is_refused_with_its_line() {
        for (text, line) in
            [("", None), ("hello", None), ("thruway-facts 1\nstray", Some("2")), ("thruway-facts 1\n@ x", Some("2"))]
        {
            let error = Capture::parse(text).expect_err("no capture");
            assert_eq!((error.kind(), error.context("line")), (ErrorKind::Malformed, line));
        }
    }

    proptest! {
        #[test]
        fn a_capture_comes_back_from_its_own_text(
            facts in proptest::collection::vec(("[^\r]{0,20}", "([@\\\\a-z ]{0,6}\n){0,4}", 0_u8..5), 0..6)
        ) {
            let mut capture = Capture::default();
            for (key, body, outcome) in facts {
                let answer = match outcome {
                    0 => Ok(body),
                    1 => Err(Unseen::Absent),
                    2 => Err(Unseen::Denied),
                    3 => Err(Unseen::Silent(Duration::from_millis(400))),
                    _ => Err(Unseen::Failed(body.trim_end().to_owned())),
                };
                // The head of a fact is trimmed.
                capture.insert(Question::new(Kind::File, format!("/{}.", key.trim())), answer);
            }
            prop_assert_eq!(Capture::parse(&capture.to_text()).expect("our own text"), capture);
        }

        #[test]
        fn no_text_makes_it_panic(text in "(thruway-facts 1\n)?(.|\n){0,200}") {
            drop(Capture::parse(&text));
        }
    }
}
