//! Names: which directory holds which, now and durably.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path};

use super::content::Content;
use super::power::Survival;

/// The number of the root directory.
const ROOT: u64 = 0;

type Names = BTreeMap<OsString, u64>;

#[derive(Clone, Debug)]
enum Node {
    File(Content),
    Directory { now: Names, durable: Names },
}

/// One name of a directory that stands for something else from now on, or for nothing.
#[derive(Clone, Debug)]
struct Change {
    directory: u64,
    name: OsString,
    to: Option<u64>,
}

/// Files and directories. Nothing is ever freed: a file without a name lives on, as if someone had it open.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// What was done to names and is not durable, oldest first. The changes of one operation survive together.
    pending: Vec<Vec<Change>>,
}

/// A name's place: its directory and what it is called there.
#[derive(Debug)]
pub(super) struct Place<'a> {
    directory: u64,
    name: &'a OsStr,
}

impl Tree {
    pub(super) fn new() -> Self {
        Self { nodes: vec![Node::Directory { now: Names::new(), durable: Names::new() }], pending: Vec::new() }
    }

    fn add(&mut self, node: Node) -> u64 {
        self.nodes.push(node);
        self.nodes.len() as u64 - 1
    }

    fn node(&self, id: u64) -> &Node {
        &self.nodes[usize::try_from(id).expect("a node's number is an index")]
    }

    fn node_mut(&mut self, id: u64) -> &mut Node {
        &mut self.nodes[usize::try_from(id).expect("a node's number is an index")]
    }

    fn names(&self, id: u64) -> Result<&Names, i32> {
        match self.node(id) {
            Node::Directory { now, .. } => Ok(now),
            Node::File(_) => Err(libc::ENOTDIR),
        }
    }

    /// The names in a directory.
    pub(super) fn list(&self, id: u64) -> Result<Vec<OsString>, i32> {
        Ok(self.names(id)?.keys().cloned().collect())
    }

    pub(super) fn is_directory(&self, id: u64) -> bool {
        matches!(self.node(id), Node::Directory { .. })
    }

    pub(super) fn file(&self, id: u64) -> Result<&Content, i32> {
        match self.node(id) {
            Node::File(content) => Ok(content),
            Node::Directory { .. } => Err(libc::EISDIR),
        }
    }

    pub(super) fn file_mut(&mut self, id: u64) -> Result<&mut Content, i32> {
        match self.node_mut(id) {
            Node::File(content) => Ok(content),
            Node::Directory { .. } => Err(libc::EISDIR),
        }
    }

    /// What a path stands for.
    pub(super) fn find(&self, path: &Path) -> Result<u64, i32> {
        let mut at = ROOT;
        for part in path.components() {
            match part {
                Component::RootDir | Component::CurDir => {}
                Component::Normal(name) => at = *self.names(at)?.get(name).ok_or(libc::ENOENT)?,
                Component::ParentDir | Component::Prefix(_) => return Err(libc::EINVAL),
            }
        }
        Ok(at)
    }

    /// The place of a path's last name, which need not exist.
    pub(super) fn place<'a>(&self, path: &'a Path) -> Result<Place<'a>, i32> {
        let name = path.file_name().ok_or(libc::EINVAL)?;
        let directory = self.find(path.parent().unwrap_or(Path::new("")))?;
        self.names(directory)?;
        Ok(Place { directory, name })
    }

    fn at(&self, place: &Place<'_>) -> Option<u64> {
        self.names(place.directory).ok()?.get(place.name).copied()
    }

    /// Changes names, all at once.
    fn change(&mut self, changes: Vec<Change>) {
        for Change { directory, name, to } in &changes {
            if let Node::Directory { now, .. } = self.node_mut(*directory) {
                set(now, name, *to);
            }
        }
        self.pending.push(changes);
    }

    pub(super) fn create_file(&mut self, path: &Path, content: Content) -> Result<u64, i32> {
        self.create(path, Node::File(content))
    }

    pub(super) fn create_directory(&mut self, path: &Path) -> Result<u64, i32> {
        self.create(path, Node::Directory { now: Names::new(), durable: Names::new() })
    }

    fn create(&mut self, path: &Path, node: Node) -> Result<u64, i32> {
        let place = self.place(path)?;
        if self.at(&place).is_some() {
            return Err(libc::EEXIST);
        }
        let id = self.add(node);
        self.change(vec![Change { directory: place.directory, name: place.name.to_owned(), to: Some(id) }]);
        Ok(id)
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path, may_replace: bool) -> Result<(), i32> {
        let (source, target) = (self.place(from)?, self.place(to)?);
        let id = self.at(&source).ok_or(libc::ENOENT)?;
        if let Some(there) = self.at(&target) {
            if !may_replace {
                return Err(libc::EEXIST);
            }
            if there == id {
                return Ok(());
            }
            match (self.is_directory(id), self.is_directory(there)) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.names(there)?.is_empty() => return Err(libc::ENOTEMPTY),
                _ => {}
            }
        }
        let gone = Change { directory: source.directory, name: source.name.to_owned(), to: None };
        let new = Change { directory: target.directory, name: target.name.to_owned(), to: Some(id) };
        self.change(vec![gone, new]);
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path, directory: bool) -> Result<(), i32> {
        let place = self.place(path)?;
        let id = self.at(&place).ok_or(libc::ENOENT)?;
        match (directory, self.is_directory(id)) {
            (true, false) => return Err(libc::ENOTDIR),
            (false, true) => return Err(libc::EISDIR),
            (true, true) if !self.names(id)?.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.change(vec![Change { directory: place.directory, name: place.name.to_owned(), to: None }]);
        Ok(())
    }

    /// Makes the names in one directory durable. An operation on two directories becomes durable whole, and with it
    /// whatever was done before to the same names.
    pub(super) fn sync_directory(&mut self, id: u64) -> Result<(), i32> {
        self.names(id)?;
        let mut touched: HashSet<(u64, OsString)> = HashSet::new();
        let (mut kept, mut synced) = (Vec::new(), Vec::new());
        for changes in std::mem::take(&mut self.pending).into_iter().rev() {
            let is_of = |change: &Change| change.directory == id || touched.contains(&(change.directory, change.name.clone()));
            if changes.iter().any(is_of) {
                touched.extend(changes.iter().map(|change| (change.directory, change.name.clone())));
                synced.push(changes);
            } else {
                kept.push(changes);
            }
        }
        kept.reverse();
        self.pending = kept;
        synced.iter().rev().for_each(|changes| self.make_durable(changes));
        Ok(())
    }

    fn make_durable(&mut self, changes: &[Change]) {
        for Change { directory, name, to } in changes {
            if let Node::Directory { durable, .. } = self.node_mut(*directory) {
                set(durable, name, *to);
            }
        }
    }

    /// What is left after a power cut.
    pub(super) fn after_power_cut(&self, survival: &mut Survival) -> Self {
        let empty = |node: &Node| match node {
            Node::Directory { .. } => node.clone(),
            Node::File(_) => Node::File(Content::default()),
        };
        let mut left = Self { nodes: self.nodes.iter().map(empty).collect(), pending: Vec::new() };
        for changes in &self.pending {
            if survival.keeps() {
                left.make_durable(changes);
            }
        }
        for node in &mut left.nodes {
            if let Node::Directory { now, durable } = node {
                now.clone_from(durable);
            }
        }
        for id in left.reachable() {
            if let (Node::File(before), Node::File(after)) = (self.node(id), left.node_mut(id)) {
                *after = before.after_power_cut(survival);
            }
        }
        left
    }

    /// The bytes of all files that have a name.
    pub(super) fn used_bytes(&self) -> u64 {
        let length = |id: &u64| self.file(*id).map_or(0, |content| content.now().len() as u64);
        self.reachable().iter().map(length).sum()
    }

    /// Every file and directory that has a name.
    fn reachable(&self) -> BTreeSet<u64> {
        let (mut found, mut todo) = (BTreeSet::new(), vec![ROOT]);
        while let Some(id) = todo.pop() {
            if found.insert(id)
                && let Node::Directory { now, .. } = self.node(id)
            {
                todo.extend(now.values().copied());
            }
        }
        found
    }
}

fn set(names: &mut Names, name: &OsString, to: Option<u64>) {
    match to {
        Some(id) => names.insert(name.clone(), id),
        None => names.remove(name),
    };
}
