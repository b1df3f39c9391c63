//! The values that processes share, and the requests that wait for one.

use std::collections::HashMap;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::{MAX_VALUE_BYTES, RequestAnswer};
use super::actions::{JobActions, RequestWait, check_name};
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// The values that processes have set, by key, over all epochs of the job.
#[derive(Default)]
pub(super) struct SharedValues {
    values: HashMap<String, Vec<u8>>,
    gets: Vec<PendingGet>,
}

struct PendingGet {
    link: Link,
    key: String,
    wait: RequestWait,
}

impl SharedValues {
    /// Sets a value, and answers the requests that wait for it.
    pub(super) fn set(
        &mut self,
        key: String,
        value: Vec<u8>,
        actions: &mut JobActions,
    ) -> Result<RequestAnswer, RendezvousError> {
        check_name("a key", &key)?;
        if value.len() > MAX_VALUE_BYTES {
            return Err(RendezvousError::TooLong {
                what: format!("the value of {key:?}"),
                bytes: value.len(),
                limit: MAX_VALUE_BYTES,
            });
        }

        for PendingGet { link, wait, .. } in self.gets.extract_if(.., |get| get.key == key) {
            actions.answer(link, wait.ask, Ok(RequestAnswer::Value(value.clone())));
        }
        self.values.insert(key, value);
        Ok(RequestAnswer::Done)
    }

    /// Returns a value, or `None` if the request must wait for it. `lost` returns the process, with
    /// the reason, because of which the value will never be set.
    pub(super) fn get(
        &mut self,
        link: Link,
        key: String,
        wait: RequestWait,
        lost: impl FnOnce() -> Option<(ProcessId, String)>,
    ) -> Result<Option<RequestAnswer>, RendezvousError> {
        // No process can set such a key, and an answer that contains it would not fit a message.
        check_name("a key", &key)?;
        if let Some(value) = self.values.get(&key) {
            return Ok(Some(RequestAnswer::Value(value.clone())));
        }

        if let Some((process, why)) = lost() {
            return Err(RendezvousError::NeverSet { key, process, why });
        }
        self.gets.push(PendingGet { link, key, wait });
        Ok(None)
    }

    /// Fails pending requests of the clients for which `is_of_epoch` returns true. `process` was
    /// lost, so their values will never be set.
    pub(super) fn fail(
        &mut self,
        is_of_epoch: impl Fn(Link) -> bool,
        process: ProcessId,
        why: &str,
        actions: &mut JobActions,
    ) {
        for PendingGet { link, key, wait } in self.gets.extract_if(.., |get| is_of_epoch(get.link))
        {
            let error = RendezvousError::NeverSet {
                key,
                process,
                why: why.to_owned(),
            };
            actions.answer(link, wait.ask, Err(error));
        }
    }

    pub(super) fn forget(&mut self, link: Link) {
        self.gets.retain(|get| get.link != link);
    }

    pub(super) fn expire(&mut self, now: Instant, actions: &mut JobActions) {
        for PendingGet { link, key, wait } in self.gets.extract_if(.., |get| now >= get.wait.until)
        {
            let error = RendezvousError::Unset {
                key,
                peer_timeout: wait.peer_timeout,
            };
            actions.answer(link, wait.ask, Err(error));
        }
    }

    pub(super) fn put_off(&mut self, stopped: Duration) {
        self.gets
            .iter_mut()
            .for_each(|get| get.wait.put_off(stopped));
    }

    /// Returns the deadlines of the requests that wait for a value.
    pub(super) fn due(&self) -> impl Iterator<Item = Instant> {
        self.gets.iter().map(|get| get.wait.until)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::protocol::{ClientRequest, LeaveKind, ServerReply};
    use super::super::tests::{TIME_LIMIT, Table};
    use super::*;

    #[test]
    fn set_answers_pending_get_and_leave_is_not_down() {
        let mut table = Table::running(2);
        table.job.said(
            10,
            ClientRequest::Get {
                ask: 3,
                key: "k".into(),
                peer_timeout: TIME_LIMIT,
            },
            table.now,
        );
        table.job.said(
            11,
            ClientRequest::Set {
                ask: 4,
                key: "k".into(),
                value: vec![1],
            },
            table.now,
        );
        let said = table.said();
        assert_eq!(
            said[0],
            (
                10,
                ServerReply::Answer {
                    ask: 3,
                    result: Ok(RequestAnswer::Value(vec![1]))
                }
            )
        );
        table.job.said(
            11,
            ClientRequest::Leave {
                ask: 5,
                how: LeaveKind::Ends,
            },
            table.now,
        );
        table.job.closed(11, "connection closed");
        assert_eq!(
            table.said(),
            [(
                11,
                ServerReply::Answer {
                    ask: 5,
                    result: Ok(RequestAnswer::Done)
                }
            )]
        );
        assert_eq!(table.job.epochs.present(), 1);
    }

    #[test]
    fn too_long_value_is_refused_and_sets_nothing() {
        let (mut values, mut actions) = (SharedValues::default(), JobActions::default());
        let wait = RequestWait::new(3, Instant::now(), TIME_LIMIT);
        assert_eq!(values.get(10, "k".into(), wait, || None), Ok(None));
        let refused = values.set("k".into(), vec![0; MAX_VALUE_BYTES + 1], &mut actions);
        assert!(matches!(refused, Err(RendezvousError::TooLong { .. })));
        assert_eq!((actions.take().len(), values.due().count()), (0, 1));
    }
}
