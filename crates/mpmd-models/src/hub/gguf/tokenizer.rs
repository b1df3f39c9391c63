//! The tokenizer of a GGUF file, as the files beside the weights that a folder of a hub has.

use std::collections::BTreeSet;

use mpmd::Result;
use mpmd_gguf::GgufFile;
use serde_json::{Map, Value, json};

use super::keys::MetadataKeys;
use super::splitters::Splitter;
use super::vocabulary::{TokenKind, Vocabulary};

/// The character that stands for a blank in tokens of SentencePiece.
const BLANK: &str = "\u{2581}";
/// Largest size of a piece in bytes. All pairs of its parts are looked up, and known vocabularies
/// have pieces of up to about a hundred bytes.
const LONGEST_PIECE: usize = 1024;
/// The names of tokens that end a reply or a text. Files have a key for one of them only, as often
/// as not for another than templates write.
const ENDS: [&str; 12] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
];
/// Keys that change no tokens, separated by blanks. Some files have the merges of SentencePiece
/// beside its scores, or scores beside the merges of byte pairs.
const HARMLESS: &str = "
    merges scores
    seperator_token_id cls_token_id mask_token_id fim_pre_token_id fim_suf_token_id
    fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id
    suffix_token_id middle_token_id token_type_count
";

/// The files of a tokenizer, as values of JSON.
pub(super) struct TokenizerFiles {
    /// `tokenizer.json`.
    pub(super) tokenizer: Value,
    /// `tokenizer_config.json`.
    pub(super) settings: Value,
    /// Numbers of the tokens BOS and EOS.
    pub(super) begin: Option<usize>,
    pub(super) end: Option<usize>,
    /// Numbers of all tokens that end a text.
    pub(super) ends: BTreeSet<usize>,
}

/// The special tokens of a file, by number.
struct SpecialTokens {
    begin: Option<usize>,
    end: Option<usize>,
    unknown: Option<usize>,
    padding: Option<usize>,
    /// True if texts begin, or end, with these tokens.
    begins: bool,
    ends: bool,
}

/// Returns the files of the tokenizer. `None` if the file has no tokenizer.
///
/// # Errors
///
/// If the tokenizer is of an unknown kind, a key is missing or has another type, or an unknown one
/// may change tokens.
pub(super) fn tokenizer_of(file: &GgufFile) -> Result<Option<TokenizerFiles>> {
    let keys = MetadataKeys::new(file, "tokenizer.ggml");
    let files = match keys.text("model")? {
        None | Some("none") => return Ok(None),
        Some("gpt2") => byte_pairs(&keys)?,
        Some("llama") => pieces(&keys)?,
        Some(other) => {
            let expected = "\"llama\" (SentencePiece) or \"gpt2\" (byte pairs)";
            return Err(keys.unexpected("model", expected, format!("{other:?}")));
        }
    };
    keys.only_flag("add_sep_token", false)?;
    keys.only_flag("remove_extra_whitespaces", false)?;
    keys.finish(HARMLESS)?;
    Ok(Some(files))
}

/// Reads a tokenizer that merges pairs of bytes, in the order of a list.
fn byte_pairs(keys: &MetadataKeys<'_>) -> Result<TokenizerFiles> {
    let name = keys.text("pre")?;
    let Some(splitter) = name.and_then(Splitter::of) else {
        let found = name.map_or("no such key".to_owned(), |name| format!("{name:?}"));
        return Err(keys.unexpected("pre", Splitter::all(), found));
    };
    let vocabulary = Vocabulary::of(keys)?;
    let merges = keys.texts("merges")?;
    let merges = merges.ok_or_else(|| keys.unexpected("merges", "texts", "no such key"))?;
    let merges = merges.into_iter().map(|merge| {
        // The first of the two may be a blank itself.
        let middle = merge.char_indices().skip(1).find(|(_, char)| *char == ' ');
        let (middle, _) = middle.ok_or_else(|| {
            keys.unexpected(
                "merges",
                "two tokens with a blank between",
                format!("{merge:?}"),
            )
        })?;
        Ok(json!([&merge[..middle], &merge[middle + 1..]]))
    });
    let merges: Vec<Value> = merges.collect::<Result<_>>()?;
    keys.only_flag("add_space_prefix", false)?;

    let special = SpecialTokens::of(keys, &vocabulary, [None; 3], splitter.begins)?;
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added_tokens(keys.file(), &vocabulary, &special)?,
        "normalizer": splitter.normalizer(),
        "pre_tokenizer": splitter.pre_tokenizer(),
        "post_processor": special.post_processor(&vocabulary),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": true,
            "trim_offsets": true,
            "use_regex": true,
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary.to_json(),
            "merges": merges,
            "ignore_merges": splitter.keeps_tokens,
        },
    });
    special.files(keys, &vocabulary, tokenizer)
}

/// Reads a tokenizer of SentencePiece that joins the pair with the highest score.
fn pieces(keys: &MetadataKeys<'_>) -> Result<TokenizerFiles> {
    if let Some(name) = keys.text("pre")?
        && name != "default"
    {
        return Err(keys.unexpected("pre", "\"default\"", format!("{name:?}")));
    }
    let vocabulary = Vocabulary::of(keys)?;
    if let Some(length) = vocabulary
        .longest_piece()
        .filter(|length| *length > LONGEST_PIECE)
    {
        let expected = format!("pieces of at most {LONGEST_PIECE} bytes");
        return Err(keys.unexpected("tokens", expected, length));
    }
    let scores = keys.numbers("scores")?.unwrap_or_default();
    if scores.len() != vocabulary.texts.len() {
        let expected = format!("{} numbers, one for each token", vocabulary.texts.len());
        return Err(keys.unexpected("scores", expected, scores.len()));
    }

    let special = SpecialTokens::of(keys, &vocabulary, [Some(1), Some(2), Some(0)], true)?;
    let has_prefix = keys.flag("add_space_prefix")?.unwrap_or(true);
    let replace = json!({
        "type": "Replace",
        "pattern": { "String": " " },
        "content": BLANK,
    });
    let normalizer = match has_prefix {
        true => json!({
            "type": "Sequence",
            "normalizers": [{ "type": "Prepend", "prepend": BLANK }, replace],
        }),
        false => replace,
    };
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": BLANK }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if has_prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = special.unknown.map(|number| vocabulary.texts[number]);
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added_tokens(keys.file(), &vocabulary, &special)?,
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": special.post_processor(&vocabulary),
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": true,
            "byte_fallback": true,
            "vocab": vocabulary.to_json(),
            "merges": merges_of(&vocabulary, &scores),
        },
    });
    special.files(keys, &vocabulary, tokenizer)
}

/// Returns the merges that join pieces in the order of the scores: all pairs of tokens whose joined
/// text is a token.
fn merges_of(vocabulary: &Vocabulary<'_>, scores: &[f64]) -> Vec<Value> {
    let is_piece = |number: usize| vocabulary.is_piece(number);
    let mut merges = Vec::new();
    for (number, text) in vocabulary.texts.iter().enumerate() {
        if !is_piece(number) {
            continue;
        }
        let mut pairs = Vec::new();
        for (middle, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(middle);
            let both = [left, right].map(|part| vocabulary.numbers.get(part).copied());
            if let [Some(left), Some(right)] = both
                && is_piece(left)
                && is_piece(right)
            {
                pairs.push((left, right));
            }
        }
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|pair| (scores[number], pair)));
    }
    // Equal scores stay in the order of the tokens.
    merges.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let texts = |(_, (left, right)): (f64, (usize, usize))| {
        json!([vocabulary.texts[left], vocabulary.texts[right]])
    };
    merges.into_iter().map(texts).collect()
}

/// Returns the tokens that are looked for in a text before it is split.
fn added_tokens(
    file: &GgufFile,
    vocabulary: &Vocabulary<'_>,
    special: &SpecialTokens,
) -> Result<Vec<Value>> {
    let control: BTreeSet<usize> = [special.begin, special.end].into_iter().flatten().collect();
    // Phi 3 drops the blanks behind most of its special tokens, which no key tells.
    let name = MetadataKeys::new(file, "general").text("name")?;
    let name = name.unwrap_or_default().to_lowercase();
    let is_phi = ["phi-3", "phi3"].iter().any(|part| name.contains(part))
        && vocabulary.kinds.contains(&TokenKind::Byte);
    let keeps_blanks = ["<unk>", "<s>", "<|endoftext|>"];

    let added = vocabulary.added(&control).map(|number| {
        let text = vocabulary.texts[number];
        let is_text = vocabulary.kinds[number] == TokenKind::UserDefined;
        json!({
            "id": number,
            "content": text,
            "single_word": false,
            "lstrip": false,
            "rstrip": is_phi && !keeps_blanks.contains(&text),
            "normalized": false,
            "special": !is_text || control.contains(&number),
        })
    });
    Ok(added.collect())
}

impl SpecialTokens {
    /// Reads the special tokens. `defaults` are the numbers of BOS, EOS and the unknown token in a
    /// file without these keys, and `begins` is whether texts begin with BOS.
    fn of(
        keys: &MetadataKeys<'_>,
        vocabulary: &Vocabulary<'_>,
        defaults: [Option<usize>; 3],
        begins: bool,
    ) -> Result<Self> {
        let [begin, end, unknown] = defaults;
        let special = Self {
            begin: vocabulary.special(keys, "bos_token_id", begin)?,
            end: vocabulary.special(keys, "eos_token_id", end)?,
            unknown: vocabulary.special(keys, "unknown_token_id", unknown)?,
            padding: vocabulary.special(keys, "padding_token_id", None)?,
            begins: keys.flag("add_bos_token")?.unwrap_or(begins),
            ends: keys.flag("add_eos_token")?.unwrap_or(false),
        };
        for (key, number, asks, flag) in [
            (
                "bos_token_id",
                special.begin,
                special.begins,
                "add_bos_token",
            ),
            ("eos_token_id", special.end, special.ends, "add_eos_token"),
        ] {
            if asks && number.is_none() {
                let expected = format!("the number of a token, as {flag} is true");
                return Err(keys.unexpected(key, expected, "none"));
            }
        }
        Ok(special)
    }

    /// Returns the part `post_processor` of a `tokenizer.json`, which adds the tokens around a
    /// text.
    fn post_processor(&self, vocabulary: &Vocabulary<'_>) -> Value {
        let begin = self.begin.filter(|_| self.begins);
        let end = self.end.filter(|_| self.ends);
        if begin.is_none() && end.is_none() {
            return Value::Null;
        }
        let token = |number: usize, side: u8| {
            let text = &vocabulary.texts[number];
            json!({ "SpecialToken": { "id": text, "type_id": side } })
        };
        let around = |name: &str, side: u8| {
            let mut parts: Vec<Value> = begin
                .map(|number| token(number, side))
                .into_iter()
                .collect();
            parts.push(json!({ "Sequence": { "id": name, "type_id": side } }));
            parts.extend(end.map(|number| token(number, side)));
            parts
        };
        let mut pair = around("A", 0);
        pair.extend(around("B", 1));
        let mut tokens = Map::new();
        for number in [begin, end].into_iter().flatten() {
            let text = vocabulary.texts[number];
            let known = json!({ "id": text, "ids": [number], "tokens": [text] });
            tokens.insert(text.to_owned(), known);
        }
        json!({
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": pair,
            "special_tokens": tokens,
        })
    }

    /// Returns the files of a tokenizer with these special tokens.
    fn files(
        self,
        keys: &MetadataKeys<'_>,
        vocabulary: &Vocabulary<'_>,
        tokenizer: Value,
    ) -> Result<TokenizerFiles> {
        let mut settings = Map::new();
        for (name, number) in [
            ("bos_token", self.begin),
            ("eos_token", self.end),
            ("unk_token", self.unknown),
            ("pad_token", self.padding),
        ] {
            if let Some(number) = number {
                settings.insert(name.to_owned(), vocabulary.texts[number].into());
            }
        }
        settings.insert("add_bos_token".to_owned(), self.begins.into());
        settings.insert("add_eos_token".to_owned(), self.ends.into());
        let class = "PreTrainedTokenizerFast";
        settings.insert("tokenizer_class".to_owned(), class.into());
        if let Some(template) = templates(keys.file())? {
            settings.insert("chat_template".to_owned(), template);
        }

        let mut ends: BTreeSet<usize> = self.end.into_iter().collect();
        for key in ["eot_token_id", "eom_token_id"] {
            ends.extend(vocabulary.special(keys, key, None)?);
        }
        let is_added = |number: &usize| {
            let kind = vocabulary.kinds[*number];
            matches!(kind, TokenKind::Control | TokenKind::UserDefined)
        };
        let named = ENDS.iter().filter_map(|name| vocabulary.numbers.get(name));
        ends.extend(named.copied().filter(is_added));
        Ok(TokenizerFiles {
            tokenizer,
            settings: settings.into(),
            begin: self.begin,
            end: self.end,
            ends,
        })
    }
}

/// Returns the chat templates of a file, as a `tokenizer_config.json` has them: one text, or a list
/// of named ones. `None` if the file has none.
fn templates(file: &GgufFile) -> Result<Option<Value>> {
    let keys = MetadataKeys::new(file, "tokenizer");
    let default = keys.text("chat_template")?;
    let names = keys.texts("chat_templates")?.unwrap_or_default();
    keys.finish("ggml. chat_template. huggingface.json")?;

    let mut all = Vec::new();
    all.extend(default.map(|template| json!({ "name": "default", "template": template })));
    for name in names {
        if let Some(template) = keys.text(&format!("chat_template.{name}"))? {
            all.push(json!({ "name": name, "template": template }));
        }
    }
    Ok(match (default, all.len()) {
        (_, 0) => None,
        (Some(template), 1) => Some(template.into()),
        _ => Some(all.into()),
    })
}
