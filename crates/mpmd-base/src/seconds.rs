//! Lengths of time as text.

/// Formats a time in seconds with a unit that suits its size, for example as `1.250 s`, `490.70 ms`
/// or `12.0 us`.
pub fn seconds_text(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.3} s"),
        seconds if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{:.1} us", seconds * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_suits_the_time() {
        for (seconds, text) in [
            (75.0, "75.000 s"),
            (0.490_697, "490.70 ms"),
            (12e-6, "12.0 us"),
            (0.0, "0.0 us"),
        ] {
            assert_eq!(seconds_text(seconds), text);
        }
    }
}
