//! Imports point down: a module of the library may use those below it and none above or beside it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::paths::{Path, paths};
use super::{Finding, RustFile};
use crate::lexer::{Kind, Token, group_end};

/// The arrows of the layering, each module with those that it may use directly. A level may be skipped, so a module may
/// use whatever can be reached along the arrows.
const ARROWS: [(&str, &[&str]); 14] = [
    ("session", &["model", "checkpoint", "dataset", "blockstore", "doctor"]),
    ("model", &["format", "transfer"]),
    ("checkpoint", &["model"]),
    ("dataset", &["format", "transfer"]),
    ("blockstore", &["transfer"]),
    ("transfer", &["io"]),
    ("doctor", &["io", "storage", "cuda"]),
    ("io", &["memory", "storage"]),
    ("memory", &["cuda", "telemetry"]),
    ("storage", &["telemetry"]),
    ("cuda", &["telemetry"]),
    ("format", &["base"]),
    ("telemetry", &["base"]),
    ("base", &[]),
];

/// What the crate's root re-exports: each name and the module that it comes from. A path like `crate::Error` is judged
/// as the path that it stands for, or re-exports would be a hole in the rule.
pub(crate) type Reexports = BTreeMap<String, String>;

/// Reads the re-exports out of `lib.rs`.
pub(crate) fn reexports(root: &[Token<'_>]) -> Reexports {
    let places = paths(root).into_iter().filter_map(|path| {
        let inside = match path.parts[0] {
            "crate" | "self" => &path.parts[1..],
            _ => &path.parts[..],
        };
        let module = inside.first().filter(|module| inside.len() > 1 && is_module(module))?;
        Some((path.name.to_owned(), (*module).to_owned()))
    });
    places.collect()
}

/// Finds the imports of a library file that do not point down.
pub(crate) fn upward_imports(file: &RustFile<'_>, reexports: &Reexports) -> Vec<Finding> {
    let Some(below) = file.in_library().filter(|below| *below != "lib.rs") else { return Vec::new() };
    let own = module_path(below);
    let Some(from) = own.first().copied() else { return Vec::new() };
    if !is_module(from) {
        return vec![Finding::new(1, format!("module `{from}` has no place in the table of layers (xtask/src/rules/layers.rs)"))];
    }
    let tokens = &file.product.tokens;
    let inline = inline_modules(tokens);
    let judge_one = |path: &Path<'_>| {
        let depth = own.len() + inline.iter().filter(|range| range.contains(&path.at)).count();
        judge(path, from, depth, reexports)
    };
    paths(tokens).iter().filter_map(judge_one).collect()
}

/// Where the modules lie that are written out in the file: each is one `super` more to the root.
fn inline_modules(tokens: &[Token<'_>]) -> Vec<Range<usize>> {
    let heads = tokens.windows(3).enumerate();
    let heads = heads.filter(|(_, head)| head[0].is_word("mod") && head[1].kind == Kind::Word && head[2].is_mark("{"));
    heads.map(|(at, _)| at..group_end(tokens, at + 2)).collect()
}

fn judge(path: &Path<'_>, from: &str, depth: usize, reexports: &Reexports) -> Option<Finding> {
    let name = name_at_root(path, depth)?;
    let to = if is_module(name) { Some(name) } else { reexports.get(name).map(String::as_str) };
    let spelt = path.parts.join("::");
    match to {
        Some(to) if to == from || may_use(from, to) => None,
        Some(to) => Some(Finding::new(path.line, format!("`{spelt}`: `{from}` may not use `{to}`, imports point down only"))),
        // An exported macro lies at the root whatever module it was written in.
        None if path.is_macro => None,
        None => Some(Finding::new(path.line, format!("`{spelt}`: name the module that holds it, so that its layer can be seen"))),
    }
}

/// The first name below the crate's root, if the path goes there: through `crate`, or up through enough `super`s.
fn name_at_root<'a>(path: &Path<'a>, depth: usize) -> Option<&'a str> {
    let parts = match path.parts.split_first()? {
        (&"self", rest) => rest,
        _ => &path.parts,
    };
    let rest = match *parts.first()? {
        "crate" => &parts[1..],
        "super" => {
            let supers = parts.iter().take_while(|part| **part == "super").count();
            if supers < depth {
                return None;
            }
            &parts[supers..]
        }
        _ => return None,
    };
    rest.first().copied().filter(|name| *name != "self")
}

/// `io/engine/posix.rs` is `[io, engine, posix]`, `io/mod.rs` is `[io]`.
fn module_path(below: &str) -> Vec<&str> {
    let stem = below.strip_suffix(".rs").unwrap_or(below);
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    stem.split('/').collect()
}

fn is_module(name: &str) -> bool {
    ARROWS.iter().any(|(module, _)| *module == name)
}

fn may_use(from: &str, to: &str) -> bool {
    let direct = ARROWS.iter().find(|(module, _)| *module == from).map_or(&[][..], |(_, down)| down);
    direct.iter().any(|next| *next == to || may_use(next, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::lex;

    fn check(path: &str, source: &str) -> Vec<usize> {
        let reexports = reexports(&lex("pub use base::{Error, units::ByteSize as Size};\npub use crate::session::Session;"));
        upward_imports(&RustFile::new(path, source), &reexports).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn an_upward_import_is_found_and_a_downward_one_is_not() {
        assert_eq!(check("crates/thruway/src/io/policy.rs", "use crate::base;\nuse crate::transfer::plan;"), [2]);
        assert_eq!(check("crates/thruway/src/transfer/plan.rs", "use crate::io::policy;\nuse crate::memory::Ring;"), [0; 0]);
        assert_eq!(check("crates/thruway/src/session.rs", "use crate::{model, doctor, cuda, telemetry};"), [0; 0]);
    }

    #[test]
    fn siblings_may_not_use_each_other_unless_an_arrow_is_drawn() {
        assert_eq!(check("crates/thruway/src/storage/mod.rs", "use crate::cuda::Context;"), [1]);
        assert_eq!(check("crates/thruway/src/model/mod.rs", "fn f() { crate::checkpoint::save() }"), [1]);
        assert_eq!(check("crates/thruway/src/doctor/mod.rs", "use crate::{io, storage, cuda};"), [0; 0]);
        assert_eq!(check("crates/thruway/src/doctor/mod.rs", "use crate::transfer;"), [1]);
    }

    #[test]
    fn the_lowest_modules_reach_no_further_than_their_arrows() {
        assert_eq!(check("crates/thruway/src/base/error.rs", "use crate::telemetry;\nuse crate::base::units;"), [1]);
        let source = "use crate::base;\nuse crate::telemetry;\nuse crate::storage;";
        assert_eq!(check("crates/thruway/src/format/index.rs", source), [2, 3]);
        assert_eq!(check("crates/thruway/src/cuda/mod.rs", "use crate::{base, telemetry};"), [0; 0]);
    }

    #[test]
    fn the_path_up_through_super_is_followed_to_the_root() {
        assert_eq!(check("crates/thruway/src/io/policy.rs", "use super::super::transfer;\nuse super::engine;"), [1]);
        assert_eq!(check("crates/thruway/src/io/mod.rs", "use super::transfer;\nuse super::memory;"), [1]);
        let source = "mod inner { use super::Own; use super::super::memory;\nuse super::super::transfer; }\nuse super::transfer;";
        assert_eq!(check("crates/thruway/src/io/mod.rs", source), [2, 3]);
    }

    #[test]
    fn a_reexport_is_judged_as_what_it_stands_for() {
        assert_eq!(check("crates/thruway/src/io/mod.rs", "use crate::{Error, Size};\nuse crate::Session;"), [2]);
        assert_eq!(check("crates/thruway/src/io/mod.rs", "use crate::Unheard;\ncrate::some_macro!();"), [1]);
    }

    #[test]
    fn tests_comments_and_strings_may_name_anything() {
        let source =
            "// use crate::session;\nconst A: &str = \"crate::session\";\n#[cfg(test)]\nmod tests { use crate::session; }";
        assert_eq!(check("crates/thruway/src/base/mod.rs", source), [0; 0]);
        assert_eq!(check("crates/thruway/src/base/tests.rs", "use crate::session;"), [0; 0]);
    }

    #[test]
    fn visibility_is_no_import() {
        assert_eq!(check("crates/thruway/src/base/mod.rs", "pub(crate) fn f() {}\npub(in crate::base) fn g() {}"), [0; 0]);
    }

    #[test]
    fn a_new_module_must_be_given_a_place() {
        assert_eq!(check("crates/thruway/src/helpers.rs", ""), [1]);
        assert_eq!(check("crates/thruway-cli/src/helpers.rs", "use crate::session;"), [0; 0]);
        assert_eq!(check("crates/thruway/src/lib.rs", "use crate::session;"), [0; 0]);
    }
}
