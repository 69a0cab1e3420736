//! Tensor names and element types: every one that is legal, and how the others are refused.

use super::{file, oracle, refused};
use crate::format::safetensors::Dtype;

/// The reference's type of the same name.
pub(super) fn reference_dtype(dtype: Dtype) -> safetensors::Dtype {
    serde_json::from_value(dtype.name().into()).expect("the reference knows every dtype")
}

#[test]
fn dtypes_have_the_references_names_sizes_and_order() {
    assert_eq!(Dtype::ALL.len(), 22);
    for pair in Dtype::ALL.windows(2) {
        assert!(pair[0] < pair[1]);
        assert!(reference_dtype(pair[0]) < reference_dtype(pair[1]));
    }
    for dtype in Dtype::ALL {
        assert_eq!(dtype.bits(), reference_dtype(dtype).bitsize() as u64);
        assert_eq!(dtype.name().parse::<Dtype>().expect("its own name"), dtype);
        assert_eq!(dtype.to_string(), reference_dtype(dtype).to_string());
    }
    assert_eq!(Dtype::from_name("f32"), None);
}

#[test]
fn every_dtype_is_read_with_its_exact_place() {
    let mut entries = Vec::new();
    let mut position = 0;
    for dtype in Dtype::ALL {
        let end = position + 24 * dtype.bits() / 8;
        entries.push(format!(
            r#""{}":{{"dtype":"{dtype}","shape":[4,6],"data_offsets":[{position},{end}]}}"#,
            dtype.name().to_lowercase()
        ));
        position = end;
    }
    let text = format!("{{{}}}", entries.join(","));
    let data = vec![0; usize::try_from(position).expect("small")];
    let header = oracle::check(&file(text.as_bytes(), &data)).expect("all dtypes are known");
    assert!(header.entries.iter().map(|entry| entry.dtype).eq(Dtype::ALL));
}

#[test]
fn four_and_six_bit_elements_must_fill_whole_bytes() {
    let entry =
        |dtype: &str, shape: &str, end: u32| format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
    oracle::check(&file(entry("F4", "[2,8]", 8).as_bytes(), &[0; 8])).expect("64 bits");
    for (dtype, shape, end) in [("F4", "[3]", 2), ("F4", "[3]", 1), ("F4", "[]", 1), ("F6_E2M3", "[3]", 3), ("F6_E3M2", "[2]", 2)]
    {
        let error = refused(entry(dtype, shape, end).as_bytes(), &[0; 3][..end as usize]);
        assert!(error.message().contains("not whole bytes"), "{error}");
        assert_eq!((error.context("tensor"), error.context("dtype")), (Some("w"), Some(dtype)));
    }
}

#[test]
fn an_unknown_dtype_is_named_together_with_its_tensor() {
    for dtype in ["C128", "F128", "I4", "U4", "BF8", "FP32", "float32", "torch.float32", "", "\\u001b[31m"] {
        let text = format!(
            r#"{{"ok":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},"odd":{{"dtype":"{dtype}","shape":[1],"data_offsets":[4,20]}}}}"#
        );
        let error = refused(text.as_bytes(), &[0; 20]);
        assert_eq!((error.context("tensor"), error.context("field")), (Some("odd"), Some("dtype")));
        let shown = dtype.replace("\\u001b", "\\u{1b}");
        assert!(error.message().contains(&format!("unknown dtype '{shown}'")), "{error}");
    }
}

#[test]
fn every_unicode_name_is_kept_as_it_is_and_none_is_mistaken_for_another() {
    let long = "L".repeat(70_000);
    let names = [
        "",
        " ",
        ".",
        "..",
        "/",
        "a/b",
        "../../etc/passwd",
        "a b",
        "a\tb",
        "a\nb",
        "a\r\nb",
        "\u{1b}[31mred",
        "quote\"back\\slash",
        "%s%n%x",
        "$(touch PWNED)",
        "-rf",
        "caf\u{e9}",
        "cafe\u{301}",
        "\u{6743}\u{91cd}",
        "\u{1f600}",
        "\u{202e}gnp.exe",
        "\u{feff}bom",
        "\u{200b}",
        &long,
        "metadata",
        "__metadata__ ",
        "__Metadata__",
        "a",
        "a.",
        "a\0b",
        "a\0",
        "dtype",
        "\u{7f}",
        "\u{d7ff}",
        "\u{e000}",
        "\u{ffff}",
    ];
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let key = serde_json::to_string(name).expect("text is JSON");
            format!(r#"{key}:{{"dtype":"U8","shape":[4],"data_offsets":[{},{}]}}"#, index * 4, index * 4 + 4)
        })
        .collect();
    let text = format!("{{{}}}", entries.join(","));
    let header = oracle::check(&file(text.as_bytes(), &vec![0; names.len() * 4])).expect("all names are legal");
    assert!(header.entries.iter().map(|entry| entry.name.as_str()).eq(names));

    oracle::check(&file(br#"{"\ud83d\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, b"x"))
        .expect("a surrogate pair is one character");
    refused(br#"{"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, b"x");
    refused(br#"{"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, b"x");
    let error = refused(br#"{"\u001b[2J\n":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#, b"x");
    assert_eq!(error.context("tensor"), Some("\\u{1b}[2J\\n"));
}

#[test]
fn empty_tensors_that_share_a_place_come_before_the_data_there_by_name() {
    let text = br#"{"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"m":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I64","shape":[0,9],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}"#;
    let header = oracle::check(&file(text, b"x")).expect("empty tensors take no room");
    let names: Vec<&str> = header.entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["a", "z", "m", "b"]);
}
