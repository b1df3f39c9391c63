//! Collectives on values in the memory of CUDA devices, with NCCL.
//!
//! A group that uses NCCL is called *joined*; all processes compute this from shared knowledge.
//! Before each collective its devices exchange one ordinary message with each other. With it they
//! check that all of them call the collective with device values, and with the same number. The
//! first message also carries the id for new communicators. Only then is NCCL called, so an error
//! of a kernel on one device leaves no other device hanging in NCCL. The NCCL work is only issued,
//! like all other work: no thread waits for the device.
//!
//! After the check, the other devices rely on this one. An error from then on, also later on the
//! device, fails the whole job: the others wait on their devices and cannot learn of it in another
//! way.
//!
//! A device's thread runs operations in order, and collectives in the order of their declarations.
//! So two devices that share several groups use them in the same order, and communicators cannot
//! deadlock.

use std::fmt;
use std::sync::Arc;

use mpmd_base::block::now;
use mpmd_base::deadline::after;
use mpmd_device::collective::CollectiveKind;
use mpmd_device::cuda::{
    Communicator, CommunicatorId, Joint, NotJoined, StreamTurn, nccl_has, new_id,
};
use mpmd_memory::DevicePlace;
use mpmd_proto::{Failure, FailureKind};

use super::collectives::{CollectiveCall, Fallible};
use super::context::{Context, CudaAccess};
use super::signature::Collective;
use crate::error::Result;
use crate::exec::Runtime;
use crate::kernel::cuda::{Cuda, CudaPart};
use mpmd_layout::aval::Element;
use mpmd_layout::topology::{DeviceId, Topology};

impl Collective {
    /// Returns true if these devices use NCCL for device values. A pure function: all devices of
    /// the group get the same result. NCCL supports all reductions.
    pub(crate) fn is_joined(&self, devices: &[DeviceId], topology: &Topology) -> bool {
        nccl_has(self.aval.dtype()) && topology.are_joined(devices)
    }
}

/// The location of the values that a device passes to a collective of a group that uses NCCL.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ValueLocation {
    /// Host memory: the collective runs as in a group without NCCL.
    OfHost,
    OfDevice,
}

/// The message by which a device compares its call with the other devices of a group that uses
/// NCCL.
struct CallNotice {
    values: ValueLocation,
    elements: usize,
    /// True if the device already has a communicator of the group.
    has_joined: bool,
    /// The id for a new communicator, from the first device of the group. Zeros from other devices,
    /// and if the first device already has a communicator.
    id: CommunicatorId,
}

impl CallNotice {
    const BYTES: usize = 16 + size_of::<CommunicatorId>();

    fn to_bytes(&self) -> Vec<u8> {
        let flags =
            u64::from(self.values == ValueLocation::OfDevice) | u64::from(self.has_joined) << 1;
        [
            &(self.elements as u64).to_le_bytes()[..],
            &flags.to_le_bytes(),
            &self.id,
        ]
        .concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (elements, rest) = bytes.split_first_chunk()?;
        let (flags, id) = rest.split_first_chunk()?;

        let flags = u64::from_le_bytes(*flags);
        let values = if flags & 1 == 0 {
            ValueLocation::OfHost
        } else {
            ValueLocation::OfDevice
        };
        let elements = usize::try_from(u64::from_le_bytes(*elements)).ok()?;

        Some(Self {
            values,
            elements,
            has_joined: flags & 2 != 0,
            id: id.try_into().ok()?,
        })
    }
}

/// The length in bytes of a [`CallNotice`], the message that compares a call in a group that uses
/// NCCL.
pub(super) const AGREEING_BYTES: usize = CallNotice::BYTES;

/// The NCCL communicators that a kernel's call has used.
#[derive(Default)]
pub(crate) struct UsedCommunicators(Vec<Arc<Communicator>>);

impl UsedCommunicators {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, communicator: &Arc<Communicator>) {
        if !self.0.iter().any(|known| Arc::ptr_eq(known, communicator)) {
            self.0.push(communicator.clone());
        }
    }

    /// Returns the final result of a kernel's call. `result` is the device's result. It is replaced
    /// by an error if one of these communicators was given up: the device then skips the NCCL work
    /// without an error. `failure` creates the call's failure from a reason. If a call with NCCL
    /// failed, also fails the whole job.
    pub(crate) fn end(
        &self,
        runtime: &Arc<Runtime>,
        result: Fallible<()>,
        failure: impl Fn(&dyn fmt::Display) -> Arc<Failure>,
    ) -> Fallible<()> {
        if let Some(why) = self
            .0
            .iter()
            .find_map(|communicator| communicator.given_up())
        {
            return Err(reworded(
                why,
                &failure(&format!("its NCCL work was given up: {why}")).message,
            ));
        }

        if let (Err(failure), false) = (&result, self.0.is_empty()) {
            // Other devices wait for this one.
            runtime.fail_job(failure.clone());
        }
        result
    }
}

/// Returns a copy of the failure with `words` as its message.
fn reworded(failure: &Failure, words: &str) -> Arc<Failure> {
    Arc::new(Failure::new(
        failure.kind,
        failure.process,
        failure.op,
        words,
    ))
}

impl<'a> Context<'a> {
    /// Returns true if the next collective uses NCCL for values on the device.
    pub(super) fn is_next_joined(&self) -> bool {
        self.place
            .groups
            .get(self.called)
            .is_some_and(|group| group.joined)
    }

    /// Issues the next collective to the device with NCCL, from the values at `from` to those at
    /// `to`. Both may be the same memory. Blocks until all devices of the group have called the
    /// collective and NCCL has issued it.
    pub(super) fn by_nccl(
        &mut self,
        verb: &'static str,
        axis: &str,
        from: &CudaPart<'_>,
        to: &CudaPart<'_>,
    ) -> Result<()> {
        self.apart_from_device(|cx, CudaAccess { cuda, turn }| {
            cuda.check_room(to)?;
            let [elements, room] = [cuda.count(from)?, cuda.count(to)?];
            let call = cx.begin(verb, axis, from.dtype(), elements)?;

            match call.declared.kind {
                CollectiveKind::AllGather => {
                    cx.check_out(&call, room, elements * call.devices())?
                }
                CollectiveKind::ReduceScatter(_) => {
                    cx.check_divides(&call)?;
                    cx.check_out(&call, room, elements / call.devices())?;
                }
                CollectiveKind::AllToAll => {
                    cx.check_divides(&call)?;
                    cx.check_out(&call, room, elements)?;
                }
                CollectiveKind::AllReduce(_) | CollectiveKind::Permute(_) => {
                    cx.check_out(&call, room, elements)?;
                }
            }

            let places = [cuda.place_of(from)?, cuda.place_of(to)?];
            let joint = Joint {
                kind: &call.declared.kind,
                dtype: from.dtype(),
                elements,
                ranks: call.devices(),
                from: places[0],
                to: places[1],
            };

            let result = cx.agree_and_join(*cuda, turn, &call, &joint);
            cx.end(result)
        })
    }

    fn agree_and_join(
        &mut self,
        cuda: Cuda<'_>,
        turn: &mut StreamTurn<'_>,
        call: &CollectiveCall<'_>,
        joint: &Joint<'_>,
    ) -> Fallible<()> {
        let runtime = self.exchange.runtime.clone();
        let devices = &call.group.devices;
        let rank = call.rank();
        let found = runtime
            .communicators
            .find(devices, rank)
            .map_err(|why| self.not_joined(call, &why))?;

        let id = match (&found, rank) {
            (None, 0) => new_id().map_err(|error| self.not_joined(call, &error.into()))?,
            _ => [0; size_of::<CommunicatorId>()],
        };

        let told = CallNotice {
            values: ValueLocation::OfDevice,
            elements: call.elements,
            has_joined: found.is_some(),
            id,
        };

        let agreed = turn.pause(|| self.agree_on(call, &told));
        // Meanwhile this thread may have run work of another device; make this one current again.
        let begun = turn.begin();
        let id = agreed?;

        // From here on the other devices rely on this one, and no host messages are exchanged.
        self.round = call.group.rounds.len();
        let joined = begun.map_err(NotJoined::from).and_then(|_| match found {
            _ if call.elements == 0 => Ok(()),
            Some(communicator) => self.join(cuda, turn, call, &communicator, joint),
            None => {
                let deadline = after(now(), runtime.config.peer_timeout);
                let communicators = &runtime.communicators;
                let communicator =
                    turn.pause(|| communicators.open(cuda.gpu(), devices, rank, &id, deadline))?;
                runtime.watch_communicators();
                self.join(cuda, turn, call, &communicator, joint)
            }
        });

        joined.map_err(|why| {
            let failure = self.not_joined(call, &why);
            if let NotJoined::Failed(_) = why {
                runtime.fail_job(failure.clone());
            }
            failure
        })
    }

    /// Issues the NCCL work of a collective after all devices have agreed on the call. Blocks until
    /// NCCL has issued the work, but does not wait for the device.
    fn join(
        &mut self,
        cuda: Cuda<'_>,
        turn: &mut StreamTurn<'_>,
        call: &CollectiveCall<'_>,
        communicator: &Arc<Communicator>,
        joint: &Joint<'_>,
    ) -> std::result::Result<(), NotJoined> {
        let stream = turn.begin()?;

        // The parts that NCCL does not move: a device's own block, and zeros if no device sends to
        // it.
        let Joint { from, to, .. } = *joint;
        match joint.kind {
            CollectiveKind::Permute(pairs) => match pairs.iter().find(|pair| pair.1 == call.rank())
            {
                Some(pair) if pair.0 == pair.1 => stream.copy(from, to)?,
                Some(_) => {}
                // All-zero bytes are the zero of every dtype.
                None => stream.fill(to, &[0])?,
            },
            CollectiveKind::AllToAll => {
                let bytes = joint.elements / joint.ranks * joint.dtype.size();
                let own = (call.rank() * bytes) as u64;
                let part = |place: DevicePlace| DevicePlace {
                    address: place.address + own,
                    bytes,
                    ..place
                };
                stream.copy(part(from), part(to))?;
            }
            _ => {}
        }

        // Registered before the communicator can be given up, because the call's end checks it.
        self.joined.add(communicator);
        communicator.issue(cuda.issues_to(), joint)?;

        let deadline = after(now(), self.exchange.runtime.config.peer_timeout);
        // Waits only until NCCL has issued all its work, not for the device.
        turn.pause(|| communicator.until_done(joint.kind.verb(), deadline))?;
        turn.begin()?;
        Ok(())
    }

    /// Checks the next call, which has host values, against its declaration and returns it. In a
    /// group that uses NCCL, also waits for all devices to call it and checks that all pass host
    /// values.
    pub(super) fn begin_on_host<T: Element>(
        &mut self,
        verb: &'static str,
        axis: &str,
        elements: usize,
    ) -> Result<CollectiveCall<'a>> {
        let call = self.begin(verb, axis, T::DTYPE, elements)?;

        if call.group.joined {
            let id = [0; size_of::<CommunicatorId>()];
            let told = CallNotice {
                values: ValueLocation::OfHost,
                elements,
                has_joined: false,
                id,
            };
            if let Err(failure) = self.agree_on(&call, &told) {
                self.end(Err(failure))?;
            }
        }
        Ok(call)
    }

    /// Runs the round in which a group that uses NCCL compares a call. Sends `told` and waits for
    /// the messages of the other devices. Returns the communicator id from the first device.
    ///
    /// All devices detect a mismatch in the same way.
    fn agree_on(
        &mut self,
        call: &CollectiveCall<'_>,
        told: &CallNotice,
    ) -> Fallible<CommunicatorId> {
        let me = self.exchange.runtime.me;
        let given = self.exchange.copy_in(&told.to_bytes())?;
        let parts = self
            .step::<u8>(call, |_| given.clone(), |_| CallNotice::BYTES)
            .inspect_err(|failure| {
                // Other processes cannot know that this one has no memory for their messages.
                if failure.kind == FailureKind::Memory && failure.process == me {
                    self.exchange.runtime.fail_job(failure.clone());
                }
            })?;

        let mut id = told.id;
        for (from, part) in parts.iter().enumerate() {
            let Some(part) = part else { continue };
            let theirs = CallNotice::from_bytes(part)
                .ok_or_else(|| self.disagree(call, from, "its message has the wrong length"))?;

            if theirs.values != told.values {
                let whose = |values| match values {
                    ValueLocation::OfHost => "of the host's",
                    ValueLocation::OfDevice => "on the device",
                };
                let ours = whose(told.values);
                let theirs = whose(theirs.values);
                let why =
                    format!("one calls it with values {theirs}, the other with values {ours}");
                return Err(self.disagree(call, from, &why));
            }

            if told.values == ValueLocation::OfHost {
                // The lengths of host values are compared when they arrive.
                continue;
            }

            if theirs.elements != told.elements {
                let bytes = |elements: usize| elements * call.declared.aval.dtype().size();
                return Err(self.lengths_differ(
                    call,
                    from,
                    bytes(told.elements),
                    bytes(theirs.elements),
                ));
            }

            if theirs.has_joined != told.has_joined {
                return Err(self.disagree(
                    call,
                    from,
                    "one of them has a communicator of NCCL's, the other has none",
                ));
            }

            if from == 0 {
                id = theirs.id;
            }
        }

        Ok(id)
    }

    fn disagree(&self, call: &CollectiveCall<'_>, from: usize, why: &str) -> Arc<Failure> {
        let device = self.place.device;
        let other = call.group.devices[from];
        self.failure_of(
            call,
            FailureKind::Kernel,
            format!("devices {other} and {device} do not agree: {why}"),
        )
    }

    /// Creates the failure of a collective that this device could not run with NCCL.
    fn not_joined(&self, call: &CollectiveCall<'_>, why: &NotJoined) -> Arc<Failure> {
        match why {
            NotJoined::GivenUp(failure) => {
                reworded(failure, &self.failure_of(call, failure.kind, why).message)
            }
            NotJoined::Failed(error) => {
                let why = format!("it failed on device {}: {error}", self.place.device);
                self.failure_of(call, FailureKind::Transport, why)
            }
        }
    }

    fn failure_of(
        &self,
        call: &CollectiveCall<'_>,
        kind: FailureKind,
        why: impl fmt::Display,
    ) -> Arc<Failure> {
        let index = call.index;
        let op = self.op;
        let declared = call.declared;

        let message =
            format!("collective {index} of operation {op}, declared as {declared}: {why}");
        Arc::new(Failure::new(kind, self.exchange.runtime.me, op, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_a_round_trip() {
        let mut id = [7; 128];
        id[127] = 9;
        for (values, has_joined) in [
            (ValueLocation::OfHost, false),
            (ValueLocation::OfDevice, true),
            (ValueLocation::OfDevice, false),
        ] {
            let bytes = CallNotice {
                values,
                elements: 1 << 40,
                has_joined,
                id,
            }
            .to_bytes();
            assert_eq!(bytes.len(), AGREEING_BYTES);
            let heard = CallNotice::from_bytes(&bytes).unwrap();
            assert_eq!(
                (heard.values, heard.elements, heard.has_joined),
                (values, 1 << 40, has_joined)
            );
            assert_eq!(heard.id, id);
            assert!(CallNotice::from_bytes(&bytes[1..]).is_none());
        }
    }
}
