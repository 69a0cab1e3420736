//! Writing down what is asked.

use std::cell::RefCell;

use super::scrub::{private, scrubbed};
use super::{Answer, Capture, Facts, FactsExt, Question};
use crate::doctor::cufile::DEFAULT_PATH;

/// Asks other facts, and keeps each question with its answer.
#[derive(Debug)]
pub struct Recorder<F> {
    facts: F,
    capture: RefCell<Capture>,
}

impl<F: Facts> Recorder<F> {
    /// One that asks `facts`.
    pub fn new(facts: F) -> Self {
        Self { facts, capture: RefCell::default() }
    }

    /// What was asked and answered, without what would tell whose machine it is: names of hosts, serial numbers,
    /// addresses on a network, home directories, containers, and what is private in `cufile.json`.
    pub fn capture(self) -> Capture {
        let recorded = self.capture.into_inner();
        let settings = recorded.env("CUFILE_ENV_PATH_JSON").unwrap_or_else(|| DEFAULT_PATH.to_owned());
        let mut capture = Capture::default();
        for question in recorded.questions() {
            // Keys and answers name the same place in the same way.
            let key = Question::new(question.kind, private(&question.key));
            capture.insert(key, scrubbed(question, recorded.look(question), &settings));
        }
        capture
    }
}

impl<F: Facts> Facts for Recorder<F> {
    fn look(&self, question: &Question) -> Answer {
        // The same answer however often it is asked, and only one look at the machine.
        if let Some(answer) = self.capture.borrow().known(question) {
            return answer;
        }
        let answer = self.facts.look(question);
        self.capture.borrow_mut().insert(question.clone(), answer.clone());
        answer
    }
}
