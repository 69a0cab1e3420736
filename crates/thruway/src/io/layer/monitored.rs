//! Counts what an engine does into the session's counters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::base::Result;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};
use crate::telemetry::Counters;

/// An engine whose requests, bytes, errors and latencies are counted.
#[derive(Debug)]
pub struct Monitored<E> {
    inner: E,
    counters: Arc<Counters>,
    started: HashMap<usize, Instant>,
}

impl<E: Engine> Monitored<E> {
    /// Wraps an engine. Tokens in flight must differ from one another.
    pub fn new(inner: E, counters: Arc<Counters>) -> Self {
        Self { inner, counters, started: HashMap::new() }
    }
}

impl<E: Engine> Engine for Monitored<E> {
    fn name(&self) -> EngineName {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        let token = request.token;
        self.inner.submit(request)?;
        self.started.insert(token, Instant::now());
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        let before = done.len();
        self.inner.complete(done, wait)?;
        for Completion { request, result } in &done[before..] {
            let latency = self.started.remove(&request.token).map(|start| start.elapsed());
            let is_read = request.direction == Direction::Read;
            match result {
                Ok(bytes) => self.counters.completed(is_read, *bytes, latency.unwrap_or_default()),
                Err(_) => self.counters.failed(is_read),
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn retries(&self) -> u64 {
        self.inner.retries()
    }
}
