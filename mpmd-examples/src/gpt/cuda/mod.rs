//! The functions of the [module above](super) for CUDA devices: they issue the same computation as
//! work on a device.
//!
//! Each file here mirrors a file there, with the same functions, residuals and layouts. A pipeline
//! can therefore mix stages on CUDA devices and on CPUs. cuBLAS computes the matrix products. The
//! kernels in `kernels/` do the rest, fused where a value would otherwise travel to memory and
//! back. Functions return once the work is issued; only all-reduces block. The work runs in the
//! order of the calls.
//!
//! Results equal those of a CPU up to rounding, since sums have another order. They have the same
//! bits in every run, because no sum depends on the timing of threads. Only `f32` is supported. The
//! caller chooses the precision of matrix products ([`Math`](mpmd::cuda::Math)).

use mpmd::cuda::Source;

pub(super) mod adamw;
pub(super) mod attention;
pub(super) mod block;
mod device;
pub(super) mod embed;
pub(super) mod head;
pub(super) mod mlp;
pub(super) mod norm;
pub(super) mod stages;
pub(super) mod sums;
#[cfg(test)]
mod testing;

pub(super) use device::{Device, device};

/// All kernels as one source: they share the declarations of the first file, and are compiled
/// together.
pub(super) static KERNELS: Source = Source::cuda(
    "gpt",
    concat!(
        include_str!("kernels/common.cu"),
        "\n#line 1 \"norm.cu\"\n",
        include_str!("kernels/norm.cu"),
        "\n#line 1 \"sums.cu\"\n",
        include_str!("kernels/sums.cu"),
        "\n#line 1 \"attention.cu\"\n",
        include_str!("kernels/attention.cu"),
        "\n#line 1 \"mlp.cu\"\n",
        include_str!("kernels/mlp.cu"),
        "\n#line 1 \"head.cu\"\n",
        include_str!("kernels/head.cu"),
        "\n#line 1 \"embed.cu\"\n",
        include_str!("kernels/embed.cu"),
        "\n#line 1 \"adamw.cu\"\n",
        include_str!("kernels/adamw.cu"),
    ),
);
