//! Looks of observers at a job: the status of each process.

use std::collections::BTreeSet;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::{
    MAX_KEY_BYTES, MAX_VALUE_BYTES, ProcessStatus, RequestAnswer, ServerReply,
};
use super::actions::JobActions;
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// Observers' requests for the statuses of all processes that are not complete.
#[derive(Default)]
pub(super) struct Looks {
    open: Vec<OpenLook>,
    /// Number of such requests so far.
    count: u64,
}

/// An observer's request for which the statuses of some processes are still missing.
struct OpenLook {
    number: u64,
    link: Link,
    ask: u64,
    missing: BTreeSet<ProcessId>,
    until: Instant,
}

/// A process, with the connection over which the service can ask for its status.
pub(super) struct StatusSource {
    pub(super) process: ProcessId,
    pub(super) link: Result<Link, StatusAbsence>,
}

/// The reason why the service cannot ask a process for its status.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum StatusAbsence {
    #[error("it runs code of its own, in an epoch that has ended")]
    Busy,
    #[error("it has not joined yet")]
    NotJoined,
    /// The process has left the epoch, for this reason.
    #[error("{0}")]
    Ended(String),
    #[error("it waits for others to join")]
    Waits,
}

/// Longest time that an observer waits for the status of a process.
const LOOK_WITHIN: Duration = Duration::from_secs(1);

impl Looks {
    /// Begins an observer's request, which came from the client `link`. Sends `words` to each
    /// process that is connected, and passes on why the others have no status. Returns the answer
    /// if no status is missing. Fails if `words` do not fit a message.
    pub(super) fn begin(
        &mut self,
        link: Link,
        ask: u64,
        words: &[u8],
        sources: impl Iterator<Item = StatusSource>,
        now: Instant,
        actions: &mut JobActions,
    ) -> Result<Option<RequestAnswer>, RendezvousError> {
        if self.open.iter().any(|look| look.link == link) {
            return Err(RendezvousError::OutOfTurn {
                what: "looking at the job".into(),
                when: "once at a time".into(),
            });
        }
        if words.len() > MAX_VALUE_BYTES {
            return Err(RendezvousError::TooLong {
                what: "the words of a look".into(),
                bytes: words.len(),
                limit: MAX_VALUE_BYTES,
            });
        }

        self.count += 1;
        let mut missing = BTreeSet::new();
        for StatusSource {
            process,
            link: reached,
        } in sources
        {
            match reached {
                Ok(asked) => {
                    missing.insert(process);
                    actions.say(
                        asked,
                        ServerReply::Look {
                            look: self.count,
                            words: words.into(),
                        },
                    );
                }
                Err(absence) => actions.say(
                    link,
                    ServerReply::Status {
                        ask,
                        process,
                        status: Err(absence.to_string()),
                    },
                ),
            }
        }

        if missing.is_empty() {
            return Ok(Some(RequestAnswer::Done));
        }

        let until = after(now, LOOK_WITHIN);
        self.open.push(OpenLook {
            number: self.count,
            link,
            ask,
            missing,
            until,
        });
        Ok(None)
    }

    /// Passes on the status that `process` has sent for the request number `look`.
    pub(super) fn told(
        &mut self,
        process: ProcessId,
        look: u64,
        status: ProcessStatus,
        actions: &mut JobActions,
    ) {
        self.seen(
            process,
            &passed_on(status),
            |open| open.number == look,
            actions,
        );
    }

    /// Tells all observers that wait for the status of `process` that it has ended.
    pub(super) fn ended(&mut self, process: ProcessId, why: &str, actions: &mut JobActions) {
        self.seen(process, &Err(why.to_owned()), |_| true, actions);
    }

    pub(super) fn forget(&mut self, link: Link) {
        self.open.retain(|look| look.link != link);
    }

    pub(super) fn expire(&mut self, now: Instant, actions: &mut JobActions) {
        let late = self.open.iter().filter(|look| now >= look.until);
        let silent: BTreeSet<_> = late.flat_map(|look| look.missing.iter().copied()).collect();
        for process in silent {
            let status = Err(format!("no answer within {LOOK_WITHIN:?}"));
            self.seen(process, &status, |look| now >= look.until, actions);
        }
    }

    pub(super) fn put_off(&mut self, stopped: Duration) {
        self.open
            .iter_mut()
            .for_each(|look| look.until = after(look.until, stopped));
    }

    /// Returns the deadlines of the incomplete requests.
    pub(super) fn due(&self) -> impl Iterator<Item = Instant> {
        self.open.iter().map(|look| look.until)
    }

    /// Passes on the status of `process` to all requests that miss it and for which `is_for`
    /// returns true. Completes the requests that miss no other status.
    fn seen(
        &mut self,
        process: ProcessId,
        status: &ProcessStatus,
        is_for: impl Fn(&OpenLook) -> bool,
        actions: &mut JobActions,
    ) {
        for look in &mut self.open {
            if is_for(look) && look.missing.remove(&process) {
                let reply = ServerReply::Status {
                    ask: look.ask,
                    process,
                    status: status.clone(),
                };
                actions.say(look.link, reply);
            }
        }

        for OpenLook { link, ask, .. } in self.open.extract_if(.., |look| look.missing.is_empty()) {
            actions.answer(link, ask, Ok(RequestAnswer::Done));
        }
    }
}

/// Returns the status, or a reason instead if the status does not fit a message.
fn passed_on(status: ProcessStatus) -> ProcessStatus {
    let (bytes, most) = match &status {
        Ok(status) => (status.len(), MAX_VALUE_BYTES),
        Err(why) => (why.len(), MAX_KEY_BYTES),
    };
    if bytes <= most {
        status
    } else {
        Err(format!("its status has {bytes} bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::protocol::ClientRequest;
    use super::super::tests::{TIME_LIMIT, Table, errors};
    use super::*;

    /// A look as its client sees it: (statuses by process, final answer).
    type Seen = (
        Vec<(u32, ProcessStatus)>,
        Option<Result<RequestAnswer, RendezvousError>>,
    );

    fn seen(said: &[(Link, ServerReply)], to: Link) -> Seen {
        let (mut statuses, mut end) = (Vec::new(), None);
        for (_, reply) in said.iter().filter(|(link, _)| *link == to) {
            assert!(end.is_none(), "nothing follows the end: {reply:?}");
            match reply {
                ServerReply::Status {
                    ask: 3,
                    process,
                    status,
                } => {
                    statuses.push((process.0, status.clone()));
                }
                ServerReply::Answer { ask: 3, result } => end = Some(result.clone()),
                other => panic!("{other:?}"),
            }
        }
        (statuses, end)
    }

    #[test]
    fn observer_sees_each_process_or_the_reason_why_not() {
        let mut table = Table::running(4);
        let observer = 77;
        table.job.opened(observer, table.now);
        table.job.said(
            observer,
            ClientRequest::Look {
                ask: 3,
                words: b"words".into(),
            },
            table.now,
        );
        let look = table.said();
        let asked: Vec<_> = look.iter().map(|(link, _)| *link).collect();
        assert_eq!(asked, [10, 11, 12, 13]);
        let ServerReply::Look { look, words } = &look[0].1 else {
            panic!("{look:?}")
        };
        assert_eq!(words, b"words");
        let look = *look;
        // A second look has to wait for the first. A stranger's status, one for another look and a
        // second one are ignored.
        table.job.said(
            observer,
            ClientRequest::Look {
                ask: 4,
                words: Vec::new(),
            },
            table.now,
        );
        assert!(matches!(
            errors(table.said())[..],
            [(77, RendezvousError::OutOfTurn { .. })]
        ));
        let status = |look, byte| ClientRequest::Status {
            look,
            status: Ok(vec![byte]),
        };
        table.job.said(observer, status(look, 9), table.now);
        table.job.said(11, status(look + 1, 9), table.now);
        table.job.said(11, status(look, 1), table.now);
        table.job.said(11, status(look, 9), table.now);
        let long = ClientRequest::Status {
            look,
            status: Ok(vec![0; MAX_VALUE_BYTES + 1]),
        };
        table.job.said(12, long, table.now);
        table.job.closed(13, "it was killed");
        let said: Vec<_> = table
            .said()
            .into_iter()
            .filter(|(_, reply)| !matches!(reply, ServerReply::Down { .. }))
            .collect();
        let (statuses, end) = seen(&said, observer);
        let long = Err(format!("its status has {} bytes", MAX_VALUE_BYTES + 1));
        assert_eq!(
            statuses,
            [
                (1, Ok(vec![1])),
                (2, long),
                (3, Err("it was killed".into()))
            ]
        );
        assert_eq!(end, None);
        // Process 0 is stopped.
        table.pass(Duration::from_secs(1), &[11, 12, observer]);
        let (statuses, end) = seen(&table.said(), observer);
        assert_eq!(statuses, [(0, Err("no answer within 1s".into()))]);
        assert_eq!(end, Some(Ok(RequestAnswer::Done)));
        // The ended process is known at the next look.
        table.job.said(
            observer,
            ClientRequest::Look {
                ask: 3,
                words: b"words".into(),
            },
            table.now,
        );
        let (statuses, _) = seen(&table.said(), observer);
        assert_eq!(statuses, [(3, Err("it was killed".into()))]);
        // An observer that goes leaves nothing behind.
        table.job.closed(observer, "it was closed");
        assert!(table.job.looks.open.is_empty() && table.job.epochs.present() == 3);
    }

    #[test]
    fn observer_may_stay_without_joining() {
        let mut table = Table::running(1);
        table.job.opened(77, table.now);
        table.job.opened(78, table.now);
        table.job.said(
            77,
            ClientRequest::Look {
                ask: 3,
                words: b"words".into(),
            },
            table.now,
        );
        table.pass(TIME_LIMIT * 10, &[10, 77, 78]);
        let dropped: Vec<_> = table
            .said()
            .into_iter()
            .filter(|(_, reply)| matches!(reply, ServerReply::Dropped { .. }))
            .collect();
        assert!(matches!(dropped[..], [(78, _)]), "{dropped:?}");
        // Without a sign of life it is dropped like any client, and the job runs on.
        table.pass(TIME_LIMIT * 2, &[10]);
        assert!(table.said().iter().any(|(link, reply)| {
            *link == 77 && matches!(reply, ServerReply::Dropped { why } if why.contains("silent"))
        }));
        assert_eq!(table.job.epochs.present(), 1);
    }

    #[test]
    fn look_at_an_incomplete_job_names_the_missing() {
        let mut table = Table::new(2);
        table.join(1, "");
        table.job.opened(77, table.now);
        table.job.said(
            77,
            ClientRequest::Look {
                ask: 3,
                words: b"words".into(),
            },
            table.now,
        );
        let (statuses, end) = seen(&table.said(), 77);
        let [missing, waits] =
            ["it has not joined yet", "it waits for others to join"].map(|why| Err(why.to_owned()));
        assert_eq!(statuses, [(0, missing), (1, waits)]);
        assert_eq!(end, Some(Ok(RequestAnswer::Done)));
        table.pass(TIME_LIMIT, &[11, 77]);
        table.said();
        table.job.said(
            77,
            ClientRequest::Look {
                ask: 3,
                words: b"words".into(),
            },
            table.now,
        );
        let (_, end) = seen(&table.said(), 77);
        assert!(
            matches!(end, Some(Err(RendezvousError::Missing { .. }))),
            "{end:?}"
        );
    }
}
