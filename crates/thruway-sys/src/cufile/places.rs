//! Where cuFile's library may be.
//!
//! The dynamic linker is asked first, by the name that every release has and by the one that developers' packages add. What it
//! does not know is looked for in the folders of the CUDA toolkit, which does not always register them, then in those of the
//! driver's packages and containers, and last in the wheels of Python, where `pip install torch` puts the library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The names that the dynamic linker may know.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// Folders of packages and containers that the dynamic linker may not know.
const PACKAGE_FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
];

/// Folders of the wheels `nvidia-cufile` (CUDA 13) and `nvidia-cufile-cu12`, within a folder of packages.
const WHEEL_FOLDERS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cufile/lib"];

/// The names and paths to try, in order. Paths are of files that exist: an error that lists every place that could have been
/// would hide the one that matters.
pub(super) fn candidates() -> Vec<OsString> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let folders = [toolkits(&variable), PACKAGE_FOLDERS.map(PathBuf::from).to_vec(), wheels(&variable, &maps)].concat();
    let mut found: Vec<OsString> = NAMES.map(OsString::from).to_vec();
    for file in folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name))).filter(|file| file.is_file()) {
        if !found.iter().any(|have| *have == *file.as_os_str()) {
            found.push(file.into_os_string());
        }
    }
    found
}

/// Where toolkits keep libraries: the one that the environment names, the usual one, then the rest, newest first.
fn toolkits(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(PathBuf::from);
    let mut versions: Vec<PathBuf> = entries(Path::new("/usr/local"), "cuda-");
    versions.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
    let roots = named.chain([PathBuf::from("/usr/local/cuda")]).chain(versions);
    roots.flat_map(|root| ["targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib64"].map(|below| root.join(below))).collect()
}

/// Where wheels keep libraries. Which folder of packages Python uses is told by the environment that is active, by what the
/// process has mapped from such a folder (its own extension modules), and by the system's usual places.
fn wheels(variable: &dyn Fn(&str) -> Option<OsString>, maps: &str) -> Vec<PathBuf> {
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from);
    let prefixes = prefixes.chain(["/usr/local", "/usr"].map(PathBuf::from));
    let of_prefix = |prefix: PathBuf| {
        let versions = entries(&prefix.join("lib"), "python3");
        versions.into_iter().flat_map(|version| [version.join("site-packages"), version.join("dist-packages")])
    };
    let mut packages: Vec<PathBuf> = mapped_packages(maps);
    packages.extend(prefixes.flat_map(of_prefix));
    packages.into_iter().flat_map(|folder| WHEEL_FOLDERS.map(|below| folder.join(below))).collect()
}

/// The folders of Python packages from which something is mapped, by the text of `/proc/self/maps`.
fn mapped_packages(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for path in maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
        let is_packages = |folder: &&Path| folder.ends_with("site-packages") || folder.ends_with("dist-packages");
        if let Some(folder) = Path::new(path).ancestors().find(is_packages)
            && !found.iter().any(|have| have == folder)
        {
            found.push(folder.to_owned());
        }
    }
    found
}

/// The entries of a folder whose name begins so.
fn entries(folder: &Path, beginning: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(beginning)).map(|entry| entry.path()).collect()
}

/// The numbers of `cuda-12.8`.
fn version(folder: &Path) -> Vec<u32> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.trim_start_matches("cuda-").split('.').filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_environment_names_comes_before_what_is_usual_and_packages_are_known_by_what_is_mapped() {
        let variable = |name: &str| (name == "CUDA_HOME").then(|| OsString::from("/opt/cuda"));
        assert_eq!(toolkits(&variable)[0], Path::new("/opt/cuda/targets/x86_64-linux/lib"));
        let maps = "7f00-7f01 r--p 0 08:01 5   /venv/lib/python3.12/site-packages/torch/lib/libc10.so\n\
                    7f02-7f03 r--p 0 08:01 6   /venv/lib/python3.12/site-packages/thruway/_thruway.abi3.so\n\
                    7f04-7f05 rw-p 0 00:00 0   [heap]\n";
        assert_eq!(mapped_packages(maps), [Path::new("/venv/lib/python3.12/site-packages")]);
        assert_eq!(wheels(&|_| None, maps)[0], Path::new("/venv/lib/python3.12/site-packages/nvidia/cu13/lib"));
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(version(Path::new("/usr/local/cuda-12.10")) > version(Path::new("/usr/local/cuda-12.9")));
        assert!(version(Path::new("/usr/local/cuda-13.0")) > version(Path::new("/usr/local/cuda-12.10")));
    }
}
