//! Engines at hand: made when first needed, kept for the next transfer.

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use super::Engine;
use super::direct::DirectPath;
use super::engine::{Posix, Uring};
use super::layer::{Exact, Monitored};
use super::policy::Source;
use crate::base::settings::EngineChoice;
use crate::base::{Error, ErrorKind, Result};
use crate::telemetry::Counters;

/// An engine and, if it is not the one that was wanted, why.
#[derive(Debug)]
pub struct Made {
    /// The bare engine.
    pub engine: Box<dyn Engine>,
    /// What the receipt must say beside the reason for the path.
    pub note: Option<Arc<str>>,
}

/// Makes engines. Tests put fault injection and simulated disks here.
pub trait EngineFactory: Send + Sync + Debug {
    /// A bare engine for transfers with this storage side.
    ///
    /// # Errors
    /// If the engine that was demanded cannot be had.
    fn make(&self, source: Source) -> Result<Made>;
}

/// The operating system's engines.
#[derive(Clone, Debug)]
pub struct OsEngines {
    /// Which engine reads and writes past the page cache.
    pub choice: EngineChoice,
    /// How many requests that engine keeps in flight.
    pub depth: usize,
    /// How many threads copy out of the page cache.
    pub threads: usize,
    /// How drives reach a device's memory, if they do.
    pub direct: Option<Arc<dyn DirectPath>>,
}

impl EngineFactory for OsEngines {
    fn make(&self, source: Source) -> Result<Made> {
        let posix = |lanes, note| Made { engine: Box::new(Posix::new(lanes)), note };
        if source == Source::PageCache {
            return Ok(posix(self.threads, None));
        }
        if let (Source::Direct, Some(direct)) = (source, &self.direct) {
            return direct.make();
        }
        // A thread waits for one drive request at a time, so depth takes as many threads.
        let direct_lanes = self.depth.min(32);
        if self.choice == EngineChoice::Posix {
            return Ok(posix(direct_lanes, Some("the posix engine was chosen".into())));
        }
        match Uring::new(u32::try_from(self.depth).unwrap_or(u32::MAX)) {
            Ok(engine) => Ok(Made { engine: Box::new(engine), note: None }),
            Err(refused) if self.choice == EngineChoice::Uring => {
                Err(Error::new(ErrorKind::Unsupported, refused.to_string()).with_hint("let the engine be chosen: auto"))
            }
            Err(refused) => Ok(posix(direct_lanes, Some(refused.to_string().into()))),
        }
    }
}

/// The engines of a session. Each transfer borrows one for each storage side that it needs.
#[derive(Debug)]
pub struct EnginePool {
    factory: Box<dyn EngineFactory>,
    counters: Arc<Counters>,
    idle: Mutex<Idle>,
}

/// Idle engines, and the process that made them: a child after a fork shares neither rings nor threads with its parent.
#[derive(Debug, Default)]
struct Idle {
    process: u32,
    engines: Vec<(Source, Made)>,
}

impl EnginePool {
    /// An empty pool.
    pub fn new(factory: Box<dyn EngineFactory>, counters: Arc<Counters>) -> Self {
        Self { factory, counters, idle: Mutex::default() }
    }

    /// An engine with its layers, for this transfer alone until it is dropped.
    ///
    /// # Errors
    /// What the factory gives.
    pub fn take(&self, source: Source) -> Result<Pooled<'_>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.process != std::process::id() {
            // Dropping an io_uring of the parent's would touch memory that the child does not have.
            Box::leak(Box::new(std::mem::take(&mut idle.engines)));
            idle.process = std::process::id();
        }
        let found = idle.engines.iter().position(|(for_source, _)| *for_source == source);
        let found = found.map(|index| idle.engines.swap_remove(index).1);
        drop(idle);
        let made = match found {
            Some(made) => made,
            None => {
                let Made { engine, note } = self.factory.make(source)?;
                let layered = Monitored::new(Exact::new(engine), Arc::clone(&self.counters));
                Made { engine: Box::new(layered), note }
            }
        };
        Ok(Pooled { pool: self, source, made: Some(made) })
    }
}

/// A borrowed engine. It returns to the pool when dropped idle; one that still has requests in flight is
/// dropped instead, which waits for them.
#[derive(Debug)]
pub struct Pooled<'a> {
    pool: &'a EnginePool,
    source: Source,
    made: Option<Made>,
}

impl Pooled<'_> {
    /// Why this is not the engine that was wanted, if it is not.
    pub fn note(&self) -> Option<Arc<str>> {
        self.made.as_ref().and_then(|made| made.note.clone())
    }
}

impl Deref for Pooled<'_> {
    type Target = dyn Engine;

    fn deref(&self) -> &Self::Target {
        match &self.made {
            Some(made) => &*made.engine,
            None => unreachable!("only a drop takes the engine"),
        }
    }
}

impl DerefMut for Pooled<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match &mut self.made {
            Some(made) => &mut *made.engine,
            None => unreachable!("only a drop takes the engine"),
        }
    }
}

impl Drop for Pooled<'_> {
    fn drop(&mut self) {
        // A second choice is not kept: what refused the first may have been a passing shortage.
        let good = |made: &Made| made.engine.in_flight() == 0 && made.note.is_none();
        if let Some(made) = self.made.take().filter(good) {
            self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).engines.push((self.source, made));
        }
    }
}
