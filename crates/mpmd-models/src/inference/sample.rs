//! The choice of the next token from logits.

use std::borrow::Cow;

use mpmd::Result;
use mpmd::random::{Key, uniform_f64};
use serde::{Deserialize, Serialize};

use crate::config::ConfigKeys;
use crate::error::InvalidSetting;
use crate::hub::folder::{Folder, GENERATION};
use crate::inference::token_order::{TokenOrder, TokenRank, TokenWeights};

/// The settings for choosing the next token. They apply in the order of the library `transformers`:
/// penalties, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Sampling {
    /// Divisor of the logits. With 0 the most probable token is always chosen.
    pub temperature: f64,
    /// Number of most probable tokens among which one is drawn. 0 for all tokens.
    pub top_k: usize,
    /// Keeps the fewest most probable tokens whose probabilities add up to at least this. 1 keeps
    /// all tokens.
    pub top_p: f64,
    /// Keeps tokens whose probability is at least this share of the most probable token's. 0 keeps
    /// all tokens.
    pub min_p: f64,
    /// Divides the positive logits of tokens of the prompt and of those generated before, and
    /// multiplies negative ones. 1 changes nothing.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of tokens that were generated before; the prompt does not count.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a token for each time that it was generated before; the prompt
    /// does not count.
    pub frequency_penalty: f64,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// Returns settings that always choose the most probable token, without penalties.
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
    /// Returns the settings of a folder's `generation_config.json`.
    ///
    /// # Errors
    ///
    /// If the file is damaged, or a value has the wrong type or is out of range. The message names
    /// the key.
    pub fn of(folder: &Folder) -> Result<Self> {
        let file = folder.file(GENERATION);
        let keys = ConfigKeys::new(&file, folder.generation()?);
        let drawn = Self {
            temperature: keys.number("temperature", 1.0)?,
            top_k: keys.or("top_k", "a whole number, 0 or more", 0)?,
            top_p: keys.number("top_p", 1.0)?,
            min_p: keys.number("min_p", 0.0)?,
            ..Self::default()
        };
        // Without it, the settings of draws do not count.
        let own = if keys.flag("do_sample", false)? {
            drawn
        } else {
            Self::default()
        };
        let repetition_penalty = keys.number("repetition_penalty", own.repetition_penalty)?;
        let own = Self {
            repetition_penalty,
            ..own
        };
        let invalid = |InvalidSetting {
                           setting,
                           expected,
                           found,
                       }| { keys.unexpected(setting, &expected, found) };
        own.check().map(|()| own).map_err(invalid)
    }

    /// Checks that each value is within its range.
    ///
    /// # Errors
    ///
    /// If a value is out of range. The error names the first such field.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let Self {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            ..
        } = *self;
        let Self {
            presence_penalty,
            frequency_penalty,
            ..
        } = *self;
        let all = [
            ("temperature", "0 or more", temperature, temperature >= 0.0),
            (
                "top_p",
                "more than 0, and 1 at most",
                top_p,
                top_p > 0.0 && top_p <= 1.0,
            ),
            ("min_p", "0 to 1", min_p, (0.0..=1.0).contains(&min_p)),
            (
                "repetition_penalty",
                "more than 0",
                repetition_penalty,
                repetition_penalty > 0.0,
            ),
            (
                "presence_penalty",
                "a finite number",
                presence_penalty,
                true,
            ),
            (
                "frequency_penalty",
                "a finite number",
                frequency_penalty,
                true,
            ),
        ];
        let wrong = all
            .into_iter()
            .find(|(.., found, is_right)| !is_right || !found.is_finite());
        match wrong {
            None => Ok(()),
            Some((name, expected, found, _)) => Err(InvalidSetting::new(name, expected, found)),
        }
    }

    /// Chooses the token after a prompt and the generated tokens `text`, from its logits. `None` if
    /// the largest logit is not finite.
    ///
    /// The same arguments always give the same token: the random number depends only on the seed
    /// and the length of `text`. Values of `top_k`, `top_p` and `min_p` that keep the same tokens
    /// choose the same one.
    pub fn next(&self, logits: impl AsRef<[f32]>, prompt: &[u32], text: &[u32]) -> Option<u32> {
        let logits = self.penalized(logits.as_ref(), prompt, text);
        let order = TokenOrder::of(&logits);
        let first = order.first().filter(|first| first.logit().is_finite())?;
        if self.temperature == 0.0 {
            return Some(first.token());
        }
        let weights = TokenWeights::new(first.logit(), self.temperature);
        let least = self.lowest_kept(&order, first, weights);
        order.draw(
            weights,
            least,
            uniform_f64(Key(self.seed), text.len() as u64),
        )
    }

    /// Returns the logits after all penalties.
    fn penalized<'a>(&self, logits: &'a [f32], prompt: &[u32], text: &[u32]) -> Cow<'a, [f32]> {
        let is_repeated = self.repetition_penalty != 1.0;
        let is_present = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        if !is_repeated && !is_present {
            return Cow::Borrowed(logits);
        }
        let mut counts: Vec<Option<u32>> = vec![None; logits.len()];
        for token in prompt {
            counts
                .get_mut(*token as usize)
                .into_iter()
                .for_each(|count| *count = Some(0));
        }
        for token in text {
            let count = counts.get_mut(*token as usize).into_iter();
            count.for_each(|count| *count.get_or_insert(0) += 1);
        }

        let repeated = self.repetition_penalty as f32;
        let penalized = |logit: f32, count: Option<u32>| {
            let Some(count) = count else { return logit };
            let divided = if logit < 0.0 {
                logit * repeated
            } else {
                logit / repeated
            };
            match count {
                0 => divided,
                _ => {
                    let frequent = self.frequency_penalty * f64::from(count);
                    divided - (self.presence_penalty + frequent) as f32
                }
            }
        };
        let logits = logits.iter().zip(counts);
        Cow::Owned(
            logits
                .map(|(logit, count)| penalized(*logit, count))
                .collect(),
        )
    }

    /// Returns the lowest rank among the tokens that `top_k`, `top_p` and `min_p` keep.
    fn lowest_kept(
        &self,
        order: &TokenOrder<'_>,
        first: TokenRank,
        weights: TokenWeights,
    ) -> TokenRank {
        let mut least = TokenRank::lowest();
        if self.top_k > 0 {
            let most = order.most(self.top_k).into_iter().min();
            least = most.unwrap_or(least).max(least);
        }
        if self.top_p < 1.0 {
            least = order.nucleus(weights, least, self.top_p);
        }
        let border = f64::from(first.logit()) + self.temperature * self.min_p.ln();
        least.max(TokenRank::last(border as f32)).min(first)
    }
}

#[cfg(test)]
mod tests {
    use mpmd::random::normal_f32;

    use super::*;

    /// Probabilities computed by `transformers`; see `tests/make_examples.py`.
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
        let text = include_str!("../../tests/folders/examples.json");
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
            let logits = settings.penalized(&case.logits, &case.prompt, &[]);
            let order = TokenOrder::of(&logits);
            let first = order.first().unwrap();
            let weights = TokenWeights::new(first.logit(), settings.temperature);
            let least = settings.lowest_kept(&order, first, weights);
            let total = order.total(weights, least);
            let mut found = vec![0.0; logits.len()];
            for rank in order
                .most(logits.len())
                .into_iter()
                .filter(|rank| *rank >= least)
            {
                found[rank.token() as usize] = f64::from(weights.of(rank.logit())) / total;
            }
            for (found, expected) in found.iter().zip(&case.probabilities) {
                assert!(
                    (found - expected).abs() < 1e-5,
                    "case {at}: {found}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn choices_follow_the_probabilities_and_repeat_by_seed() {
        let logits: Vec<f32> = [0.1f32, 0.6, 0.3].iter().map(|share| share.ln()).collect();
        let settings = Sampling {
            temperature: 1.0,
            seed: 3,
            ..Sampling::default()
        };
        let drawn = |settings: Sampling| -> Vec<u32> {
            let texts = (0..3000).map(|len| vec![9; len]);
            texts
                .map(|text| settings.next(logits.clone(), &[], &text).unwrap())
                .collect()
        };
        let all = drawn(settings);
        for (token, share) in [(0, 0.1), (1, 0.6), (2, 0.3)] {
            let found = all.iter().filter(|found| **found == token).count() as f64 / 3000.0;
            assert!((found - share).abs() < 0.03, "token {token}: {found}");
        }
        assert_eq!(all, drawn(settings));
        assert_ne!(
            all,
            drawn(Sampling {
                seed: 4,
                ..settings
            })
        );
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_after_penalties() {
        let next = |settings: Sampling, text: &[u32]| {
            settings.next(vec![1.0, 3.0, 3.0, -1.0], &[], text).unwrap()
        };
        assert_eq!(next(Sampling::default(), &[1]), 1);
        let presence = Sampling {
            presence_penalty: 0.5,
            ..Sampling::default()
        };
        assert_eq!(next(presence, &[1]), 2);
        let frequency = Sampling {
            frequency_penalty: 0.5,
            ..Sampling::default()
        };
        assert_eq!(next(frequency, &[1, 2, 2]), 1);
        let none = Sampling::default().next(vec![0.0, f32::NAN], &[], &[]);
        assert_eq!(
            (
                none,
                Sampling::default().next(vec![f32::NEG_INFINITY], &[], &[])
            ),
            (None, None)
        );
    }
    #[test]
    fn settings_that_keep_equal_tokens_draw_the_same() {
        let logits: Vec<f32> = (0..2000).map(|at| 3.0 * normal_f32(Key(1), at)).collect();
        let plain = Sampling {
            temperature: 0.9,
            ..Sampling::default()
        };
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let weight = |at: usize| (f64::from(sorted[at] - sorted[0]) / 0.9).exp();
        let total: f64 = (0..2000).map(weight).sum();
        for kept in [1, 7, 500, 2000] {
            let share = (0..kept).map(weight).sum::<f64>() - 0.5 * weight(kept - 1);
            let ways = [
                Sampling {
                    top_k: kept,
                    ..plain
                },
                Sampling {
                    top_p: share / total,
                    ..plain
                },
                Sampling {
                    min_p: weight(kept - 1) * (1.0 - 1e-5),
                    ..plain
                },
                Sampling {
                    top_k: kept,
                    top_p: 1.0 - 1e-12,
                    min_p: 1e-30,
                    ..plain
                },
            ];
            let drawn = |sampling: Sampling| -> Vec<u32> {
                let next = |seed| {
                    Sampling { seed, ..sampling }
                        .next(&logits, &[], &[])
                        .unwrap()
                };
                (0..100).map(next).collect()
            };
            let all = ways.map(drawn);
            assert!(all.iter().all(|tokens| *tokens == all[0]), "{kept} tokens");
            let least = sorted[kept - 1];
            assert!(
                all[0].iter().all(|token| logits[*token as usize] >= least),
                "{kept} tokens"
            );
        }
    }

    #[test]
    fn tokens_whose_logits_are_not_finite_are_not_drawn() {
        let with = |odd: f32| {
            let mut logits = vec![1.0; 600];
            logits[300] = odd;
            (0..600)
                .map(|seed| {
                    let drawn = Sampling {
                        temperature: 5.0,
                        top_p: 0.999,
                        seed,
                        ..Sampling::default()
                    };
                    let plain = Sampling {
                        top_p: 1.0,
                        ..drawn
                    };
                    [drawn.next(&logits, &[], &[]), plain.next(&logits, &[], &[])]
                })
                .collect::<Vec<_>>()
        };
        for hidden in [-f32::NAN, f32::NEG_INFINITY] {
            let found = with(hidden);
            assert!(
                found
                    .iter()
                    .flatten()
                    .all(|token| token.is_some_and(|token| token != 300))
            );
        }
        for first in [f32::NAN, f32::INFINITY] {
            assert!(with(first).iter().flatten().all(Option::is_none));
        }
    }

    #[test]
    fn penalties_count_each_token_of_prompt_and_text() {
        let logits: Vec<f32> = (0..50).map(|at| normal_f32(Key(2), at)).collect();
        let tokens: Vec<u32> = (0..400).map(|at| (at * at) % 37).collect();
        let (prompt, text) = tokens.split_at(350);
        let settings = Sampling {
            repetition_penalty: 1.5,
            presence_penalty: 0.3,
            frequency_penalty: -0.1,
            ..Sampling::default()
        };
        let found = settings.penalized(&logits, &[prompt, &[4_000_000_000]].concat(), text);
        for (token, (logit, found)) in (0..).zip(logits.iter().zip(found.iter())) {
            let count = |of: &[u32]| of.iter().filter(|other| **other == token).count();
            let mut expected = *logit;
            if count(&tokens) > 0 {
                expected = if *logit < 0.0 {
                    logit * 1.5
                } else {
                    logit / 1.5
                };
            }
            if count(text) > 0 {
                expected -= (0.3 - 0.1 * count(text) as f64) as f32;
            }
            assert!(
                (found - expected).abs() < 1e-6,
                "token {token}: {found}, not {expected}"
            );
        }
    }
}
