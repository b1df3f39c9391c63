//! Adds one piece to the values of another row-major buffer.

use half::{bf16, f16};

use super::copy::runs;
use mpmd_layout::aval::DType;
use mpmd_layout::region::Region;

/// Adds the elements of region `piece` in buffer `src`, which holds `src_region`, to buffer `dst`,
/// which holds `dst_region`. Both buffers are row-major over their regions, with elements of
/// `dtype`.
///
/// Sums have the array's own dtype. Integers wrap around, half precision is rounded after every
/// addition, complex numbers add by component. Booleans do not change: they have no sum.
///
/// # Panics
///
/// If a buffer's length does not match its region, or `piece` is not within both regions.
pub fn add_region(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    dtype: DType,
) {
    let mut each = |mut add: fn(&mut [u8], &[u8])| {
        runs(
            src,
            src_region,
            dst,
            dst_region,
            piece,
            dtype.size(),
            &mut add,
        );
    };

    match dtype {
        DType::Bool | DType::Object => {}
        DType::I8 | DType::U8 => each(|dst, src| {
            add::<1>(dst, src, |a, b| [a[0].wrapping_add(b[0])]);
        }),
        DType::I16 | DType::U16 => each(|dst, src| {
            add::<2>(dst, src, |a, b| {
                u16::from_ne_bytes(a)
                    .wrapping_add(u16::from_ne_bytes(b))
                    .to_ne_bytes()
            });
        }),
        DType::I32 | DType::U32 => each(|dst, src| {
            add::<4>(dst, src, |a, b| {
                u32::from_ne_bytes(a)
                    .wrapping_add(u32::from_ne_bytes(b))
                    .to_ne_bytes()
            });
        }),
        DType::I64 | DType::U64 => each(|dst, src| {
            add::<8>(dst, src, |a, b| {
                u64::from_ne_bytes(a)
                    .wrapping_add(u64::from_ne_bytes(b))
                    .to_ne_bytes()
            });
        }),
        DType::Bf16 => each(|dst, src| {
            add::<2>(dst, src, |a, b| {
                (bf16::from_ne_bytes(a) + bf16::from_ne_bytes(b)).to_ne_bytes()
            });
        }),
        DType::F16 => each(|dst, src| {
            add::<2>(dst, src, |a, b| {
                (f16::from_ne_bytes(a) + f16::from_ne_bytes(b)).to_ne_bytes()
            });
        }),
        DType::F32 | DType::C64 => each(|dst, src| {
            add::<4>(dst, src, |a, b| {
                (f32::from_ne_bytes(a) + f32::from_ne_bytes(b)).to_ne_bytes()
            });
        }),
        DType::F64 | DType::C128 => each(|dst, src| {
            add::<8>(dst, src, |a, b| {
                (f64::from_ne_bytes(a) + f64::from_ne_bytes(b)).to_ne_bytes()
            });
        }),
    }
}

/// Replaces each element of `dst` by its `sum` with the element of `src` at the same index. An
/// element has `N` bytes, which need not be aligned.
#[inline(always)]
fn add<const N: usize>(dst: &mut [u8], src: &[u8], sum: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (a, b) in dst
        .as_chunks_mut::<N>()
        .0
        .iter_mut()
        .zip(src.as_chunks::<N>().0)
    {
        *a = sum(*a, *b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(dtype: DType, a: &[u8], b: &[u8]) -> Vec<u8> {
        let whole = Region::full(&[a.len() / dtype.size()]);
        let mut sum = a.to_vec();
        add_region(b, &whole, &mut sum, &whole, &whole, dtype);
        sum
    }

    #[test]
    fn every_dtype_has_its_own_sum() {
        assert_eq!(added(DType::U8, &[250, 1], &[7, 1]), [1, 2]);
        assert_eq!(
            added(DType::I16, &(-3i16).to_ne_bytes(), &5i16.to_ne_bytes()),
            2i16.to_ne_bytes()
        );
        assert_eq!(
            added(DType::I32, &i32::MAX.to_ne_bytes(), &1i32.to_ne_bytes()),
            i32::MIN.to_ne_bytes()
        );
        assert_eq!(
            added(DType::U64, &u64::MAX.to_ne_bytes(), &2u64.to_ne_bytes()),
            1u64.to_ne_bytes()
        );
        assert_eq!(
            added(DType::F64, &0.1f64.to_ne_bytes(), &0.2f64.to_ne_bytes()),
            (0.1f64 + 0.2).to_ne_bytes()
        );
        // Half precision is rounded after each addition: 256 + 1 does not fit into eight bits of
        // mantissa.
        let (large, one) = (bf16::from_f32(256.0), bf16::from_f32(1.0));
        assert_eq!(
            added(DType::Bf16, &large.to_ne_bytes(), &one.to_ne_bytes()),
            large.to_ne_bytes()
        );
        let (large, one) = (f16::from_f32(2048.0), f16::from_f32(1.0));
        assert_eq!(
            added(DType::F16, &large.to_ne_bytes(), &one.to_ne_bytes()),
            large.to_ne_bytes()
        );
        let complex = |re: f32, im: f32| [re.to_ne_bytes(), im.to_ne_bytes()].concat();
        assert_eq!(
            added(DType::C64, &complex(1.0, -2.0), &complex(0.5, 4.0)),
            complex(1.5, 2.0)
        );
        assert_eq!(added(DType::Bool, &[1, 0], &[1, 1]), [1, 0]);
    }

    #[test]
    fn only_the_piece_is_added() {
        let region = |bounds: [(usize, usize); 2]| bounds.into_iter().collect::<Region>();
        let (from, to, piece) = (
            region([(0, 2), (0, 3)]),
            region([(0, 2), (1, 4)]),
            region([(0, 2), (1, 3)]),
        );
        let mut sum = [10u8, 20, 30, 40, 50, 60];
        add_region(&[1, 2, 3, 4, 5, 6], &from, &mut sum, &to, &piece, DType::U8);
        assert_eq!(sum, [12, 23, 30, 45, 56, 60]);
    }
}
