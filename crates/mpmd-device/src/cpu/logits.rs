//! Walks over logits: the largest, and the weights by which tokens are drawn. The bits of the
//! results do not depend on the processor.

use super::lanes;
use super::widest::widest;

/// Number of partial results that are computed in parallel.
const LANES: usize = 16;
/// Number of weights that are computed before they are summed.
const TOGETHER: usize = 256;
/// Number of low bits of a distance's `f32` form that its bin ignores.
const SHIFT: u32 = 17;
/// Number of bins of [`TokenWeights::bin`].
pub const BINS: usize = 1 << (31 - SHIFT);

/// Returns an integer for a logit. Keys are ordered as [`f32::total_cmp`] orders their logits.
#[inline(always)]
pub fn key(logit: f32) -> i32 {
    flipped(logit.to_bits().cast_signed())
}

/// Returns the logit that has the [`key`] `key`.
#[inline(always)]
pub fn logit(key: i32) -> f32 {
    f32::from_bits(flipped(key).cast_unsigned())
}

/// Flips all bits but the sign if the number is negative. A second flip restores the number.
#[inline(always)]
fn flipped(bits: i32) -> i32 {
    bits ^ ((bits >> 31).cast_unsigned() >> 1).cast_signed()
}

/// Returns the largest [`key`] of the logits, or `i32::MIN` if there are none.
pub fn largest_key(logits: &[f32]) -> i32 {
    largest_wide(logits)
}

widest!(fn largest_wide = largest(logits: &[f32]) -> i32);

#[inline(always)]
fn largest(logits: &[f32]) -> i32 {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [i32::MIN; LANES];

    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane = key(*logit).max(*lane);
        }
    }
    for (lane, logit) in lanes.iter_mut().zip(rest) {
        *lane = key(*logit).max(*lane);
    }

    lanes.into_iter().fold(i32::MIN, i32::max)
}

/// Weights for sampling tokens: `e^((x - largest) / temperature)` for a logit `x`. They are
/// accurate to 3e-7 near the largest logit, and zero below 1e-34.
#[derive(Clone, Copy, Debug)]
pub struct TokenWeights {
    largest: f32,
    rate: f32,
}

impl TokenWeights {
    /// Creates the weights for logits up to `largest`, which must be finite.
    pub fn new(largest: f32, temperature: f64) -> Self {
        // Within these limits the rate is a finite number, and products with it are not NaN.
        Self {
            largest,
            rate: temperature.clamp(1e-30, 1e30).recip() as f32,
        }
    }

    /// Returns the weight of a logit.
    #[inline(always)]
    pub fn of(self, logit: f32) -> f32 {
        lanes::exp((logit - self.largest) * self.rate)
    }

    /// Returns the weight of a logit if its [`key`] is at least `least`, else zero.
    #[inline(always)]
    pub fn from_key(self, logit: f32, least: i32) -> f32 {
        let weight = self.of(logit);
        if key(logit) >= least { weight } else { 0.0 }
    }

    /// Returns the bin of a logit by its distance from the largest logit. Smaller logits have the
    /// same bin or a later one. Each power of two of the distance has 64 bins.
    #[inline(always)]
    pub fn bin(self, logit: f32) -> usize {
        // No distance is negative, but that of a NaN may seem so.
        ((self.largest - logit).to_bits() >> SHIFT) as usize % BINS
    }

    /// Returns the sum of the weights of all logits whose [`key`] is at least `least`.
    pub fn sum(self, logits: &[f32], least: i32) -> f32 {
        sum_wide(self, logits, least)
    }

    /// Adds the weights of all logits whose [`key`] is at least `least` to their bins in `sums`.
    ///
    /// # Panics
    ///
    /// If `sums` has fewer than [`BINS`] elements.
    pub fn add_to_bins(self, logits: &[f32], least: i32, sums: &mut [f64]) {
        let Some(sums) = sums.first_chunk_mut() else {
            panic!("a sum for each bin")
        };
        add_wide(self, logits, least, sums);
    }

    /// Calls `found` with the index of each logit in bin `bin`, in ascending order.
    pub fn find_in_bin(self, logits: &[f32], bin: usize, found: &mut dyn FnMut(usize)) {
        find_wide(self, logits, bin, found);
    }
}

widest!(fn sum_wide = sum(weights: TokenWeights, logits: &[f32], least: i32) -> f32);
widest!(fn add_wide = add(
    weights: TokenWeights, logits: &[f32], least: i32, sums: &mut [f64; BINS]
));
widest!(fn find_wide = find(
    weights: TokenWeights, logits: &[f32], bin: usize, found: &mut dyn FnMut(usize)
));

#[inline(always)]
fn sum(weights: TokenWeights, logits: &[f32], least: i32) -> f32 {
    lanes::sum_of(logits, |logit| weights.from_key(logit, least))
}

#[inline(always)]
fn add(weights: TokenWeights, logits: &[f32], least: i32, sums: &mut [f64; BINS]) {
    let mut terms = [0.0; TOGETHER];
    let mut bins = [0; TOGETHER];
    for logits in logits.chunks(TOGETHER) {
        // Without branches. The sums need one element after the other.
        for ((term, bin), logit) in terms.iter_mut().zip(&mut bins).zip(logits) {
            *term = weights.from_key(*logit, least);
            *bin = weights.bin(*logit) as u32;
        }

        for (bin, term) in bins.iter().zip(&terms[..logits.len()]) {
            sums[*bin as usize % BINS] += f64::from(*term);
        }
    }
}

#[inline(always)]
fn find(weights: TokenWeights, logits: &[f32], bin: usize, found: &mut dyn FnMut(usize)) {
    for (chunk, logits) in logits.chunks(LANES).enumerate() {
        let mut hits = [0u32; LANES];
        for (hit, logit) in hits.iter_mut().zip(logits) {
            *hit = u32::from(weights.bin(*logit) as u32 == bin as u32);
        }

        if hits.iter().sum::<u32>() > 0 {
            let own = hits.iter().enumerate().filter(|(_, hit)| **hit > 0);
            own.for_each(|(at, _)| found(chunk * LANES + at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns logits with many equal ones, and some that are no finite numbers.
    fn logits(count: usize) -> Vec<f32> {
        let some = [f32::NEG_INFINITY, -f32::NAN, -0.0, 0.0, f32::MIN];
        let logit = |at: usize| match at % 97 {
            odd @ 0..5 => some[odd],
            _ => ((at * 7919) % 1009) as f32 / 100.0 - 8.0,
        };
        (0..count).map(logit).collect()
    }

    #[test]
    fn keys_have_the_order_of_the_logits() {
        for count in [0, 1, 15, 16, 300] {
            let logits = logits(count);
            let largest = logits.iter().copied().max_by(f32::total_cmp);
            let expected = largest.map_or(i32::MIN, key);
            assert_eq!(
                (largest_key(&logits), super::largest(&logits)),
                (expected, expected)
            );
            assert!(
                logits
                    .iter()
                    .all(|x| logit(key(*x)).to_bits() == x.to_bits())
            );
            for pair in logits.windows(2) {
                assert_eq!(key(pair[0]).cmp(&key(pair[1])), pair[0].total_cmp(&pair[1]));
            }
        }
    }

    #[test]
    fn sums_have_equal_bits_on_any_processor() {
        for (count, temperature) in [(0, 1.0), (17, 0.7), (255, 1e-300), (1000, 1e300)] {
            let (logits, weights) = (logits(count), TokenWeights::new(2.09, temperature));
            for least in [key(f32::MIN), key(-3.0), key(2.09)] {
                let plain = sum(weights, &logits, least);
                assert_eq!(weights.sum(&logits, least).to_bits(), plain.to_bits());
                let mut bins = [vec![0.0; BINS], vec![0.0; BINS]];
                weights.add_to_bins(&logits, least, &mut bins[0]);
                add(weights, &logits, least, bins[1].first_chunk_mut().unwrap());
                assert_eq!(bins[0], bins[1]);
                let total: f64 = bins[0].iter().sum();
                assert!(
                    (total - f64::from(plain)).abs() <= 1e-5 * total,
                    "{total}, not {plain}"
                );

                for (bin, expected) in bins[0].iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
                    let mut sums = [0.0, 0.0];
                    let add = |at: usize| f64::from(weights.from_key(logits[at], least));
                    weights.find_in_bin(&logits, bin, &mut |at| sums[0] += add(at));
                    find(weights, &logits, bin, &mut |at| sums[1] += add(at));
                    assert_eq!(sums, [*expected; 2]);
                }
            }
        }
    }

    #[test]
    fn weights_are_near_the_exact_ones() {
        for temperature in [1e-3, 0.5, 1.0, 40.0] {
            let weights = TokenWeights::new(3.5, temperature);
            for at in 0..400 {
                let logit = 3.5 - (at as f32) * (temperature as f32) / 40.0;
                let exact = (f64::from(logit - 3.5) / temperature).exp();
                assert!(
                    (f64::from(weights.of(logit)) - exact).abs() < 1e-6 * exact,
                    "{logit}"
                );
            }
            assert_eq!(weights.of(3.5), 1.0);
        }
    }
}
