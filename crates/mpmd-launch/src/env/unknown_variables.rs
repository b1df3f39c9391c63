//! The variables that begin with `MPMD_`: the known ones, and the others in an environment.

use std::fmt;

use crate::{LaunchError, variables as ours};

/// All `MPMD_` variables that programs, commands and tests read.
const KNOWN: [&str; 36] = [
    ours::RANK,
    ours::WORLD_SIZE,
    ours::SPARES,
    ours::RESTARTS,
    ours::ADDED,
    ours::LOCAL_RANK,
    ours::COORDINATOR,
    ours::HOSTED,
    ours::JOB_TOKEN,
    ours::JOB_TOKEN_FILE,
    ours::TRANSPORT,
    ours::CUDA_IPC,
    ours::SIMD,
    ours::SPIN,
    ours::CORES,
    ours::DEVICES_PER_PROCESS,
    ours::DEVICE,
    ours::CUDA_COLLECTIVES,
    ours::PEER_TIMEOUT,
    ours::HOST,
    ours::CHECK,
    ours::DRY_RUN,
    ours::DRY_RUN_PROCESSES,
    ours::DRY_RUN_PROCESS,
    ours::DRY_RUN_STEPS,
    ours::TRACE,
    ours::SYNC,
    ours::LAUNCHER_PID,
    "MPMD_UCX_LIBRARY",
    "MPMD_SCREENSHOTS",
    "MPMD_FUZZ_INPUTS",
    "MPMD_FUZZ_SEED",
    "MPMD_FUZZ_FIRST",
    "MPMD_SOAK",
    "MPMD_SOAK_KILLS",
    "MPMD_SOAK_SECONDS",
];

/// Prefix of the variable names that are examined.
const OURS: &str = "MPMD_";

/// Prefix of the variable names that this repository's tests use.
const TESTS: &str = "MPMD_TEST";

/// Maximum number of edits between a misspelt name and a known name.
const EDITS: usize = 2;

/// A variable whose name begins with `MPMD_` but that nothing reads.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UnknownVariable {
    /// The name of the variable.
    pub name: String,
    /// The known name that the variable's name is close to. `None` if there is none; then something
    /// else set the variable. For example, clusters inject variables of services, such as
    /// `MPMD_X_SERVICE_HOST`.
    pub meant: Option<&'static str>,
}

impl fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no variable {}", self.name)?;
        match self.meant {
            Some(meant) => write!(f, ": set {meant}, if that is meant, or unset it"),
            None => write!(f, "; it has no effect"),
        }
    }
}

/// Returns the variables of `environment` whose names begin with `MPMD_` and are not known, sorted
/// by name.
fn unknown_variables(
    environment: impl IntoIterator<Item = (String, String)>,
) -> Vec<UnknownVariable> {
    let unknown = environment.into_iter().filter(|(name, _)| {
        name.starts_with(OURS) && !name.starts_with(TESTS) && !KNOWN.contains(&name.as_str())
    });
    let unknown = unknown.map(|(name, value)| {
        // Kubernetes sets `MPMD_PORT=tcp://…` in every container beside a service named `mpmd`.
        let is_injected = value.contains("://");
        let near = KNOWN
            .into_iter()
            .map(|known| (edits(&name, known), known))
            .min();
        let near = near.filter(|(edits, _)| *edits <= EDITS && !is_injected);
        UnknownVariable {
            name,
            meant: near.map(|(_, known)| known),
        }
    });

    let mut unknown: Vec<_> = unknown.collect();
    unknown.sort_by(|a, b| a.name.cmp(&b.name));
    unknown
}

/// Returns the unknown variables of this process's environment. Replaces bytes that are not
/// Unicode.
pub fn unknown_variables_here() -> Vec<UnknownVariable> {
    let text = |bytes: std::ffi::OsString| bytes.to_string_lossy().into_owned();
    unknown_variables(std::env::vars_os().map(|(name, value)| (text(name), text(value))))
}

/// Fails if the name of one of this process's variables is a misspelt known name.
pub(crate) fn check() -> Result<(), LaunchError> {
    let misspelt = unknown_variables_here()
        .into_iter()
        .find(|it| it.meant.is_some());
    misspelt.map_or(Ok(()), |unknown| {
        Err(LaunchError::UnknownVariable(unknown.to_string()))
    })
}

/// Returns the minimum number of inserted, deleted and replaced bytes that turn `a` into `b`.
fn edits(a: &str, b: &str) -> usize {
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (row, a) in a.bytes().enumerate() {
        let mut corner = std::mem::replace(&mut above[0], row + 1);
        for (column, b) in b.bytes().enumerate() {
            let replaced = corner + usize::from(a != b);
            corner = above[column + 1];
            above[column + 1] = replaced.min(corner + 1).min(above[column] + 1);
        }
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(name: &str, value: &str) -> Vec<Option<&'static str>> {
        let unknown = unknown_variables([(name.to_owned(), value.to_owned())]);
        unknown.into_iter().map(|unknown| unknown.meant).collect()
    }

    #[test]
    fn misspelt_names_are_told_from_foreign_ones() {
        for (name, known) in [
            ("MPMD_TRANSPRT", "MPMD_TRANSPORT"),
            ("MPMD_PEER_TIMOUT", "MPMD_PEER_TIMEOUT"),
            ("MPMD_PEERTIMEOUT", "MPMD_PEER_TIMEOUT"),
            ("MPMD_DEVICES", "MPMD_DEVICE"),
        ] {
            assert_eq!(meant(name, "1"), [Some(known)], "{name}");
        }
        for (name, value) in [
            ("MPMD_X_SERVICE_HOST", "10.0.0.1"),
            ("MPMD_SERVICE_PORT", "80"),
            ("MPMD_PORT", "tcp://10.0.0.1:80"),
            ("MPMD_TRANSPORT_LAYER", "x"),
        ] {
            assert_eq!(meant(name, value), [None], "{name}");
        }
        for name in ["HOME", "MPMD_TRANSPORT", "MPMD_TEST_CASE", "XMPMD_HOST"] {
            assert_eq!(meant(name, "1"), [], "{name}");
        }
    }

    #[test]
    fn edits_are_counted() {
        for (a, b, count) in [("", "ab", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)] {
            assert_eq!((edits(a, b), edits(b, a)), (count, count), "{a} {b}");
        }
    }

    #[test]
    fn guide_lists_the_known_variables() {
        let guide = include_str!("../../../../docs/guide/environment.md");
        let rows = guide
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        let names = rows
            .flat_map(|cell| cell.split('`'))
            .filter(|word| word.starts_with(OURS));
        let mut listed: Vec<&str> = names.filter(|name| !name.starts_with(TESTS)).collect();
        let mut known = KNOWN.to_vec();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known);
    }
}
