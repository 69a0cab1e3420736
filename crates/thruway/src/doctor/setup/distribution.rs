//! Which distribution this is, and how its packages are called.

use crate::base::error::printable;
use crate::base::{Error, ErrorKind, Result};
use crate::doctor::facts::{Facts, FactsExt, Unseen};
use crate::doctor::parse::field;

const RELEASE: &str = "/etc/os-release";

/// Distributions that are set up in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Ubuntu.
    Ubuntu,
    /// Debian.
    Debian,
    /// Red Hat Enterprise Linux and its relatives.
    RedHat,
    /// SUSE Linux Enterprise Server and its relatives.
    Suse,
}

/// A distribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution {
    /// Its name as it gives it, such as `Ubuntu 24.04.1 LTS`.
    pub name: String,
    /// The family that it belongs to.
    pub family: Family,
    /// Whether it still has no `dnf`.
    has_yum_only: bool,
    /// Whether DKMS is among its own packages; Red Hat's relatives have it in EPEL.
    has_dkms: bool,
}

impl Distribution {
    /// Finds out which it is.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for one whose packages are not known here.
    pub fn examine(facts: &dyn Facts) -> Result<Self> {
        let text = match facts.file(RELEASE) {
            Ok(text) => text,
            Err(Unseen::Absent) => String::new(),
            Err(unseen) => {
                let why = super::super::checks::why(&unseen);
                return Err(
                    Error::new(ErrorKind::Io, format!("which distribution this is cannot be read: {why}")).with("file", RELEASE)
                );
            }
        };
        let word = |name: &str| field(&text, name, '=').unwrap_or_default().trim_matches(['"', '\'']).to_owned();
        let (own, like) = (word("ID"), word("ID_LIKE"));
        let Some(family) = family(&own).or_else(|| like.split_whitespace().find_map(family)) else {
            let shown = if own.is_empty() { "one that does not say its name".to_owned() } else { printable(&own) };
            let message = format!("this distribution is not known here: {shown}");
            let hint = "Ubuntu, Debian, the RHEL family and SLES are; `thruway doctor` names what is missing, to be done by hand";
            return Err(Error::new(ErrorKind::Unsupported, message).with("file", RELEASE).with_hint(hint));
        };
        let has_dkms = family != Family::RedHat || own == "fedora" || facts.exists("/usr/sbin/dkms");
        let name = match word("PRETTY_NAME") {
            pretty if pretty.is_empty() => own,
            pretty => pretty,
        };
        let has_yum_only = family == Family::RedHat && !facts.exists("/usr/bin/dnf") && facts.exists("/usr/bin/yum");
        Ok(Self { name, family, has_yum_only, has_dkms })
    }

    /// The commands that install packages.
    pub fn install(&self, packages: &[String]) -> Vec<Vec<String>> {
        let words = |head: &[&str]| head.iter().map(|word| (*word).to_owned()).chain(packages.iter().cloned()).collect();
        match self.family {
            Family::Ubuntu | Family::Debian => {
                vec![vec!["apt-get".to_owned(), "update".to_owned()], words(&["apt-get", "install", "-y"])]
            }
            Family::RedHat if self.has_yum_only => vec![words(&["yum", "install", "-y"])],
            Family::RedHat => vec![words(&["dnf", "install", "-y"])],
            Family::Suse => vec![words(&["zypper", "--non-interactive", "install"])],
        }
    }

    /// The command that puts the settings of modules into the initial RAM disk, from which NVIDIA's and the NVMe driver are
    /// loaded.
    pub fn rebuild_ram_disk(&self) -> Vec<String> {
        let words: &[&str] = match self.family {
            // Of all kernels: the next start may be that of a newer one.
            Family::Ubuntu | Family::Debian => &["update-initramfs", "-u", "-k", "all"],
            Family::RedHat | Family::Suse => &["dracut", "--force", "--regenerate-all"],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    /// The package with libcufile for a driver of this CUDA version. NVIDIA's names are the same for all families.
    pub fn library(cuda: Option<(u32, u32)>) -> String {
        cuda.map_or_else(|| "nvidia-gds".to_owned(), |(major, minor)| format!("libcufile-{major}-{minor}"))
    }

    /// The packages with nvidia-fs for this kernel. Ubuntu builds and signs it for its kernels `linux-nvidia`; for all others
    /// DKMS builds it, which needs the kernel's headers.
    pub fn module(&self, release: &str, has_headers: bool) -> Vec<String> {
        if self.family == Family::Ubuntu && is_nvidia_kernel(release) {
            return vec![format!("linux-modules-nvidia-fs-{release}")];
        }
        let headers = match self.family {
            Family::Ubuntu | Family::Debian => format!("linux-headers-{release}"),
            Family::RedHat => red_hat_headers(release),
            Family::Suse => "kernel-default-devel".to_owned(),
        };
        (!has_headers).then_some(headers).into_iter().chain(["nvidia-fs-dkms".to_owned()]).collect()
    }

    /// Whether DKMS cannot be installed because the repository that has it is not there.
    pub fn lacks_dkms(&self, facts: &dyn Facts) -> bool {
        // What may not be seen may be there.
        let has_source = match facts.list(self.sources()) {
            Ok(names) => names.iter().any(|name| name.contains("epel")),
            Err(unseen) => unseen != Unseen::Absent,
        };
        !self.has_dkms && !has_source
    }

    /// Where its sources of packages are named; those of NVIDIA have its name or CUDA's.
    pub fn sources(&self) -> &'static str {
        match self.family {
            Family::Ubuntu | Family::Debian => "/etc/apt/sources.list.d",
            Family::RedHat => "/etc/yum.repos.d",
            Family::Suse => "/etc/zypp/repos.d",
        }
    }
}

pub(super) use crate::doctor::machine::is_nvidia_kernel;

/// The package with the headers of a kernel: each of Red Hat's flavours, and Oracle's, has its own. `…aarch64+64k` is what the
/// kernel says, and the package's version is without the flavour.
fn red_hat_headers(release: &str) -> String {
    let (version, flavour) = match release.split_once('+') {
        Some((version, flavour)) => (version, flavour.trim_end_matches("-debug")),
        // Before they had a plus: `5.14.0-284.11.1.rt14.296.el9_2.x86_64`; Oracle's `5.15.0-200.131.27.el9uek.x86_64`.
        None if release.contains(".rt") => (release, "rt"),
        None if release.contains("uek") => (release, "uek"),
        None => return format!("kernel-devel-{release}"),
    };
    format!("kernel-{flavour}-devel-{version}")
}

fn family(word: &str) -> Option<Family> {
    Some(match word {
        "ubuntu" => Family::Ubuntu,
        "debian" => Family::Debian,
        "rhel" | "centos" | "rocky" | "almalinux" | "ol" | "fedora" | "amzn" => Family::RedHat,
        "sles" | "sled" | "suse" | "opensuse" | "opensuse-leap" => Family::Suse,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::Capture;

    fn found(release: &str, rest: &str) -> Result<Distribution> {
        let text = format!("thruway-facts 1\n@ file {RELEASE}\n{release}\n{rest}@ rest absent\n");
        Distribution::examine(&Capture::parse(&text).expect("a capture"))
    }

    #[test]
    fn distributions_are_known_by_their_own_name_or_that_of_a_relative() {
        for (text, family) in [
            ("ID=ubuntu\nID_LIKE=debian", Family::Ubuntu),
            ("ID=debian", Family::Debian),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"", Family::Ubuntu),
            ("ID=\"rhel\"\nID_LIKE=\"fedora\"", Family::RedHat),
            ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"", Family::RedHat),
            ("ID=\"sles\"\nID_LIKE=\"suse\"", Family::Suse),
        ] {
            assert_eq!(found(text, "").expect(text).family, family, "{text}");
        }
        for text in ["ID=arch", "", "\u{1}\u{fffd}", "ID=\"nixos\""] {
            assert_eq!(found(text, "").expect_err(text).kind(), ErrorKind::Unsupported);
        }
    }

    #[test]
    fn packages_go_by_the_managers_own_names() {
        let packages = ["a".to_owned()];
        let command = |text, rest| found(text, rest).expect(text).install(&packages).pop().expect("one").join(" ");
        assert_eq!(command("ID=debian", ""), "apt-get install -y a");
        assert_eq!(command("ID=rhel", ""), "dnf install -y a");
        assert_eq!(command("ID=centos", "@ link /usr/bin/yum\n/usr/bin/yum\n"), "yum install -y a");
        assert_eq!(command("ID=sles", ""), "zypper --non-interactive install a");
        let ubuntu = found("ID=ubuntu", "").expect("known");
        assert_eq!(ubuntu.module("6.8.0-1030-nvidia", false), ["linux-modules-nvidia-fs-6.8.0-1030-nvidia"]);
        assert_eq!(ubuntu.module("6.8.0-45-generic", false), ["linux-headers-6.8.0-45-generic", "nvidia-fs-dkms"]);
        let rhel = found("ID=rhel", "").expect("known");
        for (release, headers) in [
            ("5.14.0-570.12.1.el9_6.x86_64", "kernel-devel-5.14.0-570.12.1.el9_6.x86_64"),
            ("5.14.0-570.12.1.el9_6.aarch64+64k", "kernel-64k-devel-5.14.0-570.12.1.el9_6.aarch64"),
            ("5.14.0-570.12.1.el9_6.x86_64+rt", "kernel-rt-devel-5.14.0-570.12.1.el9_6.x86_64"),
            ("5.14.0-284.11.1.rt14.296.el9_2.x86_64", "kernel-rt-devel-5.14.0-284.11.1.rt14.296.el9_2.x86_64"),
            ("5.15.0-200.131.27.el9uek.x86_64", "kernel-uek-devel-5.15.0-200.131.27.el9uek.x86_64"),
        ] {
            assert_eq!(rhel.module(release, false), [headers, "nvidia-fs-dkms"]);
        }
    }

    #[test]
    fn where_dkms_is_not_among_the_packages_it_is_said() {
        let lacks = |text, rest: &str| {
            let capture = Capture::parse(&format!("thruway-facts 1\n@ file {RELEASE}\n{text}\n{rest}@ rest absent\n"));
            let capture = capture.expect("a capture");
            Distribution::examine(&capture).expect("known").lacks_dkms(&capture)
        };
        assert!(lacks("ID=rocky", "") && lacks("ID=rhel", "@ list /etc/yum.repos.d\nredhat.repo\n"));
        assert!(!lacks("ID=rocky", "@ list /etc/yum.repos.d\nepel.repo\n"));
        assert!(!lacks("ID=rocky", "@ link /usr/sbin/dkms\n/usr/sbin/dkms\n"));
        assert!(!lacks("ID=fedora", "") && !lacks("ID=ubuntu", ""));
    }
}
