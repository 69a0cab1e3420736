//! The thread that is the device: it takes work from the streams and completes it late.

use std::sync::{Once, PoisonError};
use std::time::{Duration, Instant};

use thruway_sys::cuda::CUresult;

use crate::arena::Life;
use crate::config::Config;
use crate::stream::{Op, Progress, StreamId, Work};
use crate::world::{Answer, SHARED, World, lock};

/// Starts the thread, the first time.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let started = std::thread::Builder::new().name("fake-cuda".to_owned()).spawn(run);
        if let Err(error) = started {
            eprintln!("fake-cuda: no thread for the device: {error}");
            std::process::abort();
        }
    });
}

/// What is to be done next.
enum Next {
    /// Something was completed; look again.
    Again,
    /// Nothing before this time.
    Sleep(Instant),
    /// Nothing until work is submitted.
    Idle,
}

/// Ends the process if the device's thread unwinds: callers would wait for ever, and nobody would know why.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

fn run() {
    let _guard = AbortOnPanic;
    loop {
        let mut world = lock();
        match step(&mut world) {
            Next::Again => SHARED.done.notify_all(),
            Next::Sleep(until) => {
                let pause = until.saturating_duration_since(Instant::now());
                drop(SHARED.work.wait_timeout(world, pause).unwrap_or_else(PoisonError::into_inner));
            }
            Next::Idle => drop(SHARED.work.wait(world).unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

/// Begins what can begin, and completes the one piece of work that is due first.
fn step(world: &mut World) -> Next {
    let ids: Vec<StreamId> = world.streams.keys().copied().collect();
    for id in &ids {
        begin_head(world, *id);
    }
    if world.held {
        return Next::Idle;
    }
    let due = |id: &StreamId| match world.streams.get(id)?.queue.front()?.progress {
        Progress::Running(due) => Some((due, *id)),
        Progress::Waiting => None,
    };
    match ids.iter().filter_map(due).min() {
        Some((due, id)) if due <= Instant::now() => {
            complete_head(world, id);
            Next::Again
        }
        Some((due, _)) => Next::Sleep(due),
        None => Next::Idle,
    }
}

/// Begins a stream's first piece of work, if nothing that it waits for is left.
fn begin_head(world: &mut World, id: StreamId) {
    let Some(op) = world.streams.get(&id).and_then(|stream| stream.queue.front()) else { return };
    let waits = matches!(op.progress, Progress::Waiting) && op.after.iter().all(|mark| world.is_done(*mark));
    if !waits {
        return;
    }
    let Some(mut op) = world.streams.get_mut(&id).and_then(|stream| stream.queue.pop_front()) else { return };
    let mut delay = Duration::ZERO;
    if let Work::Copies(_) | Work::Kernel(_) = &op.work {
        delay = delay_of(&world.config, id, op.seq);
    }
    if let Work::Copies(copies) = &mut op.work {
        copies.iter_mut().for_each(|copy| world.begin(copy));
    }
    op.progress = Progress::Running(Instant::now() + delay);
    if let Some(stream) = world.streams.get_mut(&id) {
        stream.queue.push_front(op);
    }
}

/// Completes a stream's first piece of work.
fn complete_head(world: &mut World, id: StreamId) {
    let Some(stream) = world.streams.get_mut(&id) else { return };
    let (Some(op), context) = (stream.queue.pop_front(), stream.context) else { return };
    let seq = op.seq;
    let failed = world.contexts.get(context).is_some_and(|context| context.sticky.is_some());
    if let Err(code) = perform(world, op, failed) {
        fail(world, context, code);
    }
    if let Some(stream) = world.streams.get_mut(&id) {
        stream.completed = seq;
        if stream.destroyed && stream.queue.is_empty() {
            world.streams.remove(&id);
        }
    }
}

/// Does a piece of work. In a context that has failed nothing moves any more, but what waits is let go.
fn perform(world: &mut World, op: Op, failed: bool) -> Answer {
    if let (Some(code), false) = (op.fail, failed) {
        return Err(code);
    }
    match op.work {
        Work::Copies(copies) if !failed => {
            // Last to first: a batch promises no order, so nobody shall get used to one.
            for copy in copies.into_iter().rev() {
                world.finish(copy)?;
            }
        }
        Work::Kernel(launch) if !failed => world.launch(launch)?,
        Work::Copies(_) | Work::Kernel(_) | Work::Barrier => {}
        Work::Record { event, generation } => {
            if let Some(event) = world.events.get_mut(&event).filter(|event| event.generation == generation) {
                event.completed_at = Some(Instant::now());
            }
        }
        Work::Allocate { device, start } => {
            if let Some(allocation) = world.arenas[device].get_mut(start) {
                allocation.life = Life::Live;
            }
        }
        Work::Release { device, start } => {
            world.arenas[device].release(start);
        }
    }
    Ok(())
}

/// The first error of a context is the one that stays.
fn fail(world: &mut World, context: usize, code: CUresult) {
    if let Some(context) = world.contexts.get_mut(context) {
        context.sticky.get_or_insert(code);
    }
}

/// How long a piece of work takes: the same for the same seed, stream and number, whatever the threads do.
fn delay_of(config: &Config, stream: StreamId, seq: u64) -> Duration {
    let mut state = config.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seq.wrapping_mul(0xd1b5_4a32_d192_ed03);
    // The finisher of splitmix64: neighbouring inputs, unrelated outputs.
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^= state >> 31;
    let width = config.delay_us_max - config.delay_us_min;
    Duration::from_micros(config.delay_us_min + state.checked_rem(width.saturating_add(1)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_repeat_with_the_seed_and_stay_in_their_range() {
        let config = Config { delay_us_min: 10, delay_us_max: 40, ..Config::default() };
        let delays: Vec<Duration> = (0..200).map(|seq| delay_of(&config, 3, seq)).collect();
        assert_eq!(delays, (0..200).map(|seq| delay_of(&config, 3, seq)).collect::<Vec<_>>());
        assert!(delays.iter().all(|delay| (10..=40).contains(&delay.as_micros())), "{delays:?}");
        assert_ne!(delays, (0..200).map(|seq| delay_of(&config, 4, seq)).collect::<Vec<_>>());
    }
}
