//! The bits of published values: their dtype on the way, their hashes, and the elements that have
//! changed. Pure functions.

use half::f16;
use mpmd_device::cpu::bits::{round_to_bf16, sum_of_words};
use mpmd_layout::aval::DType;
use mpmd_layout::region::Region;

/// Returns true if values of dtype `from` can be published as `to`.
pub(super) fn can_cast(from: DType, to: DType) -> bool {
    from == to || matches!((from, to), (DType::F32, DType::Bf16 | DType::F16))
}

/// Converts values of dtype `from` to `to` and writes them to `out`, rounded to nearest, ties to
/// even.
///
/// # Panics
///
/// If the numbers of elements differ, or the dtypes [cannot be cast](can_cast).
pub(super) fn cast(from: DType, values: &[u8], to: DType, out: &mut [u8]) {
    assert_eq!(
        values.len() / from.size(),
        out.len() / to.size(),
        "elements"
    );
    match (from, to) {
        _ if from == to => out.copy_from_slice(values),
        (DType::F32, DType::Bf16) => round_to_bf16(values, out),
        (DType::F32, DType::F16) => {
            for (to, from) in out
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(values.as_chunks::<4>().0)
            {
                *to = f16::from_f32(f32::from_le_bytes(*from)).to_le_bytes();
            }
        }
        _ => panic!("{from} as {to}"),
    }
}

/// Returns the hash of the elements of `piece` in an array of this shape. `values` are the elements
/// of `region`, row-major.
///
/// The hash is the [`sum_of_words`]. A word has four bytes, or one or two for smaller elements; its
/// key depends on its place in the array. So hashes of disjoint pieces add up to the hash of their
/// union, and equal values have equal hashes in any layout. A change of one word always changes the
/// hash. It guards against mistakes, not against malice.
///
/// # Panics
///
/// If `piece` is not within `region`, or `region` not within the shape.
pub(super) fn hash(
    values: &[u8],
    region: &Region,
    piece: &Region,
    shape: &[usize],
    item: usize,
) -> u64 {
    let sums = rows(region, piece, shape).map(|run| {
        let words = (item / 4).max(1);
        sum_of_words(
            &values[run.at * item..][..run.len * item],
            item.min(4),
            run.place * words,
        )
    });
    sums.fold(0, u64::wrapping_add)
}

/// A run of elements that is contiguous both in the values of a region and in the array. All fields
/// count elements.
struct ElementRun {
    /// Index of the first element among the region's values.
    at: usize,
    /// Row-major index of the first element in the whole array.
    place: usize,
    len: usize,
}

/// Returns the runs of contiguous elements that make up `piece`, a part of `region`.
fn rows(region: &Region, piece: &Region, shape: &[usize]) -> impl Iterator<Item = ElementRun> {
    let dims = shape.len();
    let own = region.shape();
    // The dimensions from here on are contiguous in both.
    let mut inner = dims.saturating_sub(1);
    while inner > 0 && piece.range(inner).len() == shape[inner] {
        inner -= 1;
    }
    let len: usize = (inner..dims).map(|dim| piece.range(dim).len()).product();
    let count = if piece.is_empty() {
        0
    } else {
        piece.elements() / len
    };

    // The steps of the dimension `inner` in the values of the region and in the array.
    let behind = inner + usize::from(dims > 0);
    let own_tail: usize = own[behind..].iter().product();
    let tail: usize = shape[behind..].iter().product();
    let piece = piece.clone();
    let region = region.clone();
    let shape = shape.to_vec();
    (0..count).map(move |row| {
        let mut at = 0;
        let mut place = 0;
        let mut own_step = 1;
        let mut step = 1;
        if dims > 0 {
            let start = piece.range(inner).start;
            at += (start - region.range(inner).start) * own_tail;
            place += start * tail;
            own_step = own_tail * own[inner];
            step = tail * shape[inner];
        }

        let mut left = row;
        for dim in (0..inner).rev() {
            let range = piece.range(dim);
            let index = range.start + left % range.len();
            left /= range.len();
            at += (index - region.range(dim).start) * own_step;
            place += index * step;
            own_step *= own[dim];
            step *= shape[dim];
        }
        ElementRun { at, place, len }
    })
}

/// The ascending indices of changed elements in a buffer. Each index is stored as its gap to the
/// one before, less one, in bytes of seven bits each.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct ChangedPlaces {
    gaps: Vec<u8>,
    count: usize,
    /// The last index plus 1; 0 without indices.
    next: usize,
}

impl ChangedPlaces {
    /// Appends the index `place`, which must be above all others.
    pub(super) fn push(&mut self, place: usize) {
        let mut gap = place - self.next;
        while gap > 0x7f {
            self.gaps.push(gap as u8 | 0x80);
            gap >>= 7;
        }
        self.gaps.push(gap as u8);
        self.count += 1;
        self.next = place + 1;
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes in which the indices are encoded.
    pub(super) fn bytes(&self) -> usize {
        self.gaps.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        let mut rest = &self.gaps[..];
        let mut next = 0;
        std::iter::from_fn(move || {
            let gap = take_number(&mut rest)?;
            let place = next + gap;
            next = place + 1;
            Some(place)
        })
    }

    /// Returns the union of both sets of indices.
    pub(super) fn or(&self, other: &Self) -> Self {
        let mut all = Self::default();
        let mut a = self.iter().peekable();
        let mut b = other.iter().peekable();
        loop {
            let next = match (a.peek(), b.peek()) {
                (Some(a), Some(b)) => *a.min(b),
                (Some(one), None) | (None, Some(one)) => *one,
                (None, None) => return all,
            };
            a.next_if_eq(&next);
            b.next_if_eq(&next);
            all.push(next);
        }
    }
}

/// Appends the changed elements to `to`: their number, indices and values. `values` has all
/// elements, of `item` bytes each.
pub(super) fn write_changes(places: &ChangedPlaces, values: &[u8], item: usize, to: &mut Vec<u8>) {
    to.extend((places.len() as u64).to_le_bytes());
    to.extend((places.bytes() as u64).to_le_bytes());
    to.extend(&places.gaps);
    places
        .iter()
        .for_each(|place| to.extend(&values[place * item..][..item]));
}

/// Returns the number of bytes that [`write_changes`] appends.
pub(super) fn changes_bytes(places: &ChangedPlaces, item: usize) -> usize {
    16 + places.bytes() + places.len() * item
}

/// Reads changes that [`write_changes`] has written from the front of `from`. Calls `change` with
/// the index and new value of each element. Returns `None` if the bytes are malformed.
pub(super) fn read_changes(
    from: &mut &[u8],
    item: usize,
    mut change: impl FnMut(usize, &[u8]) -> Option<()>,
) -> Option<()> {
    let mut word = || -> Option<usize> {
        let (word, rest) = from.split_first_chunk::<8>()?;
        *from = rest;
        usize::try_from(u64::from_le_bytes(*word)).ok()
    };
    let count = word()?;
    let bytes = word()?;

    let (mut gaps, rest) = from.split_at_checked(bytes)?;
    let (values, rest) = rest.split_at_checked(count.checked_mul(item)?)?;
    *from = rest;

    let mut next = 0usize;
    for value in values.chunks_exact(item) {
        let place = next.checked_add(take_number(&mut gaps)?)?;
        change(place, value)?;
        next = place.checked_add(1)?;
    }
    gaps.is_empty().then_some(())
}

/// Reads a number in bytes of seven bits each from the front of `from`. Returns `None` if the
/// number is cut off or too large.
fn take_number(from: &mut &[u8]) -> Option<usize> {
    let mut number = 0usize;
    for shift in (0..usize::BITS).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        number |= usize::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use mpmd_device::cpu::bits::each_changed;

    use super::*;

    fn region(ranges: &[std::ops::Range<usize>]) -> Region {
        Region::new(ranges.to_vec())
    }

    #[test]
    fn hashes_of_pieces_add_up_in_any_layout() {
        let shape = [6, 5, 2000];
        for item in [1, 2, 4, 8, 16] {
            let values: Vec<u8> = (0..6 * 5 * 2000 * item)
                .map(|i| (i * i / 7) as u8)
                .collect();
            let full = Region::full(&shape);
            let whole = hash(&values, &full, &full, &shape, item);
            let mut sum = 0u64;
            for rows in [0..2, 2..6] {
                for columns in [0..1, 1..1999, 1999..2000] {
                    let own = region(&[rows.clone(), 0..5, columns.clone()]);
                    let mut part = vec![0; own.elements() * item];
                    mpmd_device::copy::copy_region(&values, &full, &mut part, &own, &own, item);
                    for middle in [0..3, 3..5] {
                        let piece = region(&[rows.clone(), middle, columns.clone()]);
                        let one = hash(&part, &own, &piece, &shape, item);
                        assert_eq!(one, hash(&values, &full, &piece, &shape, item));
                        sum = sum.wrapping_add(one);
                    }
                }
            }
            assert_eq!(sum, whole, "{item}");
        }
        assert_eq!(
            hash(&[7, 0], &region(&[]), &region(&[]), &[], 2),
            sum_of_words(&[7, 0], 2, 0)
        );
        assert_eq!(
            hash(&[], &Region::full(&[0]), &Region::full(&[0]), &[9], 2),
            0
        );
    }

    #[test]
    fn every_bit_and_every_swap_changes_the_hash() {
        let values: Vec<u8> = (0..9000).map(|i| (i * 31 / 5) as u8).collect();
        let full = Region::full(&[4500]);
        let of = |values: &[u8]| hash(values, &full, &full, &[4500], 2);
        let whole = of(&values);
        for byte in (0..9000).step_by(7) {
            let mut changed = values.clone();
            changed[byte] ^= 1 << (byte % 8);
            assert_ne!(of(&changed), whole, "{byte}");
            let other = (byte + 640) % 9000;
            if values[byte] != values[other] {
                let mut swapped = values.clone();
                swapped.swap(byte, other);
                assert_ne!(of(&swapped), whole, "{byte} and {other}");
            }
        }
    }

    #[test]
    fn casts_round_to_the_nearest_even() {
        let mut wrong = 0;
        for bits in (0..=u32::MAX)
            .step_by(65_521)
            .chain([0x7f80_0001, 0xffff_ffff, 0x3f80_8000])
        {
            let (value, mut half, mut single) = (f32::from_bits(bits), [0; 2], [0; 2]);
            cast(DType::F32, &value.to_le_bytes(), DType::Bf16, &mut half);
            cast(DType::F32, &value.to_le_bytes(), DType::F16, &mut single);
            let expected = half::bf16::from_f32(value);
            wrong += usize::from(half != expected.to_le_bytes() && !value.is_nan());
            wrong += usize::from(value.is_nan() && !half::bf16::from_le_bytes(half).is_nan());
            wrong += usize::from(single != f16::from_f32(value).to_le_bytes());
        }
        assert_eq!(wrong, 0);
    }

    #[test]
    fn changes_give_the_new_values() {
        let old: Vec<u8> = (0..40_000).map(|i| (i / 3) as u8).collect();
        for (item, every) in [(2, 97), (4, 1), (8, 5000), (2, 20_000), (1, 300)] {
            let mut new = old.clone();
            for i in (3..new.len() / item).step_by(every) {
                new[i * item] ^= 0x55;
            }
            let mut places = ChangedPlaces::default();
            each_changed(&old, &new, item, |place| places.push(place));
            assert_eq!(places.len(), (3..new.len() / item).step_by(every).count());
            let mut bytes = vec![];
            write_changes(&places, &new, item, &mut bytes);
            assert_eq!(bytes.len(), changes_bytes(&places, item));
            let mut found = old.clone();
            let mut rest = &bytes[..];
            let change = |place: usize, value: &[u8]| {
                found
                    .get_mut(place * item..)?
                    .get_mut(..item)?
                    .copy_from_slice(value);
                Some(())
            };
            read_changes(&mut rest, item, change).unwrap();
            assert!(rest.is_empty() && found == new);
            for len in 0..bytes.len().min(40) {
                assert_eq!(
                    read_changes(&mut &bytes[..len], item, |_, _| Some(())),
                    None
                );
            }
        }
    }

    #[test]
    fn places_of_two_steps_are_merged() {
        let of = |places: &[usize]| {
            let mut all = ChangedPlaces::default();
            places.iter().for_each(|place| all.push(*place));
            all
        };
        let merged = of(&[0, 5, 300, 70_000]).or(&of(&[1, 5, 299, 90_000]));
        assert_eq!(merged, of(&[0, 1, 5, 299, 300, 70_000, 90_000]));
        assert_eq!(of(&[]).or(&of(&[4])), of(&[4]));
    }
}
