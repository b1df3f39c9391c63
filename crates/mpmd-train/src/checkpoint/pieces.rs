//! The check that the pieces of an array are its elements, each once.

use std::collections::HashMap;

use mpmd_layout::region::Region;

/// Limit on the number of dimensions along which an array is divided into pieces. [`check_pieces`]
/// takes memory for `2^MOST_DIVIDED` corners of a piece.
const MOST_DIVIDED: usize = 12;

/// A reason why the pieces of an array do not cover each element exactly once.
#[derive(Debug, thiserror::Error)]
pub(super) enum PiecesFault {
    #[error("damaged: piece {piece} is empty or not within the array")]
    Outside { piece: Region },
    #[error("it is divided along {dims} dimensions, more than {MOST_DIVIDED}")]
    Divided { dims: usize },
    #[error("damaged: its pieces overlap or leave elements out")]
    NotOnce,
}

/// Checks that pieces of an array of shape `shape` are within the array and cover each element
/// exactly once.
pub(super) fn check_pieces<T>(shape: &[usize], pieces: &[(Region, T)]) -> Result<(), PiecesFault> {
    let full = Region::full(shape);
    let is_within = |piece: &Region| piece.ndim() == full.ndim() && full.contains(piece);
    let pieces = pieces.iter().map(|(piece, _)| piece);
    if let Some(piece) = pieces
        .clone()
        .find(|piece| !is_within(piece) || piece.is_empty())
    {
        return Err(PiecesFault::Outside {
            piece: piece.clone(),
        });
    }
    let is_whole = |dim: &usize| {
        pieces
            .clone()
            .all(|piece| piece.range(*dim) == full.range(*dim))
    };
    let divided: Vec<usize> = (0..full.ndim()).filter(|dim| !is_whole(dim)).collect();
    if divided.len() > MOST_DIVIDED {
        return Err(PiecesFault::Divided {
            dims: divided.len(),
        });
    }
    // A corner of a box has the product of +1 for each start and -1 for each end. These numbers are
    // the differences of the function that is 1 in the box. So two sets of boxes cover the elements
    // alike if the sums at all corners are equal.
    let mut corners: HashMap<Vec<usize>, i64> = HashMap::new();
    let whole = (!full.is_empty()).then_some((&full, -1));
    for (region, sign) in pieces.clone().map(|piece| (piece, 1)).chain(whole) {
        for corner in 0..1_usize << divided.len() {
            let at = divided
                .iter()
                .enumerate()
                .map(|(bit, dim)| match corner >> bit & 1 {
                    0 => region.range(*dim).start,
                    _ => region.range(*dim).end,
                });
            let sign = if corner.count_ones().is_multiple_of(2) {
                sign
            } else {
                -sign
            };
            *corners.entry(at.collect()).or_default() += sign;
        }
    }
    match corners.values().all(|sum| *sum == 0) {
        true => Ok(()),
        false => Err(PiecesFault::NotOnce),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::owners::pieces;

    fn check(shape: &[usize], regions: &[Region]) -> Result<(), PiecesFault> {
        let regions: Vec<_> = regions.iter().map(|region| (region.clone(), ())).collect();
        check_pieces(shape, &regions)
    }

    #[test]
    fn pieces_must_be_the_array_exactly() {
        let shape = [7, 5, 1, 6];
        for bytes in [4, 30, 100, 10_000] {
            let all = pieces(&Region::full(&shape), 4, bytes);
            check(&shape, &all).unwrap();
            if let [first, .., last] = &all[..] {
                let overlap = "overlap or leave elements out";
                assert!(
                    check(&shape, &all[1..])
                        .unwrap_err()
                        .to_string()
                        .contains(overlap)
                );
                // The pieces still have as many elements as the array if `first` and `last` have
                // equally many.
                let mut twice = all.clone();
                *twice.last_mut().unwrap() = first.clone();
                if first.elements() == last.elements() {
                    assert!(
                        check(&shape, &twice)
                            .unwrap_err()
                            .to_string()
                            .contains(overlap)
                    );
                }
                twice[0] = Region::full(&shape);
                assert!(
                    check(&shape, &twice)
                        .unwrap_err()
                        .to_string()
                        .contains(overlap)
                );
            }
        }
        check(&[], &[Region::full(&[])]).unwrap();
        assert!(check(&[], &[]).is_err() && check(&[3], &[]).is_err());
        check(&[0, 3], &[]).unwrap();
    }

    #[test]
    fn random_pieces_are_judged_as_by_counting() {
        let shape = [3, 4];
        let mut right = 0;
        for seed in 0..3000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut range = |len| {
                let (a, b) = (rng.usize(0..=len), rng.usize(0..=len));
                a.min(b)..a.max(b)
            };
            let mut all: Vec<Region> = Vec::new();
            let mut count = [0; 12];
            // Keeps a random piece that overlaps no other, most times.
            for _ in 0..30 {
                let piece = Region::new(vec![range(shape[0]), range(shape[1])]);
                let is_new = all.iter().all(|other| other.intersect(&piece).is_none());
                if !piece.is_empty() && (is_new || seed % 7 == 0 && all.len() < 2) {
                    piece
                        .indices(&shape)
                        .for_each(|element| count[element as usize] += 1);
                    all.push(piece);
                }
            }
            let is_right = count == [1; 12];
            right += u32::from(is_right);
            assert_eq!(check(&shape, &all).is_ok(), is_right, "{all:?}");
        }
        assert!(right > 100, "{right}");
    }

    #[test]
    fn wild_pieces_are_refused_without_much_memory() {
        let max = usize::MAX;
        let wild = Region::new(vec![0..max, 0..max, 0..max]);
        assert!(
            check(&[2, 2, 2], &[wild])
                .unwrap_err()
                .to_string()
                .contains("not within")
        );
        let wild = Region::new(vec![0..max, 0..max, 5..5]);
        assert!(
            check(&[2, 2, 2], &[wild])
                .unwrap_err()
                .to_string()
                .contains("empty")
        );
        assert!(
            check(&[2], &[Region::full(&[2, 2])])
                .unwrap_err()
                .to_string()
                .contains("not within")
        );
        let corner = Region::new(vec![0..1; 60]);
        assert!(
            check(&[2; 60], &[corner])
                .unwrap_err()
                .to_string()
                .contains("60 dimensions")
        );
    }
}
