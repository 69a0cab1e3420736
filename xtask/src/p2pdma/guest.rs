//! What the emulated machine is given: an initramfs with the `thruway` command, and a drive with the test program.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::quietly;
use crate::ci::{announce, cargo_program};

/// The machine's first program.
const INIT: &str = include_str!("../../p2pdma/init");

/// The drive's bytes, of which what is not written takes no room.
const DRIVE_BYTES: u64 = 160 << 20;

/// Builds the programs and packs the initramfs; the test program is left for [`drive`].
pub(super) fn initramfs(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let command = built(root, &["build", "-p", "thruway-cli", "--bin", "thruway", "--locked"])?;
    let tests = built(root, &["test", "-p", "thruway", "--test", "p2pdma", "--no-run", "--locked"])?;
    let tree = folder.join("initramfs");
    drop(std::fs::remove_dir_all(&tree));
    for directory in ["bin", "dev", "mnt", "proc", "sys", "tmp"] {
        make(&tree.join(directory))?;
    }
    let busybox = quietly(Command::new("sh").args(["-c", "command -v busybox"]))?;
    copy(Path::new(busybox.trim()), &tree.join("bin/busybox"))?;
    write(&tree.join("init"), INIT)?;
    quietly(Command::new("chmod").arg("755").arg(tree.join("init")))?;
    strip(&command, &tree.join("bin/thruway"))?;
    for library in libraries(&command)?.into_iter().chain(libraries(&tests)?).collect::<BTreeSet<PathBuf>>() {
        let place = tree.join(library.strip_prefix("/").unwrap_or(&library));
        place.parent().map_or(Ok(()), make)?;
        copy(&library, &place)?;
    }
    make(&folder.join("drive"))?;
    strip(&tests, &folder.join("drive/p2pdma"))?;
    let image = folder.join("initramfs.gz");
    let pack = r#"set -e; find . | cpio -o -H newc --quiet | gzip -1 >"$0""#;
    quietly(Command::new("sh").args(["-c", pack]).arg(&image).current_dir(&tree))?;
    Ok(image)
}

/// A new drive: ext4 with the test program on it, and room.
pub(super) fn drive(folder: &Path) -> Result<PathBuf, String> {
    let image = folder.join("drive.img");
    drop(std::fs::remove_file(&image));
    let sized = std::fs::File::create(&image).and_then(|file| file.set_len(DRIVE_BYTES));
    sized.map_err(|error| format!("cannot make {}: {error}", image.display()))?;
    // Blocks of a page, as on any drive that is not as small as this one.
    quietly(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-d"]).arg(folder.join("drive")).arg(&image))?;
    Ok(image)
}

/// Builds with cargo, and gives the one program that it names.
fn built(root: &Path, arguments: &[&str]) -> Result<PathBuf, String> {
    announce(&format!("cargo {}", arguments.join(" ")));
    let mut cargo = Command::new(cargo_program());
    cargo.args(arguments).args(["--message-format", "json-render-diagnostics"]).current_dir(root).env_remove("RUSTC_BOOTSTRAP");
    let messages = quietly(&mut cargo)?;
    let key = "\"executable\":\"";
    let programs: Vec<&str> =
        messages.lines().filter_map(|line| line.split_once(key)?.1.split_once('"')).map(|(program, _)| program).collect();
    match programs.as_slice() {
        [program] => Ok(PathBuf::from(program)),
        other => Err(format!("cargo named {} programs, and one was expected", other.len())),
    }
}

/// The shared libraries of a program, its loader among them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    let listed = quietly(Command::new("ldd").arg(program))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(listed.lines().filter_map(path).collect())
}

/// A program without the debug information, which is nine tenths of it.
fn strip(program: &Path, target: &Path) -> Result<(), String> {
    quietly(Command::new("strip").arg("-o").arg(target).arg(program)).map(drop)
}

fn make(directory: &Path) -> Result<(), String> {
    std::fs::create_dir_all(directory).map_err(|error| format!("cannot make {}: {error}", directory.display()))
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to).map(drop).map_err(|error| format!("cannot copy {}: {error}", from.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
