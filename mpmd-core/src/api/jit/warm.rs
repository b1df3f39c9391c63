//! Compiles a kernel's CUDA code in the background from the moment it is bound to a mesh.

use crate::exec::Runtime;
use crate::kernel::Kernel;
use mpmd_device::cuda::{CudaError, WarmUp};
use mpmd_layout::topology::Mesh;

/// Pending compilations of a bound kernel: (local device index, compilation), for each of this
/// process's CUDA devices in the mesh.
#[derive(Default)]
pub(super) struct Warm(Vec<(usize, WarmUp)>);

impl Warm {
    /// Starts to compile the kernel's CUDA code for this process's CUDA devices in the mesh, in the
    /// background. Asks the kernel for its sources only if there is such a device.
    pub(super) fn start<K: Kernel>(kernel: &K, mesh: &Mesh, runtime: &Runtime) -> Self {
        let ours = runtime
            .devices
            .iter()
            .enumerate()
            .filter(|(_, device)| mesh.devices().contains(&device.id));
        let mut sources = None;
        let mut warm = |(index, device): (usize, &crate::exec::LocalDevice)| {
            let gpu = device.gpu.as_ref()?;
            let sources = sources.get_or_insert_with(|| kernel.cuda()).clone();
            (!sources.is_empty()).then(|| (index, gpu.warm_up(&device.pool, sources)))
        };
        Self(ours.filter_map(&mut warm).collect())
    }

    /// Blocks until the kernel's code is ready on the device with this local index. Returns at once
    /// if nothing is compiled for the device.
    ///
    /// # Errors
    ///
    /// If the code cannot be compiled. Every call then gets the same error.
    pub(super) fn wait(&self, local_index: usize) -> Result<(), CudaError> {
        let warm = self.0.iter().find(|(index, _)| *index == local_index);
        warm.map_or(Ok(()), |(_, warm)| warm.wait())
    }
}
