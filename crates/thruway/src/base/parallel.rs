//! The same work on many things at once.

use std::sync::atomic::{AtomicUsize, Ordering};

/// `work` of each number below `count`, in order, done on at most `threads_max` threads, of which the caller's is one.
/// More threads are only faster: what the system refuses is done without.
pub(crate) fn each<T: Send>(count: usize, threads_max: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|number| *number < count);
        numbers.map(|number| (number, work(number))).collect::<Vec<(usize, T)>>()
    };
    let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
        let helper = |_| std::thread::Builder::new().name("thruway-helper".to_owned()).spawn_scoped(scope, take).ok();
        let helpers: Vec<_> = (1..threads_max.min(count)).map_while(helper).collect();
        let mut all = take();
        for helper in helpers {
            all.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    });
    all.sort_unstable_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, done)| done).collect()
}

/// How many threads computing is worth.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_done_once_and_the_results_are_in_order() {
        for (count, threads) in [(0, 4), (1, 4), (5, 0), (1000, 8)] {
            let calls = AtomicUsize::new(0);
            let done = each(count, threads, |number| {
                calls.fetch_add(1, Ordering::Relaxed);
                number * 2
            });
            assert_eq!(done, (0..count).map(|number| number * 2).collect::<Vec<_>>());
            assert_eq!(calls.into_inner(), count);
        }
    }
}
