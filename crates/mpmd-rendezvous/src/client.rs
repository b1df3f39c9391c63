//! A process's side of the rendezvous: its connection to the server.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::clock_offset::{ClockOffset, ClockTrip, clock, quickest};
use super::connect::is_gone;
use super::connection::{ServerConnection, open};
use super::protocol::{self, ClientRequest, LeaveKind, RequestAnswer};
use super::{
    Down, FailureReport, Identity, JobMember, JoinConfig, JoinedEpoch, RendezvousError,
    ServiceParting, Succession,
};
use mpmd_proto::wire::ProcessId;

/// This process's connection to the job's [`RendezvousServer`](super::RendezvousServer). Any thread
/// may call its methods. A method that sends a request to the server blocks, for a limited time.
///
/// If this is dropped without [`leave`](Self::leave), the server counts the process as dead and
/// informs the others.
pub struct Rendezvous {
    pub(super) link: Arc<ServerConnection>,
    pub(super) config: JoinConfig,
    /// The local address of the connection.
    pub(super) local: SocketAddr,
    pub(super) clock_offset: i64,
}

/// Time limit for reporting a failure to the server. It is short because a failing process must not
/// hang in the report.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

/// The reason for the loss of a process that has left the epoch.
const LEFT_EPOCH: &str = "it has left the epoch, which is over";

/// Time limit for the server's answer when this process leaves. The request is sent even if no
/// answer comes.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

impl Rendezvous {
    /// Connects to the server, which may start later, and compares this process's clock with the
    /// server's. Starts a thread that reads the connection.
    ///
    /// # Errors
    ///
    /// - [`Unreachable`](RendezvousError::Unreachable) after `peer_timeout`.
    /// - [`Token`](RendezvousError::Token), [`Version`](RendezvousError::Version) or
    ///   [`Stranger`](RendezvousError::Stranger) if the handshake with the server fails.
    /// - [`ServerGone`](RendezvousError::ServerGone) or
    ///   [`Environment`](RendezvousError::Environment) if the connection fails.
    pub fn connect(config: JoinConfig) -> Result<Self, RendezvousError> {
        Self::open(config, false)
    }

    /// Connects to a server that has been running before, as [`connect`](Self::connect) does. Fails
    /// at once if no process listens at its address.
    ///
    /// # Errors
    ///
    /// The errors of [`connect`](Self::connect). [`Unreachable`](RendezvousError::Unreachable) at
    /// once if the server is gone.
    pub fn connect_again(config: JoinConfig) -> Result<Self, RendezvousError> {
        Self::open(config, true)
    }

    fn open(config: JoinConfig, is_started: bool) -> Result<Self, RendezvousError> {
        let (link, local) = open(&config, is_started)?;
        let mut this = Self {
            link,
            config,
            local,
            clock_offset: 0,
        };
        this.clock_offset = this.compare_clocks()?.offset;
        Ok(this)
    }

    /// Returns the local address of the connection. At least the server, and most likely the job's
    /// other hosts, can reach this process at it.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Returns the nanoseconds to add to this process's clock (time since 1970) to get the server's
    /// time.
    ///
    /// [`connect`](Self::connect) measures it, from the quickest of a few round trips.
    pub fn clock_offset(&self) -> i64 {
        self.clock_offset
    }

    /// Joins the job's first epoch and waits for all other processes, for at most the configured
    /// `peer_timeout` plus two seconds.
    ///
    /// # Errors
    ///
    /// [`NoSuchProcess`](RendezvousError::NoSuchProcess) if this process's number is not below the
    /// number of processes. [`Missing`](RendezvousError::Missing) if other processes do not join in
    /// time. [`Duplicate`](RendezvousError::Duplicate), [`Count`](RendezvousError::Count),
    /// [`Complete`](RendezvousError::Complete) or [`Program`](RendezvousError::Program), each with
    /// the processes concerned. [`ServerGone`](RendezvousError::ServerGone) if the connection has
    /// ended.
    pub fn join(&self, member: JobMember) -> Result<JoinedEpoch, RendezvousError> {
        let JoinConfig {
            process, processes, ..
        } = self.config;
        if process.index() >= processes {
            return Err(RendezvousError::NoSuchProcess { process, processes });
        }

        match self.ask_to_join(member, 1, Identity::random()?, false)? {
            (_, Some(joined)) => Ok(joined),
            (answer, None) => Err(self.link.senseless(&answer)),
        }
    }

    /// Joins an epoch of the job: epoch 1 at first, and the next epoch after the loss of a process.
    /// In later epochs the server recognises this process by `identity`. Waits for all other
    /// processes, as [`join`](Self::join) does. Waits longer for a process that is alive and has
    /// not left the previous epoch, see [`on_busy`](Self::on_busy).
    ///
    /// A process without a place (a process number) in the job waits as a spare, for as long as the
    /// job runs. This happens to a process with a number beyond the job's, to one that was started
    /// later, and to one that the server has given up meanwhile. A spare gets the place of a
    /// process that is gone. Returns `None` if the job ends without it. Also returns `None` on a
    /// process that [leaves](JobMember::leaves) once the job no longer needs it.
    ///
    /// A later epoch may have another number of processes, if [`JobMember::sizes`] allows it. It
    /// has fewer if no spare is left for a free place; then processes get new numbers, in the same
    /// order. It has more if spares wait: these get the numbers after those of the others.
    ///
    /// # Errors
    ///
    /// The errors of [`join`](Self::join), except `NoSuchProcess` and `Complete`.
    /// [`OtherRun`](RendezvousError::OtherRun) if the server belongs to another run of the job.
    pub fn join_epoch(
        &self,
        member: JobMember,
        epoch: u64,
        identity: Identity,
    ) -> Result<Option<JoinedEpoch>, RendezvousError> {
        match self.ask_to_join(member, epoch, identity, true)? {
            (_, Some(joined)) => Ok(Some(joined)),
            (RequestAnswer::Done, None) => Ok(None),
            (answer, None) => Err(self.link.senseless(&answer)),
        }
    }

    /// Sends a request to join. Returns the server's answer, and the epoch if the answer admits the
    /// process.
    fn ask_to_join(
        &self,
        member: JobMember,
        epoch: u64,
        identity: Identity,
        waits: bool,
    ) -> Result<(RequestAnswer, Option<JoinedEpoch>), RendezvousError> {
        let JoinConfig {
            process,
            processes,
            peer_timeout,
            ..
        } = self.config;

        let processes = processes as u64;
        let join = |ask| ClientRequest::Join {
            ask,
            process,
            processes,
            epoch,
            identity,
            waits,
            peer_timeout,
            member: Box::new(member),
        };

        // A spare may wait for as long as the job runs.
        let answer_within = if waits { Duration::MAX } else { peer_timeout };
        let answer = self.link.ask(answer_within, join)?.answer;

        let joined = match &answer {
            &RequestAnswer::Members {
                process,
                epoch,
                run,
                ref members,
                standing,
                ..
            } if (epoch > 1 || members.len() as u64 == processes)
                && process.index() < members.len() =>
            {
                Some(JoinedEpoch {
                    process,
                    epoch,
                    run,
                    members: members.to_vec(),
                    standing,
                })
            }
            _ => None,
        };
        Ok((answer, joined))
    }

    /// Returns the number of processes that the next epoch of the job could have. It is larger than
    /// that of this epoch if [`JobMember::sizes`] allows it and processes wait for a place. The
    /// server informs only process 0.
    pub fn could_have(&self) -> usize {
        self.link.state.lock().next_processes
    }

    /// Returns the number of processes that could replace processes of this epoch: spares, and
    /// processes that the server's owner may start. The server informs only process 0.
    pub fn replacements(&self) -> usize {
        self.link.state.lock().replacements
    }

    /// Tells the server that all processes have completed a commit of this epoch. Processes that
    /// [leave](JobMember::leaves) the job are then no longer needed. Does not wait for an answer.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if the connection has ended.
    pub fn commit_is_whole(&self) -> Result<(), RendezvousError> {
        self.link.state.lock().is_whole = true;
        self.link.send(ClientRequest::Whole)
    }

    /// Returns true if this process knows that all processes have [completed a
    /// commit](Self::commit_is_whole) of this epoch.
    pub fn has_whole_commit(&self) -> bool {
        self.link.state.lock().is_whole
    }

    /// Sets the value of `key`, which all processes can [`get`](Self::get). Replaces an earlier
    /// value. Blocks until the server answers.
    ///
    /// # Errors
    ///
    /// [`TooLong`](RendezvousError::TooLong) if the value is longer than
    /// [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES), or the key than 1024 bytes.
    /// [`ServerGone`](RendezvousError::ServerGone) if the connection has ended or the server is
    /// silent.
    pub fn set(&self, key: impl Into<String>, value: Vec<u8>) -> Result<(), RendezvousError> {
        let key = key.into();
        if value.len() > protocol::MAX_VALUE_BYTES {
            let what = format!("the value of {key:?}");
            return Err(RendezvousError::TooLong {
                what,
                bytes: value.len(),
                limit: protocol::MAX_VALUE_BYTES,
            });
        }

        self.link
            .ask(self.config.peer_timeout, |ask| ClientRequest::Set {
                ask,
                key,
                value,
            })
            .map(drop)
    }

    /// Returns the value of `key`. Blocks until a process sets it, for at most `peer_timeout` plus
    /// two seconds.
    ///
    /// # Errors
    ///
    /// [`Unset`](RendezvousError::Unset) if no process sets it within `peer_timeout`.
    /// [`NeverSet`](RendezvousError::NeverSet) as soon as a process of the epoch is lost.
    /// [`TooLong`](RendezvousError::TooLong) for a key above 1024 bytes.
    /// [`ServerGone`](RendezvousError::ServerGone) if the server does not answer.
    pub fn get(
        &self,
        key: impl Into<String>,
        peer_timeout: Duration,
    ) -> Result<Vec<u8>, RendezvousError> {
        let key = key.into();
        let request = |ask| ClientRequest::Get {
            ask,
            key,
            peer_timeout,
        };
        match self.link.ask(peer_timeout, request)?.answer {
            RequestAnswer::Value(value) => Ok(value),
            other => Err(self.link.senseless(&other)),
        }
    }

    /// Blocks until all processes of the job have called this with the same `name`, for at most
    /// `peer_timeout` plus two seconds. A name can be used again.
    ///
    /// # Errors
    ///
    /// - [`Barrier`](RendezvousError::Barrier), with the processes that did not come in time.
    /// - [`BarrierBroken`](RendezvousError::BarrierBroken) as soon as a process can no longer come.
    /// - [`OutOfTurn`](RendezvousError::OutOfTurn) before [`join`](Self::join), or if this process
    ///   already waits under this name.
    /// - [`TooLong`](RendezvousError::TooLong) for a name above 1024 bytes.
    /// - [`ServerGone`](RendezvousError::ServerGone) if the connection has ended.
    pub fn barrier(
        &self,
        name: impl Into<String>,
        peer_timeout: Duration,
    ) -> Result<(), RendezvousError> {
        let name = name.into();
        self.link
            .ask(peer_timeout, |ask| ClientRequest::Barrier {
                ask,
                name,
                peer_timeout,
            })
            .map(drop)
    }

    /// Sets the function that is called when a process or the server is lost without leaving in
    /// order. Earlier losses are reported at once.
    ///
    /// `tell` runs on the thread that also answers the server's pings, so it must not block.
    pub fn on_down(&self, tell: Box<dyn Fn(Down) + Send + Sync>) {
        let tell: Arc<dyn Fn(Down) + Send + Sync> = Arc::from(tell);
        let mut state = self.link.state.lock();
        state.tell = Some(tell.clone());
        let earlier = std::mem::take(&mut state.untold);
        drop(state);

        for down in earlier {
            tell(down);
        }
    }

    /// Returns the first process of the job that was lost, with the reason, before a function was
    /// set by [`on_down`](Self::on_down). `None` if none was lost, or if such a function is set.
    ///
    /// A process that has left the epoch in order to join the next one counts as lost. A lost
    /// server means that the process `host` was lost. `None` if no process of the job runs the
    /// server.
    pub fn first_untold_loss(&self, host: Option<ProcessId>) -> Option<(ProcessId, String)> {
        let state = self.link.state.lock();
        state.untold.iter().find_map(|down| match down {
            Down::Process(process, why) => Some((*process, why.clone())),
            Down::Epoch(by) => Some((*by, LEFT_EPOCH.to_owned())),
            Down::Server(why) => Some((host?, why.clone())),
        })
    }

    /// Sets a function to call while [`join`](Self::join) or [`join_epoch`](Self::join_epoch) waits
    /// for others. The server calls it on one of the waiting processes. Its arguments are the
    /// epoch, the awaited processes, and the time waited so far.
    ///
    /// In the first epoch these are the processes that have not joined within ten seconds after
    /// the first one, and the call comes once. In a later epoch they are alive but still run their
    /// own code in the previous epoch, and the call comes once in each peer timeout.
    ///
    /// `tell` runs on the thread that also answers the server's pings, so it must not block.
    pub fn on_busy(&self, tell: impl Fn(u64, &[ProcessId], Duration) + Send + Sync + 'static) {
        self.link.state.lock().tell_busy = Some(Arc::new(tell));
    }

    /// Sets the function that returns this process's status, in any encoding. It is called each
    /// time that a [`JobObserver`](super::JobObserver) looks at the job, with the bytes that the
    /// observer passed to [`look`](super::JobObserver::look). Before this call, the observer is
    /// told that the process is starting.
    ///
    /// `describe` runs on the thread that also answers the server's pings, so it must not block. A
    /// status longer than [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES) is not passed on.
    pub fn on_look(&self, describe: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) {
        self.link.state.lock().describe = Some(Arc::new(describe));
    }

    /// Reports the failure that ends this process to the server's owner. Only the first report of a
    /// process counts.
    ///
    /// Blocks until the server answers, for at most four seconds. After success the owner knows the
    /// failure, whatever happens to this process next.
    ///
    /// # Errors
    ///
    /// [`OutOfTurn`](RendezvousError::OutOfTurn) before [`join`](Self::join).
    /// [`ServerGone`](RendezvousError::ServerGone) if no answer comes.
    pub fn report(&self, report: FailureReport) -> Result<(), RendezvousError> {
        self.link
            .ask(REPORT_WITHIN, |ask| ClientRequest::Report { ask, report })
            .map(drop)
    }

    /// Returns true if the server accepts a new connection and answers, within about a second.
    /// After the connection is lost, true means that the server has given this process up.
    pub fn is_server_alive(&self) -> bool {
        self.link.reaches_server(&self.config)
    }

    /// Returns true if the server is certainly gone: its host answers, and no process listens at
    /// its address.
    pub fn is_server_gone(&self) -> bool {
        is_gone(&self.config.server)
    }

    /// Returns the processes that can take over the rendezvous service, as the server has told this
    /// process while it waited for a place.
    pub fn succession(&self) -> Option<Succession> {
        self.link.state.lock().succession.clone()
    }

    /// Describes how this process's contact with the server ended, for its
    /// [`ServiceSeeker`](super::ServiceSeeker). Call it after the connection is lost, or after
    /// [`leave_epoch`](Self::leave_epoch). Waits for about a second at most.
    pub fn parting(&self) -> ServiceParting {
        self.link.parting()
    }

    /// Leaves the job in order: the others are not told that this process is down. Waits for the
    /// server's answer, for at most five seconds. Does not wait if the server is known to be
    /// silent. Closes the connection.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if no answer comes, or
    /// [`Left`](RendezvousError::Left) if this process has left before.
    pub fn leave(&self) -> Result<(), RendezvousError> {
        self.leave_and(LeaveKind::Leaves)
    }

    /// Leaves a job that has ended well, as [`leave`](Self::leave) does. All its processes have
    /// reached the end, and none begins another epoch.
    ///
    /// # Errors
    ///
    /// The errors of [`leave`](Self::leave).
    pub fn end(&self) -> Result<(), RendezvousError> {
        self.leave_and(LeaveKind::Ends)
    }

    /// Leaves an epoch that has failed, as [`leave`](Self::leave) does, but keeps the connection
    /// open. This process keeps its place in the next epoch if it joins that epoch over another
    /// connection within the server's peer timeout. If this is dropped before that, the server
    /// counts the process as dead.
    ///
    /// # Errors
    ///
    /// The errors of [`leave`](Self::leave).
    pub fn leave_epoch(&self) -> Result<(), RendezvousError> {
        self.leave_and(LeaveKind::Returns)
    }

    /// Leaves the job without taking the place that this process has just got. Another process may
    /// take it. `why` is the reason.
    ///
    /// # Errors
    ///
    /// The errors of [`leave`](Self::leave).
    pub fn give_back(&self, why: impl Into<String>) -> Result<(), RendezvousError> {
        self.leave_and(LeaveKind::GivesBack(why.into()))
    }

    fn leave_and(&self, how: LeaveKind) -> Result<(), RendezvousError> {
        self.link.state.lock().leaving = true;
        let returns = matches!(how, LeaveKind::Returns);
        let peer_timeout = self.config.peer_timeout.min(LEAVE_WITHIN);
        let left = self
            .link
            .ask(peer_timeout, |ask| ClientRequest::Leave { ask, how })
            .map(drop);

        if left.is_ok() {
            // The server closes after its answer, and the listening thread may already have
            // recorded that.
            self.link.state.lock().ended = Some(RendezvousError::Left);
        }

        if left.is_err() || !returns {
            self.link.end(RendezvousError::Left);
        }
        left
    }

    /// Measures the offset of this process's clock from the server's: makes eight round trips and
    /// uses the quickest.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if the server does not answer.
    pub fn compare_clocks(&self) -> Result<ClockOffset, RendezvousError> {
        const TRIPS: usize = 8;
        let mut trips = Vec::with_capacity(TRIPS);
        for _ in 0..TRIPS {
            let asked = clock();
            let answered = self
                .link
                .ask(self.config.peer_timeout, |ask| ClientRequest::Clock { ask })?;
            match answered.answer {
                RequestAnswer::Clock(server) => trips.push(ClockTrip {
                    asked,
                    server,
                    answered: answered.at,
                }),
                other => return Err(self.link.senseless(&other)),
            }
        }
        Ok(quickest(&trips))
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // The listening thread sees the end of the connection and ends too. There is nothing to
        // wait for.
        self.link.end(RendezvousError::Left);
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JoinConfig {
            process,
            processes,
            server,
            ..
        } = &self.config;
        write!(
            f,
            "Rendezvous(process {process} of {processes} at {server})"
        )
    }
}
