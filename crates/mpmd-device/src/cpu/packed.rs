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

/// Largest number of values of `x` that stay in the second-level cache completely. Then each panel
/// is read from start to end.
const FEW_VALUES: usize = 1 << 16;

/// Largest number of tiles that read a block in place. For more tiles the block is converted once
/// to contiguous `f32` elements.
const MANY_TILES: usize = 2;

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
        VectorWidth::Baseline => blocks::<T, 2, 16, false>(weight, x, columns, out),
        // SAFETY: the processor has these instructions.
        VectorWidth::Avx2 => unsafe { with_avx2(weight, x, columns, out) },
        // SAFETY: the same.
        VectorWidth::Avx512 => unsafe { with_avx512(weight, x, columns, out) },
    }

    // Others have the fused instruction always.
    #[cfg(not(target_arch = "x86_64"))]
    blocks::<T, 6, 16, true>(weight, x, columns, out);
}

/// The tile's sums take 24 of 32 registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512<T: WeightElement>(weight: &[T], x: &[f32], columns: usize, out: &mut [f32]) {
    blocks::<T, 12, 32, true>(weight, x, columns, out);
}

/// The tile's sums take 12 of 16 registers. A few rows are multiplied by whole panels, so that
/// memory is read from start to end.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<T: WeightElement>(weight: &[T], x: &[f32], columns: usize, out: &mut [f32]) {
    if x.len() <= 3 * columns {
        blocks::<T, 3, 32, true>(weight, x, columns, out);
    } else {
        blocks::<T, 6, 16, true>(weight, x, columns, out);
    }
}

/// Multiplies in blocks of rows and columns. A tile has at most `TILE` rows of `x`, and `LANES`
/// rows of a panel.
#[inline(always)]
fn blocks<T: WeightElement, const TILE: usize, const LANES: usize, const FUSED: bool>(
    weight: &[T],
    x: &[f32],
    columns: usize,
    out: &mut [f32],
) {
    let m = x.len() / columns.max(1);
    let mut unpacked = [[0.0; LANES]; COLUMNS];
    for rows in (0..m).step_by(ROWS).map(|start| start..m.min(start + ROWS)) {
        // Few rows of `x` stay in the cache as a whole.
        let run = if m * columns <= FEW_VALUES {
            columns
        } else {
            COLUMNS
        };
        for start in (0..columns).step_by(run) {
            let panels = weight
                .chunks_exact(columns * PANEL)
                .zip(out.chunks_exact_mut(m * PANEL));
            for (panel, out) in panels {
                for first in (start..columns.min(start + run)).step_by(COLUMNS) {
                    let (panel, _) = panel[first * PANEL..].as_chunks::<PANEL>();
                    let width = COLUMNS.min(columns - first);
                    let skip = if run == columns { width } else { columns };
                    let block = PanelBlock {
                        columns: &panel[..width],
                        next: panel.as_ptr().wrapping_add(skip).cast(),
                        is_first: first == 0,
                    };
                    let x = XColumns {
                        values: &x[first..],
                        stride: columns,
                    };
                    let (out, _) = out.as_chunks_mut::<PANEL>();
                    tiles::<T, TILE, LANES, FUSED>(&block, &x, rows.clone(), &mut unpacked, out);
                }
            }
        }
    }
}

/// Consecutive columns of a panel.
struct PanelBlock<'a, T> {
    columns: &'a [[T; PANEL]],
    /// The beginning of the block that is multiplied next.
    next: *const u8,
    /// True if the block has the panel's first column.
    is_first: bool,
}

/// The columns of `x` that belong to a block. The elements of row `i` begin at `i * stride`.
struct XColumns<'a> {
    values: &'a [f32],
    stride: usize,
}

/// Multiplies the rows `rows` of `x` by a block, in tiles of about the same number of rows.
/// `unpacked` is scratch memory.
#[inline(always)]
fn tiles<T: WeightElement, const TILE: usize, const LANES: usize, const FUSED: bool>(
    block: &PanelBlock<'_, T>,
    x: &XColumns<'_>,
    rows: Range<usize>,
    unpacked: &mut [[f32; LANES]; COLUMNS],
    out: &mut [[f32; PANEL]],
) {
    let count = rows.len().div_ceil(TILE);
    // The whole of the next block is fetched while this one is multiplied.
    let mut ahead = Ahead::new(block, count * PANEL / LANES);
    for part in 0..PANEL / LANES {
        let columns = block.columns.iter().map(|weights| {
            let (parts, _) = weights.as_chunks::<LANES>();
            &parts[part]
        });
        let is_unpacked = count > MANY_TILES;
        if is_unpacked {
            for (to, from) in unpacked.iter_mut().zip(columns.clone()) {
                *to = values(from);
            }
        }

        for tile in 0..count {
            let first = rows.start + rows.len() * tile / count;
            let end = rows.start + rows.len() * (tile + 1) / count;
            let x = XColumns {
                values: &x.values[first * x.stride..],
                ..*x
            };
            let to = &mut out[first..end];
            seq_macro::seq!(N in 1..=12 {
                match end - first {
                    #(N if N <= TILE => {
                        let sums: [[f32; LANES]; N] = if is_unpacked {
                            let columns = unpacked[..block.columns.len()].iter();
                            sums_of_tile::<_, N, LANES, FUSED>(columns, &x, &mut ahead)
                        } else {
                            sums_of_tile::<_, N, LANES, FUSED>(columns.clone(), &x, &mut ahead)
                        };
                        store(&sums, part, block.is_first, to);
                    })*
                    _ => unreachable!("a tile of at most {TILE} rows"),
                }
            });
        }
    }
}

/// Returns the sums of the products of the first `TILE` rows of `x`, and `LANES` rows of a block
/// with these columns.
#[inline(always)]
fn sums_of_tile<'a, T, const TILE: usize, const LANES: usize, const FUSED: bool>(
    columns: impl ExactSizeIterator<Item = &'a [T; LANES]>,
    x: &XColumns<'_>,
    ahead: &mut Ahead,
) -> [[f32; LANES]; TILE]
where
    T: WeightElement + 'a,
{
    let mut sums = [[0.0f32; LANES]; TILE];
    let rows: [&[f32]; TILE] =
        std::array::from_fn(|row| &x.values[row * x.stride..][..columns.len()]);

    for (column, weights) in columns.enumerate() {
        ahead.fetch();
        let weights = values(weights);
        for (sums, row) in sums.iter_mut().zip(&rows) {
            // SAFETY: each row was cut to the number of columns above.
            let x = unsafe { *row.get_unchecked(column) };
            for (sum, weight) in sums.iter_mut().zip(&weights) {
                *sum = if FUSED {
                    x.mul_add(*weight, *sum)
                } else {
                    *sum + x * *weight
                };
            }
        }
    }
    sums
}

/// Returns the values of elements. A loop, since `array::map` is not always inlined.
#[inline(always)]
fn values<T: WeightElement, const LANES: usize>(elements: &[T; LANES]) -> [f32; LANES] {
    let mut values = [0.0; LANES];
    for (value, element) in values.iter_mut().zip(elements) {
        *value = element.value();
    }
    values
}

/// Adds sums to part `part` of the rows of `out`. In the panel's first block, overwrites it
/// instead.
#[inline(always)]
fn store<const LANES: usize>(
    sums: &[[f32; LANES]],
    part: usize,
    is_first: bool,
    out: &mut [[f32; PANEL]],
) {
    for (out, sums) in out.iter_mut().zip(sums) {
        let (parts, _) = out.as_chunks_mut::<LANES>();
        for (out, sum) in parts[part].iter_mut().zip(sums) {
            *out = if is_first { *sum } else { *out + *sum };
        }
    }
}

/// Fetches the memory of the next block into the second-level cache, in equal steps. The processor
/// itself fetches ahead only while a block is read for the first time, so memory would rest while
/// further tiles are multiplied.
struct Ahead {
    next: *const u8,
    /// Bytes from step to step.
    step: usize,
}

impl Ahead {
    /// `tiles` is the number of times that the block is read.
    #[inline(always)]
    fn new<T>(block: &PanelBlock<'_, T>, tiles: usize) -> Self {
        Self {
            next: block.next,
            step: size_of::<[T; PANEL]>().div_ceil(tiles),
        }
    }

    #[inline(always)]
    fn fetch(&mut self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch may name any address: it accesses no memory that the program could
            // observe, and does not fault.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(self.next.cast());
            }
            self.next = self.next.wrapping_add(self.step);
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
