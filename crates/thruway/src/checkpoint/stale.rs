//! Stale weights: a run that saves the same bytes again and again, because it saves a copy that nobody updates, is noticed at its second
//! checkpoint and not when it is needed.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::checksum::Checksum;
use super::manifest::Manifest;
use crate::base::error::printable;
use crate::base::{Error, ErrorKind};

/// How many tensors a warning names.
const SHOWN: usize = 5;

/// Of a group and a tensor, by their names.
pub(super) type Name = (String, String);

/// The trained tensors of the checkpoint that a checkpointer saved last, and their checksums. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Previous(Arc<Mutex<Option<Before>>>);

/// A step, and the checksums of its trained tensors.
type Before = (u64, HashSet<(Name, Checksum)>);

impl Previous {
    /// What is suspicious about a checkpoint that was just committed: trained tensors whose bytes are those of the one before. It
    /// is the one before for the next.
    pub(super) fn compare(&self, manifest: &Manifest, trained: &HashSet<Name>) -> Option<Error> {
        let tensors = manifest.groups.iter().flat_map(|group| group.tensors.iter().map(move |tensor| (group, tensor)));
        let now: HashSet<(Name, Checksum)> = tensors
            .filter(|(_, tensor)| tensor.bytes > 0)
            .map(|(group, tensor)| ((group.name.clone(), tensor.name.clone()), tensor.checksum))
            .filter(|(name, _)| trained.contains(name))
            .collect();
        let mut previous = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let warning = previous.as_ref().filter(|(step, _)| *step != manifest.step).and_then(|(step, before)| {
            let mut same: Vec<String> = now
                .intersection(before)
                .map(|((group, tensor), _)| format!("{} of {}", printable(tensor), printable(group)))
                .collect();
            same.sort_unstable();
            let shown = same.iter().take(SHOWN).cloned().collect::<Vec<String>>().join(", ");
            let more = if same.len() > SHOWN { ", …" } else { "" };
            (!same.is_empty()).then(|| {
                let message = format!(
                    "{} of {} trained tensors have the very bytes that they had at step {step}: {shown}{more}",
                    same.len(),
                    now.len()
                );
                Error::new(ErrorKind::Mismatch, message)
                    .with("step", manifest.step)
                    .with_hint("is what is saved what the optimizer updates? A copy that was made once stays as it was")
            })
        });
        *previous = Some((manifest.step, now));
        warning
    }
}
