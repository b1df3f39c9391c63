//! The program of a link: the processes of a publisher and of one subscriber form a job beside
//! their own programs. The first processes of that job are the publisher's.
//!
//! A turn moves a version. The subscriber tells its state ([`Ask`]), and the publisher's processes
//! tell the numbers of their versions. The newest version that all of them have is moved. Its
//! pieces go by [`Program::reshard`], or as changed elements in the *notes*: there is a note from
//! each device of the publisher to each device of the subscriber, with the hashes of the regions
//! that the one gets from the other. The subscriber's processes compare the hashes, take the
//! version, and say so. The version is whole once the first of them has heard that from all: its
//! word decides, also if the link breaks before the others hear it.

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
use mpmd_memory::SharedBuffer;
use serde::{Deserialize, Serialize};

use super::layouts::{Asked, Offered, Piece, pieces};
use crate::api::program::Program;
use crate::api::recover::tell;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::{AsyncBuffer, Doing};

/// The longest wait of a publisher's process for a version, and of a subscriber for room: shorter
/// than any peer timeout.
const IDLE: Duration = Duration::from_millis(500);

/// The state of a publisher's process before a turn.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Offer {
    /// The numbers of its versions.
    versions: Vec<u64>,
    /// True if readers of its memory keep more of that than it lends.
    is_short: bool,
}

/// The version that a turn moves.
struct Chosen {
    number: u64,
    /// True if the subscriber's processes copy the memory that they are lent.
    copies: bool,
}

/// The subscriber's state before a turn, as its first process tells it.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Ask {
    /// Number of publications that the subscriber has found before this one.
    pub(super) publication: u64,
    /// The next version is to be above this one.
    pub(super) above: Option<u64>,
    /// The version whose bits it has, to be changed.
    pub(super) base: Option<u64>,
    /// True if all its processes have room for a version.
    pub(super) has_room: bool,
    pub(super) has_ended: bool,
}

/// The bytes that a target device gets of a piece: all, or some places with new values.
pub(super) enum Arrived {
    Whole(SharedBuffer),
    /// As [`write_changes`](super::bits::write_changes) has written them, for each source.
    Changes(Vec<(Region, SharedBuffer)>),
}

/// The part of a publisher's process in a link.
pub(super) trait Source {
    /// Returns the id of the publication, and its leaves.
    fn offered(&self) -> (String, Vec<Offered>);
    /// Returns the versions above `above`, and holds them until the next call. Waits for one at
    /// most for `timeout`. An error ends the link in order.
    fn wait(
        &mut self,
        above: Option<u64>,
        timeout: Duration,
    ) -> std::result::Result<Vec<u64>, String>;
    /// True if readers of the versions' memory keep more of that than the publisher lends.
    fn is_short(&self) -> bool;
    /// Has a version kept that is to come, in place of another one.
    fn pin(&mut self, number: Option<u64>);
    /// Takes one of these versions for what follows.
    fn choose(&mut self, number: u64);
    /// Returns the bytes of the changes of each piece since `base`; `None` for unknown ones.
    fn change_bytes(&mut self, pieces: &[Piece], base: u64, number: u64) -> Vec<Option<u64>>;
    /// Returns the source's bits of a piece on one of its devices, where the piece has `region`.
    fn bits(&mut self, piece: &Piece, region: &Region) -> Result<SharedBuffer>;
    /// Appends the note about a piece's `common` region: its hash, and its changes if wanted.
    fn note(&mut self, piece: &Piece, common: &Region, changes: bool, to: &mut Vec<u8>);
    /// Says that the subscriber has taken a version, or why it has not.
    fn sent(&mut self, number: u64, refused: Option<&str>);
}

/// The part of a subscriber's process in a link.
pub(super) trait Target {
    /// Takes the id of the link's publication.
    fn found(&mut self, id: String);
    fn asked(&self) -> Vec<Asked>;
    /// True if this process has given up its subscription, and not only just now: the first process
    /// usually does so at the same time, and ends the link in order.
    fn has_left(&self) -> bool;
    /// Waits for room on this process, at most for `timeout`. Returns true if there is some, or the
    /// subscription has ended.
    fn has_room(&mut self, timeout: Duration) -> bool;
    /// Returns the state of the subscription, for which this process has room or not.
    fn ask(&self, has_room: bool) -> Ask;
    /// Takes the bytes of a piece on a device, if they have this hash.
    fn piece(
        &mut self,
        piece: (usize, &Piece),
        device: DeviceId,
        arrived: Arrived,
        hash: u64,
    ) -> std::result::Result<(), String>;
    /// Takes the version whose pieces have arrived.
    fn take(&mut self, version: Numbers, pieces: &[Piece]) -> std::result::Result<(), String>;
    /// Says why the publisher gives out no further version.
    fn ended(&mut self, why: &str);
    /// Says that all processes have taken it, or why one has not.
    fn end(&mut self, version: Numbers, bytes: u64, refused: Option<&str>);
}

/// A version on its way. A later version has larger numbers, in this order.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct Numbers {
    /// Number of publications that the subscriber has found before.
    pub(super) publication: u64,
    /// The number that the publisher gave it.
    pub(super) version: u64,
}

/// The side of a process.
pub(super) enum Side<'a> {
    Publisher(&'a mut dyn Source),
    Subscriber(&'a mut dyn Target),
}

/// Runs a link until a side ends it. The first `publishers` processes of the program are the
/// publisher's.
///
/// # Errors
///
/// If the layouts do not fit each other, or a process is lost.
pub(super) fn run(p: &mut Program, publishers: usize, side: &mut Side<'_>) -> Result<()> {
    let (id, offered): (String, Vec<Offered>) = tell(p, ProcessId(0), || match side {
        Side::Publisher(source) => source.offered(),
        Side::Subscriber(_) => Default::default(),
    })?;
    if let Side::Subscriber(target) = side {
        target.found(id);
    }
    let subscriber = ProcessId(publishers as u32);
    let asked: Vec<Asked> = tell(p, subscriber, || match side {
        Side::Publisher(_) => Vec::new(),
        Side::Subscriber(target) => target.asked(),
    })?;
    let all = p.topology().devices().len() as u32;
    let counts = p.topology().counts();
    let first = counts.iter().take(publishers).sum::<usize>() as u32;
    let pieces = pieces((&offered, 0..first), (&asked, first..all)).map_err(Error::Environment)?;
    let link = Link {
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

struct Link {
    publishers: usize,
    /// The first process of the subscriber.
    subscriber: ProcessId,
    pieces: Vec<Piece>,
    /// The version that the publisher's processes keep.
    pin: Cell<Option<u64>>,
}

/// How a version moves.
struct Moved<'a> {
    version: Numbers,
    /// For each piece, if its changes travel, and not all of it.
    changed: &'a [bool],
    /// True if the subscriber's processes copy the memory that they are lent.
    copies: bool,
}

/// The pieces and notes on their way to a subscriber's process.
struct Arrivals<'a> {
    /// For each piece, if its changes come, and not all of it.
    changed: &'a [bool],
    /// True if memory that is lent is to be copied.
    copies: bool,
    notes: &'a Notes,
    notes_here: BTreeMap<(DeviceId, DeviceId), AsyncBuffer>,
    /// The pieces on devices of this process.
    here: HashMap<(usize, DeviceId), AsyncBuffer>,
}

/// The sum of the hashes and the changes of a piece on a device, from all notes.
#[derive(Default)]
struct About {
    hash: u64,
    changes: Vec<(Region, SharedBuffer)>,
}

/// The note from a device to another: the pieces that it is about, with their common regions.
type Notes = BTreeMap<(DeviceId, DeviceId), Vec<(usize, Region)>>;

impl Link {
    /// Moves a version if there is a newer one. Returns false at the end of the link.
    fn turn(&self, p: &mut Program, side: &mut Side<'_>) -> Result<bool> {
        // Room is that of all. Only one process waits for its own.
        let mut has_room = true;
        for process in self.others(p) {
            let timeout = if has_room { IDLE } else { Duration::ZERO };
            has_room &= p.broadcast_value(process, false, || match side {
                Side::Publisher(_) => Ok(false),
                Side::Subscriber(target) => Ok(target.has_room(timeout)),
            })?;
        }
        let ask: Ask = p.broadcast_value(self.subscriber, Ask::default(), || match side {
            Side::Publisher(_) => Ok(Ask::default()),
            Side::Subscriber(target) => {
                let timeout = if has_room { IDLE } else { Duration::ZERO };
                let own = target.has_room(timeout);
                Ok(target.ask(has_room && own))
            }
        })?;
        if ask.has_ended {
            return Ok(false);
        }
        if let Side::Subscriber(target) = side
            && target.has_left()
        {
            return Err(Error::Environment(
                "a process of the subscriber has left".to_owned(),
            ));
        }
        if !ask.has_room {
            return Ok(true);
        }
        let Chosen { number, copies } = match self.choose(p, side, ask.above)? {
            Err(why) => {
                if let Side::Subscriber(target) = side {
                    target.ended(&why);
                }
                return Ok(false);
            }
            Ok(None) => return Ok(true),
            Ok(Some(chosen)) => chosen,
        };
        if let Side::Publisher(source) = side {
            source.choose(number);
        }
        let changed = match ask.base {
            Some(base) => self.choose_changes(p, side, (base, number))?,
            None => vec![false; self.pieces.len()],
        };
        let notes = self.notes();
        let version = Numbers {
            publication: ask.publication,
            version: number,
        };
        let how = Moved {
            version,
            changed: &changed,
            copies,
        };
        let (bytes, own) = self.move_pieces(p, side, how, &notes)?;
        // The first reason of a process to refuse the version.
        let mut refused = None;
        for process in self.others(p) {
            let own = own.clone();
            let why: Option<String> = p.broadcast_value(process, None, || Ok(own))?;
            refused = refused.or(why);
        }
        // The first process has heard all others. Its word decides.
        let refused: Option<String> =
            p.broadcast_value(self.subscriber, None, || Ok(refused.or(own)))?;
        match side {
            Side::Publisher(source) => source.sent(number, refused.as_deref()),
            Side::Subscriber(target) => target.end(version, bytes, refused.as_deref()),
        }
        Ok(true)
    }

    /// Returns the subscriber's processes but the first.
    fn others(&self, p: &Program) -> impl Iterator<Item = ProcessId> + use<> {
        (self.subscriber.0 + 1..p.processes() as u32).map(ProcessId)
    }

    /// Returns the newest version that all processes of the publisher have above `above`, if there
    /// is one; or the reason why there will be none.
    fn choose(
        &self,
        p: &mut Program,
        side: &mut Side<'_>,
        above: Option<u64>,
    ) -> Result<std::result::Result<Option<Chosen>, String>> {
        let mut all = Vec::new();
        let mut copies = false;
        for process in (0..self.publishers as u32).map(ProcessId) {
            let none = Ok(Offer::default());
            let offer: std::result::Result<Offer, String> =
                p.broadcast_value(process, none.clone(), || match side {
                    Side::Publisher(source) => {
                        let versions = source.wait(above, IDLE);
                        let is_short = source.is_short();
                        Ok(versions.map(|versions| Offer { versions, is_short }))
                    }
                    Side::Subscriber(_) => Ok(none),
                })?;
            copies |= offer.as_ref().is_ok_and(|offer| offer.is_short);
            all.push(offer.map(|offer| offer.versions));
        }
        let all = match all.into_iter().collect::<std::result::Result<Vec<_>, _>>() {
            Ok(all) => all,
            Err(why) => return Ok(Err(why)),
        };

        let has = |number: &u64| all.iter().all(|have| have.contains(number));
        let common = all.iter().flatten().copied().filter(has).max();
        if let Some(number) = common {
            self.pin.set(None);
            return Ok(Ok(Some(Chosen { number, copies })));
        }
        if let (Side::Publisher(source), Some(next)) = (side, first_of_all(&all)) {
            // One process is ahead by more versions than are kept. All keep the first one that each
            // has or will make; one that has lost it meanwhile tries again with a later one.
            let newest = all.iter().filter_map(|have| have.iter().max());
            let least = newest.min().copied();
            if self.pin.get().is_none_or(|pin| least >= Some(pin)) {
                self.pin.set(Some(next));
                source.pin(Some(next));
            }
        }
        Ok(Ok(None))
    }

    /// Returns, for each piece, if its changes travel: they are known, and fewer bytes than all.
    fn choose_changes(
        &self,
        p: &mut Program,
        side: &mut Side<'_>,
        (base, number): (u64, u64),
    ) -> Result<Vec<bool>> {
        let mut sums: Vec<Option<u64>> = vec![Some(0); self.pieces.len()];
        for process in (0..self.publishers as u32).map(ProcessId) {
            let own: Vec<Option<u64>> = tell(p, process, || match side {
                Side::Publisher(source) => source.change_bytes(&self.pieces, base, number),
                Side::Subscriber(_) => Vec::new(),
            })?;
            for (sum, own) in sums.iter_mut().zip(own) {
                *sum = sum.zip(own).map(|(sum, own)| sum.saturating_add(own));
            }
        }
        let is_less = |(piece, sum): (&Piece, Option<u64>)| {
            sum.is_some_and(|sum| sum < piece.aval.bytes() as u64)
        };
        Ok(self.pieces.iter().zip(sums).map(is_less).collect())
    }

    /// Returns the notes of a version.
    fn notes(&self) -> Notes {
        let mut notes = Notes::new();
        for (index, piece) in self.pieces.iter().enumerate() {
            for (from, source) in &piece.sources {
                for (to, target) in piece.targets.iter().flatten() {
                    if let Some(common) = source.intersect(target) {
                        notes.entry((*from, *to)).or_default().push((index, common));
                    }
                }
            }
        }
        notes
    }

    /// Issues the moves of a version, and has the subscriber take it. Returns the bytes that this
    /// process has got, and the reason why it does not take the version.
    fn move_pieces(
        &self,
        p: &mut Program,
        side: &mut Side<'_>,
        Moved {
            version,
            changed,
            copies,
        }: Moved<'_>,
        notes: &Notes,
    ) -> Result<(u64, Option<String>)> {
        let at = Location::caller();
        let is_here = |p: &Program, device: DeviceId| p.runtime.local_index(device).is_some();
        let (mut arrays, mut to, mut moving) = (Vec::new(), Vec::new(), Vec::new());
        for (index, piece) in self
            .pieces
            .iter()
            .enumerate()
            .filter(|(index, _)| !changed[*index])
        {
            let mut shards = Vec::new();
            for (device, region) in &piece.sources {
                if let (true, Side::Publisher(source)) = (is_here(p, *device), &mut *side) {
                    shards.push((*device, source.bits(piece, region)?));
                }
            }
            let from = Sharding::enumerated(piece.sources.clone())?;
            arrays.push(p.array_of_buffers(piece.aval.clone(), from, shards, at)?);
            to.push(Sharding::enumerated(piece.targets[0].clone())?);
            moving.push(index);
        }
        let first = p.reshard(&arrays, to, Default::default())?;
        let mut here: HashMap<(usize, DeviceId), AsyncBuffer> = HashMap::new();
        let mut note = |index: usize, array: &MpmdArray| {
            let shards = array.shards().iter();
            here.extend(shards.map(|shard| ((index, shard.device), shard.slot.clone())));
        };
        for (index, first) in moving.into_iter().zip(&first) {
            note(index, first);
            // The replicas come from the first one, which is nearer.
            for layer in &self.pieces[index].targets[1..] {
                note(
                    index,
                    &p.device_put(first, Sharding::enumerated(layer.clone())?)?,
                );
            }
        }
        let notes_here = self.move_notes(p, side, changed, notes)?;
        // The arrays are given up first: loans go back before the publisher makes another version.
        drop(first);
        match side {
            Side::Publisher(_) => Ok((0, None)),
            Side::Subscriber(target) => {
                let arrivals = Arrivals {
                    changed,
                    copies,
                    notes,
                    notes_here,
                    here,
                };
                self.take(p, *target, version, arrivals)
            }
        }
    }

    /// Waits for a version, and has the subscriber take it. Returns the bytes that this process has
    /// got, and the reason why it does not take the version.
    fn take(
        &self,
        p: &Program,
        target: &mut dyn Target,
        version: Numbers,
        Arrivals {
            changed,
            copies,
            notes,
            notes_here,
            mut here,
        }: Arrivals<'_>,
    ) -> Result<(u64, Option<String>)> {
        let damaged = || Error::Environment("a note of a version is damaged".to_owned());
        let (mut bytes, mut about) = (0, BTreeMap::<(DeviceId, usize), About>::new());
        for (key, slot) in &notes_here {
            let note = arrived(p, slot)?;
            bytes += note.len() as u64;
            let mut rest = &note[..];
            for (index, common) in notes.get(key).into_iter().flatten() {
                let hash = take_word(&mut rest).ok_or_else(damaged)?;
                let about = about.entry((key.1, *index)).or_default();
                about.hash = about.hash.wrapping_add(hash);
                if changed[*index] {
                    let len = take_word(&mut rest).ok_or_else(damaged)?;
                    let start = note.len() - rest.len();
                    let (own, more) = usize::try_from(len)
                        .ok()
                        .and_then(|len| rest.split_at_checked(len))
                        .ok_or_else(damaged)?;
                    rest = more;
                    about
                        .changes
                        .push((common.clone(), note.slice(start..start + own.len())));
                }
            }
        }
        let mut refused = None;
        for ((device, index), About { hash, changes }) in about {
            let arrived = match changed[index] {
                true => Arrived::Changes(changes),
                false => {
                    let slot = here.remove(&(index, device)).ok_or_else(damaged)?;
                    let whole = arrived(p, &slot)?;
                    bytes += whole.len() as u64;
                    Arrived::Whole(match copies && whole.is_lent() {
                        true => whole.to_vec().into(),
                        false => whole,
                    })
                }
            };
            if refused.is_none() {
                let piece = (index, &self.pieces[index]);
                refused = target.piece(piece, device, arrived, hash).err();
            }
        }
        let refused = refused.or_else(|| target.take(version, &self.pieces).err());
        Ok((bytes, refused))
    }

    /// Issues the moves of the notes. Returns those that come to this process.
    fn move_notes(
        &self,
        p: &mut Program,
        side: &mut Side<'_>,
        changed: &[bool],
        notes: &Notes,
    ) -> Result<BTreeMap<(DeviceId, DeviceId), AsyncBuffer>> {
        let at = Location::caller();
        let mut own = BTreeMap::new();
        if let Side::Publisher(source) = side {
            for (key, about) in notes {
                if p.runtime.local_index(key.0).is_none() {
                    continue;
                }
                let mut note = Vec::new();
                for (index, common) in about {
                    source.note(&self.pieces[*index], common, changed[*index], &mut note);
                }
                own.insert(*key, note);
            }
        }
        let mut lengths: BTreeMap<(DeviceId, DeviceId), u64> = notes
            .iter()
            .map(|(key, about)| (*key, 8 * about.len() as u64))
            .collect();
        if changed.contains(&true) {
            for process in (0..self.publishers as u32).map(ProcessId) {
                let told = || {
                    own.iter()
                        .map(|(key, note)| (*key, note.len() as u64))
                        .collect()
                };
                let told: Vec<((DeviceId, DeviceId), u64)> = tell(p, process, told)?;
                for (key, bytes) in told {
                    // Its own notes alone.
                    if p.topology().process_of(key.0) == Some(process)
                        && let Some(length) = lengths.get_mut(&key)
                    {
                        *length = bytes;
                    }
                }
            }
        }
        let mut here = BTreeMap::new();
        for (key, bytes) in lengths {
            let aval = ShapedArray::try_new(&[bytes as usize], DType::U8)?;
            let shards = own
                .remove(&key)
                .map(|note| (key.0, SharedBuffer::from(note)));
            let from = Sharding::single_device(key.0);
            let array = p.array_of_buffers(aval, from, shards.into_iter().collect(), at)?;
            let moved = p.device_put(&array, Sharding::single_device(key.1))?;
            here.extend(moved.shards().iter().map(|shard| (key, shard.slot.clone())));
        }
        Ok(here)
    }
}

/// Returns the lowest version that each process has or is still to make, by the versions of each.
/// `None` if a process has none yet.
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

/// Waits for a buffer.
fn arrived(p: &Program, slot: &AsyncBuffer) -> Result<SharedBuffer> {
    let (runtime, at) = (&p.runtime, Location::caller());
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

/// Takes a word off the front of a note.
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
