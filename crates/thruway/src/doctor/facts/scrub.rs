//! What a capture leaves out: whatever tells whose machine it is.
//!
//! Most of it is never asked for: no question is about a serial number, the name of the host, or the address of a network
//! card. What stands beside an answer all the same is taken out here, in such a way that the diagnosis stays what it was.

use super::scrub_settings::settings;
use super::{Answer, Kind, Question, Unseen};

/// Mount options whose value is an address, a name or a path of somebody's.
const PRIVATE_OPTIONS: [&str; 15] = [
    "addr=",
    "clientaddr=",
    "mountaddr=",
    "username=",
    "user=",
    "domain=",
    "lowerdir=",
    "upperdir=",
    "workdir=",
    "user_id=",
    "fsc=",
    "secret=",
    "container=",
    "mon_addr=",
    "name=",
];
/// Filesystems whose source is `HOST/NAME`.
const HOST_AND_NAME: [&str; 2] = ["wekafs", "panfs"];
/// Variables whose value the diagnosis reads; of others it asks whether they are set.
const READ: [&str; 4] = ["VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME"];
/// Where sources of packages are named, and what in a name counts.
const SOURCES: [&str; 3] = ["/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d"];
const VENDORS: [&str; 3] = ["cuda", "nvidia", "epel"];
/// So many hexadecimal digits are an identifier: of a container, of a device.
const IDENTIFIER_DIGITS: usize = 32;

/// The answer without what it should not tell. `settings_path` is where the settings of libcufile are.
pub(super) fn scrubbed(question: &Question, answer: Answer, settings_path: &str) -> Answer {
    let lines = |text: &str, change: &dyn Fn(&str) -> String| text.lines().map(|line| change(line) + "\n").collect::<String>();
    let key = question.key.as_str();
    let clean = |text: String| match (question.kind, key) {
        (Kind::File, "/proc/self/mountinfo") => lines(&text, &mount),
        (Kind::File, _) if key == settings_path => settings(&text),
        (Kind::Env, _) if !key.starts_with("CUFILE_") && !READ.contains(&key) => {
            if text.trim().is_empty() {
                text
            } else {
                "set\n".to_owned()
            }
        }
        (Kind::List, _) if SOURCES.contains(&key) => {
            text.lines().filter(|name| VENDORS.iter().any(|word| name.contains(word))).map(|name| format!("{name}\n")).collect()
        }
        // Names of files are asked for one directory at a time, none of which holds addresses; versions look like some.
        (Kind::Bytes | Kind::List | Kind::Link, _) => text,
        _ => lines(&text, &addresses),
    };
    match answer {
        Ok(text) => Ok(private(&clean(text))),
        Err(Unseen::Failed(why)) => Err(Unseen::Failed(private(&addresses(&why)))),
        answer => answer,
    }
}

/// Text without names of home directories and identifiers of containers. The same text becomes the same, so that a question
/// still fits the answer that led to it.
pub(super) fn private(text: &str) -> String {
    const HOME: &str = "/home/";
    let mut parts = text.split(HOME);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c == '/' || c == ':' || c == '"' || c.is_whitespace()).unwrap_or(part.len());
        out.push_str(HOME);
        out.push_str(if end > 0 { "user" } else { "" });
        out.push_str(&part[end..]);
    }
    identifiers(&out)
}

/// Text with long hexadecimal numbers, also such with dashes, made zeros.
fn identifiers(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit() || matches!(c, '-' | '_');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        if word.chars().filter(char::is_ascii_hexdigit).count() >= IDENTIFIER_DIGITS {
            out.extend(word.chars().map(|c| if c.is_ascii_hexdigit() { '0' } else { c }));
        } else {
            out.push_str(word);
        }
        let next = behind.find(is_part).unwrap_or(behind.len());
        out.push_str(&behind[..next]);
        rest = &behind[next..];
    }
    out
}

/// A line of the mount table: `host:/export` becomes `server:/export`, and some options lose their value. Of Lustre's servers
/// the networks stay.
fn mount(line: &str) -> String {
    let options = |text: &str| {
        let keep = |option: &&str| !PRIVATE_OPTIONS.iter().any(|private| option.starts_with(private));
        text.split(',').filter(keep).collect::<Vec<&str>>().join(",")
    };
    let Some((left, right)) = line.split_once(" - ") else { return String::new() };
    let mut fields = right.splitn(3, ' ');
    let (Some(kind), Some(source)) = (fields.next(), fields.next()) else { return String::new() };
    let source = match source.split_once(":/") {
        Some((servers, export)) => {
            let networks = servers.split([':', ',']).filter_map(|server| server.split_once('@'));
            let servers: Vec<String> = networks.map(|(_, network)| format!("server@{network}")).collect();
            let servers = if kind == "lustre" && !servers.is_empty() { servers.join(":") } else { "server".to_owned() };
            format!("{servers}:/{export}")
        }
        None if source.starts_with("//") => "//server".to_owned(),
        None if HOST_AND_NAME.contains(&kind) => {
            source.split_once('/').map_or_else(|| "server".to_owned(), |(_, name)| format!("server/{name}"))
        }
        None => source.to_owned(),
    };
    let right = format!("{kind} {} {}", source, options(fields.next().unwrap_or_default()));
    format!("{left} - {}", addresses(&right)).trim_end().to_owned()
}

/// Text with each IP address, hardware address and UUID replaced. A PCI address (`0000:41:00.0`) is none of them.
fn addresses(line: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit() || matches!(c, '.' | ':' | '-');
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(start) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        let word = &rest[start..];
        let end = word.find(|c| !is_part(c)).unwrap_or(word.len());
        let before = out.chars().chain(rest[..start].chars()).next_back();
        let after = word[end..].chars().next();
        out.push_str(&rest[..start]);
        let is_whole = !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric);
        out.push_str(if is_whole { stand_in(&word[..end]) } else { &word[..end] });
        rest = &word[end..];
    }
    out.push_str(rest);
    out
}

fn stand_in(word: &str) -> &str {
    let core = word.trim_end_matches(['.', ':', '-']);
    let parts = |mark: char| core.split(mark).collect::<Vec<&str>>();
    let is_hex = |part: &&str, length: usize| part.len() == length && part.chars().all(|c| c.is_ascii_hexdigit());
    let dots = parts('.');
    if dots.len() == 4 && dots.iter().all(|part| part.parse::<u8>().is_ok()) {
        return "192.0.2.1";
    }
    let dashes = parts('-');
    let lengths = [8, 4, 4, 4, 12];
    if dashes.len() == 5 && dashes.iter().zip(lengths).all(|(part, length)| is_hex(part, length)) {
        return "00000000-0000-0000-0000-000000000000";
    }
    let colons = parts(':');
    if colons.len() == 6 && colons.iter().all(|part| is_hex(part, 2)) {
        return "00:00:00:00:00:00";
    }
    // An IPv6 address has a pair of colons or eight groups; a PCI address has neither.
    let is_group = |part: &&str| part.len() <= 4 && part.chars().all(|c| c.is_ascii_hexdigit());
    if colons.len() >= 3 && colons.iter().all(is_group) && (core.contains("::") || colons.len() == 8) {
        return "2001:db8::1";
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean(key: &str, text: &str) -> String {
        scrubbed(&Question::new(Kind::File, key), Ok(text.to_owned()), "/etc/cufile.json").expect("text")
    }

    #[test]
    fn addresses_and_identifiers_are_replaced_and_the_rest_stays() {
        let text =
            "addr 10.1.2.3 (fe80::1:2), 0c:42:a1:00:00:01 GPU-0a1b2c3d-0000-1111-2222-333344445555 at 0000:41:00.0 v580.159.04";
        assert_eq!(
            clean("/x", text),
            "addr 192.0.2.1 (2001:db8::1), 00:00:00:00:00:00 GPU-0a1b2c3d-0000-1111-2222-333344445555 at 0000:41:00.0 v580.159.04\n"
                .replace("0a1b2c3d-0000-1111-2222-333344445555", "00000000-0000-0000-0000-000000000000")
        );
        for kept in ["0000:41:00.0", "8.0 GT/s PCIe", "2.28.4", "259:0", "/dev/nvme0n1", "6.18.44-fc-v1098", "1.15.1.6x"] {
            assert_eq!(clean("/x", kept), format!("{kept}\n"));
        }
    }

    #[test]
    fn servers_and_paths_of_mounts_are_left_out() {
        let line = "40 1 0:50 / /mnt/data rw - nfs4 nas7.corp:/export/a rw,proto=rdma,addr=10.0.0.7,clientaddr=10.0.0.8";
        assert_eq!(clean("/proc/self/mountinfo", line), "40 1 0:50 / /mnt/data rw - nfs4 server:/export/a rw,proto=rdma\n");
        let line = "40 1 0:50 / /mnt rw - lustre mds1.corp@o2ib:10.0.0.2@o2ib1:/fs rw";
        assert_eq!(clean("/proc/self/mountinfo", line), "40 1 0:50 / /mnt rw - lustre server@o2ib:server@o2ib1:/fs rw\n");
        let line = "1 0 0:9 / / rw - overlay overlay rw,lowerdir=/home/me/a:/b,upperdir=/c,workdir=/d,metacopy=on";
        assert_eq!(clean("/proc/self/mountinfo", line), "1 0 0:9 / / rw - overlay overlay rw,metacopy=on\n");
    }

    #[test]
    fn users_containers_and_hosts_are_nobodys() {
        let line = "9 1 0:5 /kubepods/pod0a1b2c3d_0000_1111_2222_333344445555/cri-containerd-0123456789abcdef0123456789abcdef.scope \
                    /home/alice/data rw - wekafs backend01.corp/default rw,container=client_host17";
        let clean_line = clean("/proc/self/mountinfo", line);
        for private in ["alice", "0a1b2c3d", "0123456789abcdef", "backend01", "host17"] {
            assert!(!clean_line.contains(private), "{private}: {clean_line}");
        }
        assert!(clean_line.contains("/home/user/data rw - wekafs server/default rw"), "{clean_line}");
        let env = |name: &str, value: &str| {
            scrubbed(&Question::new(Kind::Env, name), Ok(format!("{value}\n")), "/etc/cufile.json").expect("text")
        };
        assert_eq!(env("VIRTUAL_ENV", "/home/alice/venv"), "/home/user/venv\n");
        assert_eq!(env("LD_LIBRARY_PATH", "/home/alice/a:/home/bob/b"), "/home/user/a:/home/user/b\n");
        assert_eq!(env("APPTAINER_CONTAINER", "/images/of-alice.sif"), "set\n");
        let sources = Question::new(Kind::List, "/etc/yum.repos.d");
        let names = scrubbed(&sources, Ok("corp-mirror.repo\ncuda-rhel9.repo\n".to_owned()), "").expect("text");
        assert_eq!(names, "cuda-rhel9.repo\n");
    }
}
