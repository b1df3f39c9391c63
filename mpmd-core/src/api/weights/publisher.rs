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
use mpmd_layout::tree::Tree;
use mpmd_memory::SharedBuffer;
use mpmd_rendezvous::Token;

use super::bits::can_cast;
use super::group::{Answer, Call, End, Group, Invitation, Members, guarded, spawn};
use super::held::Held;
use super::layouts::Offered;
use super::link::{self, Side};
use super::net::Net;
use super::store::{OwnShard, Store};
use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result, panic_text};
use crate::exec::Doing;
use crate::exec::array::{MpmdArray, Repr};

/// Time for the last copy, and for subscribers to take it.
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

/// Returns the dtype in which a leaf is published.
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
    /// Creates the settings of a publication. Subscribers need its name and its token.
    pub fn new(name: impl Into<String>, token: Token) -> Self {
        let (name, net) = (name.into(), Net::default());
        Self {
            name,
            token,
            listen: None,
            dtype: None,
            changes: true,
            net,
        }
    }

    /// Sets the address at which the first process with arrays of the tree listens for subscribers.
    /// The default is any free port, at the address by which that process has joined its job.
    #[must_use]
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.listen = Some(address);
        self
    }

    /// Publishes all arrays of dtype `f32` as `bf16` or `f16`, rounded to the nearest. The default
    /// is the arrays' own dtype.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        self.dtype_of(move |_, aval| match aval.dtype() {
            DType::F32 => dtype,
            other => other,
        })
    }

    /// Publishes each array in the dtype that `dtype` returns for its path and shape: its own, or
    /// for `f32` also `bf16` or `f16`. It must return the same on every process.
    #[must_use]
    pub fn dtype_of(
        mut self,
        dtype: impl Fn(&str, &ShapedArray) -> DType + Send + Sync + 'static,
    ) -> Self {
        self.dtype = Some(Arc::new(dtype));
        self
    }

    /// Sets whether changed elements are noted, for subscribers that take changes alone. It costs a
    /// comparison of each version with the one before. The default is true.
    #[must_use]
    pub fn changes(mut self, changes: bool) -> Self {
        self.changes = changes;
        self
    }
}

/// The figures of a [`Publisher`] on this process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PublisherMetrics {
    /// Number of subscribers at present.
    pub subscribers: usize,
    /// Number of versions that subscribers have taken, and of those that they refused.
    pub taken: u64,
    /// See [`taken`](Self::taken).
    pub refused: u64,
    /// Bytes of this process's memory for versions.
    pub bytes: u64,
}

/// Publishes versions of a tree of arrays for any number of subscribers, which come and go.
///
/// A process keeps the bits of two versions of its own regions, and while it makes the next one
/// also the arrays that it copies. Over shared memory subscribers read these bits where they are;
/// while they keep those of more than six versions in all, they copy later ones.
///
/// Subscribers cost the program nothing: threads of their own serve them, and a subscriber that
/// dies ends its own link alone. Dropping the publisher ends all links.
pub struct Publisher {
    shared: Arc<Shared>,
    offered: Vec<Leaf>,
    /// For each own shard: the index of its leaf, and of the shard on this process.
    places: Vec<(usize, usize)>,
    copies: mpsc::Sender<Copying>,
    last: Option<u64>,
    address: Option<SocketAddr>,
    group: Option<Group>,
    threads: Vec<thread::JoinHandle<()>>,
}

/// The values of a version as they come from the devices: (own shard, values or the failure).
struct Copying {
    number: u64,
    values: mpsc::Receiver<(usize, std::result::Result<SharedBuffer, String>)>,
}

struct Leaf {
    path: String,
    shape: Vec<usize>,
    dtype: DType,
    sharding: Option<mpmd_layout::sharding::Sharding>,
}

pub(super) struct Shared {
    pub(super) name: String,
    /// A random text, by which subscribers tell this publication from others.
    pub(super) id: String,
    pub(super) leaves: Vec<Offered>,
    pub(super) store: Store,
    /// Number of copies that are being made.
    copying: Mutex<usize>,
    copied: Condvar,
    pub(super) metrics: Mutex<PublisherMetrics>,
}

impl Program {
    /// Publishes a tree of arrays under a name: subscribers of other jobs, or of this one, get the
    /// versions that [`Publisher::publish`] gives out, in any layout of their own. Every process
    /// must call it. Blocks until all have.
    ///
    /// The leaves are known by their paths in the tree. Their shapes, dtypes and shardings must
    /// stay. Nothing is copied before the first version.
    ///
    /// # Errors
    ///
    /// If a leaf is uncommitted, has partial sums, or cannot be cast to the dtype of the
    /// publication. If process 0 cannot listen, or the system gives no threads.
    #[track_caller]
    pub fn publish<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        publication: Publication,
        tree: &T,
    ) -> Result<Publisher> {
        let at = Location::caller();
        let wrong = |path: &str, why: String| {
            IssueProblem::Signature(format!("{path}: {why}")).at(at, "publish")
        };
        let Publication {
            name,
            token,
            listen,
            dtype,
            changes,
            net,
        } = publication;
        let (mut leaves, mut offered, mut own, mut places) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let tree = tree.leaves_with_paths();
        let used = tree.iter().filter_map(|(_, array)| array.sharding());
        let used = used.flat_map(|sharding| sharding.devices().iter().copied());
        let members = Members::of(self.topology(), used, None);
        for (index, (path, array)) in tree.into_iter().enumerate() {
            let Some(sharding) = array.sharding() else {
                return Err(wrong(
                    &path,
                    "is uncommitted: device_put it first".to_owned(),
                ));
            };
            let layout = sharding.layout(array.shape())?;
            if layout.terms() > 1 {
                return Err(wrong(
                    &path,
                    "has partial sums: add them up first".to_owned(),
                ));
            }
            let from = array.dtype();
            let to = dtype
                .as_ref()
                .map_or(from, |dtype| dtype(&path, array.aval()));
            if !can_cast(from, to) || from == DType::Object {
                return Err(wrong(
                    &path,
                    format!("is {from}, which cannot be published as {to}"),
                ));
            }
            let holders = sharding
                .first_holders(array.shape())?
                .layout(array.shape())?;
            for (device, region) in holders.iter().filter(|(_, region)| !region.is_empty()) {
                let local = array
                    .shards()
                    .iter()
                    .position(|shard| shard.device == device);
                if let Some(local) = local {
                    let (shape, region) = (array.shape().to_vec(), region.clone());
                    own.push(OwnShard {
                        leaf: index,
                        shape,
                        region,
                        dtypes: [from, to],
                    });
                    places.push((index, local));
                }
            }
            let shards = holders.iter().filter(|(_, region)| !region.is_empty());
            let shards = shards.map(|(device, region)| (members.number_of(device), region.clone()));
            let shards = shards.collect();
            let shape = array.shape().to_vec();
            offered.push(Offered {
                name: path.clone(),
                shape: shape.clone(),
                dtype: to,
                shards,
            });
            leaves.push(Leaf {
                path,
                shape,
                dtype: from,
                sharding: Some(sharding.clone()),
            });
        }
        let store = Store::new(own, changes);
        let (copying, copied, metrics) = Default::default();
        let id = Token::random()
            .map_err(|why| Error::Environment(why.to_string()))?
            .to_hex();
        let shared = Arc::new(Shared {
            name,
            id,
            leaves: offered,
            store,
            copying,
            copied,
            metrics,
        });
        let (copies, taken) = mpsc::channel();
        let mut publisher = Publisher {
            shared: shared.clone(),
            offered: leaves,
            places,
            copies,
            last: None,
            address: None,
            group: None,
            threads: Vec::new(),
        };
        if self.is_dry_run() {
            return Ok(publisher);
        }
        let devices = self.topology().devices_of(self.process()).len();
        let (invited, invitations) = mpsc::channel();
        // The channel is locked, since the answers may be given by any thread.
        let invited = Mutex::new(invited);
        let answering = shared.clone();
        let answer = move |call: Call| match call {
            Call::Hello(name) | Call::Join(Invitation { name, .. }) if name != answering.name => {
                Answer::Other(answering.name.clone())
            }
            Call::Join(invitation) => {
                _ = invited.lock().send(invitation);
                Answer::Here(devices)
            }
            // The second is a call to subscribers alone.
            Call::Hello(_) | Call::Settle(_) => Answer::Here(devices),
        };
        let secret = token.clone();
        let (address, group) = Group::open(self, &members, (listen, token, &net), answer)?;
        publisher.address = Some(address);
        let Some(me) = members.place_of(self.process()) else {
            return Ok(publisher);
        };
        publisher.group = group;
        let copier = shared.clone();
        let copy = move || taken.iter().for_each(|copying| copier.copy(&copying));
        publisher.threads.push(spawn("mpmd-publish", copy)?);
        let peer_timeout = self.runtime.config.peer_timeout;
        let listen = move || {
            for invitation in invitations.iter() {
                let shared = shared.clone();
                let (secret, net) = (secret.clone(), net.clone());
                let serve = move || {
                    let join = || invitation.join(End::Publisher, me, &secret, peer_timeout, &net);
                    shared.serve(invitation.publishers, join);
                };
                if let Err(error) = spawn("mpmd-link", serve) {
                    tracing::error!(%error, "a subscriber cannot be served");
                }
            }
        };
        publisher.threads.push(spawn("mpmd-links", listen)?);
        Ok(publisher)
    }
}

impl Publisher {
    /// Returns the address at which subscribers find the publication. `None` in a dry run.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Gives out the tree as a version. Every process must call it with the same numbers, in
    /// ascending order. The leaves must be as in [`Program::publish`].
    ///
    /// Blocks while the copy of the version before is being made, otherwise not: the copy of this
    /// one begins when its values are there, on a thread of its own. The arrays may be donated at
    /// once: an operation that takes over memory which is not copied yet gets other memory.
    ///
    /// A version whose arrays fail ends all links.
    ///
    /// # Errors
    ///
    /// If the number is not above the one before, or a leaf is another than in
    /// [`Program::publish`]. The same on every process.
    #[track_caller]
    pub fn publish<T: Tree<Leaf = MpmdArray>>(&mut self, number: u64, tree: &T) -> Result<()> {
        let at = Location::caller();
        let wrong = |why: String| IssueProblem::Signature(why).at(at, "Publisher::publish");
        if let Some(last) = self.last.filter(|last| number <= *last) {
            return Err(wrong(format!("version {number} after version {last}")));
        }
        let leaves = tree.leaves_with_paths();
        if leaves.len() != self.offered.len() {
            let expected = self.offered.len();
            return Err(wrong(format!(
                "{} leaves: there were {expected}",
                leaves.len()
            )));
        }
        for ((path, array), known) in leaves.iter().zip(&self.offered) {
            array
                .check_usable(path)
                .map_err(|problem| problem.at(at, "Publisher::publish"))?;
            let is_same = *path == known.path
                && array.shape() == known.shape
                && array.dtype() == known.dtype
                && array.sharding() == known.sharding.as_ref();
            if !is_same {
                return Err(wrong(format!(
                    "{path}: {array:?} in the place of {}, {}{:?}",
                    known.path, known.dtype, known.shape
                )));
            }
        }
        self.last = Some(number);
        if self.group.is_none() {
            return Ok(());
        }
        self.wait_for_copy(&leaves, at);
        *self.shared.copying.lock() += 1;
        let (sender, values) = mpsc::channel();
        let mut slots = (usize::MAX, Vec::new());
        for (own, (leaf, shard)) in self.places.iter().enumerate() {
            if let Repr::Placed(placed) = &leaves[*leaf].1.repr
                && slots.0 != *leaf
            {
                slots = (*leaf, placed.in_host_memory());
            }
            let sender = sender.clone();
            // Registered now, since a later operation may take the memory over.
            slots.1[*shard].on_end(move |outcome| {
                _ = sender.send((own, outcome.clone().map_err(|failure| failure.to_string())));
            });
        }
        _ = self.copies.send(Copying { number, values });
        Ok(())
    }

    /// Blocks until the copy of the version before is made. Reports a hang after the peer timeout,
    /// then at growing intervals.
    fn wait_for_copy(&self, leaves: &[(String, &MpmdArray)], at: &'static Location<'static>) {
        let Some(made) = leaves.iter().find_map(|(_, array)| array.made()) else {
            return;
        };
        let (runtime, what) = (&made.runtime, "the copy of the version before");
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
                let (me, why) = (runtime.me, runtime.doing_and_why());
                runtime.report_hang(&format!("process {me}: {at} waits for {what}; {why}"));
            }
        }
    }

    /// Returns the figures of the publisher on this process.
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
        self.shared.store.end("the publisher has ended".to_owned());
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

impl Shared {
    fn copy(&self, copying: &Copying) {
        let mut early = HashMap::new();
        let next = |own: usize| loop {
            if let Some(values) = early.remove(&own) {
                return values;
            }
            match copying.values.recv() {
                Ok((other, values)) => _ = early.insert(other, values),
                Err(_) => return Err("the program has ended".to_owned()),
            }
        };
        let add = || self.store.add(copying.number, next);
        let added = catch_unwind(AssertUnwindSafe(add));
        // Else the program would wait for this copy for ever.
        if let Err(why) = added.unwrap_or_else(|panic| Err(panic_text(&*panic))) {
            let why = format!("version {} could not be published: {why}", copying.number);
            tracing::error!("{why}");
            self.store.end(why);
        }
        *self.copying.lock() -= 1;
        self.copied.notify_all();
    }

    /// Serves a subscriber until it leaves.
    fn serve(&self, publishers: usize, join: impl FnOnce() -> Result<Program>) {
        self.metrics.lock().subscribers += 1;
        let link = || {
            let mut p = join()?;
            let mut held = Held::new(self);
            let result = link::run(&mut p, publishers, &mut Side::Publisher(&mut held));
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
