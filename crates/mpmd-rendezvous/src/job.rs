//! The state of a job, with its members and pending requests: the server without its sockets.
//!
//! Pure: it reads no clock and does no I/O. Four events come in, each with the time: a client has
//! connected ([`JobState::opened`]), has sent a request ([`JobState::said`]), has ended
//! ([`JobState::closed`]), or time has passed ([`JobState::tick`]). [`JobAction`]s go out. The
//! state has four parts, none of which uses another. `JobState` passes events that concern several
//! parts to each of them:
//!
//! - `epochs`: which process has which place, over the epochs of the job.
//! - `values`: the values that processes share.
//! - `barriers`: where processes wait for each other.
//! - `looks`: looks of observers.

mod actions;
mod barriers;
mod epochs;
mod looks;
mod values;

use std::collections::BTreeMap;
use std::time::Duration;

use mpmd_base::block::Instant;

use self::actions::{JobActions, RequestWait, check_name};
use self::barriers::{BarrierArrival, Barriers};
use self::epochs::{EndKind, Epochs, JobEntry, JoinWish};
use self::looks::Looks;
use self::values::SharedValues;
use super::protocol::{ClientRequest, LeaveKind, RequestAnswer, ServerReply};
use super::{Identity, JobMember, JoinedEpoch, RendezvousError};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

pub(super) use self::actions::JobAction;
pub(crate) use self::epochs::EndedProcess;
pub(super) use self::epochs::EpochPhase;

pub(super) struct JobState {
    peer_timeout: Duration,
    ping: Duration,
    clients: BTreeMap<Link, JobClient>,
    epochs: Epochs,
    values: SharedValues,
    barriers: Barriers,
    looks: Looks,
    ticked: Instant,
    actions: JobActions,
}

/// An authenticated connection: its client knows the job's token.
struct JobClient {
    heard: Instant,
    ping_at: Instant,
    join_by: Instant,
}

impl JobState {
    /// Creates the state of a job. `run` is the random identity of this run.
    pub(super) fn new(processes: usize, peer_timeout: Duration, run: u128, now: Instant) -> Self {
        Self::of(
            Epochs::new(processes, peer_timeout, run, now),
            peer_timeout,
            now,
        )
    }

    /// Creates the state of a job that continues after the epoch `past`, which another service
    /// managed. The job was started with `launched` processes. See `epochs::resumed`.
    pub(super) fn resumed(
        launched: usize,
        peer_timeout: Duration,
        past: &JoinedEpoch,
        lives: &[bool],
        now: Instant,
    ) -> Self {
        Self::of(
            Epochs::resumed(launched, peer_timeout, past, lives, now),
            peer_timeout,
            now,
        )
    }

    fn of(epochs: Epochs, peer_timeout: Duration, now: Instant) -> Self {
        Self {
            peer_timeout,
            ping: ping_interval(peer_timeout),
            clients: BTreeMap::new(),
            epochs,
            values: SharedValues::default(),
            barriers: Barriers::default(),
            looks: Looks::default(),
            ticked: now,
            actions: JobActions::default(),
        }
    }

    /// Returns the processes of the job and their epochs, for the server's owner.
    pub(super) fn epochs(&self) -> &Epochs {
        &self.epochs
    }

    /// Records that the process at a place has ended, and that the owner starts no other in its
    /// place.
    pub(super) fn is_not_replaced(&mut self, process: ProcessId, why: String) {
        self.epochs.is_not_replaced(process, why, &mut self.actions);
    }

    /// Records that a process has ended, and that a spare may take its place.
    pub(super) fn place_is_free(&mut self, ended: EndedProcess) {
        self.epochs
            .place_is_free(ended, self.ticked, &mut self.actions);
        self.epochs.dismiss_spares(self.ticked, &mut self.actions);
    }

    /// Records the number of processes that the server's owner may still start for free places.
    pub(super) fn owner_starts(&mut self, count: usize) {
        self.epochs.owner_starts(count, &mut self.actions);
    }

    /// Returns and removes the actions that the server must carry out.
    pub(super) fn actions(&mut self) -> Vec<JobAction> {
        self.actions.take()
    }

    /// Adds a client that has proved that it knows the token. It must join within the peer timeout.
    pub(super) fn opened(&mut self, link: Link, now: Instant) {
        let client = JobClient {
            heard: now,
            ping_at: after(now, self.ping),
            join_by: after(now, self.peer_timeout),
        };
        self.clients.insert(link, client);
    }

    /// Handles the end of a client's connection and drops the client's requests. If the client had
    /// joined, its process counts as dead.
    pub(super) fn closed(&mut self, link: Link, why: &str) {
        if let Some(process) = self.forget(link) {
            self.end(link, process, why, EndKind::Died);
        }
        self.epochs
            .returner_is_gone(link, self.ticked, &mut self.actions);
    }

    /// Handles a client's request.
    pub(super) fn said(&mut self, link: Link, request: ClientRequest, now: Instant) {
        let Some(client) = self.clients.get_mut(&link) else {
            return;
        };
        client.heard = now;

        // No answer yet if a request has to wait.
        let (ask, answer) = match request {
            // The connection answers clock requests itself, without the delay of this queue.
            ClientRequest::Pong | ClientRequest::Clock { .. } => return,
            ClientRequest::Whole => return self.epochs.is_whole(link, &mut self.actions),
            ClientRequest::Join {
                ask,
                process,
                processes,
                epoch,
                identity,
                waits,
                peer_timeout,
                member,
            } => {
                let wait = RequestWait::new(ask, now, peer_timeout);
                // A service that goes on knows nothing but marks.
                let identity = Identity {
                    key: identity.mark(),
                    ..identity
                };
                let wish = JoinWish {
                    process,
                    processes: processes as usize,
                    epoch,
                    identity,
                    waits,
                    leaves: waits && member.leaves,
                };
                let joined = self.join(link, &wish, *member, wait, now);
                (ask, joined.map(|()| None))
            }
            ClientRequest::Set { ask, key, value } => {
                let answer = self.values.set(key, value, &mut self.actions);
                (ask, answer.map(Some))
            }
            ClientRequest::Get {
                ask,
                key,
                peer_timeout,
            } => {
                let wait = RequestWait::new(ask, now, peer_timeout);
                let lost = || self.epochs.lost_for(link);
                (ask, self.values.get(link, key, wait, lost))
            }
            ClientRequest::Barrier {
                ask,
                name,
                peer_timeout,
            } => {
                let wait = RequestWait::new(ask, now, peer_timeout);
                (ask, self.barrier(link, name, wait).map(|()| None))
            }
            ClientRequest::Report { ask, report } => {
                (ask, self.epochs.report(link, report).map(Some))
            }
            ClientRequest::Look { ask, words } => (ask, self.look(link, ask, &words, now)),
            ClientRequest::Status { look, status } => {
                if let Some(process) = self.epochs.place_of(link) {
                    self.looks.told(process, look, status, &mut self.actions);
                }
                return;
            }
            ClientRequest::Leave { ask, how } => return self.leave(link, ask, how, now),
        };

        if let Some(result) = answer.transpose() {
            self.actions.answer(link, ask, result);
        }
    }

    /// Handles a client's request to leave its epoch.
    fn leave(&mut self, link: Link, ask: u64, how: LeaveKind, now: Instant) {
        self.actions.answer(link, ask, Ok(RequestAnswer::Done));
        let mut why = "it has left the job";
        let how = match how {
            LeaveKind::Ends => {
                self.epochs.ends_well(link, now, &mut self.actions);
                EndKind::Left
            }
            LeaveKind::Leaves => EndKind::Left,
            LeaveKind::Returns => EndKind::Returns,
            LeaveKind::GivesBack(refusal) => {
                self.epochs.gives_up(link);
                self.epochs.note_refusal(link, refusal);
                why = "it has given its place back";
                EndKind::Died
            }
        };

        let place = match how {
            EndKind::Returns => self.await_return(link, now),
            _ => {
                self.actions.close(link);
                self.forget(link)
            }
        };
        if let Some(process) = place {
            self.end(link, process, why, how);
        }
    }

    /// Lets a client leave its epoch, and awaits its process in the next one. The connection stays
    /// until then: its end is that of the process. Returns the place of the process in its epoch,
    /// if it had joined.
    fn await_return(&mut self, link: Link, now: Instant) -> Option<ProcessId> {
        self.forget_requests(link);
        if let Some(client) = self.clients.get_mut(&link) {
            client.join_by = after(now, self.peer_timeout);
        }
        self.epochs.leaves_to_return(link)
    }

    /// Sends due pings, drops silent clients, and fails expired requests. Returns the time of the
    /// next call.
    pub(super) fn tick(&mut self, now: Instant) -> Instant {
        self.watch(now);
        self.epochs.tick(now, &mut self.actions);
        self.values.expire(now, &mut self.actions);
        self.barriers
            .expire(now, self.epochs.places(), &mut self.actions);
        self.looks.expire(now, &mut self.actions);

        let requests = self
            .values
            .due()
            .chain(self.barriers.due())
            .chain(self.looks.due());
        // Often enough for pings even if nothing else is due, and to notice that the server was
        // stopped.
        requests
            .chain(self.epochs.due())
            .fold(after(now, self.ping), Instant::min)
    }

    /// Sends pings, and drops clients that no longer answer.
    fn watch(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.ticked);
        self.ticked = now;
        if passed > self.ping.saturating_mul(2) {
            self.put_off(passed, now);
        }

        let mut silent = Vec::new();
        for (&link, client) in &mut self.clients {
            if now.saturating_duration_since(client.heard) > self.peer_timeout {
                silent.push((
                    link,
                    format!("it has been silent for {:?}", self.peer_timeout),
                ));
            } else if !self.epochs.has_joined(link) && now >= client.join_by {
                silent.push((
                    link,
                    format!("it has not joined within {:?}", self.peer_timeout),
                ));
            } else if now >= client.ping_at {
                client.ping_at = after(now, self.ping);
                self.actions.say(link, ServerReply::Ping);
            }
        }

        for (link, why) in silent {
            self.actions
                .say(link, ServerReply::Dropped { why: why.clone() });
            self.actions.close(link);
            self.epochs.gives_up(link);
            self.closed(link, &why);
        }
    }

    /// Extends all deadlines by the time in which the server was stopped, for example by Ctrl-Z or
    /// a suspended machine. Its clients were most likely stopped too, so none of them counts as
    /// silent or late.
    fn put_off(&mut self, stopped: Duration, now: Instant) {
        for client in self.clients.values_mut() {
            client.heard = now;
            client.join_by = after(client.join_by, stopped);
        }
        self.epochs.put_off(stopped);
        self.values.put_off(stopped);
        self.barriers.put_off(stopped);
        self.looks.put_off(stopped);
    }

    fn join(
        &mut self,
        link: Link,
        wish: &JoinWish,
        member: JobMember,
        wait: RequestWait,
        now: Instant,
    ) -> Result<(), RendezvousError> {
        self.epochs.check(wish, &member)?;
        if let Some(first) = self.epochs.begins_next(wish) {
            self.epochs.tell_over(first, &mut self.actions);
            self.fail_gets(first, "it has gone on to the next epoch");
            self.epochs.begin_next(now);
            let error = |name| RendezvousError::OutOfTurn {
                what: format!("barrier {name:?}"),
                when: "in an epoch that goes on".into(),
            };
            self.barriers.fail(error, &mut self.actions);
        }

        let entry = self
            .epochs
            .join(link, wish, member, wait, now, &mut self.actions)?;
        if let Some(left) = self.epochs.has_returned(wish.identity.key, link) {
            self.clients.remove(&left);
            self.actions.close(left);
        }
        if matches!(entry, JobEntry::HasPlace { .. }) && wish.waits {
            self.actions.say(link, ServerReply::Place);
        }

        match entry {
            JobEntry::HasPlace { instead_of: None } => {}
            JobEntry::HasPlace {
                instead_of: Some(before),
            } => {
                self.forget(before);
                self.actions.close(before);
            }
            JobEntry::Waits => self.stays(link, now),
        }
        Ok(())
    }

    fn barrier(
        &mut self,
        link: Link,
        name: String,
        wait: RequestWait,
    ) -> Result<(), RendezvousError> {
        check_name("the name of a barrier", &name)?;
        let process = self.epochs.place_at_barrier(link, &name)?;
        let count = self.epochs.places();
        let arrival = BarrierArrival {
            process,
            link,
            wait,
        };
        self.barriers
            .arrive(arrival, name, count, &mut self.actions)
    }

    fn look(
        &mut self,
        link: Link,
        ask: u64,
        words: &[u8],
        now: Instant,
    ) -> Result<Option<RequestAnswer>, RendezvousError> {
        let statuses = self.epochs.statuses()?;
        let answer = self
            .looks
            .begin(link, ask, words, statuses, now, &mut self.actions)?;
        self.stays(link, now);
        Ok(answer)
    }

    /// Exempts a client from the deadline for joining: it may stay as long as the job runs.
    fn stays(&mut self, link: Link, now: Instant) {
        if let Some(client) = self.clients.get_mut(&link) {
            client.join_by = after(now, Duration::MAX);
        }
    }

    /// Removes a client and its pending requests. Returns the number of its process, if it had
    /// joined.
    fn forget(&mut self, link: Link) -> Option<ProcessId> {
        self.forget_requests(link);
        self.clients.remove(&link);
        self.epochs.forget(link, &mut self.actions)
    }

    fn forget_requests(&mut self, link: Link) {
        self.values.forget(link);
        self.barriers.forget(link);
        self.looks.forget(link);
    }

    /// Handles the end of a process. If its epoch is running, fails all requests that wait for the
    /// process. If it died, or has left the epoch to join the next one, tells the others.
    fn end(&mut self, link: Link, process: ProcessId, why: &str, how: EndKind) {
        let epoch_runs = self
            .epochs
            .end(link, process, why, how, self.ticked, &mut self.actions);
        if !epoch_runs {
            return;
        }

        self.looks.ended(process, why, &mut self.actions);
        if how == EndKind::Died {
            for other in self.epochs.joined() {
                self.actions.say(
                    other,
                    ServerReply::Down {
                        process,
                        why: why.to_owned(),
                    },
                );
            }
        }
        if how == EndKind::Returns {
            // Its peers may not hear it from the process itself, which perhaps has not connected.
            self.epochs.tell_over(process, &mut self.actions);
        }
        if how != EndKind::Left {
            self.fail_gets(process, why);
        }

        let error = |name| RendezvousError::BarrierBroken {
            name,
            process,
            why: why.to_owned(),
        };
        self.barriers.fail(error, &mut self.actions);
        self.epochs.dismiss_spares(self.ticked, &mut self.actions);
    }

    /// Fails requests of this epoch's processes for values that will never be set.
    fn fail_gets(&mut self, process: ProcessId, why: &str) {
        let is_of_epoch = |link| self.epochs.has_joined(link);
        self.values
            .fail(is_of_epoch, process, why, &mut self.actions);
    }
}

/// Returns the interval of pings to clients: several within `peer_timeout`, and at least one per
/// second.
pub(super) fn ping_interval(peer_timeout: Duration) -> Duration {
    (peer_timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

#[cfg(test)]
mod tests;
