//! The doctor's whole verdict on captured machines. Each `machines/NAME.facts` was written by hand from the documented formats
//! of /proc, /sys and NVIDIA's files; `NAME.expected` beside it is the verdict, checked by hand against NVIDIA's rules.
//!
//! `THRUWAY_WRITE_EXPECTED=1 cargo test -p thruway --test doctor_machines` writes the verdicts anew: read the difference.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use thruway::doctor::facts::{Answer, Capture, Facts, Kind, Question, Recorder};
use thruway::doctor::report::{Expected, Health};
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
            let how = if shut.can_be_opened { "shut" } else { "not to be had" };
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
        ("two-sockets", Health::Direct, Expected::Direct, Some("path.distance")),
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
            let bad =
                |verdict| matches!(verdict, thruway::doctor::report::Verdict::Warning | thruway::doctor::report::Verdict::Fault);
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
        assert!(!report.findings.is_empty());
    }
    for answer in [thruway::doctor::facts::Unseen::Denied, thruway::doctor::facts::Unseen::Failed("a named pipe".to_owned())] {
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

#[test]
fn each_fact_of_a_healthy_machine_may_be_garbage_or_refused() {
    let path = machines().into_iter().find(|path| path.ends_with("nvidia-fs.facts")).expect("it");
    let original = capture(&path);
    let questions: Vec<Question> = original.questions().cloned().collect();
    for question in questions.iter().filter(|question| question.kind != Kind::Place) {
        for answer in [Ok("\u{1}garbage".to_owned()), Err(thruway::doctor::facts::Unseen::Failed("a directory".to_owned()))] {
            let mut changed = original.clone();
            changed.insert(question.clone(), answer);
            let report = examine(&changed, &["/data".to_owned()]);
            assert!(!report.conclusion.is_empty(), "{question}");
        }
    }
}
