//! Rules for every text file, whatever its language.

use super::Finding;

/// Folders of somebody's machine. The literals are split, or this file would break its own rule.
const MACHINE_PATHS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/ro", "ot/")];

/// Registries. A client that is told a package's name finds the registry itself, or the mirror that the machine is set up
/// for; an address written here would go round it. Split for the same reason.
const REGISTRIES: [&str; 7] = [
    concat!("crates.", "io/api"),
    concat!("static.crates.", "io"),
    concat!("index.crates.", "io"),
    concat!("pypi.", "org/simple"),
    concat!("files.python", "hosted.org"),
    concat!("registry.", "npmjs.org"),
    concat!("deb.", "debian.org"),
];

/// Finds blanks at the end of a line, carriage returns included.
pub(crate) fn trailing_whitespace(text: &str) -> Vec<Finding> {
    by_line(text, |line| (line.trim_end() != line).then(|| "whitespace at the end of the line".to_owned()))
}

/// Finds paths that exist on one machine only.
pub(crate) fn machine_paths(text: &str) -> Vec<Finding> {
    by_line(text, |line| {
        let path = MACHINE_PATHS.iter().find(|path| names_path(line, path))?;
        Some(format!("`{path}` is a path of one machine"))
    })
}

/// Finds the addresses of package registries.
pub(crate) fn registry_hosts(text: &str) -> Vec<Finding> {
    by_line(text, |line| {
        let host = REGISTRIES.iter().find(|host| line.contains(**host))?;
        Some(format!("`{host}`: a registry's address is the client's to know"))
    })
}

fn by_line(text: &str, judge: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let lines = text.split('\n').enumerate();
    lines.filter_map(|(index, line)| Some(Finding::new(index + 1, judge(line)?))).collect()
}

/// Whether `path` stands in the line as the beginning of a path: not as the middle of a longer one or of an address.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|before| before.is_alphanumeric() || "._-~*})]".contains(before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rule: fn(&str) -> Vec<Finding>, text: &str) -> Vec<usize> {
        rule(text).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn blanks_at_the_end_of_a_line_are_found() {
        assert_eq!(lines(trailing_whitespace, "a\nb \nc\t\n\n \r\n"), [2, 3, 5]);
        assert_eq!(lines(trailing_whitespace, "a\n\n  b c\n"), [0; 0]);
    }

    #[test]
    fn a_path_of_one_machine_is_found_at_its_beginning_only() {
        let [first, second] = MACHINE_PATHS;
        assert_eq!(lines(machine_paths, &format!("a\nsee {first}x and `{second}y`\nfile://{first}")), [2, 3]);
        assert_eq!(lines(machine_paths, &format!("docs{first}x {{dir}}{first} ~{second} $HOME{second}")), [0; 0]);
    }

    #[test]
    fn a_registrys_address_is_found_and_its_name_is_not() {
        for host in REGISTRIES {
            assert_eq!(lines(registry_hosts, &format!("\nhttps://{host}/v1")), [2], "{host}");
        }
        assert_eq!(lines(registry_hosts, "published on crates.io and PyPI; git+https://github.com/a/crates.io-index"), [0; 0]);
    }
}
