//! A job that goes on at another service, since the process that ran the first one is gone.
//!
//! The new service knows what each process of the last epoch knows: the members of that epoch. It
//! gathers the next one. Processes are known by their marks. The places of those that are gone are
//! free. Values and barriers of the first service are lost with it.

use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::super::protocol::ServerReply;
use super::super::super::succession::{in_order, told};
use super::super::super::{JobMember, JoinedEpoch, ProcessPart};
use super::super::actions::{JobActions, processes};
use super::Epochs;
use super::leavers::Leavers;
use super::places::{FormerHolder, KnownProcess};
use mpmd_handshake::strangers::Link;

/// The connection of processes that were connected to the previous service. No client of this one
/// has it.
const NOBODY: Link = 0;

impl Epochs {
    /// Creates the epochs of a job that was started with `launched` processes and continues after
    /// the epoch `past`. `lives` is true for each process of `past` that may return.
    pub(in crate::job) fn resumed(
        launched: usize,
        peer_timeout: Duration,
        past: &JoinedEpoch,
        lives: &[bool],
        now: Instant,
    ) -> Self {
        let mut epochs = Self::new(past.members.len(), peer_timeout, past.run, now);
        epochs.launched = launched;
        epochs.epoch = past.epoch + 1;
        epochs.heirs = in_order(&past.members);
        epochs.agreed = past.members.first().map(|first| JobMember {
            vectors: past.vectors(),
            ..first.clone()
        });
        epochs.leavers = Leavers::resumed(past.standing, lives.contains(&false));

        let places = processes(past.members.len()).zip(&past.members).zip(lives);
        for ((process, member), lives) in places {
            epochs.vacant[process.index()] = !*lives;
            let Some(heir) = member.heir.as_ref().filter(|_| *lives) else {
                continue;
            };

            let former = FormerHolder {
                key: heir.mark,
                link: NOBODY,
            };
            epochs.before[process.index()] = Some(former);
            let part = ProcessPart::Holds(process);
            epochs.known.insert(
                heir.mark,
                KnownProcess {
                    number: process,
                    part,
                    since: heir.since,
                    has_ended: false,
                },
            );
        }
        epochs
    }

    /// Records the first epoch of each process that is new in the epoch that begins.
    pub(super) fn note_since(&mut self) {
        for seat in self.seats.iter_mut().flatten() {
            let Some(known) = self.known.get_mut(&seat.key) else {
                continue;
            };
            if known.since == 0 {
                known.since = self.epoch;
            }
            if let Some(heir) = &mut seat.member.heir {
                heir.since = known.since;
            }
        }
    }

    /// Tells a spare which processes can take over the service.
    pub(super) fn tell_heirs(&self, link: Link, actions: &mut JobActions) {
        if !self.heirs.is_empty() {
            let addresses = told(&self.heirs);
            actions.say(
                link,
                ServerReply::Heirs {
                    run: self.run,
                    addresses,
                },
            );
        }
    }
}
