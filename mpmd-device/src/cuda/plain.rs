//! Launches and copies through `cudarc` alone, without the framework: one stream, one thread, no
//! events.
//!
//! Benchmarks use these as the baseline for the framework's times. Nothing else uses them.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PinnedHostSlice,
    PushKernelArg,
};
use mpmd_ids::block::{now, since};

use super::error::CudaError;
use super::gpu::cuda;
use super::{found, nvrtc};

/// A kernel that does next to nothing, with the fewest arguments that a framework kernel has.
const SOURCE: &str = r#"
extern "C" __global__ void nothing(const float *x, float *y) {
    if (threadIdx.x == 0) y[0] = x[0];
}
"#;

/// Launches per sample, followed by a synchronisation. Fewer than the driver can queue, or later
/// launches would wait for earlier ones.
const LAUNCHES: usize = 500;

/// The number of bytes that the copies of one sample have together, within their limits in number.
/// Large, so that reading the clock costs next to nothing.
const SAMPLE_BYTES: usize = 1 << 30;

/// The largest number of copies in one sample. The smallest is 1.
const MOST_COPIES: usize = 1000;

/// A graphics processor, used directly through `cudarc`.
pub struct Plain {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Within the device's memory.
    OnDevice,
    /// From pinned memory of the host.
    In,
    /// To pinned memory of the host.
    Out,
}

impl Plain {
    /// Opens the graphics processor with this driver ordinal.
    ///
    /// # Errors
    ///
    /// If there is no driver or no such processor, or it cannot be used.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        found().map_err(|error| CudaError::new("using CUDA directly", "", error.to_string()))?;
        let context =
            CudaContext::new(ordinal as usize).map_err(said("opening a CUDA device directly"))?;
        // SAFETY: everything is used in one stream, which runs its work in order.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(said("making a CUDA stream directly"))?;
        Ok(Self { context, stream })
    }

    /// Measures the time to issue one launch of a nearly empty kernel, as the mean over 500
    /// launches. Returns `repeats` such means. Blocks until the device has finished.
    ///
    /// # Errors
    ///
    /// If NVRTC is missing, or the device fails.
    pub fn launches(&self, repeats: usize) -> Result<Vec<Duration>, CudaError> {
        let kernel = self.kernel()?;
        let doing = "launching directly";
        let x: CudaSlice<f32> = self.stream.alloc_zeros(1).map_err(said(doing))?;
        let mut y: CudaSlice<f32> = self.stream.alloc_zeros(1).map_err(said(doing))?;
        let shape =
            LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
        let mut times = Vec::with_capacity(repeats);
        // The first repeat loads the kernel and is not counted.
        for repeat in 0..=repeats {
            let start = now();
            for _ in 0..LAUNCHES {
                let mut launch = self.stream.launch_builder(&kernel);
                launch.arg(&x).arg(&mut y);
                // SAFETY: the kernel takes these two arrays of an element each, and touches no
                // other memory.
                unsafe { launch.launch(shape) }.map_err(said(doing))?;
            }
            let took = since(start) / LAUNCHES as u32;
            self.stream.synchronize().map_err(said(doing))?;
            if repeat > 0 {
                times.push(took);
            }
        }
        Ok(times)
    }

    /// Measures the time of one copy of `bytes` bytes while nothing else runs, as the mean over 1
    /// to 1000 copies. Returns `repeats` such means. Blocks until the device has finished.
    ///
    /// # Errors
    ///
    /// If there is too little memory, or the device fails.
    pub fn copies(
        &self,
        way: Way,
        bytes: usize,
        repeats: usize,
    ) -> Result<Vec<Duration>, CudaError> {
        let doing = "copying directly";
        let alloc = || self.stream.alloc_zeros::<u8>(bytes).map_err(said(doing));
        let (mut one, other) = (alloc()?, if way == Way::OnDevice { Some(alloc()?) } else { None });
        let mut host = if way == Way::OnDevice { None } else { Some(self.pinned(bytes)?) };
        let rounds = (SAMPLE_BYTES / bytes.max(1)).clamp(1, MOST_COPIES);
        let mut times = Vec::with_capacity(repeats);
        for repeat in 0..=repeats {
            self.stream.synchronize().map_err(said(doing))?;
            let start = now();
            for _ in 0..rounds {
                match (&other, &mut host, way) {
                    (Some(other), ..) => self.stream.memcpy_dtod(other, &mut one),
                    (None, Some(host), Way::In) => self.stream.memcpy_htod(&*host, &mut one),
                    (None, Some(host), _) => self.stream.memcpy_dtoh(&one, host),
                    (None, None, _) => Ok(()),
                }
                .map_err(said(doing))?;
            }
            self.stream.synchronize().map_err(said(doing))?;
            if repeat > 0 {
                times.push(since(start) / rounds as u32);
            }
        }
        Ok(times)
    }

    fn kernel(&self) -> Result<CudaFunction, CudaError> {
        let doing = "compiling a kernel directly";
        nvrtc().map_err(|error| CudaError::new(doing, "", error.to_string()))?;
        let ptx = cudarc::nvrtc::compile_ptx(SOURCE);
        let ptx = ptx.map_err(|error| CudaError::new(doing, "", format!("{error:?}")))?;
        let module = self.context.load_module(ptx).map_err(said(doing))?;
        module.load_function("nothing").map_err(said(doing))
    }

    /// Allocates pinned host memory. Not write-combined, so the processor reads it at full speed.
    fn pinned(&self, bytes: usize) -> Result<PinnedHostSlice<u8>, CudaError> {
        // SAFETY: the contents are only copied, and every byte pattern is a valid `u8`.
        unsafe { self.context.alloc_pinned_with_flags(bytes, 0) }
            .map_err(said("pinning memory directly"))
    }
}

fn said(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| cuda(doing, error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_measures_times_or_reports_no_driver() {
        let plain = match Plain::open(0) {
            Ok(plain) => plain,
            Err(error) => {
                println!("skipped: {error}");
                assert!(found().is_err() && error.to_string().contains("CUDA driver"), "{error}");
                return;
            }
        };
        for way in [Way::OnDevice, Way::In, Way::Out] {
            let times = plain.copies(way, 1 << 20, 2).unwrap();
            assert!(
                times.len() == 2 && times.iter().all(|time| *time > Duration::ZERO),
                "{way:?}: {times:?}"
            );
        }
        if nvrtc().is_ok() {
            assert_eq!(plain.launches(3).unwrap().len(), 3);
        }
    }
}
