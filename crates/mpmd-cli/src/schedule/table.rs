//! A schedule for a terminal: time from left to right, a line for each rank.

use std::fmt::Write as _;

use mpmd_schedule::Schedule;
use mpmd_schedule::simulate::{Simulated, SimulatedSchedule};
use mpmd_schedule::timeline::TimelineRow;

/// Maximum width of a step, in characters. In a longer table not all names fit.
const LONGEST: f64 = 100_000.0;

/// Returns the summary of the simulation and the table. The table is cut into pieces that fit
/// `width` characters, one below the other.
///
/// A bar begins with the name of its action and is filled with `-`. `2F7` is the forward pass of
/// stage 2 and microbatch 7. A `.` stands for time in which the rank computes nothing.
pub(super) fn table(
    schedule: &Schedule,
    simulated: &SimulatedSchedule,
    unit: &str,
    width: usize,
) -> String {
    let timeline = simulated.timeline(schedule.name(), unit);
    let found = &simulated.simulated;
    let makespan = found.makespan;
    let mut text = format!(
        "{}: {} ranks, {} microbatches, {} stages ({})\n",
        schedule.name(),
        schedule.ranks(),
        schedule.microbatches(),
        schedule.stages(),
        schedule.placement().name(),
    );
    let _ = writeln!(text, "takes {}", step_length(found, unit));

    let peaks = super::activations(schedule);
    let share = |rank: usize| {
        if makespan > 0.0 {
            100.0 * (1.0 - found.lanes[rank].busy / makespan)
        } else {
            0.0
        }
    };

    let head = format!("{:>5} {:>5} {:>7}  ", "rank", "peak", "bubble");
    let scale = scale(&timeline.rows, makespan);
    let columns = ((makespan * scale).round() as usize).min(LONGEST as usize);
    let lines: Vec<String> = timeline
        .rows
        .iter()
        .map(|row| bars(row, scale, columns))
        .collect();

    let room = width.saturating_sub(head.len()).max(10);
    // A multiple of one time unit, so that no bar of that length is cut.
    let one = (scale.round() as usize).clamp(1, room);
    let room = room / one * one;

    for from in (0..columns).step_by(room) {
        let until = columns.min(from + room);
        let _ = write!(text, "\n{head}{}\n", axis(from, until, scale));
        for (rank, line) in lines.iter().enumerate() {
            let piece = &line[from..until];
            let _ = writeln!(
                text,
                "{rank:>5} {:>5} {:>5.1} %  {}",
                peaks[rank],
                share(rank),
                piece.trim_end()
            );
        }
    }

    text.push_str(
        "\npeak: most microbatches begun and not ended, in stages. bubble: share of the time \
         without work.\n",
    );
    text
}

/// Returns the name of a unit of time, as it is printed behind a number.
pub(crate) fn units(unit: &str) -> &str {
    if unit == "unit" { "units" } else { unit }
}

/// Describes the length of a step, the time in it that the busiest rank waits, and the share of
/// idle time on all ranks.
pub(crate) fn step_length(found: &Simulated, unit: &str) -> String {
    format!(
        "{} {}, of which {} are beyond the busiest rank's compute time; ranks compute nothing \
         for {:.1} % of the time",
        number(found.makespan),
        units(unit),
        number(found.bubble()),
        100.0 * found.bubble_share()
    )
}

/// Returns the characters per unit of time: enough for the longest name and a space in the shortest
/// bar.
fn scale(rows: &[TimelineRow], makespan: f64) -> f64 {
    let bars = || {
        rows.iter()
            .flat_map(|row| &row.bars)
            .filter(|bar| bar.end > bar.start)
    };
    let shortest = bars()
        .map(|bar| bar.end - bar.start)
        .fold(f64::INFINITY, f64::min);
    let longest_name = bars().map(|bar| bar.name.len()).max().unwrap_or(1);

    if makespan <= 0.0 || !shortest.is_finite() {
        return 1.0;
    }
    ((longest_name + 1) as f64 / shortest).min(LONGEST / makespan)
}

/// Returns a rank's line of the table, with `columns` ASCII characters. `scale` is the number of
/// characters per unit of time.
fn bars(row: &TimelineRow, scale: f64, columns: usize) -> String {
    let mut line = vec![b'.'; columns];
    for bar in &row.bars {
        let column = |time: f64| ((time * scale).round() as usize).min(columns);
        let from = column(bar.start);
        let until = column(bar.end);
        let Some(last) = until.checked_sub(1).filter(|last| *last >= from) else {
            continue;
        };

        line[from..last].fill(b'-');
        line[last] = b' ';
        for (place, letter) in line[from..last].iter_mut().zip(bar.name.bytes()) {
            *place = letter;
        }
    }
    String::from_utf8_lossy(&line).into_owned()
}

/// Returns the table's line of times for the columns `from` to `until`, with gaps between the
/// times. `scale` is the number of characters per unit of time.
fn axis(from: usize, until: usize, scale: f64) -> String {
    let mut text = String::new();
    let step = (scale.round() as usize).max(1);
    let every = 12_usize.div_ceil(step) * step;
    for column in (from..until).step_by(every) {
        while text.len() < column - from {
            text.push(' ');
        }
        text.push_str(&number(column as f64 / scale));
    }
    text
}

/// Rounds to six significant digits. Keeps infinities and NaN.
pub(crate) fn round(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// Formats a number with at most four decimals, without trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use mpmd_schedule::check::Channel;
    use mpmd_schedule::flow::Leaves;
    use mpmd_schedule::simulate::simulate_schedule;
    use mpmd_schedule::{Costs, StageCosts};

    use super::*;

    fn shown(name: &str, costs: &Costs, width: usize) -> String {
        let schedule = Schedule::named(name, 2, 2, None).unwrap();
        let simulated =
            simulate_schedule(&schedule, costs, Leaves::InOrder, Channel::Tags).unwrap();
        table(&schedule, &simulated, &costs.unit, width)
    }

    #[test]
    fn six_digits_of_a_number_stay() {
        for (value, rounded) in [
            (0.0, "0"),
            (9.000_000_000_000_002, "9"),
            (1_234_567.8, "1234570"),
            (-0.000_123_456_78, "-0.000123457"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(round(value).to_string(), rounded);
        }
        assert!(round(f64::MIN_POSITIVE / 8.0) > 0.0, "a subnormal number");
    }

    #[test]
    fn bars_are_drawn_at_their_times() {
        let text = shown("1f1b", &Costs::units(2), 80);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "1F1B: 2 ranks, 2 microbatches, 2 stages (loop)");
        assert!(
            lines[1].starts_with("takes 9 units, of which 3 are"),
            "{text}"
        );
        assert_eq!(
            lines[3..6],
            [
                " rank  peak  bubble  0           3           6",
                "    0     2  33.3 %  0F0 0F1 ........0B0---- ....0B1----",
                "    1     1  33.3 %  ....1F0 1B0---- 1F1 1B1---- ........",
            ]
        );
    }

    #[test]
    fn narrow_table_is_cut_into_pieces() {
        let text = shown("1f1b", &Costs::units(2), 40);
        let pieces: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("    0 "))
            .collect();
        assert_eq!(pieces.len(), 3, "{text}");
        assert!(
            text.lines()
                .filter(|line| line.contains(" % "))
                .skip(1)
                .all(|line| line.len() <= 40),
            "{text}"
        );
    }

    #[test]
    fn costs_set_the_length_of_bars() {
        let stage = StageCosts {
            forward: 0.01,
            backward_input: 0.01,
            backward_weight: 0.02,
            ..StageCosts::default()
        };
        let costs = Costs {
            unit: "s".to_owned(),
            stage: vec![stage; 2],
        };
        let text = shown("1f1b", &costs, 200);
        assert!(text.contains("takes 0.12 s"), "{text}");
        assert!(
            text.contains("....1F0 1B0-------- 1F1 1B1--------"),
            "{text}"
        );
        let nothing = Costs {
            unit: "s".to_owned(),
            stage: vec![StageCosts::default(); 2],
        };
        assert!(shown("1f1b", &nothing, 80).contains("takes 0 s"));
    }
}
