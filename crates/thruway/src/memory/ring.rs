//! The ring: the small pool of staging memory that bounds what a transfer takes of the host.
//!
//! Slots are cut to the length that is asked for, from slabs that are all of one size. A slab is allocated only when a
//! slot is asked for and no free stretch is long enough, because staging memory is dear to make (pinning costs up to
//! 0.45 s a GiB), and by one caller at a time: several at once hardly gain anything (the kernel and the driver make them
//! wait for each other), while the others can use what is there already. At the ceiling, asking either fails at once or
//! waits, as the caller chooses; a slot comes back when it is dropped, which an engine does after the kernel and the copy
//! engine are done with it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::region::{Access, Region};
use super::{HostSlabs, Memory, SlabSource};
use crate::base::{Alignment, ByteSize, Error, ErrorKind, Result};

/// How large the ring may grow, and in which steps.
#[derive(Clone, Copy, Debug)]
pub struct RingSettings {
    /// The bytes of the longest slot: the largest request that can be staged.
    pub slot_bytes: usize,
    /// How many bytes are allocated at a time; no less than a slot.
    pub slab_bytes: usize,
    /// The most bytes that the ring holds, rounded down to whole slabs, and at least one slab.
    pub bytes_max: usize,
}

impl Default for RingSettings {
    /// Slots of up to 4 MiB (a PCIe copy engine reaches 0.96 of its limit there), slabs of as much, 256 MiB in all.
    fn default() -> Self {
        Self { slot_bytes: 4 << 20, slab_bytes: 4 << 20, bytes_max: 256 << 20 }
    }
}

/// A pool of staging memory, shared by all transfers of a session.
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
    /// Stretches that no slot occupies; two that touch are one. What was used last comes last.
    free: Vec<Place>,
    slabs: Vec<Arc<dyn Memory>>,
    /// Whether a slab is being made.
    growing: bool,
    /// Whether a slab could not be made: it is not tried again before everything has come back.
    full: bool,
    /// How many slots are out and will come back.
    in_use: usize,
    /// Those who wait for one, in the order in which they came.
    waiting: VecDeque<u64>,
    /// The number of the next who waits.
    next_number: u64,
}

/// A stretch of a slab.
#[derive(Debug, Clone)]
struct Place {
    slab: usize,
    range: Range<usize>,
}

impl State {
    /// Takes `len` bytes off the shortest stretch that is long enough, so that whole slabs stay whole for those who need
    /// them; of several, off the one that was used last, whose bytes may still be cached.
    fn cut(&mut self, len: usize) -> Option<Place> {
        let long_enough = self.free.iter().enumerate().rev().filter(|(_, place)| place.range.len() >= len);
        let (at, _) = long_enough.min_by_key(|(_, place)| place.range.len())?;
        let place = &mut self.free[at];
        let cut = Place { slab: place.slab, range: place.range.start..place.range.start + len };
        place.range.start += len;
        if place.range.is_empty() {
            self.free.remove(at);
        }
        Some(cut)
    }

    fn give_back(&mut self, mut place: Place) {
        self.free.retain(|free| {
            let touches = free.slab == place.slab && (free.range.end == place.range.start || free.range.start == place.range.end);
            if touches {
                place.range = place.range.start.min(free.range.start)..place.range.end.max(free.range.end);
            }
            !touches
        });
        self.free.push(place);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is only ever changed by whole steps that do not panic, so a panic elsewhere leaves it sound.
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
        // Whole pages, whatever was asked for: where the kernel does not tell what `O_DIRECT` needs of memory, they suit.
        let slot_bytes = usize::try_from(Alignment::system_page().up(settings.slot_bytes as u64)).unwrap_or(settings.slot_bytes);
        let settings = RingSettings { slot_bytes, slab_bytes: settings.slab_bytes.max(slot_bytes), ..settings };
        let shared = Shared { settings, slabs, state: Mutex::default(), returned: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }

    /// The bytes of the longest slot.
    pub fn slot_bytes(&self) -> usize {
        self.shared.settings.slot_bytes
    }

    /// The bytes allocated so far.
    pub fn allocated_bytes(&self) -> usize {
        self.shared.lock().slabs.iter().map(|slab| slab.len()).sum()
    }

    /// A free slot of `len` bytes (and what is missing to a page), growing the ring if it may still grow; `None` if all
    /// memory is in use, if another caller is growing the ring now, or if one waits for what comes back: whoever holds
    /// slots and finds no more must return them before those who hold none can be served.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) for more than [`slot_bytes`](Self::slot_bytes),
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the first slab cannot be allocated. A later slab that
    /// cannot be had is no error: the ring goes on with what it has.
    pub fn try_take(&self, len: usize) -> Result<Option<Slot>> {
        let len = self.whole_pages(len)?;
        let mut state = self.shared.lock();
        if !state.waiting.is_empty() && !self.may_grow(&state) {
            return Ok(None);
        }
        if let Some(slot) = self.cut(&mut state, len)? {
            return Ok(Some(slot));
        }
        if state.growing || !self.may_grow(&state) {
            return Ok(None);
        }
        state = self.grow(state)?;
        self.cut(&mut state, len)
    }

    /// A free slot of `len` bytes (and what is missing to a page); waits for one if all memory is in use. Only for callers
    /// that hold no slot themselves: two that hold some and wait for more would wait for ever.
    ///
    /// # Errors
    /// As [`try_take`](Self::try_take), and [`OutOfMemory`](ErrorKind::OutOfMemory) if nothing can come back.
    pub fn take(&self, len: usize) -> Result<Slot> {
        let len = self.whole_pages(len)?;
        let mut number = None;
        let taken = self.take_in_turn(len, &mut number);
        if let Some(number) = number {
            self.shared.lock().waiting.retain(|waiting| *waiting != number);
            self.shared.returned.notify_all();
        }
        taken
    }

    /// Waits its turn behind those who came before: else short slots could pass a long one for ever.
    fn take_in_turn(&self, len: usize, number: &mut Option<u64>) -> Result<Slot> {
        let mut state = self.shared.lock();
        loop {
            let is_first = state.waiting.front().is_none_or(|first| Some(*first) == *number);
            let may_grow = self.may_grow(&state);
            if (is_first || may_grow)
                && let Some(slot) = self.cut(&mut state, len)?
            {
                return Ok(slot);
            }
            if may_grow && !state.growing {
                state = self.grow(state)?;
                continue;
            }
            if is_first && state.in_use == 0 && !state.growing {
                return Err(Error::new(ErrorKind::OutOfMemory, "the staging memory was lost in earlier failures")
                    .with_hint("build a new session; the GPU or the kernel may still use the old one's memory"));
            }
            if number.is_none() {
                *number = Some(state.next_number);
                let next = state.next_number;
                state.waiting.push_back(next);
                state.next_number += 1;
            }
            state = self.shared.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn whole_pages(&self, len: usize) -> Result<usize> {
        let slot_bytes = self.shared.settings.slot_bytes;
        if slot_bytes == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "the ring's slots must not be empty"));
        }
        if len > slot_bytes {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a slot of {len} bytes, and the longest has {slot_bytes}")));
        }
        Ok(usize::try_from(Alignment::system_page().up(len.max(1) as u64)).unwrap_or(usize::MAX))
    }

    /// How long the next slab is, if the ring may have one: the last may be shorter than the others.
    fn next_slab(&self, state: &State) -> Option<usize> {
        let RingSettings { slot_bytes, slab_bytes, bytes_max } = self.shared.settings;
        let left = bytes_max.saturating_sub(state.slabs.iter().map(|slab| slab.len()).sum());
        let length = usize::try_from(Alignment::system_page().down(slab_bytes.min(left) as u64)).unwrap_or(usize::MAX);
        match state.slabs.is_empty() {
            true => Some(length.max(slot_bytes)),
            false => Some(length).filter(|length| *length >= slot_bytes),
        }
    }

    fn may_grow(&self, state: &State) -> bool {
        !state.full && self.next_slab(state).is_some()
    }

    fn cut(&self, state: &mut State, len: usize) -> Result<Option<Slot>> {
        let Some(place) = state.cut(len) else { return Ok(None) };
        let region = Region::claim(Arc::clone(&state.slabs[place.slab]), place.range.clone(), Access::Writable)?;
        state.in_use += 1;
        Ok(Some(Slot { region: Some(region), place, shared: Arc::clone(&self.shared) }))
    }

    /// Makes the next slab, outside the lock: others go on with the slots that come back meanwhile. A later slab that cannot
    /// be had leaves the ring as it is, and not growing any more.
    fn grow<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>> {
        /// If the source of slabs panics, others must not wait for what it would have made.
        struct Unless<'a>(Option<&'a Shared>);
        impl Drop for Unless<'_> {
            fn drop(&mut self) {
                if let Some(shared) = self.0 {
                    shared.lock().growing = false;
                    shared.returned.notify_all();
                }
            }
        }
        let Some(length) = self.next_slab(&state) else { return Ok(state) };
        state.growing = true;
        drop(state);
        let mut unless_made = Unless(Some(&self.shared));
        let made = self.shared.slabs.allocate(length);
        unless_made.0 = None;
        let mut state = self.shared.lock();
        state.growing = false;
        // Whoever waits finds a new slab, or must find out for itself that there will be none.
        self.shared.returned.notify_all();
        match made {
            Ok(slab) => {
                let place = Place { slab: state.slabs.len(), range: 0..slab.len() };
                state.slabs.push(slab);
                state.free.push(place);
            }
            Err(_) if !state.slabs.is_empty() => state.full = true,
            Err(error) => {
                let ceiling = ByteSize(self.shared.settings.bytes_max as u64);
                return Err(error.with_hint(format!("lower the ring's ceiling, now {ceiling}")));
            }
        }
        Ok(state)
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

    /// Shows bytes of the slot, if they lie where the processor reaches them. For whoever holds the slot and knows that neither
    /// an engine nor a copy writes to it now.
    pub(crate) fn look_at(&self, range: Range<usize>, show: impl FnOnce(&[u8])) {
        let bytes = self.region().slice(range);
        if bytes.kind().is_host_accessible() {
            // SAFETY: the claim keeps the block, which is valid for reads (contract of `Memory`). The slot's bytes are written by
            // its holder's engine and copies alone, and the holder, whose lane this is, has none under way that does.
            show(unsafe { std::slice::from_raw_parts(bytes.address() as *const u8, bytes.len()) });
        }
    }

    /// Gives the slot up: its memory is never used again, because the kernel or a GPU may still use it.
    pub(crate) fn lose(mut self) {
        if let Some(region) = self.region.take() {
            Box::leak(Box::new(region));
            self.shared.lock().in_use -= 1;
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
        let mut state = self.shared.lock();
        state.in_use -= 1;
        state.give_back(self.place.clone());
        if state.in_use == 0 {
            state.full = false;
        }
        // Slots differ in length, so the one that is woken might not be the one that can use it.
        self.shared.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn small() -> Ring {
        Ring::new(RingSettings { slot_bytes: 4096, slab_bytes: 2 * 4096, bytes_max: 4 * 4096 })
    }

    #[test]
    fn it_grows_slab_by_slab_to_its_ceiling_and_no_further() {
        let ring = small();
        assert_eq!(ring.allocated_bytes(), 0, "nothing is allocated before it is needed");
        let mut held = Vec::new();
        for expected in [2, 2, 4, 4] {
            held.push(ring.try_take(4096).expect("memory").expect("below the ceiling"));
            assert_eq!(ring.allocated_bytes(), expected * 4096);
        }
        assert!(ring.try_take(4096).expect("memory").is_none(), "the ceiling holds");
        held.pop();
        assert!(ring.try_take(4096).expect("memory").is_some(), "a dropped slot is free again");
        assert_eq!(ring.allocated_bytes(), 4 * 4096);
    }

    #[test]
    fn slots_in_use_never_share_memory() {
        let ring = small();
        let held: Vec<Slot> = std::iter::from_fn(|| ring.try_take(4096).expect("memory")).collect();
        let mut starts: Vec<usize> = held.iter().map(|slot| slot.region().address()).collect();
        starts.sort_unstable();
        assert_eq!(starts.len(), 4);
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 4096));
    }

    #[test]
    fn slots_are_as_long_as_asked_and_what_comes_back_is_joined_again() {
        let ring = Ring::new(RingSettings { slot_bytes: 4 * 4096, slab_bytes: 4 * 4096, bytes_max: 4 * 4096 });
        let lengths = [1, 4096, 4097];
        let held: Vec<Slot> = lengths.iter().map(|len| ring.take(*len).expect("memory")).collect();
        assert_eq!(held.iter().map(|slot| slot.region().len()).collect::<Vec<_>>(), [4096, 4096, 2 * 4096]);
        assert!(ring.try_take(1).expect("memory").is_none());
        drop(held);
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut held: Vec<Option<Slot>> = lengths.iter().map(|len| ring.try_take(*len).expect("memory")).collect();
            assert!(held.iter().all(Option::is_some));
            order.iter().for_each(|at| drop(held[*at].take()));
            assert!(ring.try_take(4 * 4096).expect("memory").is_some(), "the whole slab is free again");
        }
        let error = ring.try_take(4 * 4096 + 1).expect_err("longer than any slot");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn one_caller_at_a_time_grows_it_and_the_others_use_what_comes_back() {
        #[derive(Debug)]
        struct Slow(Arc<std::sync::Barrier>);
        impl SlabSource for Slow {
            fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
                // Once before the second caller looks, once after.
                self.0.wait();
                self.0.wait();
                HostSlabs.allocate(len)
            }
        }
        let barrier = Arc::new(std::sync::Barrier::new(2));
        let settings = RingSettings { slot_bytes: 4096, slab_bytes: 4096, bytes_max: 8 * 4096 };
        let ring = Ring::with_source(settings, Box::new(Slow(Arc::clone(&barrier))));
        std::thread::scope(|scope| {
            let grower = scope.spawn(|| ring.take(4096).expect("memory"));
            barrier.wait();
            assert!(ring.try_take(4096).expect("no failure").is_none(), "another is at it");
            barrier.wait();
            drop(grower.join().expect("no panic"));
        });
        assert_eq!(ring.allocated_bytes(), 4096);
        assert!(ring.try_take(4096).expect("memory").is_some());
    }

    /// Waits until so many callers wait for a slot.
    fn until_waiting(ring: &Ring, callers: usize) {
        while ring.shared.lock().waiting.len() < callers {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_waiting_taker_gets_the_slot_that_another_thread_returns() {
        let ring = Ring::new(RingSettings { slot_bytes: 4096, slab_bytes: 4096, bytes_max: 4096 });
        let slot = ring.take(4096).expect("memory");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.take(4096).expect("memory").region().len());
            until_waiting(&ring, 1);
            drop(slot);
            assert_eq!(waiter.join().expect("no panic"), 4096);
        });
    }

    #[test]
    fn a_waiting_taker_comes_before_those_who_hold_slots() {
        let ring = Ring::new(RingSettings { slot_bytes: 2 * 4096, slab_bytes: 2 * 4096, bytes_max: 2 * 4096 });
        let (one, two) = (ring.take(4096).expect("memory"), ring.take(4096).expect("memory"));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.take(2 * 4096).map(drop));
            until_waiting(&ring, 1);
            drop(one);
            assert!(ring.try_take(4096).expect("no failure").is_none(), "else the longer one might wait for ever");
            drop(two);
            waiter.join().expect("no panic").expect("memory");
        });
        assert!(ring.try_take(4096).expect("no failure").is_some());
    }

    #[test]
    fn short_slots_do_not_pass_a_long_one_that_was_asked_for_before() {
        let ring = Ring::new(RingSettings { slot_bytes: 2 * 4096, slab_bytes: 2 * 4096, bytes_max: 2 * 4096 });
        let (one, two) = (ring.take(4096).expect("memory"), ring.take(4096).expect("memory"));
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (callers, pages) in [(1, 2), (2, 1)] {
                let (ring, order) = (&ring, &order);
                scope.spawn(move || {
                    let slot = ring.take(pages * 4096).expect("memory");
                    order.lock().expect("no panic").push(pages);
                    drop(slot);
                });
                until_waiting(ring, callers);
            }
            drop(one);
            drop(two);
        });
        assert_eq!(order.into_inner().expect("no panic"), [2, 1]);
    }

    #[test]
    fn when_every_slot_is_lost_a_waiting_taker_is_told() {
        let ring = Ring::new(RingSettings { slot_bytes: 4096, slab_bytes: 4096, bytes_max: 4096 });
        let slot = ring.take(4096).expect("memory");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.take(4096).map(drop));
            until_waiting(&ring, 1);
            slot.lose();
            assert!(waiter.join().expect("no panic").is_err(), "nothing can come back");
        });
        assert!(ring.try_take(4096).expect("no failure of the ring's own").is_none());
    }

    /// Makes as many slabs as it is told, then none, and counts how often it is asked.
    #[derive(Debug, Default)]
    struct Few {
        left: AtomicUsize,
        asked: Arc<AtomicUsize>,
    }

    impl SlabSource for Few {
        fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let more = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            more.map_err(|_| Error::new(ErrorKind::OutOfMemory, "no more")).and_then(|_| HostSlabs.allocate(len))
        }
    }

    #[test]
    fn a_slab_that_cannot_be_had_is_not_asked_for_again_while_others_are_in_use() {
        let settings = RingSettings { slot_bytes: 4096, slab_bytes: 4096, bytes_max: 8 * 4096 };
        let few = Few { left: AtomicUsize::new(1), ..Few::default() };
        let asked = Arc::clone(&few.asked);
        let ring = Ring::with_source(settings, Box::new(few));
        let slot = ring.take(4096).expect("memory");
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..3).map(|_| scope.spawn(|| ring.take(4096).map(drop))).collect();
            until_waiting(&ring, 3);
            assert!(ring.try_take(4096).expect("no failure").is_none());
            assert_eq!(asked.load(Ordering::Relaxed), 2, "the slab there is, and one that could not be had");
            drop(slot);
            waiters.into_iter().for_each(|waiter| waiter.join().expect("no panic").expect("memory"));
        });
        ring.take(4096).expect("memory").lose();
        assert_eq!(ring.take(4096).expect_err("nothing is left").kind(), ErrorKind::OutOfMemory);
    }

    #[test]
    fn a_source_that_panics_leaves_nobody_waiting() {
        #[derive(Debug)]
        struct Panics(std::sync::atomic::AtomicBool);
        impl SlabSource for Panics {
            fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
                assert!(self.0.swap(true, Ordering::Relaxed), "once");
                HostSlabs.allocate(len)
            }
        }
        let ring = Ring::with_source(RingSettings::default(), Box::new(Panics(false.into())));
        std::thread::scope(|scope| scope.spawn(|| ring.take(4096)).join().map(drop)).expect_err("it panics");
        ring.take(4096).expect("the next caller grows the ring");
    }

    #[test]
    fn long_and_short_slots_taken_by_many_threads_all_come_back() {
        const LENGTHS: [usize; 5] = [4 * 4096, 1, 3 * 4096, 4096, 2 * 4096];
        let ring = Ring::new(RingSettings { slot_bytes: 4 * 4096, slab_bytes: 4 * 4096, bytes_max: 10 * 4096 });
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let ring = &ring;
                scope.spawn(move || {
                    for turn in 0..2000 {
                        // As a lane does: one that is waited for only while none is held.
                        let first = ring.take(LENGTHS[(thread + turn) % LENGTHS.len()]).expect("memory");
                        let second = ring.try_take(LENGTHS[turn % LENGTHS.len()]).expect("memory");
                        assert!(second.is_none_or(|second| second.region().address() != first.region().address()));
                    }
                });
            }
        });
        assert_eq!(ring.allocated_bytes(), 8 * 4096, "two slabs; a third would be shorter than a slot");
        let state = ring.shared.lock();
        assert_eq!((state.in_use, state.waiting.len(), state.free.len()), (0, 0, state.slabs.len()));
    }

    #[test]
    fn the_last_slab_may_be_shorter() {
        let ring = Ring::new(RingSettings { slot_bytes: 3 * 4096, slab_bytes: 4 * 4096, bytes_max: 7 * 4096 });
        let held = [ring.try_take(3 * 4096).expect("memory"), ring.try_take(3 * 4096).expect("memory")];
        assert!(held.iter().all(Option::is_some));
        assert_eq!(ring.allocated_bytes(), 7 * 4096);
        let uneven = Ring::new(RingSettings { slot_bytes: 5000, slab_bytes: 5000, bytes_max: 5000 });
        assert_eq!(uneven.take(5000).expect("memory").region().len(), 8192, "whole pages");
        let nothing = Ring::new(RingSettings { slot_bytes: 0, slab_bytes: 0, bytes_max: 0 });
        assert_eq!(nothing.take(1).expect_err("no slot").kind(), ErrorKind::InvalidInput);
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
        let error = ring.take(4096).expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.hint().is_some());
    }
}
