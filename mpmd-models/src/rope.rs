//! The rotary embedding of positions, with the scalings of long contexts.

use std::f64::consts::PI;
use std::fmt;

use mpmd::candle::nn::rotary_emb::rope_thd;
use mpmd::candle::{Device, Result, Tensor};

/// The rotary embedding of a model: the frequencies by which pairs of elements rotate.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: pair `i` of `n` has the frequency `theta^(-i/n)`.
    pub theta: f64,
    /// The change of these frequencies.
    pub scaling: Scaling,
}

/// A change of the frequencies of a rotary embedding, for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// Divides each frequency by a factor.
    Linear {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
    },
    /// Divides low frequencies by a factor, keeps high ones, and interpolates between: the scaling
    /// of Llama 3.1, from the function `apply_scaling` in Meta's published model code.
    Llama3 {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
        /// Frequencies with at most this number of turns in the original context are divided.
        low_freq_factor: f64,
        /// Frequencies with at least this number of turns in the original context are kept.
        high_freq_factor: f64,
        /// Length of the original context, in tokens.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// Returns the angle by which each pair of a head's elements rotates from one position to the
    /// next, in radians.
    ///
    /// Frequencies are rounded to f32 before and after the scaling, as in `transformers`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let pairs = head_dim / 2;
        let plain = (0..pairs).map(|pair| {
            let power = (2 * pair) as f32 / head_dim as f32;
            1.0 / self.theta.powf(f64::from(power)) as f32
        });
        plain.map(|frequency| self.scaling.apply(f64::from(frequency)) as f32).collect()
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => write!(f, "default"),
            Self::Linear { factor } => write!(f, "linear by {factor}"),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => write!(f, "llama3 by {factor}, of {low} to {high} turns in {original}"),
        }
    }
}

impl Scaling {
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * frequency / (2.0 * PI);
                if turns < low {
                    frequency / factor
                } else if turns > high {
                    frequency
                } else {
                    let kept = (turns - low) / (high - low);
                    (1.0 - kept) * frequency / factor + kept * frequency
                }
            }
        }
    }
}

/// The cosines and sines of the angles at the first positions, `[positions, head_dim / 2]` each.
/// Clones share them.
#[derive(Clone, Debug)]
pub struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Angles {
    /// Computes the angles of `positions` positions.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub fn new(rope: &Rope, head_dim: usize, positions: usize) -> Result<Self> {
        let frequencies = rope.frequencies(head_dim);
        let table = |f: fn(f64) -> f64| {
            let row = |at: usize| {
                // The product is rounded to f32, as in `transformers`.
                let angle = move |frequency: &f32| f64::from(at as f32 * frequency);
                frequencies.iter().map(move |frequency| f(angle(frequency)) as f32)
            };
            let values: Vec<f32> = (0..positions).flat_map(row).collect();
            Tensor::from_vec(values, (positions, frequencies.len()), &Device::Cpu)
        };
        Ok(Self { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }

    /// Rotates heads `[batch, time, heads, head_dim]`, where time begins at position 0.
    ///
    /// # Errors
    ///
    /// If there are more positions than angles.
    pub fn rotate(&self, heads: &Tensor) -> Result<Tensor> {
        rope_thd(heads, &self.cos, &self.sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let at = |turns: f64| turns * 2.0 * PI / 8192.0;
        let ratio = |turns: f64| scaling.apply(at(turns)) / at(turns);
        assert!((ratio(0.5) - 0.125).abs() < 1e-12);
        assert_eq!(ratio(5.0), 1.0);
        assert!((ratio(2.5) - 0.5 * (1.0 + 0.125)).abs() < 1e-12);
    }
}
