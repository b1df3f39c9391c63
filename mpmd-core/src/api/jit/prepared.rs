//! The output buffers and jobs of a call before they are queued, in lists that the next call
//! reuses.

use crate::exec::array::MpmdArray;
use crate::exec::{AsyncBuffers, Job, Runtime};
use mpmd_layout::topology::DeviceId;

/// Empty lists that are kept, so that the next call reuses their memory.
#[derive(Default)]
pub(super) struct CallLists {
    pub(super) leaves: Vec<&'static MpmdArray>,
    pub(super) prepared: PreparedCalls,
}

/// The output buffers and the jobs of a call on this process's devices in the mesh.
#[derive(Default)]
pub(super) struct PreparedCalls {
    pub(super) slots: Vec<DeviceSlots>,
    pub(super) calls: Vec<QueuedCall>,
}

/// The async buffers of all outputs' shards on one device.
pub(super) struct DeviceSlots {
    pub(super) device: DeviceId,
    pub(super) buffers: AsyncBuffers,
}

/// The job that runs a call on the device with index `local_index`.
pub(super) struct QueuedCall {
    pub(super) local_index: usize,
    pub(super) job: Job,
}

impl PreparedCalls {
    /// Queues the jobs on their devices, and empties the lists without freeing their memory. Must
    /// come last in a call: device threads then write to cache lines that this thread has just
    /// written.
    pub(super) fn start(&mut self, runtime: &Runtime) {
        for QueuedCall { local_index, job } in self.calls.drain(..) {
            runtime.run_on(local_index, job);
        }
        self.slots.clear();
    }
}
