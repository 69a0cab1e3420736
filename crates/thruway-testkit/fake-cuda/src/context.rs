//! Primary contexts, one a device, and which of them each thread has current.

use std::cell::RefCell;
use std::ptr::without_provenance_mut;

use thruway_sys::cuda::{CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUcontext, CUresult};

use crate::fault::FaultKind;
use crate::stream::Mark;
use crate::world::{Answer, World};

/// Handles begin here. They are numbers, not addresses: who dereferences one dies.
const HANDLE_BASE: usize = 0x4358_0000_0000;
const HANDLE_STRIDE: usize = 0x1000;

/// A device's primary context.
#[derive(Clone, Debug, Default)]
pub(crate) struct Context {
    /// How often it was retained. Without references it does not exist.
    pub(crate) references: u32,
    /// The error that work in it has ended with. From then on every call answers it.
    pub(crate) sticky: Option<CUresult>,
}

thread_local! {
    /// The thread's stack of contexts, and the epoch that it belongs to.
    static STACK: RefCell<(u64, Vec<usize>)> = const { RefCell::new((0, Vec::new())) };
}

impl World {
    /// The handle of a device's context.
    pub(crate) fn context_handle(device: usize) -> CUcontext {
        without_provenance_mut(HANDLE_BASE + device * HANDLE_STRIDE)
    }

    /// The device whose context a handle means. Also one that was released: a driver takes it as current without a word,
    /// and says `CUDA_ERROR_CONTEXT_IS_DESTROYED` when it is used.
    pub(crate) fn context_by_handle(&mut self, handle: CUcontext) -> Result<usize, CUresult> {
        let device = handle.addr().wrapping_sub(HANDLE_BASE) / HANDLE_STRIDE;
        if device < self.contexts.len() && Self::context_handle(device) == handle {
            return Ok(device);
        }
        self.refuse(FaultKind::StaleHandle, format!("context {handle:?}"), CUDA_ERROR_INVALID_CONTEXT)
    }

    /// The thread's stack of contexts.
    pub(crate) fn with_stack<T>(&self, body: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        STACK.with_borrow_mut(|(epoch, stack)| {
            if *epoch != self.epoch {
                *epoch = self.epoch;
                stack.clear();
            }
            body(stack)
        })
    }

    /// The current context, which exists and has not failed.
    pub(crate) fn current(&self) -> Result<usize, CUresult> {
        self.ready()?;
        let context = self.with_stack(|stack| stack.last().copied()).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        self.usable(context)?;
        Ok(context)
    }

    /// Fails if a context is gone or has failed.
    pub(crate) fn usable(&self, context: usize) -> Answer {
        match self.contexts.get(context) {
            Some(Context { references: 0, .. }) | None => Err(CUDA_ERROR_CONTEXT_IS_DESTROYED),
            Some(Context { sticky: Some(code), .. }) => Err(*code),
            Some(_) => Ok(()),
        }
    }

    /// The end of everything that was submitted in a context.
    pub(crate) fn marks_of(&self, context: usize) -> Vec<Mark> {
        let streams = self.streams.iter().filter(|(_, stream)| stream.context == context);
        streams.map(|(id, stream)| Mark { stream: *id, seq: stream.issued }).collect()
    }

    /// Destroys a context with all that is in it. Its work is done.
    pub(crate) fn destroy_context(&mut self, context: usize) {
        let allocations = self.arenas[context].count();
        // Memory from `cuMemHostAlloc` is left mapped: the fault is enough, a crash would say less.
        let pinned = self.pinned.clear(context);
        // After a sticky error nothing can be freed any more: then what is left is nobody's mistake.
        if allocations + pinned > 0 && self.contexts[context].sticky.is_none() {
            let detail = format!("context of device {context}: {allocations} allocations and {pinned} pinned ranges were left");
            self.fault(FaultKind::ReleasedWithMemory, detail);
        }
        self.arenas[context].clear();
        self.streams.retain(|_, stream| stream.context != context);
        self.events.retain(|_, event| event.context != context);
        self.modules.retain(|_, module| module.context != context);
        self.contexts[context] = Context::default();
    }
}
