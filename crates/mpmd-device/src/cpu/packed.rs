//! Products with a weight that is packed once, for inference.
//!
//! Each element of a product is a sum over the columns of the weight in one order: sums of 256
//! columns, added up. So a row of the result has the same bits with any number of rows.
//! [`multiply`](super::matmul::multiply) does not promise that. With fused multiply-add
//! instructions, which all widths but the baseline have, the bits differ from those without.
//!
//! The weight is cut into panels of [`PANEL`] rows. A panel has the rows' elements of one column
//! next to each other, so a processor multiplies them together.

use std::ops::Range;

use half::bf16;

use super::{VectorWidth, processor_width, width};

/// Number of the weight's rows in a panel.
pub const PANEL: usize = 32;
/// Number of columns that are multiplied at once, so that a panel's part stays in the first-level
/// cache.
const COLUMNS: usize = 256;
/// Number of rows of `x` that are multiplied at once, so that their part stays in the second-level
/// cache.
const ROWS: usize = 256;

/// Largest number of rows of `x` that stay in the cache completely. Then each panel is read from
/// start to end.
const FEW_ROWS: usize = 16;

/// A weight `[rows, columns]` of `f32` or `bf16` elements, packed into panels of [`PANEL`] rows.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    rows: usize,
    columns: usize,
    panels: Panels,
}

/// Panels `[columns, PANEL]`, one after another. The last panel is padded with rows of zeros.
#[derive(Clone, Debug)]
enum Panels {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl PackedWeight {
    /// Creates a weight of zeros. If `in_half` is true, elements are stored as `bf16`. Sums are in
    /// `f32`.
    pub fn zeros(rows: usize, columns: usize, in_half: bool) -> Self {
        let elements = rows.next_multiple_of(PANEL) * columns;
        let panels = match in_half {
            true => Panels::Bf16(vec![bf16::ZERO; elements]),
            false => Panels::F32(vec![0.0; elements]),
        };
        Self {
            rows,
            columns,
            panels,
        }
    }

    /// Sets the rows from row `first` on to `values`, which are row-major. Rounds them to `bf16` if
    /// the weight stores `bf16`.
    ///
    /// # Panics
    ///
    /// If `values` is not a whole number of rows, or has rows beyond the last one.
    pub fn set_rows(&mut self, first: usize, values: &[f32]) {
        let Self {
            rows,
            columns,
            panels,
        } = self;
        let columns = *columns;
        let count = values.len() / columns.max(1);
        assert!(
            count * columns == values.len() && first + count <= *rows,
            "rows of the weight"
        );
        match panels {
            Panels::F32(all) => set(all, columns, first, values, |value| value),
            Panels::Bf16(all) => set(all, columns, first, values, bf16::from_f32),
        }
    }

    /// Copies row `row` to `out`.
    ///
    /// # Panics
    ///
    /// If there is no such row, or the length of `out` is not the number of columns.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.rows && out.len() == self.columns,
            "row {row} of {}",
            self.rows
        );

        let start = row / PANEL * PANEL * self.columns + row % PANEL;
        let out = out.iter_mut();

        match &self.panels {
            Panels::F32(all) => {
                out.zip(all[start..].iter().step_by(PANEL))
                    .for_each(|(to, from)| *to = *from);
            }
            Panels::Bf16(all) => {
                out.zip(all[start..].iter().step_by(PANEL))
                    .for_each(|(to, from)| *to = from.value());
            }
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of panels.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Computes `x wᵀ` for the range `panels` of the weight's panels, on the calling thread. `x` is
    /// `[m, columns]`, and `out` is `[panels, m, PANEL]`.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit each other, or a panel does not exist.
    pub fn multiply(&self, x: &[f32], panels: Range<usize>, out: &mut [f32]) {
        self.multiply_by(width(), x, panels, out);
    }

    /// Computes [`multiply`](Self::multiply) with the vector instructions of `width`.
    fn multiply_by(&self, width: VectorWidth, x: &[f32], panels: Range<usize>, out: &mut [f32]) {
        let m = x.len().checked_div(self.columns).unwrap_or(0);
        assert!(
            x.len() == m * self.columns,
            "rows of {} columns",
            self.columns
        );
        assert_eq!(
            out.len(),
            panels.len() * m * PANEL,
            "a result of whole panels"
        );

        let elements = panels.start * PANEL * self.columns..panels.end * PANEL * self.columns;
        match &self.panels {
            Panels::F32(all) => dispatch(width, &all[elements], x, self.columns, out),
            Panels::Bf16(all) => dispatch(width, &all[elements], x, self.columns, out),
        }
    }
}

/// Writes rows to the panels, panel by panel, so that writes are sequential.
fn set<T>(
    panels: &mut [T],
    columns: usize,
    first: usize,
    values: &[f32],
    convert: impl Fn(f32) -> T,
) {
    let count = values.len() / columns.max(1);
    let mut row = first;
    while row < first + count {
        let end = (first + count).min((row / PANEL + 1) * PANEL);
        let values = &values[(row - first) * columns..(end - first) * columns];
        let panel = &mut panels[row / PANEL * PANEL * columns..][..PANEL * columns];

        for (column, to) in panel.chunks_exact_mut(PANEL).enumerate() {
            let to = &mut to[row % PANEL..][..end - row];
            let from = values[column..].iter().step_by(columns);
            to.iter_mut()
                .zip(from)
                .for_each(|(to, value)| *to = convert(*value));
        }
        row = end;
    }
}

/// An element type in which a weight is stored.
trait WeightElement: Copy {
    fn value(self) -> f32;
}

impl WeightElement for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }
}

impl WeightElement for bf16 {
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Multiplies with the vector instructions of `width`, which the processor has.
fn dispatch<T: WeightElement>(
    width: VectorWidth,
    weight: &[T],
    x: &[f32],
    columns: usize,
    out: &mut [f32],
) {
    assert!(width <= processor_width(), "instructions of {width}");
    #[cfg(target_arch = "x86_64")]
    match width {
        VectorWidth::Baseline => blocks::<T, 2, false>(weight, x, columns, out),
        // SAFETY: the processor has these instructions.
        VectorWidth::Avx2 => unsafe { with_avx2(weight, x, columns, out) },
        // SAFETY: the same.
        VectorWidth::Avx512 => unsafe { with_avx512(weight, x, columns, out) },
    }

    // Others have the fused instruction always.
    #[cfg(not(target_arch = "x86_64"))]
    blocks::<T, 4, true>(weight, x, columns, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512<T: WeightElement>(weight: &[T], x: &[f32], columns: usize, out: &mut [f32]) {
    blocks::<T, 4, true>(weight, x, columns, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<T: WeightElement>(weight: &[T], x: &[f32], columns: usize, out: &mut [f32]) {
    blocks::<T, 3, true>(weight, x, columns, out);
}

/// Multiplies in blocks of rows and columns, with `TILE` rows of `x` at a time.
#[inline(always)]
fn blocks<T: WeightElement, const TILE: usize, const FUSED: bool>(
    weight: &[T],
    x: &[f32],
    columns: usize,
    out: &mut [f32],
) {
    let m = x.len() / columns.max(1);
    for rows in (0..m).step_by(ROWS).map(|start| start..m.min(start + ROWS)) {
        // Few rows of `x` stay in the cache as a whole.
        let run = if m <= FEW_ROWS { columns } else { COLUMNS };
        for start in (0..columns).step_by(run) {
            let panels = weight
                .chunks_exact(columns * PANEL)
                .zip(out.chunks_exact_mut(m * PANEL));
            for (panel, out) in panels {
                for first in (start..columns.min(start + run)).step_by(COLUMNS) {
                    let (panel, _) = panel[first * PANEL..].as_chunks::<PANEL>();
                    let panel = &panel[..COLUMNS.min(columns - first)];
                    let (out, _) = out.as_chunks_mut::<PANEL>();

                    let is_first = first == 0;

                    let mut row = rows.start;
                    while row + TILE <= rows.end {
                        let x = &x[row * columns + first..];
                        tile::<T, TILE, FUSED>(panel, x, columns, &mut out[row..], is_first);
                        row += TILE;
                    }
                    while row < rows.end {
                        let x = &x[row * columns + first..];
                        tile::<T, 1, FUSED>(panel, x, columns, &mut out[row..], is_first);
                        row += 1;
                    }
                }
            }
        }
    }
}

/// Adds the products of `TILE` rows of `x` and a panel's columns to the rows of `out`. If
/// `is_first` is true, overwrites the rows instead.
#[inline(always)]
fn tile<T: WeightElement, const TILE: usize, const FUSED: bool>(
    panel: &[[T; PANEL]],
    x: &[f32],
    stride: usize,
    out: &mut [[f32; PANEL]],
    is_first: bool,
) {
    let mut sums = [[0.0f32; PANEL]; TILE];
    let rows: [&[f32]; TILE] = std::array::from_fn(|row| &x[row * stride..][..panel.len()]);

    for (column, weights) in panel.iter().enumerate() {
        let weights: [f32; PANEL] = std::array::from_fn(|at| weights[at].value());
        for (sums, row) in sums.iter_mut().zip(&rows) {
            let x = row[column];
            for (sum, weight) in sums.iter_mut().zip(&weights) {
                *sum = if FUSED {
                    x.mul_add(*weight, *sum)
                } else {
                    *sum + x * *weight
                };
            }
        }
    }

    for (out, sums) in out.iter_mut().zip(&sums) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if is_first { *sum } else { *out + *sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::width::widths;
    use super::*;

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7919 + seed * 104_729) % 1013) as f32 / 507.0 - 1.0)
            .collect()
    }

    /// Returns `x wᵀ` `[m, rows]`, computed in two parts.
    fn product(weight: &PackedWeight, x: &[f32], m: usize) -> Vec<f32> {
        let mut parts = vec![f32::NAN; weight.panels() * m * PANEL];
        let middle = weight.panels() / 2;
        let (left, right) = parts.split_at_mut(middle * m * PANEL);
        weight.multiply(x, 0..middle, left);
        weight.multiply(x, middle..weight.panels(), right);
        let at = |i: usize| {
            let (row, column) = (i / weight.rows(), i % weight.rows());
            parts[(column / PANEL * m + row) * PANEL + column % PANEL]
        };
        (0..m * weight.rows()).map(at).collect()
    }

    fn packed(rows: usize, columns: usize, in_half: bool) -> (PackedWeight, Vec<f32>) {
        let values = numbers(rows * columns, 3);
        let mut weight = PackedWeight::zeros(rows, columns, in_half);
        let half = rows / 2;
        weight.set_rows(half, &values[half * columns..]);
        weight.set_rows(0, &values[..half * columns]);
        let rounded = |value: f32| {
            if in_half {
                bf16::from_f32(value).to_f32()
            } else {
                value
            }
        };
        (weight, values.into_iter().map(rounded).collect())
    }

    #[test]
    fn products_equal_sums_in_double_precision() {
        for (m, rows, columns) in [
            (1, 1, 1),
            (1, 33, 700),
            (9, 70, 257),
            (19, 64, 40),
            (300, 5, 9),
        ] {
            for in_half in [false, true] {
                let (weight, values) = packed(rows, columns, in_half);
                let x = numbers(m * columns, 1);
                let found = product(&weight, &x, m);
                for (at, found) in found.iter().enumerate() {
                    let (x, w) = (&x[at / rows * columns..], &values[at % rows * columns..]);
                    let terms = x.iter().zip(w).take(columns);
                    let terms = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let (expected, size) = terms.fold((0.0, 0.0), |sums, term| {
                        (sums.0 + term, sums.1 + term.abs())
                    });
                    let off = (f64::from(*found) - expected).abs();
                    assert!(
                        off < 4e-6 * size,
                        "{m} {rows} {columns}: {found} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_have_the_same_bits_whatever_their_number() {
        let (rows, columns) = (100, 613);
        for in_half in [false, true] {
            let (weight, _) = packed(rows, columns, in_half);
            let x = numbers(300 * columns, 5);
            let whole = product(&weight, &x, 300);
            for (first, m) in [(0, 1), (299, 1), (17, 2), (40, 7), (100, 64), (3, 297)] {
                let part = product(&weight, &x[first * columns..(first + m) * columns], m);
                let expected = &whole[first * rows..(first + m) * rows];
                let same = part
                    .iter()
                    .zip(expected)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "rows {first} to {}", first + m);
            }
        }
    }

    #[test]
    fn rows_are_those_that_were_set() {
        let (rows, columns) = (75, 9);
        for in_half in [false, true] {
            let (weight, values) = packed(rows, columns, in_half);
            for (row, values) in values.chunks_exact(columns).enumerate() {
                let mut found = vec![f32::NAN; columns];
                weight.row(row, &mut found);
                assert_eq!(found, values, "row {row}");
            }
        }
    }

    #[test]
    fn empty_products_have_no_elements() {
        let (weight, _) = packed(3, 4, false);
        weight.multiply(&[], 0..1, &mut []);
        PackedWeight::zeros(0, 5, true).multiply(&[0.0; 5], 0..0, &mut []);
    }

    #[test]
    fn widths_with_fused_products_give_the_same_bits() {
        for (m, rows, columns, in_half) in [(1, 33, 700, false), (9, 70, 257, true)] {
            let (weight, _) = packed(rows, columns, in_half);
            let x = numbers(m * columns, 1);
            let run = |width| {
                let mut out = vec![f32::NAN; weight.panels() * m * PANEL];
                weight.multiply_by(width, &x, 0..weight.panels(), &mut out);
                out
            };
            let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();

            let plain = run(VectorWidth::Baseline);
            let fused: Vec<_> = widths().skip(1).map(run).collect();
            for pair in fused.windows(2) {
                assert_eq!(bits(&pair[0]), bits(&pair[1]));
            }
            for (plain, fused) in plain.iter().zip(fused.iter().flatten()) {
                assert!((plain - fused).abs() < 1e-3, "{plain} {fused}");
            }
        }
    }
}
