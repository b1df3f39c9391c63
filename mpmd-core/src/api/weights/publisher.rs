//! The publisher's end: copies of the trained arrays, and a thread for each link.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Condvar, Mutex, mpsc, now, thread};
use mpmd_base::deadline::after;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::Tree;
use mpmd_memory::SharedBuffer;
use mpmd_proto::Failure;
use mpmd_rendezvous::Token;

use super::bits::can_cast;
use super::group::{
    GroupAnswer, GroupCall, GroupMembership, Invitation, LinkParty, Members, guarded, spawn,
};
use super::held_versions::HeldVersions;
use super::layouts::OfferedLeaf;
use super::link::{self, LinkSide};
use super::net::Net;
use super::store::{CopyError, OwnShard, PublicationEnd, Store};
use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result, panic_text};
use crate::exec::Doing;
use crate::exec::array::{MpmdArray, Repr};

/// Longest wait, at the end of a publisher, for the last copy and for subscribers that take it.
const LAST: Duration = Duration::from_secs(5);

/// Settings of a publication.
#[derive(Clone)]
pub struct Publication {
    name: String,
    token: Token,
    listen: Option<SocketAddr>,
    dtype: Option<Arc<DTypeOf>>,
    changes: bool,
    pub(super) net: Net,
}

/// A function that returns the dtype in which a leaf is published, from its path and shape.
type DTypeOf = dyn Fn(&str, &ShapedArray) -> DType + Send + Sync;

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Publication({}, listening at {:?})",
            self.name, self.listen
        )
    }
}

impl Publication {
    /// Creates the settings of a publication. A subscriber needs the same name and token.
    pub fn new(name: impl Into<String>, token: Token) -> Self {
        Self {
            name: name.into(),
            token,
            listen: None,
            dtype: None,
            changes: true,
            net: Net::default(),
        }
    }

    /// Sets the address at which subscribers find the publication. The first process with arrays of
    /// the tree listens there. The default is any free port, at the IP address by which that
    /// process has joined its job.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Publishes all arrays of dtype `f32` as `bf16` or `f16`, rounded to nearest. The default is
    /// each array's own dtype.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        self.dtype_of(move |_, aval| match aval.dtype() {
            DType::F32 => dtype,
            other => other,
        })
    }

    /// Sets a function that returns the published dtype of each array from its path and shape. It
    /// is the array's own dtype, or for `f32` also `bf16` or `f16`. It must be the same on every
    /// process.
    #[must_use]
    pub fn dtype_of(
        mut self,
        dtype: impl Fn(&str, &ShapedArray) -> DType + Send + Sync + 'static,
    ) -> Self {
        self.dtype = Some(Arc::new(dtype));
        self
    }

    /// Sets whether the publisher finds the elements that changed between versions, for subscribers
    /// that take only changes. It costs a comparison of each version with the one before. The
    /// default is true.
    #[must_use]
    pub fn changes(mut self, changes: bool) -> Self {
        self.changes = changes;
        self
    }
}

/// Counters of a [`Publisher`] on this process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PublisherMetrics {
    /// Number of connected subscribers.
    pub subscribers: usize,
    /// Number of times that a subscriber has taken a version.
    pub taken: u64,
    /// Number of times that a subscriber has refused a version.
    pub refused: u64,
    /// Bytes of memory that this process holds for versions.
    pub bytes: u64,
}

/// Publishes versions of a tree of arrays for any number of subscribers, which come and go.
///
/// A process keeps the values of two versions of its own regions. While it makes the next version
/// it also holds the arrays to copy. Over shared memory, subscribers read these values in place.
/// While they hold the memory of more than six versions, they copy later ones.
///
/// Subscribers cost the program nothing: separate threads serve them. A subscriber that dies ends
/// only its own link. Dropping the publisher ends all links.
pub struct Publisher {
    pub(super) shared: Arc<PublicationShared>,
    leaves: Vec<PublishedLeaf>,
    /// The source of each shard of the [`Store`], in the store's order.
    shards: Vec<PublishedShard>,
    copies: mpsc::Sender<VersionCopy>,
    last: Option<u64>,
    address: Option<SocketAddr>,
    group: Option<GroupMembership>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// A version to be copied: its number, and a channel on which its values arrive from the devices.
struct VersionCopy {
    number: u64,
    values: mpsc::Receiver<ShardValues>,
}

/// The values of one shard of a version, or the failure of the operation that makes them.
struct ShardValues {
    /// Index of the shard in the [`Store`].
    shard: usize,
    /// The values, or the failure of the operation that should have made them.
    outcome: std::result::Result<SharedBuffer, Arc<Failure>>,
}

/// A leaf of the published tree, with the properties it had when the publisher was created.
struct PublishedLeaf {
    path: String,
    shape: Vec<usize>,
    dtype: DType,
    sharding: Sharding,
}

/// The position, among this process's array shards, of a shard that is copied to the [`Store`].
struct PublishedShard {
    /// Index of the leaf in the tree.
    leaf: usize,
    /// Index among the leaf's shards on this process.
    local: usize,
}

/// The leaves of a published tree, and the shards of them that this process publishes.
#[derive(Default)]
struct PublishedTree {
    leaves: Vec<PublishedLeaf>,
    /// The leaves in the form that is sent to subscribers.
    offered: Vec<OfferedLeaf>,
    /// The shards that this process publishes. `shards` has their positions among the array shards.
    own: Vec<OwnShard>,
    shards: Vec<PublishedShard>,
}

/// The state that the threads of a publisher share on this process.
pub(super) struct PublicationShared {
    pub(super) name: String,
    /// A random text that distinguishes this publication from others of the same name.
    pub(super) id: String,
    pub(super) leaves: Vec<OfferedLeaf>,
    pub(super) store: Store,
    /// Number of versions whose copies are not finished.
    copying: Mutex<usize>,
    copied: Condvar,
    pub(super) metrics: Mutex<PublisherMetrics>,
}

impl Program {
    /// Creates a publisher of a tree of arrays. Subscribers in other jobs or in this one get the
    /// versions that [`Publisher::publish`] gives out, in any layout of their own. Every process
    /// must call it. Blocks until all processes have called it.
    ///
    /// The leaves are known by their paths in the tree. Their shapes, dtypes and shardings must
    /// stay. Nothing is copied before the first version.
    ///
    /// # Errors
    ///
    /// If a leaf is uncommitted, has partial sums, or cannot be cast to the dtype of the
    /// publication. If process 0 cannot listen, or the system gives no threads. If the job fails
    /// meanwhile, for example by the loss of a process.
    #[track_caller]
    pub fn publisher<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        publication: Publication,
        tree: &T,
    ) -> Result<Publisher> {
        let at = Location::caller();
        let tree = tree.leaves_with_paths();
        let used = tree.iter().filter_map(|(_, array)| array.sharding());
        let used = used.flat_map(|sharding| sharding.devices().iter().copied());
        let members = Members::of(self.topology(), used, None);

        let mut published = PublishedTree::default();
        for (path, array) in tree {
            published.add_leaf(path, array, &members, publication.dtype.as_deref(), at)?;
        }
        let store = Store::new(published.own, publication.changes);
        let id = Token::random()
            .map_err(|why| Error::Environment(why.to_string()))?
            .to_hex();
        let shared = Arc::new(PublicationShared {
            name: publication.name.clone(),
            id,
            leaves: published.offered,
            store,
            copying: Mutex::default(),
            copied: Condvar::default(),
            metrics: Mutex::default(),
        });
        let (copies, to_copy) = mpsc::channel();
        let mut publisher = Publisher {
            shared,
            leaves: published.leaves,
            shards: published.shards,
            copies,
            last: None,
            address: None,
            group: None,
            threads: Vec::new(),
        };

        if !self.is_dry_run() {
            publisher.open(self, &members, publication, to_copy)?;
        }
        Ok(publisher)
    }
}

impl PublishedTree {
    /// Adds a leaf to the tree. Fails if the leaf cannot be published.
    fn add_leaf(
        &mut self,
        path: String,
        array: &MpmdArray,
        members: &Members,
        dtype: Option<&DTypeOf>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let wrong =
            |why: String| IssueProblem::Signature(format!("{path}: {why}")).at(at, "publisher");
        let Some(sharding) = array.sharding() else {
            return Err(wrong("is uncommitted: device_put it first".to_owned()));
        };
        if sharding.layout(array.shape())?.terms() > 1 {
            return Err(wrong("has partial sums: add them up first".to_owned()));
        }
        let from = array.dtype();
        let to = dtype.map_or(from, |dtype| dtype(&path, array.aval()));
        if !can_cast(from, to) || from == DType::Object {
            return Err(wrong(format!(
                "is {from}, which cannot be published as {to}"
            )));
        }

        // Each region is published by the first device that has it.
        let holders = sharding
            .first_holders(array.shape())?
            .layout(array.shape())?;
        let leaf = self.leaves.len();
        let shape = array.shape().to_vec();
        let mut shards = Vec::new();
        for (device, region) in holders.iter().filter(|(_, region)| !region.is_empty()) {
            shards.push((members.number_of(device), region.clone()));
            let mut here = array.shards().iter();
            if let Some(local) = here.position(|shard| shard.device == device) {
                self.own.push(OwnShard {
                    leaf,
                    shape: shape.clone(),
                    region: region.clone(),
                    dtypes: [from, to],
                });
                self.shards.push(PublishedShard { leaf, local });
            }
        }

        self.offered.push(OfferedLeaf {
            name: path.clone(),
            shape: shape.clone(),
            dtype: to,
            shards,
        });
        self.leaves.push(PublishedLeaf {
            path,
            shape,
            dtype: from,
            sharding: sharding.clone(),
        });
        Ok(())
    }
}

/// Starts a thread for each link to which this process is invited.
struct LinkListener {
    shared: Arc<PublicationShared>,
    /// This process's index among the publisher's processes.
    place: usize,
    secret: Token,
    net: Net,
    peer_timeout: Duration,
}

impl LinkListener {
    /// Starts a link for each invitation. Returns when the channel is closed.
    fn run(self, invitations: &mpsc::Receiver<Invitation>) {
        let Self {
            place,
            peer_timeout,
            ..
        } = self;
        for invitation in invitations.iter() {
            let shared = self.shared.clone();
            let secret = self.secret.clone();
            let net = self.net.clone();

            let serve = move || {
                let join =
                    || invitation.join(LinkParty::Publisher, place, &secret, peer_timeout, &net);
                shared.serve(invitation.publishers, join);
            };
            if let Err(error) = spawn("mpmd-link", serve) {
                tracing::error!(%error, "a subscriber cannot be served");
            }
        }
    }
}

impl Publisher {
    /// Opens the rendezvous at which subscribers find the publication, and starts the threads that
    /// copy the versions and serve the links.
    #[track_caller]
    fn open(
        &mut self,
        p: &mut Program,
        members: &Members,
        publication: Publication,
        to_copy: mpsc::Receiver<VersionCopy>,
    ) -> Result<()> {
        let Publication {
            token, listen, net, ..
        } = publication;
        let devices = p.topology().devices_of(p.process()).len();
        let (invited, invitations) = mpsc::channel();
        let answer = answer_calls(self.shared.clone(), devices, invited);
        let opened = GroupMembership::open(p, members, listen, token.clone(), &net, answer)?;
        self.address = Some(opened.address);
        let Some(place) = members.place_of(p.process()) else {
            return Ok(());
        };
        self.group = opened.group;

        let copier = self.shared.clone();
        let copy = move || to_copy.iter().for_each(|version| copier.copy(&version));
        self.threads.push(spawn("mpmd-publish", copy)?);

        let listener = LinkListener {
            shared: self.shared.clone(),
            place,
            secret: token,
            net,
            peer_timeout: p.runtime.config.peer_timeout,
        };
        let listen = move || listener.run(&invitations);
        self.threads.push(spawn("mpmd-links", listen)?);
        Ok(())
    }

    /// Returns the address at which subscribers find the publication. `None` in a dry run.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Publishes the arrays of `tree` as version `number`. Every process must call it with the same
    /// numbers, in ascending order. The leaves must have the paths, shapes and dtypes given to
    /// [`Program::publisher`].
    ///
    /// Blocks while the copy of the previous version is being made, otherwise not. A thread of the
    /// publisher copies the values once they are computed. The arrays may be donated at once: an
    /// operation does not take over memory that is still to be copied, but gets other memory.
    ///
    /// If an array of a version fails, all links end.
    ///
    /// # Errors
    ///
    /// If the number is not above the one before. If a leaf has another path, shape or dtype than
    /// in [`Program::publisher`]. The same on every process.
    #[track_caller]
    pub fn publish<T: Tree<Leaf = MpmdArray>>(&mut self, number: u64, tree: &T) -> Result<()> {
        let at = Location::caller();
        let wrong = |why: String| IssueProblem::Signature(why).at(at, "Publisher::publish");
        if let Some(last) = self.last.filter(|last| number <= *last) {
            return Err(wrong(format!("version {number} after version {last}")));
        }
        let leaves = tree.leaves_with_paths();
        self.check_leaves(&leaves, at)?;

        self.last = Some(number);
        if self.group.is_some() {
            self.wait_for_copy(&leaves, at);
            self.start_copy(number, &leaves);
        }
        Ok(())
    }

    /// Returns an error if the leaves of a version differ from those of the publisher's tree.
    fn check_leaves(
        &self,
        leaves: &[(String, &MpmdArray)],
        at: &'static Location<'static>,
    ) -> Result<()> {
        let wrong = |why: String| IssueProblem::Signature(why).at(at, "Publisher::publish");
        if leaves.len() != self.leaves.len() {
            let expected = self.leaves.len();
            return Err(wrong(format!(
                "{} leaves: there were {expected}",
                leaves.len()
            )));
        }

        for ((path, array), known) in leaves.iter().zip(&self.leaves) {
            array
                .check_usable(path)
                .map_err(|problem| problem.at(at, "Publisher::publish"))?;
            let is_same = *path == known.path
                && array.shape() == known.shape
                && array.dtype() == known.dtype
                && array.sharding() == Some(&known.sharding);
            if !is_same {
                return Err(wrong(format!(
                    "{path}: {array:?} in the place of {}, {}{:?}",
                    known.path, known.dtype, known.shape
                )));
            }
        }
        Ok(())
    }

    /// Sends a version to the copying thread. The version's values follow once they are computed.
    fn start_copy(&self, number: u64, leaves: &[(String, &MpmdArray)]) {
        *self.shared.copying.lock() += 1;
        let (sender, values) = mpsc::channel();

        // The own shards are in the order of the leaves.
        let mut slots_leaf = None;
        let mut slots = Vec::new();
        for (index, shard) in self.shards.iter().enumerate() {
            if let Repr::Placed(placed) = &leaves[shard.leaf].1.repr
                && slots_leaf != Some(shard.leaf)
            {
                slots_leaf = Some(shard.leaf);
                slots = placed.in_host_memory();
            }
            let sender = sender.clone();
            // Registered now, since a later operation may take the memory over.
            slots[shard.local].on_end(move |outcome| {
                _ = sender.send(ShardValues {
                    shard: index,
                    outcome: outcome.clone(),
                });
            });
        }
        _ = self.copies.send(VersionCopy { number, values });
    }

    /// Blocks until the copy of the previous version is finished. Reports a hang after the peer
    /// timeout, then at growing intervals.
    fn wait_for_copy(&self, leaves: &[(String, &MpmdArray)], at: &'static Location<'static>) {
        let Some(made) = leaves.iter().find_map(|(_, array)| array.made()) else {
            return;
        };
        let runtime = &made.runtime;
        let what = "the copy of the version before";
        let _doing = runtime.status.enter(Doing::Waiting(what, at));

        let mut copying = self.shared.copying.lock();
        while *copying > 0 {
            let until = after(now(), runtime.config.peer_timeout);
            if self
                .shared
                .copied
                .wait_until(&mut copying, until)
                .timed_out()
                && *copying > 0
            {
                let me = runtime.me;
                let why = runtime.doing_and_why();
                runtime.report_hang(&format!("process {me}: {at} waits for {what}; {why}"));
            }
        }
    }

    /// Returns the counters of the publisher on this process.
    pub fn metrics(&self) -> PublisherMetrics {
        PublisherMetrics {
            bytes: self.shared.store.bytes(),
            ..*self.shared.metrics.lock()
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let until = now() + LAST;
        let mut copying = self.shared.copying.lock();
        while *copying > 0
            && !self
                .shared
                .copied
                .wait_until(&mut copying, until)
                .timed_out()
        {}
        // Its values may never come. Then nobody waits for the thread.
        let is_stuck = *copying > 0;
        drop(copying);

        self.shared.store.end(PublicationEnd::Dropped);
        // Subscribers that have room take the last version.
        while self.shared.metrics.lock().subscribers > 0 && now() < until {
            thread::sleep(Duration::from_millis(5));
        }

        // Ends the thread of the copies, and with the group that of the links.
        (self.copies, _) = mpsc::channel();
        self.group = None;
        if !is_stuck {
            self.threads.drain(..).for_each(|thread| _ = thread.join());
        }
    }
}

/// Creates the function that answers each [`GroupCall`] to this process. It forwards invitations to
/// `invited`.
fn answer_calls(
    shared: Arc<PublicationShared>,
    devices: usize,
    invited: mpsc::Sender<Invitation>,
) -> impl Fn(GroupCall) -> GroupAnswer + Send + Sync + 'static {
    // The channel is locked, since the answers may be given by any thread.
    let invited = Mutex::new(invited);
    move |call: GroupCall| match call {
        GroupCall::Hello(name) | GroupCall::Join(Invitation { name, .. })
            if name != shared.name =>
        {
            GroupAnswer::Other(shared.name.clone())
        }
        GroupCall::Join(invitation) => {
            _ = invited.lock().send(invitation);
            GroupAnswer::Here(devices)
        }
        // The second is a call to subscribers alone.
        GroupCall::Hello(_) | GroupCall::Settle(_) => GroupAnswer::Here(devices),
    }
}

impl PublicationShared {
    /// Copies a version to the store as its values arrive. A failure ends all links.
    fn copy(&self, version: &VersionCopy) {
        // The store takes the shards in order; values may come in any.
        let mut early: HashMap<usize, std::result::Result<SharedBuffer, _>> = HashMap::new();
        let next = |shard: usize| loop {
            if let Some(outcome) = early.remove(&shard) {
                return outcome.map_err(CopyError::Values);
            }
            match version.values.recv() {
                Ok(values) => _ = early.insert(values.shard, values.outcome),
                Err(_) => return Err(CopyError::ProgramEnded),
            }
        };

        let add = || self.store.add(version.number, next);
        let added = catch_unwind(AssertUnwindSafe(add));
        // Else the program would wait for this copy for ever.
        let added = added.unwrap_or_else(|panic| Err(CopyError::Panicked(panic_text(&*panic))));
        if let Err(why) = added {
            let end = PublicationEnd::NotCopied {
                version: version.number,
                why,
            };
            tracing::error!("{end}");
            self.store.end(end);
        }

        *self.copying.lock() -= 1;
        self.copied.notify_all();
    }

    /// Serves one subscriber until its link ends.
    fn serve(&self, publishers: usize, join: impl FnOnce() -> Result<Program>) {
        self.metrics.lock().subscribers += 1;
        let link = || {
            let mut p = join()?;
            let mut held = HeldVersions::new(self);
            let result = link::run(&mut p, publishers, &mut LinkSide::Publisher(&mut held));
            p.conclude(result)
        };
        let result = guarded(link);

        self.metrics.lock().subscribers -= 1;
        match result {
            Ok(()) => tracing::info!(name = self.name, "a subscriber has left"),
            Err(error) => tracing::warn!(name = self.name, %error, "a subscriber is lost"),
        }
    }
}
