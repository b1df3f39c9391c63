//! Who reaches which memory: that of CUDA devices from here, and that of other processes.

use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_transport::memory::DevicePlace;
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::slot::Slot;
use super::{OpGuard, Runtime};
use crate::device::cuda::{CudaError, Gpu, Part};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::{DeviceId, DeviceKind};

impl Runtime {
    /// Whose memory a shard on a device of this process is in: `None` where it is the host's.
    pub(crate) fn gpu_of(&self, device: DeviceId, kind: MemoryKind) -> Option<&Arc<Gpu>> {
        if kind == MemoryKind::Host {
            return None;
        }
        self.devices.iter().find(|local| local.id == device).and_then(|local| local.gpu.as_ref())
    }

    /// Whether shards on a device of any process are in the memory of a CUDA device. The same on
    /// every process.
    pub(crate) fn is_on_gpu(&self, device: DeviceId, kind: MemoryKind) -> bool {
        kind == MemoryKind::Device && self.topology.kind_of(device) == Some(DeviceKind::Cuda)
    }

    /// The device of this process that copies from a place: the one that has it, else any.
    pub(crate) fn gpu_for(&self, place: DevicePlace) -> Option<&Arc<Gpu>> {
        let gpus = || self.devices.iter().filter_map(|local| local.gpu.as_ref());
        gpus().find(|gpu| gpu.ordinal() == place.device).or_else(|| gpus().next())
    }

    /// Whether memory of CUDA devices goes to `peer`, and comes from it, as it is. The same on both
    /// sides.
    ///
    /// What does not go so is copied to the host's memory first, and from there where it is wanted.
    pub(crate) fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let takes = |process| self.topology.has_kind(process, DeviceKind::Cuda);
        let transport = self.transport.as_ref();
        takes(self.me)
            && takes(peer)
            && transport.is_some_and(|transport| transport.carries_device_memory(peer))
    }

    /// Whether a shard on `device`, of a process of the two, goes between this process and `peer`
    /// as memory that stays where it is: then a part of it that is no run goes with the rest. The
    /// same on both sides.
    pub(crate) fn lends(&self, device: DeviceId, kind: MemoryKind, peer: ProcessId) -> bool {
        self.hands_over(peer) && (!self.is_on_gpu(device, kind) || self.carries_device_memory(peer))
    }

    /// Says once which way arrays on CUDA devices take to and from each process that has such
    /// devices too.
    pub(super) fn say_ways(&self) {
        if !self.topology.has_kind(self.me, DeviceKind::Cuda) {
            return;
        }
        let others =
            (0..self.topology.processes() as u32).map(ProcessId).filter(|peer| *peer != self.me);
        let others = others.filter(|peer| self.topology.has_kind(*peer, DeviceKind::Cuda));
        let (in_place, through_host): (Vec<_>, Vec<_>) = others
            .map(|peer| (peer.0, self.carries_device_memory(peer)))
            .partition(|(_, carries)| *carries);
        let [in_place, through_host] = [in_place, through_host]
            .map(|peers| peers.into_iter().map(|(peer, _)| peer).collect::<Vec<_>>());
        let process = self.me.0;
        tracing::info!(
            process,
            ?in_place,
            ?through_host,
            "ways of CUDA devices' memory to those of other processes"
        );
    }

    /// What a slot will have, in the host's memory: the very buffer where that is there, else a
    /// copy, begun as soon as a device can.
    pub(crate) fn in_host_memory(self: &Arc<Self>, op: u64, slot: &Slot) -> Slot {
        let (promise, found) = Slot::new();
        let (runtime, source) = (self.clone(), slot.clone());
        let reading = self.in_flight.reading();
        slot.on_issued(move |outcome| {
            let bytes = match outcome {
                Ok(bytes) if bytes.device().is_some() => bytes,
                ended => return promise.keep(ended.clone()),
            };
            let to = match runtime.staging.allocate(bytes.len()) {
                Ok(to) => to,
                Err(error) => {
                    return promise.keep(Err(runtime.out_of_memory(op, &error.to_string())));
                }
            };
            let all = Region::full(&[bytes.len()]);
            let part = Part { from: &all, to: &all, piece: &all, item_bytes: 1 };
            runtime.read_device(op, bytes, Some(source), part, to, move |result| {
                promise.keep(result.map(OwnedBuffer::freeze));
                drop(reading);
            });
        });
        found
    }

    /// Copies a part of bytes in a device's memory to the host's; `then` gets them, on a thread
    /// that has other things to do.
    ///
    /// Where `source` is given, its work makes the bytes and may be under way: where that fails,
    /// this does.
    pub(super) fn read_device(
        self: &Arc<Self>,
        op: u64,
        bytes: &SharedBuffer,
        source: Option<Slot>,
        part: Part<'_>,
        to: OwnedBuffer,
        then: impl FnOnce(Result<OwnedBuffer, Arc<Failure>>) + Send + 'static,
    ) {
        let Some(gpu) = bytes.device().and_then(|place| self.gpu_for(place)) else {
            return then(Err(
                self.failed_on_device(op, "bytes of a CUDA device came to a process without one")
            ));
        };
        let runtime = self.clone();
        gpu.outward().copy_out(bytes, to, part, move |copied| {
            let copied = copied.map_err(|error| runtime.copy_failed(op, &error));
            // Where the bytes were never made, that is why.
            when_made(source, move |made| then(made.and(copied)));
        });
    }

    /// The failure of a copy from or to a device.
    pub(super) fn copy_failed(&self, op: u64, error: &CudaError) -> Arc<Failure> {
        self.failed_on_device(op, &error.to_string())
    }

    /// The failure of an operation that a CUDA device has a part in.
    pub(super) fn failed_on_device(&self, op: u64, why: &str) -> Arc<Failure> {
        let message = format!("operation {op} on process {}: {why}", self.me);
        Arc::new(Failure::new(FailureKind::Kernel, self.me, op, message))
    }

    /// The failure of an operation that got no memory.
    pub(super) fn out_of_memory(&self, op: u64, why: &str) -> Arc<Failure> {
        Arc::new(Failure::new(FailureKind::Memory, self.me, op, format!("operation {op}: {why}")))
    }
}

/// Calls `then` with how the work of a slot that was issued ended, once it has. Without one it is
/// well.
pub(super) fn when_made(
    source: Option<Slot>,
    then: impl FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
) {
    match source {
        None => then(Ok(())),
        Some(slot) => slot.on_verdict(then),
    }
}

/// Keeps a promise with what another slot gets, or with a part of it: issued as soon as that is.
///
/// With `remember` it is a failure of this process too where there is nothing to get. `guard` goes
/// last.
pub(crate) fn follow(
    source: &Slot,
    promise: super::Promise,
    part: impl FnOnce(&SharedBuffer) -> SharedBuffer + Send + 'static,
    remember: Option<Arc<Runtime>>,
    guard: Option<OpGuard>,
) {
    let slot = source.clone();
    let failed = move |failure: &Arc<Failure>| {
        if let Some(runtime) = remember {
            runtime.remember(failure);
        }
    };
    source.on_issued(move |outcome| match outcome {
        Ok(bytes) if bytes.device().is_some() => {
            let issued = promise.issue(part(bytes));
            slot.on_verdict(move |made| {
                if let Err(failure) = &made {
                    failed(failure);
                }
                issued.end(made);
                drop(guard);
            });
        }
        Ok(bytes) => {
            promise.keep(Ok(part(bytes)));
            drop(guard);
        }
        Err(failure) => {
            failed(failure);
            promise.keep(Err(failure.clone()));
            drop(guard);
        }
    });
}
