//! The rotary embedding of positions, with the scalings of long contexts.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use mpmd::candle::nn::rotary_emb::rope_thd;
use mpmd::candle::{Device, Result, Tensor};
use mpmd_base::block::Mutex;

/// A rotary position embedding: the angular frequency of each pair of elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies. Without scaling, pair `i` has the frequency `theta^(-2i/dim)`.
    pub theta: f64,
    /// Number of elements at the start of a head that are rotated. An odd number is rounded up.
    pub dim: usize,
    /// The change of the frequencies for longer contexts.
    pub scaling: Scaling,
}

/// A change of a rotary embedding's frequencies, for contexts longer than the original one.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Frequencies stay unchanged.
    Default,
    /// Divides each frequency by a factor.
    Linear {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
    },
    /// Divides low frequencies by a factor, keeps high ones, and interpolates between them. This is
    /// the scaling of Llama 3.1, as in the function `apply_scaling` of Meta's published model code.
    Llama3 {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
        /// Number of turns within the original context. Frequencies with fewer turns are divided.
        low_freq_factor: f64,
        /// Number of turns within the original context. Frequencies with more turns are kept.
        high_freq_factor: f64,
        /// Length of the original context, in tokens.
        original_max_position_embeddings: usize,
    },
    /// Divides low frequencies by a factor, keeps high ones, and interpolates between them by the
    /// index of the pair (Peng et al., 2023).
    Yarn {
        /// The divisor of the frequencies, usually 1 or more.
        factor: f64,
        /// Length of the original context, in tokens.
        original: usize,
        /// Factor of the cosines and sines.
        amplitude: f64,
        /// Number of turns within the original context. Frequencies with more turns are kept.
        fast: f64,
        /// Number of turns within the original context. Frequencies with fewer turns are divided.
        slow: f64,
        /// True if the bounds of the interpolation are rounded outwards to whole pair indices.
        truncate: bool,
    },
    /// Divides the frequency of each pair by a factor of its own (Ding et al., 2024).
    LongRope {
        /// The divisors for sequences no longer than the original context.
        short: Vec<f64>,
        /// The divisors for longer sequences.
        long: Vec<f64>,
        /// Length of the original context, in tokens.
        original: usize,
        /// Factor of the cosines and sines.
        amplitude: f64,
    },
    /// Raises `theta` for sequences longer than the original context. The longer the sequence, the
    /// larger `theta`.
    Dynamic {
        /// Factor by which `theta` grows with the length; see [`Rope::frequencies`].
        factor: f64,
        /// Length of the original context, in tokens.
        original: usize,
    },
}

impl Rope {
    /// Returns the number of element pairs of a head that are rotated.
    pub fn pairs(&self) -> usize {
        self.dim.div_ceil(2)
    }

    /// Returns for each pair the angle between two neighbouring positions, in radians. `length` is
    /// the length of the whole sequence.
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

    /// Returns the frequency of pair `pair` under [`Scaling::Yarn`]. `frequency` is the unscaled
    /// one.
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

    /// True if a sequence of this length is beyond the original context, and has other frequencies
    /// than a short one.
    fn is_long(&self, length: usize) -> bool {
        match self.scaling {
            Scaling::LongRope { original, .. } | Scaling::Dynamic { original, .. } => {
                length > original
            }
            _ => false,
        }
    }

    /// Returns the largest number of tokens in a sequence. `positions` is the number in the config;
    /// a linear or dynamic scaling multiplies it, and [`Scaling::Yarn`] may raise it.
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
    /// Returns the scaled frequency, for scalings that need only the frequency itself.
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

    /// Returns the factor of the cosines and sines.
    fn amplitude(&self) -> f32 {
        match self {
            Self::Yarn { amplitude, .. } | Self::LongRope { amplitude, .. } => *amplitude as f32,
            _ => 1.0,
        }
    }
}

/// Tables of the cosines and sines of all angles, `[positions, pairs]` each. Clones share the
/// tables.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    rope: Rope,
    /// The cosines and sines: for short sequences, or of a fixed table for all sequences.
    tables: [Tensor; 2],
    /// Copies of the tables on other devices than the first.
    copies: Arc<Mutex<Vec<[Tensor; 2]>>>,
    is_fixed: bool,
}

impl RopeAngles {
    /// Creates tables for `positions` positions. Sequences beyond the original context get their
    /// own angles if the scaling depends on the length.
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

    /// Creates tables for `positions` positions, with the frequencies of a sequence of that length.
    /// Shorter sequences use the same angles, so they do not change while a sequence grows.
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

    /// Computes the cosines and sines of packed sequences, `[batch, time, pairs]`. Each sequence
    /// has the frequencies of its own length.
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

    /// Returns the tables on a device. The first call for a device copies them.
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

    /// Returns the rotations of the tokens at `places`, on a device.
    ///
    /// # Errors
    ///
    /// If there are more positions than the tables have.
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

/// Returns the angle of each pair at a position. Each is rounded to f32, as in `transformers`.
fn angles_at(position: usize, frequencies: &[f32]) -> impl Iterator<Item = f32> {
    frequencies
        .iter()
        .map(move |frequency| position as f32 * frequency)
}

/// Returns tensors with the cosines and sines of angles, multiplied by `amplitude`.
fn waves(angles: &[f32], amplitude: f32, shape: &[usize]) -> Result<[Tensor; 2]> {
    let table = |wave: fn(f64) -> f64| {
        let values = angles
            .iter()
            .map(|angle| wave(f64::from(*angle)) as f32 * amplitude);
        Tensor::from_vec(values.collect(), shape, &Device::Cpu)
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}

/// The positions of tokens in their sequences.
#[derive(Clone, Copy, Debug)]
pub enum RopePlaces<'a> {
    /// One sequence in each row, from position 0 on. Has the number of tokens in a row.
    Whole(usize),
    /// Several sequences in each row. The tensor has the column at which each token's sequence
    /// starts, `[batch, time]` of `u32`.
    Packed(&'a Tensor),
    /// A single row of tokens. The tensor has their positions, `[time]` of `u32`.
    At(&'a Tensor),
}

/// The cosines and sines that rotate the tokens of a pass.
#[derive(Clone, Debug)]
pub struct RopeRotation {
    /// Cosines, `[time, pairs]` or `[batch, time, pairs]`. `sin` has the same shape.
    cos: Tensor,
    sin: Tensor,
    /// Number of elements of a head that are rotated.
    dim: usize,
}

impl RopeRotation {
    /// Returns `heads`, `[batch, time, heads, head_dim]`, after rotation by the tokens' positions.
    ///
    /// # Errors
    ///
    /// If `heads` has more tokens than the rotation.
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
