//! Choices of the next tokens on the last stage, and the form in which they leave it.

use mpmd::candle::Result as CandleResult;
use mpmd::candle::candle_core::bail;

use crate::pass::{Begin, CHOICE, NONE, NOT_FINITE, TOP};

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token. `None` if the largest logit is no finite number.
    pub token: Option<u32>,
    /// Natural logarithm of its probability, by the model's own logits. `None` if it was not asked
    /// for.
    pub logprob: Option<f32>,
    /// The most probable tokens with the logarithms of their probabilities, the most probable
    /// first.
    pub top: Vec<(u32, f32)>,
}

impl Choice {
    pub(crate) fn write(&self, words: &mut [u32]) {
        words.fill(NONE);
        words[0] = self.token.unwrap_or(NOT_FINITE);
        words[1] = self.logprob.unwrap_or(f32::NAN).to_bits();
        for (at, (token, logprob)) in self.top.iter().take(TOP).enumerate() {
            words[2 + at] = *token;
            words[2 + TOP + at] = logprob.to_bits();
        }
    }

    /// Reads what [`write`](Self::write) has written. `None` if nothing was chosen.
    pub(crate) fn read(words: &[u32]) -> Option<Self> {
        debug_assert_eq!(words.len(), CHOICE);
        let (tokens, logprobs) = words[2..].split_at(TOP);
        let top = tokens.iter().zip(logprobs).take_while(|(token, _)| **token != NONE);
        match words[0] {
            NONE => None,
            NOT_FINITE => Some(Self { token: None, logprob: None, top: Vec::new() }),
            token => Some(Self {
                token: Some(token),
                logprob: Some(f32::from_bits(words[1])).filter(|logprob| !logprob.is_nan()),
                top: top.map(|(token, bits)| (*token, f32::from_bits(*bits))).collect(),
            }),
        }
    }
}

/// A sequence on the last stage.
#[derive(Clone, Debug)]
pub(crate) struct History {
    begin: Begin,
    /// Position of the first token that is known here.
    first: usize,
    tokens: Vec<u32>,
}

impl History {
    /// Begins with the token at position `first`. Tokens before are not known here: penalties for
    /// tokens of the prompt do not count them.
    pub(crate) fn new(begin: Begin, first: usize) -> Self {
        Self { begin, first, tokens: Vec::new() }
    }

    /// Adds given tokens. Without any, the token at this position must be the last one.
    pub(crate) fn add(&mut self, start: usize, given: &[u32]) -> CandleResult<()> {
        let end = self.first + self.tokens.len();
        if start != if given.is_empty() { end.saturating_sub(1) } else { end } {
            bail!("tokens at position {start} of a sequence that has {end}");
        }
        self.tokens.extend(given);
        Ok(())
    }

    /// Chooses the token that follows, and adds it.
    pub(crate) fn choose(&mut self, logits: Vec<f32>) -> Choice {
        let Begin { sampling, prompt, top } = self.begin;
        let known = (prompt as usize).saturating_sub(self.first).min(self.tokens.len());
        let (prompt, text) = self.tokens.split_at(known);
        let all = top.map(|top| (top as usize, logprobs(&logits)));
        let token = sampling.next(logits, prompt, text);
        self.tokens.extend(token);
        let (logprob, top) = match (all, token) {
            (Some((top, all)), Some(token)) => {
                let mut order: Vec<u32> = (0..all.len() as u32).collect();
                let at = |token: &u32| all[*token as usize];
                let largest_first = |a: &u32, b: &u32| at(b).total_cmp(&at(a)).then(a.cmp(b));
                let top = top.min(TOP).min(order.len());
                if top > 0 && top < order.len() {
                    order.select_nth_unstable_by(top - 1, largest_first);
                }
                order.truncate(top);
                order.sort_unstable_by(largest_first);
                let of = |token: u32| (token, all[token as usize]);
                (Some(all[token as usize]), order.into_iter().map(of).collect())
            }
            _ => (None, Vec::new()),
        };
        Choice { token, logprob, top }
    }
}

/// Returns the natural logarithms of the probabilities.
fn logprobs(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    let log = total.ln();
    logits.iter().map(|x| (f64::from(x - largest) - log) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Sampling;

    fn begin(prompt: u32, top: Option<u32>) -> Begin {
        Begin { sampling: Sampling::default(), prompt, top }
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let all = [
            Choice { token: Some(7), logprob: None, top: Vec::new() },
            Choice { token: Some(0), logprob: Some(-0.5), top: vec![(3, -0.1), (0, -0.5)] },
            Choice { token: None, logprob: None, top: Vec::new() },
        ];
        for choice in all {
            let mut words = [5; CHOICE];
            choice.write(&mut words);
            assert_eq!(Choice::read(&words), Some(choice));
        }
        assert_eq!(Choice::read(&[NONE; CHOICE]), None);
    }

    #[test]
    fn most_probable_tokens_are_told_in_order() {
        let mut history = History::new(begin(1, Some(3)), 0);
        history.add(0, &[9]).unwrap();
        let choice = history.choose(vec![1.0, 3.0, 2.0, 3.0]);
        assert_eq!(choice.token, Some(1));
        let tokens: Vec<u32> = choice.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 3, 2]);
        let total: f64 = [1.0, 3.0, 2.0, 3.0f64].iter().map(|x| x.exp()).sum();
        for (token, logit) in [(1, 3.0), (3, 3.0), (2, 2.0f64)] {
            let found = choice.top.iter().find(|one| one.0 == token).unwrap().1;
            assert!((f64::from(found) - (logit - total.ln())).abs() < 1e-6);
        }
        assert_eq!(choice.logprob, Some(choice.top[0].1));
        assert_eq!(history.choose(vec![f32::NAN; 4]).token, None);
    }

    #[test]
    fn tokens_of_the_prompt_and_the_text_are_told_apart() {
        let frequency = Sampling { frequency_penalty: 1.0, ..Sampling::default() };
        let mut history = History::new(Begin { sampling: frequency, prompt: 3, top: None }, 0);
        history.add(0, &[2, 2]).unwrap();
        history.add(2, &[2]).unwrap();
        let logits = vec![0.0, 1.5, 2.0];
        assert_eq!(history.choose(logits.clone()).token, Some(2), "a prompt has no penalty");
        history.add(3, &[]).unwrap();
        assert_eq!(history.choose(logits).token, Some(1));
        history.add(3, &[]).unwrap_err();
        history.add(6, &[1]).unwrap_err();
    }
}
