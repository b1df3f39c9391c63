//! A pass of inference: some tokens of some sequences, and the form in which stages get it.

use std::fmt;

use mpmd::candle::candle_core::bail;
use mpmd::candle::nn::{BLOCK, PagedRows};
use mpmd::candle::{Result as CandleResult, Tensor};
use mpmd::random::Key;
use mpmd::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::inference::sample::Sampling;

/// A pass of inference over all stages.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct InferencePass {
    /// The version of the weights that compute it: 0 for those of the folder, else a published one.
    pub version: u64,
    /// The sequences of the pass.
    pub chunks: Vec<PassChunk>,
}

/// Tokens of a sequence that a pass computes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PassChunk {
    /// The sequence's place in tables of sequences.
    pub slot: u32,
    /// The position of the first of the tokens.
    pub start: u32,
    /// The tokens. None means the one that was chosen last for this place.
    pub given: Vec<u32>,
    /// True if the token that follows is chosen.
    pub samples: bool,
    /// The blocks of the sequence, up to the last token of the chunk.
    pub blocks: Vec<u32>,
    /// Begins another sequence in this place.
    pub new: Option<NewSequence>,
}

/// The settings for the choice of a new sequence's tokens.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct NewSequence {
    /// The settings for the choice of each token.
    pub sampling: Sampling,
    /// Number of tokens from the start that are the prompt.
    pub prompt: u32,
    /// Number of the most probable tokens to report with each chosen one, at most [`TOP`].
    pub top: Option<u32>,
}

/// Limit on [`NewSequence::top`].
pub const TOP: usize = 20;
/// Number of words that a choice takes: the token, the logarithm of its probability, and those of
/// the most probable tokens.
pub(crate) const CHOICE: usize = 2 + 2 * TOP;
/// Stands for a token where none was chosen.
pub(crate) const NONE: u32 = u32::MAX;

/// (number of tokens, number of words of the table) of the forms that passes have. The last one has
/// more words where a sequence needs them: see [`PassForms::of`].
const FORMS: [(usize, usize); 5] = [
    (1, 512),
    (8, 2048),
    (32, 4096),
    (128, 16_384),
    (512, 16_384),
];
/// Words of a pass before its chunks: their number, and the version.
const START: usize = 3;
/// Words of a chunk beside its tokens, blocks and settings.
const HEAD: usize = 6;
/// Words of [`NewSequence`].
const BEGIN: usize = 18;

/// The largest number of tokens of a pass.
pub const MOST_TOKENS: usize = FORMS[FORMS.len() - 1].0;

/// Returns the largest number of words of the chunks of a pass, for sequences of up to `positions`
/// tokens: see [`PassChunk::words`]. Any chunk of one sequence has room.
pub fn most_words(positions: usize) -> usize {
    PassForms::of(positions).largest().words - START
}

/// The size of the arrays in which stages get a pass.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct PassForm {
    pub(crate) tokens: usize,
    pub(crate) words: usize,
}

/// The forms of passes, the smallest first.
#[derive(Clone, Debug)]
pub(crate) struct PassForms([PassForm; FORMS.len()]);

impl PassForms {
    /// Creates the forms for sequences of up to `positions` tokens.
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

    /// Returns the smallest form that has room for a pass.
    ///
    /// # Errors
    ///
    /// If none has.
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

    /// Returns a pass of each form, over one sequence, without a choice of the next token. There
    /// are blocks for `most` tokens.
    pub(crate) fn pass_of_each(&self, most: usize) -> impl Iterator<Item = InferencePass> {
        self.0.into_iter().map(move |form| {
            let tokens = form.tokens.min(most).max(1);
            InferencePass::without_choice(
                vec![0; tokens],
                (0..tokens.div_ceil(BLOCK) as u32).collect(),
            )
        })
    }

    /// Returns passes of one token with so many words that they have larger forms than a pass of
    /// `tokens` tokens: those that long sequences can need.
    pub(crate) fn pass_of_each_wider(&self, tokens: usize) -> impl Iterator<Item = InferencePass> {
        let pairs = self.0.windows(2);
        let wider = pairs.filter(move |two| two[0].tokens >= tokens && two[1].words > two[0].words);
        wider.map(|two| InferencePass::without_choice(vec![0], vec![0; two[0].words]))
    }
}

impl PassChunk {
    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.given.len().max(1)
    }

    /// Returns the number of words of four bytes that the chunk takes in a pass.
    pub fn words(&self) -> usize {
        let begin = if self.new.is_some() { BEGIN } else { 0 };
        HEAD + begin + self.given.len() + self.blocks.len()
    }
}

impl fmt::Display for InferencePass {
    /// Writes the numbers of sequences and tokens, and a hash of all that the pass has.
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
    /// Creates a pass of the first tokens of one sequence, after which none is chosen.
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

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(PassChunk::tokens).sum()
    }

    /// Writes the tokens, and zeros for those that the first stage knows.
    pub(crate) fn write_tokens(&self, to: &mut [u32]) {
        to.fill(0);
        let mut at = 0;
        for chunk in &self.chunks {
            to[at..][..chunk.given.len()].copy_from_slice(&chunk.given);
            at += chunk.tokens();
        }
    }

    /// Writes all but the order of the tokens.
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

    /// Reads a pass from the words of [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// If the words are no pass.
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

    /// Returns the sequences of the pass with their blocks.
    pub(crate) fn rows(&self) -> Vec<PagedRows> {
        let rows = |chunk: &PassChunk| PagedRows {
            start: chunk.start as usize,
            rows: chunk.tokens(),
            blocks: chunk.blocks.clone(),
        };
        self.chunks.iter().map(rows).collect()
    }
}

/// The words of a pass that are not read yet.
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
