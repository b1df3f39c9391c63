//! The number of processes of an epoch: fewer than before if some are gone for good, and more if
//! others wait.
//!
//! The first epoch has as many as the job was started with. A later one has another number only if
//! all its processes say so: [`JobMember::sizes`]. No process that is left is turned away, since it
//! has a part of the program's state.

use super::super::super::protocol::ServerReply;
use super::super::super::{RendezvousError, SizeRange};
use super::super::actions::JobActions;
use super::places::Seat;
use super::{EpochPhase, Epochs};

/// Largest number of [`SizeRange`](crate::SizeRange)s of a process: all of them must fit a message.
const MOST_RANGES: usize = 64 << 10;

impl Epochs {
    /// Records the number of processes that the server's owner may still start for free places.
    pub(in crate::job) fn owner_starts(&mut self, count: usize, actions: &mut JobActions) {
        if std::mem::replace(&mut self.owner_starts, count) != count {
            self.place_spares(actions);
            self.tell_size(actions);
        }
    }

    /// Returns true if the program can run with fewer processes than there are places.
    pub(crate) fn may_shrink(&self) -> bool {
        let smaller = |seat: &Seat| largest(seat, self.seats.len().saturating_sub(1)).is_some();
        self.seats.iter().flatten().next().is_some_and(smaller)
    }

    /// Returns true if the current epoch may begin with `size` processes instead of one for each
    /// place.
    pub(super) fn may_have(&self, size: usize) -> bool {
        let mut here = self.seats.iter().flatten();
        self.epoch > 1 && here.next().is_some_and(|first| allows(first, size))
    }

    /// Returns true if the current epoch can begin without its free places: no process is expected
    /// to take them, and the program can run with the others.
    pub(super) fn shrinks(&self) -> bool {
        let mut places = self.seats.iter().zip(&self.vacant);
        let left = self.seats.iter().flatten().count();
        self.epoch > 1
            && self.spares.is_empty()
            && places.all(|(seat, vacant)| seat.is_some() || *vacant)
            && self
                .seats
                .iter()
                .flatten()
                .next()
                .is_some_and(|first| largest(first, left) == Some(left))
    }

    /// Gives spares additional places in an epoch that begins, as many as the program allows.
    pub(super) fn grow(&mut self) {
        if self.epoch == 1 {
            return;
        }
        for place in self.seats.len()..self.could_have() {
            let launched = self.launched;
            let is_fit = |spare: &Seat| place < launched || spare.member.is_added;
            let spare = self.take_spare(is_fit);
            self.seats.extend(spare.map(Some));
        }
    }

    /// Returns the number of processes that an epoch could have with all spares. Ordinary spares
    /// only replace processes that are gone; added processes make the job larger.
    fn could_have(&self) -> usize {
        let now = self.seats.len();
        let Some(first) = self.seats.iter().flatten().next() else {
            return now;
        };

        let added = self
            .spares
            .iter()
            .filter(|spare| spare.member.is_added)
            .count();
        let missing = self
            .launched
            .saturating_sub(now)
            .min(self.spares.len() - added);

        largest(first, now + missing + added)
            .unwrap_or(now)
            .max(now)
    }

    /// Returns the number of processes that could replace processes of the running epoch: spares,
    /// and processes that the owner may start.
    pub(super) fn replacements(&self) -> usize {
        self.spares.len().saturating_add(self.owner_starts)
    }

    /// Tells process 0 of a running epoch how many processes the next epoch could have, and how
    /// many replacements there are.
    pub(super) fn tell_size(&self, actions: &mut JobActions) {
        if let (EpochPhase::Running, Some(Some(first))) = (&self.phase, self.seats.first())
            && first.ended.is_none()
        {
            let processes = self.could_have() as u32;
            let replacements = u32::try_from(self.replacements()).unwrap_or(u32::MAX);
            let said = ServerReply::CouldHave {
                processes,
                replacements,
            };
            actions.say(first.link, said);
        }
    }
}

/// Returns true if the program of a process can run with `size` processes.
pub(super) fn allows(process: &Seat, size: usize) -> bool {
    largest(process, size) == Some(size)
}

/// Returns the largest number of processes, from 1 to `most`, with which a process's program can
/// run.
fn largest(process: &Seat, most: usize) -> Option<usize> {
    let ranges = process.member.sizes.iter();
    ranges
        .filter_map(|range| range.largest_up_to(most))
        .max()
        .filter(|size| *size > 0)
}

/// Checks the number of size ranges of a process.
pub(super) fn check_sizes(sizes: &[SizeRange]) -> Result<(), RendezvousError> {
    if sizes.len() <= MOST_RANGES {
        return Ok(());
    }
    let what = "the list of numbers of processes".to_owned();
    let bytes = |ranges: usize| ranges * size_of::<SizeRange>();
    Err(RendezvousError::TooLong {
        what,
        bytes: bytes(sizes.len()),
        limit: bytes(MOST_RANGES),
    })
}
