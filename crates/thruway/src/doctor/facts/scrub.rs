//! What a capture leaves out: whatever tells whose machine it is.
//!
//! Most of it is never asked for: no question is about a serial number, the name of the host, or the address of a network
//! card. What stands beside an answer all the same is taken out here, in such a way that the diagnosis stays what it was.

use std::hash::{BuildHasher, RandomState};
use std::os::unix::ffi::OsStrExt;
use std::sync::LazyLock;

use super::scrub_settings::settings;
use super::{Answer, Kind, Question, Unseen};
use crate::doctor::parse::hexadecimal;
use crate::storage::probe::text_of;

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
const READ: [&str; 5] = ["VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "CUDA_HOME", "HOME"];
/// Where home directories lie, named after their users.
const HOMES: [&str; 4] = ["/home/", "/homes/", "/users/", "/Users/"];
/// Where homes of services lie, among files of the system that have the same names everywhere.
const SYSTEM: [&str; 9] = ["/dev/", "/etc/", "/lib/", "/opt/", "/proc/", "/run/", "/sys/", "/usr/", "/var/"];
/// Where the device mapper's volumes are named: those of LVM after the host, by installers.
const MAPPER: &str = "/dev/mapper/";
/// What udev puts before the hardware address after which it names an interface or an RDMA device, and the digits of one.
const CARDS: [&str; 7] = ["enx", "wlx", "wwx", "ibx", "rocex", "iwx", "opax"];
const CARD_DIGITS: usize = 12;
/// Where sources of packages are named, and what in a name counts.
const SOURCES: [&str; 3] = ["/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d"];
const VENDORS: [&str; 3] = ["cuda", "nvidia", "epel"];
/// So many hexadecimal digits are an identifier: of a container, of a device.
const IDENTIFIER_DIGITS: usize = 32;
/// The vendor of UEFI's own variables, such as `SecureBoot`: the same on all machines, and part of a name that is asked for.
const UEFI: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// The answer without what it should not tell. `settings_path` is where the settings of libcufile are.
pub(super) fn scrubbed(question: &Question, answer: Answer, settings_path: &str) -> Answer {
    let lines = |text: &str, change: &dyn Fn(&str) -> String| text.lines().map(|line| change(line) + "\n").collect::<String>();
    let key = question.key.as_str();
    let clean = |text: String| match (question.kind, key) {
        (Kind::File, "/proc/self/mountinfo") => lines(&text, &mount),
        // Set-up looks for options of NVIDIA's driver. Others tell addresses, names of hosts and passwords.
        (Kind::File, "/proc/cmdline") => {
            text.split_whitespace().filter(|word| word.starts_with("nvidia")).collect::<Vec<&str>>().join(" ") + "\n"
        }
        // `LVM-` and the like tells the kind of volume, and the rest is the identifier of this one.
        (Kind::File, _) if key.ends_with("/dm/uuid") => {
            text.find('-').map_or_else(String::new, |end| text[..=end].to_owned()) + "\n"
        }
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
        (Kind::List | Kind::Link, _) => text,
        _ => lines(&text, &addresses),
    };
    match answer {
        // Numbers, no text: rows of digits are no identifiers here.
        Ok(text) if question.kind == Kind::Bytes => Ok(if key.ends_with("/config") { configuration(&text) } else { text }),
        // First what stands in questions too, of which nothing else is taken out: so a name becomes the same in both.
        Ok(text) => Ok(clean(private(&text))),
        Err(Unseen::Failed(why)) => Err(Unseen::Failed(addresses(&private(&why)))),
        answer => answer,
    }
}

/// A device's configuration space without the serial number that root sees, which of a network card is its address. What is
/// no hexadecimal text is left out.
fn configuration(text: &str) -> String {
    let mut bytes = hexadecimal(text).unwrap_or_default();
    clear_serial(&mut bytes);
    let line = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
    bytes.chunks(32).map(line).collect()
}

/// Makes the eight bytes of the capability `Device Serial Number` zeros.
fn clear_serial(config: &mut [u8]) {
    const SERIAL: u32 = 0x0003;
    let mut at = 0x100;
    // Each capability is at least 8 bytes, so a list that goes on for longer runs in a circle.
    for _ in 0..(4096 - 0x100) / 8 {
        let Some(head) = config.get(at..at + 4).and_then(|head| head.try_into().ok()).map(u32::from_le_bytes) else { return };
        if head & 0xffff == SERIAL {
            config.iter_mut().skip(at + 4).take(8).for_each(|byte| *byte = 0);
        }
        match usize::try_from(head >> 20) {
            Ok(next) if next >= 0x100 => at = next & !3,
            _ => return,
        }
    }
}

/// Text without names of users, identifiers of containers, names of volumes, and addresses in names of network cards. The same
/// text becomes the same, so that a question still fits the answer that led to it.
pub(super) fn private(text: &str) -> String {
    // A diagnosis is of the machine, and by the user, that this process runs on and as.
    let home = std::env::var_os("HOME").map(|home| text_of(home.as_bytes()));
    private_for(text, &home.unwrap_or_default())
}

/// The same for the user whose home this is, wherever that lies.
fn private_for(text: &str, home: &str) -> String {
    let mut out = match home.trim_end_matches('/').rsplit_once('/') {
        Some((above, name)) if above.starts_with('/') && !SYSTEM.iter().any(|top| home.starts_with(top)) => {
            renamed(text, &format!("{above}/"), |have| if have == name { "user".to_owned() } else { have.to_owned() })
        }
        // `/`, `/root`, or that of a service.
        _ => text.to_owned(),
    };
    for homes in HOMES {
        out = renamed(&out, homes, |_| "user".to_owned());
    }
    let out = renamed(&out, MAPPER, volume);
    identifiers(&cards(&out))
}

/// Text in which the name behind each `begin` becomes another.
fn renamed(text: &str, begin: &str, name: impl Fn(&str) -> String) -> String {
    let mut parts = text.split(begin);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| matches!(c, '/' | ':' | ',' | '"') || c.is_whitespace()).unwrap_or(part.len());
        out.push_str(begin);
        if end > 0 {
            out.push_str(&name(&part[..end]));
        }
        out.push_str(&part[end..]);
    }
    out
}

/// Another name for a volume. LVM's have a dash in them, behind their group's; `data` and `mpatha` are words for anybody's.
fn volume(name: &str) -> String {
    let is_word = name.bytes().all(|byte| byte.is_ascii_lowercase());
    if is_word { name.to_owned() } else { format!("volume-{}", replacement(name)) }
}

/// Eight digits in place of a name: others for another name, because two places must not become one. They have a key that is
/// another in each run, or a name could be guessed and tried.
fn replacement(name: &str) -> String {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    format!("{:08x}", KEY.hash_one(name) & 0xffff_ffff)
}

/// Text in which interfaces and RDMA devices that are named after their hardware address have other digits.
fn cards(text: &str) -> String {
    reworded(
        text,
        |c| c.is_ascii_alphanumeric(),
        |word| {
            let (begin, rest) = CARDS.iter().find_map(|begin| Some((begin, word.strip_prefix(begin)?)))?;
            let end = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(rest.len());
            let (address, behind) = rest.split_at(end);
            (end >= CARD_DIGITS).then(|| format!("{begin}{:0>end$}{behind}", replacement(address)))
        },
    )
}

/// Text with long hexadecimal numbers, also such with dashes, made zeros.
fn identifiers(text: &str) -> String {
    reworded(
        text,
        |c| c.is_ascii_hexdigit() || matches!(c, '-' | '_'),
        |word| {
            let is_long = word.chars().filter(char::is_ascii_hexdigit).count() >= IDENTIFIER_DIGITS;
            let zeros = || word.chars().map(|c| if c.is_ascii_hexdigit() { '0' } else { c }).collect();
            (is_long && word.trim_start_matches('-') != UEFI).then(zeros)
        },
    )
}

/// Text in which the words of such characters become others, or stay.
fn reworded(text: &str, is_part: impl Fn(char) -> bool, other: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        match other(word) {
            Some(other) => out.push_str(&other),
            None => out.push_str(word),
        }
        let next = behind.find(&is_part).unwrap_or(behind.len());
        out.push_str(&behind[..next]);
        rest = &behind[next..];
    }
    out
}

/// A line of the mount table without the servers, and without the options that are private.
fn mount(line: &str) -> String {
    let options = |text: &str| {
        let keep = |option: &&str| !PRIVATE_OPTIONS.iter().any(|private| option.starts_with(private));
        text.split(',').filter(keep).collect::<Vec<&str>>().join(",")
    };
    let Some((left, right)) = line.split_once(" - ") else { return String::new() };
    let mut fields = right.splitn(3, ' ');
    let (Some(kind), Some(source)) = (fields.next(), fields.next()) else { return String::new() };
    let right = format!("{kind} {} {}", source_of(kind, source), options(fields.next().unwrap_or_default()));
    format!("{left} - {}", addresses(&right)).trim_end().to_owned()
}

/// What is mounted: `host:/export` becomes `server:/export`. Of Lustre's servers the networks stay.
fn source_of(kind: &str, source: &str) -> String {
    if source.starts_with("//") {
        return "//server".to_owned();
    }
    // Devices, several of them with colons between them, and datasets of ZFS, which may have some.
    if source.starts_with('/') || kind == "zfs" {
        return source.to_owned();
    }
    if let Some((scheme, rest)) = source.split_once("://") {
        // `panfs://realm/volume`. Any other word could be a host, whose export begins with two slashes.
        let scheme = if scheme == kind { kind } else { "server" };
        return format!("{scheme}://server{}", rest.find('/').map_or("", |at| &rest[at..]));
    }
    if let Some((servers, export)) = source.split_once(":/") {
        let networks = servers.split([':', ',']).filter_map(|server| server.split_once('@'));
        let servers: Vec<String> = networks.map(|(_, network)| format!("server@{network}")).collect();
        let servers = if kind == "lustre" && !servers.is_empty() { servers.join(":") } else { "server".to_owned() };
        return format!("{servers}:/{export}");
    }
    if HOST_AND_NAME.contains(&kind) {
        return source.split_once('/').map_or_else(|| "server".to_owned(), |(_, name)| format!("server/{name}"));
    }
    // `host:volume` of Gluster, `user@host:` of SSHFS.
    source.rsplit_once(':').map_or_else(|| source.to_owned(), |(_, name)| format!("server:{name}"))
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
        let [begins, ends] = [before, after].map(|beside| !beside.is_some_and(char::is_alphanumeric));
        let with_others = without_ipv4(&word[..end], begins, ends);
        out.push_str(if begins && ends { stand_in(&with_others) } else { &with_others });
        rest = &word[end..];
    }
    out.push_str(rest);
    out
}

/// A word with its IPv4 addresses replaced. A colon ends one, whatever stands behind it: a port, the next address, the name of
/// a host. `begins` and `ends` tell whether the word is not part of a longer one.
fn without_ipv4(word: &str, begins: bool, ends: bool) -> String {
    let last = word.matches(':').count();
    let part = |(at, part): (usize, &str)| {
        let numbers: Vec<&str> = part.trim_end_matches(['.', '-']).split('.').collect();
        let is_address = numbers.len() == 4 && numbers.iter().all(|number| number.parse::<u8>().is_ok());
        let is_whole = (at > 0 || begins) && (at < last || ends);
        if is_address && is_whole { "192.0.2.1".to_owned() } else { part.to_owned() }
    };
    word.split(':').enumerate().map(part).collect::<Vec<String>>().join(":")
}

fn stand_in(word: &str) -> &str {
    let core = word.trim_end_matches(['.', ':', '-']);
    let parts = |mark: char| core.split(mark).collect::<Vec<&str>>();
    let is_hex = |part: &&str, length: usize| part.len() == length && part.chars().all(|c| c.is_ascii_hexdigit());
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
    fn what_holds_for_no_other_machine_is_left_out_of_the_command_line() {
        let line = "BOOT_IMAGE=/vmlinuz root=/dev/mapper/node17--vg-root ip=10.1.2.3::10.1.2.1:255.255.255.0:node17:eth0:none \
                    BOOTIF=01-0c-42-a1-00-00-01 systemd.hostname=node17 rd.iscsi.password=x nvidia.NVreg_RegistryDwords=\"A=1;B=2\" \
                    nvidia-drm.modeset=1";
        let kept = "nvidia.NVreg_RegistryDwords=\"A=1;B=2\" nvidia-drm.modeset=1\n";
        assert_eq!(clean("/proc/cmdline", line), kept);
    }

    #[test]
    fn a_colon_ends_an_address() {
        for (text, expected) in [
            ("ip=10.1.2.3::10.1.2.1:255.255.255.0:node17", "ip=192.0.2.1::192.0.2.1:192.0.2.1:node17"),
            ("10.1.2.3:eth0", "192.0.2.1:eth0"),
            ("node:10.1.2.3:20049", "node:192.0.2.1:20049"),
            ("::ffff:10.1.2.3", "::ffff:192.0.2.1"),
            ("a10.1.2.3:1 1:10.1.2.3x", "a10.1.2.3:1 1:10.1.2.3x"),
        ] {
            assert_eq!(clean("/x", text), format!("{expected}\n"));
        }
    }

    #[test]
    fn no_form_of_a_source_tells_a_host() {
        for (mounted, expected) in [
            ("panfs panfs://realm.corp/vol", "panfs panfs://server/vol"),
            ("panfs panfs://realm.corp", "panfs panfs://server"),
            ("panfs realm.corp:10662/vol", "panfs server/vol"),
            ("nfs4 nas7.corp://export/a", "nfs4 server://server/a"),
            ("fuse.glusterfs gluster1.corp:gv0", "fuse.glusterfs server:gv0"),
            ("fuse.glusterfs [fd00::7]:gv0", "fuse.glusterfs server:gv0"),
            ("fuse.sshfs alice@host.corp:", "fuse.sshfs server:"),
            ("fuse.sshfs alice@host.corp:data", "fuse.sshfs server:data"),
            ("bcachefs /dev/nvme0n1:/dev/nvme1n1", "bcachefs /dev/nvme0n1:/dev/nvme1n1"),
            ("zfs tank/a:b", "zfs tank/a:b"),
            ("cifs //nas7.corp/share", "cifs //server"),
        ] {
            let line = |rest: &str| format!("40 1 0:50 / /data rw - {rest} rw");
            assert_eq!(clean("/proc/self/mountinfo", &line(mounted)), line(expected) + "\n");
        }
    }

    #[test]
    fn volumes_have_other_names_and_each_its_own() {
        let names = ["node17--vg-root", "rhel_node17-root", "luks-0a1b2c3d-0000-1111-2222-333344445555", "luks-1", "luks-2"];
        let mut seen = Vec::new();
        for name in names {
            let line = format!("40 1 253:0 / / rw - xfs /dev/mapper/{name} rw,noatime,journal_path=/dev/mapper/{name},attr2");
            let key = private(&format!("/dev/mapper/{name}"));
            assert!(key.starts_with("/dev/mapper/volume-") && !key.contains(name), "{key}");
            let expected = format!("40 1 253:0 / / rw - xfs {key} rw,noatime,journal_path={key},attr2\n");
            assert_eq!(clean("/proc/self/mountinfo", &line), expected, "a question about the source has its answer");
            assert!(!seen.contains(&key), "{name}");
            seen.push(key);
        }
        assert_eq!(private("/dev/mapper/data and /dev/mapper/mpatha"), "/dev/mapper/data and /dev/mapper/mpatha");
    }

    #[test]
    fn of_a_volumes_identifier_the_kind_stays() {
        for (uuid, kind) in [
            ("LVM-Zx1qvbGq0J8gk2PtmKcQ9wYdNfTsLhRuEoAi3XVMBl5jUn7CaDpHzWeySrIOFG46", "LVM-"),
            ("mpath-eui.0025385b71b0a1c2", "mpath-"),
            ("CRYPT-LUKS2-0a1b2c3d000011112222333344445555-luks-data", "CRYPT-"),
            ("part1-mpath-eui.0025385b71b0a1c2", "part1-"),
            ("0025385b71b0a1c2", ""),
        ] {
            assert_eq!(clean("/sys/devices/virtual/block/dm-0/dm/uuid", uuid), format!("{kind}\n"));
        }
    }

    /// What is left of a configuration space.
    fn left(config: &[u8], key: &str) -> Vec<u8> {
        let text: String = config.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = scrubbed(&Question::new(Kind::Bytes, key), Ok(text), "/etc/cufile.json").expect("text");
        hexadecimal(&text).expect("hexadecimal text")
    }

    #[test]
    fn the_serial_number_in_configuration_space_is_made_zeros_and_nothing_else() {
        const KEY: &str = "/sys/bus/pci/devices/0000:41:00.0/config";
        let mut config = vec![0xa5; 4096];
        // Another capability first, then the serial number, then access control.
        config[0x100..0x104].copy_from_slice(&(0x0001_u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&(0x0003_u32 | 1 << 16 | 0x200 << 20).to_le_bytes());
        config[0x200..0x204].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
        let mut expected = config.clone();
        expected[0x14c..0x154].fill(0);
        assert_eq!(left(&config, KEY), expected);
        // Lists that run in a circle, or out of the space.
        config[0x200..0x204].copy_from_slice(&(0x000d_u32 | 1 << 16 | 0x100 << 20).to_le_bytes());
        expected[0x200..0x204].copy_from_slice(&config[0x200..0x204]);
        assert_eq!(left(&config, KEY), expected);
        for length in [0, 64, 0x102, 0x14c, 0x150] {
            assert_eq!(left(&config[..length], KEY), expected[..length]);
        }
        let gone = vec![0xff; 4096];
        assert_eq!(left(&gone, KEY), gone);
    }

    #[test]
    fn whether_secure_boot_is_on_is_still_asked_by_its_name() {
        let key = format!("/sys/firmware/efi/efivars/SecureBoot-{UEFI}");
        assert_eq!(private(&key), key);
        assert_eq!(left(&[6, 0, 0, 0, 1], &key), [6, 0, 0, 0, 1]);
    }

    #[test]
    fn names_of_cards_tell_no_address_and_stay_apart() {
        let list = |text: &str| {
            let question = Question::new(Kind::List, "/sys/bus/pci/devices/0000:41:00.0/net");
            scrubbed(&question, Ok(text.to_owned()), "/etc/cufile.json").expect("text")
        };
        let mut seen = Vec::new();
        for (begin, address, behind) in [
            ("enx", "0c42a1000001", ""),
            ("enx", "0c42a1000002", "np0"),
            ("rocex", "0c42a10300012345", ""),
            ("rocex", "0c42a10300012346", "_1"),
            ("ibx", "0c42a10300012347", ""),
        ] {
            let name = format!("{begin}{address}{behind}");
            let other = list(&name);
            let digits = other.strip_prefix(begin).and_then(|rest| rest.strip_suffix(behind)).expect("the same shape");
            assert!(digits.len() == address.len() && digits.starts_with("0000"), "{other}");
            let key = format!("/sys/class/infiniband/{name}/ports");
            assert_eq!(private(&key), format!("/sys/class/infiniband/{other}/ports"), "a question has its answer");
            assert!(!seen.contains(&other), "{other}");
            seen.push(other);
        }
        for kept in ["mlx5_0", "enp65s0f0np0", "enx12", "ibp65s0", "0x0c42a10300012345"] {
            assert_eq!(list(kept), kept);
        }
    }

    #[test]
    fn a_home_is_nobodys_wherever_it_lies() {
        let env = |value: &str| {
            scrubbed(&Question::new(Kind::Env, "HOME"), Ok(format!("{value}\n")), "/etc/cufile.json").expect("text")
        };
        for (home, expected) in [
            ("/home/alice", "/home/user"),
            ("/export/home/alice", "/export/home/user"),
            ("/users/alice", "/users/user"),
            ("/nfs/homes/alice", "/nfs/homes/user"),
            ("/root", "/root"),
        ] {
            assert_eq!(env(home), format!("{expected}\n"));
            assert_eq!(private(&format!("{home}/.local/lib")), format!("{expected}/.local/lib"));
        }
        // Where only `HOME` tells that a home is one.
        for (home, expected) in
            [("/hpc/u/alice", "/hpc/u/user"), ("/hpc/u/alice/", "/hpc/u/user"), ("/home/staff/alice", "/home/user/user")]
        {
            let path = format!("{}/.local/lib", home.trim_end_matches('/'));
            assert_eq!(private_for(&path, home), format!("{expected}/.local/lib"));
        }
        for (path, home) in [("/hpc/u/alices", "/hpc/u/alice"), ("/usr/lib/x", "/usr/lib"), ("/data/x", "/data"), ("/x", "/")] {
            assert_eq!(private_for(path, home), path);
        }
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
