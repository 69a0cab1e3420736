//! Inputs that broke other people's software, made anew. Each goes through the oracle too.

use super::{file, oracle, refused};
use crate::base::error::ErrorKind;
use crate::format::safetensors::{HEADER_BYTES_MAX, header_length};

/// Three tensors of 8448, 14 and 1000 bytes.
const THREE: &[u8] = br#"{"a":{"dtype":"F32","shape":[64,33],"data_offsets":[0,8448]},"b":{"dtype":"BF16","shape":[7],"data_offsets":[8448,8462]},"c":{"dtype":"U8","shape":[1000],"data_offsets":[8462,9462]}}"#;

/// A header with one tensor of 64 bytes and this text as its entry.
fn one(entry: &str) -> Vec<u8> {
    format!(r#"{{"t":{entry}}}"#).into_bytes()
}

fn accepted(text: &[u8], data: &[u8]) {
    oracle::check(&file(text, data)).unwrap_or_else(|| panic!("{} is a good header", String::from_utf8_lossy(text)));
}

#[test]
fn a_short_file_is_too_short_and_a_long_one_has_extra_bytes_never_the_other_way_round() {
    let full = file(THREE, &[7; 9462]);
    oracle::check(&full).expect("the control is a good file");
    let data_start = full.len() - 9462;
    for (length, missing, tensor) in [
        (full.len() - 1, "1 byte", Some("c")),
        (full.len() - 500, "500 bytes", Some("c")),
        (data_start + 8448, "1014 bytes", Some("b")),
        (data_start, "9462 bytes", Some("a")),
        (data_start - 20, "20 bytes or more", None),
        (8, "182 bytes or more", None),
        (7, "1 byte or more", None),
    ] {
        oracle::check(&full[..length]);
        let error = oracle::read(&full[..length]).expect_err("a short file");
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
        assert!(error.message().contains(&format!("too short by {missing}")), "{error}");
        assert_eq!(error.context("tensor"), tensor, "{error}");
        assert_eq!(error.context("actual_bytes"), Some(length.to_string().as_str()), "{error}");
    }
    let empty = oracle::read(b"").expect_err("an empty file");
    assert_eq!((empty.kind(), empty.message()), (ErrorKind::UnexpectedEof, "the file is empty"));

    let padding = 4096 - full.len() % 4096;
    for (extra, text) in [
        (1, "1 extra byte ".to_owned()),
        (padding, format!("{padding} extra bytes ")),
        (full.len(), format!("{} extra bytes ", full.len())),
    ] {
        let mut long = full.clone();
        long.resize(full.len() + extra, 0);
        oracle::check(&long);
        let error = oracle::read(&long).expect_err("a long file");
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        assert!(error.message().contains(&text) && error.message().contains("after the last tensor"), "{error}");
        assert_eq!(error.context("expected_bytes"), Some(full.len().to_string().as_str()), "{error}");
    }
}

#[test]
fn shapes_dtypes_and_offsets_that_do_not_fit_each_other_are_refused_naming_the_tensor() {
    accepted(&one(r#"{"dtype":"F32","shape":[16],"data_offsets":[0,64]}"#), &[1; 64]);
    let with_shape = |shape: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,64]}}"#);
    let with_offsets = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[16],"data_offsets":{offsets}}}"#);
    let with_dtype = |dtype: &str| format!(r#"{{"dtype":{dtype},"shape":[16],"data_offsets":[0,64]}}"#);
    let shapes = ["[1000,1000]", "[15]", "[]", "[4611686018427387904,4,16]", "[4611686018427387920]", "[18446744073709551615]"];
    let more_shapes = [
        "[18446744073709551616]",
        "[-16]",
        "[-4,-4]",
        "[16.0]",
        r#"["16"]"#,
        "[true,16]",
        "[null]",
        "16",
        "[NaN]",
        "[1e1]",
        "[-0]",
    ];
    let offsets =
        ["[64,0]", "[-64,0]", "[64,128]", "[9007199254740993,9007199254741057]", "[18446744073709551552,18446744073709551615]"];
    let more_offsets = ["[0,32,64]", "[0]", "[]", "[0.0,64.0]", "64", "null", r#"{"0":64}"#];
    let dtypes = [r#""f32""#, r#""F128""#, "4", "null", r#"["F32"]"#, r#"{"F32":null}"#];
    let missing = [
        r#"{"dtype":"F32","shape":[16]}"#,
        r#"{"dtype":"F32","data_offsets":[0,64]}"#,
        r#"{"shape":[16],"data_offsets":[0,64]}"#,
        "{}",
        "null",
        "[]",
        "3",
        r#""x""#,
    ];
    let entries = shapes.into_iter().chain(more_shapes).map(with_shape);
    let entries = entries.chain(offsets.into_iter().chain(more_offsets).map(with_offsets));
    let entries = entries.chain(dtypes.into_iter().map(with_dtype)).chain(missing.into_iter().map(str::to_owned));
    for entry in entries {
        let error = refused(&one(&entry), &[1; 64]);
        assert_eq!(error.context("tensor"), Some("t"), "{entry}: {error}");
    }
    refused(&one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#), &[]);
    refused(&one(r#"{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}"#), &[]);
    refused(&one(r#"{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}"#), &[]);
    accepted(&one(r#"{"dtype":"F32","shape":[0,18446744073709551615,4],"data_offsets":[0,0]}"#), &[]);
    refused(&one(r#"{"dtype":"F32","shape":[18446744073709551615,4,0],"data_offsets":[0,0]}"#), &[]);
}

#[test]
fn an_entry_written_as_a_list_is_refused_with_words_that_say_so() {
    let error = refused(&one(r#"["F32",[16],[0,64]]"#), &[1; 64]);
    assert!(error.message().contains("sequence") && error.message().contains("an object with dtype"), "{error}");
}

#[test]
fn holes_overlaps_and_a_late_start_are_told_apart() {
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    for (first, second, words, tensor) in [
        ("[0,4]", "[5,9]", "a hole of 1 byte between", "b"),
        ("[0,4]", "[2,6]", "overlaps tensor 'a'", "b"),
        ("[0,4]", "[0,4]", "overlaps tensor 'a'", "b"),
        ("[5,9]", "[1,5]", "must begin at 0", "b"),
    ] {
        let error = refused(two(first, second).as_bytes(), &[0; 9]);
        assert!(error.message().contains(words), "{error}");
        assert_eq!(error.context("tensor"), Some(tensor));
    }
    accepted(two("[4,8]", "[0,4]").as_bytes(), &[0; 8]);
}

#[test]
fn keys_given_twice_are_refused_because_each_reader_would_keep_another_one() {
    let entry = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let twice = refused(format!(r#"{{"t":{entry},"\u0074":{entry}}}"#).as_bytes(), b"x");
    assert_eq!((twice.message(), twice.context("tensor")), ("the header lists a tensor twice", Some("t")));
    refused(br#"{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, b"x");
    accepted(br#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"unused":1,"unused":2}}"#, b"x");
    refused(format!(r#"{{"__metadata__":{{"k":"1","k":"2"}},"t":{entry}}}"#).as_bytes(), b"x");
    refused(format!(r#"{{"__metadata__":{{}},"t":{entry},"__metadata__":{{}}}}"#).as_bytes(), b"x");
    refused(format!(r#"{{"__metadata__":null,"t":{entry},"__metadata__":null}}"#).as_bytes(), b"x");
}

#[test]
fn text_that_is_not_json_is_refused_with_the_place_in_the_file() {
    let good = one(r#"{"dtype":"F32","shape":[16],"data_offsets":[0,64]}"#);
    let text = |suffix: &[u8]| [&good, suffix].concat();
    let cut = refused(&good[..good.len() - 1], &[1; 64]);
    assert!(cut.context("offset").is_some(), "{cut}");
    let not_utf8 = refused(b"{\"\xff\":{\"dtype\":\"F32\",\"shape\":[16],\"data_offsets\":[0,64]}}", &[1; 64]);
    assert_eq!((not_utf8.message(), not_utf8.context("offset")), ("the header is not UTF-8 text", Some("10")));
    for bad in [
        text(&[0; 8]),
        text(b"{}"),
        text(b","),
        [b"\xef\xbb\xbf", good.as_slice()].concat(),
        b"[1,2]".to_vec(),
        b"null".to_vec(),
        b"".to_vec(),
        b"   ".to_vec(),
    ] {
        refused(&bad, &[1; 64]);
    }
    refused(b"{'t':{'dtype':'F32','shape':[16],'data_offsets':[0,64]}}", &[1; 64]);
    refused(&[&good[..good.len() - 1], b",}"].concat(), &[1; 64]);
    let utf16: Vec<u8> = good.iter().flat_map(|&byte| [byte, 0]).collect();
    refused(&utf16, &[1; 64]);
    let lines = refused(b"{\n \"t\": {\n  \"dtype\": \"F99\"\n }\n}", &[]);
    assert_eq!((lines.context("tensor"), lines.context("field")), (Some("t"), Some("dtype")));
    let offset: usize = lines.context("offset").expect("a place").parse().expect("a number");
    assert!((28..=36).contains(&offset), "the dtype ends at byte 34: {lines}");
}

#[test]
fn deep_nesting_is_an_error_and_no_overflow_of_the_stack_wherever_it_stands() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let deep_objects = format!("{}1{}", r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    for deep in [deep, deep_objects] {
        refused(format!(r#"{{"t":{deep}}}"#).as_bytes(), b"x");
        refused(format!(r#"{{"__metadata__":{deep}}}"#).as_bytes(), b"x");
        refused(format!(r#"{{"t":{{"note":{deep},"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#).as_bytes(), b"x");
    }
}

#[test]
fn odd_but_legal_styles_are_accepted_as_the_reference_accepts_them() {
    let b = r#""b":{"dtype":"I64","shape":[3],"data_offsets":[24,48]}"#;
    let w = r#""w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}"#;
    let data = [3; 48];
    let texts = [
        format!("{{{w},{b}}}"),
        format!("{{\n\t{w} ,\r\n {b}\n}}"),
        format!("  {{{w},{b}}}"),
        format!("{{{w},{b}}}{}", " ".repeat(1 << 20)),
        format!(r#"{{"\u0077":{{"\u0064type":"F32","shape":[2,3],"data_offsets":[0,24]}},{b}}}"#),
        format!(r#"{{"w":{{"data_offsets":[0,24],"shape":[2,3],"dtype":"F32"}},{b}}}"#),
        format!(r#"{{"__metadata__":{{}},{w},{b}}}"#),
        format!(r#"{{{w},{b},"__metadata__":{{"format":"pt"}}}}"#),
        format!(r#"{{"__metadata__":{{"big":"{}","":"","k\n":"\u00e9\u4e2d\ud83d\ude00"}},{w},{b}}}"#, "x".repeat(2 << 20)),
        format!(r#"{{"__metadata__":null,{w},{b}}}"#),
        format!(
            r#"{{"w":{{"note":{{"a":[1,-2.5e3,null,true,"\u00e9",{{}}]}},"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}},{b}}}"#
        ),
    ];
    for text in &texts {
        accepted(text.as_bytes(), &data);
    }
    for meta in [
        r#"{"n":0}"#,
        r#"{"n":true}"#,
        r#"{"n":null}"#,
        r#"{"n":{"a":"b"}}"#,
        r#"["a"]"#,
        r#""pt""#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#,
    ] {
        let error = refused(format!(r#"{{"__metadata__":{meta},{w},{b}}}"#).as_bytes(), &data);
        assert_eq!(error.context("field"), Some("__metadata__"), "{error}");
    }
    accepted(b"{}", &[]);
    accepted(br#"{"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#, b"x");
}

#[test]
fn values_that_are_not_needed_must_be_as_valid_as_the_others() {
    for bad in ["1e999", r#""\ud800""#, r#"{"\udc00":1}"#, "01", "NaN", "Infinity", "'a'", "\"\u{1}\""] {
        refused(format!(r#"{{"t":{{"note":{bad},"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#).as_bytes(), b"x");
    }
}

#[test]
fn the_header_limit_is_the_references_and_the_refusal_names_it_and_the_size() {
    let json = br#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    for length in [HEADER_BYTES_MAX - 1, HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1] {
        let mut text = json.to_vec();
        text.resize(usize::try_from(length).expect("64-bit machine"), b' ');
        let file = file(&text, &[0; 16]);
        if length <= HEADER_BYTES_MAX {
            assert_eq!(oracle::check(&file).expect("within the limit").data_start, 8 + length);
            continue;
        }
        let error = oracle::read(&file).expect_err("beyond the limit");
        assert!(error.message().contains("100000001 bytes") && error.message().contains("100000000"), "{error}");
    }
    let error = header_length(&u64::MAX.to_le_bytes(), u64::MAX).expect_err("beyond every limit");
    assert_eq!(error.kind(), ErrorKind::Malformed);
}

#[test]
fn a_file_that_is_something_else_is_called_what_it_is() {
    for (bytes, words) in [
        (&b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"[..], "Git LFS pointer"),
        (b"PK\x03\x04\0\0\x08\x08\0\0", "zip archive"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
        (b"GGUF\x03\0\0\0\x10\0\0\0", "GGUF"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"{\"metadata\": {}, \"weight_map\": {}}", "JSON"),
    ] {
        let error = header_length(bytes, bytes.len() as u64).expect_err(words);
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.message().contains(words) && error.hint().is_some(), "{error:?}");
    }
    let error = header_length(b"\0\0", 100).expect_err("a caller that gives too little");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}
