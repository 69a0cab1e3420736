//! Tests of the whole format: against the reference crate, against inputs that broke other software, and round trips.

mod cases;
mod index;
mod layout;
mod names_and_dtypes;
mod oracle;
mod properties;

use crate::base::error::{Error, ErrorKind};

/// A file from its JSON text and its data, without padding.
fn file(text: &[u8], data: &[u8]) -> Vec<u8> {
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text);
    file.extend_from_slice(data);
    file
}

/// Checks a file against the reference and gives our refusal of it.
fn refused(text: &[u8], data: &[u8]) -> Error {
    let file = file(text, data);
    oracle::check(&file);
    let error = oracle::read(&file).expect_err(&String::from_utf8_lossy(&text[..text.len().min(200)]));
    assert!(matches!(error.kind(), ErrorKind::Malformed | ErrorKind::UnexpectedEof), "{error:?}");
    assert!(!error.to_string().chars().any(char::is_control), "{error}");
    error
}
