//! `cargo xtask tidy`: applies the rules to the tree.

use std::path::Path;

use crate::rules::layers::{self, Reexports};
use crate::rules::{Finding, LIBRARY, RustFile, code, size, text};
use crate::tree;

/// Checks every file of the project; prints what is wrong, one `file:line: message` a line.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let names = tree::files(root)?;
    let library_root = tree::text(root, &format!("{LIBRARY}lib.rs"))?.unwrap_or_default();
    let reexports = layers::reexports(&crate::lexer::lex(&library_root));
    let (mut files, mut findings) = (0, 0);
    for name in &names {
        let Some(content) = tree::text(root, name)? else { continue };
        files += 1;
        for finding in check(name, &content, &reexports) {
            findings += 1;
            println!("{name}:{}: {}", finding.line, finding.message);
        }
    }
    if findings > 0 {
        return Err(format!("tidy: {findings} finding(s) in {files} files"));
    }
    println!("tidy: {files} files, nothing to complain about");
    Ok(())
}

/// All that is wrong with one file, in the order of its lines.
fn check(name: &str, content: &str, reexports: &Reexports) -> Vec<Finding> {
    let mut found = [text::trailing_whitespace(content), text::machine_paths(content), text::registry_hosts(content)].concat();
    if name.ends_with(".rs") {
        let file = RustFile::new(name, content);
        found.extend(layers::upward_imports(&file, reexports));
        for rule in [
            code::misplaced_unsafe,
            code::misplaced_bindings,
            code::misplaced_filesystem,
            code::leftovers,
            size::long_file,
            size::long_functions,
        ] {
            found.extend(rule(&file));
        }
    }
    found.sort_by_key(|finding| finding.line);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_come_in_the_order_of_their_lines() {
        let source = "use std::fs;\nfn a() { todo!() } \nunsafe fn b() {}\n";
        let found = check("crates/thruway/src/model/mod.rs", source, &Reexports::new());
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [1, 2, 2, 3]);
    }

    #[test]
    fn rules_for_rust_leave_other_files_alone() {
        assert_eq!(check("docs/design.md", "unsafe { todo!() }\n", &Reexports::new()), []);
    }
}
