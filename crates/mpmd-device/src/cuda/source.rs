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

/// An alternative source whose functions use less shared memory, for devices with less of it.
#[derive(Clone, Copy)]
struct Smaller {
    /// Devices whose blocks have at least this number of bytes of shared memory do not need the
    /// alternative.
    below: u32,
    source: &'static Source,
}

/// The language of a source.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SourceKind {
    /// CUDA C for NVRTC.
    Cuda {
        /// True if each product and each sum is rounded separately.
        exact: bool,
    },
    /// PTX, which the driver compiles.
    Ptx,
    /// A placeholder without text. Preparing it creates cuBLAS's handle and workspace.
    Cublas,
}

/// The placeholder that a kernel lists in `Kernel::cuda` if it calls `Cuda::gemm`. cuBLAS is then
/// initialised before the kernel runs.
pub static CUBLAS: Source = Source {
    name: "cuBLAS",
    text: "",
    kind: SourceKind::Cublas,
    smaller: None,
};

impl Source {
    /// Creates a source in CUDA C; `name` appears in messages.
    ///
    /// NVRTC compiles the source for each device's own architecture, without fast approximations.
    /// Declare functions to launch as `extern "C" __global__`. NVRTC's own headers are available.
    /// Headers of the CUDA toolkit are available if `CUDA_HOME` or `CUDA_PATH` names the toolkit.
    pub const fn cuda(name: &'static str, text: &'static str) -> Self {
        Self {
            name,
            text,
            kind: SourceKind::Cuda { exact: false },
            smaller: None,
        }
    }

    /// Creates a source in PTX, which the driver gets unchanged; `name` appears in messages.
    pub const fn ptx(name: &'static str, text: &'static str) -> Self {
        Self {
            name,
            text,
            kind: SourceKind::Ptx,
            smaller: None,
        }
    }

    /// Adds an alternative source, which is also prepared on devices whose blocks have less than
    /// `below` bytes of shared memory. The code that launches the functions chooses between the two
    /// sources by `Cuda::shared_bytes`.
    #[must_use]
    pub const fn or_below(self, below: u32, source: &'static Self) -> Self {
        Self {
            smaller: Some(Smaller { below, source }),
            ..self
        }
    }

    /// Returns the alternative source to prepare on a device whose blocks have `bytes` bytes of
    /// shared memory; `None` if there is none for it.
    pub(crate) fn smaller_for(&self, bytes: u32) -> Option<&'static Self> {
        self.smaller
            .filter(|smaller| bytes < smaller.below)
            .map(|smaller| smaller.source)
    }

    /// Makes each product and each sum round separately, as on the host: nothing is fused
    /// (`--fmad=false`). Changes only sources in CUDA C.
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
