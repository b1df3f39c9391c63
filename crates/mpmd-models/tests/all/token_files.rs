//! Files of tokens, as nanoGPT and NumPy write them.

use std::fs;

use mpmd_models::{TokenType, Tokens};

use crate::folders::{open, tokens};

/// Returns a file of NumPy with this header and these values.
fn numpy(version: u8, header: &str, values: &[u8]) -> Vec<u8> {
    let text = format!("{header:<117}\n");
    let len = text.len();
    let len = match version {
        1 => (len as u16).to_le_bytes().to_vec(),
        _ => (len as u32).to_le_bytes().to_vec(),
    };
    [
        &b"\x93NUMPY"[..],
        &[version, 0],
        &len,
        text.as_bytes(),
        values,
    ]
    .concat()
}

fn description(dtype: &str, shape: &str) -> String {
    format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}")
}

#[test]
fn tokens_are_read_in_every_form() {
    let folder = open("plain");
    let expected = tokens(&folder).first(50);
    let ids = expected.ids();
    let halves: Vec<u8> = ids
        .iter()
        .flat_map(|id| (*id as u16).to_le_bytes())
        .collect();
    let words: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    for (bytes, raw) in [
        (halves.clone(), TokenType::U16),
        (words.clone(), TokenType::U32),
        (
            numpy(1, &description("<u2", "(50,)"), &halves),
            TokenType::U32,
        ),
        (
            numpy(2, &description("<u4", "(50,)"), &words),
            TokenType::U16,
        ),
    ] {
        fs::write(file.path(), bytes).unwrap();
        let found = Tokens::of_numbers(file.path(), raw, &folder).unwrap();
        assert_eq!(found.ids(), ids);
    }
}

#[test]
fn other_files_are_refused_with_the_place() {
    let folder = open("plain");
    let file = tempfile::NamedTempFile::new().unwrap();
    for (bytes, says) in [
        (
            vec![1, 0, 2],
            "expected numbers of tokens of 2 bytes each, found 3 bytes",
        ),
        (
            vec![5, 0, 64, 1],
            "token 1: expected numbers below 320, the vocab_size of config.json, found 320",
        ),
        (
            numpy(1, &description("<i8", "(1,)"), &[0; 8]),
            "descr: expected \"<u2\" or \"<u4\", little-endian uint16 or uint32, found \"<i8\"",
        ),
        (
            numpy(1, &description("<u2", "(2, 3)"), &[0; 12]),
            "shape: expected an array of NumPy with one dimension, found (2, 3)",
        ),
        (
            numpy(1, &description("<u2", "(4,)"), &[0; 6]),
            "expected the values of (4,), found 6 bytes",
        ),
        (numpy(1, "{}", &[]), "found a damaged header"),
        (
            b"\x93NUMPY\x01\x00\xff\xff".to_vec(),
            "found a damaged header",
        ),
    ] {
        fs::write(file.path(), bytes).unwrap();
        let read = Tokens::of_numbers(file.path(), TokenType::U16, &folder);
        let said = read.map(drop).unwrap_err().to_string();
        let path = file.path().display().to_string();
        assert!(said.starts_with(&path) && said.ends_with(says), "{said}");
    }
}

#[test]
fn other_bytes_in_a_numpy_file_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.npy");
    // They would be tokens of the model in a file of raw numbers.
    fs::write(&file, [3, 0, 4, 0]).unwrap();
    let read = Tokens::of_numbers(&file, TokenType::U16, &open("plain"));
    let said = read.map(drop).unwrap_err().to_string();
    assert!(said.ends_with("found another start"), "{said}");
    assert!(said.starts_with(&file.display().to_string()), "{said}");
}
