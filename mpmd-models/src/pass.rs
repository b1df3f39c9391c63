//! A pass of inference: some tokens of some sequences, and the form in which stages get it.

use mpmd::candle::candle_core::bail;
use mpmd::candle::nn::{BLOCK, PagedRows};
use mpmd::candle::{Result as CandleResult, Tensor};
use mpmd::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::sample::Sampling;

/// A pass of inference over all stages.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Pass {
    /// The version of the weights that compute it: 0 for those of the folder, else a published one.
    pub version: u64,
    /// The sequences of the pass.
    pub chunks: Vec<Chunk>,
}

/// Tokens of a sequence that a pass computes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Chunk {
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
    pub new: Option<Begin>,
}

/// How the tokens of a new sequence are chosen.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Begin {
    /// The choice of each token.
    pub sampling: Sampling,
    /// Number of tokens from the start that are the prompt.
    pub prompt: u32,
    /// Number of the most probable tokens that are told beside the chosen one, at most [`TOP`].
    pub top: Option<u32>,
}

/// Largest number of the most probable tokens that are told.
pub const TOP: usize = 20;
/// Number of words that a choice takes: the token, the logarithm of its probability, and those of
/// the most probable tokens.
pub(crate) const CHOICE: usize = 2 + 2 * TOP;
/// In place of a token: no token was chosen.
pub(crate) const NONE: u32 = u32::MAX;
/// In place of a token: the logits were not finite.
pub(crate) const NOT_FINITE: u32 = u32::MAX - 1;

/// (number of tokens, number of words of the table) of the forms that passes have.
const FORMS: [(usize, usize); 5] = [(1, 512), (8, 2048), (32, 4096), (128, 16_384), (512, 16_384)];
/// Words of a pass before its chunks: their number, and the version.
const START: usize = 3;
/// Words of a chunk beside its tokens, blocks and settings.
const HEAD: usize = 6;
/// Words of [`Begin`].
const BEGIN: usize = 18;

/// The largest number of tokens of a pass.
pub const MOST_TOKENS: usize = FORMS[FORMS.len() - 1].0;
/// The largest number of words of the chunks of a pass: see [`Chunk::words`].
pub const MOST_WORDS: usize = FORMS[FORMS.len() - 1].1 - START;

impl Chunk {
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

impl Pass {
    /// Returns passes of all forms, of one sequence whose next tokens are not chosen. There are
    /// blocks for `most` tokens.
    pub(crate) fn of_each_form(most: usize) -> impl Iterator<Item = Self> {
        FORMS.into_iter().map(move |(tokens, _)| {
            let tokens = tokens.min(most).max(1);
            let chunk = Chunk {
                slot: 0,
                start: 0,
                given: vec![0; tokens],
                samples: false,
                blocks: (0..tokens.div_ceil(BLOCK) as u32).collect(),
                new: None,
            };
            Self { version: 0, chunks: vec![chunk] }
        })
    }

    /// Returns passes of one token with so many words that they have larger forms than a pass of
    /// `tokens` tokens: those that long sequences can need.
    pub(crate) fn of_more_words(tokens: usize) -> impl Iterator<Item = Self> {
        let larger = FORMS.windows(2).filter(move |two| two[0].0 >= tokens && two[1].1 > two[0].1);
        larger.map(|two| {
            let (given, blocks) = (vec![0], vec![0; two[0].1]);
            let chunk = Chunk { slot: 0, start: 0, given, samples: false, blocks, new: None };
            Self { version: 0, chunks: vec![chunk] }
        })
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.chunks.iter().map(Chunk::tokens).sum()
    }

    /// Returns the smallest form that has room for the pass.
    ///
    /// # Errors
    ///
    /// If none has.
    pub(crate) fn form(&self) -> Result<(usize, usize)> {
        let (tokens, words) = (self.tokens(), self.chunks.iter().map(Chunk::words).sum::<usize>());
        let fits = |form: &&(usize, usize)| tokens <= form.0 && words + START <= form.1;
        FORMS.iter().find(fits).copied().ok_or_else(|| {
            Error::kernel(format!(
                "a pass of {tokens} tokens and {words} words: at most {MOST_TOKENS} and \
                 {MOST_WORDS} have room"
            ))
        })
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
        let Self { version, chunks } = self;
        let mut words = vec![chunks.len() as u32, *version as u32, (*version >> 32) as u32];
        for chunk in chunks {
            let Chunk { slot, start, given, samples, blocks, new } = chunk;
            let counts = [given.len() as u32, blocks.len() as u32];
            let flags = u32::from(*samples) + 2 * u32::from(new.is_some());
            words.extend([*slot, *start, counts[0], counts[1], flags, 0]);
            if let Some(Begin { sampling, prompt, top }) = new {
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
        to[..words.len()].copy_from_slice(&words);
        to[words.len()..].fill(0);
    }

    /// Reads what [`write`](Self::write) has written.
    ///
    /// # Errors
    ///
    /// If the words are no pass.
    pub(crate) fn read(words: &Tensor) -> CandleResult<Self> {
        let words = words.to_vec1::<u32>()?;
        let mut words = Words(&words);
        let ([count], version) = (words.take()?, words.wide()?);
        let mut chunks = Vec::new();
        for _ in 0..count {
            let [slot, start, given, blocks, flags, _] = words.take()?;
            let new = if flags & 2 != 0 { Some(words.begin()?) } else { None };
            let (given, blocks) = (words.list(given)?, words.list(blocks)?);
            chunks.push(Chunk { slot, start, given, samples: flags & 1 != 0, blocks, new });
        }
        Ok(Self { version, chunks })
    }

    /// Returns the sequences of the pass with their blocks.
    pub(crate) fn rows(&self) -> Vec<PagedRows> {
        let rows = |chunk: &Chunk| PagedRows {
            start: chunk.start as usize,
            rows: chunk.tokens(),
            blocks: chunk.blocks.clone(),
        };
        self.chunks.iter().map(rows).collect()
    }
}

/// The words of a pass that are not read yet.
struct Words<'a>(&'a [u32]);

impl Words<'_> {
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

    fn begin(&mut self) -> CandleResult<Begin> {
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
        Ok(Begin { sampling, prompt, top: top.checked_sub(1) })
    }
}

#[cfg(test)]
mod tests {
    use mpmd::candle::Device;

    use super::*;

    #[test]
    fn passes_are_read_as_they_were_written() {
        let begin = Begin {
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
        let first = Chunk {
            slot: 4,
            start: 0,
            given: vec![7, 8, 9],
            samples: true,
            blocks: vec![3, 1],
            new: Some(begin),
        };
        let (given, blocks) = (Vec::new(), vec![5]);
        let second = Chunk { slot: 1, start: 15, given, samples: false, blocks, new: None };
        let pass = Pass { version: 7 << 32 | 5, chunks: vec![first, second] };
        assert_eq!(pass.form().unwrap(), (8, 2048));
        let all: usize = pass.chunks.iter().map(Chunk::words).sum();
        let mut words = vec![9; 2048];
        pass.write(&mut words);
        let all = START + all;
        assert!(words[all - 1..].iter().any(|word| *word != 0), "the last word is at its place");
        assert!(words[all..].iter().all(|word| *word == 0), "there are as many as told");
        let read = |words: &[u32]| {
            Pass::read(&Tensor::from_slice(words, words.len(), &Device::Cpu).unwrap())
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
        let chunk = |given: usize, blocks: usize| Chunk {
            slot: 0,
            start: 0,
            given: vec![1; given],
            samples: true,
            blocks: vec![0; blocks],
            new: None,
        };
        let form = |given, blocks| Pass { version: 0, chunks: vec![chunk(given, blocks)] }.form();
        assert_eq!(form(MOST_TOKENS, 32).unwrap().0, MOST_TOKENS);
        assert_eq!(form(1, 600).unwrap(), (8, 2048));
        for (given, blocks) in [(MOST_TOKENS + 1, 1), (1, MOST_WORDS)] {
            let said = form(given, blocks).unwrap_err().to_string();
            assert!(said.contains("at most 512 and 16381 have room"), "{said}");
        }
        assert_eq!(Pass::default().form().unwrap(), (1, 512));
        let larger = |tokens| Pass::of_more_words(tokens).map(|pass| pass.form().unwrap());
        assert_eq!(larger(8).collect::<Vec<_>>(), FORMS[2..4]);
        assert_eq!(larger(100).collect::<Vec<_>>(), [], "the last two have as many words");
    }
}
