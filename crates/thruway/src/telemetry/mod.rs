//! What a session counts about itself.

mod counters;

pub use counters::{Counters, METRICS, Metric, Snapshot};
