//! Processes between two epochs: they have left an epoch that is over, and have not joined the next
//! one.
//!
//! Such a process makes a new connection to join, perhaps to another service. Until it has joined,
//! it keeps the connection over which it left. So its death is seen at once also in that time, and
//! its place goes to another process.

use std::collections::BTreeMap;

use mpmd_base::block::Instant;

use super::super::actions::{JobActions, processes};
use super::places::EndKind;
use super::{EpochPhase, Epochs};
use crate::ProcessPart;
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// The processes that have left an epoch and will join the next one: the key of each, by the
/// connection over which it left.
#[derive(Default)]
pub(super) struct Returners(BTreeMap<Link, u128>);

impl Epochs {
    /// Records that the process of a client leaves its epoch in order to join the next one. Returns
    /// its place, if it had joined.
    pub(in super::super) fn leaves_to_return(&mut self, link: Link) -> Option<ProcessId> {
        let key = self.key_of(link);
        let place = self.joined.remove(&link)?;
        self.returners.0.extend(key.map(|key| (link, key)));
        Some(place)
    }

    /// Records that the process with this key has joined over the connection `link`. Returns the
    /// other connection, over which it has left its epoch, if that still stands.
    pub(in super::super) fn has_returned(&mut self, key: u128, link: Link) -> Option<Link> {
        let mut returners = self.returners.0.iter();
        let left = returners.find_map(|(left, returner)| (*returner == key).then_some(*left))?;
        self.returners.0.remove(&left);
        Some(left).filter(|left| *left != link)
    }

    /// Handles the end of the connection over which a process has left its epoch. It ended before
    /// the process has joined, so the process is gone.
    pub(in super::super) fn returner_is_gone(
        &mut self,
        link: Link,
        now: Instant,
        actions: &mut JobActions,
    ) {
        if let Some(key) = self.returners.0.remove(&link) {
            self.returns_no_more(key, now, actions);
            self.dismiss_spares(now, actions);
        }
    }

    /// Frees the place of a process that has left its epoch in order to join the next one, and has
    /// ended before it joined. Does nothing if it holds a place: its connection ends, too.
    pub(super) fn returns_no_more(&mut self, key: u128, now: Instant, actions: &mut JobActions) {
        for seat in self.seats.iter_mut().flatten() {
            if let Some(end) = &mut seat.ended
                && seat.key == key
                && end.how == EndKind::Returns
            {
                end.how = EndKind::Died;
                self.leavers.are_needed = true;
            }
        }

        if self.phase != EpochPhase::Gathering {
            return;
        }
        let is_reserved = |process: &ProcessId| {
            let holder = self.before[process.index()];
            self.seats[process.index()].is_none() && holder.is_some_and(|holder| holder.key == key)
        };
        if let Some(place) = processes(self.seats.len()).find(is_reserved) {
            self.leavers.are_needed = true;
            // Another has the time to come.
            let until = after(now, self.peer_timeout);
            self.gather_until = self.gather_until.max(until);
            self.vacant[place.index()] = true;
            self.forget_if_gone(key);
            self.place_spares(actions);
        }
    }

    /// Counts processes as dead that have not returned in time, if no other process can begin the
    /// next epoch.
    pub(super) fn stop_waiting_for_returns(&mut self, now: Instant, actions: &mut JobActions) {
        let is_due = self.returns_by.is_some_and(|until| now >= until);
        if !is_due {
            return;
        }

        self.returns_by = None;
        if self.phase != EpochPhase::Running || self.present() > 0 {
            return;
        }

        let mut late = Vec::new();
        for seat in self.seats.iter_mut().flatten() {
            if let Some(end) = seat
                .ended
                .as_mut()
                .filter(|end| end.how == EndKind::Returns)
            {
                end.how = EndKind::Died;
                late.push(seat.key);
            }
        }

        self.leavers.are_needed |= !late.is_empty();
        late.into_iter()
            .for_each(|key| self.set_part(key, ProcessPart::Out));
        self.dismiss_spares(now, actions);
    }
}
