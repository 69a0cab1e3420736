//! The same work on many things at once, and on which processors.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::CpuSet;

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

/// Some of the machine's processors: those near a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors(CpuSet);

impl Processors {
    /// Those in a list as the kernel writes it: `0-3,8`. `None` for anything else, and for none.
    pub(crate) fn parse(list: &str) -> Option<Self> {
        let mut set = CpuSet::new();
        for range in list.trim().split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
            if last >= CpuSet::MAX_CPU {
                return None;
            }
            (first..=last).for_each(|processor| set.set(processor));
        }
        (set.count() > 0).then_some(Self(set))
    }

    /// How many.
    pub(crate) fn count(&self) -> usize {
        self.0.count() as usize
    }

    /// Does something on these processors alone, as far as the thread may use them; what it touches for the first time then
    /// lies in the memory beside them, and threads that it starts stay there. Without any that it may use it runs anywhere.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let Ok(before) = rustix::thread::sched_getaffinity(None) else { return work() };
        let mut here = CpuSet::new();
        (0..CpuSet::MAX_CPU).filter(|one| before.is_set(*one) && self.0.is_set(*one)).for_each(|one| here.set(one));
        // A thread elsewhere is slower and as right, so a refusal changes nothing.
        if here.count() == 0 || rustix::thread::sched_setaffinity(None, &here).is_err() {
            return work();
        }
        let _back = Back(before);
        work()
    }
}

/// Lets the thread run where it could before.
struct Back(CpuSet);

impl Drop for Back {
    fn drop(&mut self) {
        // Refused only if those processors have gone; then it stays where it is.
        let _gone = rustix::thread::sched_setaffinity(None, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_on_the_processors_that_are_named_and_elsewhere_again_afterwards() {
        let allowed = || rustix::thread::sched_getaffinity(None).expect("known");
        let before = allowed();
        let first = (0..CpuSet::MAX_CPU).find(|one| before.is_set(*one)).expect("this thread runs somewhere");
        let one = Processors::parse(&first.to_string()).expect("a list");
        let (within, child) = one.run(|| (allowed(), std::thread::spawn(allowed).join().expect("no panic")));
        assert_eq!((within.count(), within.is_set(first)), (1, true));
        assert_eq!(child, within);
        assert_eq!(allowed(), before);
        assert!(std::panic::catch_unwind(|| one.run(|| panic!("on purpose"))).is_err());
        assert_eq!(allowed(), before, "after a panic too");
        let elsewhere = (0..CpuSet::MAX_CPU).find(|one| !before.is_set(*one)).expect("no machine has all of them");
        let none = Processors::parse(&elsewhere.to_string()).expect("a list");
        assert_eq!(none.run(allowed), before, "processors that it may not use change nothing");
    }

    #[test]
    fn lists_of_processors_are_the_kernel_s() {
        let of = |list: &str| {
            Processors::parse(list).map(|Processors(set)| (0..CpuSet::MAX_CPU).filter(|one| set.is_set(*one)).collect())
        };
        assert_eq!(of("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(of("5"), Some(vec![5]));
        for bad in ["", "\n", "a", "1-", "-1", "3-1", "0-99999999999999999999", "0-1000000", "1;2"] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }

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
