//! The rotary embedding of positions, with the scalings of long contexts.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use mpmd::candle::nn::rotary_emb::rope_thd;
use mpmd::candle::{Device, Result, Tensor};
use mpmd_base::block::Mutex;

/// The rotary embedding of a model: the frequencies by which pairs of elements rotate.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: pair `i` has the frequency `theta^(-2i/dim)`.
    pub theta: f64,
    /// Number of elements at the start of a head that rotate. An odd number is rounded up.
    pub dim: usize,
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
    /// Divides low frequencies by a factor, keeps high ones, and interpolates between by the index
    /// of the pair (Peng et al., 2023).
    Yarn {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
        /// Length of the original context, in tokens.
        original: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
        /// Number of turns in the original context from which frequencies are kept.
        fast: f64,
        /// Number of turns in the original context up to which they are divided.
        slow: f64,
        /// True if the indices of both borders are rounded outwards.
        truncate: bool,
    },
    /// Divides each frequency by a factor of its own (Ding et al., 2024).
    LongRope {
        /// The divisors for sequences up to the original context.
        short: Vec<f64>,
        /// The divisors for longer sequences.
        long: Vec<f64>,
        /// Length of the original context, in tokens.
        original: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
    },
    /// Raises `theta` with the length of a sequence that is longer than the original context.
    Dynamic {
        /// The growth of `theta` with the length.
        factor: f64,
        /// Length of the original context, in tokens.
        original: usize,
    },
}

impl Rope {
    /// Returns the number of pairs of a head's elements that rotate.
    pub fn pairs(&self) -> usize {
        self.dim.div_ceil(2)
    }

    /// Returns the angle by which each pair rotates from one position to the next, in radians.
    /// `length` is the length of the whole sequence.
    ///
    /// Frequencies are rounded to f32 before and after the scaling, as in `transformers`.
    pub fn frequencies(&self, length: usize) -> Vec<f32> {
        let is_long = self.is_long(length);
        let theta = match self.scaling {
            Scaling::Dynamic { factor, original } if is_long => {
                let growth = factor * length as f64 / original as f64 - (factor - 1.0);
                let dim = self.dim as f64;
                self.theta * growth.powf(dim / (dim - 2.0))
            }
            _ => self.theta,
        };
        let frequency = |pair: usize| {
            let power = f64::from((2 * pair) as f32 / self.dim as f32);
            let divisor = theta.powf(power) as f32;
            match &self.scaling {
                Scaling::LongRope { long, .. } if is_long => 1.0 / (long[pair] as f32 * divisor),
                Scaling::LongRope { short, .. } => 1.0 / (short[pair] as f32 * divisor),
                Scaling::Yarn { .. } => self.yarn(pair, 1.0 / divisor),
                scaling => scaling.apply(f64::from(1.0 / divisor)) as f32,
            }
        };
        (0..self.pairs()).map(frequency).collect()
    }

    /// Returns the frequency of a pair under [`Scaling::Yarn`].
    fn yarn(&self, pair: usize, frequency: f32) -> f32 {
        let Scaling::Yarn {
            factor,
            original,
            fast,
            slow,
            truncate,
            ..
        } = self.scaling
        else {
            return frequency;
        };
        let dim = self.dim as f64;
        // The index of a pair that turns so many times in the original context.
        let index = |turns: f64| {
            dim * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
        };
        let low = index(fast);
        let high = index(slow);
        let (low, high) = if truncate {
            (low.floor(), high.ceil())
        } else {
            (low, high)
        };
        let low = low.max(0.0);
        let mut high = high.min(dim - 1.0);
        if low == high {
            high += 0.001;
        }
        let divided = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let kept = 1.0 - divided;
        frequency / factor as f32 * (1.0 - kept) + frequency * kept
    }

    /// True if the frequencies of a sequence of this length are others than those of a short one.
    fn is_long(&self, length: usize) -> bool {
        match self.scaling {
            Scaling::LongRope { original, .. } | Scaling::Dynamic { original, .. } => {
                length > original
            }
            _ => false,
        }
    }

    /// Returns the most tokens of a sequence, where a config has `positions`. These count before a
    /// linear or a dynamic scaling, and usually after the others.
    pub(crate) fn positions(&self, positions: usize) -> usize {
        let scaled = |positions: usize, factor: f64| (positions as f64 * factor.max(1.0)) as usize;
        match self.scaling {
            Scaling::Linear { factor } => scaled(positions, factor),
            Scaling::Dynamic { factor, original } => scaled(original, factor),
            Scaling::Yarn {
                factor, original, ..
            } => positions.max(scaled(original, factor)),
            Scaling::Default | Scaling::Llama3 { .. } | Scaling::LongRope { .. } => positions,
        }
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
            } => write!(
                f,
                "llama3 by {factor}, of {low} to {high} turns in {original}"
            ),
            other => write!(f, "{other:?}"),
        }
    }
}

impl Scaling {
    /// Returns a frequency under a scaling that depends on it alone.
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
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
            _ => frequency,
        }
    }

    /// Returns the factor of cosines and sines.
    fn amplitude(&self) -> f32 {
        match self {
            Self::Yarn { amplitude, .. } | Self::LongRope { amplitude, .. } => *amplitude as f32,
            _ => 1.0,
        }
    }
}

/// The cosines and sines of the angles at the first positions, `[positions, pairs]` each. Clones
/// share them.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    rope: Rope,
    /// Those of short sequences, or of all.
    tables: [Tensor; 2],
    /// Copies of the tables on other devices.
    copies: Arc<Mutex<Vec<[Tensor; 2]>>>,
    is_fixed: bool,
}

impl RopeAngles {
    /// Computes the angles of `positions` positions.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub fn new(rope: &Rope, positions: usize) -> Result<Self> {
        let tables = Self::tables(rope, positions, 0)?;
        Ok(Self {
            rope: rope.clone(),
            tables,
            copies: Arc::default(),
            is_fixed: false,
        })
    }

    /// Computes the angles of `positions` positions as for a sequence of that length. Shorter
    /// sequences get the same angles, so those of a sequence that grows stay the same.
    ///
    /// # Errors
    ///
    /// If candle fails.
    pub fn fixed(rope: &Rope, positions: usize) -> Result<Self> {
        let tables = Self::tables(rope, positions, positions)?;
        Ok(Self {
            rope: rope.clone(),
            tables,
            copies: Arc::default(),
            is_fixed: true,
        })
    }

    fn tables(rope: &Rope, positions: usize, length: usize) -> Result<[Tensor; 2]> {
        let frequencies = rope.frequencies(length);
        let angles: Vec<f32> = (0..positions)
            .flat_map(|at| angles_at(at, &frequencies))
            .collect();
        waves(
            &angles,
            rope.scaling.amplitude(),
            &[positions, rope.pairs()],
        )
    }

    /// Computes the angles of packed sequences `[batch, time, pairs]`, each for its own length.
    fn packed(rope: &Rope, starts: &Tensor) -> Result<[Tensor; 2]> {
        let (batch, time) = starts.dims2()?;
        let starts = starts.to_vec2::<u32>()?;
        let mut by_length = BTreeMap::new();
        let mut angles = Vec::new();
        for sequence in starts.iter().flat_map(|row| row.chunk_by(|a, b| a == b)) {
            let length = sequence.len();
            let frequencies = by_length
                .entry(length)
                .or_insert_with(|| rope.frequencies(length));
            (0..length).for_each(|at| angles.extend(angles_at(at, frequencies)));
        }
        waves(
            &angles,
            rope.scaling.amplitude(),
            &[batch, time, rope.pairs()],
        )
    }

    /// Returns the tables on a device. They are copied there once.
    fn on(&self, device: &Device) -> Result<[Tensor; 2]> {
        let is_there = |tables: &&[Tensor; 2]| tables[0].device().same_device(device);
        let mut copies = self.copies.lock();
        if let Some(there) = [&self.tables].into_iter().chain(&*copies).find(is_there) {
            return Ok(there.clone());
        }
        let [cos, sin] = &self.tables;
        let tables = [cos.to_device(device)?, sin.to_device(device)?];
        copies.push(tables.clone());
        Ok(tables)
    }

    /// Returns the rotation of the tokens of a pass, on a device.
    ///
    /// # Errors
    ///
    /// If there are more positions than angles.
    pub fn rotation(&self, places: RopePlaces<'_>, device: &Device) -> Result<RopeRotation> {
        let is_long = |time| !self.is_fixed && self.rope.is_long(time);
        let moved = |[cos, sin]: [Tensor; 2]| -> Result<_> {
            Ok([cos.to_device(device)?, sin.to_device(device)?])
        };
        let [cos, sin] = match places {
            RopePlaces::Whole(time) if is_long(time) => {
                moved(Self::tables(&self.rope, time, time)?)?
            }
            RopePlaces::Packed(starts) if is_long(starts.dim(1)?) => {
                moved(Self::packed(&self.rope, starts)?)?
            }
            RopePlaces::Whole(_) | RopePlaces::Packed(_) => self.on(device)?,
            RopePlaces::At(positions) => {
                let [cos, sin] = self.on(device)?;
                [
                    cos.index_select(positions, 0)?,
                    sin.index_select(positions, 0)?,
                ]
            }
        };
        Ok(RopeRotation {
            cos,
            sin,
            dim: 2 * self.rope.pairs(),
        })
    }
}

/// Returns the angles at a position. Each is rounded to f32, as in `transformers`.
fn angles_at(position: usize, frequencies: &[f32]) -> impl Iterator<Item = f32> {
    frequencies
        .iter()
        .map(move |frequency| position as f32 * frequency)
}

/// Returns the cosines and sines of angles.
fn waves(angles: &[f32], amplitude: f32, shape: &[usize]) -> Result<[Tensor; 2]> {
    let table = |wave: fn(f64) -> f64| {
        let values = angles
            .iter()
            .map(|angle| wave(f64::from(*angle)) as f32 * amplitude);
        Tensor::from_vec(values.collect(), shape, &Device::Cpu)
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}

/// The places of the tokens of a pass in their sequences.
#[derive(Clone, Copy, Debug)]
pub enum RopePlaces<'a> {
    /// The first tokens of a sequence in each row: so many.
    Whole(usize),
    /// Several sequences in each row. The tensor has the column at which each token's sequence
    /// starts, `[batch, time]` of `u32`.
    Packed(&'a Tensor),
    /// The positions of the tokens of one row, `[time]` of `u32`.
    At(&'a Tensor),
}

/// The rotation of the tokens of a pass.
#[derive(Clone, Debug)]
pub struct RopeRotation {
    /// `[time, pairs]` or `[batch, time, pairs]`, as `sin`.
    cos: Tensor,
    sin: Tensor,
    /// Number of elements of a head that rotate.
    dim: usize,
}

impl RopeRotation {
    /// Rotates heads `[batch, time, heads, head_dim]`.
    ///
    /// # Errors
    ///
    /// If they have more tokens than the pass.
    pub fn rotate(&self, heads: &Tensor) -> Result<Tensor> {
        let (_, _, _, head_dim) = heads.dims4()?;
        if self.dim == head_dim {
            return rope_thd(heads, &self.cos, &self.sin);
        }
        if self.dim == 0 {
            return Ok(heads.clone());
        }
        let rotated = rope_thd(&heads.narrow(3, 0, self.dim)?, &self.cos, &self.sin)?;
        Tensor::cat(
            &[rotated, heads.narrow(3, self.dim, head_dim - self.dim)?],
            3,
        )
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
