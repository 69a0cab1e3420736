//! What the fuzz targets share: the judge that the format's own tests use, compiled from the same file.

// The judge names its subject by these paths.
use thruway::{base, format};

#[path = "../../crates/thruway/src/format/safetensors/tests/oracle.rs"]
mod oracle;

/// Reads a whole file and the reference's verdict on it. Panics if they differ otherwise than documented, or if an
/// accepted header breaks a promise.
pub fn check_header(file: &[u8]) {
    oracle::check(file);
}

/// The same for bytes that are a header's text, behind one byte that is the number of data bytes. Most changes to a
/// whole file only break its length; here each one reaches the JSON.
pub fn check_header_text(bytes: &[u8]) {
    let Some((&data_bytes, text)) = bytes.split_first() else { return };
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.resize(file.len() + usize::from(data_bytes), 0);
    oracle::check(&file);
}

/// Reads an index. Panics if an accepted one breaks a promise or does not come back from its own text.
pub fn check_index(text: &[u8]) {
    let Ok(index) = format::safetensors::Index::parse(text) else { return };
    assert!(!index.weight_map.is_empty());
    for file in index.files() {
        let plain = |part: &str| !matches!(part, "" | "." | "..");
        assert!(file.split('/').all(plain) && !file.contains('\0'), "{file:?} could lead elsewhere");
        if let Some((stem, i, n)) = format::safetensors::parse_shard_name(file) {
            assert!((1..=n).contains(&i) && file.starts_with(stem));
        }
    }
    let again = format::safetensors::Index::parse(index.to_json().as_bytes()).expect("our own text");
    assert_eq!(again.weight_map, index.weight_map);
    assert_eq!(again.total_size, index.total_size);
}

/// Reads a manifest. Panics if an accepted one breaks a promise or does not come back from its own text.
pub fn check_manifest(text: &[u8]) {
    use thruway::checkpoint::Manifest;
    let Ok(manifest) = Manifest::parse(text) else { return };
    let mut reached: Vec<u64> = manifest.files.iter().map(|file| file.head_bytes).collect();
    for file in &manifest.files {
        assert!(!file.name.contains(['/', '\0']) && !file.name.starts_with('.'), "{:?} could lead elsewhere", file.name);
    }
    for tensor in manifest.groups.iter().flat_map(|group| &group.tensors) {
        let file = &manifest.files[tensor.file];
        assert!(tensor.offset >= file.head_bytes && tensor.extent().end() <= file.bytes);
        reached[tensor.file] += tensor.bytes;
    }
    for (file, reached) in manifest.files.iter().zip(reached) {
        assert_eq!(file.bytes, reached, "{} is covered to its last byte", file.name);
    }
    let again = Manifest::parse(manifest.to_text().expect("it was accepted").as_bytes()).expect("our own text");
    assert_eq!(again, manifest);
}

/// The same for bytes that are the inside of a manifest: in a frame whose checksum fits, or no change would ever reach the JSON.
pub fn check_manifest_inside(inner: &[u8]) {
    let sum = thruway::checkpoint::Checksum::of(inner);
    check_manifest(&[format!("{{\"checksum\":\"{sum}\",\"manifest\":").as_bytes(), inner, b"}\n"].concat());
}

/// Judges a `cufile.json`, and sets a key in it. Panics if a text that was read cannot be read after the change, or the
/// key is not there.
pub fn check_cufile(bytes: &[u8]) {
    use thruway::doctor::cufile;
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if cufile::audit(text).is_err() {
        return;
    }
    let Ok(changed) = cufile::set(text, "properties.allow_compat_mode", "false") else { return };
    let settings = cufile::audit(&changed).expect("still readable").settings;
    assert_eq!(settings.allow_compat, Some(false), "{changed:?}");
}

/// Diagnoses a capture, draws it, and plans for it. Panics if the verdict, the picture or the plan differs after the capture
/// was written and read again.
pub fn check_capture(bytes: &[u8]) {
    use thruway::doctor::{captured_paths, examine, facts::Capture, setup::Plan, topology::Topology};
    let text = String::from_utf8_lossy(bytes);
    let Ok(capture) = Capture::parse(&text) else { return };
    let paths = captured_paths(&capture);
    let again = Capture::parse(&capture.to_text()).expect("our own text");
    assert_eq!(examine(&again, &paths), examine(&capture, &paths));
    for paths in [paths.as_slice(), &[]] {
        assert_eq!(Topology::examine(&again, paths), Topology::examine(&capture, paths));
    }
    let plan = |capture| Plan::draw(capture, &paths, None).map_err(|error| error.to_string());
    assert_eq!(plan(&again), plan(&capture));
}

/// Gives the bytes to every parser of the doctor, which a capture reaches only under the right names. Panics if one does, or if
/// bytes cannot be had again from the text that stands for them.
pub fn check_parsers(bytes: &[u8]) {
    use std::hint::black_box;
    use thruway::doctor::parse::{self, mounts, nvidia, pci};
    use thruway::storage::probe::{bytes_of, octal, text_of};
    assert_eq!(bytes_of(&text_of(bytes)), bytes);
    black_box((octal(bytes), pci::redirects_upstream(bytes)));
    let text = &*String::from_utf8_lossy(bytes);
    assert_eq!(bytes_of(&text_of(text.as_bytes())), text.as_bytes());
    black_box((parse::Version::parse(text), parse::hexadecimal(text), parse::ranges(text, 64)));
    let (name, rest) = text.split_once('\n').unwrap_or((text, text));
    black_box((parse::value(rest, name), parse::field(rest, name, ':'), parse::field(rest, name, '=')));
    for mount in mounts::parse(rest) {
        black_box((mount.has(name), mount.value(name)));
    }
    assert!(mounts::holding(&mounts::parse(rest), name).is_none_or(|mount| name.starts_with(&mount.point)));
    black_box((nvidia::driver_version(text), nvidia::registry_words(text), nvidia::statistics(text), nvidia::survey(text)));
    black_box((pci::class(text), pci::speed(text), pci::registers(text), pci::addresses(text), pci::is_address(text)));
    black_box(pci::distance((name, None), (rest, Some(1))));
}
