//! Sampling of bytes from logits, and their display as text.

use mpmd::random::{Key, uniform_f64};

/// Draws the next byte from its logits.
///
/// Temperature 0 selects the likeliest byte. Otherwise the logits are divided by the temperature
/// first. The draw depends only on the logits, `seed` and `position`.
pub fn next_byte(logits: &[f32], temperature: f64, seed: u64, position: u64) -> u8 {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .map_or(0, |(byte, _)| byte);
    if temperature <= 0.0 {
        return best as u8;
    }

    let highest = f64::from(logits[best]);
    let weights: Vec<f64> = logits
        .iter()
        .map(|logit| ((f64::from(*logit) - highest) / temperature).exp())
        .collect();

    let mut left = uniform_f64(Key(seed), position) * weights.iter().sum::<f64>();
    for (byte, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return byte as u8;
        }
    }
    // Rounding may leave a small rest.
    best as u8
}

/// Converts bytes to text for a terminal. Replaces invalid UTF-8, and control characters except
/// newlines, by visible characters. A tab becomes four spaces.
pub fn printable(bytes: &[u8]) -> String {
    let show = |c: char| match c {
        '\n' => "\n".to_owned(),
        '\t' => "    ".to_owned(),
        c if c.is_control() => "·".to_owned(),
        c => c.to_string(),
    };
    String::from_utf8_lossy(bytes).chars().map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_logits() {
        let mut logits = vec![f32::NEG_INFINITY; 256];
        logits[3] = 1.0;
        logits[7] = 1.0 + 3f32.ln();
        assert_eq!(next_byte(&logits, 0.0, 1, 1), 7);
        let sevens = (0..4000)
            .filter(|i| next_byte(&logits, 1.0, 5, *i) == 7)
            .count();
        assert!((2850..3150).contains(&sevens), "three in four: {sevens}");
        assert!((0..200).all(|i| [3, 7].contains(&next_byte(&logits, 2.0, 5, i))));
        assert_eq!(next_byte(&logits, 1.0, 5, 9), next_byte(&logits, 1.0, 5, 9));
    }

    #[test]
    fn control_characters_are_made_visible() {
        assert_eq!(printable(b"a\n\x1b[2J\tb\xff"), "a\n·[2J    b\u{fffd}");
    }
}
