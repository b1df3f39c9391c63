//! What a kernel does on a CUDA device: it gives it work.
//!
//! A kernel that runs on a CUDA device gets views of that device's memory, which it cannot look
//! into, and [`Context::cuda`](crate::kernel::Context::cuda) gives it a [`Cuda`]: with that it
//! launches functions that were compiled from its [`Source`]s, has cuBLAS multiply matrices
//! ([`Gemm`]), copies, fills, and takes [`Scratch`]. All of it is only issued, at once, and runs
//! later in the order in which it was issued, after what makes the inputs and before what uses the
//! outputs. A kernel never waits for the device, and returns as soon as it has issued its work;
//! what fails later fails the kernel's outputs.
//!
//! Sources are compiled once on a machine, before they are used: a kernel announces them
//! ([`Kernel::cuda`](crate::kernel::Kernel::cuda)), and they are made ready from the moment it is
//! bound to its mesh. What was compiled is kept in the folder that `MPMD_CUDA_CACHE` names
//! (`$XDG_CACHE_HOME/mpmd/cuda` or `~/.cache/mpmd/cuda` unless it is set).

mod args;
mod gemm;
mod scratch;
mod staged;

use std::fmt;

use mpmd_transport::memory::{DevicePlace, OutOfMemory};

pub use args::{Arg, Part};
pub use gemm::Gemm;
pub(crate) use scratch::CallMemory;
pub use scratch::Scratch;

use args::{Memory, Value};

pub use crate::device::cuda::CudaError;
pub use crate::device::cuda::source::{CUBLAS, Source};
pub use crate::device::cuda::work::{Grid, Math};
use crate::device::cuda::{Gpu, RawArg, Stream};
use crate::error::ViewError;
use crate::error::{Error, Result};
use mpmd_layout::aval::{DType, Element};

/// A CUDA device, for a kernel that runs on it: everything is issued to the device, in order, and
/// nothing waits.
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
///     fn run(&self, cx: &mut Context<'_>, (x, _): (View<'_>, View<'_>), mut y: ViewMut<'_>) -> Result<()> {
///         if let Some(cuda) = cx.cuda() {
///             let n = x.region().elements();
///             return cuda.launch(&SAXPY, "saxpy", Grid::over(n), &[n.into(), self.a.into(), (&x).into(), (&mut y).into()]);
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
    stream: &'a Stream,
    memory: &'a CallMemory,
}

impl<'a> Cuda<'a> {
    /// For a call whose work is issued to `stream`, the device's compute line. The caller
    /// [ends](CallMemory::end) the memory with the fence behind that work.
    pub(crate) fn new(gpu: &'a Gpu, stream: &'a Stream, memory: &'a CallMemory) -> Self {
        Self { gpu, stream, memory }
    }

    /// Launches a function of a source.
    ///
    /// The arguments are the function's own, in order: pointers for views and scratch, `unsigned
    /// long long` for `usize`. What the function reads and writes must be within them, which nobody
    /// checks.
    ///
    /// A source that no [`Kernel::cuda`](crate::kernel::Kernel::cuda) has announced is compiled
    /// now, which takes its time, and is said in the log.
    ///
    /// # Errors
    ///
    /// Where the source does not compile or has no such function, arguments do not fit the function
    /// as far as the driver tells, a part begins behind its end, and where the driver refuses the
    /// launch. What goes wrong when the function runs fails the kernel's outputs.
    pub fn launch(
        &self,
        source: &'static Source,
        function: &str,
        grid: Grid,
        args: &[Arg<'_>],
    ) -> Result<()> {
        // As many as most functions have take no list of their own.
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
                Value::Number(number) => RawArg::number(number.bytes, number.size),
                Value::Part(part) => RawArg::memory(self.place(part)?, part.is_writable()),
            };
        }
        Ok(self.gpu.launch(self.stream, source, function, grid, raw)?)
    }

    /// Multiplies matrices, by cuBLAS: `c` gets, or is added, the product of `a` and `b`.
    ///
    /// # Errors
    ///
    /// Where sizes or dtypes do not fit, there is no cuBLAS, or it refuses.
    pub fn gemm<'x>(
        &self,
        gemm: Gemm,
        a: impl Into<Part<'x>>,
        b: impl Into<Part<'x>>,
        c: impl Into<Part<'x>>,
    ) -> Result<()> {
        let (a, b, c) = (a.into(), b.into(), c.into());
        self.check_writable(&c, "a product")?;
        let elements = |part: &Part<'_>| part.elements().ok_or_else(|| behind(part));
        let elements = [elements(&a)?, elements(&b)?, elements(&c)?];
        let Some(product) = gemm.product([a.dtype(), b.dtype(), c.dtype()], elements)? else {
            return Ok(());
        };
        let places = [self.place(&a)?, self.place(&b)?, self.place(&c)?];
        Ok(self.gpu.gemm(self.stream, self.memory.device_pool(), &product, places)?)
    }

    /// Sets every byte to zero, which is the zero of every type.
    ///
    /// # Errors
    ///
    /// Where it is an input, or the driver refuses.
    pub fn zero<'x>(&self, values: impl Into<Part<'x>>) -> Result<()> {
        let values = values.into();
        self.check_writable(&values, "zeros")?;
        let place = self.place(&values)?;
        Ok(self.stream.fill(place, [0; 4], 1)?)
    }

    /// Sets every element.
    ///
    /// # Errors
    ///
    /// Where the elements have another type, it is an input, or the driver refuses.
    pub fn fill<'x, T: Element>(&self, values: impl Into<Part<'x>>, value: T) -> Result<()> {
        let values = values.into();
        self.check_writable(&values, "values")?;
        if values.dtype() != T::DTYPE {
            return Err(ViewError::DType { asked: T::DTYPE, found: values.dtype() }.into());
        }
        let place = self.place(&values)?;
        let bytes = bytemuck::bytes_of(&value);
        if let [first, rest @ ..] = bytes
            && (bytes.len() <= 4 || rest.iter().all(|byte| byte == first))
        {
            let mut pattern = [*first; 4];
            let width = if bytes.len() <= 4 { bytes.len() } else { 1 };
            pattern[..width].copy_from_slice(&bytes[..width]);
            return Ok(self.stream.fill(place, pattern, width)?);
        }
        self.fill_wide(place, bytes)
    }

    /// Elements of more bytes than the driver sets at a time: some come from the host, then they
    /// are doubled.
    fn fill_wide(&self, place: DevicePlace, element: &[u8]) -> Result<()> {
        /// Bytes that come from the host at most.
        const FIRST: usize = 4096;
        let first = place.bytes.min(FIRST);
        if first == 0 {
            return Ok(());
        }
        let mut staged = self.memory.stage(first).map_err(out_of_memory)?;
        staged
            .chunks_mut(element.len())
            .for_each(|chunk| chunk.copy_from_slice(&element[..chunk.len()]));
        self.stream.upload(&staged, place.address)?;
        self.memory.hold(staged);
        let mut filled = first;
        while filled < place.bytes {
            let next = filled.min(place.bytes - filled);
            let to = DevicePlace { address: place.address + filled as u64, bytes: next, ..place };
            self.stream.copy(DevicePlace { bytes: next, ..place }, to)?;
            filled += next;
        }
        Ok(())
    }

    /// Copies values, from a view or scratch to another.
    ///
    /// # Errors
    ///
    /// Where they are not as many, or of another type, the target is an input, or the driver
    /// refuses.
    pub fn copy<'x, 'y>(&self, from: impl Into<Part<'x>>, to: impl Into<Part<'y>>) -> Result<()> {
        let (from, to) = (from.into(), to.into());
        self.check_writable(&to, "a copy")?;
        if from.dtype() != to.dtype() {
            return Err(ViewError::DType { asked: to.dtype(), found: from.dtype() }.into());
        }
        if from.elements() != to.elements() {
            let [from, to] = [&from, &to].map(|part| part.elements().unwrap_or(0));
            return Err(Error::kernel(format!("{from} values are copied to a place of {to}")));
        }
        let (from, to) = (self.place(&from)?, self.place(&to)?);
        Ok(self.stream.copy(from, to)?)
    }

    /// Memory of the device for `elements` values of this call; what it holds means nothing. It
    /// comes from the device's pool and counts with it, but is not set aside when the call is
    /// issued.
    ///
    /// # Errors
    ///
    /// Where the device has no more.
    pub fn scratch(&self, dtype: DType, elements: usize) -> Result<Scratch<'a>> {
        self.memory.scratch(self.gpu.spare(), dtype, elements).map_err(out_of_memory)
    }

    /// The device's address of a part's first element, for libraries of the program's own. What
    /// they are given must be issued to [`Cuda::stream`].
    ///
    /// # Errors
    ///
    /// As [`Cuda::launch`], of the part.
    pub fn address<'x>(&self, values: impl Into<Part<'x>>) -> Result<u64> {
        self.place(&values.into()).map(|place| place.address)
    }

    /// The stream that everything is issued to, a `CUstream` or `cudaStream_t`, for libraries of
    /// the program's own. The device's context, its primary one, is the calling thread's current
    /// one as long as the kernel runs.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        self.stream.handle()
    }

    /// How many multiprocessors the device has, for grids that fill it just so.
    pub fn processors(&self) -> u32 {
        self.gpu.processors()
    }

    /// The device.
    pub(crate) fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// The stream that everything is issued to.
    pub(crate) fn issues_to(&self) -> &'a Stream {
        self.stream
    }

    /// Where a part is on the device. Values of the host's are copied there first, once for a call.
    fn place(&self, part: &Part<'_>) -> Result<DevicePlace> {
        let size = part.dtype().size();
        let bytes = part.elements().ok_or_else(|| behind(part))? * size;
        let skip = part.skipped() * size;
        let whole = match part.memory() {
            Memory::Device(place) => place,
            Memory::InPlace => return Err(ViewError::InPlace.into()),
            Memory::Host(values) => self.copy_of(values)?,
        };
        Ok(DevicePlace { address: whole.address + skip as u64, bytes, ..whole })
    }

    fn copy_of(&self, values: &[u8]) -> Result<DevicePlace> {
        let (place, staged) =
            self.memory.copy_of(self.gpu.spare(), values).map_err(out_of_memory)?;
        if let Some(staged) = staged {
            self.stream.upload(&staged, place.address)?;
            self.memory.hold(staged);
        }
        Ok(place)
    }

    fn check_writable(&self, part: &Part<'_>, what: &str) -> Result<()> {
        if part.is_writable() {
            return Ok(());
        }
        Err(Error::kernel(format!("{what} cannot go to values that are only read")))
    }
}

impl fmt::Debug for Cuda<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cuda")
    }
}

fn behind(part: &Part<'_>) -> Error {
    Error::kernel(format!(
        "a part from element {} on begins behind the end of its values",
        part.skipped()
    ))
}

fn out_of_memory(error: OutOfMemory) -> Error {
    Error::kernel(format!("out of memory on {error}"))
}
