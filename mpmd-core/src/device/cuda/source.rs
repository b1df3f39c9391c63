//! Sources of kernels: what a program compiles for its CUDA devices.

use std::fmt;

/// A text that functions for CUDA devices are compiled from, or what stands for a library of
/// NVIDIA's.
///
/// A program has each of its sources once, as a `static`; it is told from others by its place, so
/// that a launch finds its function without a look at the text.
///
/// ```
/// use mpmd_core::cuda::Source;
///
/// static SCALE: Source = Source::cuda(
///     "scale.cu",
///     r#"
///     extern "C" __global__ void scale(float *y, float factor, unsigned long long n) {
///         for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
///             y[i] *= factor;
///     }
///     "#,
/// );
/// assert_eq!(SCALE.name(), "scale.cu");
/// ```
pub struct Source {
    name: &'static str,
    text: &'static str,
    pub(crate) kind: Kind,
}

/// What a source is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// CUDA C, for NVRTC. Where it is exact, no product is fused with a sum.
    Cuda { exact: bool },
    /// For the driver as it is.
    Ptx,
    /// No text: cuBLAS's handle and workspace.
    Cublas,
}

/// What a kernel that calls [`Cuda::gemm`](super::Cuda::gemm) announces: cuBLAS is made ready then
/// with its sources.
pub static CUBLAS: Source = Source { name: "cuBLAS", text: "", kind: Kind::Cublas };

impl Source {
    /// A text in CUDA C; `name` is what messages say.
    ///
    /// It is compiled for each device's own architecture, without fast approximations. Functions
    /// that are launched are `extern "C" __global__`. There are no headers but those that NVRTC
    /// brings along, and those of the CUDA toolkit where `CUDA_HOME` or `CUDA_PATH` says where it
    /// is.
    pub const fn cuda(name: &'static str, text: &'static str) -> Self {
        Self { name, text, kind: Kind::Cuda { exact: false } }
    }

    /// A text in PTX, which the driver takes as it is.
    pub const fn ptx(name: &'static str, text: &'static str) -> Self {
        Self { name, text, kind: Kind::Ptx }
    }

    /// The same with each product and each sum rounded by itself, as the host's processors do it:
    /// nothing is fused (`--fmad=false`). No more than [`Source::cuda`] for other sources.
    #[must_use]
    pub const fn exact(self) -> Self {
        let kind = match self.kind {
            Kind::Cuda { .. } => Kind::Cuda { exact: true },
            other => other,
        };
        Self { kind, ..self }
    }

    /// Its name in messages.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// What is compiled.
    pub const fn text(&self) -> &'static str {
        self.text
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({}, {:?}, {} bytes)", self.name, self.kind, self.text.len())
    }
}
