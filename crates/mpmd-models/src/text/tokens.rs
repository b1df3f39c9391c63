//! The tokenizer of a folder, and texts as tokens.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mpmd::aval::{DType, ShapedArray};
use mpmd::random::Key;
use mpmd::sharding::Sharding;
use mpmd::train::data::{SEPARATOR, TextBytes, TokenSource};
use mpmd::train::tensors::read_json;
use mpmd::{Error, ProcessId, Program, Result};
use serde_json::Value;
use tokenizers::{Encoding, ModelWrapper, Tokenizer};

use crate::error::unexpected;
use crate::hub::folder::{Folder, TOKENIZER};

/// Length of the pieces into which a text is cut, in bytes. The tokenizer needs some 200 times the
/// memory of a piece.
const PIECE: usize = 64 << 10;
/// Length of the text before and after a cut whose tokens are compared, in bytes.
const CONTEXT: usize = 1 << 10;
/// Limit on how many times longer a text may become before it is cut into tokens. The tokenizer may
/// come from a stranger.
const MOST_GROWTH: f64 = 64.0;
/// Number of blanks that are tried as a cut within one piece's length.
const TRIES: usize = 16;

/// Reads the tokenizer of a folder.
///
/// # Errors
///
/// If `tokenizer.json` is missing or damaged.
pub fn tokenizer(folder: &Folder) -> Result<Tokenizer> {
    let file = folder.file(TOKENIZER);
    let expected = "a tokenizer";
    // The error of the library does not say that a file is missing.
    let json = folder
        .small(TOKENIZER)
        .map_err(|why| unexpected(&file, "", expected, why))?;
    let mut tokenizer: Tokenizer =
        read_json(&json).map_err(|why| unexpected(&file, "", expected, why))?;
    let normalizer = serde_json::to_value(tokenizer.get_normalizer());
    let growth = normalizer.map_or(1.0, |normalizer| text_growth(&normalizer));
    if growth > MOST_GROWTH {
        let expected = format!("rules that make a text at most {MOST_GROWTH} times as long");
        return Err(unexpected(&file, "normalizer", expected, growth));
    }
    let unset = tokenizer.with_padding(None).with_truncation(None).map(drop);
    unset.map_err(|why| unexpected(&file, "", expected, why))?;
    // Some trainings leave it in the file. The tokens would differ from call to call.
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && bpe.dropout.is_some()
    {
        let mut bpe = bpe.clone();
        bpe.dropout = None;
        tokenizer.with_model(bpe);
    }
    Ok(tokenizer)
}

/// Returns how many times longer the texts in a normalizer make a text at most.
fn text_growth(normalizer: &Value) -> f64 {
    let len = |text: &Value| text.as_str().map_or(0.0, |text| text.len() as f64);
    match normalizer["type"].as_str() {
        Some("Sequence") => {
            let all = normalizer["normalizers"].as_array();
            all.into_iter().flatten().map(text_growth).product()
        }
        Some("Replace") => match len(&normalizer["pattern"]["String"]) {
            // An expression may match at each place, and replace nothing.
            0.0 => 1.0 + len(&normalizer["content"]),
            replaced => (len(&normalizer["content"]) / replaced).max(1.0),
        },
        Some("Prepend") => 1.0 + len(&normalizer["prepend"]),
        _ => 1.0,
    }
}

/// Turns a text into tokens, without special tokens.
fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = guarded(|| tokenizer.encode_fast(text, false))?;
    Ok(encoding.get_ids().to_vec())
}

/// Turns a text into tokens with their places. If `special`, the tokenizer adds its special tokens
/// around the text.
///
/// # Errors
///
/// If the tokenizer fails, or its pattern engine gives up.
pub(super) fn encode_text(tokenizer: &Tokenizer, text: &str, special: bool) -> Result<Encoding> {
    guarded(|| tokenizer.encode(text, special))
}

/// True if a text has more than `most` tokens, special ones not counted. Stops soon after that many
/// tokens of a long text.
///
/// # Errors
///
/// If the tokenizer fails, or its pattern engine gives up.
pub(super) fn has_more_tokens(tokenizer: &Tokenizer, text: &str, most: usize) -> Result<bool> {
    let mut ids = Vec::new();
    encode_pieces(tokenizer, text, most.saturating_add(1), &mut ids)?;
    Ok(ids.len() > most)
}

/// Calls `encode`, and returns its result. Turns a panic of the tokenizer into an error.
fn guarded(encode: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<Encoding> {
    let failed = |why: &dyn fmt::Display| Error::Environment(format!("the tokenizer: {why}"));
    // The engine panics if a pattern needs too many attempts.
    let encoding = catch_unwind(AssertUnwindSafe(encode)).map_err(|panic| {
        let why = panic.downcast::<String>();
        let why = why.map_or_else(|_| "a panic".to_owned(), |why| *why);
        failed(&format!("its patterns cannot split the text ({why})"))
    })?;
    encoding.map_err(|why| failed(&why))
}

/// Returns an error if a token of a text has no row in the embedding.
pub fn check_rows<'a>(
    folder: &Folder,
    tokenizer: &Tokenizer,
    mut ids: impl Iterator<Item = &'a u32>,
) -> Result<()> {
    let rows = folder.config().vocab_size;
    let Some(id) = ids.find(|id| **id as usize >= rows) else {
        return Ok(());
    };
    let token = tokenizer.id_to_token(*id).unwrap_or_default();
    let expected = format!("tokens below {rows}, the vocab_size of config.json");
    let found = format!("{id}, which is {token:?}");
    Err(unexpected(
        &folder.file(TOKENIZER),
        "a text",
        expected,
        found,
    ))
}

/// A cut of a text into a piece and the rest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Border {
    /// The end of the piece, as a byte offset.
    end: usize,
    /// The start of the rest, as a byte offset.
    start: usize,
    /// Number of tokens at the start of the rest that are dropped, since the whole text does not
    /// have them.
    extra: usize,
}

/// Appends the tokens of a text to `ids`, piece by piece, until `ids` has at least `count`. Returns
/// the number of pieces.
fn encode_pieces(
    tokenizer: &Tokenizer,
    text: &str,
    count: usize,
    ids: &mut Vec<u32>,
) -> Result<usize> {
    let mut pieces = 0;
    let mut rest = text;
    let mut extra = 0;
    while !rest.is_empty() && ids.len() < count {
        let border = cut(tokenizer, rest)?;
        ids.extend(
            encode(tokenizer, &rest[..border.end])?
                .into_iter()
                .skip(extra),
        );
        pieces += 1;
        rest = &rest[border.start..];
        extra = border.extra;
    }
    Ok(pieces)
}

/// Returns the first cut of a text. The tokens of the text are those of the piece and of the rest,
/// without the extra ones.
///
/// A piece ends at a blank. Some tokenizers split before a blank, and some after it. Some put a
/// blank in front of every text; then the text's own blank is left out, or the added token is
/// extra.
///
/// A blank at which no kind of cut keeps the tokens around it is skipped, so the piece becomes
/// longer.
fn cut(tokenizer: &Tokenizer, text: &str) -> Result<Border> {
    for from in (PIECE..text.len().saturating_sub(CONTEXT)).step_by(PIECE) {
        let from = boundary(text, from);
        let is_first_blank = |(at, char): &(usize, char)| {
            char.is_whitespace() && !text[..from + at].ends_with(char::is_whitespace)
        };
        let window = text[from..]
            .char_indices()
            .take_while(|(at, _)| *at < PIECE);
        for (at, blank) in window.filter(is_first_blank).take(TRIES) {
            let at = from + at;
            let after = at + blank.len_utf8();
            for (end, start, extra) in [(at, at, 0), (after, after, 0), (at, after, 0), (at, at, 1)]
            {
                let border = Border { end, start, extra };
                if start < text.len() && is_border(tokenizer, text, border)? {
                    return Ok(border);
                }
            }
        }
    }
    Ok(Border {
        end: text.len(),
        start: text.len(),
        extra: 0,
    })
}

/// True if the text around a cut has the same tokens as its two parts, without the extra ones.
fn is_border(tokenizer: &Tokenizer, text: &str, border: Border) -> Result<bool> {
    let Border { end, start, extra } = border;
    let from = boundary(text, end.saturating_sub(CONTEXT));
    // The tokens at the end of a word may depend on its whole length.
    let from = text[..from].rfind(char::is_whitespace).unwrap_or(0);
    let until = boundary(text, text.len().min(start + CONTEXT));
    let mut parts = encode(tokenizer, &text[from..end])?;
    parts.extend(
        encode(tokenizer, &text[start..until])?
            .into_iter()
            .skip(extra),
    );
    Ok(parts == encode(tokenizer, &text[from..until])?)
}

/// Returns the largest character boundary up to byte `at`.
pub(crate) fn boundary(text: &str, at: usize) -> usize {
    (0..=at)
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0)
}

/// The token numbers of a text. Clones share the memory.
#[derive(Clone)]
pub struct Tokens {
    ids: Arc<[u32]>,
}

impl Tokens {
    /// Turns a text into tokens, file by file, without special tokens. Long files are cut into
    /// pieces without changing the tokens, so memory grows only with the text and its tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer is invalid or fails. If the text has a token without a row in the
    /// embedding.
    pub fn of(text: &TextBytes, folder: &Folder) -> Result<Self> {
        Self::start_of(text, folder, usize::MAX)
    }

    /// Returns the first `count` tokens of a text, or all if the text has fewer.
    ///
    /// # Errors
    ///
    /// As for [`Tokens::of`].
    pub fn start_of(text: &TextBytes, folder: &Folder, count: usize) -> Result<Self> {
        if !folder.unused().is_empty() {
            // Here, since one process makes the tokens.
            let path = folder.path().display();
            let unused = folder.unused().join(", ");
            tracing::warn!("{path}: the model does not use the tensors {unused}");
        }

        let tokenizer = tokenizer(folder)?;
        let mut ids = Vec::new();
        // The last file ends with a separator, too.
        for file in text.bytes().split(|byte| *byte == SEPARATOR) {
            let file = std::str::from_utf8(file)
                .map_err(|why| Error::Environment(format!("a text is not UTF-8: {why}")))?;
            encode_pieces(&tokenizer, file, count, &mut ids)?;
        }

        ids.truncate(count);
        check_rows(folder, &tokenizer, ids.iter())?;
        Ok(Self { ids: ids.into() })
    }

    /// Creates the tokens with these numbers.
    pub(super) fn of_ids(ids: Vec<u32>) -> Self {
        Self { ids: ids.into() }
    }

    /// Calls `make` on process 0, and returns its tokens on every process. Every process must call
    /// it, and blocks until it has the tokens. In a dry run each process calls `make`.
    ///
    /// # Errors
    ///
    /// If `make` fails, on every process. If a process has no device.
    pub fn spread(p: &mut Program, make: impl Fn() -> Result<Self>) -> Result<Self> {
        Ok(Self {
            ids: spread(p, || Ok(make()?.ids))?,
        })
    }

    /// Returns the first `count` tokens, or all if there are fewer.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        Self {
            ids: self.ids[..self.ids.len().min(count)].into(),
        }
    }

    /// Returns the numbers of the tokens in the vocabulary.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// Calls `make` on process 0, and returns its numbers on every process, as [`Tokens::spread`] does.
pub fn spread(p: &mut Program, make: impl Fn() -> Result<Arc<[u32]>>) -> Result<Arc<[u32]>> {
    let mut own = None;
    let mut make = || match make() {
        Ok(all) => Ok(own.insert(all).len()),
        Err(why) => Err(why.to_string()),
    };

    let in_dry_run = if p.is_dry_run() { make() } else { Ok(0) };
    let len: std::result::Result<usize, String> =
        p.broadcast_value(ProcessId(0), in_dry_run, || Ok(make()))?;
    let len = len.map_err(Error::Environment)?;
    if len == 0 || p.processes() == 1 {
        return Ok(own.unwrap_or_default());
    }

    let no_device = || Error::Environment("a process without a device has no tokens".into());
    let processes = (0..p.processes() as u32).map(ProcessId);
    let devices = processes.map(|process| p.topology().devices_of(process).first().copied());
    let devices = devices.collect::<Option<Vec<_>>>().ok_or_else(no_device)?;
    let everywhere = p.mesh_of(&[("process", devices.len())], &devices)?;

    let aval = ShapedArray::try_new(&[len], DType::U32)?;
    let first = Sharding::single_device(devices[0]);
    let all = own.clone().unwrap_or_default();
    // Only process 0 has the device, and fills it.
    let array = p.array_from_fn(aval, &first, move |_, mut view| {
        view.as_mut_slice::<u32>()?.copy_from_slice(&all);
        Ok(())
    })?;
    let array = p.device_put(&array, everywhere.replicated())?;

    match own {
        Some(all) => Ok(all),
        None => Ok(array
            .to_host()?
            .ok_or_else(no_device)?
            .to_vec::<u32>()?
            .into()),
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.ids.len())
    }
}

impl TokenSource for Tokens {
    fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn read(&self, start: usize, tokens: &mut [u32]) -> Result<()> {
        let Some(ids) = self.ids.get(start..start + tokens.len()) else {
            return Err(Error::kernel(format!(
                "token {start} is near the end of {self:?}"
            )));
        };
        tokens.copy_from_slice(ids);
        Ok(())
    }

    fn compare(&self, p: &mut Program) -> Result<()> {
        let hash = |key: Key, id: &u32| key.fold_in(u64::from(*id));
        let key = self.ids.iter().fold(Key(self.ids.len() as u64), hash);
        p.assert_same(format!("{self:?} of a text, with hash {:016x}", key.0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The byte-level tokenizer of the test folders, which splits texts as GPT-2 does.
    const BYTES: &str = include_str!("../../tests/folders/plain/tokenizer.json");
    /// The regular expression by which the tokenizer of Llama 3 splits texts.
    const LLAMA3: &str = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    );

    fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let mut tokenizer: Value = serde_json::from_str(BYTES).unwrap();
        change(&mut tokenizer);
        Tokenizer::from_bytes(tokenizer.to_string()).unwrap()
    }

    /// Returns a tokenizer of the older kind, in which each word and the text begin with `▁`.
    fn with_prefix(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let mut tokenizer: Value =
            serde_json::from_str(&BYTES.replace('\u{120}', "\u{2581}")).unwrap();
        tokenizer["model"]["unk_token"] = json!("<s>");
        tokenizer["pre_tokenizer"] = Value::Null;
        change(&mut tokenizer);
        Tokenizer::from_bytes(tokenizer.to_string()).unwrap()
    }

    /// Returns a text of at least `bytes` bytes: prose, code, numbers, and runs of blanks.
    fn text(bytes: usize) -> String {
        let mut text = String::new();
        let mut line = 0u32;
        while text.len() < bytes {
            line += 1;
            text += &match line.wrapping_mul(2_654_435_761) % 7 {
                0 => format!("It isn't the {line}th fox; \"jumps\",  he said.\r\n"),
                1 => {
                    format!(
                        "{}if (x_{line} != {}) {{\n",
                        " ".repeat(line as usize % 9),
                        line * 977
                    )
                }
                2 => "\n\n \n\t\t\n".to_owned(),
                3 => format!("\u{72d0}\u{72f8}\u{ff0c}{line}\u{3002} caf\u{e9} e\u{301}\u{a0}x\n"),
                4 => "a".repeat(line as usize % 50) + "  ",
                _ => "the quick brown fox jumps over the lazy dog. ".to_owned(),
            };
        }
        text
    }

    /// Returns a text without blanks: lines of a table with Chinese characters.
    fn dense_text(bytes: usize) -> String {
        let line = |line: u32| format!("{line},\u{72d0}\u{72f8}\u{ff0c}x{}\n", line * 977 % 1009);
        (0..bytes as u32 / 16).map(line).collect()
    }

    /// Returns lines of `=` signs. A line has an odd length, more than [`CONTEXT`].
    fn rules(bytes: usize) -> String {
        format!("{}\n", "=".repeat(2 * CONTEXT + 1)).repeat(bytes / 2 / CONTEXT)
    }

    /// Checks with each tokenizer that the pieces of a text are short and have the text's tokens.
    fn assert_pieces(text: &str) {
        for (name, tokenizer) in tokenizers() {
            let mut found = Vec::new();
            let pieces = encode_pieces(&tokenizer, text, usize::MAX, &mut found).unwrap();
            assert!(pieces >= text.len() / PIECE, "{name}: {pieces} pieces");
            let whole = encode(&tokenizer, text).unwrap();
            let differs = found.iter().zip(&whole).position(|(a, b)| a != b);
            assert!(
                found == whole,
                "{name}: differs at token {differs:?} of {}",
                whole.len()
            );
        }
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        assert_pieces(&text(6 * PIECE));
    }

    #[test]
    fn lines_without_blanks_are_cut() {
        assert_pieces(&dense_text(3 * PIECE));
    }

    #[test]
    fn lines_longer_than_the_compared_text_keep_their_tokens() {
        assert_pieces(&rules(3 * PIECE));
    }

    fn tokenizers() -> [(&'static str, Tokenizer); 5] {
        let split = json!({ "type": "Split", "pattern": { "Regex": LLAMA3 },
            "behavior": "Isolated", "invert": false });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false });
        let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
        let replace = json!({ "type": "Replace", "pattern": { "String": " " },
            "content": "\u{2581}" });
        let metaspace = json!({ "type": "Metaspace", "replacement": "\u{2581}",
            "prepend_scheme": "first", "split": false });
        [
            ("GPT-2", changed(|_| {})),
            (
                "Llama 3",
                changed(|tokenizer| {
                    tokenizer["pre_tokenizer"] =
                        json!({ "type": "Sequence", "pretokenizers": [split, bytes] });
                    // So the end of a line of marks depends on their number.
                    for (id, pair) in [(320, ["=", "="]), (321, ["=", "\u{10a}"])] {
                        tokenizer["model"]["vocab"][pair.concat()] = json!(id);
                        tokenizer["model"]["merges"]
                            .as_array_mut()
                            .unwrap()
                            .push(json!(pair));
                    }
                }),
            ),
            (
                "a prefix",
                changed(|tokenizer| {
                    tokenizer["pre_tokenizer"]["add_prefix_space"] = json!(true);
                }),
            ),
            (
                "Stages 2",
                with_prefix(|tokenizer| {
                    tokenizer["normalizer"] =
                        json!({ "type": "Sequence", "normalizers": [prepend, replace] });
                }),
            ),
            (
                "Metaspace",
                with_prefix(|tokenizer| tokenizer["pre_tokenizer"] = metaspace),
            ),
        ]
    }

    #[test]
    fn text_without_a_border_is_one_piece() {
        let tokenizer = changed(|_| {});
        let word = "a".repeat(3 * PIECE);
        let blanks = format!("{}x", " ".repeat(3 * PIECE));
        for text in [word, blanks] {
            let whole = Border {
                end: text.len(),
                start: text.len(),
                extra: 0,
            };
            assert_eq!(cut(&tokenizer, &text).unwrap(), whole);
        }
    }
}
