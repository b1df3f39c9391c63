//! The rendezvous of a simulated job: the state of a real one, without sockets. All processes are
//! threads of one process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mpmd_ids::block::{Condvar, Mutex, now};

use super::client::Joined;
use super::job::{Action, Job, Link};
use super::protocol::{Answer, Reply, Request};
use super::{Down, Member, RendezvousError};
use crate::wire::ProcessId;

/// The service where the processes of a simulated job meet.
pub struct LocalServer {
    processes: usize,
    table: Mutex<Table>,
    changed: Condvar,
}

struct Table {
    job: Job,
    next: Link,
    answers: BTreeMap<Link, Result<Answer, RendezvousError>>,
    tell: BTreeMap<Link, Arc<dyn Fn(Down) + Send + Sync>>,
}

/// The place of a process in a simulated job. If it is dropped without
/// [`leave`](Self::leave), the process counts as died.
pub struct LocalMember {
    server: Arc<LocalServer>,
    link: Link,
}

impl LocalServer {
    /// Creates the service of a job of `processes`.
    pub fn new(processes: usize, peer_timeout: Duration) -> Arc<Self> {
        let job = Job::new(processes, peer_timeout, now());
        let (answers, tell) = (BTreeMap::new(), BTreeMap::new());
        let table = Mutex::new(Table { job, next: 1, answers, tell });
        Arc::new(Self { processes, table, changed: Condvar::new() })
    }

    /// Joins an epoch of the job: see [`Rendezvous::join_epoch`](super::Rendezvous::join_epoch).
    ///
    /// # Errors
    ///
    /// The errors of [`Rendezvous::join_epoch`](super::Rendezvous::join_epoch).
    pub fn join_epoch(
        self: &Arc<Self>,
        process: ProcessId,
        epoch: u64,
        member: Member,
    ) -> Result<Option<(LocalMember, Joined)>, RendezvousError> {
        let mut table = self.table.lock();
        let link = table.next;
        table.next += 1;
        table.job.opened(link, now());
        let (processes, peer_timeout) = (self.processes as u64, Duration::MAX);
        let join =
            Request::Join { ask: 1, process, processes, epoch, waits: true, peer_timeout, member };
        table.job.said(link, join, now());
        let place = LocalMember { server: self.clone(), link };
        loop {
            let tick = table.tick();
            self.tell(table);
            table = self.table.lock();
            match table.answers.remove(&link) {
                Some(Ok(Answer::Members { process, epoch, members, .. })) => {
                    let members = members.to_vec();
                    return Ok(Some((place, Joined { process, epoch, members })));
                }
                Some(Ok(_)) => return Ok(None),
                Some(Err(error)) => return Err(error),
                None => _ = self.changed.wait_until(&mut table, tick),
            }
        }
    }

    /// Passes on what the job says: answers to the threads that wait, and deaths to the others.
    fn tell(&self, mut table: mpmd_ids::block::MutexGuard<'_, Table>) {
        let mut downs = Vec::new();
        for action in table.job.actions() {
            match action {
                Action::Say(link, Reply::Answer { result, .. }) => {
                    table.answers.insert(link, result);
                }
                Action::Say(link, Reply::Down { process, why }) => {
                    downs.extend(table.tell.get(&link).map(|tell| (tell.clone(), process, why)));
                }
                Action::Say(..) | Action::Close(_) => {}
            }
        }
        drop(table);
        self.changed.notify_all();
        for (tell, process, why) in downs {
            tell(Down::Process(process, why));
        }
    }
}

impl Table {
    /// Lets the job's deadlines end. All clients are awake: a simulated process that stops is found
    /// by its peers. Returns the time of the next call.
    fn tick(&mut self) -> mpmd_ids::block::Instant {
        let now = now();
        (1..self.next).for_each(|link| self.job.said(link, Request::Pong, now));
        self.job.tick(now)
    }
}

impl LocalMember {
    /// Sets the function that is called for every process that dies.
    pub fn on_down(&self, tell: Box<dyn Fn(Down) + Send + Sync>) {
        self.server.table.lock().tell.insert(self.link, Arc::from(tell));
    }

    /// Leaves the job in order, and returns to its next epoch if `returns` is true.
    pub fn leave(self, returns: bool) {
        let mut table = self.server.table.lock();
        table.job.said(self.link, Request::Leave { ask: 2, returns }, now());
        self.server.tell(table);
    }
}

impl Drop for LocalMember {
    fn drop(&mut self) {
        let mut table = self.server.table.lock();
        table.tell.remove(&self.link);
        table.job.closed(self.link, "its process has ended");
        self.server.tell(table);
    }
}
