//! A directory laid out as a machine's files: an archive of `/proc`, `/sys` and `/etc` as support tools make them, or one
//! made by hand. What no file tells stands in a capture called `facts` at its top, if there is one.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::live::{self, BYTES_MAX};
use super::{Answer, Capture, Facts, Kind, Question, Unseen, word_and_path};
use crate::base::{Error, ErrorKind, Result};
use crate::storage::probe::{Prober, path_of, text_of};

/// Why there is no answer.
pub(super) const UNTOLD: &str = "files alone do not tell this";
pub(super) const NOT_PACKED: &str = "the directory does not have it";

/// Another machine's files in a directory of this one.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    prober: Prober,
    beside: Capture,
}

impl Tree {
    /// The machine whose files lie in `root`.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if there is no such directory, [`Malformed`](ErrorKind::Malformed) for a
    /// capture in it that is none, [`InvalidInput`](ErrorKind::InvalidInput) for a directory that holds nothing of a machine.
    pub fn new(root: &Path) -> Result<Self> {
        let prober = Prober::new(live::PATIENCE);
        let root = prober.resolve(root).map_err(|unseen| not_seen(root, &unseen))?;
        let beside = match prober.read(&root.join("facts"), BYTES_MAX) {
            Ok(bytes) => {
                Capture::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| error.with_file(&root.join("facts")))?
            }
            Err(Unseen::Absent) if ["proc", "sys", "etc"].iter().all(|name| prober.resolve(&root.join(name)).is_err()) => {
                let error = Error::new(
                    ErrorKind::InvalidInput,
                    "this directory holds no machine's files: neither proc, nor sys, nor etc",
                );
                return Err(error
                    .with_file(&root)
                    .with_hint("name the directory above them, or a file of `thruway doctor --capture`"));
            }
            Err(Unseen::Absent) => Capture::default(),
            Err(unseen) => return Err(not_seen(&root.join("facts"), &unseen)),
        };
        Ok(Self { root, prober, beside })
    }

    /// Where a path of that machine lies here, links resolved. A link that leads out of the directory leads nowhere.
    fn inside(&self, path: &str) -> Result<PathBuf, Unseen> {
        let path = path_of(path);
        let parts = path.components().filter(|part| matches!(part, Component::Normal(_)));
        let below: PathBuf = parts.collect();
        let real = match self.prober.resolve(&self.root.join(&below)) {
            Err(Unseen::Absent) if self.lacks(&below) => return Err(Unseen::Failed(NOT_PACKED.to_owned())),
            real => real?,
        };
        if real.starts_with(&self.root) { Ok(real) } else { Err(Unseen::Absent) }
    }

    /// Whether what is not there was not packed, as far as one can tell: of the kernel's files if neither the directory that would
    /// hold it nor the one above is there (a device without an IOMMU has no `iommu_group`, and its other files are there); of
    /// devices, programs and what runs if their top directory is not. Settings that are not there are not set.
    fn lacks(&self, path: &Path) -> bool {
        let is_below = |tops: &[&str]| tops.iter().any(|top| path.starts_with(top));
        let above = match path.iter().next() {
            _ if is_below(&["proc", "sys"]) => path.ancestors().skip(1).take(2).filter(|above| *above != Path::new("")).last(),
            Some(top) if is_below(&["dev", "run", "usr"]) => Some(Path::new(top)),
            _ => None,
        };
        above.is_some_and(|above| self.prober.resolve(&self.root.join(above)).is_err())
    }
}

fn not_seen(path: &Path, unseen: &Unseen) -> Error {
    match unseen {
        Unseen::Absent => Error::new(ErrorKind::NotFound, "there is no such capture").with_file(path),
        Unseen::Denied => Error::new(ErrorKind::PermissionDenied, "this capture may not be read").with_file(path),
        Unseen::Silent(_) => Error::new(ErrorKind::Io, "this capture does not answer").with_file(path),
        Unseen::Failed(why) => Error::new(ErrorKind::Io, format!("this capture cannot be read: {why}")).with_file(path),
    }
}

impl Facts for Tree {
    fn look(&self, question: &Question) -> Answer {
        if let Some(answer) = self.beside.known(question) {
            return answer;
        }
        let key = &question.key;
        match question.kind {
            Kind::File => live::file(&self.prober, &self.inside(key)?),
            Kind::Bytes => live::bytes(&self.prober, &self.inside(key)?),
            Kind::List => live::list(&self.prober, &self.inside(key)?),
            Kind::Lines => {
                let (word, path) = word_and_path(key).ok_or(Unseen::Absent)?;
                live::lines(&self.prober, word, &self.inside(path)?)
            }
            Kind::Link => {
                let real = self.inside(key)?;
                let below = real.strip_prefix(&self.root).map_err(|_| Unseen::Absent)?;
                Ok(format!("/{}\n", text_of(below.as_os_str().as_bytes())))
            }
            Kind::Env => Err(Unseen::Absent),
            Kind::Place | Kind::Call => Err(Unseen::Failed(UNTOLD.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::FactsExt;
    use super::*;

    #[test]
    fn files_and_links_of_a_tree_are_seen_and_nothing_outside_of_it() {
        let outside = tempfile::tempdir().expect("directory");
        std::fs::write(outside.path().join("secret"), "s").expect("write");
        let directory = tempfile::tempdir().expect("directory");
        let sys = directory.path().join("sys/class/nvme");
        std::fs::create_dir_all(sys.join("real")).expect("create");
        std::fs::write(sys.join("real/model"), "a drive\n").expect("write");
        std::os::unix::fs::symlink("real", sys.join("nvme0")).expect("link");
        std::os::unix::fs::symlink(outside.path(), sys.join("out")).expect("link");
        std::fs::write(directory.path().join("facts"), "thruway-facts 1\n@ call user\nroot no\n").expect("write");
        let tree = Tree::new(directory.path()).expect("a tree");
        assert_eq!(tree.line("/sys/class/nvme/nvme0/model").as_deref(), Ok("a drive"));
        assert_eq!(tree.link("/sys/class/nvme/nvme0").as_deref(), Ok("/sys/class/nvme/real"));
        assert_eq!(tree.call("user").as_deref(), Ok("root no\n"));
        assert_eq!(tree.file("/sys/class/nvme/out/secret"), Err(Unseen::Absent));
        let up = format!("/sys/../../{}/secret", outside.path().display());
        assert!(tree.file(&up).is_err(), "nothing outside of it");
        assert!(matches!(tree.call("cuda"), Err(Unseen::Failed(_))));
        assert_eq!(tree.file("/sys/class/nvme/nvme1"), Err(Unseen::Absent));
        assert!(matches!(tree.file("/proc/modules"), Err(Unseen::Failed(_))), "what was not packed is unknown");
        std::fs::create_dir(directory.path().join("etc")).expect("create");
        assert_eq!(tree.file("/etc/modprobe.d/nvidia.conf"), Err(Unseen::Absent), "a system without such a directory has none");
        assert_eq!(Tree::new(outside.path()).expect_err("no machine").kind(), ErrorKind::InvalidInput);
    }
}
