//! Types of numbers, as arguments.

use mpmd::aval::DType;
use mpmd_models::WeightType;

/// The type of a model's weights in memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum WeightTypeArg {
    /// Single precision.
    F32,
    /// The upper half of single precision.
    Bf16,
}

impl WeightTypeArg {
    /// True if matrices are held in bf16.
    pub(crate) fn is_half(self) -> bool {
        self == Self::Bf16
    }
}

impl From<WeightTypeArg> for WeightType {
    fn from(argument: WeightTypeArg) -> Self {
        match argument {
            WeightTypeArg::F32 => Self::F32,
            WeightTypeArg::Bf16 => Self::Bf16,
        }
    }
}

/// The dtype in which a model computes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum ComputeArg {
    /// Those of its weights.
    #[default]
    F32,
    /// bf16, which has the range of f32 and 8 bits of precision.
    Bf16,
    /// f16, which has 11 bits of precision; gradients below 3e-8 become 0 in the computation.
    F16,
}

impl From<ComputeArg> for DType {
    fn from(argument: ComputeArg) -> Self {
        match argument {
            ComputeArg::F32 => Self::F32,
            ComputeArg::Bf16 => Self::Bf16,
            ComputeArg::F16 => Self::F16,
        }
    }
}
