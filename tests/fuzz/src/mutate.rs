//! Mutations of valid inputs.

use fastrand::Rng;

/// Exclusive upper limit on the length of an input of random bytes.
const LONGEST: usize = 512;

/// Returns an input for a parser: a random sample with up to eight changes. Rarely, or without
/// samples, returns random bytes.
pub(crate) fn input(rng: &mut Rng, samples: &[Vec<u8>]) -> Vec<u8> {
    if samples.is_empty() || rng.u8(..16) == 0 {
        let length = rng.usize(..LONGEST);
        return std::iter::repeat_with(|| rng.u8(..)).take(length).collect();
    }
    let mut input = samples[rng.usize(..samples.len())].clone();
    for _ in 0..rng.u8(..9) {
        if rng.u8(..8) == 0 {
            let other = &samples[rng.usize(..samples.len())];
            input.truncate(rng.usize(..=input.len()));
            input.extend_from_slice(&other[rng.usize(..=other.len())..]);
        } else {
            mutate(rng, &mut input);
        }
    }
    input
}

/// Makes one random change to `input`: flips a bit, sets, inserts or removes bytes, writes an
/// integer, cuts the end, repeats a piece, or replaces a decimal number. An empty input gets one
/// byte.
pub fn mutate(rng: &mut Rng, input: &mut Vec<u8>) {
    if input.is_empty() {
        input.push(rng.u8(..));
        return;
    }
    let at = rng.usize(..input.len());
    match rng.u8(..8) {
        0 => input[at] ^= 1 << rng.u8(..8),
        1 => input[at] = rng.u8(..),
        2 => input.truncate(at),
        3 => input.insert(at, rng.u8(..)),
        4 => {
            let width = 1 << rng.u32(..4);
            let value = integer(rng).to_le_bytes();
            let end = input.len().min(at + width);
            input[at..end].copy_from_slice(&value[..end - at]);
        }
        5 => {
            let piece = input[at..input.len().min(at + rng.usize(1..64))].to_vec();
            let to = rng.usize(..=input.len());
            input.splice(to..to, piece);
        }
        6 => {
            input.drain(at..input.len().min(at + rng.usize(1..16)));
        }
        _ => {
            let at = at + input[at..].iter().position(u8::is_ascii_digit).unwrap_or(0);
            let digits = input[at..]
                .iter()
                .take_while(|byte| byte.is_ascii_digit())
                .count();
            let number = integer(rng).to_string();
            input.splice(at..at + digits, number.into_bytes());
        }
    }
}

/// Returns an integer that is likely to break lengths and counts: small, near a power of two, close
/// to the maximum, or random.
pub fn integer(rng: &mut Rng) -> u64 {
    match rng.u8(..4) {
        0 => rng.u64(..16),
        1 => (1u64 << rng.u32(..64))
            .wrapping_add(rng.u64(..3))
            .wrapping_sub(1),
        2 => u64::MAX - rng.u64(..16),
        _ => rng.u64(..),
    }
}
