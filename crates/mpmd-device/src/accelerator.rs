//! The one face of devices with memory of their own, such as graphics processors.
//!
//! Execution opens and uses them by this module and knows no kind of them. A kind is a folder
//! beside `cuda/`, a [`DeviceKind`], and the places below that name it. The work that kernels issue
//! is the kind's own: see `kernel/cuda/` in `mpmd-core`.

use std::sync::Arc;

use mpmd_layout::aval::DType;
use mpmd_layout::topology::DeviceKind;
use mpmd_memory::OwnedBuffer;
use mpmd_memory::{Fence, Pool};

use crate::cuda::kernels::ADD;
use crate::cuda::work::Grid;
// invariant: one-face
pub use crate::cuda::{
    Communicators, CudaError as DeviceError, Gpu as Accelerator, RegionCopy, reach_each_other,
    sharing,
};
use crate::cuda::{RawArg, Then};

/// Opens the next device of `kind`: takes the driver's number of the device from `ordinals`.
/// Returns `None` for a kind without memory of its own.
///
/// # Errors
///
/// If `ordinals` has no further number, or the driver cannot use the device.
pub fn open(
    kind: DeviceKind,
    mut ordinals: impl Iterator<Item = u32>,
) -> Result<Option<Arc<Accelerator>>, DeviceError> {
    match kind {
        DeviceKind::Cpu => Ok(None),
        DeviceKind::Cuda => {
            let ordinal = ordinals.next().ok_or_else(|| {
                DeviceError::new(
                    "opening a CUDA device",
                    "",
                    "no ordinal is configured for it",
                )
            })?;
            Accelerator::open(ordinal).map(Some)
        }
    }
}

/// The function by which a device adds partial sums of one dtype.
#[derive(Clone, Copy, Debug)]
pub struct Addition {
    function: &'static str,
    /// Number of real numbers per element: two for complex types, else one.
    numbers: usize,
}

impl Addition {
    /// Returns the addition for elements of a dtype, or `None` if devices cannot add them.
    pub fn of(dtype: DType) -> Option<Self> {
        let (function, numbers) = match dtype {
            DType::F32 => ("add_f32", 1),
            DType::C64 => ("add_f32", 2),
            DType::F64 => ("add_f64", 1),
            DType::C128 => ("add_f64", 2),
            DType::F16 => ("add_f16", 1),
            DType::Bf16 => ("add_bf16", 1),
            _ => return None,
        };
        Some(Self { function, numbers })
    }

    /// Compiles and loads the additions of all dtypes for a device. `pool` is the pool of the
    /// device's memory.
    ///
    /// # Errors
    ///
    /// If the additions cannot be compiled or loaded.
    pub fn prepare(device: &Arc<Accelerator>, pool: &Pool) -> Result<(), DeviceError> {
        device.prepare(pool, &[&ADD])
    }

    /// Issues `sum += more` for two buffers of `elements` elements in the device's memory. Returns
    /// a fence at the end of the work, and passes the result to `then`. Returns `None` if a buffer
    /// is in host memory.
    pub fn issue(
        self,
        device: &Accelerator,
        elements: usize,
        [sum, more]: [&OwnedBuffer; 2],
        then: Then,
    ) -> Option<Arc<dyn Fence>> {
        let to = sum.device()?;
        let from = more.device()?;
        let count = elements * self.numbers;

        let args = [
            RawArg::number((count as u64).to_ne_bytes(), 8),
            RawArg::memory(to, true),
            RawArg::memory(from, false),
        ];

        Some(device.inward().submit(
            &[sum.fences(), more.fences()],
            |stream| device.launch(stream, &ADD, self.function, Grid::over(count), &args),
            then,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_add_all_floats_and_complex_numbers() {
        let added = DType::ALL
            .into_iter()
            .filter_map(|dtype| Some((dtype, Addition::of(dtype)?)));
        let names = added.map(|(dtype, Addition { function, numbers })| {
            let bits = 8 * dtype.size() / numbers;
            assert!(
                function.ends_with(&format!("f{bits}")),
                "{dtype}: {function}"
            );
            dtype.name()
        });
        let names: Vec<_> = names.collect();
        assert_eq!(names, ["bf16", "f16", "f32", "f64", "c64", "c128"]);
    }
}
