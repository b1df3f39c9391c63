//! The kernels of products of `f32` for AVX-512, from the macros of `gemm-common`.
//!
//! `gemm-f32` has the same ones, but behind a feature with which every user of `gemm` in the build,
//! candle too, takes them wherever the processor has them. These are used if the job agrees.
#![allow(
    clippy::too_many_arguments,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    reason = "the macros write the functions"
)]

use std::arch::x86_64::{__m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_ps};
use std::mem::transmute;

use gemm_common::{microkernel, microkernel_fn_array};

type T = f32;
/// Number of elements of a vector.
const N: usize = 16;
type Pack = [T; N];

#[inline(always)]
unsafe fn vector(x: Pack) -> __m512 {
    transmute::<Pack, __m512>(x)
}

#[inline(always)]
unsafe fn elements(x: __m512) -> Pack {
    transmute::<__m512, Pack>(x)
}

// The macros name these functions. They are inlined into kernels that enable AVX-512.

#[inline(always)]
unsafe fn splat(value: T) -> Pack {
    elements(_mm512_set1_ps(value))
}

#[inline(always)]
unsafe fn mul(x: Pack, y: Pack) -> Pack {
    elements(_mm512_mul_ps(vector(x), vector(y)))
}

#[inline(always)]
unsafe fn add(x: Pack, y: Pack) -> Pack {
    elements(_mm512_add_ps(vector(x), vector(y)))
}

#[inline(always)]
unsafe fn mul_add(x: Pack, y: Pack, sum: Pack) -> Pack {
    elements(_mm512_fmadd_ps(vector(x), vector(y), vector(sum)))
}

#[inline(always)]
unsafe fn scalar_mul(x: T, y: T) -> T {
    x * y
}

#[inline(always)]
unsafe fn scalar_add(x: T, y: T) -> T {
    x + y
}

#[inline(always)]
unsafe fn scalar_mul_add(x: T, y: T, sum: T) -> T {
    x.mul_add(y, sum)
}

/// Defines the kernels of up to 6 columns, for a number of vectors in each.
macro_rules! columns {
    ($vectors:tt: $one:ident $two:ident $three:ident $four:ident $five:ident $six:ident) => {
        microkernel!(["avx512f"], 4, $one, $vectors, 1);
        microkernel!(["avx512f"], 4, $two, $vectors, 2);
        microkernel!(["avx512f"], 4, $three, $vectors, 3);
        microkernel!(["avx512f"], 4, $four, $vectors, 4);
        microkernel!(["avx512f"], 4, $five, $vectors, 5);
        microkernel!(["avx512f"], 4, $six, $vectors, 6);
    };
}

columns!(1: x1x1 x1x2 x1x3 x1x4 x1x5 x1x6);
columns!(2: x2x1 x2x2 x2x3 x2x4 x2x5 x2x6);
columns!(3: x3x1 x3x2 x3x3 x3x4 x3x5 x3x6);
columns!(4: x4x1 x4x2 x4x3 x4x4 x4x5 x4x6);

microkernel_fn_array! {
    [x1x1, x1x2, x1x3, x1x4, x1x5, x1x6,],
    [x2x1, x2x2, x2x3, x2x4, x2x5, x2x6,],
    [x3x1, x3x2, x3x3, x3x4, x3x5, x3x6,],
    [x4x1, x4x2, x4x3, x4x4, x4x5, x4x6,],
}
