//! What a running kernel knows of its place.

use std::sync::Arc;

use mpmd_transport::Failure;

use super::collectives_nccl::Joined;
use super::signature::Collective;
use super::view::ViewMut;
use crate::device::cuda::Turn;
use crate::error::{Error, Result};
use crate::exec::{Exchange, Group, OpGuard, Round};
use crate::kernel::cuda::Cuda;
use mpmd_layout::topology::{DeviceId, Mesh};

/// One device's seat in a kernel's mesh. Made once for each call shape.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) device: DeviceId,
    /// Coordinates along the mesh's axes.
    pub(crate) position: Vec<usize>,
    /// For each declared collective: the devices it spans, and how it goes among them.
    pub(crate) groups: Vec<Group>,
}

/// Where a kernel runs and what it declared. Shared by the devices of one call shape.
#[derive(Debug)]
pub(crate) struct Seats {
    pub(crate) mesh: Mesh,
    pub(crate) collectives: Vec<Collective>,
}

/// A running kernel's surroundings: its position in the mesh, and the collectives it declared.
pub struct Context<'a> {
    pub(super) seats: &'a Seats,
    pub(super) place: &'a Place,
    pub(super) exchange: Exchange,
    pub(super) op: u64,
    /// How many of the declared collectives are over, well or not.
    pub(super) called: usize,
    /// How many rounds of the next one are over.
    pub(super) round: usize,
    /// Where the kernel runs on a CUDA device, while it does.
    pub(super) on_cuda: Option<OnCuda<'a>>,
    /// What it has given work on that device.
    pub(super) joined: Joined,
}

/// A CUDA device that a kernel gives work, in its turn.
pub(crate) struct OnCuda<'a> {
    pub(crate) cuda: Cuda<'a>,
    /// Of the device's compute line.
    pub(crate) turn: Turn<'a>,
}

impl<'a> Context<'a> {
    pub(crate) fn new(seats: &'a Seats, place: &'a Place, exchange: Exchange, op: u64) -> Self {
        Self {
            seats,
            place,
            exchange,
            op,
            called: 0,
            round: 0,
            on_cuda: None,
            joined: Joined::default(),
        }
    }

    /// What gives a CUDA device work; `None` where the kernel runs on the host's processors.
    pub fn cuda(&self) -> Option<Cuda<'a>> {
        self.on_cuda.as_ref().map(|on_cuda| on_cuda.cuda)
    }

    /// Sets every byte of an output to zero, which is the zero of every type, wherever the kernel
    /// runs.
    ///
    /// # Errors
    ///
    /// Where a CUDA device refuses.
    pub fn zero(&self, values: &mut ViewMut<'_>) -> Result<()> {
        match self.cuda() {
            Some(cuda) => cuda.zero(values),
            None => {
                values.zero();
                Ok(())
            }
        }
    }

    /// The device that this call runs on.
    pub fn device(&self) -> DeviceId {
        self.place.device
    }

    /// The mesh that the kernel was bound to.
    pub fn mesh(&self) -> &'a Mesh {
        &self.seats.mesh
    }

    /// This device's coordinate along `axis`.
    ///
    /// # Errors
    ///
    /// Where the mesh has no such axis.
    pub fn axis_index(&self, axis: &str) -> Result<usize> {
        let index = self.seats.mesh.axis_names().iter().position(|name| name == axis);
        index.map(|index| self.place.position[index]).ok_or_else(|| self.no_axis(axis))
    }

    /// The number of devices along `axis`.
    ///
    /// # Errors
    ///
    /// Where the mesh has no such axis.
    pub fn axis_size(&self, axis: &str) -> Result<usize> {
        self.seats.mesh.axis_size(axis).map_err(|_| self.no_axis(axis))
    }

    /// How many threads this kernel may use for itself.
    pub fn threads(&self) -> usize {
        1
    }

    /// From now on the kernel gives work to a CUDA device.
    pub(crate) fn enter(&mut self, on_cuda: OnCuda<'a>) {
        self.on_cuda = Some(on_cuda);
    }

    /// The kernel has given all its work. To be called once after [`enter`](Self::enter).
    pub(crate) fn leave(&mut self) -> OnCuda<'a> {
        self.on_cuda.take().expect("nobody else takes it")
    }

    /// What keeps the operation in flight, and the communicators that its end is to be told.
    pub(crate) fn into_guard(self) -> (OpGuard, Joined) {
        (self.exchange.guard, self.joined)
    }

    /// Whether the device was given work that others have a part in, by NCCL: it may come past that
    /// though it is not done.
    pub(crate) fn has_joined(&self) -> bool {
        !self.joined.is_empty()
    }

    /// How many of the declared collectives were not called.
    pub(crate) fn not_called(&self) -> usize {
        self.place.groups.len() - self.called
    }

    /// Nothing more comes from this device: whoever waits for it in a collective hears why, and
    /// what the others still give it is taken, so that nobody waits for ever.
    pub(crate) fn abandon(&mut self, failure: &Arc<Failure>) {
        while self.called < self.place.groups.len() {
            self.abandon_collective(failure);
        }
    }

    /// The same for the rounds that are left of one collective.
    pub(super) fn abandon_collective(&mut self, failure: &Arc<Failure>) {
        let group = &self.place.groups[self.called];
        for round in self.round..group.rounds.len() {
            let round = Round { op: self.op, index: self.called, round, group };
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
        Error::kernel(format!("the kernel's mesh {} has no axis {axis:?}", self.seats.mesh))
    }
}
