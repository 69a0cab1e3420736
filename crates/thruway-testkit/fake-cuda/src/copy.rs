//! Copies: what their addresses mean when they are submitted, and what they do when they run.

use std::ffi::c_void;

use thruway_sys::cuda::{CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUresult};

use crate::arena::{Found, Life};
use crate::fault::FaultKind;
use crate::host::{self, HostRange};
use crate::world::{Answer, World};

/// What a pinned destination holds while a copy to it is in flight.
const RUBBISH: u8 = 0xdb;

/// What an address is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Device(usize),
    Pinned(usize),
    Pageable(usize),
}

/// Where a copy's bytes come from.
#[derive(Debug)]
pub(crate) enum Source {
    Device(usize),
    /// Pinned host memory, read when the copy completes.
    Pinned(usize),
    /// Bytes that were read when the copy was submitted.
    Staged(Vec<u8>),
    /// One value.
    Fill(u8),
}

/// A copy.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) from: Source,
    pub(crate) to: Place,
    pub(crate) bytes: usize,
    /// The source's digest at submission, if the source may change only by a mistake.
    digest: Option<u64>,
    /// The destination was filled with rubbish.
    marked: bool,
}

/// Whether two ranges share a byte.
fn overlap(a: usize, a_bytes: usize, b: usize, b_bytes: usize) -> bool {
    a < b.saturating_add(b_bytes) && b < a.saturating_add(a_bytes)
}

impl Copy {
    /// Whether the copy reads or writes device memory in a range.
    pub(crate) fn uses_device(&self, start: usize, bytes: usize) -> bool {
        let reads = matches!(self.from, Source::Device(from) if overlap(from, self.bytes, start, bytes));
        reads || matches!(self.to, Place::Device(to) if overlap(to, self.bytes, start, bytes))
    }

    /// Whether the copy has yet to read or write pinned memory in a range.
    pub(crate) fn uses_pinned(&self, start: usize, bytes: usize) -> bool {
        let reads = matches!(self.from, Source::Pinned(from) if overlap(from, self.bytes, start, bytes));
        reads || matches!(self.to, Place::Pinned(to) if overlap(to, self.bytes, start, bytes))
    }
}

impl World {
    /// What a range is, or why no work may be submitted over it.
    pub(crate) fn place(&mut self, address: usize, bytes: usize) -> Result<Place, CUresult> {
        let range = format!("{bytes} bytes at {address:#x}");
        if let Some(device) = self.arena_of(address) {
            let arena = &self.arenas[device];
            return match arena.find(address, bytes) {
                Found::Inside(start) if arena.get(start).is_some_and(|allocation| !allocation.free_issued) => {
                    Ok(Place::Device(address))
                }
                Found::Inside(_) | Found::Freed => self.refuse(FaultKind::UseAfterFree, range, CUDA_ERROR_INVALID_VALUE),
                Found::Outside => self.refuse(FaultKind::OutOfBounds, range, CUDA_ERROR_INVALID_VALUE),
            };
        }
        if address.checked_add(bytes).is_none() || address == 0 {
            return self.refuse(FaultKind::OutOfBounds, range, CUDA_ERROR_INVALID_VALUE);
        }
        match self.pinned.classify(address, bytes) {
            HostRange::Pinned(_) => Ok(Place::Pinned(address)),
            HostRange::Pageable => Ok(Place::Pageable(address)),
            HostRange::Crosses => self.refuse(FaultKind::CrossesPinned, range, CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// A range that is named by a device address: device memory, or pinned memory, which has one address for both sides.
    pub(crate) fn device_place(&mut self, device: u64, bytes: usize) -> Result<Place, CUresult> {
        let address = crate::world::address(device);
        match self.place(address, bytes)? {
            Place::Pageable(_) => {
                let detail = format!("host address {address:#x} where the device's is wanted");
                self.refuse(FaultKind::WrongSide, detail, CUDA_ERROR_INVALID_VALUE)
            }
            place => Ok(place),
        }
    }

    /// A range that is named by a host address.
    pub(crate) fn host_place(&mut self, pointer: *const c_void, bytes: usize) -> Result<Place, CUresult> {
        match self.place(pointer.addr(), bytes)? {
            Place::Device(_) => {
                let detail = format!("device address {pointer:?} where the host's is wanted");
                self.refuse(FaultKind::WrongSide, detail, CUDA_ERROR_INVALID_VALUE)
            }
            place => Ok(place),
        }
    }

    /// A copy between two places. Memory that is not pinned is read here and now, as a driver stages it.
    pub(crate) fn plan(&mut self, to: Place, from: Place, bytes: usize) -> Result<Copy, CUresult> {
        let gone = |world: &mut Self, address: usize| {
            let detail = format!("{bytes} bytes at {address:#x} are not mapped");
            world.refuse(FaultKind::HostMemoryGone, detail, CUDA_ERROR_INVALID_VALUE)
        };
        let (from, digest) = match from {
            Place::Device(address) => (Source::Device(address), None),
            Place::Pinned(address) if !self.config.check => (Source::Pinned(address), None),
            Place::Pinned(address) => match host::digest_of(address, bytes) {
                Ok(digest) => (Source::Pinned(address), Some(digest)),
                Err(host::Unmapped) => return gone(self, address),
            },
            Place::Pageable(address) => match host::snapshot(address, bytes) {
                Ok(bytes) => (Source::Staged(bytes), None),
                Err(host::Unmapped) => return gone(self, address),
            },
        };
        if matches!(from, Source::Staged(_)) || matches!(to, Place::Pageable(_)) {
            self.totals.pageable_copies += 1;
        }
        Ok(Copy { from, to, bytes, digest, marked: false })
    }

    /// A fill.
    pub(crate) fn plan_fill(&self, to: Place, value: u8, bytes: usize) -> Copy {
        Copy { from: Source::Fill(value), to, bytes, digest: None, marked: false }
    }

    /// The device begins a copy: from here on a pinned destination's old bytes are gone.
    pub(crate) fn begin(&mut self, copy: &mut Copy) {
        let Place::Pinned(to) = copy.to else { return };
        if self.config.check {
            self.forget_digests(to, copy.bytes);
            let rubbish = vec![RUBBISH; copy.bytes];
            // SAFETY: the vector has that many bytes.
            copy.marked = unsafe { host::write(to, rubbish.as_ptr(), copy.bytes) }.is_ok();
        }
    }

    /// The device writes to a host range, so a copy that is still to read there expects other bytes than it saw.
    fn forget_digests(&mut self, start: usize, bytes: usize) {
        for copy in self.copies_mut() {
            if matches!(copy.from, Source::Pinned(from) if overlap(from, copy.bytes, start, bytes)) {
                copy.digest = None;
            }
        }
    }

    /// The device completes a copy: the bytes move now. An error ends the context.
    pub(crate) fn finish(&mut self, copy: Copy) -> Answer {
        let Copy { from, to, bytes, digest, marked } = copy;
        match to {
            Place::Device(to) => {
                let view = self.view(to, bytes)?;
                // SAFETY: `view` checked that one live allocation holds the range; its bytes are ours under the lock.
                unsafe { self.fetch(&from, view, bytes) }?;
                if let (Some(digest), Source::Pinned(from)) = (digest, &from) {
                    // SAFETY: as above; the bytes were just written.
                    let arrived = unsafe { std::slice::from_raw_parts(view, bytes) };
                    if host::digest(arrived) != digest {
                        let detail = format!("{bytes} bytes at {from:#x} changed between the call and its completion");
                        self.fault(FaultKind::SourceChanged, detail);
                    }
                }
            }
            Place::Pinned(to) | Place::Pageable(to) => {
                if marked && host::snapshot(to, bytes).is_ok_and(|held| held.iter().any(|byte| *byte != RUBBISH)) {
                    let detail = format!("{bytes} bytes at {to:#x} were written while a copy to them was in flight");
                    self.fault(FaultKind::DestinationChanged, detail);
                }
                let mut buffer = vec![0; bytes];
                // SAFETY: the vector has that many bytes.
                unsafe { self.fetch(&from, buffer.as_mut_ptr(), bytes) }?;
                self.forget_digests(to, bytes);
                // SAFETY: as above.
                if unsafe { host::write(to, buffer.as_ptr(), bytes) }.is_err() {
                    return self.gone(to, bytes);
                }
            }
        }
        self.count(&from, to, bytes as u64);
        Ok(())
    }

    /// Brings a source's bytes to `own`.
    ///
    /// # Safety
    /// `own` must be valid for writing `bytes` bytes.
    unsafe fn fetch(&mut self, from: &Source, own: *mut u8, bytes: usize) -> Answer {
        match from {
            Source::Device(address) => {
                let view = self.view(*address, bytes)?;
                // SAFETY: `view` checked the source, the caller vouches for the destination; they may overlap.
                unsafe { std::ptr::copy(view, own, bytes) };
            }
            Source::Pinned(address) => {
                // SAFETY: the caller vouches for the destination.
                if unsafe { host::read(*address, own, bytes) }.is_err() {
                    return self.gone(*address, bytes);
                }
            }
            // SAFETY: a staged copy has exactly `bytes` bytes; the caller vouches for the destination.
            Source::Staged(staged) => unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), own, bytes) },
            // SAFETY: the caller vouches for the destination.
            Source::Fill(value) => unsafe { own.write_bytes(*value, bytes) },
        }
        Ok(())
    }

    /// Where the CPU finds a device range, if the device may touch it at this point of the stream.
    pub(crate) fn view(&mut self, address: usize, bytes: usize) -> Result<*mut u8, CUresult> {
        let range = format!("{bytes} bytes at {address:#x}, when the work ran");
        let Some(device) = self.arena_of(address) else {
            return self.refuse(FaultKind::OutOfBounds, range, CUDA_ERROR_ILLEGAL_ADDRESS);
        };
        let arena = &self.arenas[device];
        let kind = match arena.find(address, bytes) {
            Found::Inside(start) if arena.get(start).is_some_and(|allocation| allocation.life == Life::Live) => {
                return Ok(arena.view(address));
            }
            Found::Inside(_) => FaultKind::UseBeforeAlloc,
            Found::Freed => FaultKind::UseAfterFree,
            Found::Outside => FaultKind::OutOfBounds,
        };
        self.refuse(kind, range, CUDA_ERROR_ILLEGAL_ADDRESS)
    }

    fn gone(&mut self, address: usize, bytes: usize) -> Answer {
        let detail = format!("{bytes} bytes at {address:#x} were unmapped under a copy");
        self.refuse(FaultKind::HostMemoryGone, detail, CUDA_ERROR_ILLEGAL_ADDRESS)
    }

    fn count(&mut self, from: &Source, to: Place, bytes: u64) {
        let totals = &mut self.totals;
        totals.copies += 1;
        *match (from, to) {
            (Source::Fill(_), _) => &mut totals.fill_bytes,
            (Source::Device(_), Place::Device(_)) => &mut totals.device_to_device_bytes,
            (Source::Device(_), _) => &mut totals.device_to_host_bytes,
            _ => &mut totals.host_to_device_bytes,
        } += bytes;
    }
}
