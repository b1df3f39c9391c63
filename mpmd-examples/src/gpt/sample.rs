//! Bytes drawn from a model's logits, and how they are shown.

use mpmd_core::random::{Key, uniform_f64};

/// The byte that `logits` give, drawn by (`seed`, `position`): at temperature 0 the likeliest, above it the
/// softmax of the logits over the temperature.
///
/// # Panics
///
/// Where there are no logits, or more than bytes have values.
pub fn next_byte(logits: &[f32], temperature: f32, seed: u64, position: u64) -> u8 {
    assert!((1..=256).contains(&logits.len()), "{} logits", logits.len());
    let largest = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    if temperature <= 0.0 {
        return largest as u8;
    }
    let weight = |logit: f32| (f64::from(logit - logits[largest]) / f64::from(temperature)).exp();
    let total: f64 = logits.iter().map(|logit| weight(*logit)).sum();
    let mut left = total * uniform_f64(Key(seed).fold_in(0x5a3b), position);
    for (byte, logit) in logits.iter().enumerate() {
        left -= weight(*logit);
        if left < 0.0 {
            return byte as u8;
        }
    }
    // Rounding: nothing was left, yet not below zero.
    largest as u8
}

/// Bytes as text: UTF-8 where it is, line ends and tabs as they are, everything else visible.
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() && c != '\n' && c != '\t' {
                text.extend(c.escape_default());
            } else {
                text.push(c);
            }
        }
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_as_often_as_their_probabilities_say() {
        let logits: Vec<f32> = (0..256).map(|i| if i == 7 { 1.0 } else if i == 200 { 0.0 } else { -50.0 }).collect();
        let draws: Vec<u8> = (0..4000).map(|position| next_byte(&logits, 1.0, 3, position)).collect();
        let share = draws.iter().filter(|byte| **byte == 7).count() as f64 / 4000.0;
        let expected = 1f64.exp() / (1.0 + 1f64.exp());
        assert!((share - expected).abs() < 0.03, "{share}, not {expected}");
        assert!(draws.iter().all(|byte| [7, 200].contains(byte)));
        assert_eq!(next_byte(&logits, 0.0, 3, 0), 7);
        assert!((0..200).all(|position| next_byte(&logits, 0.05, 3, position) == 7));
        let other: Vec<u8> = (0..4000).map(|position| next_byte(&logits, 1.0, 4, position)).collect();
        assert_ne!(draws, other);
    }

    #[test]
    fn control_characters_and_broken_text_are_visible() {
        assert_eq!(printable(b"a\n\tb\0\x1b[1m\xff\xc3\xa9"), "a\n\tb\\u{0}\\u{1b}[1m\\xffé");
    }
}
