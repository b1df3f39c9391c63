//! Tells a job that the user has stopped from one that has failed.

use std::io::{self, ErrorKind};
use std::time::Instant;

use mpmd_base::{ProcessId, StopRequest, StopRequests};
use mpmd_rendezvous::FailureReport;
use rustix::process::Signal;

use super::job_failure::ExitKind;
use super::output::say;

/// The requests to end the job: by the user's signals, or because its output cannot be written.
#[derive(Debug, Default)]
pub(super) struct JobStop {
    /// The signals that the launcher received, and SIGPIPE if the output cannot be written.
    signals: Vec<Signal>,
    /// Recent requests by SIGINT and SIGTERM, to recognise repeats of one request.
    requests: StopRequests,
    has_no_output: bool,
}

impl JobStop {
    /// Records a request to end the job. Ignored if the job has already failed.
    pub(super) fn ask(&mut self, signal: Signal, has_failed: bool) {
        if !has_failed {
            self.signals.push(signal);
        }
    }

    /// True if a signal that arrives at `now` must be forwarded to the processes. False if it
    /// repeats the previous SIGINT or SIGTERM: a second one would end processes that are saving.
    pub(super) fn is_new(&mut self, signal: Signal, now: Instant) -> bool {
        ![Signal::INT, Signal::TERM].contains(&signal)
            || self.requests.take(now) != StopRequest::Same
    }

    /// Records that the job's output cannot be written. Prints the error, unless the reader has
    /// closed the output or an earlier call has printed it. Returns true if the job was not ending
    /// yet.
    pub(super) fn lose_output(&mut self, error: &io::Error, has_failed: bool) -> bool {
        let is_first = !std::mem::replace(&mut self.has_no_output, true);
        if is_first && error.kind() != ErrorKind::BrokenPipe {
            say(format!(
                "the job ends: its output cannot be written: {error}"
            ));
        }
        let must_ask = !has_failed && self.signals.is_empty();
        self.ask(Signal::PIPE, has_failed);
        must_ask
    }

    /// Returns the signal of the first request to end the job.
    pub(super) fn signal(&self) -> Option<Signal> {
        self.signals.first().copied()
    }

    /// True if a stop request, or the end of another process, explains the end of the process at
    /// `place`. `reports` are by place. If `may_be_killed`, SIGKILL is explained too. SIGTERM
    /// always is, since the launcher sends it.
    pub(super) fn explains(
        &self,
        place: usize,
        end: ExitKind,
        reports: &[(ProcessId, FailureReport)],
        may_be_killed: bool,
    ) -> bool {
        let is_asked = |by: i32| {
            let own = [Signal::TERM]
                .into_iter()
                .chain(may_be_killed.then_some(Signal::KILL));
            own.chain(self.signals.iter().copied())
                .any(|signal| signal.as_raw() == by)
        };

        match end {
            ExitKind::Exit(code) => code == 0 || is_asked(code - 128) || is_told(reports, place),
            ExitKind::Signal(by) => is_asked(by),
            ExitKind::MemoryFull => false,
            ExitKind::Killed => true,
        }
    }
}

/// True if the process at this place has reported failures of other processes, but none of its own.
pub(super) fn is_told(reports: &[(ProcessId, FailureReport)], place: usize) -> bool {
    let mut own = reports
        .iter()
        .filter(|(by, _)| by.index() == place)
        .peekable();
    own.peek().is_some() && own.all(|(by, report)| report.failure.process != *by)
}

#[cfg(test)]
mod tests {
    use ExitKind::{Exit, Signal as Killed};
    use mpmd_proto::{Failure, FailureKind};

    use super::*;

    /// Returns for two processes that have ended so if SIGUSR1 and then Ctrl-C explain it. Reports
    /// are (by, process at fault).
    fn explained(ends: [ExitKind; 2], reports: &[(u32, u32)]) -> [bool; 2] {
        let mut stop = JobStop::default();
        stop.ask(Signal::USR1, false);
        stop.ask(Signal::INT, false);
        assert_eq!(stop.signal(), Some(Signal::USR1));
        let reports = reports.iter().map(|(by, process)| {
            let failure = Failure::new(FailureKind::Left, ProcessId(*process), 9, "");
            (
                ProcessId(*by),
                FailureReport {
                    failure,
                    hash: None,
                },
            )
        });
        let reports: Vec<_> = reports.collect();
        [0, 1].map(|place| stop.explains(place, ends[place], &reports, false))
    }

    #[test]
    fn failure_after_a_stop_is_told_from_the_stop() {
        assert_eq!(explained([Exit(0), Exit(130)], &[]), [true, true]);
        assert_eq!(explained([Exit(138), Killed(2)], &[]), [true, true]);
        assert_eq!(explained([Killed(15), Exit(1)], &[(1, 0)]), [true, true]);
        assert_eq!(explained([Exit(130), Exit(1)], &[]), [true, false]);
        assert_eq!(explained([Killed(11), Exit(0)], &[]), [false, true]);
        // Both could not save, and process 1 alone.
        assert_eq!(
            explained([Exit(1), Exit(1)], &[(0, 0), (1, 1)]),
            [false, false]
        );
        assert_eq!(
            explained([Exit(1), Exit(1)], &[(0, 1), (1, 1)]),
            [true, false]
        );
        assert_eq!(
            explained([Exit(130), Exit(1)], &[(1, 0), (1, 1)]),
            [true, false]
        );
    }

    #[test]
    fn first_signal_of_a_request_is_passed_on() {
        let (start, mut stop) = (Instant::now(), JobStop::default());
        let mut is_new =
            |signal, seconds| stop.is_new(signal, start + std::time::Duration::from_secs(seconds));
        let found = [
            is_new(Signal::USR1, 0),
            is_new(Signal::TERM, 0),
            is_new(Signal::INT, 1),
            is_new(Signal::HUP, 1),
            is_new(Signal::TERM, 2),
        ];
        assert_eq!(found, [true, true, false, true, true]);
    }

    #[test]
    fn sigkill_is_a_failure_unless_the_launcher_sent_it() {
        let mut stop = JobStop::default();
        stop.ask(Signal::INT, false);
        assert!(stop.explains(1, Killed(9), &[], true) && !stop.explains(1, Killed(9), &[], false));
    }

    #[test]
    fn lost_output_asks_once_and_never_after_a_failure() {
        let error = || io::Error::from(ErrorKind::BrokenPipe);
        let mut stop = JobStop::default();
        assert_eq!(
            [(); 2].map(|()| stop.lose_output(&error(), false)),
            [true, false]
        );
        assert_eq!(stop.signal(), Some(Signal::PIPE));
        let mut stop = JobStop::default();
        stop.ask(Signal::INT, false);
        assert!(!stop.lose_output(&error(), false));
        assert_eq!(stop.signal(), Some(Signal::INT));
        let mut stop = JobStop::default();
        assert!(!stop.lose_output(&error(), true));
        stop.ask(Signal::INT, true);
        assert_eq!(stop.signal(), None);
    }
}
