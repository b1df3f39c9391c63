//! Sources that a program compiles for its CUDA devices.

use std::fmt;

/// The source text of functions for CUDA devices, or a placeholder for an NVIDIA library.
///
/// Declare each source once, as a `static`. Its address identifies it, so that a launch finds its
/// function without comparing texts.
///
/// ```
/// use mpmd_device::cuda::source::Source;
///
/// static SCALE: Source = Source::cuda(
///     "scale.cu",
///     r#"
///     extern "C" __global__ void scale(float *y, float factor, unsigned long long n) {
///         unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x;
///         for (; i < n; i += gridDim.x * blockDim.x) y[i] *= factor;
///     }
///     "#,
/// );
/// assert_eq!(SCALE.name(), "scale.cu");
/// ```
pub struct Source {
    name: &'static str,
    text: &'static str,
    /// The language of the text.
    pub(crate) kind: SourceKind,
    smaller: Option<Smaller>,
}

/// The source of functions with less shared memory, for devices that do not have enough for
/// another source.
#[derive(Clone, Copy)]
struct Smaller {
    /// Bytes of shared memory of a block from which on a device does not need it.
    below: u32,
    source: &'static Source,
}

/// The kind of a source.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SourceKind {
    /// CUDA C for NVRTC.
    Cuda {
        /// True if each product and sum is rounded by itself.
        exact: bool,
    },
    /// PTX, which the driver compiles.
    Ptx,
    /// A placeholder without text: cuBLAS's handle and workspace.
    Cublas,
}

/// The source to list in `Kernel::cuda` by a kernel that calls `Cuda::gemm`. cuBLAS is then
/// initialised before the kernel runs.
pub static CUBLAS: Source = Source {
    name: "cuBLAS",
    text: "",
    kind: SourceKind::Cublas,
    smaller: None,
};

impl Source {
    /// Returns a source in CUDA C; `name` appears in messages.
    ///
    /// NVRTC compiles it for each device's own architecture, without fast approximations. Declare
    /// functions to launch as `extern "C" __global__`. NVRTC's own headers are available. Those of
    /// the CUDA toolkit are available too, if `CUDA_HOME` or `CUDA_PATH` names the toolkit.
    pub const fn cuda(name: &'static str, text: &'static str) -> Self {
        Self {
            name,
            text,
            kind: SourceKind::Cuda { exact: false },
            smaller: None,
        }
    }

    /// Returns a source in PTX, which goes to the driver unchanged; `name` appears in messages.
    pub const fn ptx(name: &'static str, text: &'static str) -> Self {
        Self {
            name,
            text,
            kind: SourceKind::Ptx,
            smaller: None,
        }
    }

    /// Returns the source with another one beside it, which is prepared with it on devices whose
    /// blocks have less than `below` bytes of shared memory. The code that launches the functions
    /// chooses between the two by `Cuda::shared_bytes`.
    #[must_use]
    pub const fn or_below(self, below: u32, source: &'static Self) -> Self {
        Self {
            smaller: Some(Smaller { below, source }),
            ..self
        }
    }

    /// Returns the source to prepare with this one on a device whose blocks have `bytes` bytes of
    /// shared memory.
    pub(crate) fn smaller_for(&self, bytes: u32) -> Option<&'static Self> {
        self.smaller
            .filter(|smaller| bytes < smaller.below)
            .map(|smaller| smaller.source)
    }

    /// Returns the source with each product and each sum rounded separately, as on the host:
    /// nothing is fused (`--fmad=false`). Changes only sources in CUDA C.
    #[must_use]
    pub const fn exact(self) -> Self {
        let kind = match self.kind {
            SourceKind::Cuda { .. } => SourceKind::Cuda { exact: true },
            other => other,
        };
        Self { kind, ..self }
    }

    /// Returns the name used in messages.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the source text; empty for [`CUBLAS`].
    pub const fn text(&self) -> &'static str {
        self.text
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Source({}, {:?}, {} bytes)",
            self.name,
            self.kind,
            self.text.len()
        )
    }
}
