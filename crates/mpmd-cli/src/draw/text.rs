//! Formats times, amounts of memory and shares for people.

use mpmd_schedule::timeline::Timeline;

use mpmd_base::bytes_text;

/// The units that seconds are shown in, as (length in seconds, name).
const SECONDS: [(f64, &str); 4] = [(1.0, "s"), (1e-3, "ms"), (1e-6, "\u{b5}s"), (1e-9, "ns")];

/// In a timeline without a memory unit: if all peaks are below this, they are taken for numbers of
/// activations, else for bytes.
const FEWEST_BYTES: f64 = 10_000.0;

/// Returns (length in `unit`, name) of the unit in which times up to `largest` are shown. `largest`
/// is in `unit`.
pub(super) fn time_unit(unit: &str, largest: f64) -> (f64, &str) {
    match unit {
        "s" => *SECONDS
            .iter()
            .find(|(one, _)| largest >= *one)
            .unwrap_or(&SECONDS[3]),
        "unit" | "" => (1.0, "units"),
        other => (1.0, other),
    }
}

/// Formats a time that is given in `unit`, with a unit that fits, as `12.5 ms`.
pub(super) fn time(unit: &str, value: f64) -> String {
    let (one, name) = time_unit(unit, value.abs());
    let text = number(value / one);
    if text == "1" && name == "units" {
        "1 unit".to_owned()
    } else {
        format!("{text} {name}")
    }
}

/// Formats a number with four significant digits, or more if the integer part has more. Trailing
/// zeros are removed.
pub(super) fn number(value: f64) -> String {
    let before = if value == 0.0 {
        1
    } else {
        value.abs().log10().floor() as i32 + 1
    };
    let text = format!("{value:.*}", (4 - before).clamp(0, 6) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Formats a share from 0 to 1 in percent, as `27.3 %`.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share + 0.0)
}

/// Returns the unit of the timeline's memory: `B` for bytes, or a word such as `activations`.
pub(super) fn memory_unit(timeline: &Timeline) -> &str {
    let most = timeline
        .rows
        .iter()
        .filter_map(|row| row.peak())
        .fold(0.0, f64::max);
    match timeline.memory_unit.as_str() {
        "" if most < FEWEST_BYTES => "activations",
        "" => "B",
        unit => unit,
    }
}

/// Formats an amount of memory, with its unit if that is bytes (`B`), as `1.5 MiB`, else as a
/// number alone.
pub(super) fn memory(unit: &str, amount: f64) -> String {
    if unit != "B" {
        return number(amount);
    }
    bytes_text(amount.max(0.0) as u64)
}

/// Formats an amount of memory with its unit, as `1.5 MiB` or `4 activations`.
pub(super) fn memory_with_unit(unit: &str, amount: f64) -> String {
    let text = memory(unit, amount);
    match unit {
        "B" => text,
        // Only this unit has a singular of its own.
        "activations" if text == "1" => "1 activation".to_owned(),
        _ => format!("{text} {unit}"),
    }
}

/// Escapes text for HTML, also for attributes in quotes. Tabs and line breaks become
/// blanks; other control characters are left out.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_that_fits() {
        let seconds = [
            (0.0, "0 ns"),
            (2.5, "2.5 s"),
            (0.033_26, "33.26 ms"),
            (4.2e-6, "4.2 \u{b5}s"),
            (3e-9, "3 ns"),
        ];
        for (value, text) in seconds {
            assert_eq!(time("s", value), text);
        }
        assert_eq!(
            (time("unit", 33.0), time("unit", 1.0)),
            ("33 units".to_owned(), "1 unit".to_owned())
        );
        assert_eq!(
            (time("", 1234.56), time("cycles", 7.25)),
            ("1235 units".to_owned(), "7.25 cycles".to_owned())
        );
        assert_eq!(time("s", -0.002), "-2 ms");
    }

    #[test]
    fn memory_is_in_bytes_or_in_a_named_unit() {
        assert_eq!(
            (memory("B", 0.0), memory("B", 1536.0)),
            ("0 B".to_owned(), "1.5 KiB".to_owned())
        );
        assert_eq!(memory_with_unit("B", 3.0 * 1024f64.powi(3)), "3.0 GiB");
        assert_eq!(memory_with_unit("activations", 4.0), "4 activations");
        assert_eq!(
            (memory_with_unit("activations", 1.0), percent(0.272_7)),
            ("1 activation".to_owned(), "27.3 %".to_owned())
        );
    }

    #[test]
    fn markup_characters_are_escaped() {
        assert_eq!(
            escaped("<a href=\"x\">'&\u{0}\n"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp; "
        );
    }
}
