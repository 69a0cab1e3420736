//! `/proc/self/mountinfo`.

use std::path::Path;

use crate::storage::probe::{bytes_of, octal, text_of};

/// No line that the kernel writes is longer, and none that means anything has more options.
const LINE_BYTES_MAX: usize = 64 << 10;
const OPTIONS_MAX: usize = 256;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Which directory of the filesystem it is: `/` for all of it.
    pub root: String,
    /// Where it is mounted.
    pub point: String,
    /// The kind of filesystem, as the kernel calls it.
    pub kind: String,
    /// What is mounted: a device, a server's export, or a word.
    pub source: String,
    /// `major:minor`.
    pub device: String,
    /// The options of this mount and those of the filesystem.
    pub options: Vec<String>,
}

impl Mount {
    /// Whether an option is set, such as `data=ordered`.
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|have| have == option)
    }

    /// The value of an option `name=value`.
    pub fn value(&self, name: &str) -> Option<&str> {
        let pairs = self.options.iter().filter_map(|option| option.split_once('='));
        pairs.into_iter().find(|(have, _)| *have == name).map(|(_, value)| value)
    }
}

impl Mount {
    /// Whether the bytes of NFS or Lustre go over RDMA; `None` where that cannot be told, and of all others.
    pub fn is_over_rdma(&self) -> Option<bool> {
        match self.kind.as_str() {
            "nfs" | "nfs4" => self.value("proto").map(|protocol| matches!(protocol, "rdma" | "rdma6")),
            // The servers' names end in their networks: `10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch`.
            "lustre" => {
                let names = self.source.split([':', ',']).filter_map(|server| server.split_once('@'));
                let networks: Vec<&str> = names.map(|(_, network)| network).collect();
                // They are those of the management server alone: the data's may have other networks (several rails, EFA).
                let is_rdma = !networks.is_empty() && networks.iter().all(|network| network.starts_with("o2ib"));
                is_rdma.then_some(true)
            }
            _ => None,
        }
    }
}

/// All mounts, in the order in which they were made. Lines that are none are left out.
pub fn parse(table: &str) -> Vec<Mount> {
    table.lines().filter(|text| text.len() <= LINE_BYTES_MAX).filter_map(line).collect()
}

/// The mount that holds `path`: that with the longest mount point above it, and of two at one point the later, which
/// covers the other.
pub fn holding<'a>(mounts: &'a [Mount], path: &str) -> Option<&'a Mount> {
    // The text is compared first: there may be tens of thousands of mounts.
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.point) && Path::new(path).starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.len())
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn line(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let right: Vec<&str> = right.split(' ').collect();
    let ([_, _, device, root, point, own, ..], [kind, source, rest @ ..]) = (left.as_slice(), right.as_slice()) else {
        return None;
    };
    let options = own.split(',').chain(rest.iter().flat_map(|options| options.split(',')));
    Some(Mount {
        root: unescaped(root),
        point: unescaped(point),
        kind: (*kind).to_owned(),
        source: unescaped(source),
        device: (*device).to_owned(),
        options: options.filter(|option| !option.is_empty()).take(OPTIONS_MAX).map(unescaped).collect(),
    })
}

/// The kernel writes blanks and backslashes in names as three octal digits.
fn unescaped(text: &str) -> String {
    text_of(&octal(&bytes_of(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_and_latest_mount_holds_a_path() {
        let table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw,data=ordered\n2 1 259:0 / /mnt/a\\040b rw,noatime shared:1 - xfs /dev/nvme0n1 rw\n\
                     3 1 0:9 / /mnt/a\\040b ro - tmpfs tmpfs rw,size=1k\nnonsense\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 3);
        let held = holding(&mounts, "/mnt/a b/c").expect("held");
        assert_eq!((held.kind.as_str(), held.has("ro"), held.value("size")), ("tmpfs", true, Some("1k")));
        assert!(holding(&mounts, "/mnt/a").expect("held").has("data=ordered"));
        assert_eq!(holding(&mounts, "relative"), None);
    }

    #[test]
    fn what_goes_over_rdma_is_told_by_options_and_by_the_names_of_servers() {
        let is_over_rdma = |rest: &str| parse(&format!("1 0 0:50 / /data rw - {rest}"))[0].is_over_rdma();
        for (rest, expected) in [
            ("nfs4 [fd00::7]:/export rw,proto=rdma6,port=20049,addr=fd00::7", Some(true)),
            ("nfs server:/export rw,proto=rdma,port=20049", Some(true)),
            ("nfs4 [fd00::7]:/export rw,proto=tcp6", Some(false)),
            ("nfs4 server:/export rw", None),
            ("lustre 10.0.0.1@o2ib:10.0.0.2@o2ib1:/scratch rw", Some(true)),
            ("lustre 10.0.0.1@tcp,10.0.0.2@tcp1:/scratch rw", None),
            ("lustre 10.0.0.1@tcp:10.0.0.1@o2ib:/scratch rw", None),
            ("lustre server:/scratch rw", None),
            ("xfs /dev/nvme0n1 rw", None),
        ] {
            assert_eq!(is_over_rdma(rest), expected, "{rest}");
        }
    }
}
