//! Which files make up the project.

use std::path::Path;
use std::process::Command;

/// Every file that is in the repository or about to be: tracked, or new and not ignored. Paths go from the root.
pub(crate) fn files(root: &Path) -> Result<Vec<String>, String> {
    let mut command = Command::new("git");
    command.current_dir(root).args(["ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z"]);
    // Where the clone belongs to somebody else, as in a container run by root, git asks to be told that it is wanted.
    command.env("GIT_CONFIG_COUNT", "1").env("GIT_CONFIG_KEY_0", "safe.directory").env("GIT_CONFIG_VALUE_0", "*");
    let output = command.output().map_err(|error| format!("cannot run git to list the project's files: {error}"))?;
    if !output.status.success() {
        return Err(format!("git cannot list the project's files: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    names.sort();
    Ok(names)
}

/// A file's text; nothing for a binary file, a symbolic link, or one deleted and not yet committed so.
pub(crate) fn text(root: &Path, name: &str) -> Result<Option<String>, String> {
    let path = root.join(name);
    let is_file = std::fs::symlink_metadata(&path).is_ok_and(|facts| facts.is_file());
    if !is_file {
        return Ok(None);
    }
    let bytes = std::fs::read(&path).map_err(|error| format!("cannot read {name}: {error}"))?;
    if bytes.contains(&0) {
        return Ok(None);
    }
    Ok(String::from_utf8(bytes).ok())
}
