//! The index of a sharded model: what the wild has is read, what could do harm is not.

use std::collections::BTreeMap;

use crate::base::error::ErrorKind;
use crate::format::safetensors::{Index, parse_shard_name, shard_file_name, split_into_shards};

fn parse(text: &str) -> Index {
    Index::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn both_keys_are_read_as_the_wild_has_them() {
    let whole = parse(
        r#"{"metadata":{"total_size":6144,"note":"x"},"weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}}"#,
    );
    assert_eq!(whole.total_size, Some(6144));
    assert_eq!(whole.metadata.len(), 1);
    assert_eq!(whole.files(), ["1.safetensors", "2.safetensors"]);
    for (metadata, size) in [
        ("", None),
        (r#""metadata":null,"#, None),
        (r#""metadata":{},"#, None),
        (r#""metadata":{"total_size":13476839424.0},"#, Some(13_476_839_424)),
        (r#""metadata":{"total_size":-1},"#, None),
        (r#""metadata":{"total_size":0.5},"#, None),
        (r#""metadata":{"total_size":1e300},"#, None),
        (r#""metadata":{"total_size":"5GB"},"#, None),
        (r#""other":[{"a":1}],"#, None),
    ] {
        assert_eq!(parse(&format!(r#"{{{metadata}"weight_map":{{"a":"m.safetensors"}}}}"#)).total_size, size, "{metadata}");
    }
    parse(r#"{"weight_map":{"a":"unet/m.safetensors","b":"...","c":"a..b"}}"#);
}

#[test]
fn an_index_that_is_wrong_in_form_is_refused() {
    for text in [
        "",
        "[]",
        "{}",
        r#"{"metadata":{}}"#,
        r#"{"weight_map":{}}"#,
        r#"{"weight_map":null}"#,
        r#"{"weight_map":["a"]}"#,
        r#"{"weight_map":{"a":1}}"#,
        r#"{"weight_map":{"a":null}}"#,
        r#"{"weight_map":{"a":"x","a":"y"}}"#,
        r#"{"weight_map":{"a":"x"},"weight_map":{"a":"x"}}"#,
        r#"{"metadata":null,"metadata":null,"weight_map":{"a":"x"}}"#,
        r#"{"metadata":3,"weight_map":{"a":"x"}}"#,
        r#"{"weight_map":{"a":"x"}} x"#,
        &format!(r#"{{"weight_map":{{"a":"x"}},"deep":{}}}"#, "[".repeat(100_000)),
        &format!(r#"{{"weight_map":{{"a":"x"}},"metadata":{{"deep":{}}}}}"#, "[".repeat(100_000)),
    ] {
        let error = Index::parse(text.as_bytes()).expect_err(&text[..text.len().min(80)]);
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    }
    assert!(Index::parse(b"{\"weight_map\":{\"\xff\":\"x\"}}").is_err());
}

#[test]
fn notes_that_would_take_much_memory_are_refused() {
    let with = |count: usize| format!(r#"{{"metadata":{{"a":[{}0]}},"weight_map":{{"t":"m"}}}}"#, "[],".repeat(count));
    assert_eq!(parse(&with(300_000)).metadata.len(), 1);
    let error = Index::parse(with(400_000).as_bytes()).expect_err("more than is kept");
    assert_eq!(error.kind(), ErrorKind::Malformed);
    assert!(error.message().contains("metadata"), "{error}");
}

#[test]
fn file_names_that_could_lead_out_of_the_directory_are_refused_naming_tensor_and_file() {
    for (file, shown) in [
        ("", ""),
        ("/etc/passwd", "/etc/passwd"),
        ("../m.safetensors", "../m.safetensors"),
        ("a/../../m", "a/../../m"),
        ("..", ".."),
        (".", "."),
        ("./m", "./m"),
        ("a//m", "a//m"),
        ("a/", "a/"),
        ("m\\u0000.safetensors", "m\\u{0}.safetensors"),
    ] {
        let error = Index::parse(format!(r#"{{"weight_map":{{"fine":"m","layer\n0":"{file}"}}}}"#).as_bytes()).expect_err(file);
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert_eq!(error.context("tensor"), Some("layer\\n0"));
        assert!(error.message().contains(&format!("'{shown}'")), "{error}");
    }
}

#[test]
fn the_text_is_what_python_writes_so_that_diffs_stay_empty() {
    let index = Index {
        weight_map: BTreeMap::from([
            ("a\u{7f}\"\n".to_owned(), "model-00001-of-00002.safetensors".to_owned()),
            ("gewicht\u{fc}\u{1f600}".to_owned(), "model-00002-of-00002.safetensors".to_owned()),
        ]),
        total_size: Some(12),
        metadata: serde_json::from_str(r#"{"a":[1,{}],"total_size":"ignored"}"#).expect("an object"),
    };
    let expected = r#"{
  "metadata": {
    "total_size": 12,
    "a": [
      1,
      {}
    ]
  },
  "weight_map": {
    "a\u007f\"\n": "model-00001-of-00002.safetensors",
    "gewicht\u00fc\ud83d\ude00": "model-00002-of-00002.safetensors"
  }
}"#;
    assert_eq!(index.to_json(), expected);
    assert_eq!(parse(expected).weight_map, index.weight_map);
    let bare = Index { weight_map: BTreeMap::from([("a".to_owned(), "m".to_owned())]), ..Index::default() };
    assert_eq!(bare.to_json(), "{\n  \"metadata\": {},\n  \"weight_map\": {\n    \"a\": \"m\"\n  }\n}");
}

#[test]
fn shard_names_follow_the_convention_both_ways() {
    assert_eq!(shard_file_name("model", 1, 3), "model-00001-of-00003.safetensors");
    assert_eq!(shard_file_name("model", 1, 1), "model.safetensors");
    assert_eq!(parse_shard_name("model-00001-of-00003.safetensors"), Some(("model", 1, 3)));
    assert_eq!(parse_shard_name("model-00001-of-00001.safetensors"), Some(("model", 1, 1)));
    assert_eq!(parse_shard_name("a-b-of-c-00012-of-100000.safetensors"), Some(("a-b-of-c", 12, 100_000)));
    for name in [
        "model.safetensors",
        "model-00001-of-00003.bin",
        "model-00004-of-00003.safetensors",
        "model-00000-of-00003.safetensors",
        "model-+0001-of-00003.safetensors",
        "model--of-00003.safetensors",
        "model-1-of-99999999999.safetensors",
        "-of-.safetensors",
    ] {
        assert_eq!(parse_shard_name(name), None, "{name}");
    }
}

#[test]
fn tensors_are_spread_by_the_hubs_rule() {
    for (sizes, limit, shards) in [
        (&[6, 6, 2, 6, 2, 2][..], 10, vec![vec![0], vec![1, 2], vec![3, 4, 5]]),
        (&[20], 10, vec![vec![0]]),
        (&[4, 20, 4, 4], 10, vec![vec![1], vec![0, 2], vec![3]]),
        (&[5, 5, 0, 0], 10, vec![vec![0, 1, 2, 3]]),
        (&[u64::MAX - 1, 5], u64::MAX - 1, vec![vec![0], vec![1]]),
        (&[0, 1], 0, vec![vec![1], vec![0]]),
        (&[], 10, vec![]),
    ] {
        assert_eq!(split_into_shards(sizes, limit), shards, "{sizes:?}");
    }
}
