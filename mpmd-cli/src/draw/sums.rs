//! Sums for bars that are too narrow to draw: the share of each colour in a stretch of time.

use std::collections::BTreeSet;

use mpmd_schedule::timeline::{Row, Timeline};

use super::colour;

/// A colour: (the number of a kind, four times the number of a chunk). The second is a multiple of
/// 4 for a bar; a sum may lie between chunks.
pub(super) type Class = (usize, usize);

/// Returns the colour of each bar of a row, in the order of the bars.
pub(super) fn classes(row: &Row) -> Vec<Class> {
    let stages = row.stages();
    let chunk =
        |stage: Option<u32>| stage.and_then(|stage| stages.binary_search(&stage).ok()).unwrap_or(0);
    row.bars.iter().map(|bar| (colour::number(bar.kind), 4 * chunk(bar.stage))).collect()
}

/// Returns the mean length of all bars in the timeline's unit, or infinity if there are none.
pub(super) fn mean(timeline: &Timeline) -> f64 {
    let lengths = || timeline.rows.iter().flat_map(|row| &row.bars).map(|bar| bar.end - bar.start);
    if lengths().next().is_none() {
        f64::INFINITY
    } else {
        lengths().sum::<f64>() / lengths().count() as f64
    }
}

/// Returns the length of the stretches of time in which bars are summed, at least `least`. It is a
/// multiple of the time that a row is busy with one microbatch, so that a steady state looks
/// steady. If that would be more than three times `least`, it is a multiple of the shortest bar's
/// length.
pub(super) fn stretch(timeline: &Timeline, least: f64) -> f64 {
    let bars = || timeline.rows.iter().flat_map(|row| &row.bars);
    let microbatches: BTreeSet<u32> = bars().filter_map(|bar| bar.microbatch).collect();
    let lengths = || bars().map(|bar| bar.end - bar.start).filter(|length| *length > 0.0);
    let even = |one: f64| {
        if one > 0.0 && one.is_finite() { one * (least / one).ceil().max(1.0) } else { least }
    };
    let cycle = lengths().sum::<f64>() / (timeline.rows.len() * microbatches.len()) as f64;
    if microbatches.len() > 1 && even(cycle) <= 3.0 * least {
        even(cycle)
    } else {
        even(lengths().fold(f64::INFINITY, f64::min))
    }
}

/// Returns, for each stretch of time from 0 to `end`, the (colour, share) pairs of the kinds in it,
/// sorted. A share is from 0 to 1. The last stretch is shorter if `end` is no multiple of
/// `stretch`.
pub(super) fn shares(row: &Row, end: f64, stretch: f64) -> Vec<Vec<(Class, f64)>> {
    let mut sums =
        vec![Vec::<(Class, f64)>::new(); (end / stretch - 1e-9).ceil().max(1.0) as usize];
    let bounds = |i: usize| (i as f64 * stretch, ((i + 1) as f64 * stretch).min(end));
    for (bar, (kind, quarters)) in row.bars.iter().zip(classes(row)) {
        let first = ((bar.start / stretch).max(0.0) as usize).min(sums.len() - 1);
        for (i, sum) in sums.iter_mut().enumerate().skip(first) {
            let (from, until) = bounds(i);
            let within = (bar.end.min(until) - bar.start.max(from)) / (until - from);
            if within > 0.0 {
                add(sum, kind, quarters, within);
            }
            if bar.end <= until {
                break;
            }
        }
    }
    sums.iter_mut().for_each(|sum| sum.sort_unstable_by_key(|(class, _)| *class));
    sums
}

/// Adds `share` to the share of a kind in `sum`. The kind's chunk becomes the weighted mean.
fn add(sum: &mut Vec<(Class, f64)>, kind: usize, quarters: usize, share: f64) {
    match sum.iter_mut().find(|((other, _), _)| *other == kind) {
        Some(((_, mean), sum)) => {
            *mean =
                ((*mean as f64 * *sum + quarters as f64 * share) / (*sum + share)).round() as usize;
            *sum += share;
        }
        None => sum.push(((kind, quarters), share)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_schedule::timeline::{Bar, Kind};

    fn row() -> Row {
        let bar = |kind, stage, start, end| Bar {
            kind,
            stage: Some(stage),
            microbatch: Some(start as u32),
            start,
            end,
            ..Bar::default()
        };
        let bars = vec![
            bar(Kind::BackwardInput, 5, 0.0, 1.0),
            bar(Kind::Forward, 2, 1.0, 2.5),
            bar(Kind::Forward, 5, 2.5, 3.0),
            bar(Kind::Forward, 2, 3.0, 3.5),
        ];
        Row { bars, ..Row::default() }
    }

    #[test]
    fn shares_are_of_time_by_kind() {
        let shares = shares(&row(), 7.0, 2.0);
        assert_eq!(shares[0], [((0, 0), 0.5), ((2, 4), 0.5)]);
        // Half of the time in the first chunk, a quarter in the second.
        assert_eq!(shares[1], [((0, 1), 0.75)]);
        assert_eq!(shares[2..], [vec![], vec![]]);
        let last = super::shares(&row(), 3.5, 2.0);
        assert_eq!(last[1], [((0, 1), 1.0)]);
    }

    #[test]
    fn stretches_are_whole_microbatches() {
        let timeline =
            Timeline { rows: vec![row(), Row::default()], end: 4.0, ..Timeline::default() };
        // The bars take 3.5 in all, over two rows and four microbatches.
        assert_eq!(stretch(&timeline, 0.4), 0.4375);
        assert_eq!(stretch(&timeline, 0.5), 0.875);
        assert_eq!(stretch(&timeline, 0.1), 0.5);
        assert_eq!(stretch(&Timeline::default(), 0.5), 0.5);
    }
}
