//! The width of the vector instructions that a process computes with.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The vector instructions that a process computes with, from the narrowest to the widest.
///
/// The default is the widest, which limits nothing.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
pub enum VectorWidth {
    /// The instructions that every processor of the architecture has.
    Baseline,
    /// 32 bytes and fused multiply-add: AVX2 and FMA.
    Avx2,
    /// 64 bytes: AVX-512.
    #[default]
    Avx512,
}

impl VectorWidth {
    /// All widths, from the narrowest to the widest.
    pub const ALL: [Self; 3] = [Self::Baseline, Self::Avx2, Self::Avx512];

    /// Returns the name, as [`SIMD`](crate::variables::SIMD) has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Returns the width of this name, or `None` if there is none.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|width| width.name() == name)
    }
}

impl fmt::Display for VectorWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_ordered_and_found_by_name() {
        assert!(VectorWidth::ALL.is_sorted());
        assert_eq!(VectorWidth::default(), VectorWidth::ALL[2]);
        for width in VectorWidth::ALL {
            assert_eq!(VectorWidth::named(&width.to_string()), Some(width));
        }
        assert_eq!(VectorWidth::named("AVX2"), None);
    }
}
