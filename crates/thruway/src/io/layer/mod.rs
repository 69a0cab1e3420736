//! Wrappers that are engines: what every mechanism needs alike is written once, here.

mod exact;
mod faulty;
mod monitored;

pub use exact::Exact;
pub use faulty::{Fault, FaultPlan, Faulty};
pub use monitored::Monitored;
