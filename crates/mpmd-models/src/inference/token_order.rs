//! The order of the tokens of a vocabulary by their logits: the most probable tokens, and draws.
//!
//! Draws walk over the tokens by their numbers, not by their probabilities: so nothing is sorted.
//! Blocks of tokens know their largest logit. A walk leaves out blocks in which no token counts.

use std::ops::Range;

pub(crate) use mpmd_device::cpu::logits::TokenWeights;
use mpmd_device::cpu::logits::{BINS, key, largest_key, logit};

/// Number of tokens in a block, whose largest logit is known.
const BLOCK: usize = 256;

/// The rank of a token by its logit: the most probable token has the highest rank. Of equal logits,
/// the lower token number ranks higher. Logits compare as in [`f32::total_cmp`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct TokenRank(u64);

impl TokenRank {
    /// Returns the lowest rank of a finite logit. Tokens below it are never drawn.
    pub(crate) fn lowest() -> Self {
        Self::last(f32::MIN)
    }

    /// Returns the lowest rank of any token with this logit.
    pub(crate) fn last(logit: f32) -> Self {
        Self::new(logit, u32::MAX)
    }

    fn new(logit: f32, token: u32) -> Self {
        let key = key(logit).cast_unsigned() ^ (1 << 31);
        Self(u64::from(key) << 32 | u64::from(!token))
    }

    fn key(self) -> i32 {
        ((self.0 >> 32) as u32 ^ (1 << 31)).cast_signed()
    }

    pub(crate) fn logit(self) -> f32 {
        logit(self.key())
    }

    pub(crate) fn token(self) -> u32 {
        !(self.0 as u32)
    }
}

/// The logits of a vocabulary, with the largest logit of each block.
pub(crate) struct TokenOrder<'a> {
    logits: &'a [f32],
    /// The sort key of the largest logit in each block.
    largest: Vec<i32>,
}

impl<'a> TokenOrder<'a> {
    pub(crate) fn of(logits: &'a [f32]) -> Self {
        Self {
            logits,
            largest: logits.chunks(BLOCK).map(largest_key).collect(),
        }
    }

    /// Returns the rank of the most probable token. `None` if there are no tokens.
    pub(crate) fn first(&self) -> Option<TokenRank> {
        let largest = self.largest.iter().max()?;
        let block = self.largest.iter().position(|key| key == largest)?;
        self.ranks(block).max()
    }

    /// Returns the ranks of the `count` most probable tokens, unsorted.
    pub(crate) fn most(&self, count: usize) -> Vec<TokenRank> {
        if count == 0 {
            return Vec::new();
        }
        // The `count`-th largest of the blocks' largest keys: at least `count` tokens reach it.
        let border = match count <= self.largest.len() {
            false => i32::MIN,
            true => {
                let mut largest = self.largest.clone();
                *largest.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1
            }
        };
        let blocks = self.blocks().filter(|block| self.largest[*block] >= border);
        let ranks = blocks.flat_map(|block| self.ranks(block));
        let mut most: Vec<TokenRank> = ranks.filter(|rank| rank.key() >= border).collect();
        if count < most.len() {
            most.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
            most.truncate(count);
        }
        most
    }

    /// Returns the sum of the weights of all tokens with rank `least` or higher.
    pub(crate) fn total(&self, weights: TokenWeights, least: TokenRank) -> f64 {
        self.blocks()
            .map(|block| self.sum(block, weights, least))
            .sum()
    }

    /// Returns the lowest rank of the nucleus: the fewest most probable tokens whose weights add up
    /// to `share` of the total. The total covers the tokens with rank `least` or higher.
    pub(crate) fn nucleus(&self, weights: TokenWeights, least: TokenRank, share: f64) -> TokenRank {
        let mut sums = vec![0.0; BINS];
        for block in self
            .blocks()
            .filter(|block| self.largest[*block] >= least.key())
        {
            self.with(block, least, |logits, key| {
                weights.add_to_bins(logits, key, &mut sums)
            });
        }
        let enough = share * sums.iter().sum::<f64>();
        let mut sum = 0.0;
        let border = sums.iter().position(|more| {
            sum += more;
            sum >= enough
        });
        let Some(border) = border else { return least };

        // The lowest rank is in this bin.
        let mut ranks = Vec::new();
        for block in self.blocks() {
            let largest = self.largest[block];
            if largest >= least.key() && weights.bin(logit(largest)) <= border {
                let Range { start, end } = self.range(block);
                weights.find_in_bin(&self.logits[start..end], border, &mut |at| {
                    let token = start + at;
                    ranks.push(TokenRank::new(self.logits[token], token as u32));
                });
            }
        }
        ranks.retain(|rank| *rank >= least);
        let weight = |rank: TokenRank| f64::from(weights.of(rank.logit()));
        lowest_needed(&mut ranks, weight, sum - sums[border], enough).unwrap_or(least)
    }

    /// Draws a token with rank `least` or higher, with probabilities proportional to the weights.
    /// `random` is a uniform number from 0 to 1. `None` if all weights are zero.
    ///
    /// The tokens are lined up by number, each as long as its weight; `random` is a point on this
    /// line.
    pub(crate) fn draw(&self, weights: TokenWeights, least: TokenRank, random: f64) -> Option<u32> {
        let sums: Vec<f64> = self
            .blocks()
            .map(|at| self.sum(at, weights, least))
            .collect();
        let mut rest = random * sums.iter().sum::<f64>();
        let block = passed(&mut rest, sums.iter().copied())?;
        let token = self.with(block, least, |logits, key| {
            let lengths = logits
                .iter()
                .map(|logit| f64::from(weights.from_key(*logit, key)));
            passed(&mut rest, lengths)
        })?;
        Some((self.range(block).start + token) as u32)
    }

    fn blocks(&self) -> Range<usize> {
        0..self.largest.len()
    }

    /// Returns the numbers of the tokens in a block.
    fn range(&self, block: usize) -> Range<usize> {
        block * BLOCK..self.logits.len().min((block + 1) * BLOCK)
    }

    fn ranks(&self, block: usize) -> impl Iterator<Item = TokenRank> {
        self.range(block)
            .map(|token| TokenRank::new(self.logits[token], token as u32))
    }

    /// Calls `f` with the logits of a block and the sort key from which on a logit counts. Logits
    /// with this key whose tokens rank below `least` are replaced by negative infinity.
    ///
    /// Ranks that keep the same tokens give the same logits, so sums of weights have the same bits.
    fn with<R>(&self, block: usize, least: TokenRank, f: impl FnOnce(&[f32], i32) -> R) -> R {
        let Range { start, end } = self.range(block);
        let logits = &self.logits[start..end];
        let least_key = least.key();
        // Of an equal logit, a later token ranks lower.
        let behind = (least.token() as usize).saturating_add(1);
        if behind >= end {
            return f(logits, least_key);
        }
        if behind <= start {
            return f(logits, least_key.saturating_add(1));
        }
        let mut own = logits.to_vec();
        for logit in own[behind - start..]
            .iter_mut()
            .filter(|logit| key(**logit) == least_key)
        {
            *logit = f32::NEG_INFINITY;
        }
        f(&own, least_key)
    }

    /// Returns the sum of the weights of a block's tokens with rank `least` or higher.
    fn sum(&self, block: usize, weights: TokenWeights, least: TokenRank) -> f64 {
        match self.largest[block] >= least.key() {
            true => self.with(block, least, |logits, key| {
                f64::from(weights.sum(logits, key))
            }),
            false => 0.0,
        }
    }
}

/// Subtracts numbers from `rest` until one is larger than `rest`, and returns its index. If all are
/// subtracted, as after rounding, returns the index of the last positive number.
fn passed(rest: &mut f64, numbers: impl Iterator<Item = f64>) -> Option<usize> {
    let mut last = None;
    for (at, number) in numbers.enumerate().filter(|(_, number)| *number > 0.0) {
        last = Some(at);
        if *rest < number {
            break;
        }
        *rest -= number;
    }
    last
}

/// Adds the weights of ranks to `sum`, from the highest down, until it is at least `enough`.
/// Returns the last rank added. `None` if there are no ranks.
fn lowest_needed(
    mut ranks: &mut [TokenRank],
    weight: impl Fn(TokenRank) -> f64,
    mut sum: f64,
    enough: f64,
) -> Option<TokenRank> {
    while ranks.len() > 1 {
        let middle = ranks.len() / 2;
        ranks.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (upper, lower) = ranks.split_at_mut(middle);
        let more: f64 = upper.iter().map(|rank| weight(*rank)).sum();
        if sum + more >= enough {
            ranks = upper;
        } else {
            sum += more;
            ranks = lower;
        }
    }
    ranks.first().copied()
}

#[cfg(test)]
mod tests {
    use mpmd::random::{Key, normal_f32, uniform_f64};

    use super::*;

    /// Returns logits of several distributions: wide and narrow ones, many equal ones, and some
    /// that are no finite numbers.
    fn cases() -> Vec<Vec<f32>> {
        let normal = |seed: u64, count: u64, scale: f32| -> Vec<f32> {
            (0..count)
                .map(|at| scale * normal_f32(Key(seed), at))
                .collect()
        };
        let mut rounded = normal(1, 5000, 1.0);
        rounded.iter_mut().for_each(|logit| *logit = logit.round());
        let mut odd = normal(2, 700, 3.0);
        odd[3] = -f32::NAN;
        odd[400] = f32::NEG_INFINITY;
        odd[401] = -0.0;
        odd[402] = 0.0;
        odd[699] = f32::MIN;
        let mut far = normal(6, 300, 1.0);
        far[7] = 1e9;
        vec![
            vec![0.5],
            vec![2.0; 1000],
            normal(3, 255, 1.0),
            normal(4, 3000, 10.0),
            normal(5, 20_000, 0.01),
            rounded,
            odd,
            far,
        ]
    }

    /// Returns the ranks of all tokens, the highest first, by a plain sort.
    fn sorted(logits: &[f32]) -> Vec<TokenRank> {
        let mut all: Vec<u32> = (0..logits.len() as u32).collect();
        let of = |token: u32| logits[token as usize];
        all.sort_by(|a, b| of(*b).total_cmp(&of(*a)).then(a.cmp(b)));
        all.into_iter()
            .map(|token| TokenRank::new(of(token), token))
            .collect()
    }

    #[test]
    fn most_probable_tokens_are_those_of_a_sort() {
        for logits in cases() {
            let (order, all) = (TokenOrder::of(&logits), sorted(&logits));
            assert!(all.is_sorted_by(|a, b| a > b), "ranks have the order");
            let same = |rank: &TokenRank| {
                rank.logit().to_bits() == logits[rank.token() as usize].to_bits()
            };
            assert!(all.iter().all(same), "ranks tell their logits");
            assert_eq!(order.first(), all.first().copied());
            for count in [0, 1, 2, 20, 300, 4999, 30_000] {
                let mut most = order.most(count);
                most.sort_by(|a, b| b.cmp(a));
                assert_eq!(
                    most,
                    all[..count.min(all.len())],
                    "{count} of {}",
                    logits.len()
                );
            }
        }
        assert_eq!(TokenOrder::of(&[]).first(), None);
    }

    #[test]
    fn nuclei_are_those_of_a_sort() {
        for logits in cases() {
            let (order, all) = (TokenOrder::of(&logits), sorted(&logits));
            let counted = all.partition_point(|rank| *rank >= TokenRank::lowest());
            for (share, temperature) in [
                (1e-9, 1.0),
                (0.1, 1.0),
                (0.5, 0.3),
                (0.9, 1e9),
                (0.99, 2.0),
                (0.5, 1e-300),
            ] {
                let weights = TokenWeights::new(all[0].logit(), temperature);
                for from in [counted - 1, counted / 3, 0] {
                    let weight = |rank: &TokenRank| f64::from(weights.of(rank.logit()));
                    let enough = share * all[..=from].iter().map(weight).sum::<f64>();
                    let mut sum = 0.0;
                    let last = all.iter().position(|rank| {
                        sum += weight(rank);
                        sum >= enough
                    });
                    let found = order.nucleus(weights, all[from], share);
                    let last = last.unwrap();
                    // The order of the sums may decide on the last one.
                    let near = [last.saturating_sub(1), last, last + 1];
                    let is_near = near.iter().any(|at| all.get(*at) == Some(&found));
                    assert!(is_near, "{} logits, {share}, {temperature}", logits.len());
                }
            }
        }
    }

    #[test]
    fn draws_walk_over_the_tokens_by_their_numbers() {
        for logits in cases() {
            let (order, all) = (TokenOrder::of(&logits), sorted(&logits));
            let counted = all.partition_point(|rank| *rank >= TokenRank::lowest());
            let weights = TokenWeights::new(all[0].logit(), 0.8);
            for (from, seed) in [(counted - 1, 1), (counted / 2, 2), (0, 3)] {
                let least = all[from];
                let of = |logit: f32, token: u32| match TokenRank::new(logit, token) >= least {
                    true => f64::from(weights.of(logit)),
                    false => 0.0,
                };
                let lengths: Vec<f64> = logits
                    .iter()
                    .zip(0..)
                    .map(|(logit, token)| of(*logit, token))
                    .collect();
                let total: f64 = lengths.iter().sum();
                assert!((order.total(weights, least) / total - 1.0).abs() < 1e-6);
                for at in 0..100 {
                    let random = uniform_f64(Key(seed), at);
                    let token = order.draw(weights, least, random).unwrap() as usize;
                    let start: f64 = lengths[..token].iter().sum();
                    let place = random * total;
                    assert!(lengths[token] > 0.0, "token {token} does not count");
                    let error = 1e-6 * total;
                    let covers = start - error <= place && place <= start + lengths[token] + error;
                    assert!(
                        covers,
                        "token {token} of {}: {place} from {start}",
                        logits.len()
                    );
                }
            }
        }
        assert_eq!(
            TokenOrder::of(&[f32::NEG_INFINITY]).draw(
                TokenWeights::new(0.0, 1.0),
                TokenRank::lowest(),
                0.5
            ),
            None
        );
    }
}
