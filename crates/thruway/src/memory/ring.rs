//! The ring: the small pool of staging slots that bounds a transfer's host memory.
//!
//! Slots are all of one size. They are cut from slabs, and a slab is allocated only when a transfer asks for
//! a slot and none is free, because staging memory can be dear to make (pinning costs up to 0.45 s a GiB).
//! At the ceiling, asking either fails at once or waits, as the caller chooses; a slot comes back when it is
//! dropped, which an engine does after the kernel and the copy engine are done with it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::region::{Access, Region};
use super::{HostSlabs, Memory, SlabSource};
use crate::base::{ByteSize, Error, ErrorKind, Result};

/// How large the ring may grow, and in which steps.
#[derive(Clone, Copy, Debug)]
pub struct RingSettings {
    /// The bytes of one slot: the largest request that can be staged.
    pub slot_bytes: usize,
    /// How many slots are allocated at a time.
    pub slots_per_slab: usize,
    /// The most bytes that the ring holds, rounded down to whole slabs, and at least one slab.
    pub bytes_max: usize,
}

impl Default for RingSettings {
    /// Slots of 4 MiB (a PCIe copy engine reaches 0.96 of its limit there), slabs of 8 MiB, 256 MiB in all.
    fn default() -> Self {
        Self { slot_bytes: 4 << 20, slots_per_slab: 2, bytes_max: 256 << 20 }
    }
}

/// A pool of equal staging slots, shared by all transfers of a session.
#[derive(Debug)]
pub struct Ring {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: RingSettings,
    slabs: Box<dyn SlabSource>,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Place>,
    slabs: Vec<Arc<dyn Memory>>,
    /// How many slabs are being made.
    growing: usize,
    /// How many slots will never come back, because nobody knows what still uses them.
    lost: usize,
}

/// Where a slot lies: its slab, and its byte offset there.
#[derive(Debug, Clone)]
struct Place {
    slab: Arc<dyn Memory>,
    start: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is only ever changed by whole pushes and pops, so a panic elsewhere leaves it sound.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    /// A ring of ordinary host memory. Nothing is allocated yet.
    pub fn new(settings: RingSettings) -> Self {
        Self::with_source(settings, Box::new(HostSlabs))
    }

    /// A ring whose slabs come from `slabs`. Nothing is allocated yet.
    pub fn with_source(settings: RingSettings, slabs: Box<dyn SlabSource>) -> Self {
        let shared = Shared { settings, slabs, state: Mutex::default(), returned: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }

    /// The bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.shared.settings.slot_bytes
    }

    /// The bytes allocated so far.
    pub fn allocated_bytes(&self) -> usize {
        self.shared.lock().slabs.iter().map(|slab| slab.len()).sum()
    }

    /// A free slot, growing the ring if it may still grow; `None` if all slots are in use.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the first slab cannot be allocated. A later slab that
    /// cannot be had is no error: the ring goes on with the slots that it has.
    pub fn try_take(&self) -> Result<Option<Slot>> {
        self.pop_or_grow()
    }

    /// A free slot; waits for one if all are in use. Only for callers that hold no slot themselves: two that
    /// hold some and wait for more would wait for ever.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the first slab cannot be allocated.
    pub fn take(&self) -> Result<Slot> {
        loop {
            if let Some(slot) = self.pop_or_grow()? {
                return Ok(slot);
            }
            let state = self.shared.lock();
            let all = state.slabs.len() * self.shared.settings.slots_per_slab;
            if all > 0 && state.lost == all && state.growing == 0 {
                return Err(Error::new(ErrorKind::OutOfMemory, "all staging memory was lost in earlier failures")
                    .with_hint("build a new session; the GPU or the kernel may still use the old one's memory"));
            }
            // A slot may have come back between the look and the lock, and its bell with it.
            if state.free.is_empty() && state.slabs.len() + state.growing > 0 {
                drop(self.shared.returned.wait(state).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    fn pop(&self, state: &mut State) -> Result<Option<Slot>> {
        let Some(place) = state.free.pop() else { return Ok(None) };
        let range = place.start..place.start + self.shared.settings.slot_bytes;
        let region = Region::claim(Arc::clone(&place.slab), range, Access::Writable)?;
        Ok(Some(Slot { region: Some(region), place, shared: Arc::clone(&self.shared) }))
    }

    /// A free slot, or one of a new slab; `None` if the ring may not grow. Slabs are made outside the lock, so that several
    /// lanes make theirs at once and the others go on meanwhile.
    fn pop_or_grow(&self) -> Result<Option<Slot>> {
        let RingSettings { slot_bytes, slots_per_slab, bytes_max } = self.shared.settings;
        let slab_bytes = slot_bytes.saturating_mul(slots_per_slab);
        if slab_bytes == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "the ring's slots and slabs must not be empty"));
        }
        let mut state = self.shared.lock();
        if let Some(slot) = self.pop(&mut state)? {
            return Ok(Some(slot));
        }
        let slabs = state.slabs.len() + state.growing;
        if slabs > 0 && (slabs + 1).saturating_mul(slab_bytes) > bytes_max {
            return Ok(None);
        }
        state.growing += 1;
        drop(state);
        let made = self.shared.slabs.allocate(slab_bytes);
        let mut state = self.shared.lock();
        state.growing -= 1;
        match made {
            Ok(slab) => {
                // The last slot is handed out first, so push in reverse to use the slab from its start.
                let places = (0..slots_per_slab).rev().map(|i| Place { slab: Arc::clone(&slab), start: i * slot_bytes });
                state.free.extend(places);
                state.slabs.push(slab);
                self.shared.returned.notify_all();
                self.pop(&mut state)
            }
            Err(_) if state.slabs.len() + state.growing > 0 => self.pop(&mut state),
            Err(error) => {
                // Whoever waits for a slot must find out for itself that there will be none.
                self.shared.returned.notify_all();
                Err(error.with_hint(format!("lower the ring's ceiling, now {}", ByteSize(bytes_max as u64))))
            }
        }
    }
}

/// A slot of the ring, which returns there when dropped.
#[derive(Debug)]
pub struct Slot {
    region: Option<Region>,
    place: Place,
    shared: Arc<Shared>,
}

impl Slot {
    /// The slot's memory.
    pub fn region(&self) -> &Region {
        match &self.region {
            Some(region) => region,
            None => unreachable!("the region is only taken while the slot is dropped"),
        }
    }
}

impl Slot {
    /// Gives the slot up: its memory is never used again, because the kernel or a GPU may still use it.
    pub(crate) fn lose(mut self) {
        if let Some(region) = self.region.take() {
            Box::leak(Box::new(region));
            self.shared.lock().lost += 1;
            self.shared.returned.notify_all();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.region.is_none() {
            return;
        }
        self.region = None;
        self.shared.lock().free.push(self.place.clone());
        self.shared.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Ring {
        Ring::new(RingSettings { slot_bytes: 4096, slots_per_slab: 2, bytes_max: 4 * 4096 })
    }

    #[test]
    fn it_grows_slab_by_slab_to_its_ceiling_and_no_further() {
        let ring = small();
        assert_eq!(ring.allocated_bytes(), 0, "nothing is allocated before it is needed");
        let mut held = Vec::new();
        for expected in [2, 2, 4, 4] {
            held.push(ring.try_take().expect("memory").expect("below the ceiling"));
            assert_eq!(ring.allocated_bytes(), expected * 4096);
        }
        assert!(ring.try_take().expect("memory").is_none(), "the ceiling holds");
        held.pop();
        assert!(ring.try_take().expect("memory").is_some(), "a dropped slot is free again");
        assert_eq!(ring.allocated_bytes(), 4 * 4096);
    }

    #[test]
    fn slots_in_use_never_share_memory() {
        let ring = small();
        let held: Vec<Slot> = std::iter::from_fn(|| ring.try_take().expect("memory")).collect();
        let mut starts: Vec<usize> = held.iter().map(|slot| slot.region().address()).collect();
        starts.sort_unstable();
        assert_eq!(starts.len(), 4);
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 4096));
    }

    #[test]
    fn a_waiting_taker_gets_the_slot_that_another_thread_returns() {
        let ring = Ring::new(RingSettings { slot_bytes: 4096, slots_per_slab: 1, bytes_max: 4096 });
        let slot = ring.take().expect("memory");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.take().expect("memory").region().len());
            drop(slot);
            assert_eq!(waiter.join().expect("no panic"), 4096);
        });
    }

    #[test]
    fn when_every_slot_is_lost_a_waiting_taker_is_told() {
        let ring = Ring::new(RingSettings { slot_bytes: 4096, slots_per_slab: 1, bytes_max: 4096 });
        let slot = ring.take().expect("memory");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.take().map(drop));
            slot.lose();
            assert!(waiter.join().expect("no panic").is_err(), "nothing can come back");
        });
        assert!(ring.try_take().expect("no failure of the ring's own").is_none());
    }

    #[test]
    fn without_memory_for_one_slab_it_says_so() {
        #[derive(Debug)]
        struct Never;
        impl SlabSource for Never {
            fn allocate(&self, _: usize) -> Result<Arc<dyn Memory>> {
                Err(Error::new(ErrorKind::OutOfMemory, "none"))
            }
        }
        let ring = Ring::with_source(RingSettings::default(), Box::new(Never));
        let error = ring.take().expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.hint().is_some());
    }
}
