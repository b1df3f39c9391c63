//! The rolling hash of a program's operations.
//!
//! Two 64-bit lanes, each a multiply-and-rotate mix with its own constants (the odd constants are
//! those of splitmix64 and of the golden ratio). It guards against mistakes, not against malice.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Number of bytes in a block of [`Rolling::mix_blocks`].
pub(crate) const BLOCK: usize = 64;

/// The initial value of each lane of [`Rolling::mix_blocks`]: fractional parts of the square roots
/// of the first primes.
const LANES: [u64; 4] = [
    0x6a09_e667_f3bc_c908,
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
];

/// A 128-bit hash into which words are mixed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Rolling(u64, u64);

impl Rolling {
    /// Returns the hash with `word` mixed in.
    #[inline]
    pub(crate) fn mix(self, word: u64) -> Self {
        // The added constants keep zero words from leaving a zero hash unchanged.
        let a = (self.0 ^ word)
            .wrapping_add(0x94d0_49bb_1331_11eb)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (self.1.rotate_left(23) ^ word)
            .wrapping_add(1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let a = a.rotate_left(29);
        Self(a ^ (b >> 32), b ^ (a >> 31))
    }

    /// Returns the hash with the bytes and their count mixed in.
    pub(crate) fn mix_bytes(self, bytes: &[u8]) -> Self {
        let mut hash = self.mix(bytes.len() as u64);
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        if !blocks.is_empty() {
            hash = hash.mix_blocks(blocks);
        }
        for chunk in rest.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = hash.mix(u64::from_le_bytes(word));
        }
        hash
    }

    /// Returns the hash with the blocks mixed in. Each of four lanes takes 16 bytes of a block, so
    /// that a processor works on all of them at once.
    pub(crate) fn mix_blocks<'a>(self, blocks: impl IntoIterator<Item = &'a [u8; BLOCK]>) -> Self {
        let mut lanes = LANES;
        for block in blocks {
            let (words, _) = block.as_chunks::<8>();
            let (pairs, _) = words.as_chunks::<2>();
            for ((lane, odd), [a, b]) in lanes.iter_mut().zip(LANES).zip(pairs) {
                let a = u64::from_le_bytes(*a) ^ odd;
                let b = u64::from_le_bytes(*b) ^ *lane;
                let product = u128::from(a) * u128::from(b);
                // With `b` added, since a product with zero would lose it.
                *lane = (product as u64 ^ (product >> 64) as u64).wrapping_add(b.rotate_left(32));
            }
        }
        lanes.into_iter().fold(self, Self::mix)
    }

    /// Folds the hash to 64 bits, for use as a word of another hash.
    pub(crate) fn word(self) -> u64 {
        self.0 ^ self.1
    }

    /// Returns all 128 bits, as they are sent over the wire.
    pub(crate) fn value(self) -> u128 {
        u128::from(self.0) | (u128::from(self.1) << 64)
    }
}

/// A map by the origin of arrays: (number of the operation, index of the result). The keys come
/// from this program only, so a fast hash without protection against attacks is enough.
pub(crate) type OriginMap<V> = HashMap<(u64, u32), V, BuildHasherDefault<OriginHasher>>;

/// The hasher of an [`OriginMap`].
#[derive(Default)]
pub(crate) struct OriginHasher(u64);

impl Hasher for OriginHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // The map takes the low bits, and the product is best in the high ones.
        self.0.rotate_left(32)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn order_count_and_value_all_matter() {
        let of = |words: &[u64]| {
            words
                .iter()
                .fold(Rolling::default(), |hash, word| hash.mix(*word))
                .value()
        };
        assert_ne!(of(&[1, 2]), of(&[2, 1]));
        assert_ne!(of(&[0]), of(&[0, 0]));
        let mut seen = HashSet::new();
        for a in 0..200 {
            for b in 0..200 {
                assert!(seen.insert(of(&[a, b])), "{a} {b}");
            }
        }
    }

    #[test]
    fn bytes_are_told_from_their_zero_padding() {
        let of = |bytes: &[u8]| Rolling::default().mix_bytes(bytes).value();
        assert_ne!(of(&[1]), of(&[1, 0]));
        let lengths: HashSet<u128> = (0..300).map(|bytes| of(&vec![0; bytes])).collect();
        assert_eq!(lengths.len(), 300);
    }

    #[test]
    fn every_bit_of_blocks_and_their_order_matter() {
        let of = |bytes: &[u8]| Rolling::default().mix_bytes(bytes).value();
        let mut bytes: Vec<u8> = (0..3 * BLOCK + 5).map(|i| (i / 8) as u8).collect();
        let mut seen = HashSet::from([of(&bytes)]);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(of(&bytes)), "bit {bit}");
            // Also a second change, a block behind.
            if let Some(byte) = bytes.get_mut(bit / 8 + BLOCK) {
                *byte ^= 1 << (bit % 8);
                assert!(seen.insert(of(&bytes)), "bit {bit}, twice");
                bytes[bit / 8 + BLOCK] ^= 1 << (bit % 8);
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for word in 0..2 * BLOCK / 8 {
            for other in word + 1..3 * BLOCK / 8 {
                let mut swapped = bytes.clone();
                (0..8).for_each(|i| swapped.swap(8 * word + i, 8 * other + i));
                assert!(seen.insert(of(&swapped)), "words {word} and {other}");
            }
        }
    }
}
