//! Which way a load would go.

use std::cell::RefCell;

use super::{LoadOptions, Model};
use crate::base::Result;
use crate::transfer::{Explanation, explain_batches};

impl Model {
    /// Which way [`load`](Self::load) with these options would bring each file's bytes now, and why. It is found out by the
    /// load's own code, up to where bytes move: memory is allocated some tensors at a time, as for the load, and let go of.
    /// Where a direct path may be, one block is read to try it.
    ///
    /// # Errors
    /// What the load reports before its bytes move.
    pub fn explain(&self, mut options: LoadOptions) -> Result<Explanation> {
        let (items, groups) = self.laid_out(&mut options)?;
        let allocator = RefCell::new(options.allocator.take());
        let batches = self.batches(&items, groups, &allocator, &drop);
        explain_batches(&self.context, batches, &options.transfer)
    }
}
