//! The library of cuFile and its settings.

use crate::base::Error;
use crate::doctor::cufile::jsonc::{Node, Value, parse};
use crate::doctor::cufile::{Audit, DEFAULT_PATH, audit};
use crate::doctor::facts::{Facts, FactsExt, Unseen};
use crate::doctor::parse::Version;

/// The library, found without opening it: to start it where there is no GPU can hang for ever (seen with 1.19).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CufileLibrary {
    /// Where it lies.
    pub path: String,
    /// Its version, such as 1.15.1, if a name tells.
    pub version: Option<Version>,
}

/// The settings that are in force.
#[derive(Debug)]
pub struct CufileConfig {
    /// The file that the library reads.
    pub path: String,
    /// Whether the environment names it.
    pub from_env: bool,
    /// What it says; an error if it cannot be read.
    pub audit: Result<Result<Audit, Error>, Unseen>,
    /// Its values.
    root: Option<Node>,
}

impl CufileConfig {
    /// Reads the file that the library would read.
    pub(super) fn examine(facts: &dyn Facts) -> Self {
        let named = facts.env("CUFILE_ENV_PATH_JSON");
        let path = named.clone().unwrap_or_else(|| DEFAULT_PATH.to_owned());
        let text = facts.file(&path);
        let root = text.as_ref().ok().and_then(|text| parse(text).ok());
        Self { path, from_env: named.is_some(), audit: text.map(|text| audit(&text)), root }
    }

    /// Whether a setting is on, such as `block.nvmeof.use_pci_p2pdma`; `None` where the file does not say.
    pub fn is_on(&self, path: &str) -> Option<bool> {
        let node = path.split('.').try_fold(self.root.as_ref()?, |node, key| node.get(key))?;
        if let Value::Bool(is_on) = &node.value { Some(*is_on) } else { None }
    }

    /// What the file says, if it could be read.
    pub fn audit(&self) -> Option<&Audit> {
        self.audit.as_ref().ok()?.as_ref().ok()
    }
}

/// Where the library may lie: the loader's directories, the toolkit, a Python environment.
pub(super) fn library(facts: &dyn Facts) -> Result<CufileLibrary, Unseen> {
    const NAME: &str = "libcufile.so.0";
    let mut directories: Vec<String> = Vec::new();
    if let Some(listed) = facts.env("LD_LIBRARY_PATH") {
        directories.extend(listed.split(':').filter(|part| part.starts_with('/')).take(32).map(str::to_owned));
    }
    if let Some(home) = facts.env("CUDA_HOME") {
        directories.push(format!("{home}/lib64"));
    }
    directories.extend(
        [
            "/usr/local/cuda/lib64",
            "/usr/local/cuda/targets/x86_64-linux/lib",
            "/usr/local/cuda/targets/sbsa-linux/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
        ]
        .map(str::to_owned),
    );
    for root in ["CONDA_PREFIX", "VIRTUAL_ENV"].into_iter().filter_map(|name| facts.env(name)) {
        directories.push(format!("{root}/lib"));
    }
    let cuda = facts.names("/usr/local").into_iter().filter(|name| name.starts_with("cuda-"));
    directories.extend(
        cuda.flat_map(|name| ["x86_64-linux", "sbsa-linux"].map(|target| format!("/usr/local/{name}/targets/{target}/lib"))),
    );
    let mut unseen = Unseen::Absent;
    for path in directories.iter().map(|directory| facts.link(&format!("{directory}/{NAME}"))) {
        let path = match path {
            Ok(path) => path,
            Err(Unseen::Absent) => continue,
            Err(why) => {
                unseen = why;
                continue;
            }
        };
        let version = path.rsplit_once(".so.").and_then(|(_, version)| Version::parse(version)).filter(|v| v.0.len() > 1);
        return Ok(CufileLibrary { path, version });
    }
    in_python(facts).ok_or(unseen)
}

/// The library in the packages of the Python environment that is active.
fn in_python(facts: &dyn Facts) -> Option<CufileLibrary> {
    let own = facts.env("HOME").map(|home| format!("{home}/.local"));
    let roots = [facts.env("VIRTUAL_ENV"), facts.env("CONDA_PREFIX"), own, Some("/usr/local".to_owned())];
    for root in roots.into_iter().flatten() {
        let lib = format!("{root}/lib");
        for python in facts.names(&lib).into_iter().filter(|name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"].map(|name| format!("{lib}/{python}/{name}")) {
                for flavour in ["cu13", "cufile"] {
                    if let Ok(path) = facts.link(&format!("{packages}/nvidia/{flavour}/lib/libcufile.so.0")) {
                        let names = facts.names(&packages);
                        let version =
                            names.iter().find_map(|name| Version::parse(name.strip_prefix("nvidia_cufile")?.split_once('-')?.1));
                        return Some(CufileLibrary { path, version });
                    }
                }
            }
        }
    }
    None
}
