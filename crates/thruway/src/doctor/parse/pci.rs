//! The files of a PCI device in sysfs.

/// What kind of device the class code names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A display controller, or a 3D controller without a display.
    Display,
    /// An NVMe controller.
    Nvme,
    /// A network or InfiniBand controller.
    Network,
    /// A bridge to further buses: a port of a switch or of the root complex.
    Bridge,
    /// Something else.
    Other,
}

/// Reads `class`, such as `0x030200`.
pub fn class(text: &str) -> Option<Class> {
    let code = u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()?;
    Some(match (code >> 16, code >> 8) {
        (0x03, _) => Class::Display,
        (_, 0x0108) => Class::Nvme,
        (0x02, _) | (_, 0x0c06) => Class::Network,
        (_, 0x0604) => Class::Bridge,
        _ => Class::Other,
    })
}

/// Reads `current_link_speed`, such as `16.0 GT/s PCIe`, in tenths of GT/s. `Unknown` is `None`.
pub fn speed(text: &str) -> Option<u32> {
    let (number, unit) = text.trim().split_once(' ')?;
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let tenths =
        whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(tenth.parse::<u32>().ok().filter(|tenth| *tenth < 10)?)?;
    unit.starts_with("GT/s").then_some(tenths)
}

/// A base address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// Its line of `resource`, which its other files have in their names.
    pub line: usize,
    /// The bytes that it covers; 0 if it has no address.
    pub bytes: u64,
}

/// Reads `resource`: the base address registers in their order. One of 64 bits takes two lines, of which the second is empty: on
/// a GPU whose first one is such, the second begins at line 2.
pub fn registers(text: &str) -> Vec<Register> {
    const LINES: usize = 6;
    // IORESOURCE_MEM_64 of linux/ioport.h
    const IS_64_BITS: u64 = 0x0010_0000;
    let number = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let mut found = Vec::new();
    let mut lines = text.lines().take(LINES).enumerate();
    while let Some((line, words)) = lines.next() {
        let mut words = words.split_whitespace().map_while(number);
        let (Some(start), Some(end), flags) = (words.next(), words.next(), words.next().unwrap_or(0)) else { break };
        let bytes = if end == 0 { Some(0) } else { end.checked_sub(start).and_then(|length| length.checked_add(1)) };
        let Some(bytes) = bytes else { break };
        found.push(Register { line, bytes });
        if flags & IS_64_BITS != 0 {
            lines.next();
        }
    }
    found
}

/// No machine has so many bridges above a device.
const DEPTH_MAX: usize = 32;

/// The PCI addresses in a resolved path of sysfs, from the root complex to the device.
pub fn addresses(path: &str) -> Vec<&str> {
    below_root(path).filter(|part| is_address(part)).take(DEPTH_MAX).collect()
}

/// `0000:41:00.0`, or `10000:01:00.0`: Intel's VMD gives its drives domains of five digits.
pub fn is_address(text: &str) -> bool {
    let is_hex = |part: &str, least: usize, most: usize| {
        (least..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let [domain, bus, device, function] = parts.as_slice() else { return false };
    is_hex(domain, 4, 8)
        && is_hex(bus, 2, 2)
        && is_hex(device, 2, 2)
        && is_hex(function, 1, 1)
        && text == format!("{domain}:{bus}:{device}.{function}")
}

/// The root complex in a resolved path of sysfs: `pci0000:40`. Behind Intel's VMD lies one of its own.
pub fn root_of(path: &str) -> Option<&str> {
    path.split('/').rfind(|part| is_root(part))
}

fn is_root(part: &str) -> bool {
    part.starts_with("pci") && part.contains(':')
}

/// The parts of a path below its root complex.
fn below_root(path: &str) -> impl Iterator<Item = &str> {
    let parts: Vec<&str> = path.split('/').collect();
    let begin = parts.iter().rposition(|part| is_root(part)).map_or(0, |at| at + 1);
    parts.into_iter().skip(begin)
}

/// The bridges on the way between two devices that need not pass the root complex, in the order in which the kernel looks at
/// them; empty if there is no such way.
pub fn bridges_between<'a>(one: &'a str, other: &'a str) -> Vec<&'a str> {
    if root_of(one) != root_of(other) {
        return Vec::new();
    }
    let (one, other) = (addresses(one), addresses(other));
    let shared = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
    if shared == 0 || shared >= one.len() || shared >= other.len() {
        return Vec::new();
    }
    // From below the bridge that both share, and that one itself.
    let mut way: Vec<&str> = one[shared - 1..one.len() - 1].to_vec();
    way.extend(&other[shared..other.len() - 1]);
    way
}

/// The root port in a resolved path of sysfs, if the device lies behind one.
pub fn port_of(path: &str) -> Option<&str> {
    let addresses = addresses(path);
    (addresses.len() > 1).then(|| addresses[0])
}

/// How far two devices lie from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Under one switch: what goes between them need not pass the root complex.
    Switch,
    /// Under one root complex.
    Root,
    /// Under two root complexes of one NUMA node.
    Node,
    /// On two NUMA nodes: between them lies the link of two sockets.
    Sockets,
}

impl Distance {
    /// In words.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Switch => "under one PCIe switch",
            Self::Root => "under one root complex",
            Self::Node => "under two root complexes of one NUMA node",
            Self::Sockets => "on two sockets",
        }
    }

    /// The word for it in the tables of `nvidia-smi topo`.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Switch => "PIX",
            Self::Root => "PHB",
            Self::Node => "NODE",
            Self::Sockets => "SYS",
        }
    }
}

/// The distance of two devices, from their resolved paths in sysfs and their NUMA nodes; `None` where a path is none of
/// sysfs.
pub fn distance(one: (&str, Option<u32>), other: (&str, Option<u32>)) -> Option<Distance> {
    let (root, other_root) = (root_of(one.0)?, root_of(other.0)?);
    if root == other_root {
        let shares_port = port_of(one.0).is_some_and(|port| port_of(other.0) == Some(port));
        return Some(if shares_port { Distance::Switch } else { Distance::Root });
    }
    // Unknown nodes are those of machines with one.
    let crosses = one.1.zip(other.1).is_some_and(|(one, other)| one != other);
    Some(if crosses { Distance::Sockets } else { Distance::Node })
}

/// Reads configuration space: whether its Access Control Services send peers' requests up to the root complex (`ReqRedir`,
/// `CmpltRedir` or `EgressCtrl`, the bits that the kernel's `drivers/pci/p2pdma.c` tests); `None` if the capability is not
/// shown to this user. A bridge without the capability sends nothing up.
pub fn redirects_upstream(config: &[u8]) -> Option<bool> {
    const ACS: u32 = 0x000d;
    const REDIRECTS: u16 = 0x04 | 0x08 | 0x20;
    let word = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0x100;
    // Each capability is at least 8 bytes, so a list that goes on for longer runs in a circle.
    for _ in 0..(4096 - 0x100) / 8 {
        let head = word(at)?;
        if head & 0xffff == ACS {
            let control = u16::from_le_bytes(config.get(at + 6..at + 8)?.try_into().ok()?);
            return Some(control & REDIRECTS != 0);
        }
        at = usize::try_from(head >> 20).ok()? & !3;
        if at < 0x100 {
            return Some(false);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_device_are_read() {
        assert_eq!(
            (class("0x030200\n"), class("0x010802"), class("0x020700")),
            (Some(Class::Display), Some(Class::Nvme), Some(Class::Network))
        );
        assert_eq!((speed("16.0 GT/s PCIe\n"), speed("2.5 GT/s"), speed("Unknown")), (Some(160), Some(25), None));
        let resource = "0x00000000c0000000 0x00000000c0ffffff 0x0000000000040200\n\
                        0x0000380000000000 0x00003807ffffffff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(registers(resource), [Register { line: 0, bytes: 16 << 20 }, Register { line: 1, bytes: 32 << 30 }]);
        let hopper = "0x0000104002000000 0x0000104002ffffff 0x000000000014220c\n\
                      0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                      0x0000100000000000 0x0000103fffffffff 0x000000000014220c\n";
        assert_eq!(registers(hopper), [Register { line: 0, bytes: 16 << 20 }, Register { line: 2, bytes: 256 << 30 }]);
        let without_address = hopper.replace("0x0000100000000000 0x0000103fffffffff", "0x0000000000000000 0x0000000000000000");
        assert_eq!(registers(&without_address)[1], Register { line: 2, bytes: 0 });
        assert_eq!(registers("0x2 0x1 0x0\n"), []);
        assert!(is_address("0000:41:00.0") && !is_address("0000:41:00.") && !is_address("pci0000:40"));
        assert!(is_address("10000:01:00.0") && !is_address("0000.41:00:0") && !is_address("000:41:00.0"));
    }

    #[test]
    fn distance_follows_the_tree() {
        let gpu = "/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0";
        let near = "/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:44:00.0";
        let beside = "/sys/devices/pci0000:40/0000:40:03.1/0000:48:00.0";
        let far = "/sys/devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0";
        let of = |other, node| distance((gpu, Some(0)), (other, node));
        assert_eq!(of(near, Some(0)), Some(Distance::Switch));
        assert_eq!(of(beside, Some(0)), Some(Distance::Root));
        assert_eq!(
            (of(far, Some(0)), of(far, None), of(far, Some(1))),
            (Some(Distance::Node), Some(Distance::Node), Some(Distance::Sockets))
        );
        assert_eq!(of("/sys/devices/virtual/block/md0", None), None);
        let managed = "/sys/devices/pci0000:40/0000:40:00.5/pci10000:00/10000:00:02.0/10000:01:00.0";
        assert_eq!(of(managed, Some(0)), Some(Distance::Node), "behind Intel's VMD lies another root complex");
        assert_eq!(addresses(managed), ["10000:00:02.0", "10000:01:00.0"]);
        assert_eq!(bridges_between(gpu, near), ["0000:41:00.0", "0000:42:00.0", "0000:42:01.0"]);
        assert_eq!(bridges_between(gpu, beside), [""; 0]);
    }

    #[test]
    fn access_control_is_found_in_configuration_space_and_a_circle_ends() {
        let mut config = vec![0; 4096];
        // An unrelated capability first, then ACS at 0x148 with ReqRedir set.
        config[0x100..0x104].copy_from_slice(&(0x0001_u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
        config[0x14e] = 0x04;
        assert_eq!(redirects_upstream(&config), Some(true));
        config[0x14e] = 0x20;
        assert_eq!(redirects_upstream(&config), Some(true), "egress control");
        config[0x14e] = 0x11;
        assert_eq!(redirects_upstream(&config), Some(false));
        assert_eq!(redirects_upstream(&config[..64]), None, "an ordinary user sees no more");
        config[0x100..0x104].copy_from_slice(&(0x0001_u32 | 0x100 << 20).to_le_bytes());
        assert_eq!(redirects_upstream(&config), None);
    }
}
