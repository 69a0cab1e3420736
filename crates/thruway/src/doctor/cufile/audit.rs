//! Judging a `cufile.json`: each key, and what several mean together.

use std::collections::HashSet;

use super::jsonc::{Node, Value, parse};
use super::schema::{Shape, find, is_section, meant_by_label, places, right_place};
use crate::base::Result;
use crate::base::error::printable;

/// Something to say about one place of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// The line, from 1.
    pub line: usize,
    /// The key, with those above it.
    pub path: String,
    /// Whether what the file says is not what happens, so that it must be repaired; else it is worth a look.
    pub is_fault: bool,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

/// The settings that decide which way bytes go; `None` where the file does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `properties.allow_compat_mode`
    pub allow_compat: Option<bool>,
    /// `properties.force_compat_mode`
    pub force_compat: Option<bool>,
    /// `properties.vanilla_posix_io_mode`
    pub vanilla_posix: Option<bool>,
    /// `properties.use_pci_p2pdma`
    pub use_p2pdma: Option<bool>,
    /// `block.nvme.use_pci_p2pdma`
    pub nvme_p2pdma: Option<bool>,
    /// `block.raid.use_pci_p2pdma`
    pub raid_p2pdma: Option<bool>,
    /// What is refused the direct path: words of `denylist.drivers`, `devices`, `mounts` and `filesystems`.
    pub denied: Vec<String>,
}

/// What a file says and what is wrong with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// What is wrong, in the order of the lines.
    pub remarks: Vec<Remark>,
    /// The settings that decide.
    pub settings: Settings,
}

impl Audit {
    /// Whether something must be repaired.
    pub fn has_fault(&self) -> bool {
        self.remarks.iter().any(|remark| remark.is_fault)
    }
}

/// Judges the text of a `cufile.json`.
///
/// # Errors
/// [`Malformed`](crate::ErrorKind::Malformed) for what is no JSON with comments, with the line.
pub fn audit(text: &str) -> Result<Audit> {
    let root = parse(text)?;
    let lines = text.match_indices('\n').map(|(at, _)| at).collect();
    let mut walk = Walk { text, lines, remarks: Vec::new() };
    if matches!(root.value, Value::Object(_)) {
        walk.object(&root, "");
    } else {
        walk.remark(&root, "", true, "the file is no object", "write it as { … }");
    }
    let settings = settings(&root);
    walk.together(&root, &settings);
    let mut remarks = walk.remarks;
    remarks.sort_by_key(|remark| remark.line);
    Ok(Audit { remarks, settings })
}

/// The value at a path, if it is in force.
pub(super) fn at<'a>(root: &'a Node, path: &str) -> Option<&'a Node> {
    path.split('.').try_fold(root, |node, key| node.get(key))
}

fn settings(root: &Node) -> Settings {
    let bool_at = |path: &str| match at(root, path).map(|node| &node.value) {
        Some(Value::Bool(is_so)) => Some(*is_so),
        _ => None,
    };
    let lists = ["drivers", "devices", "mounts", "filesystems"].iter().flat_map(|list| {
        let of = |section: &str| at(root, &format!("{section}.{list}"));
        of("denylist").or_else(|| of("blacklist"))
    });
    let words = lists.flat_map(|node| match &node.value {
        Value::List(nodes) => nodes.as_slice(),
        _ => &[],
    });
    let denied = words.filter_map(|node| if let Value::Text(word) = &node.value { Some(word.clone()) } else { None });
    Settings {
        allow_compat: bool_at("properties.allow_compat_mode"),
        force_compat: bool_at("properties.force_compat_mode"),
        vanilla_posix: bool_at("properties.vanilla_posix_io_mode"),
        use_p2pdma: bool_at("properties.use_pci_p2pdma"),
        nvme_p2pdma: bool_at("block.nvme.use_pci_p2pdma"),
        raid_p2pdma: bool_at("block.raid.use_pci_p2pdma"),
        denied: denied.collect(),
    }
}

/// So many of the places where a name is known are named.
const PLACES_SHOWN: usize = 3;

/// One walk through the file. Whoever wrote it, it takes time in proportion to its length.
struct Walk<'a> {
    text: &'a str,
    /// Where its lines end.
    lines: Vec<usize>,
    remarks: Vec<Remark>,
}

impl Walk<'_> {
    fn remark(&mut self, node: &Node, path: &str, is_fault: bool, what: impl Into<String>, remedy: impl Into<String>) {
        let line = self.lines.partition_point(|end| *end < node.span.start) + 1;
        self.remarks.push(Remark { line, path: printable(path), is_fault, what: what.into(), remedy: remedy.into() });
    }

    fn object(&mut self, object: &Node, above: &str) {
        let mut keys = HashSet::new();
        for member in object.members() {
            let path = if above.is_empty() { member.key.clone() } else { format!("{above}.{}", member.key) };
            let node = &member.node;
            if !keys.insert(member.key.as_str()) {
                self.remark(
                    node,
                    &path,
                    true,
                    "the key stands there twice",
                    format!("keep one of the two {} in cufile.json", printable(&path)),
                );
            }
            // With a dot in it a name looks like a path, and is none.
            if member.key.contains('.') {
                self.dotted(node, &path, &member.key);
                continue;
            }
            match (is_section(&path), &node.value) {
                (true, Value::Object(_)) => self.object(node, &path),
                (true, _) => self.remark(node, &path, true, "this must be an object", "write it as { … }"),
                (false, _) => match find(&path) {
                    Some(key) => self.value(node, &path, key.shape),
                    None => self.unknown(node, &path),
                },
            }
        }
    }

    /// A name with dots where one object in another is meant.
    fn dotted(&mut self, node: &Node, path: &str, name: &str) {
        let placed = misplaced(node, path);
        if placed.is_empty() {
            return self.unknown(node, path);
        }
        let name = printable(name);
        for (node, right, path) in placed {
            let what =
                format!("\"{name}\" is one name with dots in it, so libcufile leaves it out: {right} is a key inside of objects");
            let object = right.split('.').rev().fold("…".to_owned(), |inner, key| format!("{{\"{key}\": {inner}}}"));
            self.remark(node, &path, true, what, format!("write it as {object}"));
        }
    }

    /// A key that the library does not know there. Where all of an object is in the wrong place, its keys are named.
    fn unknown(&mut self, node: &Node, path: &str) {
        if let Some(key) = meant_by_label(path) {
            let what = format!("libcufile prints this name and reads it nowhere: {key} is the key");
            return self.remark(node, path, false, what, format!("set {key}, and remove it"));
        }
        let placed = misplaced(node, path);
        let known = places(path);
        if placed.is_empty() && !known.is_empty() && !matches!(node.value, Value::Object(_)) {
            let more = if known.len() > PLACES_SHOWN { ", among others" } else { "" };
            let shown = known.iter().take(PLACES_SHOWN).copied().collect::<Vec<&str>>().join(", ");
            let what = format!("it does not belong here, so libcufile leaves it out: keys of this name are {shown}{more}");
            let remedy = format!("move {} to the one that is meant", printable(path));
            return self.remark(node, path, true, what, remedy);
        }
        if placed.is_empty() {
            return self.remark(node, path, false, "libcufile knows no such key and leaves it out", "remove it");
        }
        for (node, right, path) in placed {
            let what = format!("it does not belong here, so libcufile leaves it out: it belongs at {right}");
            let remedy = format!("move {path} to {right}");
            self.remark(node, &path, true, what, remedy);
        }
    }

    fn value(&mut self, node: &Node, path: &str, shape: Shape) {
        let wrong = match (shape, &node.value) {
            (Shape::Bool, Value::Bool(_)) | (Shape::Text, Value::Text(_)) => None,
            (Shape::Free, Value::Object(_) | Value::List(_)) | (Shape::Any, _) => None,
            (Shape::List, Value::List(nodes)) => {
                let all = nodes.iter().all(|node| matches!(node.value, Value::Text(_) | Value::Number(_)));
                (!all).then(|| "it must hold texts or numbers only".to_owned())
            }
            (Shape::Number(least, most, multiple), Value::Number(number)) => number_wrong(*number, least, most, multiple),
            (Shape::OneOf(words), Value::Text(word)) => {
                let is_one = words.iter().any(|known| known.eq_ignore_ascii_case(word));
                (!is_one).then(|| format!("it must be one of {}", words.join(", ")))
            }
            (Shape::Texts, Value::List(nodes)) => {
                let all = nodes.iter().all(|node| matches!(node.value, Value::Text(_)));
                (!all).then(|| "it must hold texts only".to_owned())
            }
            (Shape::Numbers, Value::List(nodes)) => {
                let all = nodes.iter().all(|node| matches!(node.value, Value::Number(n) if n >= 1.0 && n.fract() == 0.0));
                (!all).then(|| "it must hold whole numbers above 0 only".to_owned())
            }
            _ => Some(format!("it must be {}", expected(shape))),
        };
        if let Some(wrong) = wrong {
            let have = printable(self.text.get(node.span.clone()).unwrap_or_default());
            self.remark(
                node,
                path,
                true,
                format!("{have} cannot be: {wrong}"),
                format!("correct {} in cufile.json, or remove it for what is built in", printable(path)),
            );
        }
    }

    /// What several keys mean together.
    fn together(&mut self, root: &Node, settings: &Settings) {
        let mut say = |path: &str, is_fault: bool, what: &str, remedy: &str| {
            if let Some(node) = at(root, path) {
                self.remark(node, path, is_fault, what, remedy);
            }
        };
        let on = |setting: Option<bool>| setting == Some(true);
        if on(settings.force_compat) && settings.allow_compat == Some(false) {
            let what = "it contradicts allow_compat_mode false: one forces the way through the host, the other forbids it";
            say("properties.force_compat_mode", true, what, "set force_compat_mode to false");
        }
        let label = "properties.use_compat_mode";
        let labelled = match at(root, label).map(|node| &node.value) {
            Some(Value::Bool(is_so)) => Some(*is_so),
            _ => None,
        };
        if labelled.zip(settings.allow_compat).is_some_and(|(one, other)| one != other) {
            say(label, false, "it says the opposite of allow_compat_mode, which is in force", "remove it");
        }
        let pair = ("properties.use_pci_p2pdma", "block.nvme.use_pci_p2pdma");
        if on(settings.use_p2pdma) && !on(settings.nvme_p2pdma) {
            say(pair.0, false, "alone it is not enough for NVMe drives", "set block.nvme.use_pci_p2pdma to true too");
        }
        if on(settings.nvme_p2pdma) && !on(settings.use_p2pdma) {
            say(pair.1, false, "alone it does nothing", "set properties.use_pci_p2pdma to true too");
        }
        let number = |path: &str| match at(root, path).map(|node| &node.value) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        };
        let length = |path: &str| match at(root, path).map(|node| &node.value) {
            Some(Value::List(nodes)) => Some(nodes.len()),
            _ => None,
        };
        let (cache, pinned) = ("properties.max_device_cache_size_kb", "properties.max_device_pinned_mem_size_kb");
        if number(cache).zip(number(pinned)).is_some_and(|(cache, pinned)| pinned < cache) {
            say(pinned, true, "it must hold the cache too, and is smaller than max_device_cache_size_kb", "raise it");
        }
        for (sizes, counts) in [
            ("properties.posix_pool_slab_size_kb", "properties.posix_pool_slab_count"),
            ("properties.gpu_bounce_buffer_slab_config.slab_size_kb", "properties.gpu_bounce_buffer_slab_config.slab_count"),
        ] {
            if length(sizes).zip(length(counts)).is_some_and(|(sizes, counts)| sizes != counts) {
                say(counts, true, "it must have one count for each size", "give both lists the same length");
            }
        }
        if number("execution.max_io_threads") == Some(0.0) {
            let what = "without threads neither parallel requests nor the stream functions work";
            say("execution.max_io_threads", false, what, "set it to 4");
        }
    }
}

/// The keys at and below a node that are known elsewhere: their values, the right places, and their paths, made printable.
fn misplaced<'a>(node: &'a Node, path: &str) -> Vec<(&'a Node, &'static str, String)> {
    fn look<'a>(node: &'a Node, path: &mut String, found: &mut Vec<(&'a Node, &'static str, String)>) {
        if !matches!(node.value, Value::Object(_)) {
            found.extend(right_place(path).map(|right| (node, right, printable(path))));
        }
        for member in node.members() {
            let above = path.len();
            path.push('.');
            path.push_str(&member.key);
            look(&member.node, path, found);
            path.truncate(above);
        }
    }
    let mut found = Vec::new();
    look(node, &mut path.to_owned(), &mut found);
    found
}

fn number_wrong(number: f64, least: i64, most: i64, multiple: i64) -> Option<String> {
    // Both bounds are far below 2⁵³, so they are exact.
    if number.fract() != 0.0 || number < least as f64 || number > most as f64 {
        return Some(format!("it must be a whole number from {least} to {most}"));
    }
    (number % multiple as f64 != 0.0).then(|| format!("it must be a multiple of {multiple}"))
}

fn expected(shape: Shape) -> String {
    match shape {
        Shape::Bool => "true or false".to_owned(),
        Shape::Number(least, most, _) => format!("a whole number from {least} to {most}"),
        Shape::Text => "a text".to_owned(),
        Shape::OneOf(words) => format!("one of {}", words.join(", ")),
        Shape::Texts => "a list of texts".to_owned(),
        Shape::Numbers => "a list of whole numbers".to_owned(),
        Shape::List => "a list of texts or numbers".to_owned(),
        Shape::Free | Shape::Any => "an object or a list".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn faults(text: &str) -> Vec<(usize, String, bool)> {
        let audit = audit(text).expect("JSON");
        audit.remarks.into_iter().map(|remark| (remark.line, remark.path, remark.is_fault)).collect()
    }

    #[test]
    fn a_good_file_has_nothing_to_remark() {
        let text = "{ // strict\n\"logging\": {\"level\": \"error\"}, \"properties\": {\"allow_compat_mode\": false,\n\
                    \"use_pci_p2pdma\": true, \"max_direct_io_size_kb\": 16384, \"posix_pool_slab_size_kb\": [4, 1024]},\n\
                    \"block\": {\"nvme\": {\"use_pci_p2pdma\": true}}, \"denylist\": {\"mounts\": [\"/data\"]}}";
        assert_eq!(faults(text), []);
        let settings = audit(text).expect("JSON").settings;
        assert_eq!((settings.allow_compat, settings.use_p2pdma, settings.nvme_p2pdma), (Some(false), Some(true), Some(true)));
        assert_eq!(settings.denied, ["/data"]);
    }

    #[test]
    fn keys_in_the_wrong_place_are_faults_and_unknown_ones_are_not() {
        let text =
            "{\"fs\": {\n\"block\": {\"nvme\": {\"use_pci_p2pdma\": true}}},\n\"allow_compat_mode\": false,\n\"colour\": 1}";
        let found = faults(text);
        assert_eq!(found[0], (2, "fs.block.nvme.use_pci_p2pdma".to_owned(), true));
        assert_eq!(found[1], (3, "allow_compat_mode".to_owned(), true));
        assert_eq!(found[2], (4, "colour".to_owned(), false));
        assert_eq!(audit(text).expect("JSON").settings, Settings::default(), "what is left out is not in force");
    }

    #[test]
    fn names_with_dots_are_no_paths_and_labels_are_no_keys() {
        let text = "{\"properties.allow_compat_mode\": false,\n\"block.nvme\": {\"use_pci_p2pdma\": true},\n\
                    \"fs\": {\"nfs\": {\"mount_table\": {\"host.corp:/x\": {}}}}}";
        let found = faults(text);
        let paths: Vec<(usize, &str, bool)> =
            found.iter().map(|(line, path, is_fault)| (*line, path.as_str(), *is_fault)).collect();
        assert_eq!(paths, [(1, "properties.allow_compat_mode", true), (2, "block.nvme.use_pci_p2pdma", true)]);
        assert_eq!(audit(text).expect("JSON").settings, Settings::default());

        let text = "{\"properties\": {\"allow_compat_mode\": false,\n\"use_compat_mode\": true}}";
        let judged = audit(text).expect("JSON");
        assert_eq!(judged.settings.allow_compat, Some(false));
        assert!(judged.remarks.iter().any(|remark| remark.what.contains("the opposite of allow_compat_mode")), "{judged:?}");
        let judged = audit("{\"properties\": {\"use_compat_mode\": false}}").expect("JSON");
        assert_eq!((judged.settings.allow_compat, judged.remarks.len()), (None, 1), "nothing reads it");
        let known = "{\"denylist\": {\"fsids\": [1]}, \"miscellaneous\": {\"enable_static_config\": true, \"rcu_library_used\": 1},\n\
                     \"properties\": {\"rdma_failback_enabled\": true, \"rdma_io_retry_count\": 3}}";
        assert_eq!(faults(known), []);
    }

    #[test]
    fn types_ranges_and_contradictions_are_found() {
        let text = "{\"properties\": {\n\"allow_compat_mode\": \"false\",\n\"io_batchsize\": 0,\n\"max_direct_io_size_kb\": 100,\n\
                    \"io_priority\": \"urgent\",\n\"posix_pool_slab_count\": [1, -2]},\n\"execution\": []}";
        let lines: Vec<usize> = faults(text).into_iter().filter(|(_, _, is_fault)| *is_fault).map(|(line, _, _)| line).collect();
        assert_eq!(lines, [2, 3, 4, 5, 6, 7]);
        let text = "{\"properties\": {\"allow_compat_mode\": false, \"force_compat_mode\": true, \"force_compat_mode\": true,\n\
                    \"max_device_cache_size_kb\": 100, \"max_device_pinned_mem_size_kb\": 50,\n\
                    \"posix_pool_slab_size_kb\": [4], \"posix_pool_slab_count\": [1, 2]}}";
        assert_eq!(faults(text).len(), 4);
    }

    #[test]
    fn a_hundred_thousand_keys_are_judged_in_a_moment() {
        let keys = |value: &str| (0..90_000).map(|key| format!("\"{key:x}\":{value}")).collect::<Vec<String>>().join(",\n");
        let long = "k".repeat(300_000);
        let same = vec!["\"io_batchsize\":0"; 35_000].join(",");
        for text in [
            format!("{{{}}}", keys("0")),
            format!("{{\"properties\":{{{same}}}}}"),
            format!("{{\"{long}\":{{{same}}}}}"),
            format!("{{\"{}\":{{{same}}}}}", "k.".repeat(150_000)),
            format!("{{\"{}\":1}}", "io_batchsize.".repeat(70_000)),
        ] {
            let begun = std::time::Instant::now();
            let judged = audit(&text).expect("JSON");
            assert!(!judged.remarks.is_empty());
            assert!(begun.elapsed().as_secs() < 2, "{:?} for {}…", begun.elapsed(), &text[..20]);
        }
    }

    #[test]
    fn what_is_too_long_or_no_utf8_is_malformed() {
        let long = format!("{{}}{}", " ".repeat(super::super::BYTES_MAX));
        assert!(audit(&long).expect_err("too long").message().contains("longer than 1 MiB"));
        let error = audit(&String::from_utf8_lossy(b"{\n// caf\xe9\n}")).expect_err("Latin-1");
        assert!(error.message().contains("UTF-8") && error.context("line") == Some("2"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[{}\\[\\]\",:a-z_0-9 \n]{0,80}") {
            drop(audit(&text));
        }
    }
}
