//! Choices of the next tokens on the last stage, and the form in which they leave it.
//!
//! A sequence for which no token can be chosen is a value among the choices of its pass: the other
//! sequences of the pass get their tokens.

use serde::{Deserialize, Serialize};

use crate::inference::pass::{CHOICE, NONE, NewSequence, TOP};
use crate::inference::token_order::{TokenOrder, TokenRank, TokenWeights};

/// Code of [`Unchosen::NotFinite`] in the word of a token.
const NOT_FINITE: u32 = u32::MAX - 1;
/// Code of [`Unchosen::OutOfOrder`] in the word of a token.
const OUT_OF_ORDER: u32 = u32::MAX - 2;

/// The reason why no token was chosen for a sequence. All later choices of the sequence have the
/// same reason.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, thiserror::Error)]
pub enum Unchosen {
    /// The largest logit is no finite number.
    #[error("the model's logits are not finite: its activations overflow")]
    NotFinite,
    /// A pass did not continue the sequence at the position where the previous pass ended.
    #[error("a pass does not continue the sequence where the one before has ended")]
    OutOfOrder,
}

/// The result of choosing the next token of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token, or the reason why there is none.
    pub token: Result<u32, Unchosen>,
    /// Natural logarithm of the token's probability, from the model's logits without penalties or
    /// temperature. `None` if [`NewSequence::top`] is `None`.
    pub logprob: Option<f32>,
    /// The most probable tokens and the logarithms of their probabilities, the most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Returns the token of a choice from the choice's first word. `None` if the pass chose nothing.
pub(crate) fn read_token(word: u32) -> Option<Result<u32, Unchosen>> {
    match word {
        NONE => None,
        NOT_FINITE => Some(Err(Unchosen::NotFinite)),
        OUT_OF_ORDER => Some(Err(Unchosen::OutOfOrder)),
        token => Some(Ok(token)),
    }
}

impl From<Unchosen> for Choice {
    fn from(why: Unchosen) -> Self {
        Self {
            token: Err(why),
            logprob: None,
            top: Vec::new(),
        }
    }
}

impl Choice {
    /// Writes the choice for a slot to a row of the choices of a pass.
    pub(crate) fn write(&self, slot: u32, row: &mut [u32]) {
        row.fill(NONE);
        row[0] = slot;
        let words = &mut row[1..];
        words[0] = match self.token {
            Ok(token) => token,
            Err(Unchosen::NotFinite) => NOT_FINITE,
            Err(Unchosen::OutOfOrder) => OUT_OF_ORDER,
        };
        words[1] = self.logprob.unwrap_or(f32::NAN).to_bits();
        for (at, (token, logprob)) in self.top.iter().take(TOP).enumerate() {
            words[2 + at] = *token;
            words[2 + TOP + at] = logprob.to_bits();
        }
    }

    /// Reads a slot and its choice from the row that [`write`](Self::write) wrote. `None` for a row
    /// without a choice.
    pub(crate) fn read(row: &[u32]) -> Option<(u32, Self)> {
        let (slot, words) = row.split_first()?;
        debug_assert_eq!(words.len(), CHOICE);
        let token = read_token(words[0])?;
        let (tokens, logprobs) = words[2..].split_at(TOP);
        let top = tokens
            .iter()
            .zip(logprobs)
            .take_while(|(token, _)| **token != NONE);

        let choice = Self {
            token,
            logprob: Some(f32::from_bits(words[1])).filter(|logprob| !logprob.is_nan()),
            top: top
                .map(|(token, bits)| (*token, f32::from_bits(*bits)))
                .collect(),
        };
        Some((*slot, choice))
    }
}

/// The last stage's record of a sequence: its tokens, and how the next one is chosen.
#[derive(Clone, Debug)]
pub(crate) struct SequenceHistory {
    begin: NewSequence,
    /// Position of the first token in `tokens`. Earlier tokens are unknown to this stage.
    first: usize,
    tokens: Vec<u32>,
    /// The reason why no further token will be chosen.
    failed: Option<Unchosen>,
}

impl SequenceHistory {
    /// Creates the record of a sequence from position `first` on. Penalties ignore earlier tokens,
    /// since they are unknown here.
    pub(crate) fn new(begin: NewSequence, first: usize) -> Self {
        Self {
            begin,
            first,
            tokens: Vec::new(),
            failed: None,
        }
    }

    /// Appends the tokens of a chunk at position `start`. A chunk without tokens computes the last
    /// known token. If `start` does not continue the sequence, marks the sequence as failed.
    pub(crate) fn add(&mut self, start: usize, given: &[u32]) {
        let end = self.first + self.tokens.len();
        let expected = if given.is_empty() {
            end.saturating_sub(1)
        } else {
            end
        };
        if start != expected {
            self.failed.get_or_insert(Unchosen::OutOfOrder);
        }
        self.tokens.extend(given);
    }

    /// Chooses and appends the next token. A failed sequence gets the same reason for every later
    /// pass.
    pub(crate) fn choose(&mut self, logits: impl AsRef<[f32]>) -> Choice {
        if let Some(why) = self.failed {
            return why.into();
        }
        let logits = logits.as_ref();
        let NewSequence {
            sampling,
            prompt,
            top,
        } = self.begin;
        let known = (prompt as usize)
            .saturating_sub(self.first)
            .min(self.tokens.len());
        let (prompt, text) = self.tokens.split_at(known);
        let Some(token) = sampling.next(logits, prompt, text) else {
            self.failed = Some(Unchosen::NotFinite);
            return Unchosen::NotFinite.into();
        };
        self.tokens.push(token);
        let (logprob, top) = match top {
            Some(top) => {
                let (logprob, top) = logprobs(logits, token, top as usize);
                (Some(logprob), top)
            }
            None => (None, Vec::new()),
        };
        Choice {
            token: Ok(token),
            logprob,
            top,
        }
    }
}

/// Returns the natural logarithm of the token's probability, and the `top` most probable tokens
/// with their logarithms.
fn logprobs(logits: &[f32], token: u32, top: usize) -> (f32, Vec<(u32, f32)>) {
    let order = TokenOrder::of(logits);
    let largest = order.first().map_or(f32::NAN, TokenRank::logit);
    let log = order
        .total(TokenWeights::new(largest, 1.0), TokenRank::lowest())
        .ln();
    let logprob = |logit: f32| (f64::from(logit - largest) - log) as f32;

    let mut most = order.most(top.min(TOP));
    most.sort_unstable_by(|a, b| b.cmp(a));
    let top = most
        .into_iter()
        .map(|rank| (rank.token(), logprob(rank.logit())))
        .collect();
    (logprob(logits[token as usize]), top)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::pass::CHOICE_ROW;
    use crate::inference::sample::Sampling;

    fn begin(prompt: u32, top: Option<u32>) -> NewSequence {
        NewSequence {
            sampling: Sampling::default(),
            prompt,
            top,
        }
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let all = [
            Choice {
                token: Ok(7),
                logprob: None,
                top: Vec::new(),
            },
            Choice {
                token: Ok(0),
                logprob: Some(-0.5),
                top: vec![(3, -0.1), (0, -0.5)],
            },
            Choice::from(Unchosen::NotFinite),
            Choice::from(Unchosen::OutOfOrder),
        ];
        for choice in all {
            let mut row = [5; CHOICE_ROW];
            choice.write(9, &mut row);
            assert_eq!(Choice::read(&row), Some((9, choice)));
        }
        assert_eq!(Choice::read(&[NONE; CHOICE_ROW]), None);
    }

    #[test]
    fn most_probable_tokens_are_told_in_order() {
        let mut history = SequenceHistory::new(begin(1, Some(3)), 0);
        history.add(0, &[9]);
        let choice = history.choose(vec![1.0, 3.0, 2.0, 3.0]);
        assert_eq!(choice.token, Ok(1));
        let tokens: Vec<u32> = choice.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 3, 2]);
        let total: f64 = [1.0, 3.0, 2.0, 3.0f64].iter().map(|x| x.exp()).sum();
        for (token, logit) in [(1, 3.0), (3, 3.0), (2, 2.0f64)] {
            let found = choice.top.iter().find(|one| one.0 == token).unwrap().1;
            assert!((f64::from(found) - (logit - total.ln())).abs() < 1e-6);
        }
        assert_eq!(choice.logprob, Some(choice.top[0].1));
    }

    #[test]
    fn failed_sequence_keeps_its_reason() {
        let mut history = SequenceHistory::new(begin(1, Some(3)), 0);
        history.add(0, &[9]);
        let failed = Choice::from(Unchosen::NotFinite);
        assert_eq!(history.choose(vec![f32::NAN; 4]), failed);
        // The next pass was decided before this was known.
        history.add(1, &[]);
        assert_eq!(history.choose(vec![0.0, 1.0]), failed);
    }

    #[test]
    fn tokens_out_of_order_fail_their_sequence() {
        for (start, given) in [(2, &[5][..]), (0, &[5]), (1, &[]), (7, &[])] {
            let mut history = SequenceHistory::new(begin(1, None), 0);
            history.add(0, &[9]);
            history.add(start, given);
            assert_eq!(
                history.choose(vec![0.0, 1.0]),
                Unchosen::OutOfOrder.into(),
                "{start}"
            );
        }
    }

    #[test]
    fn tokens_of_the_prompt_and_the_text_are_told_apart() {
        let frequency = Sampling {
            frequency_penalty: 1.0,
            ..Sampling::default()
        };
        let mut history = SequenceHistory::new(
            NewSequence {
                sampling: frequency,
                prompt: 3,
                top: None,
            },
            0,
        );
        history.add(0, &[2, 2]);
        history.add(2, &[2]);
        let logits = vec![0.0, 1.5, 2.0];
        assert_eq!(
            history.choose(logits.clone()).token,
            Ok(2),
            "a prompt has no penalty"
        );
        history.add(3, &[]);
        assert_eq!(history.choose(logits).token, Ok(1));
    }
}
