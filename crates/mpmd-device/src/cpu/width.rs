//! The vector instructions that this process's kernels compute with. Only this file asks the
//! processor for its instructions.
//
// invariant: one-width

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use mpmd_base::{VectorWidth, variables};

/// The width of the job, as an index into [`VectorWidth::ALL`].
static AGREED: AtomicU8 = AtomicU8::new(VectorWidth::ALL.len() as u8 - 1);

/// Returns the width that kernels of this process compute with: the narrowest of three, those of
/// the processor, of `MPMD_SIMD`, and of the job.
///
/// A value of `MPMD_SIMD` that names no width does not count here: a job does not start with it.
pub fn width() -> VectorWidth {
    agreed().min(own())
}

/// Returns the widest instructions that the processor has. The answer ignores `MPMD_SIMD`.
pub fn processor_width() -> VectorWidth {
    static FOUND: OnceLock<VectorWidth> = OnceLock::new();
    *FOUND.get_or_init(find_width)
}

/// Narrows the width of this process to the one that its job has agreed on. The width never grows
/// again, because arrays that the process keeps were computed with it.
pub fn narrow(agreed: VectorWidth) {
    AGREED.fetch_min(agreed as u8, Ordering::Relaxed);
}

fn agreed() -> VectorWidth {
    VectorWidth::ALL[usize::from(AGREED.load(Ordering::Relaxed))]
}

/// Returns the narrower one of the processor's width and that of `MPMD_SIMD`.
fn own() -> VectorWidth {
    static OWN: OnceLock<VectorWidth> = OnceLock::new();
    *OWN.get_or_init(|| {
        let limit = std::env::var(variables::SIMD).ok();
        let limit = limit.and_then(|name| VectorWidth::named(&name));
        processor_width().min(limit.unwrap_or_default())
    })
}

#[cfg(target_arch = "x86_64")]
fn find_width() -> VectorWidth {
    // The instructions that `gemm-common` computes with at AVX2.
    let has_avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    match has_avx2 {
        false => VectorWidth::Baseline,
        true if is_x86_feature_detected!("avx512f") => VectorWidth::Avx512,
        true => VectorWidth::Avx2,
    }
}

/// Other architectures have one form of each kernel.
#[cfg(not(target_arch = "x86_64"))]
fn find_width() -> VectorWidth {
    VectorWidth::Baseline
}

/// Returns all widths that this processor can compute with, for tests.
#[cfg(test)]
pub(crate) fn widths() -> impl Iterator<Item = VectorWidth> {
    let widest = processor_width();
    VectorWidth::ALL
        .into_iter()
        .filter(move |width| *width <= widest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn width_is_never_beyond_the_processor() {
        assert!(width() <= processor_width());
        narrow(VectorWidth::Avx512);
        assert_eq!(width(), own());
        assert_eq!(widths().last(), Some(processor_width()));
    }
}
