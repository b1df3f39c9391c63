//! An axis of a picture: its range, and round numbers along it.

/// Largest ratio of a logarithmic axis's ends at which its numbers are evenly spaced, such as 1.6,
/// 1.8 and 2.0. Beyond it they are 1, 2 and 5 times powers of ten.
const NARROW: f64 = 3.0;

/// Decades of a logarithmic axis from which on it has powers of ten alone.
const MANY_DECADES: f64 = 4.0;

/// Tolerance for the quotient of a value and a step.
const INEXACT: f64 = 1e-9;

/// How an axis maps values to positions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum AxisScale {
    Linear,
    Logarithmic,
}

/// An axis: a range of values with round numbers.
#[derive(Debug, PartialEq)]
pub(super) struct Axis {
    scale: AxisScale,
    /// The values at the two ends. The second is greater.
    ends: [f64; 2],
    /// The numbers along the axis, in ascending order.
    pub(super) ticks: Vec<AxisTick>,
}

/// A round number on an axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTick {
    pub(super) value: f64,
    pub(super) label: String,
}

impl Axis {
    /// Returns an axis from round number to round number that contains `low` and `high`, with about
    /// `count` numbers. Both values must be finite, and above 0 for a logarithmic scale.
    pub(super) fn around(scale: AxisScale, low: f64, high: f64, count: usize) -> Self {
        let (low, high) = widened(low, high);
        if scale == AxisScale::Logarithmic && high / low >= NARROW {
            return Self::of_decades(low, high);
        }

        let step = round_step(low, high, count);
        // A quotient such as 2.2 / 0.1 is not exact.
        let first = (low / step + INEXACT).floor();
        let last = (high / step - INEXACT).ceil();
        let mut ticks: Vec<AxisTick> = (0..=(last - first) as usize)
            .map(|tick| AxisTick::even(first + tick as f64, step))
            .collect();
        if scale == AxisScale::Logarithmic {
            ticks.retain(|tick| tick.value > 0.0);
        }
        let start = match ticks.first() {
            Some(first) => first.value.min(low),
            None => low,
        };
        Self {
            scale,
            ends: [start, last * step],
            ticks,
        }
    }

    /// Returns a linear axis of whole numbers that ends exactly at `high`. It starts at 0, unless
    /// `low` is far from it.
    pub(super) fn of_steps(low: u64, high: u64, count: usize) -> Self {
        // Steps count from 1.
        let start = if low.saturating_sub(1) > high / 4 {
            low
        } else {
            0
        };
        let (start, end) = widened(start as f64, high as f64);
        let step = round_step(start, end, count).max(1.0);
        let first = (start / step - INEXACT).ceil();
        let last = (end / step + INEXACT).floor();
        let ticks = (0..=(last - first).max(0.0) as usize)
            .map(|tick| AxisTick::even(first + tick as f64, step))
            .collect();
        Self {
            scale: AxisScale::Linear,
            ends: [start, end],
            ticks,
        }
    }

    /// Returns a logarithmic axis with 1, 2 and 5 times powers of ten, or powers of ten alone.
    fn of_decades(low: f64, high: f64) -> Self {
        let decades = high.log10() - low.log10();
        let factors: &[f64] = match decades < MANY_DECADES {
            true => &[1.0, 2.0, 5.0],
            false => &[1.0],
        };
        let from = low.log10().floor() as i32 - 1;
        let until = high.log10().ceil() as i32 + 1;
        let all: Vec<(f64, i32)> = (from..=until)
            .flat_map(|decade| factors.iter().map(move |factor| (*factor, decade)))
            .collect();
        let value = |(factor, decade): &(f64, i32)| factor * 10_f64.powi(*decade);

        // The last number that is not above `low`, to the first that is not below `high`.
        let first = all.iter().rposition(|tick| value(tick) <= low).unwrap_or(0);
        let last = all.iter().position(|tick| value(tick) >= high);
        let last = last.unwrap_or(all.len() - 1);
        // At most about eight of many decades.
        let every = (decades / 8.0).ceil().max(1.0) as usize;
        let every = if factors.len() == 1 { every } else { 1 };
        let ticks: Vec<AxisTick> = all[first..=last]
            .iter()
            .step_by(every)
            .map(|tick| AxisTick {
                value: value(tick),
                label: label(value(tick), usize::try_from(-tick.1).unwrap_or(0)),
            })
            .collect();
        Self {
            scale: AxisScale::Logarithmic,
            ends: [value(&all[first]), value(&all[last])],
            ticks,
        }
    }

    /// Returns the position of a value on the axis: 0 at its start, 1 at its end.
    pub(super) fn position(&self, value: f64) -> f64 {
        let [start, end] = self.ends;
        match self.scale {
            AxisScale::Linear => (value - start) / (end - start),
            AxisScale::Logarithmic => (value.ln() - start.ln()) / (end.ln() - start.ln()),
        }
    }
}

impl AxisTick {
    /// Returns the number `index * step`, with as many decimals as `step` has.
    fn even(index: f64, step: f64) -> Self {
        let decimals = (-step.log10().floor()).clamp(0.0, 300.0) as usize;
        let value = index * step;
        Self {
            value,
            label: label(value, decimals),
        }
    }
}

/// Writes a number with these decimals, or with an exponent if it is very large or small.
fn label(value: f64, decimals: usize) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 1e7 || decimals > 5 => {
            // Rounded, since a multiple of a step is not exact.
            let rounded: f64 = format!("{value:.5e}").parse().unwrap_or(value);
            format!("{rounded:e}")
        }
        _ => format!("{value:.decimals$}"),
    }
}

/// Returns ends that differ, around the given ones.
fn widened(low: f64, high: f64) -> (f64, f64) {
    let least = (low.abs().max(high.abs()) * 1e-6).max(f64::MIN_POSITIVE * 1e9);
    if high - low >= least {
        return (low, high);
    }
    match low {
        0.0 => (0.0, 1.0),
        _ => (low - low.abs() / 10.0, high + high.abs() / 10.0),
    }
}

/// Returns 1, 2 or 5 times a power of ten, so that about `count` steps are from `low` to `high`.
fn round_step(low: f64, high: f64, count: usize) -> f64 {
    let least = (high - low) / count as f64;
    let power = 10_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|factor| factor * power >= least * (1.0 - INEXACT));
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> String {
        let labels: Vec<&str> = axis.ticks.iter().map(|tick| &*tick.label).collect();
        labels.join(" ")
    }

    #[test]
    fn linear_axes_have_round_numbers() {
        for (low, high, expected) in [
            (1.61, 2.43, "1.6 1.8 2.0 2.2 2.4 2.6"),
            (0.0, 1.0, "0 0.2 0.4 0.6 0.8 1.0"),
            (-3.0, 12.0, "-5 0 5 10 15"),
            (2.0, 2.0, "1.8 1.9 2.0 2.1 2.2"),
            (0.0, 0.0, "0 0.2 0.4 0.6 0.8 1.0"),
            (1e-9, 3e-9, "1e-9 1.5e-9 2e-9 2.5e-9 3e-9"),
            (0.0, 4e8, "0 1e8 2e8 3e8 4e8"),
        ] {
            let axis = Axis::around(AxisScale::Linear, low, high, 5);
            assert_eq!(labels(&axis), expected, "{low} to {high}");
            assert!(axis.position(low) >= -1e-9, "{axis:?}");
            assert!(axis.position(high) <= 1.0 + 1e-9, "{axis:?}");
        }
    }

    #[test]
    fn logarithmic_axes_have_round_numbers() {
        for (low, high, expected) in [
            (1.61, 2.43, "1.6 1.8 2.0 2.2 2.4 2.6"),
            (0.03, 4.0, "0.02 0.05 0.1 0.2 0.5 1 2 5"),
            (0.0002, 30.0, "0.0001 0.001 0.01 0.1 1 10 100"),
            (3.0, 3.0, "2.6 2.8 3.0 3.2 3.4"),
        ] {
            let axis = Axis::around(AxisScale::Logarithmic, low, high, 5);
            assert_eq!(labels(&axis), expected, "{low} to {high}");
            assert!(axis.position(low) >= 0.0 && axis.position(high) <= 1.0);
        }
        let axis = Axis::around(AxisScale::Logarithmic, 1.0, 100.0, 5);
        assert!((axis.position(10.0) - 0.5).abs() < 1e-12);
        let wide = Axis::around(AxisScale::Logarithmic, 1e-300, 1e300, 5);
        assert!(wide.ticks.len() < 12, "{wide:?}");
    }

    #[test]
    fn axis_of_steps_ends_at_the_last_step() {
        for (low, high, expected) in [
            (1, 850, "0 200 400 600 800"),
            (1, 1, "0 1"),
            (0, 0, "0 1"),
            (1, 3, "0 1 2 3"),
            (7000, 9000, "7000 7500 8000 8500 9000"),
        ] {
            let axis = Axis::of_steps(low, high, 5);
            assert_eq!(labels(&axis), expected, "{low} to {high}");
            assert!(axis.position(high as f64) <= 1.0);
        }
        assert_eq!(Axis::of_steps(1, 850, 5).position(850.0), 1.0);
    }
}
