//! Counts with their nouns as text.

/// Formats a number of things, for example as `1 device` or `2 processes`. The plural of `noun` is
/// regular: it ends with `s`, or with `es` after an `s`.
pub fn counted(count: usize, noun: &str) -> String {
    let ending = match (count, noun.ends_with('s')) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_no_plural() {
        assert_eq!(counted(1, "device"), "1 device");
        assert_eq!(counted(0, "device"), "0 devices");
        assert_eq!(counted(1, "process"), "1 process");
        assert_eq!(counted(2, "process"), "2 processes");
    }
}
