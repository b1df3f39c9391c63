//! What a running kernel knows of its place, and how it talks to the other devices of its mesh.

use std::borrow::Cow;

use super::signature::{Collective, CollectiveKind};
use crate::aval::Element;
use crate::error::{Error, Result};
use crate::runtime::Exchange;
use crate::topology::{DeviceId, Mesh};

/// One device's seat in a kernel's mesh. Made once for each call shape.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) device: DeviceId,
    /// Coordinates along the mesh's axes.
    pub(crate) position: Vec<usize>,
    /// For each declared collective: the devices it spans, in order.
    pub(crate) groups: Vec<Vec<DeviceId>>,
}

/// Where a kernel runs and what it declared. Shared by the devices of one call shape.
#[derive(Debug)]
pub(crate) struct Seats {
    pub(crate) mesh: Mesh,
    pub(crate) collectives: Vec<Collective>,
}

/// A running kernel's surroundings: its position in the mesh, and the collectives it declared.
pub struct Context<'a> {
    seats: &'a Seats,
    place: &'a Place,
    exchange: Exchange,
    op: u64,
    /// How many of the declared collectives were called.
    called: usize,
}

impl<'a> Context<'a> {
    pub(crate) fn new(seats: &'a Seats, place: &'a Place, exchange: Exchange, op: u64) -> Self {
        Self { seats, place, exchange, op, called: 0 }
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

    /// Sums `values` over the devices along `axis`; each gets the sum.
    ///
    /// Blocks until every device of the group has called it, or one of them has failed. The sums are
    /// formed in the order of the devices, so that every device, and every run, gets the same bits.
    ///
    /// # Errors
    ///
    /// Where the signature does not declare this call, in this place; where a device of the group
    /// failed or its process is gone.
    pub fn all_reduce<T>(&mut self, axis: &str, values: &mut [T]) -> Result<()>
    where
        T: Element + bytemuck::NoUninit + bytemuck::AnyBitPattern + std::ops::Add<Output = T>,
    {
        let index = self.next_collective(CollectiveKind::AllReduce, axis, T::DTYPE, values.len())?;
        let group = &self.place.groups[index];
        if group.len() == 1 {
            return Ok(());
        }
        let mine = self.exchange.copy_in(bytemuck::cast_slice(values)).map_err(|failure| {
            // Nothing was given to the others: they must hear that nothing will be.
            self.called = index;
            Error::failed(failure)
        })?;
        self.exchange.post(self.op, index, self.place.device, group, &mine);
        let parts =
            self.exchange.collect(self.op, index, self.place.device, group, &mine).map_err(Error::failed)?;
        // In the order of the devices, so that the sums are the same bits everywhere.
        for (i, part) in parts.iter().enumerate() {
            // What a peer sent may have come in a buffer without alignment.
            let part: Cow<'_, [T]> = match bytemuck::try_cast_slice(&part[..]) {
                Ok(part) => Cow::Borrowed(part),
                Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(&part[..])),
            };
            match i {
                0 => values.copy_from_slice(&part),
                _ => values.iter_mut().zip(&*part).for_each(|(sum, part)| *sum = *sum + *part),
            }
        }
        Ok(())
    }

    /// Checks the next collective call against its declaration and returns its index.
    fn next_collective(
        &mut self,
        kind: CollectiveKind,
        axis: &str,
        dtype: crate::aval::DType,
        elements: usize,
    ) -> Result<usize> {
        let index = self.called;
        let called = || format!("{kind:?} of {elements} {dtype} elements over {axis:?}");
        let Some(declared) = self.seats.collectives.get(index) else {
            return Err(Error::kernel(format!(
                "the kernel calls {}, but its signature declares only {index} collectives",
                called()
            )));
        };
        let fits = declared.kind == kind
            && declared.axis == axis
            && declared.aval.dtype() == dtype
            && elements <= declared.aval.elements();
        if !fits {
            return Err(Error::kernel(format!(
                "the kernel calls {} where its signature declares {declared} (collective {index})",
                called()
            )));
        }
        self.called += 1;
        Ok(index)
    }

    pub(crate) fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// The declared collectives that were not called, by index.
    pub(crate) fn not_called(&self) -> std::ops::Range<usize> {
        self.called..self.seats.collectives.len()
    }

    fn no_axis(&self, axis: &str) -> Error {
        Error::kernel(format!("the kernel's mesh {} has no axis {axis:?}", self.seats.mesh))
    }
}
