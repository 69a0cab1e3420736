//! A disk in memory, for tests: requests wait in a queue until they are completed, in an order that a seed
//! decides, through the positional calls of [`File`](crate::storage::File).

use crate::base::Result;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};

/// An engine that performs its requests when asked for completions, out of order.
#[derive(Debug)]
pub struct InMemory {
    queue: Vec<Request>,
    depth: usize,
    state: u64,
}

impl InMemory {
    /// An engine with room for `depth` requests, at least one. `seed` decides the order of completion.
    pub fn new(depth: usize, seed: u64) -> Self {
        Self { queue: Vec::new(), depth: depth.max(1), state: seed | 1 }
    }

    /// The next number of a xorshift generator: enough to shuffle, and the same everywhere.
    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn perform(request: &Request) -> std::io::Result<u64> {
        let mut total = 0;
        for segment in &request.segments {
            let mut bytes = vec![0; segment.len()];
            let offset = request.offset + total;
            let moved = match request.direction {
                Direction::Read => {
                    let moved = request.file.read_at(&mut bytes, offset)?;
                    // SAFETY: requests in flight do not overlap, and this engine performs one at a time.
                    unsafe { segment.copy_from_host(&bytes[..moved]) };
                    moved
                }
                Direction::Write => {
                    // SAFETY: as above.
                    unsafe { segment.copy_to_host(&mut bytes) };
                    request.file.write_at(&bytes, offset)?
                }
            };
            total += moved as u64;
            if moved < segment.len() {
                break;
            }
        }
        Ok(total)
    }
}

impl Engine for InMemory {
    fn name(&self) -> EngineName {
        EngineName::InMemory
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { depth: self.depth, lanes: 1, segments_max: 64, request_bytes_max: 1 << 30 }
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        if self.queue.len() == self.depth {
            return Err(Box::new(request));
        }
        self.queue.push(request);
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, _wait: Wait) -> Result<()> {
        if !self.queue.is_empty() {
            let random = usize::try_from(self.random() >> 33).unwrap_or(0);
            let request = self.queue.swap_remove(random % self.queue.len());
            let result = Self::perform(&request);
            done.push(Completion { request, result });
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }
}
