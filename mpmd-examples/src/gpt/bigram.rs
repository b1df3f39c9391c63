//! What a table of pairs of bytes makes of a text: the baseline of a model that sees more than one byte.

use super::BYTES;
use crate::text::{BLOCK, HELD_OUT_EVERY, Text};

/// How many sightings the frequencies of single bytes weigh where a pair's own are counted.
const PRIOR: f64 = 8.0;

/// Losses of a bigram table, nats per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BigramLosses {
    /// On the text that it counted.
    pub training: f64,
    /// On the text held out.
    pub held_out: f64,
}

/// The losses of a table of how often each byte follows each, counted on the training blocks of a text.
///
/// The counts are interpolated with the frequencies of single bytes (each seen once more than it was), which
/// weigh as much as [`PRIOR`] sightings: better than one more sighting of every pair. `None` where nothing
/// is held out.
pub fn bigram_losses(text: &Text) -> Option<BigramLosses> {
    let bytes = text.bytes();
    let mut pairs = vec![0u32; BYTES * BYTES];
    let (mut firsts, mut seconds) = (vec![0u32; BYTES], vec![1u32; BYTES]);
    let held_out = |at: usize| at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
    // A pair belongs to its second byte; one that reaches back from the training text is not counted.
    let training = || (1..bytes.len()).filter(|at| !held_out(*at) && !held_out(*at - 1));
    for at in training() {
        let (first, second) = (usize::from(bytes[at - 1]), usize::from(bytes[at]));
        pairs[first * BYTES + second] += 1;
        firsts[first] += 1;
        seconds[second] += 1;
    }
    let total: f64 = seconds.iter().map(|count| f64::from(*count)).sum();
    let loss = |at: usize| {
        let (first, second) = (usize::from(bytes[at - 1]), usize::from(bytes[at]));
        let prior = PRIOR * f64::from(seconds[second]) / total;
        -((f64::from(pairs[first * BYTES + second]) + prior) / (f64::from(firsts[first]) + PRIOR)).ln()
    };
    let mean = |places: &mut dyn Iterator<Item = usize>| {
        let (sum, count) = places.fold((0.0, 0u64), |(sum, count), at| (sum + loss(at), count + 1));
        (count > 0).then(|| sum / count as f64)
    };
    Some(BigramLosses {
        training: mean(&mut training())?,
        held_out: mean(&mut (1..bytes.len()).filter(|at| held_out(*at)))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(byte: impl Fn(usize) -> u8) -> Option<BigramLosses> {
        bigram_losses(&Text::of_files(&[(0..20 * BLOCK - 1).map(byte).collect()]).unwrap())
    }

    #[test]
    fn what_follows_from_one_byte_costs_next_to_nothing() {
        let cycle = losses(|at| b'a' + (at % 5) as u8).unwrap();
        assert!(cycle.training < 0.02 && cycle.held_out < 0.02, "{cycle:?}");
        // Of two bytes, each followed by either.
        let even = losses(|at| b'a' + (at / 2 % 2) as u8).unwrap();
        assert!((even.held_out - 2f64.ln()).abs() < 0.01, "{even:?}");
    }

    #[test]
    fn held_out_text_is_not_counted() {
        let held_out = |at: usize| at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
        let marked = losses(|at| if held_out(at) { b'h' } else { b't' }).unwrap();
        assert!(marked.training < 0.01 && marked.held_out > 5.0, "{marked:?}");
        let short = Text::of_files(&[vec![b'x'; 1000]]).unwrap();
        assert_eq!(bigram_losses(&short), None);
    }
}
