//! The subscriber's end: a thread that looks for the publisher and joins links with it, and takes
//! the versions that come.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{Condvar, Instant, Mutex, mpsc, now, since, thread};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;
use mpmd_transport::rendezvous::{Server, ServerConfig, Token};
use mpmd_transport::{Pool, SharedBuffer};

use super::bits::{hash, read_changes};
use super::group::{Answer, Call, Group, Invitation, LONGEST, Members, call, spawn, wrong};
use super::layouts::{Asked, Piece, Wanted};
use super::link::{self, Arrived, Ask, Numbers, Side, Target};
use crate::api::program::Program;
use crate::api::program::transports::DEFAULT;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_device::copy::copy_region;

/// Time between two attempts to reach a publisher, and after many links without a version.
const RETRY: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];
/// Time between two questions for room.
const LOOK: Duration = Duration::from_millis(20);
/// Time for which a process that has ended waits for the first process to end the link.
const ALONE: Duration = Duration::from_secs(2);
/// Time limit of a call of the publisher's processes.
const CALL: Duration = Duration::from_secs(5);

/// Settings of a subscription.
#[derive(Clone, Debug)]
pub struct Subscribing {
    name: String,
    address: String,
    token: Token,
    changes: bool,
    transport: String,
}

impl Subscribing {
    /// Creates the settings of a subscription to the publication `name` at an address, `host:port`.
    pub fn new(name: impl Into<String>, address: impl Into<String>, token: Token) -> Self {
        let transport = DEFAULT.to_owned();
        Self { name: name.into(), address: address.into(), token, changes: false, transport }
    }

    /// Takes only the elements that have changed, where these are fewer bytes than all. Each
    /// process then keeps the bits of the last version. The default is false: on one host the
    /// publisher's memory is read where it is, and nothing is saved.
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

/// A process's part of a version: its regions of each wanted leaf.
#[derive(Clone, Debug, Default)]
pub struct Received {
    /// The number of the version.
    pub version: u64,
    /// Number of publications that the subscription has found before the version's own. The numbers
    /// of a new publication, such as of a training that has begun anew, may be the same as of the
    /// one before.
    pub publication: u64,
    shards: Vec<(usize, Region, SharedBuffer)>,
    avals: Arc<Vec<(String, ShapedArray)>>,
}

impl Received {
    /// Returns the regions of a leaf on this process, with their values, row-major.
    pub fn shards(&self, leaf: &str) -> impl Iterator<Item = (&Region, &SharedBuffer)> {
        let index = self.avals.iter().position(|(name, _)| name == leaf);
        let own = self.shards.iter().filter(move |(leaf, ..)| Some(*leaf) == index);
        own.map(|(_, region, values)| (region, values))
    }

    /// Returns the dtype of a leaf. `None` if there is no such leaf.
    pub fn dtype(&self, leaf: &str) -> Option<DType> {
        self.avals.iter().find(|(name, _)| name == leaf).map(|(_, aval)| aval.dtype())
    }

    /// Copies a region of a leaf that is within one of this process's regions.
    ///
    /// # Errors
    ///
    /// If the leaf or the region is not here.
    ///
    /// # Panics
    ///
    /// If `to` has another length than the region, or this another number of dimensions.
    pub fn read(&self, leaf: &str, region: &Region, to: &mut [u8]) -> Result<(), String> {
        let index = self.avals.iter().position(|(name, _)| name == leaf);
        let aval = index.map(|index| &self.avals[index].1);
        let found = self.shards(leaf).find(|(own, _)| own.contains(region));
        let (Some(aval), Some((own, values))) = (aval, found) else {
            return Err(format!("{leaf} {region} is not here"));
        };
        copy_region(values, own, to, region, region, aval.dtype().size());
        Ok(())
    }
}

/// The use that a subscriber makes of versions. Its functions are called on a thread of the
/// subscription, on every process for each version.
pub trait Intake: Send {
    /// True if there is room for a further version. Asked on process 0 alone, often.
    fn has_room(&mut self) -> bool;

    /// Takes this process's part of a version, whose bits have been compared with the publisher's.
    /// Another process may still refuse it. Keep no buffers of it for long: they may be the
    /// publisher's memory.
    ///
    /// # Errors
    ///
    /// The reason to refuse the version. It is told to all processes and to the publisher.
    fn take(&mut self, received: &Received) -> Result<(), String>;

    /// Says that every process has taken the version; or why one has not, so that it is to be
    /// forgotten.
    fn end(&mut self, version: u64, refused: Option<&str>);

    /// Says that a link to the publisher has begun; or that there is none, with the reason: it has
    /// ended, or on process 0 that the publisher cannot be reached. By default it does nothing.
    fn linked(&mut self, ended: Option<&str>) {
        let _ = ended;
    }
}

/// The state of a subscription on this process.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SubscriptionState {
    /// The newest version that is whole on every process.
    pub version: Option<u64>,
    /// True while there is a link to the publisher.
    pub is_linked: bool,
    /// Why there is no link, or why the last version was refused.
    pub trouble: Option<String>,
    /// Number of versions that every process has taken.
    pub versions: u64,
    /// Number of versions that a process has refused.
    pub refused: u64,
    /// Bytes that this process got for the last version.
    pub bytes: u64,
}

/// A subscription to the versions of a publisher. Dropping it leaves the publisher, which goes on.
///
/// All processes should drop it: without one of them there are no further versions.
///
/// A publisher that ends or dies leaves the last whole version in use. The subscription looks for
/// it, or for its successor, until it is dropped. Of a successor it takes every version, also one
/// with a lower number.
pub struct Subscription {
    shared: Arc<Shared>,
    group: Option<Group>,
    threads: Vec<thread::JoinHandle<()>>,
    latest: Option<Arc<Mutex<Latest>>>,
    wanted: Arc<Vec<Wanted>>,
}

struct Shared {
    /// The state, and the time of the end.
    state: Mutex<(SubscriptionState, Option<Instant>)>,
    changed: Condvar,
}

/// The intake of a program that takes versions as arrays.
#[derive(Default)]
struct Latest {
    /// Usually one. On other processes than the first, later ones may come before the program has
    /// taken those that the first one has.
    taken: VecDeque<Received>,
    /// Publication and version of the newest that every process has.
    whole: Option<(u64, u64)>,
}

impl Received {
    fn numbers(&self) -> (u64, u64) {
        (self.publication, self.version)
    }
}

impl Intake for Arc<Mutex<Latest>> {
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
    /// Subscribes to the versions of a publication, as leaves of this job's own layout.
    /// [`Subscription::next`] returns them as arrays. Every process must call it, with the same
    /// leaves. Does not wait for the publisher.
    ///
    /// # Errors
    ///
    /// If a sharding does not fit its leaf, two leaves have one name, or the system gives no
    /// threads.
    pub fn subscribe(
        &mut self,
        subscribing: Subscribing,
        wanted: Vec<Wanted>,
    ) -> Result<Subscription> {
        let latest = Arc::new(Mutex::new(Latest::default()));
        let mut subscription =
            self.subscribe_with(subscribing, wanted, Box::new(latest.clone()))?;
        subscription.latest = Some(latest);
        Ok(subscription)
    }

    /// Subscribes as [`Program::subscribe`] does, and gives the versions to `intake`.
    ///
    /// # Errors
    ///
    /// As for [`Program::subscribe`].
    pub fn subscribe_with(
        &mut self,
        subscribing: Subscribing,
        wanted: Vec<Wanted>,
        intake: Box<dyn Intake>,
    ) -> Result<Subscription> {
        for (index, leaf) in wanted.iter().enumerate() {
            if wanted[..index].iter().any(|other| other.name == leaf.name) {
                return Err(Error::Environment(format!("{} is wanted twice", leaf.name)));
            }
            leaf.sharding.check_devices(self.topology())?;
            leaf.told(|device| device.0).map_err(Error::Environment)?;
        }
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::default() });
        let wanted = Arc::new(wanted);
        let (group, threads, latest) = (None, Vec::new(), None);
        let mut subscription =
            Subscription { shared: shared.clone(), group, threads, latest, wanted: wanted.clone() };
        if self.is_dry_run() {
            return Ok(subscription);
        }
        let devices = self.topology().devices_of(self.process()).len();
        let used = wanted.iter().flat_map(|leaf| leaf.sharding.devices().iter().copied());
        let members = Members::of(self.topology(), used, Some(ProcessId(0)));
        let (told, news) = mpsc::channel();
        let invited = Mutex::new(told.clone());
        let answer = move |call| {
            if let Call::Join(invitation) = call {
                _ = invited.lock().send(News::Invited(invitation));
            }
            Answer::Here(devices)
        };
        let token = Token::random().map_err(|why| Error::Environment(why.to_string()))?;
        // The token of process 0 counts.
        let token = self.broadcast_value(ProcessId(0), String::new(), || Ok(token.to_hex()))?;
        let token: Token = token
            .parse()
            .map_err(|_| Error::Environment("process 0 has told no valid token".to_owned()))?;
        let (own, group) = Group::open(self, &members, None, token.clone(), answer)?;
        let Some(me) = members.place_of(self.process()) else { return Ok(subscription) };
        subscription.group = group;
        let peer_timeout = self.runtime.config.peer_timeout;
        let (ended, ends) = mpsc::channel();
        let name = subscribing.name.clone();
        let (all_devices, changes) = (members.devices.clone(), subscribing.changes);
        let publications = Publications::default();
        let taking =
            Taking { shared: shared.clone(), wanted, members, changes, intake, publications };
        let run = move || taking.run(&news, me, peer_timeout, &ended);
        subscription.threads.push(spawn("mpmd-subscribe", run)?);
        if me == 0 {
            let own = own.to_string();
            let devices = all_devices;
            let seeker = Seeker { subscribing, own, token, devices, peer_timeout, shared, told };
            subscription.threads.push(spawn("mpmd-seek", move || seeker.run(&ends))?);
        }
        tracing::debug!(name, "subscribed");
        Ok(subscription)
    }
}

impl Subscription {
    /// Returns the state on this process. Does not block.
    pub fn state(&self) -> SubscriptionState {
        self.shared.state.lock().0.clone()
    }

    /// Waits until a version at least as new as `version` is whole on every process, at most for
    /// `timeout`. Returns the newest one. `None` after the time.
    pub fn wait(&self, version: u64, timeout: Duration) -> Option<u64> {
        let until = now() + timeout;
        let mut state = self.shared.state.lock();
        loop {
            if let Some(newest) = state.0.version.filter(|newest| *newest >= version) {
                return Some(newest);
            }
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
    }

    /// Returns the next version that is whole on every process, as arrays in the order of the
    /// wanted leaves; `None` if there is none yet. Does not wait for one. Every process must call
    /// it. Until it is called, no later version comes.
    ///
    /// # Errors
    ///
    /// If the job has failed, or the subscription has an [`Intake`].
    pub fn next(&mut self, p: &mut Program) -> Result<Option<(u64, Vec<MpmdArray>)>> {
        let Some(latest) = self.latest.clone() else {
            return Err(Error::kernel("the subscription's versions go to its intake"));
        };
        let whole = || {
            let latest = latest.lock();
            let mut versions = latest.taken.iter().map(Received::numbers);
            Ok(versions.find(|version| Some(*version) <= latest.whole))
        };
        let Some((publication, version)) = p.broadcast_value(ProcessId(0), None, whole)? else {
            return Ok(None);
        };
        // Taken on every process before process 0 could know that it is whole.
        let received = {
            let taken = &mut latest.lock().taken;
            let place = taken.iter().position(|taken| taken.numbers() == (publication, version));
            Arc::new(place.and_then(|place| taken.drain(..=place).next_back()).unwrap_or_default())
        };
        let mut arrays = Vec::new();
        for leaf in self.wanted.iter() {
            let (received, name) = (received.clone(), leaf.name.clone());
            let fill = move |region: &Region, mut view: crate::kernel::ViewMut<'_>| {
                let read = received.read(&name, region, view.as_bytes_mut());
                read.map_err(Error::Kernel)
            };
            arrays.push(p.array_from_fn(leaf.aval.clone(), &leaf.sharding, fill)?);
        }
        Ok(Some((version, arrays)))
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.shared.state.lock().1 = Some(now());
        self.shared.changed.notify_all();
        self.group = None;
        for thread in std::mem::take(&mut self.threads) {
            _ = thread.join();
        }
    }
}

impl Shared {
    fn has_ended(&self) -> bool {
        self.state.lock().1.is_some()
    }

    fn note(&self, change: impl FnOnce(&mut SubscriptionState)) {
        change(&mut self.state.lock().0);
        self.changed.notify_all();
    }

    /// Sleeps, at most until the subscription ends.
    fn sleep(&self, time: Duration) {
        let until = now() + time;
        let mut state = self.state.lock();
        while state.1.is_none() && !self.changed.wait_until(&mut state, until).timed_out() {}
    }
}

/// Looks for the publisher on process 0, and has all processes join links with it.
struct Seeker {
    subscribing: Subscribing,
    /// The address and the token of this job's group.
    own: String,
    token: Token,
    devices: Vec<usize>,
    peer_timeout: Duration,
    shared: Arc<Shared>,
    told: mpsc::Sender<News>,
}

/// News for the thread that takes versions.
enum News {
    /// There is a link to join.
    Invited(Invitation),
    /// The publisher cannot be reached, with the reason.
    NotFound(String),
}

impl Seeker {
    fn run(&self, ends: &mpsc::Receiver<()>) {
        let mut retry = RETRY[0];
        // The reasons of the last attempt and of the last line in the log.
        let mut last = None;
        let mut said = None;
        while !self.shared.has_ended() {
            let before = self.shared.state.lock().0.versions;
            let found = self.link(ends);
            let has_more = self.shared.state.lock().0.versions > before;
            retry = match found {
                // One that does not fit is not called all the time.
                Ok(()) if !has_more => (retry * 2).min(RETRY[1]),
                _ => RETRY[0],
            };
            if let Err(why) = &found {
                self.shared.note(|state| state.trouble = Some(why.clone()));
            }
            let why = found.err();
            match &why {
                None => said = None,
                Some(reason) if why != last => {
                    // The receiver is gone once the subscription has ended.
                    _ = self.told.send(News::NotFound(reason.clone()));
                }
                // A publisher that starts is not ready at the first attempt.
                Some(reason) if why != said => {
                    tracing::warn!(name = self.subscribing.name, "no versions come: {reason}");
                    said = why.clone();
                }
                Some(_) => {}
            }
            last = why;
            self.shared.sleep(retry);
        }
    }

    /// Begins a link, and returns after its end.
    fn link(&self, ends: &mpsc::Receiver<()>) -> std::result::Result<(), String> {
        let Subscribing { name, address, token, transport, .. } = &self.subscribing;
        let publisher = |asked: &Call| call(address, token, asked, CALL);
        let (answers, ip) = publisher(&Call::Hello(name.clone()))?;
        let devices = answers.iter().map(|answer| match answer {
            Answer::Here(devices) => Ok(*devices),
            Answer::Other(other) => Err(format!("{address} publishes {other}, not {name}")),
        });
        let mut devices = devices.collect::<Result<Vec<usize>, String>>()?;
        let publishers = devices.len();
        devices.extend(&self.devices);
        let secret = Token::random().map_err(|why| why.to_string())?;
        let (token, peer_timeout) = (secret.clone(), self.peer_timeout.min(LONGEST));
        let config = ServerConfig { processes: devices.len(), token, peer_timeout };
        let server = Server::bind((ip, 0).into(), config).map_err(|why| wrong(why).to_string())?;
        let invitation = Invitation {
            name: name.clone(),
            server: server.address().to_string(),
            token: secret.to_hex(),
            publishers,
            devices,
            transport: transport.clone(),
        };
        let join = Call::Join(invitation);
        publisher(&join)?;
        call(&self.own, &self.token, &join, CALL)?;
        // Ends with the link, since all its processes have deadlines.
        _ = ends.recv();
        server.wait_empty(CALL);
        Ok(())
    }
}

/// Takes the versions on this process.
struct Taking {
    shared: Arc<Shared>,
    wanted: Arc<Vec<Wanted>>,
    members: Members,
    changes: bool,
    intake: Box<dyn Intake>,
    publications: Publications,
}

/// The publications that the subscription has found.
#[derive(Debug, Default)]
struct Publications {
    /// The id of the last one.
    last: Option<String>,
    /// Number of those before it.
    before: u64,
    /// The newest version of the last one that is whole on every process.
    version: Option<u64>,
}

impl Publications {
    /// Notes the publication of a link.
    fn find(&mut self, id: String) {
        if self.last.as_ref() == Some(&id) {
            return;
        }
        self.before += u64::from(self.last.is_some());
        self.last = Some(id);
        self.version = None;
    }
}

impl Taking {
    fn run(
        mut self,
        news: &mpsc::Receiver<News>,
        me: usize,
        peer_timeout: Duration,
        ended: &mpsc::Sender<()>,
    ) {
        let avals = self.wanted.iter().map(|leaf| (leaf.name.clone(), leaf.aval.clone()));
        let avals = Arc::new(avals.collect::<Vec<_>>());
        // It outlives links: their bits may still be read.
        let memory = Pool::new("bits of a subscription", None);
        for news in news.iter() {
            let invitation = match news {
                News::Invited(invitation) => invitation,
                News::NotFound(why) => {
                    self.intake.linked(Some(&why));
                    continue;
                }
            };
            let first: usize = invitation.devices[..invitation.publishers].iter().sum();
            let mut taker = Taker {
                taking: &mut self,
                avals: avals.clone(),
                first: first as u32,
                memory: &memory,
                bits: HashMap::new(),
                base: None,
                fresh: HashMap::new(),
                refused: (0, 0),
            };
            let own = invitation.publishers + me;
            let result = invitation.join(own, peer_timeout).and_then(|mut p| {
                taker.taking.shared.note(|state| {
                    (state.is_linked, state.trouble) = (true, None);
                });
                taker.taking.intake.linked(None);
                let side = &mut Side::Subscriber(&mut taker);
                let result = link::run(&mut p, invitation.publishers, side);
                p.conclude(result)
            });
            // Without the operation of the link that waited.
            let first =
                |error: Error| error.to_string().split("; operation").next().map(str::to_owned);
            let why = result.err().and_then(first);
            if let Some(why) = &why
                && !self.shared.has_ended()
            {
                tracing::warn!(name = invitation.name, "the publisher is lost: {why}");
            }
            self.shared.note(|state| {
                state.is_linked = false;
                if let Some(why) = why {
                    state.trouble = Some(why);
                }
            });
            let trouble = self.shared.state.lock().0.trouble.clone();
            self.intake.linked(Some(&trouble.unwrap_or_default()));
            _ = ended.send(());
        }
    }
}

/// The bits of pieces on devices of this process.
type Bits = HashMap<(usize, DeviceId), SharedBuffer>;

struct Taker<'a> {
    taking: &'a mut Taking,
    avals: Arc<Vec<(String, ShapedArray)>>,
    /// The number in the link of this job's first device.
    first: u32,
    memory: &'a Pool,
    /// The bits of the last whole version, if they are kept, and of the one that comes.
    bits: Bits,
    fresh: Bits,
    /// The version whose bits all processes keep.
    base: Option<u64>,
    /// The version that was refused last, and how often.
    refused: (u64, u32),
}

impl Taker<'_> {
    /// Returns the bytes of a piece, after its changes.
    fn changed(
        &self,
        (index, piece): (usize, &Piece),
        device: DeviceId,
        changes: &[(Region, SharedBuffer)],
    ) -> Option<SharedBuffer> {
        let (old, item) = (self.bits.get(&(index, device))?, piece.aval.dtype().size());
        let target = piece.target_of(device)?;
        let mut new = self.memory.allocate(old.len()).ok()?;
        new.copy_from_slice(old);
        for (common, bytes) in changes {
            let row = common.shape();
            let change = |place: usize, value: &[u8]| {
                let (mut left, mut at, mut step) = (place, 0, 1);
                for dim in (0..row.len()).rev() {
                    let range = target.range(dim);
                    at += (common.range(dim).start + left % row[dim] - range.start) * step;
                    left /= row[dim];
                    step *= range.len();
                }
                let is_in = left == 0 && place < common.elements();
                new.get_mut(at * item..)?.get_mut(..item)?.copy_from_slice(value);
                is_in.then_some(())
            };
            read_changes(&mut &bytes[..], item, change)?;
        }
        Some(new.freeze())
    }
}

impl Target for Taker<'_> {
    fn found(&mut self, id: String) {
        self.taking.publications.find(id);
    }

    fn asked(&self) -> Vec<Asked> {
        // They were checked at the start.
        let number = |device| self.first + self.taking.members.number_of(device);
        self.taking.wanted.iter().filter_map(|leaf| leaf.told(number).ok()).collect()
    }

    fn has_left(&self) -> bool {
        self.taking.shared.state.lock().1.is_some_and(|at| since(at) > ALONE)
    }

    fn ask(&mut self, timeout: Duration) -> Ask {
        let until = now() + timeout;
        loop {
            let has_ended = self.taking.shared.has_ended();
            let has_room = has_ended || self.taking.intake.has_room();
            if has_room || now() >= until {
                // A version may be damaged on its way once; it is not asked for a third time.
                let given_up = Some(self.refused.0).filter(|_| self.refused.1 > 1);
                let Publications { before: publication, version, .. } = self.taking.publications;
                let above = version.max(given_up);
                return Ask { publication, above, base: self.base, has_room, has_ended };
            }
            self.taking.shared.sleep(LOOK);
        }
    }

    fn piece(
        &mut self,
        (index, piece): (usize, &Piece),
        device: DeviceId,
        arrived: Arrived,
        sum: u64,
    ) -> std::result::Result<(), String> {
        let name = &self.avals[piece.to].0;
        let bytes = match arrived {
            Arrived::Whole(bytes) => bytes,
            Arrived::Changes(changes) => self
                .changed((index, piece), device, &changes)
                .ok_or_else(|| format!("{name}: the changes do not fit the version before"))?,
        };
        let Some(target) = piece.target_of(device) else { return Ok(()) };
        let (region, item) = (piece.in_source(target), piece.aval.dtype().size());
        if hash(&bytes, &region, &region, &piece.from_shape, item) != sum {
            let region = piece.in_target(target);
            return Err(format!("{name} {region} arrived with other bits than were published"));
        }
        let bytes = match self.taking.changes && bytes.is_lent() {
            true => {
                let mut own = self.memory.allocate(bytes.len()).map_err(|why| why.to_string())?;
                own.copy_from_slice(&bytes);
                own.freeze()
            }
            false => bytes,
        };
        self.fresh.insert((index, device), bytes);
        Ok(())
    }

    fn take(&mut self, version: Numbers, pieces: &[Piece]) -> std::result::Result<(), String> {
        let mut shards = Vec::new();
        for (leaf, asked) in self.asked().iter().enumerate() {
            let item = asked.dtype.size();
            let own = asked.shards.iter().filter(|(device, region)| {
                self.fresh.keys().any(|(_, own)| own.0 == *device) || region.is_empty()
            });
            for (device, region) in own {
                let device = DeviceId(*device);
                let parts = pieces.iter().enumerate().filter(|(_, piece)| piece.to == leaf);
                let parts: Vec<(Region, SharedBuffer)> = parts
                    .filter_map(|(index, piece)| {
                        let bytes = self.fresh.get(&(index, device))?.clone();
                        Some((piece.in_target(piece.target_of(device)?), bytes))
                    })
                    .collect();
                let values = match &parts[..] {
                    [(only, bytes)] if only == region => bytes.clone(),
                    parts => {
                        let bytes = region.elements() * item;
                        let mut all = self.memory.allocate(bytes).map_err(|why| why.to_string())?;
                        for (part, bytes) in parts {
                            copy_region(bytes, part, &mut all, region, part, item);
                        }
                        all.freeze()
                    }
                };
                shards.push((leaf, region.clone(), values));
            }
        }
        let Numbers { publication, version } = version;
        let received = Received { version, publication, shards, avals: self.avals.clone() };
        self.taking.intake.take(&received)
    }

    fn ended(&mut self, why: &str) {
        self.taking.shared.note(|state| state.trouble = Some(why.to_owned()));
    }

    fn end(&mut self, version: Numbers, bytes: u64, refused: Option<&str>) {
        let number = version.version;
        let fresh = std::mem::take(&mut self.fresh);
        self.refused = match (refused, self.refused) {
            (Some(_), (last, count)) if last == number => (number, count + 1),
            (Some(_), _) => (number, 1),
            (None, _) => (0, 0),
        };
        // After a refusal all bits are asked for.
        let keeps = self.taking.changes && refused.is_none();
        (self.bits, self.base) = if keeps { (fresh, Some(number)) } else { Default::default() };
        if refused.is_none() {
            self.taking.publications.version = Some(number);
        }
        self.taking.intake.end(number, refused);
        self.taking.shared.note(|state| {
            state.bytes = bytes;
            match refused {
                None => {
                    (state.version, state.versions) = (Some(number), state.versions + 1);
                    state.trouble = None;
                }
                Some(why) => {
                    state.refused += 1;
                    state.trouble = Some(format!("version {number} was refused: {why}"));
                }
            }
        });
        match refused {
            None => tracing::info!(version = number, bytes, "a version was taken"),
            Some(why) => tracing::warn!("version {number} was refused: {why}"),
        }
    }
}
