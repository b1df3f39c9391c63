//! The context of a running kernel: its position in the mesh, its device and its collectives.

use std::sync::Arc;

use mpmd_device::cuda::StreamTurn;
use mpmd_proto::Failure;

use super::collectives_nccl::UsedCommunicators;
use super::signature::Collective;
use super::view::ViewMut;
use crate::error::{Error, Result};
use crate::exec::{CollectiveGroup, KernelExchange, OpGuard, Round};
use crate::kernel::cuda::Cuda;
use mpmd_layout::topology::{DeviceId, Mesh};

/// One device's position in a kernel's mesh, and its collective groups. Created once for each call
/// shape.
#[derive(Debug)]
pub(crate) struct MeshPosition {
    pub(crate) device: DeviceId,
    /// The device's coordinates along the mesh's axes.
    pub(crate) position: Vec<usize>,
    /// The group of devices for each declared collective.
    pub(crate) groups: Vec<CollectiveGroup>,
}

/// The mesh and the declared collectives of a kernel. Shared by the devices of one call shape.
#[derive(Debug)]
pub(crate) struct DeviceBindings {
    pub(crate) mesh: Mesh,
    pub(crate) collectives: Vec<Collective>,
}

/// The surroundings of a running kernel: its position in the mesh, its device and its collectives.
pub struct Context<'a> {
    pub(super) seats: &'a DeviceBindings,
    pub(super) place: &'a MeshPosition,
    pub(super) exchange: KernelExchange,
    pub(super) op: u64,
    /// The number of declared collectives that have ended, also by failure.
    pub(super) called: usize,
    /// The number of finished rounds of the current collective.
    pub(super) round: usize,
    /// The kernel's CUDA device. `None` while the kernel cannot issue work to one.
    pub(super) on_cuda: Option<CudaAccess<'a>>,
    /// The NCCL communicators that this call has used.
    pub(super) joined: UsedCommunicators,
}

/// A CUDA device with exclusive access to its compute stream.
pub(crate) struct CudaAccess<'a> {
    pub(crate) cuda: Cuda<'a>,
    /// Access to the device's compute stream.
    pub(crate) turn: StreamTurn<'a>,
}

impl<'a> Context<'a> {
    pub(crate) fn new(
        seats: &'a DeviceBindings,
        place: &'a MeshPosition,
        exchange: KernelExchange,
        op: u64,
    ) -> Self {
        Self {
            seats,
            place,
            exchange,
            op,
            called: 0,
            round: 0,
            on_cuda: None,
            joined: UsedCommunicators::default(),
        }
    }

    /// Returns the interface for issuing work to the CUDA device. `None` if the kernel runs on the
    /// host.
    pub fn cuda(&self) -> Option<Cuda<'a>> {
        self.on_cuda.as_ref().map(|on_cuda| on_cuda.cuda)
    }

    /// Sets every byte of an output to zero, which is the zero of every dtype. Works on any kind of
    /// device. On a CUDA device this only issues the work.
    ///
    /// # Errors
    ///
    /// If the driver of a CUDA device refuses the work.
    pub fn zero(&self, values: &mut ViewMut<'_>) -> Result<()> {
        match self.cuda() {
            Some(cuda) => cuda.zero(values),
            None => {
                values.zero();
                Ok(())
            }
        }
    }

    /// Returns the device that this call runs on.
    pub fn device(&self) -> DeviceId {
        self.place.device
    }

    /// Returns the mesh that the kernel was bound to.
    pub fn mesh(&self) -> &'a Mesh {
        &self.seats.mesh
    }

    /// Returns this device's coordinate along `axis`.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis.
    pub fn axis_index(&self, axis: &str) -> Result<usize> {
        let index = self
            .seats
            .mesh
            .axis_names()
            .iter()
            .position(|name| name == axis);

        index
            .map(|index| self.place.position[index])
            .ok_or_else(|| self.no_axis(axis))
    }

    /// Returns the number of devices along `axis`.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis.
    pub fn axis_size(&self, axis: &str) -> Result<usize> {
        self.seats
            .mesh
            .axis_size(axis)
            .map_err(|_| self.no_axis(axis))
    }

    /// Returns the number of threads that this kernel may use, including its own: always 1.
    pub fn threads(&self) -> usize {
        1
    }

    /// Lets the kernel issue work to a CUDA device from now on.
    pub(crate) fn enter(&mut self, on_cuda: CudaAccess<'a>) {
        self.on_cuda = Some(on_cuda);
    }

    /// Ends the access to the CUDA device and returns it. Must be called once after
    /// [`enter`](Self::enter); panics otherwise.
    pub(crate) fn leave(&mut self) -> CudaAccess<'a> {
        self.on_cuda.take().expect("nobody else takes it")
    }

    /// Returns the guard that keeps the operation in flight, and the NCCL communicators that the
    /// call has used.
    pub(crate) fn into_guard(self) -> (OpGuard, UsedCommunicators) {
        (self.exchange.guard, self.joined)
    }

    /// Returns true if the call has used NCCL. If such a communicator is given up, the device skips
    /// its work without an error.
    pub(crate) fn has_joined(&self) -> bool {
        !self.joined.is_empty()
    }

    /// Returns the number of declared collectives that the kernel has not called.
    pub(crate) fn not_called(&self) -> usize {
        self.place.groups.len() - self.called
    }

    /// Fails all remaining collectives. Devices that wait for this one get `failure`. Messages to
    /// this device are still received, so that no sender blocks for ever.
    pub(crate) fn abandon(&mut self, failure: &Arc<Failure>) {
        while self.called < self.place.groups.len() {
            self.abandon_collective(failure);
        }
    }

    /// Fails the remaining rounds of the current collective, also on the devices that wait for
    /// this one. The next declared collective becomes the current one.
    pub(super) fn abandon_collective(&mut self, failure: &Arc<Failure>) {
        let group = &self.place.groups[self.called];
        for round in self.round..group.rounds.len() {
            let round = Round {
                op: self.op,
                index: self.called,
                round,
                group,
            };
            self.exchange.poison(&round, failure);
            self.exchange.decline(&round);
        }

        self.next_collective();
    }

    pub(super) fn next_collective(&mut self) {
        self.called += 1;
        self.round = 0;
    }

    fn no_axis(&self, axis: &str) -> Error {
        Error::kernel(format!(
            "the kernel's mesh {} has no axis {axis:?}",
            self.seats.mesh
        ))
    }
}
