//! Injects faults into an engine, so that tests can make any operation of a transfer fail in any way.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::Result;
use crate::io::{Capabilities, Completion, Engine, EngineName, Request, Wait};
use crate::memory::Region;

/// What goes wrong with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// At most this many bytes are transferred.
    Short(u64),
    /// The operation fails with this error number and transfers nothing.
    Errno(i32),
    /// The plan's hook runs before the operation: it cuts, replaces or changes the file.
    Hook,
}

/// Which operations fail, counted from 0 over all engines that share the plan.
#[derive(Clone, Default)]
pub struct FaultPlan {
    shared: Arc<Mutex<Plan>>,
}

#[derive(Default)]
struct Plan {
    faults: BTreeMap<u64, Fault>,
    operations: u64,
    hook: Option<Box<dyn FnMut() + Send>>,
}

impl fmt::Debug for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.lock();
        write!(f, "FaultPlan({:?} after {} operations)", plan.faults, plan.operations)
    }
}

impl FaultPlan {
    /// A plan in which the operation number `at` suffers `fault`.
    pub fn single(at: u64, fault: Fault) -> Self {
        let plan = Self::default();
        plan.lock().faults.insert(at, fault);
        plan
    }

    /// Adds a fault.
    #[must_use]
    pub fn and(self, at: u64, fault: Fault) -> Self {
        self.lock().faults.insert(at, fault);
        self
    }

    /// What [`Fault::Hook`] runs.
    #[must_use]
    pub fn with_hook(self, hook: impl FnMut() + Send + 'static) -> Self {
        self.lock().hook = Some(Box::new(hook));
        self
    }

    /// How many operations have been submitted so far.
    pub fn operations(&self) -> u64 {
        self.lock().operations
    }

    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one operation and gives the fault it suffers.
    fn next(&self) -> Option<Fault> {
        let mut plan = self.lock();
        let at = plan.operations;
        plan.operations += 1;
        let fault = plan.faults.get(&at).copied();
        if fault == Some(Fault::Hook)
            && let Some(hook) = plan.hook.as_mut()
        {
            hook();
        }
        fault
    }
}

/// An engine whose operations fail as a [`FaultPlan`] says.
#[derive(Debug)]
pub struct Faulty<E> {
    inner: E,
    plan: FaultPlan,
    failed: Vec<Completion>,
    /// The segments of shortened requests, by token, to be handed back whole, and the bytes to admit to.
    shortened: BTreeMap<usize, (Vec<Region>, u64)>,
}

impl<E: Engine> Faulty<E> {
    /// Wraps an engine.
    pub fn new(inner: E, plan: FaultPlan) -> Self {
        Self { inner, plan, failed: Vec::new(), shortened: BTreeMap::new() }
    }
}

impl<E: Engine> Engine for Faulty<E> {
    fn name(&self) -> EngineName {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, mut request: Request) -> Result<(), Box<Request>> {
        if self.inner.in_flight() + self.failed.len() >= self.capabilities().depth {
            return Err(Box::new(request));
        }
        match self.plan.next() {
            Some(Fault::Errno(errno)) => {
                self.failed.push(Completion { request, result: Err(std::io::Error::from_raw_os_error(errno)) });
                Ok(())
            }
            Some(Fault::Short(bytes)) => {
                // Past the page cache even a short request must ask for whole blocks; it admits to fewer bytes then.
                let mut left = usize::try_from(request.alignment.up(bytes)).unwrap_or(usize::MAX);
                let whole = std::mem::take(&mut request.segments);
                for segment in &whole {
                    let keep = left.min(segment.len());
                    left -= keep;
                    request.segments.push(segment.slice(0..keep));
                }
                self.shortened.insert(request.token, (whole, bytes));
                self.inner.submit(request)
            }
            Some(Fault::Hook) | None => self.inner.submit(request),
        }
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        let wait = if self.failed.is_empty() { wait } else { Wait::No };
        done.append(&mut self.failed);
        let before = done.len();
        self.inner.complete(done, wait)?;
        for completion in &mut done[before..] {
            if let Some((whole, bytes)) = self.shortened.remove(&completion.request.token) {
                completion.request.segments = whole;
                completion.result = std::mem::replace(&mut completion.result, Ok(0)).map(|moved| moved.min(bytes));
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.failed.len()
    }
}
