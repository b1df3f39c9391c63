//! Numbers of bytes as text.

/// Formats a number of bytes, as `512 B`, `4.0 KiB` or `1.5 GiB`.
pub fn bytes_text(bytes: u64) -> String {
    let mut amount = bytes as f64;
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        // Values that would round to 1024.0 take the next unit.
        if amount < 1023.95 {
            break;
        }
        (amount, unit) = (amount / 1024.0, larger);
    }
    format!("{amount:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_in_binary_units() {
        let texts = [0, 1023, 1024, 1536, 1_048_575, 1 << 20, 3 << 30].map(bytes_text);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "3.0 GiB"]);
    }
}
