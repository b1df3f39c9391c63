//! The program of a link: the processes of a publisher and of one subscriber form a job beside
//! their own programs. The first processes of that job are the publisher's.
//!
//! A turn moves a version. The subscriber tells its state ([`SubscriberTurn`]), and the publisher's
//! processes tell the numbers of their versions. The newest version that all of them have is moved.
//! Its pieces go by [`Program::reshard`], or as changed elements in the *notes*: there is a note
//! from each device of the publisher to each device of the subscriber, with the hashes of the
//! regions that the one gets from the other. The subscriber's processes compare the hashes, take
//! the version, and say so. The version is whole once the first of them has heard that from all:
//! its word decides, also if the link breaks before the others hear it.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::panic::Location;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::now;
use mpmd_base::deadline::after;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceId;
use mpmd_memory::{OutOfMemory, SharedBuffer};
use serde::{Deserialize, Serialize};

use super::buffers::DeviceBuffer;
use super::layouts::{AskedLeaf, LeafPiece, OfferedLeaf, pieces};
use super::store::PublicationEnd;
use crate::api::program::Program;
use crate::api::recover::tell;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::{AsyncBuffer, Doing};

/// Longest wait in one turn, of a publisher's process for a version or of a subscriber for room.
/// Shorter than any peer timeout.
const IDLE: Duration = Duration::from_millis(500);

/// The state that a publisher's process sends before a turn.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct PublisherTurn {
    /// The numbers of the versions that the process has.
    versions: Vec<u64>,
    /// True if readers keep more memory of the process's versions than it lends.
    is_short: bool,
}

/// The outcome of the choice of a version for a turn.
enum VersionChoice {
    Version(ChosenVersion),
    /// No new version is on all processes of the publisher yet.
    NoneYet,
    /// No further version will come, for the reason that a process of the publisher gave.
    Ended(String),
}

/// The version that a turn moves.
struct ChosenVersion {
    number: u64,
    /// True if the subscriber's processes must copy the memory that the publisher lends them.
    copies: bool,
}

/// The subscriber's state, which its first process sends before a turn.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct SubscriberTurn {
    /// Number of publications that the subscriber had found before the current one.
    pub(super) publication: u64,
    /// The number above which the next version must be; `None` for any version.
    pub(super) above: Option<u64>,
    /// The version whose values every process of the subscriber keeps, so that changes can be
    /// applied to them.
    pub(super) base: Option<u64>,
    /// True if all processes of the subscriber have room for a version.
    pub(super) has_room: bool,
    pub(super) has_ended: bool,
}

/// The publication that a link transfers: its id and its leaves.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Offering {
    /// The id of the publication.
    pub(super) id: String,
    pub(super) leaves: Vec<OfferedLeaf>,
}

/// The data of a piece that a target device has received: the whole region, or changed elements.
pub(super) enum ArrivedPiece {
    Whole(SharedBuffer),
    /// The changed elements in each source's region, encoded by
    /// [`write_changes`](super::bits::write_changes).
    Changes(Vec<(Region, SharedBuffer)>),
}

/// The operations of a link that a publisher's process implements.
pub(super) trait PublisherLink {
    /// Returns the id and the leaves of the publication, to be sent to the subscriber.
    fn offered(&self) -> Offering;
    /// Returns the numbers of the versions above `above`, and keeps these versions until the next
    /// call. Waits for a version, at most for `timeout`. An error ends the link in order.
    fn wait(
        &mut self,
        above: Option<u64>,
        timeout: Duration,
    ) -> std::result::Result<Vec<u64>, PublicationEnd>;
    /// Returns true if readers keep more memory of the versions than the publisher lends.
    fn is_short(&self) -> bool;
    /// Makes the store keep version `number`, now or once it is made. Releases the version that was
    /// pinned before.
    fn pin(&mut self, number: Option<u64>);
    /// Selects one of the versions that [`wait`](Self::wait) returned, for the calls that follow.
    fn choose(&mut self, number: u64);
    /// Returns, for each piece, the bytes of its changes from `base` to `number`; `None` if they
    /// are unknown.
    fn change_bytes(&mut self, pieces: &[LeafPiece], base: u64, number: u64) -> Vec<Option<u64>>;
    /// Returns the values of `region`, one of the piece's [sources](LeafPiece::sources).
    fn bits(&mut self, piece: &LeafPiece, region: &Region) -> Result<SharedBuffer>;
    /// Appends the hash of a piece's region `common` to the note `to`. With `changes`, also appends
    /// the changed elements.
    fn note(&mut self, piece: &LeafPiece, common: &Region, changes: bool, to: &mut Vec<u8>);
    /// Counts a version that the subscriber has taken, or refused for the reason `refused`.
    fn sent(&mut self, number: u64, refused: Option<&str>);
}

/// The operations of a link that a subscriber's process implements.
pub(super) trait SubscriberLink {
    /// Stores the id of the publication that the link transfers.
    fn found(&mut self, id: String);
    fn asked(&self) -> Vec<AskedLeaf>;
    /// Returns true if this process gave up its subscription some time ago. Usually the first
    /// process gives up at the same time and ends the link in order.
    fn has_left(&self) -> bool;
    /// Waits for room for a version on this process, at most for `timeout`. Returns true if there
    /// is room or the subscription has ended.
    fn has_room(&mut self, timeout: Duration) -> bool;
    /// Returns the state of the subscription. `has_room` is true if this process has room for a
    /// version.
    fn ask(&self, has_room: bool) -> SubscriberTurn;
    /// Stores the received data of a piece on a device, after comparing its hash with `hash`.
    fn piece(
        &mut self,
        index: usize,
        piece: &LeafPiece,
        device: DeviceId,
        arrived: ArrivedPiece,
        hash: u64,
    ) -> std::result::Result<(), VersionRefusal>;
    /// Gives a version to the intake after all its pieces have arrived.
    fn take(
        &mut self,
        version: VersionNumbers,
        pieces: &[LeafPiece],
    ) -> std::result::Result<(), VersionRefusal>;
    /// Stores the reason why the publisher gives out no further version.
    fn ended(&mut self, why: &str);
    /// Ends a version: all processes have taken it, or one has refused it for the reason `refused`.
    fn end(&mut self, version: VersionNumbers, bytes: u64, refused: Option<&str>);
}

/// A panic of an [`Intake`](super::Intake), with its message.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the intake {panic}")]
pub(super) struct IntakePanic {
    pub(super) panic: String,
}

/// The reason why a process of a subscriber refuses a version.
#[derive(Debug, thiserror::Error)]
pub(super) enum VersionRefusal {
    /// The intake has refused the version, for this reason.
    #[error("{0}")]
    Intake(String),
    #[error(transparent)]
    Panicked(#[from] IntakePanic),
    /// This process wants other leaves than process 0 of the subscriber.
    #[error("process 0 wants other leaves than this one")]
    OtherLeaves,
    /// The changes of a leaf cannot be applied to the values of the version before.
    #[error("{leaf}: the changes do not fit the version before")]
    OtherBase { leaf: String },
    /// The hash of the received region differs from the publisher's.
    #[error("{leaf} {region} arrived with other bits than were published")]
    OtherBits { leaf: String, region: Region },
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
}

/// The numbers that identify a version in a subscription. Versions are ordered by publication, then
/// by version.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct VersionNumbers {
    /// Index, from 0, of the version's publication among those that the subscriber has found. A
    /// publisher that starts again is another publication.
    pub(super) publication: u64,
    /// The version's number in its publication.
    pub(super) version: u64,
}

/// The end of the link to which this process belongs.
pub(super) enum LinkSide<'a> {
    Publisher(&'a mut dyn PublisherLink),
    Subscriber(&'a mut dyn SubscriberLink),
}

/// Runs a link until the publisher or the subscriber ends it. The first `publishers` processes of
/// the program `p` belong to the publisher.
///
/// # Errors
///
/// If the layouts do not fit each other, or a process is lost.
pub(super) fn run(p: &mut Program, publishers: usize, side: &mut LinkSide<'_>) -> Result<()> {
    let offering: Offering = tell(p, ProcessId(0), || match side {
        LinkSide::Publisher(source) => source.offered(),
        LinkSide::Subscriber(_) => Offering::default(),
    })?;
    if let LinkSide::Subscriber(target) = side {
        target.found(offering.id);
    }

    let subscriber = ProcessId(publishers as u32);
    let asked: Vec<AskedLeaf> = tell(p, subscriber, || match side {
        LinkSide::Publisher(_) => Vec::new(),
        LinkSide::Subscriber(target) => target.asked(),
    })?;

    let all = p.topology().devices().len() as u32;
    let counts = p.topology().counts();
    let first = counts.iter().take(publishers).sum::<usize>() as u32;
    let pieces = pieces(&offering.leaves, 0..first, &asked, first..all)
        .map_err(|why| Error::Environment(why.to_string()))?;
    let link = VersionLink {
        publishers,
        subscriber,
        pieces,
        pin: Cell::new(None),
    };
    while link.turn(p, side)? {
        p.step_end()?;
    }
    Ok(())
}

/// The state of a link on one of its processes.
struct VersionLink {
    publishers: usize,
    /// The first process of the subscriber, by its number in the link.
    subscriber: ProcessId,
    pieces: Vec<LeafPiece>,
    /// The number of the version that the publisher's processes are pinning.
    pin: Cell<Option<u64>>,
}

/// The version that a turn moves, and the form in which its pieces are transferred.
struct VersionMove<'a> {
    version: VersionNumbers,
    /// For each piece, true if only its changed elements are transferred.
    changed: &'a [bool],
    /// True if the subscriber's processes must copy the memory that the publisher lends them.
    copies: bool,
}

/// The pieces and notes that a subscriber's process expects.
struct VersionArrivals<'a> {
    /// For each piece, true if only its changed elements are transferred.
    changed: &'a [bool],
    /// True if this process must copy the memory that the publisher lends.
    copies: bool,
    notes: &'a Notes,
    /// The buffers of the notes that are sent to devices of this process.
    notes_here: BTreeMap<DevicePair, AsyncBuffer>,
    /// The buffers of the pieces on devices of this process.
    here: HashMap<PieceShard, AsyncBuffer>,
}

/// The source and target device of a note.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
struct DevicePair {
    from: DeviceId,
    to: DeviceId,
}

/// A region of a piece that a note describes.
struct NotedRegion {
    /// Index of the piece among the link's pieces.
    piece: usize,
    region: Region,
}

/// A piece on one of its target devices.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct PieceShard {
    /// Index of the piece among the link's pieces.
    pub(super) piece: usize,
    pub(super) device: DeviceId,
}

/// The outcome of a version on a process of the subscriber.
#[derive(Default)]
struct TakeOutcome {
    /// Bytes that this process has received for the version.
    bytes: u64,
    /// The reason why this process refuses the version; `None` if it takes it.
    refused: Option<VersionRefusal>,
}

/// The contents of all notes about a piece on one device: the sum of the hashes, and the changes.
#[derive(Default)]
struct NotedPiece {
    hash: u64,
    changes: Vec<(Region, SharedBuffer)>,
}

/// For each note, the regions that it describes.
type Notes = BTreeMap<DevicePair, Vec<NotedRegion>>;

impl VersionLink {
    /// Runs one turn: moves a version if there is a newer one. Returns false at the end of the
    /// link.
    fn turn(&self, p: &mut Program, side: &mut LinkSide<'_>) -> Result<bool> {
        let ask = self.ask(p, side)?;
        if ask.has_ended {
            return Ok(false);
        }
        if let LinkSide::Subscriber(target) = side
            && target.has_left()
        {
            return Err(Error::Environment(
                "a process of the subscriber has left".to_owned(),
            ));
        }
        if !ask.has_room {
            return Ok(true);
        }

        let ChosenVersion { number, copies } = match self.choose(p, side, ask.above)? {
            VersionChoice::Ended(why) => {
                if let LinkSide::Subscriber(target) = side {
                    target.ended(&why);
                }
                return Ok(false);
            }
            VersionChoice::NoneYet => return Ok(true),
            VersionChoice::Version(chosen) => chosen,
        };
        if let LinkSide::Publisher(source) = side {
            source.choose(number);
        }

        let changed = match ask.base {
            Some(base) => self.choose_changes(p, side, base, number)?,
            None => vec![false; self.pieces.len()],
        };
        let notes = self.notes();
        let version = VersionNumbers {
            publication: ask.publication,
            version: number,
        };
        let how = VersionMove {
            version,
            changed: &changed,
            copies,
        };
        let outcome = self.move_pieces(p, side, how, &notes)?;

        let refused = self.tell_refusal(p, outcome.refused.as_ref())?;
        match side {
            LinkSide::Publisher(source) => source.sent(number, refused.as_deref()),
            LinkSide::Subscriber(target) => target.end(version, outcome.bytes, refused.as_deref()),
        }
        Ok(true)
    }

    /// Collects the state of the subscriber. It has room for a version if all its processes have
    /// room.
    fn ask(&self, p: &mut Program, side: &mut LinkSide<'_>) -> Result<SubscriberTurn> {
        // Only one process waits for its own room.
        let mut has_room = true;
        for process in self.others(p) {
            let timeout = if has_room { IDLE } else { Duration::ZERO };
            has_room &= p.broadcast_value(process, false, || match side {
                LinkSide::Publisher(_) => Ok(false),
                LinkSide::Subscriber(target) => Ok(target.has_room(timeout)),
            })?;
        }
        p.broadcast_value(self.subscriber, SubscriberTurn::default(), || match side {
            LinkSide::Publisher(_) => Ok(SubscriberTurn::default()),
            LinkSide::Subscriber(target) => {
                let timeout = if has_room { IDLE } else { Duration::ZERO };
                let own = target.has_room(timeout);
                Ok(target.ask(has_room && own))
            }
        })
    }

    /// Returns the reason of the first subscriber's process that refuses the version, if one does.
    /// `own` is this process's reason.
    fn tell_refusal(
        &self,
        p: &mut Program,
        own: Option<&VersionRefusal>,
    ) -> Result<Option<String>> {
        let own = own.map(VersionRefusal::to_string);
        let mut refused = None;
        for process in self.others(p) {
            let own = own.clone();
            let why: Option<String> = p.broadcast_value(process, None, || Ok(own))?;
            refused = refused.or(why);
        }
        // The first process has heard all others. Its word decides.
        p.broadcast_value(self.subscriber, None, || Ok(refused.or(own)))
    }

    /// Returns the subscriber's processes without the first one.
    fn others(&self, p: &Program) -> impl Iterator<Item = ProcessId> + use<> {
        (self.subscriber.0 + 1..p.processes() as u32).map(ProcessId)
    }

    /// Chooses the newest version above `above` that all processes of the publisher have. Returns
    /// the reason if there is none or will be none.
    fn choose(
        &self,
        p: &mut Program,
        side: &mut LinkSide<'_>,
        above: Option<u64>,
    ) -> Result<VersionChoice> {
        // The versions of each process of the publisher.
        let mut all = Vec::new();
        let mut copies = false;
        for process in (0..self.publishers as u32).map(ProcessId) {
            let none = Ok(PublisherTurn::default());
            let offer: std::result::Result<PublisherTurn, String> =
                p.broadcast_value(process, none.clone(), || match side {
                    LinkSide::Publisher(source) => {
                        let versions = source.wait(above, IDLE);
                        let is_short = source.is_short();
                        let turn = |versions| PublisherTurn { versions, is_short };
                        Ok(versions.map(turn).map_err(|end| end.to_string()))
                    }
                    LinkSide::Subscriber(_) => Ok(none),
                })?;
            copies |= offer.as_ref().is_ok_and(|offer| offer.is_short);
            all.push(offer.map(|offer| offer.versions));
        }
        let all = match all.into_iter().collect::<std::result::Result<Vec<_>, _>>() {
            Ok(all) => all,
            Err(why) => return Ok(VersionChoice::Ended(why)),
        };

        let has = |number: &u64| all.iter().all(|have| have.contains(number));
        let common = all.iter().flatten().copied().filter(has).max();
        if let Some(number) = common {
            self.pin.set(None);
            return Ok(VersionChoice::Version(ChosenVersion { number, copies }));
        }
        if let (LinkSide::Publisher(source), Some(next)) = (side, first_of_all(&all)) {
            // One process is ahead by more versions than are kept. All keep the first one that each
            // has or will make; one that has lost it meanwhile tries again with a later one.
            let newest = all.iter().filter_map(|have| have.iter().max());
            let least = newest.min().copied();
            if self.pin.get().is_none_or(|pin| least >= Some(pin)) {
                self.pin.set(Some(next));
                source.pin(Some(next));
            }
        }
        Ok(VersionChoice::NoneYet)
    }

    /// Returns, for each piece, true if only its changes are transferred: they are known, and
    /// smaller than the whole piece.
    fn choose_changes(
        &self,
        p: &mut Program,
        side: &mut LinkSide<'_>,
        base: u64,
        number: u64,
    ) -> Result<Vec<bool>> {
        let mut sums: Vec<Option<u64>> = vec![Some(0); self.pieces.len()];
        for process in (0..self.publishers as u32).map(ProcessId) {
            let own: Vec<Option<u64>> = tell(p, process, || match side {
                LinkSide::Publisher(source) => source.change_bytes(&self.pieces, base, number),
                LinkSide::Subscriber(_) => Vec::new(),
            })?;
            for (sum, own) in sums.iter_mut().zip(own) {
                *sum = sum.zip(own).map(|(sum, own)| sum.saturating_add(own));
            }
        }

        let pieces = self.pieces.iter().zip(sums);
        let is_less = pieces.map(|(piece, changes)| {
            changes.is_some_and(|changes| changes < piece.aval.bytes() as u64)
        });
        Ok(is_less.collect())
    }

    /// Returns the source and target devices of all notes of a version, and the regions that each
    /// describes.
    fn notes(&self) -> Notes {
        let mut notes = Notes::new();
        for (index, piece) in self.pieces.iter().enumerate() {
            for (from, source) in &piece.sources {
                for (to, target) in piece.targets.iter().flatten() {
                    if let Some(common) = source.intersect(target) {
                        let pair = DevicePair {
                            from: *from,
                            to: *to,
                        };
                        notes.entry(pair).or_default().push(NotedRegion {
                            piece: index,
                            region: common,
                        });
                    }
                }
            }
        }
        notes
    }

    /// Issues the moves of a version's pieces. A process of the subscriber then takes the version.
    fn move_pieces(
        &self,
        p: &mut Program,
        side: &mut LinkSide<'_>,
        how: VersionMove<'_>,
        notes: &Notes,
    ) -> Result<TakeOutcome> {
        let at = Location::caller();
        let mut arrays = Vec::new();
        let mut to = Vec::new();
        let mut moving = Vec::new();
        let pieces = self.pieces.iter().enumerate();
        for (index, piece) in pieces.filter(|(index, _)| !how.changed[*index]) {
            let mut shards = Vec::new();
            for (device, region) in &piece.sources {
                let is_here = p.runtime.local_index(*device).is_some();
                if let (true, LinkSide::Publisher(source)) = (is_here, &mut *side) {
                    shards.push(DeviceBuffer {
                        device: *device,
                        buffer: source.bits(piece, region)?,
                    });
                }
            }
            let from = Sharding::enumerated(piece.sources.clone())?;
            arrays.push(p.array_of_buffers(piece.aval.clone(), from, shards, at)?);
            to.push(Sharding::enumerated(piece.targets[0].clone())?);
            moving.push(index);
        }

        let first = p.reshard(&arrays, to, Default::default())?;
        let mut here: HashMap<PieceShard, AsyncBuffer> = HashMap::new();
        let mut note = |piece: usize, array: &MpmdArray| {
            for shard in array.shards() {
                let key = PieceShard {
                    piece,
                    device: shard.device,
                };
                here.insert(key, shard.slot.clone());
            }
        };
        for (index, first) in moving.into_iter().zip(&first) {
            note(index, first);
            // The replicas come from the first one, which is nearer.
            for layer in &self.pieces[index].targets[1..] {
                let to = Sharding::enumerated(layer.clone())?;
                note(index, &p.device_put(first, to)?);
            }
        }
        let notes_here = self.move_notes(p, side, how.changed, notes)?;

        // The arrays are given up first: loans go back before the publisher makes another version.
        drop(first);
        match side {
            LinkSide::Publisher(_) => Ok(TakeOutcome::default()),
            LinkSide::Subscriber(target) => {
                let arrivals = VersionArrivals {
                    changed: how.changed,
                    copies: how.copies,
                    notes,
                    notes_here,
                    here,
                };
                self.take(p, *target, how.version, arrivals)
            }
        }
    }

    /// Waits for the pieces of a version, and gives them to the subscriber `target`.
    fn take(
        &self,
        p: &Program,
        target: &mut dyn SubscriberLink,
        version: VersionNumbers,
        mut arrivals: VersionArrivals<'_>,
    ) -> Result<TakeOutcome> {
        let mut outcome = TakeOutcome::default();
        let about = read_notes(p, &arrivals, &mut outcome.bytes)?;
        for (key, NotedPiece { hash, changes }) in about {
            let arrived = if arrivals.changed[key.piece] {
                ArrivedPiece::Changes(changes)
            } else {
                let slot = arrivals.here.remove(&key).ok_or_else(damaged)?;
                let whole = arrived(p, &slot)?;
                outcome.bytes += whole.len() as u64;
                ArrivedPiece::Whole(match arrivals.copies && whole.is_lent() {
                    true => whole.to_vec().into(),
                    false => whole,
                })
            };
            if outcome.refused.is_none() {
                let piece = &self.pieces[key.piece];
                let taken = target.piece(key.piece, piece, key.device, arrived, hash);
                outcome.refused = taken.err();
            }
        }

        if outcome.refused.is_none() {
            outcome.refused = target.take(version, &self.pieces).err();
        }
        Ok(outcome)
    }

    /// Issues the moves of the notes. Returns the buffers of the notes that this process gets.
    fn move_notes(
        &self,
        p: &mut Program,
        side: &mut LinkSide<'_>,
        changed: &[bool],
        notes: &Notes,
    ) -> Result<BTreeMap<DevicePair, AsyncBuffer>> {
        let at = Location::caller();
        let mut own = self.write_notes(p, side, changed, notes);
        let lengths = self.note_lengths(p, changed, notes, &own)?;

        let mut here = BTreeMap::new();
        for (pair, bytes) in lengths {
            let aval = ShapedArray::try_new(&[bytes as usize], DType::U8)?;
            let note = own.remove(&pair).map(|note| DeviceBuffer {
                device: pair.from,
                buffer: SharedBuffer::from(note),
            });
            let from = Sharding::single_device(pair.from);
            let array = p.array_of_buffers(aval, from, note.into_iter().collect(), at)?;
            let moved = p.device_put(&array, Sharding::single_device(pair.to))?;
            here.extend(
                moved
                    .shards()
                    .iter()
                    .map(|shard| (pair, shard.slot.clone())),
            );
        }
        Ok(here)
    }

    /// Writes the notes whose source devices belong to this process.
    fn write_notes(
        &self,
        p: &Program,
        side: &mut LinkSide<'_>,
        changed: &[bool],
        notes: &Notes,
    ) -> BTreeMap<DevicePair, Vec<u8>> {
        let mut own = BTreeMap::new();
        let LinkSide::Publisher(source) = side else {
            return own;
        };
        for (pair, about) in notes {
            if p.runtime.local_index(pair.from).is_none() {
                continue;
            }
            let mut note = Vec::new();
            for NotedRegion { piece, region } in about {
                source.note(&self.pieces[*piece], region, changed[*piece], &mut note);
            }
            own.insert(*pair, note);
        }
        own
    }

    /// Returns the length in bytes of each note. Only the writer of a note with changes knows its
    /// length.
    fn note_lengths(
        &self,
        p: &mut Program,
        changed: &[bool],
        notes: &Notes,
        own: &BTreeMap<DevicePair, Vec<u8>>,
    ) -> Result<BTreeMap<DevicePair, u64>> {
        let hashes = |about: &Vec<NotedRegion>| 8 * about.len() as u64;
        let mut lengths: BTreeMap<DevicePair, u64> = notes
            .iter()
            .map(|(pair, about)| (*pair, hashes(about)))
            .collect();
        if !changed.contains(&true) {
            return Ok(lengths);
        }

        for process in (0..self.publishers as u32).map(ProcessId) {
            let told: Vec<(DevicePair, u64)> = tell(p, process, || {
                own.iter()
                    .map(|(pair, note)| (*pair, note.len() as u64))
                    .collect()
            })?;
            for (pair, bytes) in told {
                // Its own notes alone.
                if p.topology().process_of(pair.from) == Some(process)
                    && let Some(length) = lengths.get_mut(&pair)
                {
                    *length = bytes;
                }
            }
        }
        Ok(lengths)
    }
}

/// Waits for the notes to this process. Returns their hashes and changes for each piece here, and
/// adds their bytes to `bytes`.
fn read_notes(
    p: &Program,
    arrivals: &VersionArrivals<'_>,
    bytes: &mut u64,
) -> Result<Vec<(PieceShard, NotedPiece)>> {
    // In the order of devices, then of pieces.
    let mut all = BTreeMap::<(DeviceId, usize), NotedPiece>::new();
    for (pair, slot) in &arrivals.notes_here {
        let note = arrived(p, slot)?;
        *bytes += note.len() as u64;

        let mut rest = &note[..];
        for NotedRegion { piece, region } in arrivals.notes.get(pair).into_iter().flatten() {
            let hash = take_word(&mut rest).ok_or_else(damaged)?;
            let about = all.entry((pair.to, *piece)).or_default();
            about.hash = about.hash.wrapping_add(hash);
            if arrivals.changed[*piece] {
                let len = take_word(&mut rest).ok_or_else(damaged)?;
                let start = note.len() - rest.len();
                let (own, more) = usize::try_from(len)
                    .ok()
                    .and_then(|len| rest.split_at_checked(len))
                    .ok_or_else(damaged)?;
                rest = more;
                let changes = note.slice(start..start + own.len());
                about.changes.push((region.clone(), changes));
            }
        }
    }
    let shard = |(device, piece)| PieceShard { piece, device };
    Ok(all
        .into_iter()
        .map(|(key, about)| (shard(key), about))
        .collect())
}

/// Returns the error for a note that cannot be decoded.
fn damaged() -> Error {
    Error::Environment("a note of a version is damaged".to_owned())
}

/// Returns the lowest version number that every process has or can still make. `all` has the
/// version numbers of each process. `None` if a process has no version yet.
fn first_of_all(all: &[Vec<u64>]) -> Option<u64> {
    let newest: Option<Vec<u64>> = all.iter().map(|have| have.iter().max().copied()).collect();
    let newest = newest?;

    let is_for_all = |number: &u64| {
        all.iter()
            .zip(&newest)
            .all(|(have, newest)| have.contains(number) || number > newest)
    };
    let next = newest.iter().max()?.saturating_add(1);
    all.iter()
        .flatten()
        .copied()
        .filter(is_for_all)
        .min()
        .or(Some(next))
}

/// Waits until a buffer of the link is filled.
fn arrived(p: &Program, slot: &AsyncBuffer) -> Result<SharedBuffer> {
    let runtime = &p.runtime;
    let at = Location::caller();
    let _doing = runtime
        .status
        .enter(Doing::Waiting("a version of published arrays", at));
    loop {
        // The router reports a silent sender. This timeout only wakes this process's wait.
        let deadline = after(now(), runtime.config.peer_timeout);
        if let Some(outcome) = runtime.parker.wait(slot, Some(deadline)) {
            return outcome.map_err(Error::failed);
        }
    }
}

/// Reads a 64-bit word from the front of a note.
fn take_word(rest: &mut &[u8]) -> Option<u64> {
    let (word, more) = rest.split_first_chunk::<8>()?;
    *rest = more;
    Some(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_version_of_all_is_had_or_still_to_come() {
        for (all, expected) in [
            // The second process has made neither of the first's, and will.
            (vec![vec![99, 100], vec![9, 10]], Some(99)),
            (vec![vec![99, 100], vec![98, 99], vec![1]], Some(99)),
            (vec![vec![99, 101], vec![100, 102]], Some(102)),
            (vec![vec![101, 102], vec![99, 103]], Some(103)),
            (vec![vec![99, 103], vec![101, 103, 104]], Some(103)),
            (vec![vec![99, 100], vec![]], None),
            (vec![vec![u64::MAX], vec![1]], Some(u64::MAX)),
        ] {
            assert_eq!(first_of_all(&all), expected, "{all:?}");
        }
    }
}
