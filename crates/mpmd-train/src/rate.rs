//! Learning rates as functions of the step.

use std::f64::consts::PI;

/// A learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// The same rate in every step.
    Constant(f64),
    /// A rate that rises linearly, then falls along half a cosine.
    WarmupCosine {
        /// The highest rate, reached in step `warmup`.
        peak: f64,
        /// The lowest rate, from step `total` on, but not before the peak in step `warmup`.
        floor: f64,
        /// Number of steps in which the rate rises. If it is 0, step 1 already has nearly the peak
        /// rate.
        warmup: u64,
        /// Number of steps of the whole training.
        total: u64,
    },
    /// A rate that rises linearly, then falls linearly.
    WarmupLinear {
        /// The highest rate, reached in step `warmup`.
        peak: f64,
        /// The lowest rate, from step `total` on, but not before the peak in step `warmup`.
        floor: f64,
        /// Number of steps in which the rate rises. If it is 0, step 1 already has nearly the peak
        /// rate.
        warmup: u64,
        /// Number of steps of the whole training.
        total: u64,
    },
}

impl Rate {
    /// Returns the learning rate of step `step`, counted from 1.
    pub fn at(&self, step: u64) -> f64 {
        match *self {
            Self::Constant(rate) => rate,
            Self::WarmupCosine {
                peak,
                floor,
                warmup,
                total,
            } => {
                let form = WarmedRate {
                    peak,
                    floor,
                    warmup,
                    total,
                };
                form.at(step, |done| 0.5 * (1.0 + (PI * done).cos()))
            }
            Self::WarmupLinear {
                peak,
                floor,
                warmup,
                total,
            } => {
                let form = WarmedRate {
                    peak,
                    floor,
                    warmup,
                    total,
                };
                form.at(step, |done| 1.0 - done)
            }
        }
    }

    /// Returns the learning rate after `share`, from 0 to 1, of all steps.
    pub(crate) fn at_share(&self, share: f64) -> f64 {
        let total = match *self {
            Self::Constant(_) => 0,
            Self::WarmupCosine { total, .. } | Self::WarmupLinear { total, .. } => total,
        };
        self.at((share.clamp(0.0, 1.0) * total as f64) as u64 + 1)
    }
}

/// A rate that rises linearly to `peak`, then falls to `floor`.
struct WarmedRate {
    peak: f64,
    floor: f64,
    /// The step that has the rate `peak`.
    warmup: u64,
    /// The first step that has the rate `floor`, unless `warmup` is not before it.
    total: u64,
}

impl WarmedRate {
    /// Returns the rate of step `step`. `fall` maps the finished share of the fall, from 0 to 1, to
    /// the remaining height above the floor, from 1 to 0.
    fn at(&self, step: u64, fall: impl Fn(f64) -> f64) -> f64 {
        let Self {
            peak,
            floor,
            warmup,
            total,
        } = *self;
        if step < warmup {
            return peak * step as f64 / warmup as f64;
        }

        // Also in the last step.
        if step == warmup {
            return peak;
        }
        if step >= total {
            return floor;
        }

        // `warmup < step < total` here, so the divisor is not zero.
        let done = (step - warmup) as f64 / (total - warmup) as f64;
        floor + (peak - floor) * fall(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_rises_linearly_and_falls_along_a_cosine() {
        let of = |warmup| Rate::WarmupCosine {
            peak: 1.0,
            floor: 0.2,
            warmup,
            total: 12,
        };
        let expected = [
            (1, 0.25),
            (2, 0.5),
            (4, 1.0),
            (6, 0.6 + 0.4 * 0.5f64.sqrt()),
            (8, 0.6),
            (12, 0.2),
            (13, 0.2),
            (u64::MAX, 0.2),
        ];
        for (step, rate) in expected {
            assert!(
                (of(4).at(step) - rate).abs() < 1e-12,
                "{step}: {}",
                of(4).at(step)
            );
        }
        assert!(of(0).at(1) > 0.98);
    }

    #[test]
    fn warmup_of_all_steps_ends_at_the_peak() {
        let (peak, floor) = (0.3, 0.1);
        for (warmup, total) in [(5, 5), (1, 1), (5, 6), (12, 12)] {
            for rate in [
                Rate::WarmupLinear {
                    peak,
                    floor,
                    warmup,
                    total,
                },
                Rate::WarmupCosine {
                    peak,
                    floor,
                    warmup,
                    total,
                },
            ] {
                assert_eq!(rate.at(warmup), peak, "{rate:?}");
                assert!((1..warmup).all(|step| rate.at(step) < peak), "{rate:?}");
                assert_eq!(rate.at(total + 1), floor, "{rate:?}");
            }
        }
    }

    #[test]
    fn rate_rises_and_falls_linearly() {
        let rate = Rate::WarmupLinear {
            peak: 1.0,
            floor: 0.2,
            warmup: 4,
            total: 12,
        };
        let expected = [
            (1, 0.25),
            (4, 1.0),
            (6, 0.8),
            (8, 0.6),
            (12, 0.2),
            (u64::MAX, 0.2),
        ];
        for (step, expected) in expected {
            assert!(
                (rate.at(step) - expected).abs() < 1e-12,
                "{step}: {}",
                rate.at(step)
            );
        }
        assert_eq!(Rate::Constant(0.5).at(9), 0.5);
        assert_eq!(
            (rate.at_share(0.0), rate.at_share(0.5)),
            (rate.at(1), rate.at(7))
        );
        assert_eq!(
            (rate.at_share(1.0), Rate::Constant(0.5).at_share(0.3)),
            (0.2, 0.5)
        );
    }
}
