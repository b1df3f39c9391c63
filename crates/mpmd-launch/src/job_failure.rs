//! Finds the process that made a job fail, from the exit status and the reports of all processes.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use mpmd_base::ProcessId;
use mpmd_proto::FailureKind;
use mpmd_rendezvous::{FailureReport, RendezvousError};
use rustix::process::Signal;

use super::last_words::PrintedError;

/// The failure that ended a job.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct JobFailure {
    /// The processes at fault, ascending. Usually one; more if several did not join. After a
    /// divergence, more than one if the minority has several processes or there is no majority.
    pub processes: Vec<ProcessId>,
    /// The exit code or signal with which `processes[0]` ended.
    pub how: ExitKind,
    /// The failure as the processes or the rendezvous reported it. `None` if there is no report, or
    /// if the report says no more than `how`.
    pub why: Option<String>,
    /// True if all processes of the job failed in the same way, so that none was first.
    pub is_shared: bool,
}

impl JobFailure {
    /// Compares the failure with the errors that the processes printed. Marks it as shared if all
    /// ended with the same exit code, each over the same error of its own or without any report.
    pub(super) fn absorb(&mut self, errors: &[PrintedError], known: &FailedJob<'_>) {
        let ends = known.ends;
        let is_failed = |end: &ExitKind| matches!(end, ExitKind::Exit(code) if *code != 0);
        let all_alike = ends.len() > 1 && ends.iter().all(|end| is_failed(end) && *end == ends[0]);

        let is_own = |error: &&PrintedError| {
            let message = error.message();
            let why = self.why.as_deref();
            // A process that passes on the failure of another prints the whole message.
            let is_of = |process| {
                (error.processes.contains(&process) && why != Some(message.as_str()))
                    || known.blames_itself(process, &message)
            };
            (0..ends.len()).all(is_of) && why.is_none_or(|why| is_reason(&message, why))
        };
        let own = errors
            .iter()
            .find(is_own)
            .filter(|_| all_alike)
            .map(PrintedError::message);

        let is_silent = self.why.is_none() && errors.is_empty() && known.reports.is_empty();
        if own.is_some() || (all_alike && is_silent) {
            self.processes = (0..ends.len() as u32).map(ProcessId).collect();
            self.how = ends[0];
            self.why = own;
            self.is_shared = true;
        }
    }

    /// Returns the errors without the parts that this failure's message already contains.
    pub(super) fn without_said(&self, errors: Vec<PrintedError>) -> Vec<PrintedError> {
        let why = self.why.as_deref();
        let rest = errors.into_iter().filter_map(|error| {
            match why.is_some_and(|why| is_in(&error.message(), why)) {
                false => Some(error),
                true if error.backtrace().is_empty() => None,
                true => Some(PrintedError {
                    text: error.backtrace().to_owned(),
                    ..error
                }),
            }
        });
        rest.collect()
    }

    /// Returns the exit code for the job: that of the process at fault, or 1 if the process exited
    /// with 0.
    pub fn code(&self) -> i32 {
        if self.how == ExitKind::Exit(0) {
            1
        } else {
            self.how.code()
        }
    }
}

impl fmt::Display for JobFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.processes.as_slice() {
            several if self.is_shared => {
                let count = several.len();
                let code = self.how.code();
                write!(f, "all {count} processes failed with exit code {code}")?;
                return self.why.iter().try_for_each(|why| write!(f, ": {why}"));
            }
            [process] => write!(f, "process {process} failed first: {}", self.how)?,
            several => write!(f, "processes {} failed first", listed(several))?,
        }
        self.why.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// True if the failure text `why` is `message`, or ends with it after a description of the process.
fn is_in(message: &str, why: &str) -> bool {
    let before = why.trim_end().strip_suffix(message);
    before.is_some_and(|before| before.is_empty() || before.ends_with(": "))
}

/// True if the failure `why` may come from a process that printed `message`. The failure report of
/// a panic lacks the panic's message, so every printed panic matches such a report.
fn is_reason(message: &str, why: &str) -> bool {
    let is_panic = message.starts_with("thread '") && message.contains(" panicked at ");
    is_in(message, why) || (is_panic && why.ends_with(" panicked before its program finished"))
}

/// The way in which a process ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExitKind {
    /// The process exited with this code.
    Exit(i32),
    /// A signal with this number ended the process.
    Signal(i32),
    /// The system killed the process with SIGKILL, because memory was full.
    MemoryFull,
    /// The launcher killed the process with SIGKILL.
    Killed,
}

impl ExitKind {
    /// Returns the exit code that a shell would show: for a signal, 128 plus its number.
    pub fn code(self) -> i32 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(number) => 128 + number,
            Self::MemoryFull | Self::Killed => 128 + Signal::KILL.as_raw(),
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
                signal_name(number).map_or(Ok(()), |name| write!(f, " ({name})"))?;
                match number == Signal::KILL.as_raw() {
                    true => f.write_str(
                        ": by a user, a scheduler, or the system if memory was full (see dmesg)",
                    ),
                    false => Ok(()),
                }
            }
            Self::MemoryFull => f.write_str(
                "the system ended it by signal 9 (SIGKILL), because memory was full (see dmesg)",
            ),
            Self::Killed => {
                f.write_str("it was ended by signal 9 (SIGKILL), which the launcher sent")
            }
        }
    }
}

/// Returns the name of a signal that ends processes, or `None` for other signals.
pub(super) fn signal_name(number: i32) -> Option<&'static str> {
    const NAMES: [(Signal, &str); 13] = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::TERM, "SIGTERM"),
    ];
    NAMES
        .iter()
        .find(|(signal, _)| signal.as_raw() == number)
        .map(|(_, name)| *name)
}

/// The way in which the process at one place (rank) of the job ended.
#[derive(Clone, Copy)]
pub(super) struct PlaceEnd {
    pub(super) place: ProcessId,
    pub(super) how: ExitKind,
}

/// The information that the launcher has on a failed job.
pub(super) struct FailedJob<'a> {
    /// The process that failed first, by the order in which processes ended.
    pub(super) first: PlaceEnd,
    /// The way in which each process ended, indexed by process.
    pub(super) ends: &'a [ExitKind],
    /// Failure reports of processes, in the order of arrival.
    pub(super) reports: &'a [(ProcessId, FailureReport)],
    /// The reason that the job never formed; `None` if it formed.
    pub(super) unformed: Option<&'a RendezvousError>,
}

impl FailedJob<'_> {
    /// Returns the cause of the failure. In order of priority: a death by a signal, missing
    /// processes, a reported failure, the first end of a process.
    pub(super) fn cause(&self) -> JobFailure {
        let PlaceEnd { place: first, how } = self.first;
        if matches!(how, ExitKind::Exit(_)) {
            if let Some(error @ RendezvousError::Missing { missing, .. }) = self.unformed
                && !missing.contains(&first)
            {
                return self.fault_of(missing.clone(), Some(error.to_string()));
            }
            if let Some(RendezvousError::NeverJoins { process, .. }) = self.unformed
                && *process != first
            {
                let why = "the others waited for it to join the job".to_owned();
                return self.fault_of(vec![*process], Some(why));
            }

            // A failure that began in a process has priority over reports of its loss by others.
            let root = self
                .reports
                .iter()
                .find(|(_, report)| !report.failure.is_peer_failure());
            if let Some((_, report)) = root.or(self.reports.first()) {
                return match report.failure.kind {
                    FailureKind::Diverged => self.divergence(report),
                    _ => self.followed(report),
                };
            }
        }
        JobFailure {
            processes: vec![first],
            how,
            why: None,
            is_shared: false,
        }
    }

    /// True if the process has reported a failure of its own with this message.
    fn blames_itself(&self, process: usize, message: &str) -> bool {
        self.reports
            .iter()
            .any(|(by, FailureReport { failure, .. })| {
                by.index() == process
                    && failure.process == *by
                    && failure.kind != FailureKind::Diverged
                    && is_in(message, &failure.message)
            })
    }

    /// Returns the root failure of a report. Follows the reports from the accused process to the
    /// process that it accuses, and so on.
    fn followed(&self, report: &FailureReport) -> JobFailure {
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
            && (self.first.place == accused && self.first.how != ExitKind::Exit(0));
        self.fault_of(
            vec![accused],
            (!is_end).then(|| report.failure.message.clone()),
        )
    }

    /// Returns the failure of a divergence. Compares the hashes that processes reported for the
    /// same operation: the processes in the minority are at fault. Without a majority, both
    /// processes named in `found` are at fault.
    fn divergence(&self, found: &FailureReport) -> JobFailure {
        let pair = [Some(found.failure.process), found.failure.other]
            .into_iter()
            .flatten();
        let mut pair: Vec<ProcessId> = pair.collect();
        pair.sort();

        let mut hashes: BTreeMap<u128, Vec<ProcessId>> = BTreeMap::new();
        for (process, report) in self.reports {
            let FailureReport { failure, hash } = report;
            if failure.kind == FailureKind::Diverged
                && failure.op == found.failure.op
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
                let others = hashes
                    .values()
                    .flatten()
                    .filter(|process| !majority.contains(process));
                let mut odd: Vec<ProcessId> = others.chain(silent).copied().collect();
                odd.sort();
                odd
            }
            _ => Vec::new(),
        };

        self.fault_of(
            if odd.is_empty() { pair } else { odd },
            Some(found.failure.message.clone()),
        )
    }

    fn fault_of(&self, processes: Vec<ProcessId>, why: Option<String>) -> JobFailure {
        // A process number beyond the job comes from a broken process.
        let of = |process: &ProcessId| self.ends.get(process.index()).copied();
        match processes.first().and_then(of) {
            Some(how) => JobFailure {
                processes,
                how,
                why,
                is_shared: false,
            },
            None => {
                let PlaceEnd { place, how } = self.first;
                JobFailure {
                    processes: vec![place],
                    how,
                    why,
                    is_shared: false,
                }
            }
        }
    }
}

/// Formats a list of processes as text: `1`, `1 and 3`, `0, 1 and 3`.
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

    fn report(
        by: u32,
        kind: FailureKind,
        process: u32,
        hash: Option<u128>,
    ) -> (ProcessId, FailureReport) {
        let mut failure = Reported::new(
            kind,
            ProcessId(process),
            9,
            format!("{kind:?} of {process}"),
        );
        // Process 1 finds that process 2 differs.
        failure.other = (kind == Diverged).then_some(ProcessId(2));
        (ProcessId(by), FailureReport { failure, hash })
    }

    /// Returns the text of the cause for a job in which all processes ended with code 1, process 0
    /// first.
    fn cause(processes: usize, reports: &[(ProcessId, FailureReport)]) -> String {
        let ends = vec![ExitKind::Exit(1); processes];
        let first = PlaceEnd {
            place: ProcessId(0),
            how: ExitKind::Exit(1),
        };
        FailedJob {
            first,
            ends: &ends,
            reports,
            unformed: None,
        }
        .cause()
        .to_string()
    }

    fn divergence(processes: usize, hashes: &[(u32, Option<u128>)]) -> String {
        let reports: Vec<_> = hashes
            .iter()
            .map(|(by, hash)| report(*by, Diverged, 1, *hash))
            .collect();
        let said = cause(processes, &reports);
        said.strip_suffix("; Diverged of 1")
            .unwrap_or_else(|| panic!("{said}"))
            .to_owned()
    }

    /// Compares a failure over `why` of process 0, of three that ended with code 1, with errors
    /// as (processes, text), and failures `why` as (by, process at fault). Returns the message and
    /// the texts that are still to be shown.
    fn absorbed(
        why: Option<&str>,
        errors: &[(&[usize], &str)],
        reports: &[(u32, u32)],
    ) -> (String, Vec<String>) {
        let errors = errors.iter().map(|(processes, text)| PrintedError {
            processes: processes.to_vec(),
            text: (*text).to_owned(),
        });
        let errors: Vec<PrintedError> = errors.collect();
        let (processes, how) = (vec![ProcessId(0)], ExitKind::Exit(1));
        let why = why.map(str::to_owned);
        let reports = reports.iter().map(|(by, process)| {
            let (by, mut report) = report(*by, Left, *process, None);
            report.failure.message = why.clone().unwrap_or_default();
            (by, report)
        });
        let (ends, reports) = ([how; 3], reports.collect::<Vec<_>>());
        let first = PlaceEnd {
            place: ProcessId(0),
            how,
        };
        let known = FailedJob {
            first,
            ends: &ends,
            reports: &reports,
            unformed: None,
        };
        let mut failure = JobFailure {
            processes,
            how,
            why,
            is_shared: false,
        };
        failure.absorb(&errors, &known);
        let rest = failure.without_said(errors);
        (
            failure.to_string(),
            rest.into_iter().map(|error| error.text).collect(),
        )
    }

    #[test]
    fn error_of_all_processes_is_shared_unless_it_came_from_one() {
        let all = "all 3 processes failed with exit code 1";
        let first = "process 0 failed first: it ended with exit code 1";
        let shared = [(&[0, 1, 2][..], "Error: no such file\n")];
        assert_eq!(
            absorbed(None, &shared, &[]),
            (format!("{all}: no such file"), vec![])
        );
        let why = "process 0 ended before its program finished: no such file";
        assert_eq!(
            absorbed(Some(why), &shared, &[]),
            (format!("{all}: no such file"), vec![])
        );
        // The others print the failure that they were told.
        let printed = [(&[0, 1, 2][..], "Error: operation 3 failed on process 0\n")];
        let why = "operation 3 failed on process 0";
        let told = [(0, 0), (1, 0), (2, 0)];
        let expected = (format!("{first}; {why}"), vec![]);
        assert_eq!(absorbed(Some(why), &printed, &told), expected);
        // Each has failed before it could hear of another. Process 0 draws on a terminal itself.
        let own = [(0, 0), (1, 1), (2, 2)];
        let expected = (format!("{all}: no GPU"), vec![]);
        for processes in [&[0, 1, 2][..], &[1, 2]] {
            assert_eq!(
                absorbed(Some("no GPU"), &[(processes, "error: no GPU\n")], &own),
                expected
            );
        }
        let panic = "thread 'main' panicked at src/main.rs:1:2:\nno";
        let why = "process 0 panicked before its program finished";
        let expected = (format!("{all}: {panic}"), vec![]);
        let printed = format!("{panic}\n");
        assert_eq!(
            absorbed(Some(why), &[(&[0, 1, 2], &printed)], &own),
            expected
        );
        let of_one = absorbed(Some(why), &[(&[0], &printed)], &told);
        assert_eq!(of_one, (format!("{first}; {why}"), vec![printed]));
        // A program whose result is bad prints no error.
        assert_eq!(absorbed(None, &[], &[]), (all.to_owned(), vec![]));
        assert_eq!(absorbed(None, &[], &told).0, first);
        let different = [
            (&[0][..], "Error: full\n"),
            (&[1, 2][..], "Error: it is gone\n"),
        ];
        assert_eq!(absorbed(None, &different, &[]).0, first);
    }

    #[test]
    fn errors_that_the_cause_contains_are_not_shown_again() {
        let why = "process 0 ended before its program finished: full";
        let printed = [
            (&[0][..], "Error: full\nStack backtrace:\n 0: main\n"),
            (
                &[1],
                "process 1: error: process 0 ended before its program finished: full\n",
            ),
            (&[2], "Error: process 0 is gone\n"),
        ];
        let (message, rest) = absorbed(Some(why), &printed, &[]);
        assert_eq!(
            message,
            format!("process 0 failed first: it ended with exit code 1; {why}")
        );
        assert_eq!(
            rest,
            ["Stack backtrace:\n 0: main\n", "Error: process 0 is gone\n"]
        );
    }

    #[test]
    fn divergence_names_the_minority() {
        let one =
            |process: u32| format!("process {process} failed first: it ended with exit code 1");
        let all = |odd: u32| [0, 1, 2, 3].map(|by| (by, Some(if by == odd { 7 } else { 5 })));
        assert_eq!(divergence(4, &all(2)), one(2));
        assert_eq!(divergence(4, &all(1)), one(1));
        // Process 3 had not reached the operation, so it reports no hash.
        assert_eq!(
            divergence(4, &[(0, Some(5)), (1, Some(5)), (2, Some(7)), (3, None)]),
            one(2)
        );
        assert_eq!(
            divergence(3, &[(0, Some(5)), (1, Some(5)), (2, Some(0))]),
            one(2)
        );
        // Process 2 was ended before it could report.
        assert_eq!(divergence(3, &[(0, Some(5)), (1, Some(5))]), one(2));
        let several = divergence(
            5,
            &[
                (0, Some(5)),
                (1, Some(5)),
                (2, Some(7)),
                (3, Some(5)),
                (4, Some(8)),
            ],
        );
        assert_eq!(several, "processes 2 and 4 failed first");
    }

    #[test]
    fn divergence_without_majority_names_both() {
        let both = "processes 1 and 2 failed first";
        assert_eq!(divergence(3, &[(1, Some(5)), (2, Some(7))]), both);
        assert_eq!(
            divergence(4, &[(0, Some(7)), (1, Some(5)), (2, Some(7)), (3, Some(5))]),
            both
        );
        assert_eq!(divergence(3, &[(0, None), (1, Some(5)), (2, None)]), both);
        // The two that differ sent no report, and are not among those that agree.
        assert_eq!(divergence(5, &[(0, Some(5)), (3, Some(5))]), both);
    }

    #[test]
    fn blame_is_followed_to_its_root() {
        let lost = |by, process| report(by, PeerLost, process, None);
        let said = cause(4, &[lost(0, 3), lost(3, 1), report(2, Kernel, 2, None)]);
        assert_eq!(
            said,
            "process 2 failed first: it ended with exit code 1; Kernel of 2"
        );
        let said = cause(4, &[lost(0, 3), lost(3, 1), report(1, Left, 1, None)]);
        assert_eq!(
            said,
            "process 1 failed first: it ended with exit code 1; Left of 1"
        );
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
        let known = FailedJob {
            first: PlaceEnd {
                place: ProcessId(1),
                how: ends[1],
            },
            ends: &ends,
            reports: &reports,
            unformed: None,
        };
        let expected = "process 1 failed first: it was ended by signal 9 (SIGKILL): by a \
                        user, a scheduler, or the system if memory was full (see dmesg)";
        assert_eq!(known.cause().to_string(), expected);
    }

    #[test]
    fn missing_processes_are_named() {
        let missing = vec![ProcessId(1), ProcessId(2)];
        let peer_timeout = Duration::from_secs(3);
        let unformed = RendezvousError::Missing {
            missing,
            processes: 3,
            peer_timeout,
        };
        let ends = [
            ExitKind::Exit(1),
            ExitKind::Signal(15),
            ExitKind::Signal(15),
        ];
        let of = |first: usize| {
            let first = PlaceEnd {
                place: ProcessId(first as u32),
                how: ExitKind::Exit(4),
            };
            FailedJob {
                first,
                ends: &ends,
                reports: &[],
                unformed: Some(&unformed),
            }
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
        assert_eq!(
            ExitKind::Signal(11).to_string(),
            "it was ended by signal 11 (SIGSEGV)"
        );
        assert_eq!(ExitKind::Signal(15).code(), 143);
        let full = ExitKind::MemoryFull;
        assert_eq!(full.code(), 137);
        assert!(
            full.to_string().contains("because memory was full"),
            "{full}"
        );
    }
}
