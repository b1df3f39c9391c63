//! Counter-based random numbers: pure functions of a [`Key`] and an element's index.
//!
//! A number depends only on (key, global element index). So an array that is filled with them has
//! the same bits under any sharding and on any number of processes. The owner of a region asks for
//! the numbers of its elements. The generator is Philox4x32 with 10 rounds (Salmon, Moraes, Dror
//! and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

/// The key of one stream of random numbers. Different keys give independent streams.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Key(pub u64);

/// Last word of the Philox counter when [`bits`] draws random numbers. [`Key::fold_in`] uses
/// another one, so that the two never give the same output.
const NUMBERS: u32 = 0;
const KEYS: u32 = 1;

impl Key {
    /// Derives a new key from this key and `data`, such as the number of a layer, a step or a leaf.
    /// The same arguments always give the same key.
    pub fn fold_in(self, data: u64) -> Self {
        let [low, high, ..] = block(self, data, KEYS);
        Self(join(low, high))
    }
}

/// Returns 64 random bits for the element with index `element`. The same arguments always give the
/// same bits.
pub fn bits(key: Key, element: u64) -> u64 {
    let [low, high, ..] = block(key, element, NUMBERS);
    join(low, high)
}

/// Returns a number that is uniformly distributed in `[0, 1)`: a multiple of 2^-24. A pure function
/// of the key and the element's index.
pub fn uniform_f32(key: Key, element: u64) -> f32 {
    (bits(key, element) >> 40) as f32 / (1u32 << 24) as f32
}

/// Returns a number that is uniformly distributed in `[0, 1)`: a multiple of 2^-53. A pure function
/// of the key and the element's index.
pub fn uniform_f64(key: Key, element: u64) -> f64 {
    (bits(key, element) >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns [`normal_f64`] of the same arguments, rounded to `f32`: normally distributed with mean 0
/// and standard deviation 1.
pub fn normal_f32(key: Key, element: u64) -> f32 {
    normal_f64(key, element) as f32
}

/// Returns a number that is normally distributed with mean 0 and standard deviation 1, for the
/// element with index `element`.
///
/// Its last bits depend on the platform's logarithm and cosine. Processes with the same build on
/// the same kind of machine get the same bits.
pub fn normal_f64(key: Key, element: u64) -> f64 {
    // Box-Muller transform. The radius uses a number in (0, 1], so its logarithm is finite.
    let [a, b, c, d] = block(key, element, NUMBERS);
    let radius = ((join(a, b) >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let angle = (join(c, d) >> 11) as f64 / (1u64 << 53) as f64;
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// Returns the position of `index` in a pseudorandom permutation of `0..count`. The permutation
/// depends only on `key` and `count`.
///
/// # Panics
///
/// If `index` is not below `count`.
pub fn permuted(key: Key, index: u64, count: u64) -> u64 {
    assert!(index < count, "index {index} of a permutation of {count}");
    // A Feistel network permutes the numbers of an even number of bits. Its cycles are followed
    // until they come back below `count`.
    let half = (u64::BITS - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half) - 1;

    let mut place = index;
    loop {
        let mut high = place >> half;
        let mut low = place & mask;
        for round in 0..4 {
            (high, low) = (low, high ^ (bits(key.fold_in(round), low) & mask));
        }
        place = high << half | low;
        if place < count {
            return place;
        }
    }
}

fn block(key: Key, element: u64, purpose: u32) -> [u32; 4] {
    philox(
        [element as u32, (element >> 32) as u32, 0, purpose],
        [key.0 as u32, (key.0 >> 32) as u32],
    )
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | (u64::from(high) << 32)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [
                key[0].wrapping_add(0x9e37_79b9),
                key[1].wrapping_add(0xbb67_ae85),
            ];
        }

        let a = u64::from(counter[0]) * 0xd251_1f53;
        let b = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_values() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn permutations_have_each_index_once() {
        for count in [1, 2, 3, 5, 16, 17, 1000] {
            let order = |key| (0..count).map(move |index| permuted(Key(key), index, count));
            let mut sorted: Vec<u64> = order(7).collect();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}");
            assert!(
                count < 16 || !order(7).eq(order(8)) && !order(7).eq(0..count),
                "{count}"
            );
        }
        assert!(permuted(Key(1), u64::MAX - 1, u64::MAX) < u64::MAX);
    }

    #[test]
    fn high_bits_and_folded_keys_give_different_streams() {
        let key = Key(7);
        assert_ne!(bits(key, 1), bits(key, 1 + (1 << 32)));
        assert_ne!(key.fold_in(0), key.fold_in(1));
        assert_ne!(key.fold_in(0).fold_in(1), key.fold_in(1).fold_in(0));
        assert_ne!(key.fold_in(3).0, bits(key, 3), "a number never is a key");
    }

    #[test]
    fn fold_in_uses_all_64_bits() {
        let key = Key(7);
        for bit in 0..64 {
            assert_ne!(
                key.fold_in(5),
                key.fold_in(5 ^ (1 << bit)),
                "bit {bit} of the data"
            );
            assert_ne!(
                key.fold_in(5),
                Key(7 ^ (1 << bit)).fold_in(5),
                "bit {bit} of the key"
            );
        }
        assert_ne!(key.fold_in(5), key.fold_in(5 + (1 << 32)));
    }

    #[test]
    fn uniform_numbers_are_in_range_and_even() {
        let (key, n) = (Key(42), 20_000);
        let mut sums = [0.0f64; 2];
        for i in 0..n {
            let (a, b) = (uniform_f32(key, i), uniform_f64(key, i));
            assert!((0.0..1.0).contains(&a) && (0.0..1.0).contains(&b));
            sums[0] += f64::from(a);
            sums[1] += b * b;
        }
        assert!((sums[0] / n as f64 - 0.5).abs() < 0.01, "{sums:?}");
        assert!((sums[1] / n as f64 - 1.0 / 3.0).abs() < 0.01, "{sums:?}");
    }

    #[test]
    fn normal_numbers_have_mean_0_and_variance_1() {
        let (key, n) = (Key(1).fold_in(2), 20_000);
        let values: Vec<f64> = (0..n).map(|i| f64::from(normal_f32(key, i))).collect();
        let mean = values.iter().sum::<f64>() / n as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / n as f64;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
        assert!(values.iter().all(|v| v.is_finite()));
    }
}
