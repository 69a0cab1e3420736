//! Writing down what is asked.

use std::cell::RefCell;

use super::scrub::scrubbed;
use super::{Answer, Capture, Facts, Question};

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
    /// addresses on a network.
    pub fn capture(self) -> Capture {
        let recorded = self.capture.into_inner();
        let mut capture = Capture::default();
        for question in recorded.questions() {
            capture.insert(question.clone(), scrubbed(question, recorded.look(question)));
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
