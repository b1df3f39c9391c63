//! Stand-ins for the CUDA back end in programs built without the feature `cuda`. Their types cannot
//! be constructed, and opening a device is an error.

#![allow(missing_docs, reason = "documented at the functions that they stand in for")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::Instant;
use mpmd_proto::Failure;
use mpmd_transport::memory::{
    DeviceAllocator, DevicePlace, DeviceSharing, Fence, Fences, Pin, Pool,
};
use mpmd_transport::{OwnedBuffer, SharedBuffer};

use super::asked::{CommunicatorId, FirstUses, Joint, NotJoined, Product, RawArg};
use super::{CudaError, Ended, Part, Then};
use crate::cuda::{source::Source, spare::Spare, work::Grid};
use mpmd_layout::topology::DeviceId;

const NOT_BUILT: &str = "this program was built without the feature `cuda`";

/// A CUDA device. Cannot be constructed in this build.
pub enum Gpu {}

/// A CUDA stream and its waiter thread. Cannot be constructed in this build.
pub enum Stream {}

/// A raw CUDA stream. Cannot be constructed in this build.
pub enum RawStream {}

/// Exclusive access to a stream for issuing work. Cannot be constructed in this build.
pub struct StreamTurn<'a>(Never, PhantomData<&'a ()>);

/// A handle to the end of issued work. Cannot be constructed in this build.
pub struct Ending(Never);

/// A process's NCCL communicators. Always empty in this build.
#[derive(Default)]
pub struct Communicators(());

/// One rank of an NCCL communicator. Cannot be constructed in this build.
pub enum Communicator {}

enum Never {}

/// Stands in for the measurement of a device's first uses.
///
/// # Errors
///
/// Always: this program was built without the feature `cuda`.
pub fn first_uses(_: u32) -> Result<FirstUses, CudaError> {
    Err(CudaError::new("opening a CUDA device", "", NOT_BUILT))
}

pub fn reach_each_other(_: &[Arc<Gpu>]) {}

impl Gpu {
    pub fn open(_: u32) -> Result<Arc<Self>, CudaError> {
        Err(CudaError::new("opening a CUDA device", "", NOT_BUILT))
    }

    pub fn ordinal(&self) -> u32 {
        match *self {}
    }

    pub fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        match **self {}
    }

    pub fn pin(self: &Arc<Self>) -> Pin {
        match **self {}
    }

    pub fn keep_time(&self, _: Box<dyn Fn() -> u64 + Send + Sync>) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn compute(&self) -> &Stream {
        match *self {}
    }

    pub fn inward(&self) -> &Stream {
        match *self {}
    }

    pub fn outward(&self) -> &Stream {
        match *self {}
    }

    pub fn spare(&self) -> &Spare {
        match *self {}
    }

    pub fn processors(&self) -> u32 {
        match *self {}
    }

    pub fn prepare(self: &Arc<Self>, _: &Pool, _: &[&'static Source]) -> Result<(), CudaError> {
        match **self {}
    }

    pub fn launch(
        &self,
        _: &RawStream,
        _: &'static Source,
        _: &str,
        _: Grid,
        _: &[RawArg],
    ) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn gemm(
        &self,
        _: &RawStream,
        _: &Pool,
        _: &Product,
        _: [DevicePlace; 3],
    ) -> Result<(), CudaError> {
        match *self {}
    }
}

impl RawStream {
    pub fn handle(&self) -> *mut c_void {
        match *self {}
    }

    pub fn fill(&self, _: DevicePlace, _: [u8; 4], _: usize) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn copy(&self, _: DevicePlace, _: DevicePlace) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn download(&self, _: DevicePlace, _: &mut [u8]) -> Result<(), CudaError> {
        match *self {}
    }

    pub fn upload(&self, _: &[u8], _: u64) -> Result<(), CudaError> {
        match *self {}
    }
}

/// Returns `None`: this build has no device memory to share.
pub fn sharing(_: Vec<Arc<Gpu>>) -> Option<Arc<dyn DeviceSharing>> {
    None
}

impl Stream {
    pub fn submit(
        &self,
        _: &[&Fences],
        _: impl FnOnce(&RawStream) -> Result<(), CudaError>,
        _: Then,
    ) -> Arc<dyn Fence> {
        match *self {}
    }

    pub fn copy_in(&self, _: &SharedBuffer, _: &mut OwnedBuffer, _: Part<'_>, _: Then) {
        match *self {}
    }

    pub fn copy_out(
        &self,
        _: &SharedBuffer,
        _: OwnedBuffer,
        _: Part<'_>,
        _: impl FnOnce(Result<OwnedBuffer, CudaError>) + Send + 'static,
    ) {
        match *self {}
    }

    pub fn zero(&self, _: &mut OwnedBuffer, _: Then) {
        match *self {}
    }
}

impl Stream {
    pub fn turn(&self) -> StreamTurn<'_> {
        match *self {}
    }

    pub fn has_issued_all(&self, _: &Fences) -> bool {
        match *self {}
    }
}

impl<'a> StreamTurn<'a> {
    pub fn come_after(&self, _: &Fences) -> Result<(), CudaError> {
        match self.0 {}
    }

    pub fn begin(&mut self) -> Result<&'a RawStream, CudaError> {
        match self.0 {}
    }

    pub fn wait(&mut self) -> Result<(), CudaError> {
        match self.0 {}
    }

    pub fn pause<R>(&mut self, _: impl FnOnce() -> R) -> R {
        match self.0 {}
    }

    pub fn end(self, _: Result<(), CudaError>) -> Ending {
        match self.0 {}
    }
}

impl Ending {
    pub fn fence(&self) -> Arc<dyn Fence> {
        match self.0 {}
    }

    pub fn then(self, _: Box<dyn FnOnce(Ended) + Send>) {
        match self.0 {}
    }
}

/// Fails: this build has no NCCL.
pub fn new_id() -> Result<CommunicatorId, CudaError> {
    Err(CudaError::new("creating an NCCL group id", "", NOT_BUILT))
}

impl Communicators {
    pub fn find(&self, _: &[DeviceId], _: usize) -> Result<Option<Arc<Communicator>>, NotJoined> {
        Ok(None)
    }

    pub fn open(
        &self,
        gpu: &Gpu,
        _: (&[DeviceId], usize),
        _: &CommunicatorId,
        _: Instant,
    ) -> Result<Arc<Communicator>, NotJoined> {
        match *gpu {}
    }

    pub fn give_up(&self, _: &Arc<Failure>) {}

    pub fn look(&self) -> Option<CudaError> {
        None
    }

    pub fn are_to_be_watched(&self) -> bool {
        false
    }

    pub fn close(&self, _: Duration) {}
}

impl Communicator {
    pub fn given_up(&self) -> Option<&Arc<Failure>> {
        match *self {}
    }

    pub fn issue(&self, _: &RawStream, _: &Joint<'_>) -> Result<(), NotJoined> {
        match *self {}
    }

    pub fn until_done(&self, _: &str, _: Instant) -> Result<(), NotJoined> {
        match *self {}
    }
}
