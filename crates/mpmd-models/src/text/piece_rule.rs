//! The bytes that a token adds to a text, for decoders that turn each token into bytes by itself.

use std::collections::VecDeque;

use tokenizers::decoders::strip::Strip;
use tokenizers::{Decoder as _, DecoderWrapper, Result};

/// A decoder as steps that each turn one token's piece of text into another. Such a decoder knows
/// of the context of a token only whether it is the first one.
#[derive(Debug)]
pub(super) struct PieceRule {
    steps: Vec<PieceStep>,
    /// The character that is removed from the start of the whole text, as a byte.
    stripped: u8,
    /// The most characters that are removed from the start of the whole text.
    most_stripped: usize,
}

/// A step from one piece of text to another.
#[derive(Debug)]
enum PieceStep {
    /// A step of the library that depends on nothing but the piece and whether it is the first.
    Library(DecoderWrapper),
    /// Removes a character from both ends of the piece.
    Strip(Strip),
    /// Turns a piece such as `<0x0A>` into a byte.
    ByteFallback,
    /// Turns the characters of GPT-2's table into bytes.
    ByteLevel,
    /// Puts a blank between pieces.
    Blanks,
}

/// A token as the vocabulary has it.
pub(super) struct TokenPiece {
    pub(super) text: String,
    /// True if the token is not of the model, but was added to the tokenizer.
    pub(super) is_added: bool,
}

/// The place of the next token in a text, as far as its bytes depend on it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TextPlace {
    /// True before the first token.
    is_first: bool,
    /// The number of characters that may still be removed from the start of the text.
    to_strip: usize,
}

impl TextPlace {
    /// True if the bytes of later tokens do not depend on the place.
    pub(super) fn is_settled(self) -> bool {
        !self.is_first && self.to_strip == 0
    }
}

impl PieceRule {
    /// Returns the rule of a decoder. `None` if its tokens have no bytes of their own, such as
    /// those of a decoder that leaves out repeated tokens.
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> Option<Self> {
        let mut rule = Self {
            steps: Vec::new(),
            stripped: b' ',
            most_stripped: 0,
        };
        let Some(decoder) = decoder else {
            rule.steps.push(PieceStep::Blanks);
            return Some(rule);
        };

        let mut is_fused = false;
        let mut rest = VecDeque::from([decoder]);
        while let Some(decoder) = rest.pop_front() {
            let is_bytes = |step: &PieceStep| matches!(step, PieceStep::ByteFallback);
            let has_bytes = rule.steps.iter().any(is_bytes);
            match decoder {
                DecoderWrapper::Sequence(inner) => {
                    for decoder in inner.get_decoders().iter().rev() {
                        rest.push_front(decoder);
                    }
                }
                DecoderWrapper::Fuse(_) => is_fused = true,
                DecoderWrapper::Strip(strip) if is_fused => rule.strip_start(strip)?,
                _ if is_fused => return None,
                // Later steps would change the text that bytes make together.
                DecoderWrapper::Metaspace(_) => {
                    rule.steps.push(PieceStep::Library(decoder.clone()));
                }
                _ if has_bytes => return None,
                DecoderWrapper::Replace(_) | DecoderWrapper::WordPiece(_) => {
                    rule.steps.push(PieceStep::Library(decoder.clone()));
                }
                DecoderWrapper::Strip(strip) => rule.steps.push(PieceStep::Strip(strip.clone())),
                DecoderWrapper::ByteFallback(_) => rule.steps.push(PieceStep::ByteFallback),
                DecoderWrapper::ByteLevel(_) => {
                    rule.steps.push(PieceStep::ByteLevel);
                    is_fused = true;
                }
                DecoderWrapper::BPE(_) | DecoderWrapper::CTC(_) => return None,
            }
        }
        Some(rule)
    }

    /// Adds a step that strips the whole text. `None` if it strips the end, or has stripped before.
    fn strip_start(&mut self, strip: &Strip) -> Option<()> {
        let is_known = strip.stop == 0 && strip.content.is_ascii() && self.most_stripped == 0;
        self.stripped = u8::try_from(strip.content).ok().filter(|_| is_known)?;
        self.most_stripped = strip.start;
        Some(())
    }

    /// Returns the start of a text.
    pub(super) fn start(&self) -> TextPlace {
        TextPlace {
            is_first: true,
            to_strip: self.most_stripped,
        }
    }

    /// Returns the bytes that a token adds at `place`, and moves `place` behind it.
    ///
    /// # Errors
    ///
    /// If a pattern of the decoder fails.
    pub(super) fn add(&self, piece: TokenPiece, place: &mut TextPlace) -> Result<Vec<u8>> {
        let mut bytes = self.bytes(piece, place.is_first)?;
        place.is_first = false;
        if place.to_strip == 0 {
            return Ok(bytes);
        }

        let blanks = bytes.iter().take(place.to_strip);
        let blanks = blanks.take_while(|byte| **byte == self.stripped).count();
        bytes.drain(..blanks);
        place.to_strip -= blanks;
        if !bytes.is_empty() {
            place.to_strip = 0;
        }
        Ok(bytes)
    }

    /// Returns the bytes of a token before the start of the text is stripped.
    fn bytes(&self, piece: TokenPiece, is_first: bool) -> Result<Vec<u8>> {
        let TokenPiece {
            text: mut piece,
            is_added,
        } = piece;
        for step in &self.steps {
            match step {
                PieceStep::Library(decoder) => piece = decoded(decoder, piece, is_first)?,
                PieceStep::Strip(strip) => piece = stripped(strip, &piece).to_owned(),
                PieceStep::ByteFallback => {
                    if let Some(byte) = fallback_byte(&piece) {
                        return Ok(vec![byte]);
                    }
                }
                PieceStep::ByteLevel => return Ok(level_bytes(piece, is_added)),
                PieceStep::Blanks if !is_first => piece.insert(0, ' '),
                PieceStep::Blanks => {}
            }
        }
        Ok(piece.into_bytes())
    }
}

/// Returns what the library makes of a piece.
fn decoded(decoder: &DecoderWrapper, piece: String, is_first: bool) -> Result<String> {
    let pieces = match is_first {
        true => vec![piece],
        false => vec![String::new(), piece],
    };
    Ok(decoder.decode_chain(pieces)?.pop().unwrap_or_default())
}

/// Returns a piece without up to `start` and `stop` of the step's characters at its ends.
fn stripped<'a>(strip: &Strip, piece: &'a str) -> &'a str {
    let is_stripped = |char: &char| *char == strip.content;
    let width = strip.content.len_utf8();
    let start = piece.chars().take(strip.start);
    let rest = &piece[start.take_while(is_stripped).count() * width..];
    let end = rest.chars().rev().take(strip.stop);
    &rest[..rest.len() - end.take_while(is_stripped).count() * width]
}

/// Returns the byte that a token such as `<0x0A>` stands for.
fn fallback_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_byte)
}

/// Returns the bytes that the characters of a piece stand for in the table of GPT-2. A piece with
/// another character is text, and so is an added token that only looks like bytes.
fn level_bytes(piece: String, is_added: bool) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = piece.chars().map(level_byte).collect();
    bytes
        .filter(|bytes| !is_added || std::str::from_utf8(bytes).is_ok())
        .unwrap_or_else(|| piece.into_bytes())
}

/// Returns the byte that a character stands for in the table of GPT-2. Bytes of visible characters
/// of Latin-1 stand for themselves; the 68 others have the characters from U+0100 on, in order.
fn level_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}
