//! Compiles a kernel's CUDA code when it is bound to a mesh.

use crate::exec::Runtime;
use crate::kernel::UntypedKernel;
use mpmd_device::accelerator::DeviceError;
use mpmd_layout::topology::Mesh;

/// The compilations of a bound kernel's CUDA code, one for each accelerator of this process in the
/// mesh.
#[derive(Default)]
pub(super) struct Warm(Vec<Compilation>);

/// The compilation of a kernel's CUDA code for one device.
struct Compilation {
    local_index: usize,
    result: Result<(), DeviceError>,
}

impl Warm {
    /// Starts to compile the kernel's CUDA code for this process's accelerators in the mesh. Calls
    /// `Kernel::cuda` only if there are such devices.
    pub(super) fn start(kernel: &dyn UntypedKernel, mesh: &Mesh, runtime: &Runtime) -> Self {
        let devices = runtime.devices.iter().enumerate();
        let ours = devices.filter(|(_, device)| mesh.devices().contains(&device.id));
        let mut sources = None;
        let compiled = ours.filter_map(|(local_index, device)| {
            let accelerator = device.accelerator.as_ref()?;
            let sources = sources.get_or_insert_with(|| kernel.cuda());
            Some(Compilation {
                local_index,
                result: accelerator.prepare(&device.pool, sources),
            })
        });
        Self(compiled.collect())
    }

    /// Returns the result of the compilation for the device with this local index. Repeated calls
    /// return the same error.
    pub(super) fn result(&self, local_index: usize) -> Result<(), DeviceError> {
        let found = self.0.iter().find(|one| one.local_index == local_index);
        found.map_or(Ok(()), |one| one.result.clone())
    }
}
