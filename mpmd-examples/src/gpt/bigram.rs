//! A baseline for models: a table of the frequencies of byte pairs.

use mpmd_train::data::Text;

use super::BYTES;

/// Weight of the second byte's own frequency in the estimate of a pair. It gives every pair a
/// probability above 0.
const UNIGRAM_SHARE: f64 = 0.05;

/// Returns the cross-entropy of a bigram table of the training bytes on `sequences` of tokens and
/// targets, in nats per byte. `None` if there are no sequences.
///
/// An estimate is 0.95 of the pair's frequency among pairs with the same first byte, plus 0.05 of
/// the second byte's own frequency. After a first byte that the training bytes lack, it is the
/// second byte's frequency alone. Each count of a single byte is one more than seen. This is better
/// here than adding one to each of 65,536 pair counts.
pub fn bigram_loss<'a>(
    text: &Text,
    sequences: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
) -> Option<f64> {
    let mut pairs = vec![0u64; BYTES * BYTES];
    let mut singles = vec![1u64; BYTES];
    for run in text.training_runs() {
        let bytes = &text.bytes()[run];
        bytes.iter().for_each(|byte| singles[usize::from(*byte)] += 1);
        for pair in bytes.windows(2) {
            pairs[usize::from(pair[0]) * BYTES + usize::from(pair[1])] += 1;
        }
    }
    let total: u64 = singles.iter().sum();
    let firsts: Vec<u64> = pairs.chunks(BYTES).map(|row| row.iter().sum()).collect();
    let share = |first: u8, next: u8| {
        let (first, next) = (usize::from(first), usize::from(next));
        let single = singles[next] as f64 / total as f64;
        match firsts[first] {
            0 => single,
            seen => {
                let pair = pairs[first * BYTES + next] as f64 / seen as f64;
                (1.0 - UNIGRAM_SHARE) * pair + UNIGRAM_SHARE * single
            }
        }
    };
    let (mut bytes, mut sum) = (0u64, 0.0);
    for (first, next) in
        sequences.into_iter().flat_map(|(inputs, targets)| inputs.iter().zip(targets))
    {
        bytes += 1;
        sum -= share(*first, *next).ln();
    }
    (bytes > 0).then(|| sum / bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_train::data::BLOCK;

    fn loss_of_held_out(bytes: Vec<u8>) -> Option<f64> {
        let text = Text::of_files(&[bytes]).unwrap();
        bigram_loss(&text, text.held_out_sequences(64))
    }

    #[test]
    fn loss_is_near_zero_for_certain_pairs_and_entropy_for_random() {
        let certain: Vec<u8> = (0..BLOCK * 20).map(|i| b"abcd"[i % 4]).collect();
        let loss = loss_of_held_out(certain).unwrap();
        assert!((loss + (0.95f64 + 0.05 * 0.25).ln()).abs() < 1e-3, "{loss}");
        let random: Vec<u8> = (0..BLOCK as u64 * 60)
            .map(|i| b"abcd"[(crate::math::random_bits(7, i) % 4) as usize])
            .collect();
        let loss = loss_of_held_out(random).unwrap();
        assert!((loss - 4f64.ln()).abs() < 0.01, "{loss}");
    }

    #[test]
    fn loss_without_held_out_text_is_none() {
        assert_eq!(loss_of_held_out(vec![b'x'; 1000]), None);
    }
}
