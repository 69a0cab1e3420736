//! What is left to do of one storage side, dealt out in turns between drives.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::plan::Chunk;

/// How many chunks come from one drive before it is another's turn: fewer would open and look at files more often, and with
/// more of them under way at once than that, several drives have something to do.
const CHUNKS_A_TURN: usize = 4;

/// The chunks of one storage side, from which its lanes help themselves while others are still added: of each drive in file order,
/// and in turns between drives.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    chunks: Turns<Chunk>,
    closed: bool,
}

/// What lies on several drives, each drive's in order.
struct Turns<T> {
    drives: Vec<(u64, VecDeque<T>)>,
    /// Whose turn it is, and how many it has had in it.
    turn: (usize, usize),
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { drives: Vec::new(), turn: (0, 0) }
    }
}

impl<T> Turns<T> {
    fn push(&mut self, drive: u64, item: T) {
        match self.drives.iter_mut().find(|(known, _)| *known == drive) {
            Some((_, items)) => items.push_back(item),
            None => self.drives.push((drive, VecDeque::from([item]))),
        }
    }

    fn is_empty(&self) -> bool {
        self.drives.iter().all(|(_, items)| items.is_empty())
    }

    fn pop(&mut self) -> Option<T> {
        for _ in 0..=self.drives.len() {
            let (at, had) = self.turn;
            let found = self.drives.get_mut(at).filter(|_| had < CHUNKS_A_TURN).and_then(|(_, items)| items.pop_front());
            if found.is_some() {
                self.turn.1 += 1;
                return found;
            }
            self.turn = ((at + 1) % self.drives.len().max(1), 0);
        }
        None
    }
}

impl Queue {
    /// Adds chunks, each with the number of the device that its file lies on.
    pub(super) fn add(&self, chunks: impl Iterator<Item = (u64, Chunk)>) {
        let mut state = self.lock();
        chunks.for_each(|(drive, chunk)| state.chunks.push(drive, chunk));
        drop(state);
        self.changed.notify_all();
    }

    /// Says that no more chunks will come.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The next chunk. Without one, waits for it if the caller has nothing else to do; `None` then means that there will
    /// be none.
    pub(super) fn take(&self, may_wait: bool) -> Option<Chunk> {
        let mut state = self.lock();
        while may_wait && state.chunks.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.chunks.pop()
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_take_turns_and_each_drives_chunks_keep_their_order() {
        let mut turns = Turns::default();
        assert_eq!(turns.pop(), None::<u64>);
        (0..10).for_each(|number| turns.push(7, number));
        (100..103).for_each(|number| turns.push(9, number));
        let found: Vec<u64> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(found, [0, 1, 2, 3, 100, 101, 102, 4, 5, 6, 7, 8, 9]);
        assert!(turns.is_empty());
        (0..3).for_each(|number| turns.push(9, number));
        assert_eq!(std::iter::from_fn(|| turns.pop()).collect::<Vec<u64>>(), [0, 1, 2]);
    }
}
