//! Random numbers from a seed (splitmix64): good enough for tests, and the same on every machine.

/// A sequence of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates a sequence with a new seed for each run. Prints the seed, so that a failed test can
    /// be repeated.
    pub fn of_this_run() -> Self {
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seed = now.as_nanos() as u64;
        println!("seed {seed}");
        Self(seed)
    }

    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns the next number, from 0 to `bound - 1`.
    ///
    /// # Panics
    ///
    /// If `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.draw() % bound as u64) as usize
    }

    /// Returns `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.draw().to_le_bytes());
        let mut bytes: Vec<u8> = words.take(count.div_ceil(8)).flatten().collect();
        bytes.truncate(count);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_sequence() {
        let mut random = Random::new(1_234_567);
        // The first numbers of the published generator for this seed.
        assert_eq!(
            [random.draw(), random.draw()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
        assert!((0..1000).all(|_| random.below(7) < 7));
        assert_eq!(Random::new(5).bytes(11), Random::new(5).bytes(16)[..11]);
    }
}
