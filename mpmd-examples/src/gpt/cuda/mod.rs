//! The same transformer on CUDA devices: what the functions of the [module above](super) compute on
//! the host, as work that a device is given.
//!
//! Each file here mirrors one of there, and so do its functions, residuals and layouts: a stage on
//! a CUDA device and one on a CPU are parts of one pipeline, and what one leaves another may read.
//! Products go to cuBLAS; what is between them are the kernels in `kernels/`, fused where a value
//! would otherwise travel to memory and back. Nothing here waits: functions return once the work is
//! issued, and it runs in the order of the calls.
//!
//! Results are those of the CPU to within rounding, since sums have another order, and the same
//! bits from run to run: no sum depends on which thread comes first. Only `f32` is computed in;
//! what products do with it is the caller's choice ([`Math`](mpmd::cuda::Math)).

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
