//! The emulated machine's kernel. Those of distributions mostly come without peer-to-peer DMA, so one is built from Debian's
//! source package, as small as it can be (about 7 minutes on two cores), and kept beside cargo's output until the
//! configuration changes. `THRUWAY_P2PDMA_KERNEL` names a ready image instead.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{absent, quietly};

/// The environment variable that names a ready image.
const READY: &str = "THRUWAY_P2PDMA_KERNEL";

/// Debian's package of the kernel's source.
const PACKAGE: &str = "linux-source-6.12";

/// What is set beyond `make tinyconfig`.
const FRAGMENT: &str = include_str!("../../p2pdma/kernel.fragment");

/// What a build needs.
const PROGRAMS: [(&str, &str); 8] = [
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("xz", "xz-utils"),
    ("dpkg-deb", "dpkg"),
    ("apt-get", "apt"),
];

/// What is missing, if anything, for an image that is not ready.
pub(super) fn missing() -> Option<String> {
    if std::env::var_os(READY).is_some() {
        return None;
    }
    let header = |name: &str| Path::new("/usr/include").join(name).exists();
    absent(&PROGRAMS)
        .or_else(|| (!header("libelf.h")).then(|| "this package is missing: libelf-dev".to_owned()))
        .or_else(|| (!header("openssl/ssl.h")).then(|| "this package is missing: libssl-dev".to_owned()))
}

/// The kernel's image: the ready one, the one that was built before, or a new one.
pub(super) fn image(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    if let Some(ready) = std::env::var_os(READY) {
        let ready = root.join(ready);
        println!("the kernel is {} ({READY})", ready.display());
        return if ready.is_file() { Ok(ready) } else { Err(format!("{READY} names no file: {}", ready.display())) };
    }
    let image = folder.join(format!("bzImage-{:016x}", fingerprint(FRAGMENT)));
    if image.is_file() {
        println!("the kernel is {}, built before", image.display());
        return Ok(image);
    }
    println!("building the kernel from {PACKAGE}, which takes minutes ({READY} would name a ready one)");
    let work = folder.join("kernel");
    drop(std::fs::remove_dir_all(&work));
    let io = |error: std::io::Error| format!("cannot build the kernel in {}: {error}", work.display());
    std::fs::create_dir_all(&work).map_err(io)?;
    let built = build(&work)?;
    // Only what is whole gets the name that is looked for.
    let whole = folder.join("bzImage.new");
    std::fs::copy(built, &whole).and_then(|_| std::fs::rename(&whole, &image)).map_err(io)?;
    std::fs::remove_dir_all(&work).map_err(io)?;
    Ok(image)
}

/// Fetches the source, and builds it in `work`.
fn build(work: &Path) -> Result<PathBuf, String> {
    let archive = format!("usr/src/{PACKAGE}.tar.xz");
    let installed = Path::new("/").join(&archive);
    let archive = if installed.is_file() {
        installed
    } else {
        quietly(Command::new("apt-get").args(["download", PACKAGE]).current_dir(work))
            .map_err(|error| format!("{error}\nhint: `apt-get update` as root, or install {PACKAGE}"))?;
        quietly(Command::new("sh").args(["-c", "dpkg-deb -x *.deb . && rm *.deb"]).current_dir(work))?;
        work.join(archive)
    };
    quietly(Command::new("tar").arg("-xf").arg(archive).current_dir(work))?;
    let source = work.join(PACKAGE);
    let make = |arguments: &[&str]| quietly(Command::new("make").arg("-s").args(arguments).current_dir(&source));
    make(&["tinyconfig"])?;
    let fragment = work.join("kernel.fragment");
    std::fs::write(&fragment, FRAGMENT).map_err(|error| format!("cannot write {}: {error}", fragment.display()))?;
    quietly(Command::new("scripts/kconfig/merge_config.sh").args(["-m", ".config"]).arg(fragment).current_dir(&source))?;
    make(&["olddefconfig"])?;
    let config = std::fs::read_to_string(source.join(".config")).map_err(|error| format!("no configuration: {error}"))?;
    let wanted = FRAGMENT.lines().filter(|line| line.starts_with("CONFIG_"));
    let lost: Vec<&str> = wanted.filter(|wanted| !config.lines().any(|line| line == *wanted)).collect();
    if !lost.is_empty() {
        return Err(format!("this kernel does not take these settings: {}", lost.join(" ")));
    }
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    make(&[&format!("-j{processors}"), "bzImage"])?;
    Ok(source.join("arch/x86/boot/bzImage"))
}

/// FNV-1a: another configuration is another image.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
