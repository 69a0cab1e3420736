//! Counters, each with a name, a unit and a meaning, so that an exporter needs no table of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a counter is called and what it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The name under which it is exported.
    pub name: &'static str,
    /// The unit.
    pub unit: &'static str,
    /// What it counts.
    pub meaning: &'static str,
}

/// Every counter of a session, in the order of [`Snapshot::values`].
pub const METRICS: [Metric; 8] = [
    metric("thruway_read_requests_total", "requests", "reads that an engine completed"),
    metric("thruway_read_bytes_total", "bytes", "bytes that those reads brought, alignment included"),
    metric("thruway_read_errors_total", "requests", "reads that an engine gave up"),
    metric("thruway_read_microseconds_total", "microseconds", "time from submission to completion, summed over reads"),
    metric("thruway_write_requests_total", "requests", "writes that an engine completed"),
    metric("thruway_write_bytes_total", "bytes", "bytes that those writes took"),
    metric("thruway_write_errors_total", "requests", "writes that an engine gave up"),
    metric("thruway_write_microseconds_total", "microseconds", "time from submission to completion, summed over writes"),
];

const fn metric(name: &'static str, unit: &'static str, meaning: &'static str) -> Metric {
    Metric { name, unit, meaning }
}

/// The counters of one session. Only ever added to.
#[derive(Debug, Default)]
pub struct Counters {
    values: [AtomicU64; METRICS.len()],
}

impl Counters {
    const REQUESTS: usize = 0;
    const BYTES: usize = 1;
    const ERRORS: usize = 2;
    const MICROSECONDS: usize = 3;
    const WRITES: usize = 4;

    fn add(&self, is_read: bool, which: usize, amount: u64) {
        let base = if is_read { 0 } else { Self::WRITES };
        self.values[base + which].fetch_add(amount, Ordering::Relaxed);
    }

    /// Counts a completed request.
    pub fn completed(&self, is_read: bool, bytes: u64, latency: Duration) {
        self.add(is_read, Self::REQUESTS, 1);
        self.add(is_read, Self::BYTES, bytes);
        self.add(is_read, Self::MICROSECONDS, u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts a request that failed.
    pub fn failed(&self, is_read: bool) {
        self.add(is_read, Self::ERRORS, 1);
    }

    /// The values now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { values: std::array::from_fn(|index| self.values[index].load(Ordering::Relaxed)) }
    }
}

/// The counters' values at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// One value for each of [`METRICS`].
    pub values: [u64; METRICS.len()],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_counted_apart_under_their_names() {
        let counters = Counters::default();
        counters.completed(true, 100, Duration::from_micros(7));
        counters.completed(false, 30, Duration::from_micros(2));
        counters.failed(false);
        let value = |name: &str| {
            let index = METRICS.iter().position(|metric| metric.name == name).expect("a known name");
            counters.snapshot().values[index]
        };
        assert_eq!((value("thruway_read_requests_total"), value("thruway_read_bytes_total")), (1, 100));
        assert_eq!((value("thruway_write_bytes_total"), value("thruway_write_errors_total")), (30, 1));
        assert_eq!(value("thruway_read_microseconds_total"), 7);
    }
}
