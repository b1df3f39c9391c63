//! Conversion of the times of all processes of a traced run to one common clock.

use std::collections::BTreeMap;

use super::file::ProcessTrace;

/// Conversion of the times in all traces to the common clock.
pub(super) struct Aligned {
    /// The conversion for each trace, indexed like the traces.
    lines: Vec<ClockLine>,
    /// Error bound between times of different processes, in nanoseconds.
    pub(super) bound: u64,
    /// Messages about clocks that could not be compared.
    pub(super) problems: Vec<String>,
}

/// A linear map from a process's trace time to the common clock, both in nanoseconds.
#[derive(Clone, Copy)]
struct ClockLine {
    at: i128,
    common: i128,
    /// Numerator of the slope `rise / run`: the common clock advances by `rise` while the process's
    /// clock advances by `run`.
    rise: i128,
    run: i128,
}

/// A [`ClockLine`], and the error bound of its times in nanoseconds.
struct BoundedLine {
    line: ClockLine,
    bound: u64,
}

/// One comparison of a process's clock with the common clock; all fields are in nanoseconds.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct Sample {
    here: i128,
    common: i128,
    bound: u64,
}

impl Aligned {
    /// Computes the conversion for each trace. Processes of one system read the same clock, so
    /// their times agree exactly. Clocks of other systems were compared with the rendezvous
    /// service's clock at the start and the end of each trace. Between these two points, drift is
    /// assumed to be constant.
    pub(super) fn of(traces: &[ProcessTrace]) -> Self {
        let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (place, trace) in traces.iter().enumerate() {
            let clock = match trace.about.clock.as_str() {
                "" => format!("process {}", trace.about.process),
                clock => clock.to_owned(),
            };
            groups.entry(clock).or_default().push(place);
        }

        let own = traces
            .iter()
            .map(|trace| trace.about.monotonic_bound)
            .max()
            .unwrap_or(0);
        let own = own.saturating_mul(2);
        let of_start = |trace: &ProcessTrace| i128::from(trace.about.monotonic);
        let unchanged = |trace| ClockLine {
            at: 0,
            common: of_start(trace),
            rise: 1,
            run: 1,
        };

        if groups.len() == 1 {
            return Self {
                lines: traces.iter().map(unchanged).collect(),
                bound: own,
                problems: Vec::new(),
            };
        }

        let mut lines: Vec<ClockLine> = traces.iter().map(unchanged).collect();
        let mut bounds = Vec::new();
        let mut problems = Vec::new();
        for places in groups.values() {
            let samples = places.iter().flat_map(|place| {
                let trace = &traces[*place];
                trace.clocks.iter().map(move |clock| Sample {
                    here: of_start(trace) + i128::from(clock.at),
                    common: i128::from(clock.server),
                    bound: clock.bound,
                })
            });

            let line = match line(samples.collect()) {
                Some(BoundedLine { line, bound }) => {
                    bounds.push(bound);
                    line
                }
                None => {
                    let trace = &traces[places[0]];
                    problems.push(format!(
                        "the clock of process {} was not compared with the others': its times are \
                         as it says",
                        trace.about.process
                    ));
                    ClockLine {
                        at: of_start(trace),
                        common: i128::from(trace.about.unix),
                        rise: 1,
                        run: 1,
                    }
                }
            };

            for place in places {
                lines[*place] = ClockLine {
                    at: line.at - of_start(&traces[*place]),
                    ..line
                };
            }
        }

        bounds.sort_unstable();
        let bound = bounds
            .iter()
            .rev()
            .take(2)
            .fold(own, |sum, bound| sum.saturating_add(*bound));
        Self {
            lines,
            bound,
            problems,
        }
    }

    /// Converts a time of the trace with index `place` to the common clock. `at` is in nanoseconds
    /// since that trace began, the result in nanoseconds of the common clock.
    pub(super) fn time(&self, place: usize, at: u64) -> i128 {
        let ClockLine {
            at: from,
            common,
            rise,
            run,
        } = self.lines[place];
        // Saturates: the product exceeds 128 bits only for nonsensical clocks.
        common.saturating_add((i128::from(at) - from).saturating_mul(rise) / run)
    }
}

/// Minimum distance of two samples from which a slope is computed, as a multiple of their error
/// bounds. Real clocks drift by at most some 100 parts per million.
const FAR: i128 = 10_000;

/// Returns the line through two samples: the best one of the first half of the time, and the best
/// one of the second half. `None` without samples.
fn line(mut samples: Vec<Sample>) -> Option<BoundedLine> {
    samples.sort_unstable();
    let middle = (samples.first()?.here + samples.last()?.here) / 2;
    // The samples are sorted by `here`.
    let late = samples.split_off(samples.partition_point(|sample| sample.here <= middle));
    let early = samples;

    let best = |samples: Vec<Sample>| samples.into_iter().min_by_key(|sample| sample.bound);
    let first = best(early)?;
    let constant = ClockLine {
        at: first.here,
        common: first.common,
        rise: 1,
        run: 1,
    };

    // Between close samples, the error bounds allow any slope.
    let far = |last: &Sample| {
        last.here - first.here >= FAR * (i128::from(first.bound) + i128::from(last.bound))
    };
    let Some(last) = best(late).filter(far) else {
        return Some(BoundedLine {
            line: constant,
            bound: first.bound,
        });
    };

    let line = ClockLine {
        rise: last.common - first.common,
        run: last.here - first.here,
        ..constant
    };
    Some(BoundedLine {
        line,
        bound: first.bound.max(last.bound),
    })
}

#[cfg(test)]
mod tests {
    use super::super::file::{ClockSample, TraceHeader};
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Creates the trace of a process on its own host. The trace begins at common time `begin`, and
    /// the clock gains `drift` nanoseconds per second. The samples are wrong by `skew`, within
    /// `bound`.
    fn process(process: u32, begin: i64, drift: i64, bound: u64, skew: i64) -> ProcessTrace {
        let clock = |seconds: i64| ClockSample {
            at: (seconds * (SECOND as i64 + drift)) as u64,
            server: begin + seconds * SECOND as i64 + skew,
            bound,
        };
        let about = TraceHeader {
            process,
            clock: format!("host {process}"),
            monotonic: 77,
            ..TraceHeader::default()
        };
        ProcessTrace {
            about,
            clocks: vec![clock(0), clock(100)],
            ..ProcessTrace::default()
        }
    }

    #[test]
    fn drifting_clocks_align_within_the_bound() {
        let traces = [
            process(0, 5_000, 0, 10, 0),
            process(1, -7_000_000, 40_000, 300, 250),
        ];
        let aligned = Aligned::of(&traces);
        assert_eq!((aligned.bound, aligned.problems.len()), (310, 0));
        for seconds in [0, 1, 50, 100] {
            let (here, there) = (
                aligned.time(0, seconds * SECOND),
                aligned.time(1, seconds * (SECOND + 40_000) + 5_000 + 7_000_000),
            );
            let wrong = (here - there).unsigned_abs();
            assert!(
                wrong <= u128::from(aligned.bound) + 300,
                "{wrong} at {seconds} s"
            );
        }
    }

    #[test]
    fn processes_of_one_host_use_the_best_sample() {
        let on = |number: u32, monotonic: u64| {
            let mut trace = process(number, 0, 0, 1_000, 0);
            (trace.about.clock, trace.about.monotonic) = ("one".to_owned(), monotonic);
            trace.about.monotonic_bound = 50;
            trace
        };
        let pair = [on(0, 1_000), on(1, 4_000)];
        let aligned = Aligned::of(&pair);
        assert_eq!(aligned.bound, 100);
        assert_eq!(aligned.time(0, 3_500), aligned.time(1, 500));
        // With another host in the run, both use the best sample of either.
        let mut three = [on(0, 1_000), on(1, 4_000), process(2, 9, 0, 20, 0)];
        three[1].clocks = vec![ClockSample {
            at: 0,
            server: 3_000,
            bound: 5,
        }];
        let aligned = Aligned::of(&three);
        assert_eq!(aligned.time(0, 3_500), aligned.time(1, 500));
        assert_eq!(aligned.time(0, 3_000), 3_000);
        assert_eq!(aligned.time(2, 11), 20);
    }

    #[test]
    fn clock_without_samples_is_reported() {
        let mut traces = [process(0, 0, 0, 1, 0), process(1, 0, 0, 1, 0)];
        traces[1].clocks.clear();
        traces[1].about.unix = 42;
        let aligned = Aligned::of(&traces);
        assert!(
            aligned.problems[0].starts_with("the clock of process 1 was not compared"),
            "{:?}",
            aligned.problems
        );
        assert_eq!(aligned.time(1, 8), 50);
    }
}
