//! Loading: the wanted tensors' bytes into the session's memory, a GPU's or the host's.
//!
//! The tensors of a file share allocations. On a GPU they lie one after the other, each aligned for kernels, and while the
//! first are filled the next are allocated. In host memory tensors lie as they do in their file, at the same distance from a
//! page boundary, so that `O_DIRECT` brings them straight to their places and neighbours stay neighbours (and so in the memory
//! that a PCI device publishes, which a drive fills directly in the same way); only a tensor
//! that lies in its file as no number should lie in memory is placed at the next cache line.

mod explain;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::entry::ModelEntry;
use super::home::Home;
use super::open::{Model, ModelFile};
use super::tensors::{Tensor, Tensors};
use crate::base::{Alignment, Error, ErrorKind, Extent, Result};
use crate::cuda::CallerStream;
use crate::io::Direction;
use crate::io::policy::PathPolicy;
use crate::memory::{Buffer, Region};
use crate::transfer::{Batch, Cancel, Move, Progress, Receipt, TransferOptions, Witness, run_batches};

/// What the address of a tensor in host memory is a multiple of, at least: the longest element. Most files of other writers
/// keep to it and to no more (their headers end at any multiple of 8), so with a larger one most large tensors could not come
/// straight from the drive, which cost them 5 to 10 % of its rate. A mapped file gives its tensors the same.
const TENSOR_ALIGNMENT_MIN: u64 = 8;

/// Where a tensor in host memory begins that does not lie as in its file: a cache line.
const TENSOR_ALIGNMENT: u64 = 64;

/// Where a tensor in GPU memory begins: what the driver's own allocations are aligned to, and what kernels are tuned for.
const GPU_TENSOR_ALIGNMENT: u64 = 256;

/// How much of a device's memory is allocated at a time, while what was allocated before is filled: on an H200 the driver takes up to
/// 6 ms for so much, and a load out of the page cache 10. It is also what a tensor can at most keep alive with it.
const GROUP_BYTES: u64 = 512 << 20;

/// The same for the first time, when nothing moves yet.
const FIRST_GROUP_BYTES: u64 = 64 << 20;

/// How much a caller's allocator is asked for at a time, after the first: the more it hears of at once, the fewer pieces it has
/// to get from the driver, each of which holds up copies that are under way.
const ALLOCATOR_BATCH_BYTES: u64 = 2 << 30;

/// How many rows of slices are planned at a time, about: each is a move that is kept until it is planned.
const BATCH_ROWS: u64 = 1 << 17;

/// The same of tensors on their way to a GPU, each with a place of its own: to plan 20,000 takes a quarter of the time in which
/// they are copied, and nothing moves before the first are planned.
const BATCH_TENSORS: usize = 4096;

/// Memory that is wanted for tensors, and where each of them is to lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// How many bytes. May be none.
    pub bytes: usize,
    /// The tensors.
    pub places: Vec<Place>,
}

/// Where a tensor is to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which of the model's [`entries`](Model::entries).
    pub entry: usize,
    /// The length of each dimension, in elements; of a slice, what is sliced.
    pub shape: Vec<u64>,
    /// Its bytes in the allocation.
    pub range: Range<usize>,
}

/// Gives a buffer for each allocation, of just its bytes, or fails, and the load with it. On a GPU a buffer begins at a
/// multiple of 256.
pub type Allocator = Box<dyn FnMut(&[Allocation]) -> Result<Vec<Buffer>> + Send>;

/// What to load, and how.
#[derive(Default)]
pub struct LoadOptions {
    select: Option<Vec<String>>,
    slices: Vec<Slice>,
    into: Vec<(String, Buffer)>,
    reuse: Option<Tensors>,
    allocator: Option<Allocator>,
    shared_bytes: Option<u64>,
    policy: Option<PathPolicy>,
    transfer: TransferOptions,
}

/// A part of a tensor along one dimension.
#[derive(Debug, Clone)]
struct Slice {
    name: String,
    dimension: usize,
    range: Range<u64>,
}

impl LoadOptions {
    /// Every tensor of the model.
    pub fn all() -> Self {
        Self::default()
    }

    /// Only these tensors. Together with slices: these whole and those in part.
    #[must_use]
    pub fn select<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.select.get_or_insert_default().extend(names.into_iter().map(Into::into));
        self
    }

    /// Of this tensor only `range` along `dimension`, in elements. Only its bytes are read (and what lies in
    /// small gaps between them). Without [`select`](Self::select), the other tensors are loaded whole.
    #[must_use]
    pub fn slice(mut self, name: impl Into<String>, dimension: usize, range: Range<u64>) -> Self {
        self.slices.push(Slice { name: name.into(), dimension, range });
        self
    }

    /// Loads this tensor (or its slice) into a buffer of exactly its size. The tensor must be among those that are
    /// loaded, and has one buffer.
    #[must_use]
    pub fn into(mut self, name: impl Into<String>, buffer: impl Into<Buffer>) -> Self {
        self.into.push((name.into(), buffer.into()));
        self
    }

    /// Loads into the memory of `tensors`, which an earlier load gave and nobody needs any more, as far as it fits: that of
    /// a model of the same layout fits wholly, and then nothing is allocated. (A GPU's driver clears what it gives anew,
    /// which takes a load out of the page cache up to a tenth of its time.) What does not fit, what the caller lent, and what
    /// a clone of a tensor or a save still uses is not touched, and freed (as soon as nothing uses it) before anything is
    /// allocated. Work on a GPU that still reads the old tensors must have ended.
    #[must_use]
    pub fn reusing(mut self, tensors: Tensors) -> Self {
        self.reuse = Some(tensors);
        self
    }

    /// Takes memory from here instead of allocating it: from a framework that has its own. It is asked for some tensors at a
    /// time, while those before them move, on the thread that called [`load`](Model::load).
    #[must_use]
    pub fn allocator(mut self, allocator: Allocator) -> Self {
        self.allocator = Some(allocator);
        self
    }

    /// How many bytes tensors may at most share an allocation of; a larger tensor has its own.
    #[must_use]
    pub fn shared_bytes(mut self, bytes: u64) -> Self {
        self.shared_bytes = Some(bytes);
        self
    }

    /// Fills memory only when what is in this stream is done by the time that the memory is there: work that still uses what
    /// it was before.
    #[must_use]
    pub fn after(mut self, stream: CallerStream) -> Self {
        self.transfer.after = Some(stream);
        self
    }

    /// Which path, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Told the bytes moved so far, from the transfer's threads.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.transfer.progress = Some(progress);
        self
    }

    /// Shown what passes through the ring.
    #[must_use]
    pub fn witness(mut self, witness: Arc<dyn Witness>) -> Self {
        self.transfer.witness = Some(witness);
        self
    }

    /// Stops the load.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.transfer.cancel = cancel;
        self
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { select, slices, into, policy, .. } = self;
        write!(f, "LoadOptions({select:?}, {slices:?}, {into:?}, {policy:?})")
    }
}

/// A tensor, or a part of one, that is to be loaded.
struct Item<'a> {
    /// Which of the model's entries.
    number: usize,
    entry: &'a ModelEntry,
    shape: Vec<u64>,
    rows: Rows,
}

/// The byte ranges of a file that make up a tensor or a slice of one: equally long and equally spaced. There can be millions,
/// so they are not kept one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    first: Extent,
    /// From the beginning of one to that of the next.
    stride: u64,
    count: u64,
}

impl Rows {
    fn one(extent: Extent) -> Self {
        Self { first: extent, stride: extent.length, count: 1 }
    }

    fn iter(self) -> impl Iterator<Item = Extent> {
        (0..self.count).map(move |row| Extent::new(self.first.offset + row * self.stride, self.first.length))
    }

    fn bytes(self) -> u64 {
        self.first.length * self.count
    }
}

impl Model {
    /// Loads tensors into the session's memory.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) for names, slices or buffers that do not fit the model,
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the memory that is free does not do (said before anything is read, unless
    /// others take it meanwhile), and the first failure of the transfer, naming file, offset and tensor.
    pub fn load(&self, mut options: LoadOptions) -> Result<(Tensors, Receipt)> {
        let (items, groups) = self.laid_out(&mut options)?;
        let places = places_of(&groups, items.len());
        let filled: RefCell<Vec<Buffer>> = RefCell::default();
        let keep = |buffer| filled.borrow_mut().push(buffer);
        let allocator = RefCell::new(options.allocator.take());
        let batches = self.batches(&items, groups, &allocator, &keep);
        let wanted = || items.iter().flat_map(|item| item.rows.iter().map(|extent| (item.entry, extent)));
        let receipt =
            run_batches(&self.context, batches, &options.transfer).map_err(|error| self.name_tensor(error, wanted()))?;
        let buffers: Vec<Arc<Buffer>> = filled.into_inner().into_iter().map(Arc::new).collect();
        let tensors = items.into_iter().zip(places).map(|(item, (buffer, range))| Tensor {
            name: item.entry.name.clone(),
            dtype: item.entry.dtype,
            shape: item.shape,
            buffer: Arc::clone(&buffers[buffer]),
            range,
        });
        Ok((Tensors::new(tensors.collect()), receipt))
    }

    /// What the options ask for, dealt into buffers for which there is room.
    fn laid_out(&self, options: &mut LoadOptions) -> Result<(Vec<Item<'_>>, Vec<Group>)> {
        let items = self.items(options)?;
        let given = self.given_buffers(&items, std::mem::take(&mut options.into))?;
        options.transfer.policy = options.policy.unwrap_or(self.policy);
        let home = Home::of(&self.context);
        let shared_bytes = options.shared_bytes.unwrap_or(if matches!(home, Home::Host) { u64::MAX } else { GROUP_BYTES });
        let mut groups = self.in_turns(groups(&items, given, home, shared_bytes), &items);
        reuse(&mut groups, options.reuse.take().map(Tensors::into_buffers).unwrap_or_default(), home);
        // How much the caller's allocator has is for it to say.
        if options.allocator.is_none() {
            let allocated: u64 = groups.iter().filter(|group| group.given.is_none()).map(|group| group.bytes).sum();
            let moved: u64 = items.iter().map(|item| item.rows.bytes()).sum();
            let staged = options.transfer.policy != PathPolicy::Require(crate::io::policy::Path::Cached);
            // Chunks of a small load are small.
            let staging = if staged { self.context.staging_bytes.min(moved / 2) } else { 0 };
            home.ensure_bytes(allocated, staging)?;
        }
        Ok((items, groups))
    }

    /// The groups, in turns between the drives that their files lie on: what is allocated and planned first is then a little of
    /// each drive, and all of them are busy from the start.
    fn in_turns(&self, groups: Vec<Group>, items: &[Item<'_>]) -> Vec<Group> {
        let mut drives: Vec<(Option<u64>, VecDeque<Group>)> = Vec::new();
        for group in groups {
            let file = group.places.first().map(|(item, _)| &self.files[items[*item].entry.file].file);
            let drive = file.and_then(|file| file.expected).map(|identity| identity.device);
            match drives.iter_mut().find(|(known, _)| *known == drive) {
                Some((_, of_drive)) => of_drive.push_back(group),
                None => drives.push((drive, VecDeque::from([group]))),
            }
        }
        let longest = drives.iter().map(|(_, of_drive)| of_drive.len()).max().unwrap_or(0);
        (0..longest)
            .flat_map(|_| drives.iter_mut().filter_map(|(_, of_drive)| of_drive.pop_front()).collect::<Vec<_>>())
            .collect()
    }

    /// The moves of some buffers at a time, allocated when their turn comes; `keep` gets the buffers.
    fn batches<'a>(
        &'a self,
        items: &'a [Item<'_>],
        groups: Vec<Group>,
        allocator: &'a RefCell<Option<Allocator>>,
        keep: &'a dyn Fn(Buffer),
    ) -> Vec<Batch<'a>> {
        let home = Home::of(&self.context);
        let mut batches: Vec<Batch<'_>> = Vec::new();
        for batch in batched(groups, items, home.is_gpu(), allocator.borrow().is_some()) {
            batches.push(Box::new(move || {
                let mut moves = Vec::new();
                for (mut buffer, places) in allocate(batch, items, home, allocator.borrow_mut().as_mut())? {
                    for (item, range) in places {
                        let region = buffer.region(range)?;
                        self.add_moves(&items[item], &region, &mut moves);
                    }
                    keep(buffer);
                }
                Ok(moves)
            }));
        }
        batches
    }

    /// What the options ask for, in the order of the entries.
    fn items(&self, options: &LoadOptions) -> Result<Vec<Item<'_>>> {
        let mut wanted: Vec<Option<Option<&Slice>>> = vec![options.select.is_none().then_some(None); self.entries.len()];
        for name in options.select.iter().flatten() {
            let index = self.by_name.get(name).ok_or_else(|| self.unknown_tensor(name))?;
            wanted[*index] = Some(None);
        }
        for slice in &options.slices {
            let index = self.by_name.get(&slice.name).ok_or_else(|| self.unknown_tensor(&slice.name))?;
            if matches!(wanted[*index], Some(Some(_))) {
                return Err(Error::new(ErrorKind::InvalidInput, "the tensor is sliced twice").with_tensor(&slice.name));
            }
            wanted[*index] = Some(Some(slice));
        }
        let wanted = self.entries.iter().enumerate().zip(wanted).filter_map(|(entry, wanted)| Some((entry, wanted?)));
        let item = |((number, entry), slice): ((usize, _), Option<&Slice>)| {
            let item = slice.map_or_else(|| Ok(whole(entry)), |slice| sliced(entry, slice))?;
            Ok(Item { number, ..item })
        };
        wanted.map(item).collect()
    }

    /// The caller's buffer of each item that has one.
    fn given_buffers(&self, items: &[Item<'_>], into: Vec<(String, Buffer)>) -> Result<Vec<Option<Buffer>>> {
        let mut given: Vec<Option<Buffer>> = Vec::new();
        given.resize_with(items.len(), || None);
        if into.is_empty() {
            return Ok(given);
        }
        let places: HashMap<&str, usize> = items.iter().enumerate().map(|(at, item)| (item.entry.name.as_str(), at)).collect();
        for (name, buffer) in into {
            let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).with_tensor(&name));
            let Some(at) = places.get(name.as_str()).copied() else {
                if !self.by_name.contains_key(&name) {
                    return Err(self.unknown_tensor(&name));
                }
                return refuse("a buffer was given for a tensor that is not among those to be loaded".to_owned())
                    .map_err(|error| error.with_hint("select the tensor too, or give no buffer for it"));
            };
            if given[at].is_some() {
                return refuse("two buffers were given for the tensor".to_owned());
            }
            let (have, need) = (buffer.len() as u64, items[at].rows.bytes());
            if have != need {
                return refuse(format!("the buffer holds {have} bytes and the tensor has {need}"));
            }
            given[at] = Some(buffer);
        }
        Ok(given)
    }

    fn add_moves(&self, item: &Item<'_>, region: &Region, moves: &mut Vec<Move>) {
        let mut start = 0;
        for extent in item.rows.iter() {
            let end = start + usize::try_from(extent.length).unwrap_or(usize::MAX);
            let file = Arc::clone(&self.files[item.entry.file].file);
            moves.push(Move { file, extent, region: region.slice(start..end), direction: Direction::Read });
            start = end;
        }
    }

    /// Adds the tensor that lies at the offset of a failure: of those that were wanted, each with its range of the
    /// file. Around them other bytes may have been moved, whose tensors nobody asked for.
    pub(super) fn name_tensor<'a>(&self, error: Error, wanted: impl Iterator<Item = (&'a ModelEntry, Extent)>) -> Error {
        let offset = error.context("offset").and_then(|offset| offset.parse::<u64>().ok());
        let length = error.context("length").and_then(|length| length.parse::<u64>().ok()).unwrap_or(1);
        let Some((offset, file)) = offset.zip(error.context("file")) else { return error };
        let is_named = |file_of: &ModelFile| crate::base::error::escaped(&file_of.file.path.to_string_lossy()) == file;
        let named: Vec<bool> = self.files.iter().map(is_named).collect();
        let touched =
            |extent: Extent| !extent.is_empty() && extent.end() > offset && extent.offset < offset.saturating_add(length);
        let hit = wanted.into_iter().find(|(entry, extent)| named[entry.file] && touched(*extent));
        match hit {
            Some((entry, _)) => error.with_tensor(&entry.name),
            None => error,
        }
    }
}

fn whole(entry: &ModelEntry) -> Item<'_> {
    Item { number: 0, entry, shape: entry.shape.clone(), rows: Rows::one(entry.extent) }
}

/// The bytes of a slice: one range for each index of the dimensions before it.
fn sliced<'a>(entry: &'a ModelEntry, slice: &Slice) -> Result<Item<'a>> {
    let refuse = |message: String| Err(Error::new(ErrorKind::InvalidInput, message).with_tensor(&entry.name));
    let Slice { dimension, ref range, .. } = *slice;
    let Some(length) = entry.shape.get(dimension).copied() else {
        return refuse(format!("dimension {dimension} of a tensor of {} dimensions", entry.shape.len()));
    };
    if range.start > range.end || range.end > length {
        return refuse(format!(
            "{}..{} does not lie within dimension {dimension}, which is {length} long",
            range.start, range.end
        ));
    }
    let mut shape = entry.shape.clone();
    shape[dimension] = range.end - range.start;
    if entry.extent.is_empty() || shape[dimension] == 0 {
        return Ok(Item { number: 0, entry, shape, rows: Rows::one(Extent::new(entry.extent.offset, 0)) });
    }
    // No dimension is 0 and the whole fits a file, so none of these products overflows.
    let rows: u64 = entry.shape[..dimension].iter().product();
    let inner_bits = entry.shape[dimension + 1..].iter().product::<u64>() * entry.dtype.bits();
    let (start_bits, slice_bits) = (range.start * inner_bits, shape[dimension] * inner_bits);
    // The last part is what lies between the slices of two rows.
    let cuts = [start_bits, slice_bits, if rows > 1 { length * inner_bits } else { 0 }];
    if cuts.iter().any(|bits| !bits.is_multiple_of(8)) {
        return refuse(format!("a slice of {} must begin and end on whole bytes", entry.dtype));
    }
    let (row_bytes, start, bytes) = (length * inner_bits / 8, start_bits / 8, slice_bits / 8);
    let first = Extent::new(entry.extent.offset + start, bytes);
    let rows = Rows { first, stride: row_bytes, count: rows };
    // Without gaps they are one.
    let rows = if bytes == row_bytes || rows.count == 1 { Rows::one(Extent::new(first.offset, rows.bytes())) } else { rows };
    Ok(Item { number: 0, entry, shape, rows })
}

/// An item's number and its range of a buffer.
type Placed = (usize, Range<usize>);

/// Items that share a buffer.
struct Group {
    /// The caller's buffer or one of an earlier load, if it is not to be allocated.
    given: Option<Buffer>,
    /// The bytes that the buffer needs.
    bytes: u64,
    places: Vec<Placed>,
}

/// Deals the items into buffers: the caller's, or some for each file, which several share up to so many bytes.
fn groups(items: &[Item<'_>], given: Vec<Option<Buffer>>, home: Home<'_>, shared_bytes: u64) -> Vec<Group> {
    let to_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let mut groups: Vec<Group> = Vec::new();
    let mut open: Option<Group> = None;
    for (number, (item, given)) in items.iter().zip(given).enumerate() {
        if let Some(buffer) = given {
            groups.push(Group { bytes: item.rows.bytes(), places: vec![(number, 0..buffer.len())], given: Some(buffer) });
            continue;
        }
        let start_in = |group: &Group| {
            // A slice begins elsewhere than its tensor.
            match home {
                Home::Gpu(_) => group.bytes.div_ceil(GPU_TENSOR_ALIGNMENT) * GPU_TENSOR_ALIGNMENT,
                // What would be staged for a first tensor in another place would be its neighbours' ends too.
                Home::Peer(_) if group.bytes == 0 && item.rows.first.offset.is_multiple_of(TENSOR_ALIGNMENT_MIN) => {
                    item.rows.first.offset % Alignment::PAGE.bytes()
                }
                _ => next_place(group.bytes, item.rows.first.offset, item.rows.bytes()),
            }
        };
        if open.as_ref().is_some_and(|group| start_in(group).saturating_add(item.rows.bytes()) > shared_bytes) {
            groups.extend(open.take());
        }
        let group = open.get_or_insert_with(|| Group { given: None, bytes: 0, places: Vec::new() });
        let start = start_in(group);
        group.bytes = start + item.rows.bytes();
        group.places.push((number, to_usize(start)..to_usize(group.bytes)));
        let is_last_of_file = items.get(number + 1).is_none_or(|next| next.entry.file != item.entry.file);
        if is_last_of_file {
            groups.extend(open.take());
        }
    }
    groups.extend(open);
    groups
}

/// Gives groups the buffers of an earlier load that have just their length. The others are freed. What a caller lent is
/// the caller's, and what is claimed may still be written to a file.
fn reuse(groups: &mut [Group], mut buffers: Vec<Buffer>, home: Home<'_>) {
    buffers.retain(|buffer| home.may_reuse(buffer));
    for group in groups.iter_mut().filter(|group| group.given.is_none()) {
        if let Some(at) = buffers.iter().position(|buffer| buffer.len() as u64 == group.bytes) {
            group.given = Some(buffers.swap_remove(at));
        }
    }
}

/// For each item the number of its buffer, counted in the order of the groups, and its range there.
fn places_of(groups: &[Group], items: usize) -> Vec<Placed> {
    let mut places = vec![(0, 0..0); items];
    for (buffer, group) in groups.iter().enumerate() {
        for (item, range) in &group.places {
            places[*item] = (buffer, range.clone());
        }
    }
    places
}

/// Groups dealt into batches, which are allocated and planned one after the other. Host memory costs nothing before it is
/// touched, so there only what planning takes counts.
fn batched(groups: Vec<Group>, items: &[Item<'_>], on_gpu: bool, has_allocator: bool) -> Vec<Vec<Group>> {
    let later = if has_allocator { ALLOCATOR_BATCH_BYTES } else { GROUP_BYTES };
    let mut batches: Vec<Vec<Group>> = Vec::new();
    let (mut room, mut rows, mut tensors) = (0, 0, 0);
    for group in groups {
        if room == 0 || rows == 0 || tensors == 0 {
            room = if batches.is_empty() { FIRST_GROUP_BYTES } else { later };
            (rows, tensors) = (BATCH_ROWS, BATCH_TENSORS);
            batches.push(Vec::new());
        }
        if on_gpu {
            room = room.saturating_sub(group.bytes);
            tensors = tensors.saturating_sub(group.places.len());
        }
        rows = group.places.iter().fold(rows, |rows, (item, _)| rows.saturating_sub(items[*item].rows.count));
        if let Some(batch) = batches.last_mut() {
            batch.push(group);
        }
    }
    batches
}

/// The buffer of each group: the one that it was given, the allocator's, or a new one.
fn allocate(
    groups: Vec<Group>,
    items: &[Item<'_>],
    home: Home<'_>,
    allocator: Option<&mut Allocator>,
) -> Result<Vec<(Buffer, Vec<Placed>)>> {
    let to_usize = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut supplied = Vec::new().into_iter();
    if let Some(allocator) = allocator {
        let place = |(item, range): &Placed| {
            let Item { number, shape, .. } = &items[*item];
            Place { entry: *number, shape: shape.clone(), range: range.clone() }
        };
        let wanted = groups.iter().filter(|group| group.given.is_none());
        let wanted: Vec<Allocation> = wanted
            .map(|group| Allocation { bytes: to_usize(group.bytes), places: group.places.iter().map(place).collect() })
            .collect();
        let buffers = allocator(&wanted)?;
        let fits = wanted.len() == buffers.len() && wanted.iter().zip(&buffers).all(|(wanted, have)| wanted.bytes == have.len());
        if !fits {
            return Err(Error::new(ErrorKind::InvalidInput, "the allocator gave other buffers than it was asked for"));
        }
        supplied = buffers.into_iter();
    }
    let buffer = |group: Group| {
        let buffer = match group.given.or_else(|| supplied.next()) {
            Some(buffer) => buffer,
            None => home.allocate(to_usize(group.bytes))?,
        };
        Ok((buffer, group.places))
    };
    groups.into_iter().map(buffer).collect()
}

/// The first place from `cursor` on for a tensor that lies at `offset` in its file.
fn next_place(cursor: u64, offset: u64, bytes: u64) -> u64 {
    let page = Alignment::PAGE.bytes();
    // The next address with the file's distance from a page boundary: none is skipped between neighbours.
    let gap = (offset % page + page - cursor % page) % page;
    // For a small tensor the gap would be larger than what it saves: a file of tiny ones would take many times its size.
    if offset.is_multiple_of(TENSOR_ALIGNMENT_MIN) && gap <= bytes / 64 {
        cursor + gap
    } else {
        cursor.div_ceil(TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    }
}

#[cfg(test)]
mod tests;
