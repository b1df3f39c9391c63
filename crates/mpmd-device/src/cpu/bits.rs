//! Rounding, hashing and comparing the bits of arrays, at about the speed of memory.

use super::widest::widest;

/// Number of the hash's keys in the precomputed table.
const KEYS: usize = 4096;
static TABLE: [u32; KEYS] = table();

const fn table() -> [u32; KEYS] {
    let mut table = [0; KEYS];
    let mut i = 0;
    while i < KEYS {
        table[i] = (mixed(i as u64) >> 32) as u32;
        i += 1;
    }
    table
}

/// Mixes the bits of `x`, so that each bit of the result depends on all of them (splitmix64's
/// finaliser).
const fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Rounds little-endian `f32` values to the nearest bfloat16, and ties to even. A NaN stays a NaN.
///
/// # Panics
///
/// If `out` does not have half as many bytes as `values`.
pub fn round_to_bf16(values: &[u8], out: &mut [u8]) {
    assert_eq!(values.len(), 2 * out.len(), "bytes");
    round_wide(values, out);
}

widest!(fn round_wide = round(values: &[u8], out: &mut [u8]));

#[inline(always)]
fn round(values: &[u8], out: &mut [u8]) {
    for (to, from) in out
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .zip(values.as_chunks::<4>().0)
    {
        let bits = u32::from_le_bytes(*from);
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        *to = if is_nan {
            (bits >> 16) as u16 | 0x40
        } else {
            rounded
        }
        .to_le_bytes();
    }
}

/// Returns a checksum of little-endian words of `word` bytes (1, 2 or 4): the sum of word times
/// key, modulo 2^64. The keys are odd 32-bit numbers that depend on the word's index; `first` is
/// the index of the first word. A change of one word always changes the checksum. It detects
/// errors, not malicious changes.
///
/// # Panics
///
/// If `word` is not 1, 2 or 4.
pub fn sum_of_words(bytes: &[u8], word: usize, first: usize) -> u64 {
    assert!([1, 2, 4].contains(&word), "words of {word} bytes");
    sum_wide(bytes, word, first)
}

widest!(fn sum_wide = sum(bytes: &[u8], word: usize, first: usize) -> u64);

#[inline(always)]
fn sum(bytes: &[u8], word: usize, first: usize) -> u64 {
    match word {
        1 => sum_of(bytes.as_chunks::<1>().0, first, |word| word[0].into()),
        2 => sum_of(bytes.as_chunks::<2>().0, first, |word| {
            u16::from_le_bytes(*word).into()
        }),
        _ => sum_of(bytes.as_chunks::<4>().0, first, |word| {
            u32::from_le_bytes(*word)
        }),
    }
}

#[inline(always)]
fn sum_of<const N: usize>(words: &[[u8; N]], first: usize, value: impl Fn(&[u8; N]) -> u32) -> u64 {
    let mut sum = 0u64;
    let mut words = words;
    let mut place = first;

    while !words.is_empty() {
        // Up to the end of the table: the keys behind it are those of another block.
        let (now, rest) = words.split_at(words.len().min(KEYS - place % KEYS));
        let block = mixed(!(place / KEYS) as u64) as u32;
        for (word, key) in now.iter().zip(&TABLE[place % KEYS..]) {
            let key = u64::from((key ^ block) | 1);
            sum = sum.wrapping_add(u64::from(value(word)).wrapping_mul(key));
        }
        words = rest;
        place += now.len();
    }
    sum
}

/// Calls `changed` with the index of each element that differs between two buffers, in ascending
/// order. An element has `item` bytes.
///
/// # Panics
///
/// If the buffers' lengths differ, or `item` is not 1, 2, 4, 8 or 16.
pub fn each_changed(old: &[u8], new: &[u8], item: usize, mut changed: impl FnMut(usize)) {
    /// Number of bytes that are compared at once. Most blocks have no difference.
    const BLOCK: usize = 64;
    assert_eq!(old.len(), new.len(), "bytes");
    assert!(
        item.is_power_of_two() && item <= 16,
        "elements of {item} bytes"
    );
    let mut elements = |first: usize, old: &[u8], new: &[u8]| {
        let pairs = old
            .chunks_exact(item)
            .zip(new.chunks_exact(item))
            .enumerate();
        pairs
            .filter(|(_, (old, new))| old != new)
            .for_each(|(at, _)| changed(first + at));
    };

    let (olds, old) = old.as_chunks::<BLOCK>();
    let (news, new) = new.as_chunks::<BLOCK>();
    for (block, (old, new)) in olds.iter().zip(news).enumerate() {
        if old != new {
            let words = old
                .as_chunks::<16>()
                .0
                .iter()
                .zip(new.as_chunks::<16>().0)
                .enumerate();
            for (word, (old, new)) in words.filter(|(_, (old, new))| old != new) {
                elements((block * BLOCK + word * 16) / item, old, new);
            }
        }
    }

    elements(olds.len() * BLOCK / item, old, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_and_plain_forms_give_the_same_bits() {
        let bytes: Vec<u8> = (0..40_004u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8)
            .collect();
        for len in [0, 4, 60, 4096, 40_000] {
            let values = &bytes[..len];
            let (mut wide, mut plain) = (vec![0; len / 2], vec![0; len / 2]);
            round_to_bf16(values, &mut wide);
            round(values, &mut plain);
            assert_eq!(wide, plain);
            for (word, first) in [(1, 0), (2, 4000), (4, 1 << 33)] {
                assert_eq!(sum_of_words(values, word, first), sum(values, word, first));
            }
        }
    }

    #[test]
    fn each_changed_element_is_found_once() {
        for item in [1, 2, 4, 8, 16] {
            let old = vec![7u8; 16 * 133];
            let mut new = old.clone();
            let expected: Vec<usize> = (0..old.len() / item).step_by(11).collect();
            expected
                .iter()
                .for_each(|place| new[place * item + item - 1] = 8);
            let mut found = Vec::new();
            each_changed(&old, &new, item, |place| found.push(place));
            assert_eq!(found, expected, "{item}");
        }
    }
}
