//! The kernels of matrix products for each width of vectors, from `gemm-common` and its siblings.
//!
//! `gemm` itself asks the processor alone, so it could not follow the width of a job. Widths from
//! AVX2 on give the same bits: each element is one sum in the order of the inner dimension, and the
//! shapes that are summed otherwise use the kernels of AVX2 at either width.

use gemm_common::Parallelism;

use super::{VectorWidth, processor_width};

/// The places of a product's three matrices: `c` is `[rows, columns]`.
#[derive(Clone, Copy)]
pub(super) struct ProductPlaces<T> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) inner: usize,
    pub(super) c: StridedMut<T>,
    pub(super) a: Strided<T>,
    pub(super) b: Strided<T>,
    /// True if the product is added to `c`, false if it replaces `c`.
    pub(super) accumulate: bool,
}

/// A matrix that is read. Strides are in elements.
#[derive(Clone, Copy)]
pub(super) struct Strided<T> {
    pub(super) data: *const T,
    pub(super) row_stride: isize,
    pub(super) column_stride: isize,
}

/// A matrix that is written. Its columns are contiguous in memory.
#[derive(Clone, Copy)]
pub(super) struct StridedMut<T> {
    pub(super) data: *mut T,
    pub(super) row_stride: isize,
}

/// An element type with kernels.
pub(super) trait ProductElement: Copy {
    /// Computes a product with the vector instructions of `width`.
    ///
    /// # Safety
    ///
    /// The processor has the instructions. No dimension is zero. All elements of the three matrices
    /// lie in memory that may be read, or for `c` read and written; `c` overlaps no other.
    unsafe fn product(width: VectorWidth, places: ProductPlaces<Self>, threads: Parallelism);
}

/// Defines a function that computes a product with the kernels of `gemm` in the module `$main`, and
/// small products of long sums with those in `$short`.
macro_rules! product {
    ($name:ident, $element:ty, $lanes:literal, $simd:ty, $main:path, $short:path) => {
        unsafe fn $name(places: ProductPlaces<$element>, threads: Parallelism) {
            use gemm_common::simd::MixedSimd;
            use $main as main;
            use $short as short;

            let simd = <$simd as MixedSimd<$element, $element, $element, $element>>::try_new();
            let simd = simd.expect("the instructions of this width");
            let ProductPlaces {
                rows,
                columns,
                inner,
                c,
                a,
                b,
                accumulate,
            } = places;
            // The kernels write columns of contiguous rows, so they compute the transposed product.
            // SAFETY: the caller's promise.
            unsafe {
                gemm_common::gemm::gemm_basic_generic::<
                    _,
                    $element,
                    $lanes,
                    { main::MR_DIV_N * $lanes },
                    { main::NR },
                    { main::MR_DIV_N },
                    { short::H_M },
                    { short::H_N },
                >(
                    simd,
                    columns,
                    rows,
                    inner,
                    c.data,
                    c.row_stride,
                    1,
                    accumulate,
                    b.data,
                    b.row_stride,
                    b.column_stride,
                    a.data,
                    a.row_stride,
                    a.column_stride,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    |x, y, sum| x * y + sum,
                    &main::UKR,
                    &short::H_UKR,
                    false,
                    threads,
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use gemm_common::simd::{Scalar, V3};
    use gemm_f32::microkernel as single;
    use gemm_f64::microkernel as double;

    use super::super::avx512;
    use super::*;

    product!(
        f32_plain,
        f32,
        1,
        Scalar,
        single::scalar::f32,
        single::scalar::f32
    );
    product!(f32_avx2, f32, 8, V3, single::fma::f32, single::fma::f32);
    product!(f32_avx512, f32, 16, V3, avx512, single::fma::f32);
    product!(
        f64_plain,
        f64,
        1,
        Scalar,
        double::scalar::f64,
        double::scalar::f64
    );
    product!(f64_avx2, f64, 4, V3, double::fma::f64, double::fma::f64);

    impl ProductElement for f32 {
        unsafe fn product(width: VectorWidth, places: ProductPlaces<Self>, threads: Parallelism) {
            assert!(width <= processor_width(), "instructions of {width}");
            // SAFETY: the caller's promise.
            unsafe {
                match width {
                    VectorWidth::Baseline => f32_plain(places, threads),
                    VectorWidth::Avx2 => f32_avx2(places, threads),
                    VectorWidth::Avx512 => f32_avx512(places, threads),
                }
            }
        }
    }

    /// Products in double precision are for tests and examples, and have no kernels for AVX-512.
    impl ProductElement for f64 {
        unsafe fn product(width: VectorWidth, places: ProductPlaces<Self>, threads: Parallelism) {
            assert!(width <= processor_width(), "instructions of {width}");
            // SAFETY: the caller's promise.
            unsafe {
                match width {
                    VectorWidth::Baseline => f64_plain(places, threads),
                    VectorWidth::Avx2 | VectorWidth::Avx512 => f64_avx2(places, threads),
                }
            }
        }
    }
}

/// Other architectures have one width.
#[cfg(not(target_arch = "x86_64"))]
mod others {
    use super::*;

    macro_rules! product {
        ($element:ty, $kernels:path) => {
            impl ProductElement for $element {
                unsafe fn product(
                    width: VectorWidth,
                    places: ProductPlaces<Self>,
                    threads: Parallelism,
                ) {
                    use $kernels as kernels;

                    assert!(width <= processor_width(), "instructions of {width}");
                    let ProductPlaces {
                        rows,
                        columns,
                        inner,
                        c,
                        a,
                        b,
                        accumulate,
                    } = places;
                    // SAFETY: the caller's promise.
                    unsafe {
                        kernels::get_gemm_fn()(
                            columns,
                            rows,
                            inner,
                            c.data,
                            c.row_stride,
                            1,
                            accumulate,
                            b.data,
                            b.row_stride,
                            b.column_stride,
                            a.data,
                            a.row_stride,
                            a.column_stride,
                            1.0,
                            1.0,
                            false,
                            false,
                            false,
                            threads,
                        );
                    }
                }
            }
        };
    }

    product!(f32, gemm_f32::gemm::f32);
    product!(f64, gemm_f64::gemm::f64);
}
