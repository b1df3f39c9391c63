//! The best evaluation of a training: by it a run ends early, and a program keeps the best model.

use serde::{Deserialize, Serialize};

/// The evaluation of all held-out data with the lowest loss. Checkpoints and commits contain it, so
/// it is the best of all runs of a training.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BestEvaluation {
    /// Number of updates that the evaluated model has had.
    pub step: u64,
    /// Mean loss of the held-out data. It is finite.
    #[serde(with = "exact")]
    pub loss: f64,
    /// Number of later evaluations. None of them had a lower loss.
    pub later: u64,
    /// Step of the last evaluation.
    pub(crate) last: u64,
}

/// Number of words that [`BestEvaluation::words`] returns.
pub(crate) const BEST_WORDS: usize = 5;

impl BestEvaluation {
    /// Returns the best evaluation of `best` and of an evaluation of the model after `step`
    /// updates. The loss must be finite. An evaluation that is repeated counts once.
    pub(crate) fn updated(best: Option<Self>, step: u64, loss: f64) -> Self {
        match best {
            Some(best) if loss >= best.loss => Self {
                later: best.later + u64::from(step > best.last),
                last: step,
                ..best
            },
            _ => Self {
                step,
                loss,
                later: 0,
                last: step,
            },
        }
    }

    /// Encodes the best evaluation, if there is one, for [`of_words`](Self::of_words).
    pub(crate) fn words(best: Option<Self>) -> [u64; BEST_WORDS] {
        best.map_or([0; BEST_WORDS], |best| {
            [1, best.step, best.loss.to_bits(), best.later, best.last]
        })
    }

    /// Returns the best evaluation that [`words`](Self::words) has encoded.
    pub(crate) fn of_words(words: [u64; BEST_WORDS]) -> Option<Self> {
        let [count, step, loss, later, last] = words;
        (count > 0).then_some(Self {
            step,
            loss: f64::from_bits(loss),
            later,
            last,
        })
    }
}

/// A number as text with all its digits. A number of JSON may lose its last bit when it is read.
mod exact {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_evaluations_count_once() {
        let mut best = None;
        let mut found = Vec::new();
        for (step, loss) in [
            (10, 3.0),
            (20, 3.5),
            (20, 3.5),
            (30, 3.0),
            (40, 2.5),
            (40, 2.5),
        ] {
            let now = BestEvaluation::updated(best, step, loss);
            found.push((now.step, now.loss, now.later));
            best = Some(now);
        }
        let first = [(10, 3.0, 0), (10, 3.0, 1), (10, 3.0, 1), (10, 3.0, 2)];
        assert_eq!(found, [&first[..], &[(40, 2.5, 0); 2]].concat());
    }

    #[test]
    fn encoded_evaluations_keep_all_bits() {
        let best = BestEvaluation::updated(None, 7, 0.1 + 0.2);
        let best = Some(BestEvaluation::updated(Some(best), 9, 1.0));
        assert_eq!(BestEvaluation::of_words(BestEvaluation::words(best)), best);
        assert_eq!(BestEvaluation::of_words(BestEvaluation::words(None)), None);
        let text = serde_json::to_string(&best).unwrap();
        assert_eq!(
            serde_json::from_str::<Option<BestEvaluation>>(&text).unwrap(),
            best
        );
    }
}
