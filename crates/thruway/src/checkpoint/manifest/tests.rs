use super::*;

const CHUNK: u64 = 4096;

/// Two groups: a model of two shards with an index, and an optimizer of one file.
fn manifest() -> Manifest {
    let save_id = SaveId::parse("0123456789abcdef0123456789abcdef").expect("32 digits");
    let file = |name: &str, bytes, head_bytes| FileRecord {
        name: name.to_owned(),
        bytes,
        head_bytes,
        head_checksum: Checksum::of(name.as_bytes()),
    };
    let tensor = |name: &str, file, offset, bytes: u64| {
        let mut record = TensorRecord {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![bytes],
            file,
            offset,
            bytes,
            checksum: Checksum::of(&[]),
            chunks: Vec::new(),
        };
        let chunks = bytes.div_ceil(CHUNK).max(1);
        record.set_chunk_sums((0..chunks).map(|chunk| Checksum::of(&chunk.to_le_bytes())).collect(), CHUNK);
        record
    };
    let mut manifest = Manifest::new(save_id, 1000, CHUNK);
    manifest.files = vec![
        file("model-00001-of-00002.safetensors", 10_100, 100),
        file("model-00002-of-00002.safetensors", 170, 70),
        file("model.safetensors.index.json", 55, 55),
        file("optimizer.safetensors", 80, 80),
    ];
    let model = vec![tensor("a", 0, 100, 9000), tensor("模型/../b", 0, 9100, 1000), tensor("c", 1, 70, 100)];
    manifest.groups = vec![
        GroupRecord { name: "model".to_owned(), opens: Some(2), tensors: model },
        GroupRecord { name: "optimizer".to_owned(), opens: Some(3), tensors: vec![tensor("a", 3, 80, 0)] },
        GroupRecord { name: "nothing".to_owned(), opens: None, tensors: Vec::new() },
    ];
    manifest.metadata.insert("run".to_owned(), "\"7\"\n".to_owned());
    manifest.structure =
        Json::new(r#"{"lr": 1e-400, "big": 123456789012345678901234567890, "k": [null, "\u00e9"]}"#).expect("JSON");
    manifest
}

#[test]
fn a_manifest_comes_back_from_its_text_with_every_digit() {
    let manifest = manifest();
    let text = manifest.to_text().expect("nothing is wrong with it");
    let back = Manifest::parse(text.as_bytes()).expect("our own text");
    assert_eq!(back, manifest);
    assert!(back.structure.text().contains("123456789012345678901234567890"), "numbers are not read as floats");
    serde_json::from_str::<serde_json::Value>(&text).expect("the whole is JSON");
}

#[test]
fn every_flipped_bit_and_every_cut_is_refused() {
    let text = manifest().to_text().expect("valid").into_bytes();
    for bit in 0..text.len() * 8 {
        let mut damaged = text.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        Manifest::parse(&damaged).expect_err("a bit was flipped");
    }
    for length in 0..text.len() {
        Manifest::parse(&text[..length]).expect_err("it was cut");
    }
}

/// The text of a manifest whose inner object is this, with the checksum that fits.
fn framed(inner: &str) -> String {
    format!("{FRAME_START}{}{FRAME_MIDDLE}{inner}{FRAME_END}", Checksum::of(inner.as_bytes()))
}

fn refusal(inner: &str) -> Error {
    Manifest::parse(framed(inner).as_bytes()).expect_err("it breaks a rule")
}

#[test]
fn what_breaks_a_rule_is_refused_by_the_reader_and_by_the_writer() {
    type Break = fn(&mut Manifest);
    let cases: &[(&str, Break)] = &[
        ("leads out", |m| m.files[0].name = "../model.safetensors".to_owned()),
        ("a path", |m| m.files[0].name = "a/model.safetensors".to_owned()),
        ("absolute", |m| m.files[0].name = "/etc/passwd".to_owned()),
        ("hidden", |m| m.files[0].name = ".model".to_owned()),
        ("no name", |m| m.files[0].name = String::new()),
        ("the manifest itself", |m| m.files[3].name = "Manifest.json".to_owned()),
        ("too long a name", |m| m.files[0].name = "l".repeat(256)),
        ("two files of a name", |m| m.files[1].name = m.files[0].name.clone()),
        ("a file of nobody", |m| m.files.push(FileRecord { name: "x".to_owned(), ..m.files[3].clone() })),
        ("a head longer than the file", |m| m.files[3].head_bytes = 81),
        ("no head", |m| m.files[3].head_bytes = 0),
        ("a file that is not there", |m| m.groups[0].tensors[0].file = 9),
        ("an index that is not there", |m| m.groups[0].opens = Some(usize::MAX)),
        ("an index that is a shard", |m| m.groups[0].opens = Some(0)),
        ("no index", |m| m.groups[0].opens = None),
        ("another group's file", |m| m.groups[1].opens = Some(0)),
        ("a group without tensors that opens one", |m| m.groups[2].opens = Some(3)),
        ("past the end", |m| m.groups[0].tensors[2].offset = 71),
        ("an overflow", |m| m.groups[0].tensors[2].offset = u64::MAX),
        ("an overlap", |m| m.groups[0].tensors[1].offset = 9099),
        ("a gap", |m| m.groups[0].tensors[0].offset = 101),
        ("bytes of no tensor", |m| m.files[1].bytes = 171),
        ("another shape", |m| m.groups[0].tensors[0].shape = vec![9001]),
        ("a shape that overflows", |m| m.groups[0].tensors[0].shape = vec![u64::MAX, 2]),
        ("too few chunks", |m| m.groups[0].tensors[0].chunks.truncate(2)),
        ("a checksum that is not that of the chunks", |m| m.groups[0].tensors[0].checksum = Checksum::of(b"x")),
        ("two tensors of a name", |m| m.groups[0].tensors[1].name = "a".to_owned()),
        ("two groups of a name", |m| m.groups[2].name = "model".to_owned()),
        ("tiny chunks", |m| m.chunk_bytes = 1),
        ("no chunks", |m| m.chunk_bytes = 0),
        ("huge chunks", |m| m.chunk_bytes = 1 << 40),
    ];
    for (what, break_it) in cases {
        let mut manifest = manifest();
        break_it(&mut manifest);
        assert_eq!(manifest.to_text().expect_err(what).kind(), ErrorKind::InvalidInput, "{what}");
        let inner = serde_json::to_string(&manifest).expect("JSON");
        assert_eq!(refusal(&inner).kind(), ErrorKind::Malformed, "{what}");
    }
}

#[test]
fn what_is_not_a_manifest_of_this_version_is_refused_with_the_reason() {
    let inner = serde_json::to_string(&manifest()).expect("JSON");
    assert_eq!(refusal(&inner.replace("\"version\":1", "\"version\":2,\"more\":[]")).kind(), ErrorKind::Unsupported);
    assert_eq!(refusal(&inner.replace("thruway checkpoint", "other")).kind(), ErrorKind::Malformed);
    assert!(refusal(&inner.replace("\"step\":1000", "\"step\":1000,\"extra\":1")).message().contains("extra"));
    assert!(refusal(&inner.replace("\"step\":1000", "\"step\":1000,\"step\":1000")).message().contains("step"));
    assert_eq!(refusal(&inner.replace("\"step\":1000", "\"step\":-1")).kind(), ErrorKind::Malformed);
    assert_eq!(refusal(&inner.replace("\"U8\"", "\"U7\"")).kind(), ErrorKind::Malformed);
    for text in ["", "{}", "null", "[]", "{\"checksum\":\"\",\"manifest\":{}}\n"] {
        assert_eq!(Manifest::parse(text.as_bytes()).expect_err("no manifest").kind(), ErrorKind::Malformed, "{text}");
    }
    // Deep nesting is refused, not followed until the stack ends.
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let inner = inner.replace(manifest().structure.text(), &deep);
    assert_eq!(refusal(&inner).kind(), ErrorKind::Malformed);
    assert!(Json::new(deep).is_err() && Json::new("{").is_err() && Json::new("NaN").is_err());
}

#[test]
fn lengths_beyond_what_32_bits_hold_come_back() {
    for bytes in [i32::MAX as u64, 1 << 31, (1 << 31) + 4096, (1 << 32) + 1, (1 << 41) + 1] {
        let mut manifest = manifest();
        manifest.chunk_bytes = 1 << 30;
        manifest.groups[0].tensors[0].chunks.clear();
        manifest.groups.truncate(2);
        let optimizer = &mut manifest.groups[1].tensors[0];
        (optimizer.bytes, optimizer.shape) = (bytes, vec![bytes]);
        let chunks = bytes.div_ceil(1 << 30);
        optimizer.set_chunk_sums((0..chunks).map(|chunk| Checksum::of(&chunk.to_le_bytes())).collect(), 1 << 30);
        manifest.files[3].bytes = 80 + bytes;
        let text = manifest.to_text().expect("nothing is wrong with it");
        let back = Manifest::parse(text.as_bytes()).expect("our own text");
        assert_eq!(back, manifest);
        assert_eq!((back.groups[1].tensors[0].extent().end(), back.tensor_bytes()), (80 + bytes, bytes + 10_100));
    }
}
