//! The search for the task length at which half of the peak rate is kept.

/// The efficiency at which the task length is looked for.
const THRESHOLD: f64 = 0.5;
/// The largest number of iterations of a task: about half a millisecond.
const MOST: u64 = 1 << 16;

/// One measurement of a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    /// The time per task and core in microseconds.
    pub(super) granularity: f64,
    /// The rate of iterations, as a part of the peak rate.
    pub(super) efficiency: f64,
}

/// The result of a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Found {
    /// The minimum effective task granularity in microseconds. Infinite if tasks of `MOST`
    /// iterations are not efficient. If tasks of one iteration are, their granularity.
    pub(super) granularity: f64,
    /// A good start for the next sweep of the same graph.
    pub(super) start: u64,
}

/// Halves the number of iterations of a task from `start` until the efficiency was below a half
/// twice in a row: once may be noise. Doubles it before, if `start` is not enough. Interpolates
/// between the shortest efficient tasks and the next shorter ones.
pub(super) fn sweep<E>(
    start: u64,
    mut measure: impl FnMut(u64) -> Result<Measured, E>,
) -> Result<Found, E> {
    let mut shortest = start;
    let mut above = measure(shortest)?;
    while above.efficiency < THRESHOLD {
        if shortest >= MOST {
            return Ok(Found { granularity: f64::INFINITY, start: MOST });
        }
        shortest *= 2;
        above = measure(shortest)?;
    }
    let (mut iterations, mut below) = (shortest, Vec::new());
    while iterations > 1 && below.len() < 2 {
        iterations /= 2;
        let measured = measure(iterations)?;
        if measured.efficiency < THRESHOLD {
            below.push(measured);
        } else {
            (above, shortest) = (measured, iterations);
            below.clear();
        }
    }
    let granularity = below.first().map_or(above.granularity, |below| between(above, *below));
    Ok(Found { granularity, start: shortest * 2 })
}

/// Interpolates the granularity at the threshold. Noise may make shorter tasks take longer; then it
/// returns the granularity that was measured above the threshold.
fn between(above: Measured, below: Measured) -> f64 {
    if below.granularity >= above.granularity {
        return above.granularity;
    }
    let share = (THRESHOLD - below.efficiency) / (above.efficiency - below.efficiency);
    below.granularity + share * (above.granularity - below.granularity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Sweeps a machine on which a task costs `overhead` microseconds more than its iterations,
    /// which take 10 ns each. Returns the result and all measured numbers of iterations.
    fn swept(start: u64, overhead: f64) -> (Found, Vec<u64>) {
        let mut asked = Vec::new();
        let found = sweep(start, |iterations| {
            asked.push(iterations);
            let work = 0.01 * iterations as f64;
            let granularity = work + overhead;
            Ok::<_, Infallible>(Measured { granularity, efficiency: work / granularity })
        });
        (found.unwrap(), asked)
    }

    #[test]
    fn half_the_peak_takes_twice_the_overhead() {
        for start in [1, 64, 1 << 14] {
            for overhead in [0.3, 2.0, 50.0] {
                let (found, _) = swept(start, overhead);
                let ratio = found.granularity / (2.0 * overhead);
                assert!((0.95..1.1).contains(&ratio), "{start} {overhead}: {found:?}");
            }
        }
    }

    #[test]
    fn sweep_halves_and_starts_next_above_the_threshold() {
        let (found, asked) = swept(1024, 1.5);
        assert_eq!(asked, [1024, 512, 256, 128, 64]);
        assert_eq!(found.start, 512);
        let (_, asked) = swept(32, 1.5);
        assert_eq!(asked, [32, 64, 128, 256, 128, 64]);
    }

    #[test]
    fn ends_of_the_range_end_the_sweep() {
        let (found, asked) = swept(4, 0.0);
        assert_eq!((found.granularity, asked), (0.01, vec![4, 2, 1]));
        let (found, asked) = swept(1 << 15, 1e9);
        assert_eq!((found.granularity, asked), (f64::INFINITY, vec![1 << 15, 1 << 16]));
    }

    #[test]
    fn one_slow_measurement_does_not_end_the_sweep() {
        let mut asked = Vec::new();
        let found = sweep(1024, |iterations| {
            asked.push(iterations);
            let work = 0.01 * iterations as f64;
            let granularity = if iterations == 512 { 500.0 } else { work + 1.5 };
            Ok::<_, Infallible>(Measured { granularity, efficiency: work / granularity })
        });
        assert_eq!(asked, [1024, 512, 256, 128, 64]);
        assert!((2.9..3.3).contains(&found.unwrap().granularity), "{found:?}");
    }

    #[test]
    fn noise_does_not_extrapolate() {
        let above = Measured { granularity: 4.0, efficiency: 0.6 };
        let slower = Measured { granularity: 9.0, efficiency: 0.1 };
        assert_eq!(between(above, slower), 4.0);
        let below = Measured { granularity: 3.0, efficiency: 0.4 };
        assert!((between(above, below) - 3.5).abs() < 1e-9);
    }
}
