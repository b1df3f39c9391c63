//! Tokenizers of GGUF files.

use std::path::Path;

use mpmd_gguf::TextArray;
use mpmd_models::{Folder, PromptEncoder, Sampling};

use crate::gguf::open;
use crate::gguf_change::{Change, changed, key};

/// Returns a file with the tokens of SentencePiece, which has a token for each byte.
fn pieces(change: Change<'_>) -> tempfile::NamedTempFile {
    // Scores as SentencePiece gives them: the later a piece was found, the lower.
    let pieces = [
        "\u{2581}",
        "a",
        "b",
        "c",
        "ab",
        "\u{2581}a",
        "\u{2581}ab",
        "abc",
        "bc",
        "<tool>",
    ];
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    texts.extend((0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")));
    texts.extend(pieces.map(str::to_owned));
    let mut kinds: Vec<i32> = vec![2, 3, 3];
    kinds.extend([6; 256]);
    kinds.extend([1; 10]);
    // The last one is a token that texts may spell.
    kinds[268] = 4;
    let mut scores = vec![0.0f32; 259];
    scores.extend((0..10).map(|place| -f32::from(place as u8)));
    while texts.len() < 320 {
        texts.push(format!("[PAD{}]", texts.len()));
        kinds.push(5);
        scores.push(-10_000.0);
    }
    let texts: TextArray = texts.iter().collect();
    let mut change = change;
    for (key, value) in [
        ("tokenizer.ggml.model", Some("llama".into())),
        ("tokenizer.ggml.pre", Some("default".into())),
        ("tokenizer.ggml.tokens", Some(texts.into())),
        ("tokenizer.ggml.token_type", Some(kinds.into())),
        ("tokenizer.ggml.scores", Some(scores.into())),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.bos_token_id", Some(1u32.into())),
        ("tokenizer.ggml.eos_token_id", Some(2u32.into())),
        ("tokenizer.ggml.add_bos_token", None),
    ] {
        if !change.keys.iter().any(|(other, _)| *other == key) {
            change.keys.push((key, value));
        }
    }
    changed("plain-q8_0", &change)
}

fn tokens(file: &Path, text: &str, special: bool) -> Vec<u32> {
    let encoder = PromptEncoder::of(&Folder::open(file).unwrap()).unwrap();
    encoder.text_tokens(text, special).unwrap()
}

#[test]
fn pieces_are_joined_by_their_scores() {
    let file = pieces(Change::default());
    // "▁a" has a higher score than "▁ab", and "ab" than both.
    assert_eq!(tokens(file.path(), "abc", false), [265, 262]);
    assert_eq!(tokens(file.path(), "c abc", false), [259, 262, 265, 262]);
    // A character without a token is its bytes.
    assert_eq!(
        tokens(file.path(), "b\u{e9}", false),
        [259, 261, 3 + 0xc3, 3 + 0xa9]
    );
    assert_eq!(tokens(file.path(), "a<tool>b", false), [264, 268, 259, 261]);
    assert_eq!(tokens(file.path(), "a", true), [1, 264]);

    // Some files have merges beside the scores, which alone count.
    let merges: TextArray = ["b c"].into_iter().collect();
    let with_merges = pieces(key("tokenizer.ggml.merges", merges));
    assert_eq!(tokens(with_merges.path(), "abc", false), [265, 262]);

    let no_prefix = pieces(key("tokenizer.ggml.add_space_prefix", false));
    assert_eq!(tokens(no_prefix.path(), "abc", false), [266]);
    let ends = Change {
        keys: vec![
            ("tokenizer.ggml.add_bos_token", Some(false.into())),
            ("tokenizer.ggml.add_eos_token", Some(true.into())),
        ],
        ..Change::default()
    };
    assert_eq!(tokens(pieces(ends).path(), "a", true), [264, 2]);
}

#[test]
fn tokens_of_pieces_are_their_text_again() {
    let file = pieces(Change::default());
    let folder = Folder::open(file.path()).unwrap();
    let tokenizer = mpmd_models::tokenizer(&folder).unwrap();
    for text in ["abc b\u{e9}", "  a", "c"] {
        let ids = tokens(file.path(), text, false);
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn wrong_vocabularies_are_refused_by_key() {
    let twice: TextArray = (0..320).map(|at| format!("t{}", at % 319)).collect();
    let long = (0..320).map(|at| match at {
        260 => "a".repeat(1025),
        _ => format!("t{at}"),
    });
    let long: TextArray = long.collect();
    for (change, right) in [
        (
            key("tokenizer.ggml.tokens", long),
            "tokenizer.ggml.tokens: expected pieces of at most 1024 bytes, found 1025",
        ),
        (
            key("tokenizer.ggml.tokens", twice),
            "tokenizer.ggml.tokens: expected different texts, found \"t0\" at 0 and at 319",
        ),
        (
            key("tokenizer.ggml.token_type", vec![1i32; 7]),
            "tokenizer.ggml.token_type: expected 320 types, one for each token, found 7",
        ),
        (
            key("tokenizer.ggml.scores", vec![1.0f32; 7]),
            "tokenizer.ggml.scores: expected 320 numbers, one for each token, found 7",
        ),
        (
            key("tokenizer.ggml.pre", "qwen2"),
            "tokenizer.ggml.pre: expected \"default\", found \"qwen2\"",
        ),
        (
            key("tokenizer.ggml.add_sep_token", true),
            "tokenizer.ggml.add_sep_token: expected false, found true",
        ),
    ] {
        let file = pieces(change);
        let said = Folder::open(file.path()).unwrap_err().to_string();
        assert!(said.ends_with(right), "{said}");
    }
}

#[test]
fn end_tokens_and_sampling_come_from_the_file() {
    let file = open("qwen3-bf16");
    assert_eq!(file.end_tokens().unwrap(), [1]);
    assert_eq!(Sampling::of(&file).unwrap(), Sampling::default());
    let asks = Change {
        keys: vec![
            ("tokenizer.ggml.eot_token_id", Some(7u32.into())),
            ("general.sampling.temp", Some(0.7f32.into())),
            ("general.sampling.top_k", Some(20i32.into())),
        ],
        ..Change::default()
    };
    let asking = Folder::open(changed("qwen3-bf16", &asks).path()).unwrap();
    assert_eq!(asking.end_tokens().unwrap(), [1, 7]);
    let sampling = Sampling::of(&asking).unwrap();
    assert!((sampling.temperature - 0.7).abs() < 1e-9);
    assert_eq!(sampling.top_k, 20);
    // The template's end of a turn, which no key names.
    let turn = pieces(key("tokenizer.ggml.eos_token_id", u32::MAX));
    assert_eq!(
        Folder::open(turn.path()).unwrap().end_tokens().unwrap(),
        [2]
    );
}
