//! The doctor's whole verdict on captured machines. Each `machines/NAME.facts` was written by hand from the documented formats
//! of /proc, /sys and NVIDIA's files, but for `recorded-*`, which are captures; `NAME.expected` beside it is the verdict,
//! checked by hand against NVIDIA's rules, and of captures against the machine's own tools.
//!
//! `THRUWAY_WRITE_EXPECTED=1 cargo test -p thruway --test doctor_machines` writes the verdicts anew: read the difference.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use thruway::doctor::facts::{Answer, Capture, Facts, Kind, Question, Recorder, Unseen};
use thruway::doctor::report::{Expected, Health, Verdict};
use thruway::doctor::setup::Plan;
use thruway::doctor::{Report, captured_paths, examine};

fn machines() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines");
    let entries = std::fs::read_dir(directory).expect("the machines").map(|entry| entry.expect("entry").path());
    let mut machines: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "facts")).collect();
    machines.sort();
    machines
}

fn capture(path: &Path) -> Capture {
    Capture::parse(&std::fs::read_to_string(path).expect("text")).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

fn diagnosed(name: &str) -> Report {
    let path = machines().into_iter().find(|path| path.file_stem().is_some_and(|stem| stem == name)).expect(name);
    let capture = capture(&path);
    examine(&capture, &captured_paths(&capture))
}

fn text(report: &Report) -> String {
    let mut text = format!("health: {:?}\n{}\n", report.health, report.conclusion);
    for path in &report.paths {
        writeln!(text, "\npath {}: {}: {}", path.path, path.storage, path.expected.name()).expect("write");
        if let Some(route) = path.route {
            writeln!(text, "  by {}", route.describe()).expect("write");
        }
        for shut in &path.shut {
            let how = match (shut.may_be_open, shut.can_be_opened) {
                (true, _) => "unknown",
                (_, true) => "shut",
                _ => "not to be had",
            };
            writeln!(text, "  {}: {how}: {}", shut.route.describe(), shut.by.join(", ")).expect("write");
        }
    }
    text.push('\n');
    for finding in &report.findings {
        let subject = if finding.subject.is_empty() { String::new() } else { format!(" [{}]", finding.subject) };
        writeln!(text, "{}: {}{subject}: {}", finding.id, finding.verdict.name(), finding.seen).expect("write");
        writeln!(text, "    from {}", finding.source).expect("write");
        if let Some(remedy) = &finding.remedy {
            writeln!(text, "    remedy: {remedy}").expect("write");
        }
    }
    text
}

#[test]
fn every_captured_machine_has_its_expected_verdict() {
    let machines = machines();
    assert!(machines.len() >= 25, "only {} machines", machines.len());
    let mut differing = Vec::new();
    for path in machines {
        let capture = capture(&path);
        let begun = Instant::now();
        let verdict = text(&examine(&capture, &captured_paths(&capture)));
        assert!(begun.elapsed() < Duration::from_secs(1), "{path:?} took {:?}", begun.elapsed());
        let expected = path.with_extension("expected");
        if std::env::var_os("THRUWAY_WRITE_EXPECTED").is_some() {
            std::fs::write(&expected, &verdict).expect("write");
        } else if std::fs::read_to_string(&expected).ok().as_deref() != Some(&verdict) {
            differing.push(format!("{}:\n{verdict}", path.display()));
        }
    }
    assert!(differing.is_empty(), "the verdict differs from what is expected of\n{}", differing.join("\n"));
}

/// What the names of the machines promise, apart from the wording of the verdicts.
#[test]
fn each_machine_is_judged_as_its_name_says() {
    for (name, health, expected, finding) in [
        ("nvidia-fs", Health::Direct, Expected::Direct, None),
        ("p2pdma", Health::Direct, Expected::Direct, None),
        ("raid0-nvidia-fs", Health::Direct, Expected::Direct, None),
        ("ext4-ordered", Health::Direct, Expected::Direct, None),
        ("nfs-rdma", Health::Direct, Expected::Direct, None),
        ("arm-gh200", Health::Direct, Expected::Direct, None),
        ("compatibility-allowed", Health::Direct, Expected::Direct, Some("cufile.compatibility")),
        ("link-degraded", Health::Direct, Expected::Direct, Some("pcie.link")),
        ("two-sockets", Health::Slower, Expected::Staged, Some("path.sockets")),
        ("iommu-identity", Health::Direct, Expected::Direct, None),
        ("iommu-translates", Health::Broken, Expected::Staged, Some("p2pdma.iommu")),
        ("iommu-nvidia-fs", Health::Broken, Expected::Staged, Some("p2pdma.iommu")),
        ("parameters-denied", Health::Slower, Expected::Staged, Some("p2pdma.parameters")),
        ("config-denied", Health::Slower, Expected::Staged, Some("cufile.config")),
        ("cuda-slow", Health::Slower, Expected::Staged, Some("driver.cuda")),
        ("virtual-q35", Health::Broken, Expected::Staged, Some("path.distance")),
        ("vmd", Health::Direct, Expected::Direct, None),
        ("slot-narrow", Health::Direct, Expected::Direct, Some("pcie.slot")),
        ("switch-redirects", Health::Broken, Expected::Staged, Some("pcie.acs")),
        ("root-port-redirects", Health::Direct, Expected::Direct, None),
        ("lustre-rdma", Health::Direct, Expected::Direct, None),
        ("lustre-tcp", Health::Slower, Expected::Staged, Some("path.filesystem")),
        ("module-missing", Health::Broken, Expected::Staged, Some("nvidia_fs.module")),
        ("module-missing-silent", Health::Slower, Expected::Staged, Some("nvidia_fs.module")),
        ("geforce", Health::Slower, Expected::Staged, Some("gpu.kind")),
        ("overlay", Health::Slower, Expected::Staged, Some("path.filesystem")),
        ("nfs-tcp", Health::Slower, Expected::Staged, Some("path.filesystem")),
        ("dm-crypt", Health::Slower, Expected::Staged, Some("path.layer")),
        ("raid5", Health::Broken, Expected::Staged, Some("path.layer")),
        ("container-bare", Health::Slower, Expected::Staged, Some("container.udev")),
        ("config-malformed", Health::Broken, Expected::Staged, Some("cufile.config")),
        ("config-contradictory", Health::Broken, Expected::Staged, Some("cufile.key")),
        ("config-block-in-fs", Health::Broken, Expected::Staged, Some("cufile.key")),
        ("driver-mismatch", Health::Broken, Expected::Staged, Some("driver.cuda")),
        ("closed-driver", Health::Broken, Expected::Staged, Some("nvidia_fs.version")),
        ("dead-mount", Health::Broken, Expected::None, Some("path.access")),
        ("peer-memory-without-gpu", Health::Direct, Expected::Direct, None),
        ("peer-memory-apart", Health::Slower, Expected::Plain, Some("path.pool")),
        ("dgx-two-sockets", Health::Direct, Expected::Direct, Some("pcie.link")),
        ("nfs-rdma-port-down", Health::Broken, Expected::Staged, Some("path.network")),
        ("bar1-small", Health::Broken, Expected::Staged, Some("gpu.bar1")),
        ("bare-ubuntu", Health::Slower, Expected::Staged, Some("p2pdma.parameters")),
        ("bare-debian", Health::Slower, Expected::Staged, Some("p2pdma.kernel")),
        ("bare-rhel", Health::Slower, Expected::Staged, Some("nvidia_fs.module")),
        ("bare-sles", Health::Slower, Expected::Staged, Some("cufile.library")),
        ("no-gpu", Health::Slower, Expected::Plain, None),
        ("wsl", Health::Slower, Expected::Staged, Some("host.kernel")),
    ] {
        let report = diagnosed(name);
        assert_eq!((report.health, report.paths[0].expected), (health, expected), "{name}: {}", text(&report));
        if let Some(id) = finding {
            let bad = |verdict| matches!(verdict, Verdict::Warning | Verdict::Fault | Verdict::Unknown);
            assert!(report.findings.iter().any(|finding| finding.id == id && bad(finding.verdict)), "{name} lacks {id}");
        }
    }
}

#[test]
fn a_capture_of_what_was_asked_has_the_same_verdict() {
    for path in machines() {
        let original = capture(&path);
        let paths = captured_paths(&original);
        let recorder = Recorder::new(original);
        let verdict = text(&examine(&recorder, &paths));
        let again = Capture::parse(&recorder.capture().to_text()).expect("our own text");
        assert_eq!(text(&examine(&again, &paths)), verdict, "{path:?}");
    }
}

/// Answers everything with the same text, so that a FIFO's, a directory's or a stranger's content stands everywhere.
struct Everywhere(Answer);

impl Facts for Everywhere {
    fn look(&self, _: &Question) -> Answer {
        self.0.clone()
    }
}

#[test]
fn garbage_everywhere_gives_a_verdict_in_bounded_time() {
    let begun = Instant::now();
    for text in [
        "",
        "\n",
        "0",
        "yes",
        "nvme0n1\nnvme0n1\n",
        "dm-0\nmd0\n",
        "0000:41:00.0\n",
        "{}",
        "\u{1}\u{fffd}{{{",
        "real /\ndirect yes\n",
    ] {
        let report = examine(&Everywhere(Ok(text.to_owned())), &["/data".to_owned()]);
        assert_ne!(report.health, Health::Direct, "{text:?}");
    }
    for answer in [Unseen::Denied, Unseen::Failed("a named pipe".to_owned())] {
        let report = examine(&Everywhere(Err(answer)), &["/data".to_owned()]);
        assert_ne!(report.health, Health::Direct);
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// What the fuzzer of captures found: an address of a GPU that was cut in the middle of a character.
#[test]
fn an_address_of_strange_characters_is_no_address() {
    for address in ["00\u{fffd}00:1", "\u{fffd}\u{fffd}:", ":::::", "\u{1f600}\u{1f600}:00.0"] {
        let text = format!("thruway-facts 1\n@ call cuda\ngpu {address} memory=1 name=NVIDIA H100\n@ rest absent\n");
        let report = examine(&Capture::parse(&text).expect("a capture"), &["/data".to_owned()]);
        assert!(report.findings.iter().any(|finding| finding.id == "gpu.kind"), "{address}");
    }
}

/// The facts that the direct path of a machine hangs on: with one of them unseen it is not expected, and nothing is broken either.
fn needed(name: &str) -> Vec<String> {
    let original = capture(&machines().into_iter().find(|path| path.file_stem().is_some_and(|stem| stem == name)).expect(name));
    assert_eq!(examine(&original, &["/data".to_owned()]).health, Health::Direct, "{name}");
    let recorder = Recorder::new(original.clone());
    drop(examine(&recorder, &["/data".to_owned()]));
    let asked = recorder.capture();
    let (mut needed, mut wrong) = (Vec::new(), Vec::new());
    for question in asked.questions().filter(|question| question.kind != Kind::Place) {
        for unseen in [Unseen::Denied, Unseen::Failed("a directory".to_owned()), Unseen::Silent(Duration::from_millis(400))] {
            let mut changed = original.clone();
            changed.insert(question.clone(), Err(unseen.clone()));
            let report = examine(&changed, &["/data".to_owned()]);
            // A CUDA driver that refuses is broken.
            let may_break = question.key == "cuda";
            let is_said = report.health == Health::Slower && report.paths[0].may_be_direct() && report.paths[0].next != "nothing";
            if report.health != Health::Direct && !is_said && !may_break {
                wrong.push(format!("{question} {unseen:?}: {:?}: {}", report.health, report.conclusion));
            }
            if report.health != Health::Direct && !needed.contains(&question.to_string()) {
                needed.push(question.to_string());
            }
        }
        let mut changed = original.clone();
        changed.insert(question.clone(), Ok("\u{1}garbage".to_owned()));
        let report = examine(&changed, &["/data".to_owned()]);
        assert!(report.paths.len() == 1 && !report.conclusion.is_empty(), "{question}");
    }
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    needed
}

#[test]
fn a_fact_that_the_direct_path_needs_and_that_cannot_be_seen_makes_it_unknown_neither_open_nor_broken() {
    for (name, also) in [
        ("nvidia-fs", &["lines nvidia_fs  /proc/modules", "link /dev/nvidia-fs0", "file /proc/driver/nvidia-fs/modules"][..]),
        ("p2pdma", &["file /proc/driver/nvidia/params", "file /sys/module/nvme_core/parameters/multipath"]),
    ] {
        let needed = needed(name);
        let always = [
            "call cuda",
            "call kernel",
            "file /etc/cufile.json",
            "file /proc/driver/nvidia/version",
            "file /proc/self/mountinfo",
            "file /sys/bus/pci/devices/0000:43:00.0/iommu_group/type",
            "file /sys/bus/pci/devices/0000:44:00.0/iommu_group/type",
            "file /sys/bus/pci/devices/0000:43:00.0/resource",
            "file /sys/class/nvme/nvme0/transport",
            "link /run/udev",
            "link /usr/local/cuda/lib64/libcufile.so.0",
        ];
        for fact in always.iter().chain(also) {
            assert!(needed.iter().any(|have| have == fact), "{name} does without {fact}: {needed:?}");
        }
        // What only speed, or another route, hangs on.
        for fact in ["call io_uring", "file /etc/os-release", "file /sys/bus/pci/devices/0000:43:00.0/current_link_width"] {
            assert!(!needed.iter().any(|have| have == fact), "{name} needs {fact}");
        }
    }
}

/// A healthy machine with some facts changed.
fn changed(name: &str, changes: &[(Kind, &str, &str)]) -> Report {
    let mut machine =
        capture(&machines().into_iter().find(|path| path.file_stem().is_some_and(|stem| stem == name)).expect(name));
    for (kind, key, text) in changes {
        machine.insert(Question::new(*kind, *key), Ok((*text).to_owned()));
    }
    examine(&machine, &["/data".to_owned()])
}

#[test]
fn one_fact_decides() {
    use Kind::{Call, Env, File, Lines, Link};
    const MOUNTS: &str = "/proc/self/mountinfo";
    const CONFIG: &str = "/etc/cufile.json";
    const PARAMETERS: &str = "/proc/driver/nvidia/params";
    let gpu = |name: &str, capability: &str| {
        format!(
            "cuda_version 13010\ngpu 0000:43:00.0 memory=85520809984 capability={capability} integrated=no peer_dma=yes dma_buf=yes name={name}\n"
        )
    };
    let (t1000, v100) = (gpu("NVIDIA T1000 8GB", "7.5"), gpu("Tesla V100-PCIE-16GB", "7.0"));
    let no_peer = gpu("NVIDIA H100 80GB HBM3", "9.0").replace("peer_dma=yes", "peer_dma=no");
    let library = |version: &str| format!("/usr/lib/libcufile.so.{version}\n");
    let (old, new, unnamed) = (library("1.12.0"), library("1.14.1"), "/usr/lib/libcufile.so.0\n");
    let at = "/usr/local/cuda/lib64/libcufile.so.0";
    let deny = r#"{"properties": {"allow_compat_mode": true}, "denylist": {"drivers": ["nvme"]}}"#;
    let lax =
        r#"{"properties": {"allow_compat_mode": true, "use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}}"#;
    let virtiofs = "40 24 0:60 / /data rw - virtiofs share rw\n";
    let shared =
        r#"{"properties": {"allow_compat_mode": false, "use_pci_p2pdma": true}, "fs": {"virtiofs": {"use_pci_p2pdma": true}}}"#;
    let mode = "RegistryDwords: \"rmforcestaticbar1=0x1;RMFORCEDISABLEIOMAPWC=1\"\n";
    for (name, changes, health, id, verdict) in [
        // what the environment says counts for more than the file
        ("nvidia-fs", vec![(Env, "CUFILE_FORCE_COMPAT_MODE", "1")], Health::Slower, "cufile.environment", Verdict::Warning),
        ("nvidia-fs", vec![(Env, "CUFILE_FORCE_COMPAT_MODE", "maybe")], Health::Slower, "cufile.environment", Verdict::Unknown),
        ("nvidia-fs", vec![(Env, "CUFILE_FORCE_COMPAT_MODE", "FALSE")], Health::Direct, "cufile.compatibility", Verdict::Ok),
        ("nvidia-fs", vec![(Env, "CUFILE_ALLOW_COMPAT_MODE", "true")], Health::Direct, "cufile.environment", Verdict::Warning),
        (
            "p2pdma",
            vec![(Env, "CUFILE_USE_PCIP2PDMA", "false"), (File, CONFIG, lax)],
            Health::Slower,
            "cufile.environment",
            Verdict::Warning,
        ),
        (
            "p2pdma",
            vec![(Env, "CUFILE_USE_PCIP2PDMA", "true"), (File, CONFIG, "{}")],
            Health::Direct,
            "cufile.p2pdma",
            Verdict::Ok,
        ),
        // versions
        ("p2pdma", vec![(Link, at, &old), (File, CONFIG, lax)], Health::Slower, "cufile.library", Verdict::Ok),
        ("p2pdma", vec![(Link, at, unnamed)], Health::Slower, "cufile.library", Verdict::Unknown),
        ("nvidia-fs", vec![(Link, at, &new)], Health::Direct, "cufile.library", Verdict::Ok),
        (
            "nvidia-fs",
            vec![(File, "/sys/module/nvidia_fs/version", "2.11\n")],
            Health::Broken,
            "nvidia_fs.version",
            Verdict::Fault,
        ),
        // GPUs
        ("nvidia-fs", vec![(Call, "cuda", &t1000)], Health::Slower, "gpu.kind", Verdict::Unknown),
        ("nvidia-fs", vec![(Call, "cuda", &v100), (Link, at, &new)], Health::Direct, "gpu.kind", Verdict::Ok),
        ("nvidia-fs", vec![(Call, "cuda", &v100)], Health::Broken, "gpu.kind", Verdict::Warning),
        ("nvidia-fs", vec![(Call, "cuda", &no_peer)], Health::Broken, "gpu.kind", Verdict::Warning),
        // settings
        ("nvidia-fs", vec![(File, CONFIG, deny)], Health::Slower, "path.denied", Verdict::Warning),
        ("p2pdma", vec![(File, PARAMETERS, mode)], Health::Direct, "p2pdma.parameters", Verdict::Ok),
        // kernels
        (
            "nvidia-fs",
            vec![(Call, "kernel", "release 6.17.0-1-nvidia\nmachine x86_64\n")],
            Health::Broken,
            "nvidia_fs.version",
            Verdict::Warning,
        ),
        (
            "p2pdma",
            vec![(Lines, "CONFIG_PCI_P2PDMA= /boot/config-6.8.0-45-generic", "")],
            Health::Direct,
            "p2pdma.kernel",
            Verdict::Ok,
        ),
        ("virtual-h200", vec![(Call, "functions", "p2pdma no\n")], Health::Slower, "p2pdma.kernel", Verdict::NotApplicable),
        ("virtual-h200", vec![(Call, "functions", "p2pdma yes\n")], Health::Slower, "p2pdma.kernel", Verdict::Ok),
        (
            "p2pdma",
            vec![(Call, "kernel", "release 5.14.0-611.5.1.el9_7.x86_64\nmachine x86_64\n")],
            Health::Direct,
            "p2pdma.kernel",
            Verdict::Ok,
        ),
        (
            "p2pdma",
            vec![(Call, "kernel", "release 5.14.0-503.11.1.el9_5.x86_64\nmachine x86_64\n")],
            Health::Broken,
            "p2pdma.kernel",
            Verdict::Warning,
        ),
        // what the kernel maps for peers by itself
        (
            "peer-memory-without-gpu",
            vec![(File, "/sys/bus/pci/devices/0000:03:00.0/iommu_group/type", "DMA-FQ\n")],
            Health::Direct,
            "path.pool",
            Verdict::Ok,
        ),
        // mounts
        (
            "nvidia-fs",
            vec![(File, MOUNTS, "40 24 0:60 / /data rw - panfs panfs://realm/volume rw\n")],
            Health::Broken,
            "path.filesystem",
            Verdict::Warning,
        ),
        (
            "nfs-rdma",
            vec![(File, MOUNTS, "40 24 0:60 / /data rw - nfs4 [fd00::7]:/export rw,proto=rdma6,port=20049\n")],
            Health::Direct,
            "path.filesystem",
            Verdict::Ok,
        ),
        (
            "nfs-rdma",
            vec![(File, MOUNTS, "40 24 0:60 / /data rw - nfs4 [fd00::7]:/export rw,vers=4.2\n")],
            Health::Slower,
            "path.filesystem",
            Verdict::Unknown,
        ),
        (
            "nfs-rdma",
            vec![(File, "/proc/driver/nvidia-fs/modules", "nvme: 1.0\n")],
            Health::Broken,
            "nvidia_fs.storage",
            Verdict::Warning,
        ),
        // known issues of the release notes
        (
            "nvidia-fs",
            vec![(Call, "kernel", "release 6.12.0\nmachine x86_64\n")],
            Health::Direct,
            "host.small_requests",
            Verdict::Ok,
        ),
        ("nvidia-fs", vec![(File, "/proc/driver/nvidia-fs/modules", "")], Health::Broken, "nvidia_fs.storage", Verdict::Fault),
        (
            "nvidia-fs",
            vec![(File, "/proc/driver/nvidia-fs/modules", ""), (Link, at, &new)],
            Health::Broken,
            "nvidia_fs.storage",
            Verdict::Warning,
        ),
        (
            "arm-gb10",
            vec![(Lines, "nvidia_fs  /proc/modules", "nvidia_fs 1 0 - Live 0x0\n")],
            Health::Slower,
            "nvidia_fs.unwanted",
            Verdict::Warning,
        ),
        // what has a setting of its own
        ("p2pdma", vec![(File, "/sys/class/nvme/nvme0/transport", "rdma\n")], Health::Broken, "path.setting", Verdict::Warning),
        ("p2pdma", vec![(File, MOUNTS, virtiofs)], Health::Broken, "path.setting", Verdict::Warning),
        ("p2pdma", vec![(File, MOUNTS, virtiofs), (File, CONFIG, shared)], Health::Direct, "path.setting", Verdict::Ok),
        // how people start programs
        ("nvidia-fs", vec![(Env, "APPTAINER_NAME", "image.sif")], Health::Direct, "container.kind", Verdict::Ok),
    ] {
        let report = changed(name, &changes);
        let found: Vec<Verdict> = report.findings.iter().filter(|have| have.id == id).map(|have| have.verdict).collect();
        assert!(report.health == health && found.contains(&verdict), "{name} {changes:?}: {}", text(&report));
    }
}

#[test]
fn gpus_that_cuda_does_not_show_decide_nothing() {
    use Kind::{Call, Env, File, Link, List};
    const OTHER: &str = "/sys/bus/pci/devices/0000:45:00.0";
    let (class, vendor) = (format!("{OTHER}/class"), format!("{OTHER}/vendor"));
    let bus = "0000:43:00.0\n0000:44:00.0\n0000:45:00.0\n";
    let hidden = [
        (List, "/sys/bus/pci/devices", bus),
        (File, class.as_str(), "0x030200\n"),
        (File, vendor.as_str(), "0x10de\n"),
        // In the same switch as the drive, or nearer.
        (Link, OTHER, "/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:01.0/0000:44:00.0/0000:45:00.0\n"),
    ];
    for name in ["p2pdma", "nvidia-fs"] {
        let report = changed(name, &hidden);
        assert_eq!(report.health, Health::Direct, "{name}: {}", text(&report));
        assert!(report.conclusion.contains("cuda:0"), "{name}: {}", report.conclusion);
        let is_told = |finding: &&thruway::doctor::report::Finding| {
            finding.subject.contains("0000:45") && finding.verdict == Verdict::NotApplicable && finding.remedy.is_none()
        };
        assert!(report.findings.iter().any(|finding| is_told(&finding)), "{name}: {}", text(&report));
        // All of them are hidden.
        let none = changed(name, &[(Call, "cuda", "cuda_version 0\n"), (Env, "CUDA_VISIBLE_DEVICES", "set")]);
        assert_eq!((none.health, none.paths[0].expected), (Health::Slower, Expected::Staged), "{name}: {}", text(&none));
        assert!(none.conclusion.contains("CUDA_VISIBLE_DEVICES"), "{name}: {}", none.conclusion);
    }
    // A driver without a GPU is nothing broken.
    let none = changed("no-gpu", &[(Call, "cuda", "cuda_version 0\n")]);
    assert_eq!((none.health, none.paths[0].expected), (Health::Slower, Expected::Plain), "{}", text(&none));
}

#[test]
fn a_virtual_machine_that_was_booted_from_an_image_is_no_container() {
    let is_container = |mounts: &str, process_2: &str| {
        let changes = [
            (Kind::Link, "/.dockerenv", "/.dockerenv\n"),
            (Kind::File, "/proc/self/mountinfo", mounts),
            (Kind::File, "/proc/2/comm", process_2),
        ];
        changed("nvidia-fs", &changes).findings.iter().any(|finding| finding.id == "container.kind")
    };
    let data = "40 24 259:1 / /data rw - xfs /dev/nvme0n1 rw\n";
    let drive = format!("24 1 254:0 / / rw - ext4 /dev/vda rw\n{data}");
    let overlay = format!("24 1 0:50 / / rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c\n{data}");
    let directory = format!("24 1 254:0 /containers/one / rw - ext4 /dev/sda1 rw\n{data}");
    assert!(!is_container(&drive, "kthreadd\n"));
    // Process 2 of a container is a program of its own.
    assert!(is_container(&drive, "nginx\n"));
    // Those that see their host's processes.
    assert!(is_container(&overlay, "kthreadd\n"));
    assert!(is_container(&directory, "kthreadd\n"));
    assert!(is_container(&drive.replace("/dev/vda", "/dev/mapper/pool-snapshot"), "kthreadd\n"));
    assert!(is_container(data, "kthreadd\n"), "what lies at / is unknown");
}

#[test]
fn one_member_of_a_large_array_that_is_not_local_is_enough() {
    let (mut sysfs, mut slaves) = (Vec::new(), String::new());
    for number in 0..71 {
        let (name, base) = (format!("nvme{number}n1"), format!("/sys/devices/virtual/nvme/nvme{number}/nvme{number}n1"));
        sysfs.push((Kind::Link, format!("/sys/class/block/{name}"), base));
        let transport = if number == 70 { "tcp" } else { "pcie" };
        sysfs.push((Kind::File, format!("/sys/class/nvme/nvme{number}/transport"), transport.to_owned()));
        slaves.push_str(&format!("{name}\n"));
    }
    sysfs.push((Kind::Link, "/sys/dev/block/259:0".to_owned(), "/sys/devices/virtual/block/md0".to_owned()));
    sysfs.push((Kind::List, "/sys/devices/virtual/block/md0/slaves".to_owned(), slaves));
    sysfs.push((Kind::File, "/sys/devices/virtual/block/md0/md/level".to_owned(), "raid0".to_owned()));
    let changes: Vec<(Kind, &str, &str)> = sysfs.iter().map(|(kind, key, text)| (*kind, key.as_str(), text.as_str())).collect();
    let report = changed("nvidia-fs", &changes);
    assert_eq!(report.paths[0].storage, "xfs on md0 on 71 drives");
    let refused = report.findings.iter().find(|finding| finding.id == "path.drive" && finding.verdict == Verdict::Warning);
    assert!(refused.is_some_and(|finding| finding.seen.contains("nvme70n1")), "{}", text(&report));
}

#[test]
fn what_is_broken_about_a_place_comes_before_what_is_broken_about_the_machine() {
    let path = machines().into_iter().find(|path| path.ends_with("config-malformed.facts")).expect("it");
    let report = examine(&capture(&path), &["/nowhere".to_owned(), "/data".to_owned()]);
    let paths: Vec<&str> = report.paths.iter().map(|path| path.path.as_str()).collect();
    assert_eq!(paths, ["/nowhere", "/data"], "in the order in which they were named");
    assert_eq!(report.paths[0].next, "check the name");
    assert!(report.paths[1].next.contains("thruway config check"), "{}", report.paths[1].next);
    assert_eq!(report.conclusion.lines().count(), 2, "one sentence a line");
}

#[test]
fn set_up_opens_the_route_that_the_doctor_names() {
    for path in machines() {
        let machine = capture(&path);
        let paths = captured_paths(&machine);
        let report = examine(&machine, &paths);
        let Ok(plan) = Plan::draw(&machine, &paths, None) else { continue };
        for place in report.paths.iter().filter(|place| place.next.contains("`thruway setup ")) {
            let route = plan.route.unwrap_or_else(|| panic!("{path:?}: the doctor sends to set-up, which opens nothing"));
            assert!(!plan.steps.is_empty(), "{path:?}: {plan:?}");
            assert!(place.shut.iter().any(|shut| shut.route == route && shut.can_be_opened), "{path:?}: {place:?}");
        }
    }
}

#[test]
fn a_library_below_a_home_is_found_in_the_capture_as_well() {
    let path = machines().into_iter().find(|path| path.ends_with("nvidia-fs.facts")).expect("it");
    for (home, masked) in
        [("/home/alice", "/home/user"), ("/users/alice", "/users/user"), ("/export/home/alice", "/export/home/user")]
    {
        let mut live = capture(&path);
        let lib = format!("{home}/.local/lib");
        let packages = format!("{lib}/python3.12/site-packages");
        let library = format!("{packages}/nvidia/cu13/lib/libcufile.so.0");
        live.insert(Question::new(Kind::Link, "/usr/local/cuda/lib64/libcufile.so.0"), Err(Unseen::Absent));
        for (kind, key, text) in [
            (Kind::Env, "HOME", home),
            (Kind::List, &lib, "python3.12"),
            (Kind::Link, &library, &library),
            (Kind::List, &packages, "nvidia_cufile-1.15.1.6.dist-info"),
        ] {
            live.insert(Question::new(kind, key), Ok(format!("{text}\n")));
        }
        let paths = captured_paths(&live);
        let recorder = Recorder::new(live);
        let report = examine(&recorder, &paths);
        assert_eq!(report.health, Health::Direct, "{}", text(&report));
        let again = recorder.capture().to_text();
        assert!(!again.contains("alice"), "{again}");
        let again = Capture::parse(&again).expect("our own text");
        assert_eq!(text(&examine(&again, &paths)), text(&report).replace(home, masked));
    }
}
