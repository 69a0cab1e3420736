//! Loads in processes of their own: what comes first in a process is measured in a process where nothing came before.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use thruway::{Device, Error, ErrorKind, PathPolicy, Result};

use super::{Run, Way};

/// Loads with this very program, which `again` starts.
pub(super) fn load(again: &[OsString], path: &Path, device: Device, policy: PathPolicy) -> Result<Run> {
    let failed = |error| Error::from_io("cannot run this program again", error);
    let policy = match policy {
        PathPolicy::Auto => "auto",
        PathPolicy::Require(path) => path.as_str(),
    };
    let (program, before) = again.split_first().ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
    let output = Command::new(program)
        .args(before)
        .args(["--json", "load", "--device", &device.to_string(), "--path", policy, "--"])
        .arg(path)
        .env_remove(thruway::base::settings::PROFILE)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(failed)?;
    let told = String::from_utf8_lossy(&output.stdout);
    let object: Value = serde_json::from_str(&told).unwrap_or_default();
    run(&object).ok_or_else(|| {
        let error = object["error"]["message"].as_str().unwrap_or("it said nothing that can be understood");
        let kind = match object["error"]["kind"].as_str() {
            Some(name) if name == ErrorKind::PathUnavailable.name() => ErrorKind::PathUnavailable,
            Some(name) if name == ErrorKind::Unsupported.name() => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format!("a load in a process of its own failed: {error}")).with("status", output.status)
    })
}

fn run(object: &Value) -> Option<Run> {
    let first = object["runs"].get(0)?;
    let parts = object["files"].as_array()?.iter().filter_map(|file| file["parts"].as_array()).flatten();
    let text = |part: &Value, key: &str| part[key].as_str().unwrap_or_default().to_owned();
    let way = parts.max_by_key(|part| part["bytes"].as_u64());
    Some(Run {
        bytes: object["bytes"].as_u64()?,
        seconds: first["elapsed_seconds"].as_f64()?,
        cpu_seconds: first["cpu_seconds"].as_f64()?,
        retries: object["retries"].as_u64()?,
        way: way.map(|part| Way { path: text(part, "path"), engine: text(part, "engine"), reason: text(part, "reason") }),
        pass: None,
    })
}
