//! A pass of inference: some tokens of some sequences, and the form in which stages get it.

use std::fmt;

use mpmd::candle::candle_core::bail;
use mpmd::candle::nn::{BLOCK, PagedRows};
use mpmd::candle::{Result as CandleResult, Tensor};
use mpmd::random::Key;
use mpmd::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::inference::sample::Sampling;

/// A pass of inference through all stages: the next tokens of some sequences.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct InferencePass {
    /// The version of the weights that the pass uses. 0 is the version of the folder; see
    /// [`WeightVersions`](crate::WeightVersions).
    pub version: u64,
    /// The tokens to compute, one chunk for each sequence.
    pub chunks: Vec<PassChunk>,
}

/// Consecutive tokens of one sequence that a pass computes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PassChunk {
    /// The slot of the sequence: its index in the stages' tables of sequences.
    pub slot: u32,
    /// Position of the chunk's first token in the sequence.
    pub start: u32,
    /// The tokens. If empty, the chunk is the last token that was chosen for this slot.
    pub given: Vec<u32>,
    /// True if the pass chooses the token that follows the chunk.
    pub samples: bool,
    /// The blocks with the sequence's keys and values, from the first token up to the chunk's last
    /// one.
    pub blocks: Vec<u32>,
    /// The settings of a new sequence that starts in this slot. `None` if the slot's sequence goes
    /// on.
    pub new: Option<NewSequence>,
}

/// The settings of a new sequence: how its tokens are chosen and reported.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct NewSequence {
    /// The settings for choosing each token.
    pub sampling: Sampling,
    /// Number of tokens in the prompt, with which the sequence starts.
    pub prompt: u32,
    /// Number of most probable tokens that are reported with each chosen token, at most [`TOP`].
    /// `None` if no probabilities are reported.
    pub top: Option<u32>,
}

/// Limit on [`NewSequence::top`].
pub const TOP: usize = 20;
/// Number of 32-bit words in a choice: the token, the logarithm of its probability, and [`TOP`]
/// tokens with their logarithms.
pub(crate) const CHOICE: usize = 2 + 2 * TOP;
/// Number of words in a row of the choices of a pass: the slot, and the slot's choice.
pub(crate) const CHOICE_ROW: usize = 1 + CHOICE;
/// Code for "no token was chosen" in the word of a token.
pub(crate) const NONE: u32 = u32::MAX;

/// Sizes of the arrays for passes, as (tokens, words for chunks). [`PassForms::of`] raises the last
/// number of words for long sequences.
const FORMS: [(usize, usize); 5] = [
    (1, 512),
    (8, 2048),
    (32, 4096),
    (128, 16_384),
    (512, 16_384),
];
/// Number of words before the chunks of a pass: the number of chunks, and two words of the version.
const START: usize = 3;
/// Number of words of a chunk apart from its tokens, blocks and new sequence.
const HEAD: usize = 6;
/// Number of words of a [`NewSequence`].
const BEGIN: usize = 18;

/// The largest number of tokens of a pass.
pub const MOST_TOKENS: usize = FORMS[FORMS.len() - 1].0;

/// Returns the number of rows in the choices of a pass: the most choices that one pass can make
/// where the stages have `slots` slots. Each choice needs a token of the pass.
pub(crate) fn choice_rows(slots: usize) -> usize {
    slots.min(MOST_TOKENS)
}

/// Returns the largest sum of [`PassChunk::words`] in one pass, for sequences of up to `positions`
/// tokens. A single chunk of such a sequence always fits.
pub fn most_words(positions: usize) -> usize {
    PassForms::of(positions).largest().words - START
}

/// The sizes of the arrays in which stages receive a pass.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct PassForm {
    pub(crate) tokens: usize,
    pub(crate) words: usize,
}

/// The sizes that the arrays of a pass can have, the smallest first.
#[derive(Clone, Debug)]
pub(crate) struct PassForms([PassForm; FORMS.len()]);

impl PassForms {
    /// Creates the sizes for sequences of up to `positions` tokens.
    pub(crate) fn of(positions: usize) -> Self {
        let mut forms = FORMS.map(|(tokens, words)| PassForm { tokens, words });
        let largest = &mut forms[FORMS.len() - 1];
        let blocks = positions.div_ceil(BLOCK);
        largest.words = largest
            .words
            .max(START + HEAD + BEGIN + largest.tokens + blocks);
        Self(forms)
    }

    fn largest(&self) -> PassForm {
        self.0[FORMS.len() - 1]
    }

    /// Returns the smallest sizes into which a pass fits.
    ///
    /// # Errors
    ///
    /// If the pass is larger than the largest sizes.
    pub(crate) fn form(&self, pass: &InferencePass) -> Result<PassForm> {
        let tokens = pass.tokens();
        let words: usize = pass.chunks.iter().map(PassChunk::words).sum();

        let has_room = |form: &&PassForm| tokens <= form.tokens && words + START <= form.words;
        self.0.iter().find(has_room).copied().ok_or_else(|| {
            let PassForm {
                tokens: most_tokens,
                words: most_words,
            } = self.largest();
            Error::kernel(format!(
                "a pass of {tokens} tokens and {words} words: at most {most_tokens} and {} have \
                 room",
                most_words - START
            ))
        })
    }

    /// Returns one pass for each size, with one sequence and without a choice of the next token.
    /// The cache has blocks for `most` tokens.
    pub(crate) fn pass_of_each(&self, most: usize) -> impl Iterator<Item = InferencePass> {
        self.0.into_iter().map(move |form| {
            let tokens = form.tokens.min(most).max(1);
            InferencePass::without_choice(
                vec![0; tokens],
                (0..tokens.div_ceil(BLOCK) as u32).collect(),
            )
        })
    }

    /// Returns passes of one token with so many blocks that they need a larger size than a pass of
    /// `tokens` tokens. Passes of long sequences may have such sizes.
    pub(crate) fn pass_of_each_wider(&self, tokens: usize) -> impl Iterator<Item = InferencePass> {
        let pairs = self.0.windows(2);
        let wider = pairs.filter(move |two| two[0].tokens >= tokens && two[1].words > two[0].words);
        wider.map(|two| InferencePass::without_choice(vec![0], vec![0; two[0].words]))
    }
}

impl PassChunk {
    /// Returns the number of tokens in the chunk.
    pub fn tokens(&self) -> usize {
        self.given.len().max(1)
    }

    /// Returns the number of 32-bit words that encode the chunk.
    pub fn words(&self) -> usize {
        let begin = if self.new.is_some() { BEGIN } else { 0 };
        HEAD + begin + self.given.len() + self.blocks.len()
    }
}

impl fmt::Display for InferencePass {
    /// Writes the numbers of chunks and tokens, and a hash of the whole pass.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = self
            .words()
            .into_iter()
            .fold(Key(0), |key, word| key.fold_in(word.into()));
        let Self { version, chunks } = self;
        let tokens = self.tokens();
        let sequences = chunks.len();
        write!(
            f,
            "a pass of {tokens} tokens of {sequences} sequences by version {version}"
        )?;
        write!(f, " of the weights, with hash {:016x}", hash.0)
    }
}

impl InferencePass {
    /// Creates a pass of one sequence's first tokens that chooses no next token.
    fn without_choice(given: Vec<u32>, blocks: Vec<u32>) -> Self {
        let chunk = PassChunk {
            slot: 0,
            start: 0,
            given,
            samples: false,
            blocks,
            new: None,
        };
        Self {
            version: 0,
            chunks: vec![chunk],
        }
    }

    /// Returns the number of tokens in all chunks.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(PassChunk::tokens).sum()
    }

    /// Writes the tokens of all chunks, and 0 for a chunk's token that the first stage looks up
    /// itself.
    pub(crate) fn write_tokens(&self, to: &mut [u32]) {
        to.fill(0);
        let mut at = 0;
        for chunk in &self.chunks {
            to[at..][..chunk.given.len()].copy_from_slice(&chunk.given);
            at += chunk.tokens();
        }
    }

    /// Writes the encoded pass, and fills the rest of `to` with zeros.
    pub(crate) fn write(&self, to: &mut [u32]) {
        let words = self.words();
        to[..words.len()].copy_from_slice(&words);
        to[words.len()..].fill(0);
    }

    fn words(&self) -> Vec<u32> {
        let Self { version, chunks } = self;
        let mut words = vec![
            chunks.len() as u32,
            *version as u32,
            (*version >> 32) as u32,
        ];
        for chunk in chunks {
            let PassChunk {
                slot,
                start,
                given,
                samples,
                blocks,
                new,
            } = chunk;
            let counts = [given.len() as u32, blocks.len() as u32];
            let flags = u32::from(*samples) + 2 * u32::from(new.is_some());
            words.extend([*slot, *start, counts[0], counts[1], flags, 0]);
            if let Some(NewSequence {
                sampling,
                prompt,
                top,
            }) = new
            {
                let numbers = [
                    sampling.temperature,
                    sampling.top_p,
                    sampling.min_p,
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                ];
                let numbers = numbers.map(f64::to_bits).into_iter();
                let wide = numbers.chain([sampling.seed, sampling.top_k as u64]);
                words.extend(wide.flat_map(|wide| [wide as u32, (wide >> 32) as u32]));
                words.extend([*prompt, top.map_or(0, |top| top + 1)]);
            }
            words.extend(given);
            words.extend(blocks);
        }
        words
    }

    /// Reads a pass from the words that [`write`](Self::write) wrote.
    ///
    /// # Errors
    ///
    /// If the words do not encode a pass.
    pub(crate) fn read(words: &Tensor) -> CandleResult<Self> {
        let words = words.to_vec1::<u32>()?;
        let mut words = PassWords(&words);
        let [count] = words.take()?;
        let version = words.wide()?;
        let mut chunks = Vec::new();
        for _ in 0..count {
            let [slot, start, given, blocks, flags, _] = words.take()?;
            let new = if flags & 2 != 0 {
                Some(words.begin()?)
            } else {
                None
            };
            let given = words.list(given)?;
            let blocks = words.list(blocks)?;
            chunks.push(PassChunk {
                slot,
                start,
                given,
                samples: flags & 1 != 0,
                blocks,
                new,
            });
        }
        Ok(Self { version, chunks })
    }

    /// Returns the rows and blocks of each chunk's sequence.
    pub(crate) fn rows(&self) -> Vec<PagedRows> {
        let rows = |chunk: &PassChunk| PagedRows {
            start: chunk.start as usize,
            rows: chunk.tokens(),
            blocks: chunk.blocks.clone(),
        };
        self.chunks.iter().map(rows).collect()
    }
}

/// The rest of a pass's words that has not been read.
struct PassWords<'a>(&'a [u32]);

impl PassWords<'_> {
    fn take<const N: usize>(&mut self) -> CandleResult<[u32; N]> {
        let Some((taken, rest)) = self.0.split_first_chunk::<N>() else {
            bail!("the words of a pass end too early");
        };
        self.0 = rest;
        Ok(*taken)
    }

    fn list(&mut self, len: u32) -> CandleResult<Vec<u32>> {
        let Some((taken, rest)) = self.0.split_at_checked(len as usize) else {
            bail!("the words of a pass end too early");
        };
        self.0 = rest;
        Ok(taken.to_vec())
    }

    fn wide(&mut self) -> CandleResult<u64> {
        let [low, high] = self.take()?;
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    fn begin(&mut self) -> CandleResult<NewSequence> {
        let mut number = || self.wide().map(f64::from_bits);
        let sampling = Sampling {
            temperature: number()?,
            top_p: number()?,
            min_p: number()?,
            repetition_penalty: number()?,
            presence_penalty: number()?,
            frequency_penalty: number()?,
            seed: self.wide()?,
            top_k: self.wide()? as usize,
        };
        let [prompt, top] = self.take()?;
        Ok(NewSequence {
            sampling,
            prompt,
            top: top.checked_sub(1),
        })
    }
}

#[cfg(test)]
mod tests {
    use mpmd::candle::Device;

    use super::*;

    #[test]
    fn passes_are_read_as_they_were_written() {
        let begin = NewSequence {
            sampling: Sampling {
                temperature: 0.7,
                top_k: 3,
                top_p: 0.9,
                min_p: 0.01,
                repetition_penalty: 1.1,
                presence_penalty: -0.5,
                frequency_penalty: 2.0,
                seed: u64::MAX - 5,
            },
            prompt: 3,
            top: Some(0),
        };
        let first = PassChunk {
            slot: 4,
            start: 0,
            given: vec![7, 8, 9],
            samples: true,
            blocks: vec![3, 1],
            new: Some(begin),
        };
        let (given, blocks) = (Vec::new(), vec![5]);
        let second = PassChunk {
            slot: 1,
            start: 15,
            given,
            samples: false,
            blocks,
            new: None,
        };
        let pass = InferencePass {
            version: 7 << 32 | 5,
            chunks: vec![first, second],
        };
        assert_eq!(
            PassForms::of(100).form(&pass).unwrap(),
            PassForm {
                tokens: 8,
                words: 2048
            }
        );
        let all: usize = pass.chunks.iter().map(PassChunk::words).sum();
        let mut words = vec![9; 2048];
        pass.write(&mut words);
        let all = START + all;
        assert!(
            words[all - 1..].iter().any(|word| *word != 0),
            "the last word is at its place"
        );
        assert!(
            words[all..].iter().all(|word| *word == 0),
            "there are as many as told"
        );
        let read = |words: &[u32]| {
            InferencePass::read(&Tensor::from_slice(words, words.len(), &Device::Cpu).unwrap())
        };
        assert_eq!(read(&words).unwrap(), pass);
        for len in 0..all {
            read(&words[..len]).unwrap_err();
        }
        let mut tokens = [1; 8];
        pass.write_tokens(&mut tokens);
        assert_eq!(tokens, [7, 8, 9, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn passes_without_room_are_refused() {
        let chunk = |given: usize, blocks: usize| PassChunk {
            slot: 0,
            start: 0,
            given: vec![1; given],
            samples: true,
            blocks: vec![0; blocks],
            new: None,
        };
        let forms = PassForms::of(1000);
        let form = |given, blocks| {
            forms.form(&InferencePass {
                version: 0,
                chunks: vec![chunk(given, blocks)],
            })
        };
        assert_eq!(form(MOST_TOKENS, 32).unwrap().tokens, MOST_TOKENS);
        assert_eq!(
            form(1, 600).unwrap(),
            PassForm {
                tokens: 8,
                words: 2048
            }
        );
        for (given, blocks) in [(MOST_TOKENS + 1, 1), (1, most_words(1000))] {
            let said = form(given, blocks).unwrap_err().to_string();
            assert!(said.contains("at most 512 and 16381 have room"), "{said}");
        }
        assert_eq!(forms.form(&InferencePass::default()).unwrap(), forms.0[0]);
        let wider = |tokens| {
            let passes = forms.pass_of_each_wider(tokens);
            passes
                .map(|pass| forms.form(&pass).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(wider(8), forms.0[2..4]);
        assert_eq!(wider(100), [], "the last two have as many words");
    }

    #[test]
    fn whole_chunk_of_the_longest_sequence_has_room() {
        for positions in [1, 4096, 253_000, 300_000, 10_000_000] {
            let begin = NewSequence {
                sampling: Sampling::default(),
                prompt: 1,
                top: None,
            };
            let chunk = PassChunk {
                slot: 0,
                start: 0,
                given: vec![0; MOST_TOKENS.min(positions)],
                samples: true,
                blocks: vec![0; positions.div_ceil(BLOCK)],
                new: Some(begin),
            };
            assert!(chunk.words() <= most_words(positions), "{positions}");
            let forms = PassForms::of(positions);
            forms
                .form(&InferencePass {
                    version: 0,
                    chunks: vec![chunk],
                })
                .unwrap();
            // A pass of one token of it has a form that a warm-up knows, too.
            let known: Vec<PassForm> = [1, 8]
                .into_iter()
                .flat_map(|tokens| forms.pass_of_each_wider(tokens))
                .map(|pass| forms.form(&pass).unwrap())
                .chain(forms.0[..2].iter().copied())
                .collect();
            let blocks = positions.div_ceil(BLOCK);
            let one = InferencePass::without_choice(vec![0], vec![0; blocks]);
            assert!(known.contains(&forms.form(&one).unwrap()), "{positions}");
        }
    }
}
