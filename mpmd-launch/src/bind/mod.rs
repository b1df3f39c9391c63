//! Binding of a job's processes to cores of this host.
//!
//! A process inherits the cores of the thread that starts it, and passes them to its own threads.
//! So the launcher's thread takes on a process's cores while it starts the process. Memory is not
//! bound: the kernel places a page on the NUMA node of the core that first touches it.

mod assign;
mod host;

use std::fmt;
use std::process::Command;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{LaunchError, variables};

/// The cores that each process of a job may use.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Bind {
    /// All cores that the launcher may use.
    #[default]
    None,
    /// A share of these cores for each process alone.
    Core,
    /// The cores of one NUMA node, which the processes of the node share.
    Numa,
}

impl Bind {
    /// The names of all values, as options spell them.
    pub const NAMES: [&str; 3] = ["none", "core", "numa"];

    /// Returns the value with this name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::None, Self::Core, Self::Numa];
        Self::NAMES.iter().zip(all).find(|(known, _)| **known == name).map(|(_, bind)| bind)
    }
}

/// The cores of this host that a job may use.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HostCores {
    /// The hardware threads by NUMA node and core.
    nodes: Vec<Vec<Vec<usize>>>,
    /// The number of hardware threads that can run at a time, by the limits of control groups.
    pub usable: usize,
}

/// The reason why processes are not bound.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unbound {
    /// The user did not ask for it.
    #[error("--bind is none")]
    NotAsked,
    /// There are too few cores. Bound processes would wait for each other's cores while others are
    /// idle.
    #[error("{processes} processes are more than the {cores} cores here")]
    Crowded {
        /// Number of processes of the job.
        processes: usize,
        /// Number of cores that they may use.
        cores: usize,
    },
    /// There is no choice of a node.
    #[error("the cores here belong to one NUMA node")]
    OneNode,
    /// The system does not report the cores.
    #[error("the cores of this host are unknown: {why}")]
    Unknown {
        /// The error of the system.
        why: String,
    },
}

/// The cores of each process of a job.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Binding {
    shares: Vec<Vec<usize>>,
    /// The number of cores that all processes have together.
    cores: usize,
}

impl Binding {
    /// Assigns cores of this host to the processes of a job.
    ///
    /// # Errors
    ///
    /// The reason why the processes cannot be bound. They work without.
    pub fn of(bind: Bind, processes: usize) -> Result<Self, Unbound> {
        Self::on(&HostCores::look()?, bind, processes)
    }

    /// Assigns cores of `host` to the processes of a job. Does no I/O.
    ///
    /// # Errors
    ///
    /// As [`Binding::of`].
    pub fn on(host: &HostCores, bind: Bind, processes: usize) -> Result<Self, Unbound> {
        let shares = assign::assign(bind, host, processes)?;
        Ok(Self { shares, cores: host.usable })
    }

    /// Makes this thread use the cores of a process until the result is dropped. The process that
    /// it starts meanwhile by `command` keeps these cores, and learns the number of the job's.
    ///
    /// # Errors
    ///
    /// If the system refuses, as when the host's cores have changed.
    pub(crate) fn enter(
        &self,
        process: usize,
        command: &mut Command,
    ) -> Result<Bound, LaunchError> {
        let failed = |error: rustix::io::Errno| {
            let share = self.shares.get(process).map(|share| list(share)).unwrap_or_default();
            LaunchError::environment(format!("binding process {process} to cores {share}"), error)
        };
        let before = sched_getaffinity(None).map_err(failed)?;
        let mut cores = CpuSet::new();
        self.shares.get(process).into_iter().flatten().for_each(|core| cores.set(*core));
        sched_setaffinity(None, &cores).map_err(failed)?;
        command.env(variables::CORES, self.cores.to_string());
        Ok(Bound(before))
    }
}

impl fmt::Display for Binding {
    /// Lists the cores of all processes: `0: cores 0-3; 1: cores 4-7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = self.shares.iter().enumerate();
        let shares = shares.map(|(process, share)| format!("{process}: cores {}", list(share)));
        f.write_str(&shares.collect::<Vec<_>>().join("; "))
    }
}

/// Formats cores in the kernel's list format, such as `0-3,8`.
fn list(cores: &[usize]) -> String {
    let mut sorted = cores.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a + 1 == *b);
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(",")
}

/// A thread that has other cores for a while. Dropping it restores them.
#[must_use]
pub(crate) struct Bound(CpuSet);

impl Drop for Bound {
    fn drop(&mut self) {
        if let Err(error) = sched_setaffinity(None, &self.0) {
            tracing::warn!("the launcher keeps the cores of a process: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_options() {
        let named = Bind::NAMES.map(|name| Bind::named(name).unwrap());
        assert_eq!(named, [Bind::None, Bind::Core, Bind::Numa]);
        assert_eq!(Bind::named("socket"), None);
    }

    #[test]
    fn shares_are_listed_by_process() {
        let binding = Binding { shares: vec![vec![0, 1, 2, 8], vec![5, 4]], cores: 6 };
        assert_eq!(binding.to_string(), "0: cores 0-2,8; 1: cores 4-5");
    }

    #[test]
    fn thread_gets_its_cores_back() {
        let before = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU).find(|core| before.is_set(*core)).unwrap();
        let binding = Binding { shares: vec![vec![core]], cores: 1 };
        let bound = binding.enter(0, &mut Command::new("true")).unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        drop(bound);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
        // The host has no such process's cores.
        let error = binding.enter(1, &mut Command::new("true")).map(drop).unwrap_err().to_string();
        assert!(error.contains("binding process 1 to cores"), "{error}");
    }
}
