//! The arguments of `cargo xtask bench`.

use std::path::PathBuf;

use anyhow::{Context as _, bail};

use super::set::{Measurement, SET};

/// Number of pairs if `--pairs` is absent.
const PAIRS: usize = 7;

/// Minimum number of pairs for a comparison with another commit: fewer have no spread.
const FEWEST_PAIRS: usize = 3;

/// Arguments of `cargo xtask bench`.
pub(crate) struct BenchOptions {
    /// The commit to compare with, in any form that git accepts.
    pub(super) against: Option<String>,
    /// True if the working tree is compared with programs of other projects.
    pub(super) peers: bool,
    /// The Python whose packages the peers may use.
    pub(super) python: String,
    pub(super) pairs: usize,
    /// The measurements to run.
    pub(super) only: Vec<&'static Measurement>,
    /// The file to which all values are written.
    pub(super) json: Option<PathBuf>,
    /// The largest ratio that does not count as a failure.
    pub(super) at_most: Option<f64>,
    /// True if the results are written to the repository's performance record.
    pub(super) record: bool,
    /// True if the measurements are only listed.
    pub(super) list: bool,
}

impl BenchOptions {
    /// Parses the arguments.
    ///
    /// # Errors
    ///
    /// If an argument is unknown or wrong.
    pub(crate) fn parse(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self {
            against: None,
            peers: false,
            python: "python3".to_owned(),
            pairs: PAIRS,
            only: SET.iter().collect(),
            json: None,
            at_most: None,
            record: false,
            list: false,
        };

        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || {
                rest.next()
                    .copied()
                    .with_context(|| format!("{argument} takes a value"))
            };
            match *argument {
                "--against" => options.against = Some(value()?.to_owned()),
                "--peers" => options.peers = true,
                "--python" => {
                    options.python = value()?.to_owned();
                    options.peers = true;
                }
                "--pairs" => {
                    let text = value()?;
                    let pairs = text.parse().ok().filter(|pairs| *pairs > 0);
                    options.pairs =
                        pairs.with_context(|| format!("--pairs {text} is no number"))?;
                }
                "--only" => {
                    options.only = value()?.split(',').map(named).collect::<Result<_, _>>()?
                }
                "--json" => options.json = Some(value()?.into()),
                "--at-most" => {
                    let text = value()?;
                    let ratio = text.parse().ok().filter(|ratio| *ratio > 0.0);
                    let ratio = ratio.with_context(|| format!("--at-most {text} is no ratio"))?;
                    options.at_most = Some(ratio);
                }
                "--record" => options.record = true,
                "--list" => options.list = true,
                other => bail!("there is no argument {other}"),
            }
        }

        if options.against.is_some() && options.peers {
            bail!("--against and --peers are different comparisons");
        }
        if (options.against.is_some() || options.peers) && options.pairs < FEWEST_PAIRS {
            bail!("a spread of ratios takes {FEWEST_PAIRS} pairs or more");
        }
        if options.against.is_none() && options.at_most.is_some() {
            bail!("--at-most limits ratios, which need --against");
        }
        if options.record && options.only.len() < SET.len() {
            bail!("a record has all measurements: leave --only out");
        }
        Ok(options)
    }
}

fn named(name: &str) -> anyhow::Result<&'static Measurement> {
    SET.iter()
        .find(|measurement| measurement.name == name)
        .with_context(|| {
            let names: Vec<&str> = SET.iter().map(|measurement| measurement.name).collect();
            format!(
                "there is no measurement {name:?}; there are {}",
                names.join(", ")
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_parsed() {
        let options = BenchOptions::parse(&[]).unwrap();
        assert_eq!(
            (options.against, options.pairs, options.only.len()),
            (None, 7, SET.len())
        );
        let all =
            "--against HEAD~1 --pairs 3 --only reshard,dispatch --json x --at-most 1.1 --list";
        let options = BenchOptions::parse(&all.split(' ').collect::<Vec<_>>()).unwrap();
        let names: Vec<&str> = options
            .only
            .iter()
            .map(|measurement| measurement.name)
            .collect();
        assert_eq!(
            (options.against.as_deref(), options.pairs),
            (Some("HEAD~1"), 3)
        );
        assert_eq!(
            (names, options.at_most),
            (vec!["reshard", "dispatch"], Some(1.1))
        );
        assert_eq!((options.json, options.list), (Some("x".into()), true));
        assert!(BenchOptions::parse(&["--record"]).unwrap().record);
        let peers = BenchOptions::parse(&["--python", "venv/bin/python"]).unwrap();
        assert_eq!((peers.peers, &peers.python[..]), (true, "venv/bin/python"));
    }

    #[test]
    fn wrong_arguments_are_refused_with_a_reason() {
        for (arguments, reason) in [
            ("--fast", "no argument --fast"),
            ("--against", "--against takes a value"),
            ("--pairs 0", "--pairs 0 is no number"),
            ("--pairs 2 --against HEAD", "takes 3 pairs"),
            ("--pairs 2 --peers", "takes 3 pairs"),
            ("--peers --against HEAD", "different comparisons"),
            (
                "--only reshard,planes",
                "no measurement \"planes\"; there are dispatch, ",
            ),
            ("--at-most 1.1", "need --against"),
            ("--against HEAD --at-most -1", "--at-most -1 is no ratio"),
            ("--record --only reshard", "leave --only out"),
        ] {
            let parsed = BenchOptions::parse(&arguments.split(' ').collect::<Vec<_>>());
            let Err(error) = parsed else {
                panic!("{arguments} is taken")
            };
            let why = error.to_string();
            assert!(why.contains(reason), "{arguments}: {why}");
        }
    }
}
