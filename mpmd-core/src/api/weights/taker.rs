//! The thread that joins links with the publisher on a process of a subscriber, and takes the
//! versions that come.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{mpsc, now, since};
use mpmd_base::deadline::after;
use mpmd_device::copy::copy_region;
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;
use mpmd_memory::{OutOfMemory, Pool, SharedBuffer};
use mpmd_rendezvous::Token;

use super::bits::{hash, read_changes};
use super::group::{Invitation, LinkParty, Members, guarded};
use super::layouts::{AskedLeaf, LeafPiece, WantedLeaf};
use super::link::{
    self, ArrivedPiece, IntakePanic, LinkSide, PieceShard, SubscriberLink, SubscriberTurn,
    VersionNumbers, VersionRefusal,
};
use super::net::Net;
use super::subscriber::{
    Intake, Received, ReceivedLeaf, ReceivedShard, Subscribing, SubscriptionShared,
};
use crate::error::{Error, panic_text};

/// Time between two calls of [`Intake::has_room`].
const LOOK: Duration = Duration::from_millis(20);
/// Time for which a process that gave up its subscription waits for the first process to end the
/// link.
const ALONE: Duration = Duration::from_secs(2);
/// The reason given to an intake for discarding a version that not all processes have taken.
const BROKEN: &str = "the link to the publisher broke before every process had taken it";

/// An event for the thread that takes versions on a process of a subscriber.
pub(super) enum TakerNews {
    /// This process is invited to join a link.
    Invited(Invitation),
    /// The last link is over. The value is the newest version that process 0 knows to be whole.
    Settled(Option<VersionNumbers>),
    /// A process of the publisher or the subscriber cannot be reached, for this reason.
    NotFound(String),
}

/// The thread that joins links and takes versions on this process of a subscriber.
pub(super) struct Taking {
    shared: Arc<SubscriptionShared>,
    wanted: Arc<Vec<WantedLeaf>>,
    leaves: Arc<Vec<ReceivedLeaf>>,
    members: Members,
    /// This process's index among the subscriber's processes.
    me: usize,
    /// The secret of the publication.
    secret: Token,
    net: Net,
    peer_timeout: Duration,
    changes: bool,
    intake: Guarded,
    publications: Publications,
    /// The pool of received values. It outlives each link, because the intake may still read them.
    memory: Pool,
    /// A version that this process took before its link broke. Process 0 knows whether it is whole.
    doubt: Option<VersionNumbers>,
}

/// The publications that the subscription has found at its address, one after another.
#[derive(Debug, Default)]
struct Publications {
    /// The id of the last publication.
    last: Option<String>,
    /// Number of publications before the last one.
    before: u64,
    /// The newest version of the last publication that is whole on every process.
    version: Option<u64>,
}

impl Publications {
    /// Records the id of a link's publication, which may be a new one.
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
    pub(super) fn new(
        shared: Arc<SubscriptionShared>,
        wanted: Arc<Vec<WantedLeaf>>,
        members: Members,
        me: usize,
        intake: Box<dyn Intake>,
        subscribing: &Subscribing,
        peer_timeout: Duration,
    ) -> Self {
        let leaves = wanted.iter().map(|leaf| ReceivedLeaf {
            name: leaf.name.clone(),
            aval: leaf.aval.clone(),
        });
        let leaves = Arc::new(leaves.collect::<Vec<_>>());

        let intake = Guarded {
            intake,
            shared: shared.clone(),
        };
        Self {
            shared,
            wanted,
            leaves,
            members,
            me,
            secret: subscribing.token.clone(),
            net: subscribing.net.clone(),
            peer_timeout,
            changes: subscribing.changes,
            intake,
            publications: Publications::default(),
            memory: Pool::new("bits of a subscription", None),
            doubt: None,
        }
    }

    /// Takes versions until the subscription ends. Joins only the newest of several invitations:
    /// the links of older ones are over.
    pub(super) fn run(mut self, news: &mpsc::Receiver<TakerNews>) {
        while let Ok(first) = news.recv() {
            let mut newest = None;
            for news in std::iter::once(first).chain(std::iter::from_fn(|| news.try_recv().ok())) {
                match news {
                    TakerNews::Invited(invitation) => newest = Some(invitation),
                    TakerNews::Settled(whole) => self.settle(whole),
                    TakerNews::NotFound(why) => self.intake.linked(Some(&why)),
                }
            }
            if let Some(invitation) = newest.filter(|_| !self.shared.has_ended()) {
                self.link(&invitation);
            }
        }
    }

    /// Joins a link, and returns after the link's end.
    fn link(&mut self, invitation: &Invitation) {
        let me = self.me;
        let peer_timeout = self.peer_timeout;
        let secret = self.secret.clone();
        let net = self.net.clone();

        let mut taker = Taker::new(self, invitation);
        let joined =
            guarded(|| invitation.join(LinkParty::Subscriber, me, &secret, peer_timeout, &net));
        let result = joined.and_then(|mut p| {
            taker.taking.shared.note(|state| {
                state.is_linked = true;
                state.trouble = None;
            });
            taker.taking.intake.linked(None);
            let side = &mut LinkSide::Subscriber(&mut taker);
            let result = guarded(|| link::run(&mut p, invitation.publishers, side));
            // Before another link can begin.
            taker.break_off();
            p.conclude(result)
        });

        // Without the operation of the link that waited.
        let first = |error: Error| {
            error
                .to_string()
                .split("; operation")
                .next()
                .map(str::to_owned)
        };
        let why = result.err().and_then(first);
        if let Some(why) = &why
            && !self.shared.has_ended()
        {
            tracing::warn!(name = invitation.name, "the publisher is lost: {why}");
        }

        self.shared.note(|state| {
            if let Some(why) = why {
                state.trouble = Some(why);
            }
        });
        let trouble = self.shared.state().trouble;
        self.intake.linked(Some(&trouble.unwrap_or_default()));
        self.shared.note(|state| state.is_linked = false);
    }

    /// Ends the version in `doubt`, whose link broke before this process heard how it ended. The
    /// version is whole if it equals `whole`, the newest version that process 0 knows.
    fn settle(&mut self, whole: Option<VersionNumbers>) {
        let Some(version) = self.doubt.take() else {
            return;
        };
        let number = version.version;
        if whole != Some(version) {
            return self.intake.end(number, Some(BROKEN));
        }
        self.intake.end(number, None);
        self.shared.note(|state| {
            state.version = Some(number);
            state.versions += 1;
        });
    }
}

/// Calls an [`Intake`], and turns a panic in it into an error of the subscription.
struct Guarded {
    intake: Box<dyn Intake>,
    shared: Arc<SubscriptionShared>,
}

impl Guarded {
    /// Returns true if the intake has room for a version. Fails if the intake panics.
    fn has_room(&mut self) -> std::result::Result<bool, IntakePanic> {
        self.call(|intake| intake.has_room())
    }

    fn take(&mut self, received: &Received) -> std::result::Result<(), VersionRefusal> {
        self.call(|intake| intake.take(received))?
            .map_err(VersionRefusal::Intake)
    }

    fn end(&mut self, version: u64, refused: Option<&str>) {
        _ = self.call(|intake| intake.end(version, refused));
    }

    fn linked(&mut self, ended: Option<&str>) {
        _ = self.call(|intake| intake.linked(ended));
    }

    fn call<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Intake) -> T,
    ) -> std::result::Result<T, IntakePanic> {
        let intake = &mut *self.intake;
        catch_unwind(AssertUnwindSafe(|| f(intake))).map_err(|panic| {
            let panicked = IntakePanic {
                panic: panic_text(&*panic),
            };
            tracing::error!("{panicked}");
            self.shared
                .note(|state| state.trouble = Some(panicked.to_string()));
            panicked
        })
    }
}

/// The values of pieces on devices of this process.
type Bits = HashMap<PieceShard, SharedBuffer>;

/// A subscriber process's state in one link.
struct Taker<'a> {
    taking: &'a mut Taking,
    /// The link's number of the first device of this job.
    first: u32,
    /// The values of the last whole version, if they are kept. `fresh` has the values of the
    /// version that is arriving.
    bits: Bits,
    fresh: Bits,
    /// The version whose values all processes of the subscriber keep.
    base: Option<u64>,
    refused: RefusalCount,
    /// The version that was given to the intake and has not ended.
    taken: Option<TakenVersion>,
}

/// Counts consecutive refusals of the same version.
#[derive(Default)]
struct RefusalCount {
    /// The last refused version; without meaning if `count` is 0.
    version: u64,
    count: u32,
}

/// A version that this process has given to the intake.
struct TakenVersion {
    version: VersionNumbers,
    is_refused: bool,
}

impl<'a> Taker<'a> {
    fn new(taking: &'a mut Taking, invitation: &Invitation) -> Self {
        let first: usize = invitation.devices.iter().take(invitation.publishers).sum();
        Self {
            taking,
            first: first as u32,
            bits: HashMap::new(),
            base: None,
            fresh: HashMap::new(),
            refused: RefusalCount::default(),
            taken: None,
        }
    }

    /// Ends the version that was moving when the link broke. On a process other than the first, it
    /// may still be whole, so it is in `doubt` until process 0 decides.
    fn break_off(&mut self) {
        let Some(TakenVersion {
            version,
            is_refused,
        }) = self.taken.take()
        else {
            return;
        };
        match self.taking.me == 0 || is_refused {
            true => self.taking.intake.end(version.version, Some(BROKEN)),
            false => self.taking.doubt = Some(version),
        }
    }

    /// Returns the pieces of a leaf that have arrived on a device, with their regions in the leaf.
    fn parts_of(
        &self,
        leaf: usize,
        device: DeviceId,
        pieces: &[LeafPiece],
    ) -> Vec<(Region, SharedBuffer)> {
        let parts = pieces.iter().enumerate();
        let parts = parts.filter(|(_, piece)| piece.to == leaf);
        parts
            .filter_map(|(index, piece)| {
                let shard = PieceShard {
                    piece: index,
                    device,
                };
                let bytes = self.fresh.get(&shard)?.clone();
                Some((piece.in_target(piece.target_of(device)?), bytes))
            })
            .collect()
    }

    /// Joins parts to the values of a region. A single part that is the whole region is not copied.
    fn join(
        &self,
        region: &Region,
        parts: &[(Region, SharedBuffer)],
        item: usize,
    ) -> std::result::Result<SharedBuffer, OutOfMemory> {
        if let [(only, bytes)] = parts
            && only == region
        {
            return Ok(bytes.clone());
        }
        let mut all = self.taking.memory.allocate(region.elements() * item)?;
        for (part, bytes) in parts {
            copy_region(bytes, part, &mut all, region, part, item);
        }
        Ok(all.freeze())
    }

    /// Applies changes to the kept values of a piece, and returns the new values. `None` if no
    /// values are kept, or the changes do not fit.
    ///
    /// # Errors
    ///
    /// If there is no memory for the new values.
    fn changed(
        &self,
        piece: &LeafPiece,
        shard: PieceShard,
        changes: &[(Region, SharedBuffer)],
    ) -> std::result::Result<Option<SharedBuffer>, OutOfMemory> {
        let (Some(old), Some(target)) = (self.bits.get(&shard), piece.target_of(shard.device))
        else {
            return Ok(None);
        };
        let item = piece.aval.dtype().size();

        let mut new = self.taking.memory.allocate(old.len())?;
        new.copy_from_slice(old);
        for (common, bytes) in changes {
            let row = common.shape();
            let change = |place: usize, value: &[u8]| {
                // The place in `common` as one in the device's region.
                let mut left = place;
                let mut at = 0;
                let mut step = 1;
                for dim in (0..row.len()).rev() {
                    let range = target.range(dim);
                    at += (common.range(dim).start + left % row[dim] - range.start) * step;
                    left /= row[dim];
                    step *= range.len();
                }
                let is_in = left == 0 && place < common.elements();
                new.get_mut(at * item..)?
                    .get_mut(..item)?
                    .copy_from_slice(value);
                is_in.then_some(())
            };
            if read_changes(&mut &bytes[..], item, change).is_none() {
                return Ok(None);
            }
        }
        Ok(Some(new.freeze()))
    }
}

impl SubscriberLink for Taker<'_> {
    fn found(&mut self, id: String) {
        self.taking.publications.find(id);
    }

    fn asked(&self) -> Vec<AskedLeaf> {
        // They were checked at the start.
        let number = |device| self.first + self.taking.members.number_of(device);
        self.taking
            .wanted
            .iter()
            .filter_map(|leaf| leaf.told(number).ok())
            .collect()
    }

    fn has_left(&self) -> bool {
        self.taking
            .shared
            .ended()
            .is_some_and(|at| since(at) > ALONE)
    }

    fn has_room(&mut self, timeout: Duration) -> bool {
        let until = after(now(), timeout);
        while !self.taking.shared.has_ended() {
            let left = until.saturating_duration_since(now());
            match self.taking.intake.has_room() {
                Ok(true) => return true,
                Ok(false) if left.is_zero() => return false,
                Ok(false) => self.taking.shared.sleep(LOOK.min(left)),
                // It is not asked again at once.
                Err(_) => {
                    self.taking.shared.sleep(left);
                    return false;
                }
            }
        }
        true
    }

    fn ask(&self, has_room: bool) -> SubscriberTurn {
        // A version may be damaged on its way once; it is not asked for a third time.
        let given_up = Some(self.refused.version).filter(|_| self.refused.count > 1);
        let publications = &self.taking.publications;
        SubscriberTurn {
            publication: publications.before,
            above: publications.version.max(given_up),
            base: self.base,
            has_room,
            has_ended: self.taking.shared.has_ended(),
        }
    }

    fn piece(
        &mut self,
        index: usize,
        piece: &LeafPiece,
        device: DeviceId,
        arrived: ArrivedPiece,
        sum: u64,
    ) -> std::result::Result<(), VersionRefusal> {
        let shard = PieceShard {
            piece: index,
            device,
        };
        let wanted = self.taking.wanted.get(piece.to);
        let name = &wanted.ok_or(VersionRefusal::OtherLeaves)?.name;
        let bytes = match arrived {
            ArrivedPiece::Whole(bytes) => bytes,
            ArrivedPiece::Changes(changes) => self
                .changed(piece, shard, &changes)?
                .ok_or_else(|| VersionRefusal::OtherBase { leaf: name.clone() })?,
        };

        let Some(target) = piece.target_of(device) else {
            return Ok(());
        };
        let region = piece.in_source(target);
        let item = piece.aval.dtype().size();
        if hash(&bytes, &region, &region, &piece.from_shape, item) != sum {
            return Err(VersionRefusal::OtherBits {
                leaf: name.clone(),
                region: piece.in_target(target),
            });
        }

        // Bits that are kept for later changes must not be the publisher's memory.
        let bytes = match self.taking.changes && bytes.is_lent() {
            true => {
                let mut own = self.taking.memory.allocate(bytes.len())?;
                own.copy_from_slice(&bytes);
                own.freeze()
            }
            false => bytes,
        };
        self.fresh.insert(shard, bytes);
        Ok(())
    }

    fn take(
        &mut self,
        version: VersionNumbers,
        pieces: &[LeafPiece],
    ) -> std::result::Result<(), VersionRefusal> {
        let mut shards = Vec::new();
        for (leaf, asked) in self.asked().iter().enumerate() {
            let item = asked.dtype.size();
            let own = asked.shards.iter().filter(|(device, region)| {
                self.fresh.keys().any(|own| own.device.0 == *device) || region.is_empty()
            });
            for (device, region) in own {
                let parts = self.parts_of(leaf, DeviceId(*device), pieces);
                let values = self.join(region, &parts, item)?;
                shards.push(ReceivedShard {
                    leaf,
                    region: region.clone(),
                    values,
                });
            }
        }

        let received = Received {
            version: version.version,
            publication: version.publication,
            shards,
            leaves: self.taking.leaves.clone(),
        };
        let taken = self.taking.intake.take(&received);
        self.taken = Some(TakenVersion {
            version,
            is_refused: taken.is_err(),
        });
        taken
    }

    fn ended(&mut self, why: &str) {
        self.taking
            .shared
            .note(|state| state.trouble = Some(why.to_owned()));
    }

    fn end(&mut self, version: VersionNumbers, bytes: u64, refused: Option<&str>) {
        let number = version.version;
        let fresh = std::mem::take(&mut self.fresh);
        self.refused = match refused {
            Some(_) => RefusalCount {
                version: number,
                count: if self.refused.version == number {
                    self.refused.count + 1
                } else {
                    1
                },
            },
            None => RefusalCount::default(),
        };

        // After a refusal all bits are asked for.
        let keeps = self.taking.changes && refused.is_none();
        (self.bits, self.base) = if keeps {
            (fresh, Some(number))
        } else {
            Default::default()
        };
        if refused.is_none() {
            self.taking.publications.version = Some(number);
            self.taking.shared.set_whole(version);
        }

        self.taken = None;
        self.taking.shared.note(|state| {
            state.bytes = bytes;
            if refused.is_none() {
                state.trouble = None;
            }
        });
        self.taking.intake.end(number, refused);
        self.taking.shared.note(|state| match refused {
            None => {
                state.version = Some(number);
                state.versions += 1;
            }
            Some(why) => {
                state.refused += 1;
                state.trouble = Some(format!("version {number} was refused: {why}"));
            }
        });
        match refused {
            None => tracing::info!(version = number, bytes, "a version was taken"),
            Some(why) => tracing::warn!("version {number} was refused: {why}"),
        }
    }
}
