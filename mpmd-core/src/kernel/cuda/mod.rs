//! The interface through which a kernel issues work to a CUDA device.
//!
//! A kernel that runs on a CUDA device gets views of that device's memory, which it cannot read.
//! From [`Context::cuda`](crate::kernel::Context::cuda) it gets a [`Cuda`]. With that it launches
//! functions of its [`Source`]s, multiplies matrices with cuBLAS ([`Gemm`]), copies, fills, and
//! allocates [`Scratch`].
//!
//! All these calls only issue work, which runs later in the order of issue. It runs after the work
//! that fills the inputs and before work that uses the outputs. A kernel never waits for the device
//! and returns as soon as it has issued its work. A later error of the device fails the kernel's
//! outputs.
//!
//! A kernel lists its sources in [`Kernel::cuda`](crate::kernel::Kernel::cuda). They are prepared
//! when it is bound to its mesh, and compiled only once in a process.

mod args;
mod foreign_stream;
mod gemm;
pub mod layers;
mod scratch;
mod staging;

use std::fmt;

pub use mpmd_device::cuda::source::{CUBLAS, Source};
pub use mpmd_device::cuda::work::{Grid, Math};
pub use mpmd_device::cuda::{CudaError, CudaVersion, NoCuda};
use mpmd_device::cuda::{Gpu, RawArg, RawStream};
use mpmd_memory::{DevicePlace, OutOfMemory};

pub use args::{Arg, CudaPart};
pub use foreign_stream::{DeviceRoom, ForeignHandle, ForeignStream};
pub use gemm::Gemm;
pub(crate) use scratch::CallMemory;
use scratch::DeviceCopy;
pub use scratch::Scratch;

use args::{ArgValue, PartMemory};

use crate::error::ViewError;
use crate::error::{Error, Result};
use mpmd_layout::aval::{DType, Element};

/// Returns the names of the GPUs that CUDA shows on this machine, in CUDA's order. The first call
/// in a process starts the driver, and may take seconds.
///
/// # Errors
///
/// If there is no driver, it does not work, or it shows no GPU.
pub fn gpu_names() -> Result<Vec<String>, NoCuda> {
    let driver = mpmd_device::cuda::found()?;
    Ok(driver.gpus.iter().map(|gpu| gpu.name.clone()).collect())
}

/// A CUDA device, for a kernel that runs on it. Calls issue work to the device, in order, and do
/// not wait for it.
///
/// ```
/// use mpmd_core::cuda::{Grid, Source};
/// use mpmd_core::prelude::*;
///
/// static SAXPY: Source = Source::cuda(
///     "saxpy.cu",
///     r#"
///     extern "C" __global__ void saxpy(unsigned long long n, float a, const float *x, float *y) {
///         unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
///         if (i < n) y[i] += a * x[i];
///     }
///     "#,
/// );
///
/// /// y += a x, in place.
/// struct Saxpy {
///     a: f32,
/// }
///
/// impl Kernel for Saxpy {
///     type In = (MpmdArray, MpmdArray);
///     type Out = MpmdArray;
///
///     fn infer(&self, (_, y): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
///         Ok(Signature::new(y.clone()).alias("1", ""))
///     }
///
///     fn run(
///         &self, cx: &mut Context<'_>, (x, _): (View<'_>, View<'_>), mut y: ViewMut<'_>,
///     ) -> Result<()> {
///         if let Some(cuda) = cx.cuda() {
///             let n = x.region().elements();
///             let args = [n.into(), self.a.into(), (&x).into(), (&mut y).into()];
///             return cuda.launch(&SAXPY, "saxpy", Grid::over(n), &args);
///         }
///         for (y, x) in y.as_mut_slice::<f32>()?.iter_mut().zip(x.as_slice::<f32>()?) {
///             *y += self.a * x;
///         }
///         Ok(())
///     }
///
///     fn cuda(&self) -> Vec<&'static Source> {
///         vec![&SAXPY]
///     }
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Cuda<'a> {
    gpu: &'a Gpu,
    stream: &'a RawStream,
    memory: &'a CallMemory,
}

impl<'a> Cuda<'a> {
    /// Creates the interface for one call. `stream` is the device's compute stream. The caller
    /// later [ends](CallMemory::end) `memory` with a fence behind the issued work.
    pub(crate) fn new(gpu: &'a Gpu, stream: &'a RawStream, memory: &'a CallMemory) -> Self {
        Self {
            gpu,
            stream,
            memory,
        }
    }

    /// Issues a launch of `function` of a source to the device, without waiting for it.
    ///
    /// The arguments must match the function's parameters in order: pointers for views and scratch,
    /// `unsigned long long` for `usize`. The function must access only memory within them; this is
    /// not checked.
    ///
    /// A source that no [`Kernel::cuda`](crate::kernel::Kernel::cuda) lists is compiled during this
    /// call. This takes time and logs a warning.
    ///
    /// # Errors
    ///
    /// If the source does not compile or has no such function, or the driver refuses the launch. If
    /// a part begins beyond its end. If the arguments do not fit the parameters, as far as the
    /// driver reports this. An error while the function runs fails the kernel's outputs instead.
    pub fn launch(
        &self,
        source: &'static Source,
        function: &str,
        grid: Grid,
        args: &[Arg<'_>],
    ) -> Result<()> {
        // This many arguments need no heap allocation.
        const FEW: usize = 16;
        let mut few = [RawArg::NONE; FEW];
        let mut many = Vec::new();

        let raw = if args.len() <= FEW {
            &mut few[..args.len()]
        } else {
            many.resize(args.len(), RawArg::NONE);
            &mut many[..]
        };

        for (raw, arg) in raw.iter_mut().zip(args) {
            *raw = match &arg.0 {
                ArgValue::Number(number) => RawArg::number(number.bytes, number.size),
                ArgValue::Part(part) => RawArg::memory(self.place(part)?, part.is_writable()),
            };
        }

        Ok(self.gpu.launch(self.stream, source, function, grid, raw)?)
    }

    /// Issues a matrix product with cuBLAS. As `gemm` says, sets `c` to the product of `a` and `b`,
    /// or adds the product to `c`.
    ///
    /// # Errors
    ///
    /// If sizes or dtypes do not fit, `c` is read-only, or cuBLAS is missing or fails. If this
    /// interface issues to another library's stream: see [`Cuda::on`].
    pub fn gemm<'x>(
        &self,
        gemm: Gemm,
        a: impl Into<CudaPart<'x>>,
        b: impl Into<CudaPart<'x>>,
        c: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let a = a.into();
        let b = b.into();
        let c = c.into();
        self.check_writable(&c, "a product")?;
        let elements = |part: &CudaPart<'_>| part.elements().ok_or_else(|| behind(part));
        let elements = [elements(&a)?, elements(&b)?, elements(&c)?];

        let Some(product) = gemm.product([a.dtype(), b.dtype(), c.dtype()], elements)? else {
            return Ok(());
        };

        let places = [self.place(&a)?, self.place(&b)?, self.place(&c)?];
        Ok(self
            .gpu
            .gemm(self.stream, self.memory.device_pool(), &product, places)?)
    }

    /// Issues work that sets every byte of `values` to zero, which is the zero of every dtype.
    ///
    /// # Errors
    ///
    /// If the values are read-only, or the driver refuses the work.
    pub fn zero<'x>(&self, values: impl Into<CudaPart<'x>>) -> Result<()> {
        let values = values.into();
        self.check_writable(&values, "zeros")?;
        let place = self.place(&values)?;
        Ok(self.stream.fill(place, &[0])?)
    }

    /// Issues work that sets every element of `values` to `value`.
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, the values are read-only, or the driver refuses
    /// the work.
    pub fn fill<'x, T: Element>(&self, values: impl Into<CudaPart<'x>>, value: T) -> Result<()> {
        let values = values.into();
        self.check_writable(&values, "values")?;
        if values.dtype() != T::DTYPE {
            return Err(ViewError::DType {
                asked: T::DTYPE,
                found: values.dtype(),
            }
            .into());
        }

        let place = self.place(&values)?;
        let bytes = bytemuck::bytes_of(&value);
        let is_one_byte = bytes.iter().all(|byte| *byte == bytes[0]);
        let element = if is_one_byte { &bytes[..1] } else { bytes };
        Ok(self.stream.fill(place, element)?)
    }

    /// Issues a copy of values from one view or scratch to another on the same device.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes differ, `to` is read-only, or the driver refuses the work.
    pub fn copy<'x, 'y>(
        &self,
        from: impl Into<CudaPart<'x>>,
        to: impl Into<CudaPart<'y>>,
    ) -> Result<()> {
        let from = from.into();
        let to = to.into();
        self.check_writable(&to, "a copy")?;

        if from.dtype() != to.dtype() {
            return Err(ViewError::DType {
                asked: to.dtype(),
                found: from.dtype(),
            }
            .into());
        }

        if from.elements() != to.elements() {
            let [from, to] = [&from, &to].map(|part| part.elements().unwrap_or(0));
            return Err(Error::kernel(format!(
                "{from} values are copied to a place of {to}"
            )));
        }

        let from = self.place(&from)?;
        let to = self.place(&to)?;
        Ok(self.stream.copy(from, to)?)
    }

    /// Allocates device memory for `elements` values, for this call only. The initial values are
    /// arbitrary. The memory comes from the device's pool and counts there, but is not reserved
    /// when the call is issued.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn scratch(&self, dtype: DType, elements: usize) -> Result<Scratch<'a>> {
        self.memory
            .scratch(self.gpu.spare(), dtype, elements)
            .map_err(out_of_memory)
    }

    /// Returns the device address of a part's first element, for CUDA libraries that the program
    /// calls itself. These must issue their work to [`Cuda::stream`]. Values on the host are copied
    /// to the device first.
    ///
    /// # Errors
    ///
    /// If the part begins beyond its end, or belongs to an input that is updated in place. If host
    /// values cannot be copied to the device.
    pub fn address<'x>(&self, values: impl Into<CudaPart<'x>>) -> Result<u64> {
        self.place(&values.into()).map(|place| place.address)
    }

    /// Returns the CUDA stream of this interface, for CUDA libraries that the program calls itself.
    /// The pointer is a `CUstream` or `cudaStream_t`. While the kernel runs, the device's primary
    /// context is current on the calling thread.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        self.stream.handle()
    }

    /// Returns the device's number of streaming multiprocessors, such as for grids that fill the
    /// device exactly.
    pub fn processors(&self) -> u32 {
        self.gpu.processors()
    }

    /// Returns the maximum bytes of shared memory of a block, dynamic and declared together.
    pub fn shared_bytes(&self) -> u32 {
        self.gpu.shared_bytes()
    }

    pub(crate) fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// Returns the raw CUDA stream to which all work is issued.
    pub(crate) fn issues_to(&self) -> &'a RawStream {
        self.stream
    }

    /// Returns the device address of a part. Host values are first copied to the device, once per
    /// call and stream.
    fn place(&self, part: &CudaPart<'_>) -> Result<DevicePlace> {
        let size = part.dtype().size();
        let bytes = part.elements().ok_or_else(|| behind(part))? * size;
        let skip = part.skipped() * size;

        let whole = match part.memory() {
            PartMemory::Device(place) => place,
            PartMemory::InPlace => return Err(ViewError::InPlace.into()),
            PartMemory::Host(values) => self.copy_of(values)?,
        };

        Ok(DevicePlace {
            address: whole.address + skip as u64,
            bytes,
            ..whole
        })
    }

    fn copy_of(&self, values: &[u8]) -> Result<DevicePlace> {
        let DeviceCopy { place, staged } = self
            .memory
            .copy_of(self.gpu.spare(), self.stream, values)
            .map_err(out_of_memory)?;

        if let Some(staged) = staged {
            self.stream.upload(&staged, place.address)?;
            self.memory.hold(staged);
        }
        Ok(place)
    }

    fn check_writable(&self, part: &CudaPart<'_>, values: &str) -> Result<()> {
        if part.is_writable() {
            return Ok(());
        }
        Err(Error::kernel(format!(
            "{values} cannot go to values that are only read"
        )))
    }
}

impl fmt::Debug for Cuda<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cuda")
    }
}

fn behind(part: &CudaPart<'_>) -> Error {
    Error::kernel(format!(
        "a part from element {} on begins behind the end of its values",
        part.skipped()
    ))
}

fn out_of_memory(error: OutOfMemory) -> Error {
    Error::kernel(format!("out of memory on {error}"))
}
