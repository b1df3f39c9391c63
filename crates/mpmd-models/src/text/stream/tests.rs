//! Tests of the text of tokens, for tokenizers of all kinds.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;
use crate::{Folder, tokenizer};

/// The tokens of the tokenizers that [`with_decoder`] makes, by their numbers.
const PIECES: [&str; 30] = [
    "<unk>",
    "<s>",
    "</s>",
    "<0x0A>",
    "<0xE4>",
    "<0xBD>",
    "<0xA0>",
    "<0x20>",
    "\u{2581}",
    "\u{2581}time",
    "\u{2581}\u{2581}x",
    "ing",
    "##ing",
    "[CLS]",
    " .",
    "low</w>",
    "er</w>",
    "|",
    "<pad>",
    "你",
    "ä½\u{142}",
    "Ġa",
    "Ċ",
    "ð",
    "Ł",
    "é",
    "",
    "a b",
    "n't",
    "\u{fffd}",
];
/// The special tokens of [`PIECES`].
const SPECIAL: [&str; 4] = ["<s>", "</s>", "[CLS]", ""];

/// Returns the number of a piece.
fn id(piece: &str) -> u32 {
    PIECES.iter().position(|found| *found == piece).unwrap() as u32
}

/// Returns a tokenizer of [`PIECES`] with this decoder.
fn with_decoder(decoder: Value) -> Arc<TokenDecoder> {
    let ids = 0..PIECES.len();
    let vocab: Value = ids.map(|at| (PIECES[at].to_owned(), json!(at))).collect();
    let added = SPECIAL.map(|text| {
        json!({ "id": id(text), "content": text, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    });
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" },
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
    Arc::new(TokenDecoder::new(Arc::new(tokenizer)))
}

fn replace() -> Value {
    json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " })
}

fn strip(start: usize, stop: usize) -> Value {
    json!({ "type": "Strip", "content": " ", "start": start, "stop": stop })
}

fn sequence(decoders: &[Value]) -> Value {
    json!({ "type": "Sequence", "decoders": decoders })
}

/// Returns the decoder of Llama 2, Mistral 7B and Phi 3.
fn llama() -> Arc<TokenDecoder> {
    let (bytes, fuse) = (json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" }));
    with_decoder(sequence(&[replace(), bytes, fuse, strip(1, 0)]))
}

/// Returns a decoder of every kind, with its name.
fn decoders() -> Vec<(String, Arc<TokenDecoder>)> {
    let (bytes, fuse) = (json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" }));
    let metaspace = |scheme: &str| {
        json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme,
            "split": true })
    };
    let level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
        "use_regex": true });
    let pieces = |cleanup: bool| json!({ "type": "WordPiece", "prefix": "##", "cleanup": cleanup });
    [
        Value::Null,
        level.clone(),
        sequence(&[level.clone(), strip(2, 0)]),
        sequence(&[replace(), level]),
        sequence(&[replace(), bytes.clone(), fuse.clone(), strip(1, 0)]),
        sequence(&[replace(), bytes.clone(), fuse.clone()]),
        sequence(&[replace(), sequence(&[fuse.clone(), strip(2, 0)])]),
        sequence(&[replace(), strip(1, 0)]),
        sequence(&[bytes, metaspace("first")]),
        metaspace("always"),
        metaspace("first"),
        metaspace("never"),
        pieces(false),
        pieces(true),
        // These have no bytes for each token.
        json!({ "type": "BPEDecoder", "suffix": "</w>" }),
        json!({ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|",
            "cleanup": true }),
        sequence(&[fuse.clone(), metaspace("never")]),
        sequence(&[fuse, replace()]),
    ]
    .into_iter()
    .map(|decoder| (decoder.to_string(), with_decoder(decoder)))
    .collect()
}

/// Returns the tokenizers of the test folders that differ, with the names of the folders.
fn folder_tokenizers() -> Vec<(String, Arc<Tokenizer>)> {
    let all = format!("{}/tests/folders", env!("CARGO_MANIFEST_DIR"));
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for folder in fs::read_dir(all)
        .unwrap()
        .map(|folder| folder.unwrap().path())
    {
        let Ok(json) = fs::read(folder.join("tokenizer.json")) else {
            continue;
        };
        if !seen.contains(&json) {
            let tokenizer = tokenizer(&Folder::open(&folder).unwrap()).unwrap();
            found.push((folder.display().to_string(), Arc::new(tokenizer)));
            seen.push(json);
        }
    }
    found
}

fn gpt2() -> (Arc<Tokenizer>, Arc<TokenDecoder>) {
    let folder = format!("{}/tests/folders/gpt2", env!("CARGO_MANIFEST_DIR"));
    let tokenizer = Arc::new(tokenizer(&Folder::open(folder).unwrap()).unwrap());
    (tokenizer.clone(), Arc::new(TokenDecoder::new(tokenizer)))
}

/// Returns the parts in which the text of tokens behind a prompt is given out, and whether it was
/// stopped.
fn parts(
    decoder: &Arc<TokenDecoder>,
    prompt: &[u32],
    tokens: &[u32],
    stops: &[&str],
) -> (Vec<String>, bool) {
    let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let mut text = TextStream::new(decoder.clone(), prompt, stops).unwrap();
    let mut parts: Vec<String> = tokens
        .iter()
        .map(|token| text.push(*token).unwrap().to_owned())
        .collect();
    parts.push(text.end().unwrap().to_owned());
    assert_eq!(parts.concat(), text.given());
    (parts, text.is_stopped())
}

fn text(decoder: &Arc<TokenDecoder>, prompt: &[u32], tokens: &[u32]) -> String {
    parts(decoder, prompt, tokens, &[]).0.concat()
}

/// Checks that a prompt's text and that of the tokens behind it are the text of all tokens.
fn assert_whole(decoder: &Arc<TokenDecoder>, tokens: &[u32], cut: usize) {
    let (prompt, reply) = tokens.split_at(cut);
    let all = text(decoder, &[], tokens);
    let before = text(decoder, &[], prompt);
    let after = text(decoder, prompt, reply);
    // The last character of the prompt may be finished by the tokens behind it.
    let finished = before.strip_suffix(char::REPLACEMENT_CHARACTER);
    let is_whole = finished.is_some_and(|before| format!("{before}{after}") == all);
    assert!(
        is_whole || format!("{before}{after}") == all,
        "{tokens:?} cut at {cut}: {before:?} and {after:?} are not {all:?}"
    );
}

/// Checks that the text of tokens is that of the library, where all bytes are characters.
fn assert_library(decoder: &Arc<TokenDecoder>, tokens: &[u32]) {
    let is_special = |token: &u32| {
        let effect = decoder.effect(*token);
        matches!(effect, TokenEffect::Special(_))
    };
    let shown: Vec<u32> = tokens
        .iter()
        .copied()
        .filter(|token| !is_special(token))
        .collect();
    for (tokens, found) in [
        (&*shown, text(decoder, &[], tokens)),
        (tokens, decoder.text(tokens).unwrap()),
    ] {
        let expected = decoder.decoded(tokens).unwrap();
        if !expected.contains(char::REPLACEMENT_CHARACTER) {
            assert_eq!(found, expected, "{tokens:?}");
        }
    }
}

#[test]
fn parts_are_together_what_all_tokens_are() {
    let long = "  A näive café — 日本語 🙂🙂, \u{fffd} twice  two.\n\n\tEnd ";
    for (name, tokenizer) in folder_tokenizers() {
        let decoder = Arc::new(TokenDecoder::new(tokenizer.clone()));
        let tokens = tokenizer.encode(long, true).unwrap().get_ids().to_vec();
        for end in 0..=tokens.len() {
            let whole = tokenizer.decode(&tokens[..end], true).unwrap();
            assert_eq!(
                text(&decoder, &[], &tokens[..end]),
                whole,
                "{name}, {end} tokens"
            );
            assert_whole(&decoder, &tokens, end);
        }
    }
}

#[test]
fn fuzz_token_texts() {
    let mut all = decoders();
    for (name, tokenizer) in folder_tokenizers() {
        all.push((name, Arc::new(TokenDecoder::new(tokenizer))));
    }
    mpmd_fuzz::cases("token-texts", |rng| {
        let (name, decoder) = &all[rng.usize(..all.len())];
        let most = if rng.bool() {
            PIECES.len() as u32 + 2
        } else {
            330
        };
        let tokens: Vec<u32> = (0..rng.usize(..24)).map(|_| rng.u32(..most)).collect();
        let cut = rng.usize(..=tokens.len());
        let checked = std::panic::catch_unwind(|| {
            assert_whole(decoder, &tokens, cut);
            assert_library(decoder, &tokens);
        });
        assert!(checked.is_ok(), "{name}");
    });
}

#[test]
fn reply_keeps_the_blank_before_its_first_word() {
    let (time, x) = (id("\u{2581}time"), id("\u{2581}\u{2581}x"));
    let special = id("<s>");
    let llama = llama();
    assert_eq!(text(&llama, &[special, time], &[time, x]), " time  x");
    // Behind a prompt of special tokens the reply begins the text.
    assert_eq!(text(&llama, &[special], &[time, x]), "time  x");
    assert_eq!(text(&llama, &[special, id("\u{2581}")], &[time]), " time");

    let pieces = with_decoder(json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }));
    assert_eq!(
        text(&pieces, &[id("ing")], &[id("ing"), id("##ing")]),
        " inging"
    );
    let none = with_decoder(Value::Null);
    assert_eq!(text(&none, &[id("ing")], &[id("ing")]), " ing");
    let suffix = with_decoder(json!({ "type": "BPEDecoder", "suffix": "</w>" }));
    assert_eq!(
        text(&suffix, &[id("low</w>")], &[id("er</w>"), id("ing")]),
        " er ing"
    );
}

#[test]
fn characters_may_begin_in_the_prompt() {
    let bytes = [id("<0xE4>"), id("<0xBD>"), id("<0xA0>")];
    let llama = llama();
    let special = id("<s>");
    for cut in 0..bytes.len() {
        assert_eq!(text(&llama, &bytes[..cut], &bytes[cut..]), "你");
        let apart = [&bytes[cut..], &[special, special]].concat();
        assert_eq!(text(&llama, &bytes[..cut], &apart), "你");
    }
    // The prompt's text has the replacement of a character that never ends.
    assert_eq!(text(&llama, &bytes[..1], &[id("ing")]), "ing");
    assert_eq!(
        text(&llama, &[], &[bytes[0], id("ing"), bytes[0]]),
        "\u{fffd}ing\u{fffd}"
    );
}

#[test]
fn tokens_have_the_bytes_of_the_vocabulary() {
    let stream = |decoder, prompt: &[u32]| TextStream::new(decoder, prompt, Vec::new()).unwrap();
    let time = id("\u{2581}time");
    let behind = stream(llama(), &[time]);
    for (piece, expected) in [
        ("\u{2581}time", " time".as_bytes()),
        ("<0xE4>", b"\xe4"),
        ("<0x0A>", b"\n"),
        ("é", "é".as_bytes()),
        ("</s>", b"</s>"),
    ] {
        assert_eq!(behind.bytes_of(id(piece)).unwrap(), expected, "{piece}");
    }
    assert_eq!(stream(llama(), &[]).bytes_of(time).unwrap(), b"time");
    assert_eq!(behind.bytes_of(1000).unwrap(), b"");

    let level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
        "use_regex": true });
    let level = stream(with_decoder(level), &[]);
    for (piece, expected) in [
        ("Ġa", b" a" as &[u8]),
        ("ð", b"\xf0"),
        ("Ł", b"\x9f"),
        ("Ċ", b"\n"),
    ] {
        assert_eq!(level.bytes_of(id(piece)).unwrap(), expected, "{piece}");
    }
}

#[test]
fn table_of_bytes_is_that_of_the_library() {
    let (tokenizer, decoder) = gpt2();
    let stream = TextStream::new(decoder, &[], Vec::new()).unwrap();
    let mut seen = Vec::new();
    for (piece, token) in tokenizer.get_vocab(false) {
        if piece.chars().count() == 1 {
            let bytes = stream.bytes_of(token).unwrap();
            assert_eq!(bytes.len(), 1, "{piece}");
            seen.extend(bytes);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
}

#[test]
fn special_tokens_cost_little() {
    let many = vec![id("<s>"); 32_000];
    for (name, decoder) in decoders() {
        let from = Instant::now();
        assert_eq!(text(&decoder, &many, &many), "", "{name}");
        assert_eq!(text(&decoder, &many, &[id("ing")]), "ing", "{name}");
        let took = from.elapsed();
        assert!(took < Duration::from_secs(2), "{name}: {took:?}");
    }
}

#[test]
fn characters_of_several_tokens_are_given_out_whole() {
    let (tokenizer, decoder) = gpt2();
    let tokens = tokenizer.encode("a🙂b", false).unwrap().get_ids().to_vec();
    assert!(tokens.len() > 3);
    let (parts, _) = parts(&decoder, &[], &tokens, &[]);
    assert!(
        parts.iter().all(|part| !part.contains('\u{fffd}')),
        "{parts:?}"
    );
}

#[test]
fn stops_over_several_tokens_are_cut_and_never_begun() {
    let (tokenizer, decoder) = gpt2();
    for (text, stops, expected) in [
        ("one two three", &["o th"] as &[&str], "one tw"),
        ("one two three", &["three", "two"], "one "),
        ("one two three", &["two", "one two"], ""),
        ("one two three", &["threefold"], "one two three"),
        ("ein 🙂 und 🙁", &["🙂 u"], "ein "),
        ("ein 🙂 und 🙁", &["🙁🙁", "x"], "ein 🙂 und 🙁"),
        ("aaab", &["aab"], "a"),
        ("text", &[""], "text"),
    ] {
        let tokens = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
        let (parts, is_stopped) = parts(&decoder, &[], &tokens, stops);
        assert_eq!(parts.concat(), expected, "{text} {stops:?}");
        assert_eq!(is_stopped, expected.len() < text.len());
    }
    // Nothing is given out that a later token may turn into a stop.
    let tokens = tokenizer.encode("ab", false).unwrap().get_ids().to_vec();
    let mut text = TextStream::new(decoder, &[], vec!["abc".to_owned()]).unwrap();
    assert!(
        tokens
            .iter()
            .all(|token| text.push(*token).unwrap().is_empty())
    );
    assert_eq!(text.end().unwrap(), "ab");
}

#[test]
fn stops_with_special_tokens_end_the_text_there() {
    let tokens = ["ing", "\u{2581}time", "</s>", "|", "<s>", "a b"].map(id);
    for (stops, expected) in [
        (&["</s>"] as &[&str], "ing time"),
        (&["</s>|"], "ing time"),
        (&["e</s>"], "ing tim"),
        (&["time</s>|<s>a b"], "ing "),
        (&["|<s>a", "e</s>x"], "ing time"),
        (&["</s>x", "<s>x", "</s></s>"], "ing time|a b"),
        (&["</s>x", "|a"], "ing time"),
        (&["[CLS]"], "ing time|a b"),
    ] {
        let (parts, is_stopped) = parts(&llama(), &[], &tokens, stops);
        assert_eq!(parts.concat(), expected, "{stops:?}");
        assert_eq!(is_stopped, expected.len() < "ing time|a b".len());
        assert!(expected.starts_with(&parts[..2].concat()), "{parts:?}");
    }
    // An end token adds no text, but may finish a stop text.
    for (stop, expected) in [
        ("time</s>", "ing "),
        ("</s>", "ing time"),
        ("</s>x", "ing time"),
    ] {
        let mut text = TextStream::new(llama(), &[], vec![stop.to_owned()]).unwrap();
        for token in &tokens[..2] {
            text.push(*token).unwrap();
        }
        text.push_end(id("</s>"));
        text.end().unwrap();
        assert_eq!(text.given(), expected, "{stop}");
    }
    // The texts of special tokens that other tokens write are stops, too.
    let (tokenizer, decoder) = gpt2();
    let texts = ["a<", "/s", ">b"].map(|part| tokenizer.encode(part, false).unwrap());
    let tokens = texts.map(|text| text.get_ids().to_vec()).concat();
    assert_eq!(parts(&decoder, &[], &tokens, &["</s>"]).0.concat(), "a");
}
