//! Random lengths of prompts and replies, and times of arrival.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use mpmd::random::{Key, normal_f64, uniform_f64};

/// Maximum length of a prompt or reply, in tokens.
const LONGEST: f64 = (1 << 20) as f64;

/// A distribution of lengths, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lengths {
    Constant(f64),
    /// A uniform distribution from the first length to the second.
    Uniform(f64, f64),
    /// An exponential distribution with this mean.
    Exponential(f64),
    /// A log-normal distribution: its median, and the standard deviation of the logarithm.
    LogNormal(f64, f64),
}

impl Lengths {
    /// Returns the random length of number `element`: a whole number, at least one.
    pub(super) fn of(self, key: Key, element: u64) -> usize {
        let uniform = || uniform_f64(key, element);
        let length = match self {
            Self::Constant(length) => length,
            Self::Uniform(low, high) => low + (uniform() * (high - low + 1.0)).floor(),
            Self::Exponential(mean) => -mean * (1.0 - uniform()).ln(),
            Self::LogNormal(median, sigma) => median * (sigma * normal_f64(key, element)).exp(),
        };
        length.round().clamp(1.0, LONGEST) as usize
    }
}

impl FromStr for Lengths {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, rest) = text.split_once(':').unwrap_or(("constant", text));
        let number = |text: &str| {
            text.parse()
                .ok()
                .filter(|x: &f64| *x > 0.0 && *x <= LONGEST)
        };
        let pair = |between| {
            let (first, second) = rest.split_once(between)?;
            Some((number(first)?, number(second)?))
        };

        let lengths = match name {
            "constant" => number(rest).map(Self::Constant),
            "uniform" => pair("..").map(|(low, high)| Self::Uniform(low, high)),
            "exponential" => number(rest).map(Self::Exponential),
            "lognormal" => pair(",").map(|(median, sigma)| Self::LogNormal(median, sigma)),
            _ => None,
        };
        let is_right = |lengths: &Self| !matches!(lengths, Self::Uniform(low, high) if low > high);
        lengths
            .filter(is_right)
            .context("expected N, uniform:LOW..HIGH, exponential:MEAN or lognormal:MEDIAN,SIGMA")
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(length) => write!(f, "{length}"),
            Self::Uniform(low, high) => write!(f, "uniform:{low}..{high}"),
            Self::Exponential(mean) => write!(f, "exponential:{mean}"),
            Self::LogNormal(median, sigma) => write!(f, "lognormal:{median},{sigma}"),
        }
    }
}

/// Returns the times of arrival of a Poisson process with `rate` per second.
pub(super) fn arrivals(key: Key, rate: f64, count: usize) -> Vec<Duration> {
    let mut time = 0.0;
    let gaps = (0..count as u64).map(|element| -(1.0 - uniform_f64(key, element)).ln() / rate);
    gaps.map(|gap| {
        time += gap;
        Duration::from_secs_f64(time)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_the_mean_of_their_distribution() {
        for (text, mean) in [
            ("7", 7.0),
            ("uniform:10..30", 20.0),
            ("exponential:100", 100.0),
            ("lognormal:100,0.5", 100.0 * 0.125f64.exp()),
        ] {
            let lengths: Lengths = text.parse().unwrap();
            assert_eq!(lengths.to_string(), text);
            let all = (0..4000).map(|element| lengths.of(Key(5), element) as f64);
            let found = all.sum::<f64>() / 4000.0;
            assert!((found / mean - 1.0).abs() < 0.05, "{text}: {found}");
        }
        let times = arrivals(Key(5), 50.0, 5000);
        assert!(times.is_sorted() && (times[4999].as_secs_f64() / 100.0 - 1.0).abs() < 0.05);
    }

    #[test]
    fn wrong_distributions_are_refused() {
        for text in [
            "",
            "0",
            "-1",
            "uniform:5",
            "uniform:9..3",
            "normal:5",
            "lognormal:5",
            "nan",
        ] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }
}
