//! Compiles a kernel's CUDA code in the background from the moment it is bound to a mesh.

use crate::device::cuda::{CudaError, WarmUp};
use crate::exec::Runtime;
use crate::kernel::Kernel;
use mpmd_layout::topology::Mesh;

/// Pending compilations of a bound kernel, for each of this process's CUDA devices that run it.
#[derive(Default)]
pub(super) struct Warm(Vec<(usize, WarmUp)>);

impl Warm {
    /// Starts the compilation. Does not ask the kernel for its sources if none of this process's
    /// CUDA devices is in the mesh.
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

    /// Blocks until the kernel's code is ready on a device.
    ///
    /// # Errors
    ///
    /// If the code cannot be compiled. Every call then gets the same error.
    pub(super) fn wait(&self, local_index: usize) -> Result<(), CudaError> {
        let warm = self.0.iter().find(|(index, _)| *index == local_index);
        warm.map_or(Ok(()), |(_, warm)| warm.wait())
    }
}
