//! The choice of the next token from logits.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use mpmd::Result;
use mpmd::random::{Key, uniform_f64};
use serde::{Deserialize, Serialize};

use crate::folder::Folder;

/// How the next token is chosen. The order of the steps is that of the library `transformers`:
/// penalties, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Sampling {
    /// Divides the logits. With 0 the most probable token is taken.
    pub temperature: f64,
    /// Number of the most probable tokens that are kept; 0 for all.
    pub top_k: usize,
    /// Probability that the kept tokens have together, at least.
    pub top_p: f64,
    /// Least probability of a kept token, as a share of the most probable one's.
    pub min_p: f64,
    /// Divides the positive logits of tokens of the prompt and the text, and multiplies negative
    /// ones.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of tokens of the text.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a token for each time that the text has it.
    pub frequency_penalty: f64,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for Sampling {
    /// The most probable token, without penalties.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Returns how a folder's `generation_config.json` says that tokens are chosen. Values may be
    /// out of their ranges.
    ///
    /// # Errors
    ///
    /// If the file is damaged.
    pub fn of(folder: &Folder) -> Result<Self> {
        let own = folder.generation()?;
        let number = |key: &str, default: f64| own[key].as_f64().unwrap_or(default);
        // Without it, the settings of the file do not count.
        let samples = own["do_sample"].as_bool().unwrap_or(false);
        let if_sampled = |key: &str, default: f64| {
            if samples { number(key, default) } else { default }
        };
        Ok(Self {
            temperature: if samples { number("temperature", 1.0) } else { 0.0 },
            top_k: if_sampled("top_k", 0.0) as usize,
            top_p: if_sampled("top_p", 1.0),
            min_p: if_sampled("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            ..Self::default()
        })
    }

    /// Returns (name, expected, found) of a value that is out of its range.
    pub fn out_of_range(&self) -> Option<(&'static str, &'static str, f64)> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let Self { presence_penalty, frequency_penalty, .. } = *self;
        let all = [
            ("temperature", "0 or more", temperature, temperature >= 0.0),
            ("top_p", "more than 0, and 1 at most", top_p, top_p > 0.0 && top_p <= 1.0),
            ("min_p", "0 to 1", min_p, (0.0..=1.0).contains(&min_p)),
            ("repetition_penalty", "more than 0", repetition_penalty, repetition_penalty > 0.0),
            ("presence_penalty", "a finite number", presence_penalty, true),
            ("frequency_penalty", "a finite number", frequency_penalty, true),
        ];
        let wrong = all.into_iter().find(|(.., found, is_right)| !is_right || !found.is_finite());
        wrong.map(|(name, expected, found, _)| (name, expected, found))
    }

    /// Returns the token that follows a prompt and a text, from its logits. The same arguments
    /// always give the same token: the random number depends on the seed and the length of the text
    /// alone. `None` if the largest logit is no finite number.
    pub fn next(&self, mut logits: Vec<f32>, prompt: &[u32], text: &[u32]) -> Option<u32> {
        self.penalize(&mut logits, prompt, text);
        if self.temperature == 0.0 {
            let all = logits.iter().zip(0..).map(|(x, token)| Ranked(*x, token));
            return all.max().filter(|best| best.0.is_finite()).map(|best| best.1);
        }
        let kept = self.kept(&logits)?;
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let mut rest = total * uniform_f64(Key(self.seed), text.len() as u64);
        let chosen = kept.iter().find(|(_, weight)| {
            rest -= weight;
            rest < 0.0
        });
        chosen.or(kept.last()).map(|(token, _)| *token)
    }

    fn penalize(&self, logits: &mut [f32], prompt: &[u32], text: &[u32]) {
        let mut counts: BTreeMap<u32, usize> = prompt.iter().map(|token| (*token, 0)).collect();
        text.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
        for (token, count) in counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            let repeated = self.repetition_penalty as f32;
            *logit = if *logit < 0.0 { *logit * repeated } else { *logit / repeated };
            if count > 0 {
                *logit -= (self.presence_penalty + self.frequency_penalty * count as f64) as f32;
            }
        }
    }

    /// Returns the tokens that may be chosen, the most probable first, with their weights: the
    /// probability over that of the first.
    fn kept(&self, logits: &[f32]) -> Option<Vec<(u32, f64)>> {
        let mut all: Vec<Ranked> =
            logits.iter().zip(0..).map(|(x, token)| Ranked(*x, token)).collect();
        if self.top_k > 0 && self.top_k < all.len() {
            all.select_nth_unstable_by(self.top_k - 1, |a, b| b.cmp(a));
            all.truncate(self.top_k);
        }
        let most = all.iter().max()?.0;
        if !most.is_finite() {
            return None;
        }
        let weight = |x: f32| ((f64::from(x) - f64::from(most)) / self.temperature).exp();
        let enough = match self.top_p < 1.0 {
            true => self.top_p * all.iter().map(|ranked| weight(ranked.0)).sum::<f64>(),
            false => f64::INFINITY,
        };
        let (mut rest, mut kept, mut sum) = (BinaryHeap::from(all), Vec::new(), 0.0);
        while let Some(Ranked(x, token)) = rest.pop() {
            let weight = weight(x);
            if !kept.is_empty() && (sum >= enough || weight < self.min_p || weight == 0.0) {
                break;
            }
            sum += weight;
            kept.push((token, weight));
        }
        Some(kept)
    }
}

/// A logit and its token. Of equal logits, that of the lower token ranks higher.
#[derive(Clone, Copy, PartialEq)]
struct Ranked(f32, u32);

impl Eq for Ranked {}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(other.1.cmp(&self.1))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities that `transformers` gives; see `tests/make_examples.py`.
    #[derive(Deserialize)]
    struct Expected {
        sampling: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        logits: Vec<f32>,
        prompt: Vec<u32>,
        temperature: f64,
        top_k: usize,
        top_p: f64,
        min_p: f64,
        repetition_penalty: f64,
        probabilities: Vec<f64>,
    }

    #[test]
    fn kept_tokens_have_the_probabilities_of_transformers() {
        let text = include_str!("../tests/folders/examples.json");
        let Expected { sampling } = serde_json::from_str(text).unwrap();
        assert!(sampling.len() > 10);
        for (at, case) in sampling.iter().enumerate() {
            let settings = Sampling {
                temperature: case.temperature,
                top_k: case.top_k,
                top_p: case.top_p,
                min_p: case.min_p,
                repetition_penalty: case.repetition_penalty,
                ..Sampling::default()
            };
            let mut logits = case.logits.clone();
            settings.penalize(&mut logits, &case.prompt, &[]);
            let mut found = vec![0.0; logits.len()];
            let kept = settings.kept(&logits).unwrap();
            let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
            kept.iter().for_each(|(token, weight)| found[*token as usize] = weight / total);
            for (found, expected) in found.iter().zip(&case.probabilities) {
                assert!((found - expected).abs() < 1e-5, "case {at}: {found}, not {expected}");
            }
        }
    }

    #[test]
    fn choices_follow_the_probabilities_and_repeat_by_seed() {
        let logits: Vec<f32> = [0.1f32, 0.6, 0.3].iter().map(|share| share.ln()).collect();
        let settings = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
        let drawn = |settings: Sampling| -> Vec<u32> {
            let texts = (0..3000).map(|len| vec![9; len]);
            texts.map(|text| settings.next(logits.clone(), &[], &text).unwrap()).collect()
        };
        let all = drawn(settings);
        for (token, share) in [(0, 0.1), (1, 0.6), (2, 0.3)] {
            let found = all.iter().filter(|found| **found == token).count() as f64 / 3000.0;
            assert!((found - share).abs() < 0.03, "token {token}: {found}");
        }
        assert_eq!(all, drawn(settings));
        assert_ne!(all, drawn(Sampling { seed: 4, ..settings }));
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_after_penalties() {
        let next = |settings: Sampling, text: &[u32]| {
            settings.next(vec![1.0, 3.0, 3.0, -1.0], &[], text).unwrap()
        };
        assert_eq!(next(Sampling::default(), &[1]), 1);
        let presence = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        assert_eq!(next(presence, &[1]), 2);
        let frequency = Sampling { frequency_penalty: 0.5, ..Sampling::default() };
        assert_eq!(next(frequency, &[1, 2, 2]), 1);
        let none = Sampling::default().next(vec![0.0, f32::NAN], &[], &[]);
        assert_eq!(
            (none, Sampling::default().next(vec![f32::NEG_INFINITY], &[], &[])),
            (None, None)
        );
    }
}
