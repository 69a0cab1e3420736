//! What the doctor found: findings, the way that bytes will take for each place, and one closing sentence.

use serde::Serialize;

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Not a question on this machine, or for the way that bytes take here.
    #[serde(rename = "not applicable")]
    NotApplicable,
    /// It could not be seen.
    Unknown,
    /// It works, and slower or riskier than it could.
    Warning,
    /// It is broken: something fails, or does not do what it was told.
    Fault,
}

impl Verdict {
    /// In words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NotApplicable => "not applicable",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }
}

/// A direct way between storage and GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// cuFile with NVIDIA's kernel module `nvidia-fs`; of network filesystems, cuFile with RDMA.
    NvidiaFs,
    /// cuFile with the kernel's PCI P2PDMA.
    CufileP2pdma,
    /// The kernel's PCI P2PDMA alone: memory of a PCI device mapped by `p2pmem/allocate`.
    KernelP2pdma,
}

impl Route {
    /// All, the most usual first.
    pub const ALL: [Self; 3] = [Self::NvidiaFs, Self::CufileP2pdma, Self::KernelP2pdma];
    /// Those of cuFile.
    pub const CUFILE: [Self; 2] = [Self::NvidiaFs, Self::CufileP2pdma];
    /// Those of PCI P2PDMA.
    pub const P2PDMA: [Self; 2] = [Self::CufileP2pdma, Self::KernelP2pdma];

    /// In words.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::NvidiaFs => "GPUDirect Storage with nvidia-fs",
            Self::CufileP2pdma => "GPUDirect Storage over PCI P2PDMA",
            Self::KernelP2pdma => "the kernel's PCI P2PDMA",
        }
    }
}

/// What a finding means for a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bar {
    /// It is shut until the remedy is carried out.
    Liftable,
    /// It is shut on this hardware, or for what lies on this filesystem.
    Final,
}

/// What one check found about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which check it was: stable, `subject.question`.
    pub id: &'static str,
    /// What it is about: a GPU, a path, a file; empty for the machine.
    pub subject: String,
    /// What it came to.
    pub verdict: Verdict,
    /// What was seen.
    pub seen: String,
    /// The file or call that showed it.
    pub source: String,
    /// What to do, where there is something to do.
    pub remedy: Option<String>,
    /// The routes that it shuts.
    #[serde(skip)]
    pub bars: Vec<(Route, Bar)>,
}

impl Finding {
    /// A finding that all is well.
    pub(super) fn ok(id: &'static str, seen: impl Into<String>, source: impl Into<String>) -> Self {
        let (seen, source) = (seen.into(), source.into());
        Self { id, subject: String::new(), verdict: Verdict::Ok, seen, source, remedy: None, bars: Vec::new() }
    }

    /// A finding of another verdict.
    pub(super) fn new(id: &'static str, verdict: Verdict, seen: impl Into<String>, source: impl Into<String>) -> Self {
        Self { verdict, ..Self::ok(id, seen, source) }
    }

    /// Says what it is about.
    #[must_use]
    pub(super) fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = subject.into();
        self
    }

    /// Says what to do.
    #[must_use]
    pub(super) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Shuts routes until the remedy is carried out.
    #[must_use]
    pub(super) fn shuts(mut self, routes: &[Route]) -> Self {
        self.bars.extend(routes.iter().map(|route| (*route, Bar::Liftable)));
        self
    }

    /// Shuts routes for good.
    #[must_use]
    pub(super) fn rules_out(mut self, routes: &[Route]) -> Self {
        self.bars.extend(routes.iter().map(|route| (*route, Bar::Final)));
        self
    }

    /// What it means for a route, if anything.
    pub(super) fn bar(&self, route: Route) -> Option<Bar> {
        self.bars.iter().find(|(barred, _)| *barred == route).map(|(_, bar)| *bar)
    }
}

/// The way that bytes will take between a place and a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Expected {
    /// Straight, by the route that is named beside it.
    Direct,
    /// Past the page cache into pinned memory, then by the copy engine.
    Staged,
    /// Through the page cache and pinned memory.
    Cached,
    /// Past the page cache into host memory: there is no GPU.
    Plain,
    /// None: the place cannot be used.
    None,
}

impl Expected {
    /// The word for it in receipts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Cached => "cached",
            Self::Plain => "plain",
            Self::None => "none",
        }
    }
}

/// What is to be expected of one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathReport {
    /// The place as it was named.
    pub path: String,
    /// The filesystem and its drives in words.
    pub storage: String,
    /// The GPU that lies nearest.
    pub gpu: Option<String>,
    /// The way that bytes will take.
    pub expected: Expected,
    /// The direct route, if that is it.
    pub route: Option<Route>,
    /// For each direct route that is shut, the findings that shut it.
    pub shut: Vec<Shut>,
    /// The one thing to do next.
    pub next: String,
    /// All of it in one sentence.
    pub conclusion: String,
}

impl PathReport {
    /// Whether a direct route may be open, though facts that it needs could not be seen.
    pub fn may_be_direct(&self) -> bool {
        self.shut.iter().any(|shut| shut.may_be_open)
    }
}

/// A direct route that is shut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shut {
    /// The route.
    pub route: Route,
    /// Whether it can be opened.
    pub can_be_opened: bool,
    /// Whether it may be open: all that shuts it is that facts which it needs could not be seen.
    pub may_be_open: bool,
    /// The identifiers of the findings that shut it; of those that do so for good, if any does.
    pub by: Vec<&'static str>,
}

/// How it stands with a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// A direct path is expected for every place.
    Direct,
    /// All works, by a slower path.
    Slower,
    /// Something is broken.
    Broken,
}

/// All that the doctor found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// How it stands.
    pub health: Health,
    /// One sentence, the last word.
    pub conclusion: String,
    /// What is to be expected of each place.
    pub paths: Vec<PathReport>,
    /// What each check found, in the order of the checks.
    pub findings: Vec<Finding>,
}
