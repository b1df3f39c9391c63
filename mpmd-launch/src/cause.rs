//! Finds the process that made a job fail, from the exit status and the reports of all processes.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use mpmd_base::ProcessId;
use mpmd_proto::FailureKind;
use mpmd_transport::rendezvous::{RendezvousError, Report};
use rustix::process::Signal;

/// The failure that ended a job.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct JobFailure {
    /// The processes at fault, ascending. There are several if several did not join. After a
    /// divergence there are several if the minority has several processes, or if there is no
    /// majority.
    pub processes: Vec<ProcessId>,
    /// The way in which `processes[0]` ended.
    pub how: ExitKind,
    /// The failure as the processes or the rendezvous reported it. `None` if there is no report, or
    /// if it adds nothing to the way in which the process ended.
    pub why: Option<String>,
}

impl JobFailure {
    /// Returns the exit code for the job: that of the process at fault, or 1 if that code is 0.
    pub fn code(&self) -> i32 {
        if self.how == ExitKind::Exit(0) { 1 } else { self.how.code() }
    }
}

impl fmt::Display for JobFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.processes.as_slice() {
            [process] => write!(f, "process {process} failed first: {}", self.how)?,
            several => write!(f, "processes {} failed first", listed(several))?,
        }
        self.why.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// The end of a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExitKind {
    /// The process exited with this code.
    Exit(i32),
    /// A signal with this number ended the process.
    Signal(i32),
}

impl ExitKind {
    /// Returns the exit code that a shell would show: for a signal, 128 plus its number.
    pub fn code(self) -> i32 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(number) => 128 + number,
        }
    }

    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for ExitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exit(code) => write!(f, "it ended with exit code {code}"),
            Self::Signal(number) => {
                write!(f, "it was ended by signal {number}")?;
                const NAMES: [(Signal, &str); 11] = [
                    (Signal::HUP, "SIGHUP"),
                    (Signal::INT, "SIGINT"),
                    (Signal::QUIT, "SIGQUIT"),
                    (Signal::ILL, "SIGILL"),
                    (Signal::ABORT, "SIGABRT"),
                    (Signal::BUS, "SIGBUS"),
                    (Signal::FPE, "SIGFPE"),
                    (Signal::KILL, "SIGKILL"),
                    (Signal::SEGV, "SIGSEGV"),
                    (Signal::PIPE, "SIGPIPE"),
                    (Signal::TERM, "SIGTERM"),
                ];
                let name = NAMES.iter().find(|(signal, _)| signal.as_raw() == number);
                name.map_or(Ok(()), |(_, name)| write!(f, " ({name})"))
            }
        }
    }
}

/// The launcher's information on a job that has failed.
pub(super) struct Known<'a> {
    /// The process that failed first by the order of ends, and the way it ended.
    pub(super) first: (ProcessId, ExitKind),
    /// The way each process ended, by process.
    pub(super) ends: &'a [ExitKind],
    /// Reports of processes, in the order of arrival.
    pub(super) reports: &'a [(ProcessId, Report)],
    /// The reason why the job never formed, if it did not.
    pub(super) unformed: Option<&'a RendezvousError>,
}

impl Known<'_> {
    /// Returns the cause: a death by a signal, else missing processes, else a reported failure,
    /// else the first end.
    pub(super) fn cause(&self) -> JobFailure {
        let (first, how) = self.first;
        if matches!(how, ExitKind::Exit(_)) {
            if let Some(error @ RendezvousError::Missing { missing, .. }) = self.unformed
                && !missing.contains(&first)
            {
                return self.fault_of(missing.clone(), Some(error.to_string()));
            }
            // A failure that began in a process has priority over reports of its loss by others.
            let root = self.reports.iter().find(|(_, report)| !report.failure.is_peer_failure());
            if let Some((_, report)) = root.or(self.reports.first()) {
                return match report.failure.kind {
                    FailureKind::Diverged => self.divergence(report),
                    _ => self.followed(report),
                };
            }
        }
        JobFailure { processes: vec![first], how, why: None }
    }

    /// Returns the failure at the root of a report: that of the process which it accuses, or of the
    /// process which that one's report accuses, and so on.
    fn followed(&self, report: &Report) -> JobFailure {
        let mut report = report;
        for _ in 0..self.ends.len() {
            let accused = report.failure.process;
            match self.reports.iter().find(|(process, _)| *process == accused) {
                Some((_, own)) if own.failure.kind != FailureKind::Diverged => report = own,
                _ => break,
            }
            if report.failure.process == accused {
                break;
            }
        }
        let accused = report.failure.process;
        // The loss of a process adds nothing to its exit status.
        let is_end = report.failure.kind == FailureKind::PeerLost
            && (self.first.0 == accused && self.first.1 != ExitKind::Exit(0));
        self.fault_of(vec![accused], (!is_end).then(|| report.failure.message.clone()))
    }

    /// Returns the failure of a divergence. At fault is the minority by the hashes that processes
    /// reported for the same operation. Without a majority, both processes named in `found` are.
    fn divergence(&self, found: &Report) -> JobFailure {
        let pair = [Some(found.failure.process), found.failure.other].into_iter().flatten();
        let mut pair: Vec<ProcessId> = pair.collect();
        pair.sort();
        let mut hashes: BTreeMap<u128, Vec<ProcessId>> = BTreeMap::new();
        for (process, report) in self.reports {
            let Report { failure, hash } = report;
            if (failure.kind, failure.op) == (FailureKind::Diverged, found.failure.op)
                && let Some(hash) = hash
            {
                hashes.entry(*hash).or_default().push(*process);
            }
        }
        let most = hashes.values().map(Vec::len).max().unwrap_or(0);
        let mut largest = hashes.values().filter(|group| group.len() == most);
        let odd = match (largest.next(), largest.next()) {
            (Some(majority), None) if most > 1 => {
                let has_hash =
                    |process: &ProcessId| hashes.values().any(|group| group.contains(process));
                let is_told = pair.iter().any(|process| majority.contains(process));
                // One of the two that differ may have ended before it could report.
                let silent = pair.iter().filter(|process| is_told && !has_hash(process));
                let others =
                    hashes.values().flatten().filter(|process| !majority.contains(process));
                let mut odd: Vec<ProcessId> = others.chain(silent).copied().collect();
                odd.sort();
                odd
            }
            _ => Vec::new(),
        };
        self.fault_of(if odd.is_empty() { pair } else { odd }, Some(found.failure.message.clone()))
    }

    fn fault_of(&self, processes: Vec<ProcessId>, why: Option<String>) -> JobFailure {
        // A process number beyond the job comes from a broken process.
        let of = |process: &ProcessId| self.ends.get(process.index()).copied();
        match processes.first().and_then(of) {
            Some(how) => JobFailure { processes, how, why },
            None => JobFailure { processes: vec![self.first.0], how: self.first.1, why },
        }
    }
}

/// Formats a list of processes: `1`, `1 and 3`, `0, 1 and 3`.
fn listed(processes: &[ProcessId]) -> String {
    let mut names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    match names.pop() {
        Some(last) if !names.is_empty() => format!("{} and {last}", names.join(", ")),
        last => last.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use FailureKind::{Diverged, Kernel, Left, PeerLost};
    use mpmd_proto::Failure as Reported;

    use super::*;

    fn report(by: u32, kind: FailureKind, process: u32, hash: Option<u128>) -> (ProcessId, Report) {
        let mut failure =
            Reported::new(kind, ProcessId(process), 9, format!("{kind:?} of {process}"));
        // Process 1 finds that process 2 differs.
        failure.other = (kind == Diverged).then_some(ProcessId(2));
        (ProcessId(by), Report { failure, hash })
    }

    /// Returns the text of the cause for a job in which all processes ended with code 1, process 0
    /// first.
    fn cause(processes: usize, reports: &[(ProcessId, Report)]) -> String {
        let ends = vec![ExitKind::Exit(1); processes];
        let first = (ProcessId(0), ExitKind::Exit(1));
        Known { first, ends: &ends, reports, unformed: None }.cause().to_string()
    }

    fn divergence(processes: usize, hashes: &[(u32, Option<u128>)]) -> String {
        let reports: Vec<_> =
            hashes.iter().map(|(by, hash)| report(*by, Diverged, 1, *hash)).collect();
        let said = cause(processes, &reports);
        said.strip_suffix("; Diverged of 1").unwrap_or_else(|| panic!("{said}")).to_owned()
    }

    #[test]
    fn divergence_names_the_minority() {
        let one =
            |process: u32| format!("process {process} failed first: it ended with exit code 1");
        let all = |odd: u32| [0, 1, 2, 3].map(|by| (by, Some(if by == odd { 7 } else { 5 })));
        assert_eq!(divergence(4, &all(2)), one(2));
        assert_eq!(divergence(4, &all(1)), one(1));
        // Process 3 had not reached the operation, so it reports no hash.
        assert_eq!(divergence(4, &[(0, Some(5)), (1, Some(5)), (2, Some(7)), (3, None)]), one(2));
        assert_eq!(divergence(3, &[(0, Some(5)), (1, Some(5)), (2, Some(0))]), one(2));
        // Process 2 was ended before it could report.
        assert_eq!(divergence(3, &[(0, Some(5)), (1, Some(5))]), one(2));
        let several =
            divergence(5, &[(0, Some(5)), (1, Some(5)), (2, Some(7)), (3, Some(5)), (4, Some(8))]);
        assert_eq!(several, "processes 2 and 4 failed first");
    }

    #[test]
    fn divergence_without_majority_names_both() {
        let both = "processes 1 and 2 failed first";
        assert_eq!(divergence(3, &[(1, Some(5)), (2, Some(7))]), both);
        assert_eq!(divergence(4, &[(0, Some(7)), (1, Some(5)), (2, Some(7)), (3, Some(5))]), both);
        assert_eq!(divergence(3, &[(0, None), (1, Some(5)), (2, None)]), both);
        // The two that differ sent no report, and are not among those that agree.
        assert_eq!(divergence(5, &[(0, Some(5)), (3, Some(5))]), both);
    }

    #[test]
    fn blame_is_followed_to_its_root() {
        let lost = |by, process| report(by, PeerLost, process, None);
        let said = cause(4, &[lost(0, 3), lost(3, 1), report(2, Kernel, 2, None)]);
        assert_eq!(said, "process 2 failed first: it ended with exit code 1; Kernel of 2");
        let said = cause(4, &[lost(0, 3), lost(3, 1), report(1, Left, 1, None)]);
        assert_eq!(said, "process 1 failed first: it ended with exit code 1; Left of 1");
        // Each accuses the other.
        let said = cause(2, &[lost(0, 1), lost(1, 0)]);
        assert!(
            said.starts_with("process 1 failed first")
                || said.starts_with("process 0 failed first")
        );
        assert!(
            cause(2, &[lost(0, 7)]).starts_with("process 0 failed first"),
            "there is no process 7"
        );
    }

    #[test]
    fn signal_is_the_cause_despite_other_reports() {
        let reports = [report(0, Kernel, 0, None)];
        let ends = [ExitKind::Exit(1), ExitKind::Signal(9)];
        let known = Known {
            first: (ProcessId(1), ends[1]),
            ends: &ends,
            reports: &reports,
            unformed: None,
        };
        let expected = "process 1 failed first: it was ended by signal 9 (SIGKILL)";
        assert_eq!(known.cause().to_string(), expected);
    }

    #[test]
    fn missing_processes_are_named() {
        let missing = vec![ProcessId(1), ProcessId(2)];
        let peer_timeout = Duration::from_secs(3);
        let unformed = RendezvousError::Missing { missing, processes: 3, peer_timeout };
        let ends = [ExitKind::Exit(1), ExitKind::Signal(15), ExitKind::Signal(15)];
        let of = |first: usize| {
            let first = (ProcessId(first as u32), ExitKind::Exit(4));
            Known { first, ends: &ends, reports: &[], unformed: Some(&unformed) }
                .cause()
                .to_string()
        };
        assert_eq!(
            of(0),
            "processes 1 and 2 failed first; processes 1 and 2 of 3 have not joined after 3s"
        );
        // It never tried to join, or failed before.
        assert_eq!(of(2), "process 2 failed first: it ended with exit code 4");
    }

    #[test]
    fn exit_kind_has_message_and_code() {
        assert_eq!(ExitKind::Exit(3).to_string(), "it ended with exit code 3");
        assert_eq!(ExitKind::Signal(9).to_string(), "it was ended by signal 9 (SIGKILL)");
        assert_eq!(ExitKind::Signal(15).code(), 143);
    }
}
