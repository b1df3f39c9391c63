//! The barriers at which the processes of an epoch wait for each other.

use std::collections::BTreeMap;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::RequestAnswer;
use super::actions::{JobActions, RequestWait, processes};
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// The processes that wait at each barrier, by the barrier's name.
#[derive(Default)]
pub(super) struct Barriers(BTreeMap<String, Vec<BarrierArrival>>);

/// A process that waits at a barrier.
pub(super) struct BarrierArrival {
    pub(super) process: ProcessId,
    pub(super) link: Link,
    pub(super) wait: RequestWait,
}

impl Barriers {
    /// Adds a process to a barrier. Once `count` processes have arrived, answers all of them.
    pub(super) fn arrive(
        &mut self,
        arrival: BarrierArrival,
        name: String,
        count: usize,
        actions: &mut JobActions,
    ) -> Result<(), RendezvousError> {
        let arrivals = self.0.entry(name.clone()).or_default();
        if arrivals
            .iter()
            .any(|other| other.process == arrival.process)
        {
            return Err(RendezvousError::OutOfTurn {
                what: format!("waiting at barrier {name:?}"),
                when: "once at a time".into(),
            });
        }

        arrivals.push(arrival);
        if arrivals.len() == count {
            for arrival in self.0.remove(&name).into_iter().flatten() {
                actions.answer(arrival.link, arrival.wait.ask, Ok(RequestAnswer::Done));
            }
        }
        Ok(())
    }

    /// Fails all pending requests. `error` returns the error for a barrier's name.
    pub(super) fn fail(
        &mut self,
        error: impl Fn(String) -> RendezvousError,
        actions: &mut JobActions,
    ) {
        for (name, arrivals) in std::mem::take(&mut self.0) {
            for BarrierArrival { link, wait, .. } in arrivals {
                actions.answer(link, wait.ask, Err(error(name.clone())));
            }
        }
    }

    pub(super) fn forget(&mut self, link: Link) {
        for arrivals in self.0.values_mut() {
            arrivals.retain(|arrival| arrival.link != link);
        }
        self.0.retain(|_, arrivals| !arrivals.is_empty());
    }

    /// Fails expired requests. The error names the processes, of the job's `count`, that have not
    /// arrived.
    pub(super) fn expire(&mut self, now: Instant, count: usize, actions: &mut JobActions) {
        for (name, arrivals) in &mut self.0 {
            if !arrivals.iter().any(|arrival| now >= arrival.wait.until) {
                continue;
            }

            // Computed before arrivals that have timed out are removed: two processes that time out
            // at the same moment are not missing to each other.
            let missing: Vec<ProcessId> = processes(count)
                .filter(|&process| arrivals.iter().all(|arrival| arrival.process != process))
                .collect();
            for BarrierArrival { link, wait, .. } in
                arrivals.extract_if(.., |a| now >= a.wait.until)
            {
                let error = RendezvousError::Barrier {
                    name: name.clone(),
                    missing: missing.clone(),
                    processes: count,
                    peer_timeout: wait.peer_timeout,
                };
                actions.answer(link, wait.ask, Err(error));
            }
        }
        self.0.retain(|_, arrivals| !arrivals.is_empty());
    }

    pub(super) fn put_off(&mut self, stopped: Duration) {
        self.0
            .values_mut()
            .flatten()
            .for_each(|arrival| arrival.wait.put_off(stopped));
    }

    /// Returns the deadlines of the requests that wait at barriers.
    pub(super) fn due(&self) -> impl Iterator<Item = Instant> {
        self.0.values().flatten().map(|arrival| arrival.wait.until)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::protocol::ServerReply;
    use super::super::tests::{TIME_LIMIT, Table, errors};
    use super::*;

    #[test]
    fn late_barrier_names_missing_and_can_be_retried() {
        let mut table = Table::running(3);
        table.barrier(10, Duration::from_secs(5));
        table.barrier(12, Duration::from_secs(9));
        table.pass(Duration::from_secs(6), &[10, 11, 12]);
        let error = RendezvousError::Barrier {
            name: "b".into(),
            missing: vec![ProcessId(1)],
            processes: 3,
            peer_timeout: Duration::from_secs(5),
        };
        assert_eq!(errors(table.said()), [(10, error)]);
        table.barrier(10, Duration::from_secs(5));
        table.barrier(11, Duration::from_secs(5));
        let said = table.said();
        assert_eq!(said.len(), 3);
        assert!(errors(said).is_empty());
    }

    #[test]
    fn barrier_breaks_when_a_process_is_gone() {
        let mut table = Table::running(3);
        table.barrier(10, TIME_LIMIT);
        table.job.closed(11, "connection reset");
        let said = table.said();
        assert!(said.contains(&(
            12,
            ServerReply::Down {
                process: ProcessId(1),
                why: "connection reset".into()
            }
        )));
        let broken = |said| {
            matches!(
                &errors(said)[..],
                [(10, RendezvousError::BarrierBroken { .. })]
            )
        };
        assert!(broken(said));
        table.barrier(10, TIME_LIMIT);
        assert!(broken(table.said()));
    }

    #[test]
    fn process_that_waits_cannot_come_again() {
        let mut table = Table::running(2);
        table.barrier(10, TIME_LIMIT);
        table.barrier(10, TIME_LIMIT);
        assert!(matches!(
            errors(table.said())[..],
            [(10, RendezvousError::OutOfTurn { .. })]
        ));
        table.barrier(11, TIME_LIMIT);
        let heard: Vec<Link> = table.said().into_iter().map(|(link, _)| link).collect();
        assert_eq!(heard, [10, 11], "the first request still waits");
    }
}
