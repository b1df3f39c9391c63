//! The subscriber's end, as a program uses it: the settings, the state, and the versions as arrays
//! or for an [`Intake`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Instant, Mutex, mpsc, now, thread};
use mpmd_base::deadline::after;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_memory::SharedBuffer;
use mpmd_rendezvous::Token;

use super::group::{GroupAnswer, GroupCall, GroupMembership, Members, group_token, spawn};
use super::layouts::WantedLeaf;
use super::link::VersionNumbers;
use super::net::Net;
use super::seeker::PublisherSeeker;
use super::taker::{TakerNews, Taking};
use crate::api::program::Program;
use crate::api::program::transports::DEFAULT;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_device::copy::copy_region;

/// Settings of a subscription.
#[derive(Clone, Debug)]
pub struct Subscribing {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) token: Token,
    pub(super) changes: bool,
    pub(super) transport: String,
    pub(super) net: Net,
}

impl Subscribing {
    /// Creates the settings of a subscription to the publication `name`. `address` is the
    /// publisher's `host:port`.
    pub fn new(name: impl Into<String>, address: impl Into<String>, token: Token) -> Self {
        Self {
            name: name.into(),
            address: address.into(),
            token,
            changes: false,
            transport: DEFAULT.to_owned(),
            net: Net::default(),
        }
    }

    /// Sets whether a new version is transferred as changed elements where that takes fewer bytes.
    /// Each process then keeps the values of the last version. The default is false: on one host
    /// the publisher's memory is read in place, so nothing is saved.
    #[must_use]
    pub fn changes(mut self, changes: bool) -> Self {
        self.changes = changes;
        self
    }

    /// Sets the transport of the versions, one of [`NAMES`](crate::transports::NAMES). The default
    /// is shared memory between processes that can share it, else TCP.
    #[must_use]
    pub fn transport(mut self, name: impl Into<String>) -> Self {
        self.transport = name.into();
        self
    }
}

/// A process's part of a version: the regions of each wanted leaf on this process's devices.
#[derive(Clone, Debug, Default)]
pub struct Received {
    /// The number of the version.
    pub version: u64,
    /// Number of publications that the subscription had found before this version's publication.
    /// Version numbers may repeat in a new publication, such as of a training run that starts
    /// again.
    pub publication: u64,
    pub(super) shards: Vec<ReceivedShard>,
    pub(super) leaves: Arc<Vec<ReceivedLeaf>>,
}

/// A region of a leaf, with its values.
#[derive(Clone, Debug)]
pub(super) struct ReceivedShard {
    /// Index of the leaf among the wanted leaves.
    pub(super) leaf: usize,
    pub(super) region: Region,
    pub(super) values: SharedBuffer,
}

/// The error of [`Received::read`]: this process does not hold the requested leaf or region.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{leaf} {region} is not here")]
pub struct NotReceived {
    /// The name of the leaf.
    pub leaf: String,
    /// The requested region.
    pub region: Region,
}

/// The name, shape and dtype of a wanted leaf.
#[derive(Clone, Debug)]
pub(super) struct ReceivedLeaf {
    pub(super) name: String,
    pub(super) aval: ShapedArray,
}

impl Received {
    /// Returns the regions of a leaf on this process, with their values, row-major.
    pub fn shards(&self, leaf: &str) -> impl Iterator<Item = (&Region, &SharedBuffer)> {
        let index = self.leaves.iter().position(|known| known.name == leaf);
        let own = self
            .shards
            .iter()
            .filter(move |shard| Some(shard.leaf) == index);
        own.map(|shard| (&shard.region, &shard.values))
    }

    /// Returns the dtype of a leaf. `None` if there is no such leaf.
    pub fn dtype(&self, leaf: &str) -> Option<DType> {
        self.leaf(leaf).map(|aval| aval.dtype())
    }

    /// Copies a region of a leaf to `to`. The region must be within one of this process's regions.
    ///
    /// # Errors
    ///
    /// If this process does not hold the leaf or the region.
    ///
    /// # Panics
    ///
    /// If the length of `to` differs from the region's bytes, or the region has another number of
    /// dimensions than the leaf.
    pub fn read(&self, leaf: &str, region: &Region, to: &mut [u8]) -> Result<(), NotReceived> {
        let found = self.shards(leaf).find(|(own, _)| own.contains(region));
        let (Some(aval), Some((own, values))) = (self.leaf(leaf), found) else {
            return Err(NotReceived {
                leaf: leaf.to_owned(),
                region: region.clone(),
            });
        };
        copy_region(values, own, to, region, region, aval.dtype().size());
        Ok(())
    }

    fn leaf(&self, name: &str) -> Option<&ShapedArray> {
        let mut leaves = self.leaves.iter();
        leaves.find(|leaf| leaf.name == name).map(|leaf| &leaf.aval)
    }
}

/// A consumer of the versions of a subscription. Its functions are called on a thread of the
/// subscription, on every process for each version. A panic in one of them is logged and reported
/// as [`SubscriptionState::trouble`]. A panic in [`take`](Self::take) refuses the version.
pub trait Intake: Send {
    /// Returns true if this process has room for a further version. Called often. The next version
    /// is transferred once every process has room.
    fn has_room(&mut self) -> bool;

    /// Takes this process's part of a version, after its hashes were compared with the publisher's.
    /// Another process may still refuse the version.
    ///
    /// Do not keep its buffers for long. They may be the publisher's memory, which lends only some
    /// versions before later ones are copied.
    ///
    /// # Errors
    ///
    /// The reason to refuse the version. All processes and the publisher get it.
    fn take(&mut self, received: &Received) -> Result<(), String>;

    /// Ends a version: every process has taken it, or `refused` is the reason why it must be
    /// discarded. For example, a process has refused it, or the publisher has died. Called once for
    /// each version that was [taken](Self::take), unless the subscription ends first.
    fn end(&mut self, version: u64, refused: Option<&str>);

    /// Called with `None` when a link to the publisher has begun. Called with a reason when the
    /// link has ended or, on process 0, when a process of either end cannot be reached. Default:
    /// does nothing.
    fn linked(&mut self, ended: Option<&str>) {
        let _ = ended;
    }
}

/// The state of a subscription on this process.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SubscriptionState {
    /// The newest version that every process has taken.
    pub version: Option<u64>,
    /// True while this process has a link to the publisher.
    pub is_linked: bool,
    /// The last problem: why there is no link, why a version was refused, or that the intake has
    /// panicked.
    pub trouble: Option<String>,
    /// Number of versions that every process has taken.
    pub versions: u64,
    /// Number of versions that at least one process has refused.
    pub refused: u64,
    /// Bytes that this process received for the last version.
    pub bytes: u64,
}

/// A subscription to the versions of a publisher. Dropping it leaves the publisher, which
/// continues.
///
/// All processes should drop it: if one has dropped it, no further versions come.
///
/// If a publisher ends or dies, the last whole version stays in use. Until it is dropped, the
/// subscription looks for that publisher or a successor. It takes every version of a successor,
/// even those with lower numbers.
pub struct Subscription {
    shared: Arc<SubscriptionShared>,
    group: Option<GroupMembership>,
    threads: Vec<thread::JoinHandle<()>>,
    latest: Option<Arc<Mutex<LatestVersions>>>,
    wanted: Arc<Vec<WantedLeaf>>,
}

/// The state that the threads of a subscription share on this process.
#[derive(Default)]
pub(super) struct SubscriptionShared {
    state: Mutex<SubscriptionProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct SubscriptionProgress {
    state: SubscriptionState,
    /// The time at which this process gave up the subscription; `None` before.
    ended: Option<Instant>,
    /// The newest version that every process has taken. Set only on process 0.
    whole: Option<VersionNumbers>,
}

/// The intake behind [`Subscription::next`], for a program that takes versions as arrays.
#[derive(Default)]
struct LatestVersions {
    /// At most two versions: one that every process has taken, and a newer one that may still be
    /// refused.
    taken: VecDeque<Received>,
    /// The newest version that every process has taken.
    whole: Option<VersionNumbers>,
}

impl Received {
    fn numbers(&self) -> VersionNumbers {
        VersionNumbers {
            publication: self.publication,
            version: self.version,
        }
    }
}

impl Intake for Arc<Mutex<LatestVersions>> {
    fn has_room(&mut self) -> bool {
        self.lock().taken.is_empty()
    }

    fn take(&mut self, received: &Received) -> Result<(), String> {
        self.lock().taken.push_back(received.clone());
        Ok(())
    }

    fn end(&mut self, version: u64, refused: Option<&str>) {
        let mut latest = self.lock();
        // The last one that was taken.
        let ended = latest.taken.back().filter(|taken| taken.version == version);
        match (ended.map(Received::numbers), refused) {
            (Some(ended), None) => latest.whole = Some(ended),
            (Some(_), Some(_)) => _ = latest.taken.pop_back(),
            (None, _) => {}
        }
    }
}

impl Program {
    /// Subscribes to the versions of a publication, as `leaves` in this job's own layout.
    /// [`Subscription::next`] returns them as arrays. Every process must call it, with the same
    /// leaves. Does not wait for the publisher.
    ///
    /// # Errors
    ///
    /// If a sharding does not fit its leaf, if two leaves have the same name, or if the system
    /// gives no threads. If the job fails meanwhile, for example by the loss of a process.
    #[track_caller]
    pub fn subscribe(
        &mut self,
        subscribing: Subscribing,
        wanted: Vec<WantedLeaf>,
    ) -> Result<Subscription> {
        let latest = Arc::new(Mutex::new(LatestVersions::default()));
        let mut subscription =
            self.subscribe_with(subscribing, wanted, Box::new(latest.clone()))?;
        subscription.latest = Some(latest);
        Ok(subscription)
    }

    /// Subscribes as [`Program::subscribe`] does, and passes each version to `intake`.
    ///
    /// # Errors
    ///
    /// As for [`Program::subscribe`].
    #[track_caller]
    pub fn subscribe_with(
        &mut self,
        subscribing: Subscribing,
        wanted: Vec<WantedLeaf>,
        intake: Box<dyn Intake>,
    ) -> Result<Subscription> {
        for (index, leaf) in wanted.iter().enumerate() {
            if wanted[..index].iter().any(|other| other.name == leaf.name) {
                return Err(Error::Environment(format!("{} is wanted twice", leaf.name)));
            }
            leaf.sharding.check_devices(self.topology())?;
            leaf.told(|device| device.0)
                .map_err(|why| Error::Environment(why.to_string()))?;
        }

        let mut subscription = Subscription {
            shared: Arc::new(SubscriptionShared::default()),
            group: None,
            threads: Vec::new(),
            latest: None,
            wanted: Arc::new(wanted),
        };
        if self.is_dry_run() {
            return Ok(subscription);
        }

        subscription.open(self, subscribing, intake)?;
        Ok(subscription)
    }
}

/// Creates the function that answers each `GroupCall` to this process. It forwards the calls to
/// `told`.
fn answer_calls(
    told: mpsc::Sender<TakerNews>,
    devices: usize,
) -> impl Fn(GroupCall) -> GroupAnswer + Send + Sync + 'static {
    // The channel is locked, since the answers may be given by any thread.
    let told = Mutex::new(told);
    move |call| {
        let news = match call {
            GroupCall::Join(invitation) => Some(TakerNews::Invited(invitation)),
            GroupCall::Settle(whole) => Some(TakerNews::Settled(whole)),
            GroupCall::Hello(_) => None,
        };
        // The receiver is gone once the subscription has ended.
        news.into_iter().for_each(|news| _ = told.lock().send(news));
        GroupAnswer::Here(devices)
    }
}

impl Subscription {
    /// Opens the rendezvous of the subscriber's processes, and starts the threads that take the
    /// versions and, on process 0, look for the publisher.
    #[track_caller]
    fn open(
        &mut self,
        p: &mut Program,
        subscribing: Subscribing,
        intake: Box<dyn Intake>,
    ) -> Result<()> {
        let wanted = self.wanted.clone();
        let used = wanted
            .iter()
            .flat_map(|leaf| leaf.sharding.devices().iter().copied());
        let members = Members::of(p.topology(), used, Some(ProcessId(0)));
        let (told, news) = mpsc::channel();
        let devices = p.topology().devices_of(p.process()).len();
        let answer = answer_calls(told.clone(), devices);

        let nonce = Token::random().map_err(|why| Error::Environment(why.to_string()))?;
        // That of process 0 counts.
        let nonce = p.broadcast_value(ProcessId(0), String::new(), || Ok(nonce.to_hex()))?;
        let token = group_token(&subscribing.token, &nonce);
        let net = &subscribing.net;
        let opened = GroupMembership::open(p, &members, None, token.clone(), net, answer)?;
        let Some(me) = members.place_of(p.process()) else {
            return Ok(());
        };
        self.group = opened.group;

        let peer_timeout = p.runtime.config.peer_timeout;
        let name = subscribing.name.clone();
        let devices = members.devices.clone();
        let taking = Taking::new(
            self.shared.clone(),
            wanted,
            members,
            me,
            intake,
            &subscribing,
            peer_timeout,
        );
        self.threads
            .push(spawn("mpmd-subscribe", move || taking.run(&news))?);
        if me == 0 {
            let seeker = PublisherSeeker {
                subscribing,
                own: opened.address.to_string(),
                token,
                devices,
                peer_timeout,
                shared: self.shared.clone(),
                told,
            };
            self.threads.push(spawn("mpmd-seek", move || seeker.run())?);
        }
        tracing::debug!(name, "subscribed");
        Ok(())
    }

    /// Returns the state of the subscription on this process. Does not block.
    pub fn state(&self) -> SubscriptionState {
        self.shared.state()
    }

    /// Waits until every process has taken a version at or above `version`, at most for `timeout`.
    /// Returns the newest such version, or `None` after the timeout.
    pub fn wait(&self, version: u64, timeout: Duration) -> Option<u64> {
        let until = after(now(), timeout);
        let mut known = self.shared.state.lock();
        loop {
            if let Some(newest) = known.state.version.filter(|newest| *newest >= version) {
                return Some(newest);
            }
            if self
                .shared
                .changed
                .wait_until(&mut known, until)
                .timed_out()
            {
                return None;
            }
        }
    }

    /// Returns the next version that every process has taken, as arrays in the order of the wanted
    /// leaves. Returns `None` if there is none yet; does not wait for one. Every process must call
    /// it. No later version is transferred before this call.
    ///
    /// # Errors
    ///
    /// If the job has failed, or the subscription has an [`Intake`].
    #[track_caller]
    pub fn next(&mut self, p: &mut Program) -> Result<Option<(u64, Vec<MpmdArray>)>> {
        let Some(latest) = self.latest.clone() else {
            return Err(Error::kernel(
                "the subscription's versions go to its intake",
            ));
        };
        let whole = || {
            let latest = latest.lock();
            let mut versions = latest.taken.iter().map(Received::numbers);
            Ok(versions.find(|version| Some(*version) <= latest.whole))
        };
        let Some(numbers) = p.broadcast_value(ProcessId(0), None, whole)? else {
            return Ok(None);
        };

        // Taken on every process before process 0 could know that it is whole.
        let received = {
            let taken = &mut latest.lock().taken;
            let place = taken.iter().position(|taken| taken.numbers() == numbers);
            Arc::new(
                place
                    .and_then(|place| taken.drain(..=place).next_back())
                    .unwrap_or_default(),
            )
        };

        let mut arrays = Vec::new();
        for leaf in self.wanted.iter() {
            let received = received.clone();
            let name = leaf.name.clone();
            let fill = move |region: &Region, mut view: crate::kernel::ViewMut<'_>| {
                let read = received.read(&name, region, view.as_bytes_mut());
                read.map_err(|why| Error::kernel(why.to_string()))
            };
            arrays.push(p.array_from_fn(leaf.aval.clone(), &leaf.sharding, fill)?);
        }
        Ok(Some((numbers.version, arrays)))
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.shared.end();
        self.group = None;
        for thread in std::mem::take(&mut self.threads) {
            _ = thread.join();
        }
    }
}

impl SubscriptionShared {
    pub(super) fn state(&self) -> SubscriptionState {
        self.state.lock().state.clone()
    }

    fn end(&self) {
        self.state.lock().ended = Some(now());
        self.changed.notify_all();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended().is_some()
    }

    /// Returns the time at which this process gave up the subscription; `None` before.
    pub(super) fn ended(&self) -> Option<Instant> {
        self.state.lock().ended
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut SubscriptionState)) {
        change(&mut self.state.lock().state);
        self.changed.notify_all();
    }

    /// Returns the newest version that every process has taken. Known only on process 0.
    pub(super) fn whole(&self) -> Option<VersionNumbers> {
        self.state.lock().whole
    }

    pub(super) fn set_whole(&self, version: VersionNumbers) {
        self.state.lock().whole = Some(version);
    }

    /// Blocks until this process has no link. Deadlines of the peers ensure that the link ends.
    pub(super) fn wait_unlinked(&self) {
        let mut known = self.state.lock();
        while known.state.is_linked {
            self.changed.wait(&mut known);
        }
    }

    /// Sleeps for `time`, or until the subscription ends.
    pub(super) fn sleep(&self, time: Duration) {
        let until = after(now(), time);
        let mut known = self.state.lock();
        while known.ended.is_none() && !self.changed.wait_until(&mut known, until).timed_out() {}
    }
}
