//! CUDA kernels of mpmd itself.
//!
//! Each text begins with `common.cuh`. The texts of layers are compiled for one dtype, which they
//! call `T`: numbers are stored in it, and all arithmetic and all sums are in `f32`. They use no
//! atomic operations and sum in fixed orders, so equal inputs give equal bits.

use mpmd_layout::aval::DType;

use crate::cuda::source::Source;

/// Kernels that add arrays in place: `add_f32`, `add_f64`, `add_f16`, `add_bf16`. Their arguments
/// are the number of elements, the sums, and the summands.
pub static ADD: Source = Source::cuda(
    "add.cu",
    concat!(include_str!("common.cuh"), include_str!("add.cu")),
)
.exact();

/// Kernels of optimisers: sums of squares, the figures of a step, and updates by AdamW and SGD.
/// Results have the same bits as on the host.
pub static UPDATE: Source = Source::cuda(
    "update.cu",
    concat!(include_str!("common.cuh"), include_str!("update.cu")),
)
.exact();

/// Returns the bytes of shared memory that a thread block of attention needs: `tiles` tiles of
/// `rows` vectors of up to `dim` elements, and a square of scores. Each row is padded by four
/// numbers. The forward pass has two tiles, and the gradient passes have four.
pub const fn attention_shared(dim: usize, rows: usize, tiles: usize) -> u32 {
    (rows * (tiles * (dim + 4) + rows + 4) * size_of::<f32>()) as u32
}

/// One source text that is compiled for `f32` and for `bf16`.
#[derive(Debug)]
pub struct SourcePair {
    f32: Source,
    bf16: Source,
}

impl SourcePair {
    /// Returns the source for a dtype; `None` unless it is `f32` or `bf16`.
    pub fn of(&'static self, dtype: DType) -> Option<&'static Source> {
        match dtype {
            DType::F32 => Some(&self.f32),
            DType::Bf16 => Some(&self.bf16),
            _ => None,
        }
    }
}

macro_rules! pairs {
    ($(
        $(#[$doc:meta])*
        $name:ident: $file:literal
            $(with $defines:literal named $label:literal)? $(or $smaller:ident below $bytes:expr)?,
    )*) => {
        $($(#[$doc])* pub static $name: SourcePair = SourcePair {
            f32: pairs!($file, "float", "f32" $(, $defines, $label)?)
                $(.or_below($bytes, &$smaller.f32))?,
            bf16: pairs!($file, "bf16", "bf16" $(, $defines, $label)?)
                $(.or_below($bytes, &$smaller.bf16))?,
        };)*

        /// The sources of all layers' kernels.
        pub static LAYERS: &[&SourcePair] = &[$(&$name),*];
    };
    ($file:literal, $type:literal, $dtype:literal $(, $defines:literal, $label:literal)?) => {
        Source::cuda(
            concat!($file, " ", $($label, " ",)? "of ", $dtype),
            concat!(
                include_str!("common.cuh"), "typedef ", $type, " T;\n", $($defines,)?
                "#line 1 \"", $file, "\"\n", include_str!($file),
            ),
        )
    };
}

pairs! {
    /// GELU, SiLU and gates, with gradients.
    ACTIVATION: "activation.cu",
    /// Attention with head dimensions up to 64, with gradients.
    ATTENTION_64: "attention.cu"
        with "#define D 64\n#define N 64\n#define BLOCKS 2\n" named "64"
        or ATTENTION_64_BY_32 below attention_shared(64, 64, 4),
    /// Attention with head dimensions up to 64, in smaller tiles.
    ATTENTION_64_BY_32: "attention.cu"
        with "#define D 64\n#define N 32\n#define BLOCKS 2\n" named "64 by 32",
    /// Attention with head dimensions up to 128.
    ATTENTION_128: "attention.cu"
        with "#define D 128\n#define N 64\n#define BLOCKS 1\n" named "128"
        or ATTENTION_128_BY_32 below attention_shared(128, 64, 4),
    /// Attention with head dimensions up to 128, in smaller tiles.
    ATTENTION_128_BY_32: "attention.cu"
        with "#define D 128\n#define N 32\n#define BLOCKS 1\n" named "128 by 32",
    /// Attention with head dimensions up to 256.
    ATTENTION_256: "attention.cu"
        with "#define D 256\n#define N 32\n#define BLOCKS 1\n" named "256"
        or ATTENTION_256_BY_16 below attention_shared(256, 32, 4),
    /// Attention with head dimensions up to 256, in smaller tiles.
    ATTENTION_256_BY_16: "attention.cu"
        with "#define D 256\n#define N 16\n#define BLOCKS 1\n" named "256 by 16",
    /// Sums of the columns of a matrix.
    COLUMNS: "columns.cu",
    /// Sums, biases, conversions and dropout.
    ELEMENTWISE: "elementwise.cu",
    /// Lookups of a table's rows by index, and the table's gradient.
    EMBEDDING: "embedding.cu",
    /// Layer norm and RMS norm, with gradients.
    NORM: "norm.cu",
    /// Writes to caches of keys and values in blocks, and attention over such caches.
    PAGED: "paged.cu",
    /// Rotary position embeddings.
    ROTARY: "rotary.cu",
    /// Softmax of rows and cross-entropy, with gradients.
    SOFTMAX: "softmax.cu",
}
