//! The direct path in a transfer: whether a file's bytes can go that way, asked before they move, and whether they did,
//! asked afterwards.

use std::sync::Arc;

use super::FileRef;
use super::pipeline::{Outcome, Shared};
use super::plan;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::io::Direction;
use crate::io::direct::{Reach, Refusal, Trial, Verdict, Watch};
use crate::io::policy::{Path, PathPolicy};
use crate::memory::Region;
use crate::storage::{Access, Buffering, DirectRules};

/// Whether the drive below a file reaches the memory of its moves, if that is a device's and the policy leaves the choice.
/// `rules` are those of `O_DIRECT`, `device` is the filesystem's number.
pub(super) fn reach(
    shared: &Shared<'_>,
    file: &FileRef,
    direction: Direction,
    moves: &[(Extent, Region)],
    (rules, device): (Option<DirectRules>, u64),
) -> Result<Reach> {
    let required = shared.options.policy == PathPolicy::Require(Path::Direct);
    let may = required || shared.options.policy == PathPolicy::Auto;
    let Some(direct) = shared.context.direct.as_ref().filter(|_| may) else { return Ok(Reach::Moot) };
    let extents: Vec<Extent> = moves
        .iter()
        .filter(|(extent, region)| !extent.is_empty() && !region.kind().is_host())
        .map(|(extent, _)| *extent)
        .collect();
    if extents.is_empty() {
        return Ok(Reach::Moot);
    }
    let Some(rules) = rules else {
        let hint = "put the file on ext4 or xfs";
        return Ok(Reach::Refused(Refusal { reason: "the filesystem refuses O_DIRECT".into(), hint: hint.into() }));
    };
    let Some(core) = extents.iter().find_map(|extent| extent.aligned_core(rules.offset)) else { return Ok(Reach::Moot) };
    let access = if direction == Direction::Read { Access::Read } else { Access::Write };
    let open = || shared.context.namespace.open(&file.path, access, Buffering::Direct);
    let block = Extent::new(core.offset, rules.offset.bytes());
    let reach = direct.reach(&Trial { direction, block, device, rules, open: &open })?;
    if let (true, Reach::Direct { rules, .. }) = (required, &reach) {
        plan::check_direct(moves, *rules)?;
    }
    Ok(reach)
}

/// Calls bytes that went by an engine for the direct path what they may be called after `watch`.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable) if the path was required and nothing proves it.
pub(super) fn judge(outcome: &mut Outcome, watch: Box<dyn Watch + '_>, policy: PathPolicy) -> Result<()> {
    let bytes = outcome.parts.iter().filter(|((_, path, ..), _)| *path == Path::Direct).map(|(_, bytes)| bytes).sum();
    if bytes == 0 {
        return Ok(());
    }
    let Verdict::Unproven(why) = watch.verdict(bytes) else { return Ok(()) };
    if policy == PathPolicy::Require(Path::Direct) {
        let message = format!("the bytes arrived, and nothing proves that they went directly: {why}");
        return Err(Error::new(ErrorKind::PathUnavailable, message)
            .with("bytes", bytes)
            .with_hint("use auto: its receipt says what is known of each part"));
    }
    let parts = std::mem::take(&mut outcome.parts);
    for ((file, path, engine, reason), bytes) in parts {
        let (path, reason): (Path, Arc<str>) = match path {
            Path::Direct => (Path::Unverified, format!("{reason}; unproven: {why}").into()),
            _ => (path, reason),
        };
        *outcome.parts.entry((file, path, engine, reason)).or_default() += bytes;
    }
    Ok(())
}
