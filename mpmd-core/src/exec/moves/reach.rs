//! Reachability of memory: accelerator memory from this process, and memory of other processes.

use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_device::accelerator::{Accelerator, DeviceError, RegionCopy};
use mpmd_memory::DevicePlace;
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::{Failure, FailureKind};

use crate::exec::waits::async_buffer::{AsyncBuffer, Resolver};
use crate::exec::{OpGuard, Runtime};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::{DeviceId, DeviceKind};

impl Runtime {
    /// Returns the accelerator that has the memory of a shard on a device of this process. `None`
    /// if the shard is in host memory.
    pub(crate) fn accelerator_of(
        &self,
        device: DeviceId,
        kind: MemoryKind,
    ) -> Option<&Arc<Accelerator>> {
        if kind == MemoryKind::Host {
            return None;
        }
        self.devices
            .iter()
            .find(|local| local.id == device)
            .and_then(|local| local.accelerator.as_ref())
    }

    /// Returns true if shards on a device of any process are in accelerator memory. The result is
    /// the same on every process.
    pub(crate) fn is_on_accelerator(&self, device: DeviceId, kind: MemoryKind) -> bool {
        kind == MemoryKind::Device
            && self
                .topology
                .kind_of(device)
                .is_some_and(DeviceKind::is_accelerator)
    }

    /// Returns the accelerator of this process that copies from `place`. It is the one that has the
    /// memory, or any accelerator if the memory belongs to another process. `None` if this process
    /// has no accelerator.
    pub(crate) fn accelerator_for(&self, place: DevicePlace) -> Option<&Arc<Accelerator>> {
        let accelerators = || {
            self.devices
                .iter()
                .filter_map(|local| local.accelerator.as_ref())
        };
        accelerators()
            .find(|accelerator| accelerator.ordinal() == place.device)
            .or_else(|| accelerators().next())
    }

    /// Returns true if accelerator memory is transferred zero-copy to and from `peer`. The result
    /// is the same on both sides.
    ///
    /// If false, the bytes are copied through host memory.
    pub(crate) fn carries_device_memory(&self, peer: ProcessId) -> bool {
        let takes = |process| self.topology.has_accelerator(process);
        let transport = self.transport.as_ref();
        takes(self.me)
            && takes(peer)
            && transport.is_some_and(|transport| transport.carries_device_memory(peer))
    }

    /// Returns true if a shard on `device` is transferred zero-copy between this process and
    /// `peer`. One of the two owns `device`. A part of the shard that is not contiguous is then
    /// sent as the whole shard. The result is the same on both sides.
    pub(crate) fn lends(&self, device: DeviceId, kind: MemoryKind, peer: ProcessId) -> bool {
        self.zero_copy(peer)
            && (!self.is_on_accelerator(device, kind) || self.carries_device_memory(peer))
    }

    /// Logs how arrays reach each peer with accelerators: zero-copy or through host memory.
    pub(crate) fn say_ways(&self) {
        if !self.topology.has_accelerator(self.me) {
            return;
        }

        let others = (0..self.topology.processes() as u32)
            .map(ProcessId)
            .filter(|peer| *peer != self.me);
        let others = others.filter(|peer| self.topology.has_accelerator(*peer));

        let (in_place, through_host) =
            others.partition::<Vec<_>, _>(|peer| self.carries_device_memory(*peer));
        let [in_place, through_host] = [in_place, through_host]
            .map(|peers| peers.into_iter().map(|peer| peer.0).collect::<Vec<_>>());
        let process = self.me.0;
        tracing::info!(
            process,
            ?in_place,
            ?through_host,
            "paths of accelerator memory to other processes"
        );
    }

    /// Returns an async buffer in host memory with the values of `slot`. It shares the buffer of
    /// `slot` if that is in host memory. Otherwise a copy starts as soon as the work that fills the
    /// buffer is issued. Does not block.
    pub(crate) fn in_host_memory(self: &Arc<Self>, op: u64, slot: &AsyncBuffer) -> AsyncBuffer {
        let (resolver, found) = AsyncBuffer::new();
        let runtime = self.clone();
        let source = slot.clone();
        let reading = self.in_flight.reading();
        slot.on_issued(move |outcome| {
            let bytes = match outcome {
                Ok(bytes) if bytes.device().is_some() => bytes,
                ended => return resolver.keep(ended.clone()),
            };
            let to = match runtime.staging.allocate(bytes.len()) {
                Ok(to) => to,
                Err(error) => {
                    return resolver.keep(Err(runtime.out_of_memory(op, &error)));
                }
            };

            let all = Region::full(&[bytes.len()]);
            let part = RegionCopy {
                from: &all,
                to: &all,
                piece: &all,
                item_bytes: 1,
            };
            runtime.read_device(op, bytes, Some(source), part, to, move |result| {
                resolver.keep(result.map(OwnedBuffer::freeze));
                drop(reading);
            });
        });
        found
    }

    /// Starts a copy of a part of `bytes` from device memory to `to`. Later calls `then` with `to`
    /// or the failure. `then` runs on a thread with other work and must be short.
    ///
    /// If `source` is given, its work fills `bytes` and may not have ended. If that work fails, the
    /// copy fails too.
    pub(crate) fn read_device(
        self: &Arc<Self>,
        op: u64,
        bytes: &SharedBuffer,
        source: Option<AsyncBuffer>,
        part: RegionCopy<'_>,
        to: OwnedBuffer,
        then: impl FnOnce(Result<OwnedBuffer, Arc<Failure>>) + Send + 'static,
    ) {
        let Some(accelerator) = bytes.device().and_then(|place| self.accelerator_for(place)) else {
            return then(Err(self.failed_on_device(
                op,
                "received accelerator memory, but this process has no accelerator",
            )));
        };

        let runtime = self.clone();
        accelerator
            .outward()
            .copy_out(bytes, to, part, move |copied| {
                let copied = copied.map_err(|error| runtime.copy_failed(op, &error));
                // If the bytes were never made, that failure is the cause.
                when_made(source, move |made| then(made.and(copied)));
            });
    }

    /// Creates the failure of a copy from or to a device.
    pub(crate) fn copy_failed(&self, op: u64, error: &DeviceError) -> Arc<Failure> {
        self.failed_on_device(op, &error.to_string())
    }

    /// Creates the failure of an operation on an accelerator, for the reason `why`.
    pub(crate) fn failed_on_device(&self, op: u64, why: &str) -> Arc<Failure> {
        let message = format!("operation {op} on process {}: {why}", self.me);
        Arc::new(Failure::new(FailureKind::Kernel, self.me, op, message))
    }
}

/// Calls `then` with the completion status of an issued async buffer, once the status is known.
/// Without an async buffer, calls `then` with success at once.
pub(crate) fn when_made(
    source: Option<AsyncBuffer>,
    then: impl FnOnce(Result<(), Arc<Failure>>) + Send + 'static,
) {
    match source {
        None => then(Ok(())),
        Some(slot) => slot.on_completion(then),
    }
}

/// Resolves `resolver` with `part` of the buffer of `source`, as soon as `source` is issued. Does
/// not block. If the buffer is in device memory, `resolver` ends when `source` ends.
///
/// With `remember`, a failure of `source` also counts as a failure on this process. `guard` is
/// dropped last.
pub(crate) fn follow(
    source: &AsyncBuffer,
    resolver: Resolver,
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
            let issued = resolver.issue(part(bytes));
            slot.on_completion(move |made| {
                if let Err(failure) = &made {
                    failed(failure);
                }
                issued.end(made);
                drop(guard);
            });
        }
        Ok(bytes) => {
            resolver.keep(Ok(part(bytes)));
            drop(guard);
        }
        Err(failure) => {
            failed(failure);
            resolver.keep(Err(failure.clone()));
            drop(guard);
        }
    });
}
