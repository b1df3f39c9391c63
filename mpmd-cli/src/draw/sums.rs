//! Bars that are too narrow to draw: what share of a stretch of time each colour has.

use mpmd_core::trace::Row;

use super::colour;

/// Colours: a kind and a chunk.
pub(super) type Class = (usize, usize);

/// The colour of each bar of a row.
pub(super) fn classes(row: &Row) -> Vec<Class> {
    let stages = row.stages();
    let chunk = |stage: Option<u32>| stage.and_then(|stage| stages.binary_search(&stage).ok()).unwrap_or(0);
    row.bars.iter().map(|bar| (colour::number(bar.kind), chunk(bar.stage))).collect()
}

/// Of each of so many equal parts of the time until `end`, the shares of all colours that there are, in order.
pub(super) fn shares(row: &Row, end: f64, parts: usize) -> Vec<Vec<(Class, f64)>> {
    let mut sums = vec![Vec::new(); parts];
    let part = end / parts as f64;
    for (bar, class) in row.bars.iter().zip(classes(row)) {
        let first = ((bar.start / part).max(0.0) as usize).min(parts.saturating_sub(1));
        for (i, sum) in sums.iter_mut().enumerate().skip(first) {
            let (from, until) = (i as f64 * part, (i + 1) as f64 * part);
            let within = bar.end.min(until) - bar.start.max(from);
            if within > 0.0 {
                add(sum, class, within / part);
            }
            if bar.end <= until {
                break;
            }
        }
    }
    sums.iter_mut().for_each(|sum| sum.sort_unstable_by_key(|(class, _)| *class));
    sums
}

fn add(sum: &mut Vec<(Class, f64)>, class: Class, share: f64) {
    match sum.iter_mut().find(|(other, _)| *other == class) {
        Some((_, sum)) => *sum += share,
        None => sum.push((class, share)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_core::trace::{Bar, Kind};

    #[test]
    fn shares_are_of_time_by_kind_and_chunk() {
        let bar = |kind, stage, start, end| Bar { kind, stage: Some(stage), start, end, ..Bar::default() };
        let bars = vec![
            bar(Kind::BackwardInput, 5, 0.0, 1.0),
            bar(Kind::Forward, 2, 1.0, 2.5),
            bar(Kind::Forward, 5, 2.5, 3.0),
            bar(Kind::Forward, 2, 3.0, 3.5),
        ];
        let row = Row { bars, ..Row::default() };
        let shares = shares(&row, 8.0, 4);
        assert_eq!(shares[0], [((0, 0), 0.5), ((2, 1), 0.5)]);
        assert_eq!(shares[1], [((0, 0), 0.5), ((0, 1), 0.25)]);
        assert_eq!(shares[2..], [vec![], vec![]]);
    }
}
