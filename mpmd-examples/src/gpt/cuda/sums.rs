//! Sums of columns and of squares on a CUDA device. The order of addition depends only on the
//! sizes.

use mpmd::cuda::{Grid, Part};
use mpmd::prelude::*;

use super::device::{Device, size};

/// Columns and rows of a block of the kernel `column_sums`.
const COLUMNS: usize = 32;
const ROW_LANES: usize = 8;

/// Minimum number of rows that a block sums up, and maximum number of parts. Large arrays then keep
/// the whole device busy.
const PART_ROWS: usize = 128;
const MOST_PARTS: usize = 64;

/// Threads of a block that computes a sum.
const SUM_THREADS: usize = 256;

/// Minimum number of elements that a block sums up, and maximum number of blocks for an array.
const PART_ELEMENTS: usize = 16 << 10;
const MOST_SUM_BLOCKS: usize = 512;

/// *Adds* the sum of the rows of `x`, `[rows, columns]`, to `d`. If `weighted` is a pair `(d,
/// weights)`, also adds the sum of the rows of `x * weights`, element by element, to the pair's
/// `d`.
pub(crate) fn add_column_sums(
    device: Device<'_>,
    (rows, columns): (usize, usize),
    d: Part<'_>,
    x: Part<'_>,
    weighted: Option<(Part<'_>, Part<'_>)>,
) -> Result<()> {
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let part = rows.div_ceil(MOST_PARTS).max(PART_ROWS);
    let parts = rows.div_ceil(part);
    let sums = device.floats(parts * columns)?;
    let products = weighted.map(|_| device.floats(parts * columns)).transpose()?;
    let sums = Part::from(&sums);
    let products = products.as_ref().map_or(sums, Part::from);
    let (tiles, columns_of) = (size(columns.div_ceil(COLUMNS))?, size(columns)?);
    let grid =
        Grid { blocks: (tiles, parts as u32, 1), ..Grid::new(1, (COLUMNS * ROW_LANES) as u32) };
    device.launch(
        "column_sums",
        grid,
        &[
            sums.into(),
            products.into(),
            x.into(),
            // The kernel does not read it if there are no weights.
            weighted.map_or(x, |(_, weights)| weights).into(),
            u32::from(weighted.is_some()).into(),
            size(rows)?.into(),
            columns_of.into(),
            size(part)?.into(),
        ],
    )?;
    let add = |d: Part<'_>, parts_of: Part<'_>| {
        let args = [d.into(), parts_of.into(), (parts as u32).into(), columns_of.into()];
        device.elements("add_parts", columns, &args)
    };
    add(d, sums)?;
    weighted.map_or(Ok(()), |(d, _)| add(d, products))
}

/// Issues the sum of the squares of the `elements` floats in `x`. `sum`, one double, gets the
/// result.
pub(crate) fn square_sum(
    device: Device<'_>,
    sum: Part<'_>,
    x: Part<'_>,
    elements: usize,
) -> Result<()> {
    let blocks = elements.div_ceil(PART_ELEMENTS).clamp(1, MOST_SUM_BLOCKS);
    let grid = Grid::new(blocks as u32, SUM_THREADS as u32);
    if blocks == 1 {
        return device.launch("square_sums", grid, &[sum.into(), x.into(), elements.into()]);
    }
    let parts = device.doubles(blocks)?;
    let parts = Part::from(&parts);
    device.launch("square_sums", grid, &[parts.into(), x.into(), elements.into()])?;
    sum_doubles(device, sum, parts, blocks)
}

/// Issues the sum of the `elements` doubles in `x`. `sum`, one double, gets the result.
pub(crate) fn sum_doubles(
    device: Device<'_>,
    sum: Part<'_>,
    x: Part<'_>,
    elements: usize,
) -> Result<()> {
    let grid = Grid::new(1, SUM_THREADS as u32);
    device.launch("sum_doubles", grid, &[sum.into(), x.into(), elements.into()])
}

/// Issues a copy of the doubles of `sums` at the indices `which` to `picked`, without gaps. The
/// indices must ascend. With `back`, copies from `picked` to `sums` instead.
pub(crate) fn pick_sums(
    device: Device<'_>,
    picked: Part<'_>,
    sums: Part<'_>,
    which: &[usize],
    back: bool,
) -> Result<()> {
    let mut done = 0;
    while let Some(first) = which.get(done) {
        // One launch for each group of 64 sums.
        let start = first / 64 * 64;
        let here: Vec<usize> =
            which[done..].iter().copied().take_while(|sum| *sum < start + 64).collect();
        let mask = here.iter().fold(0u64, |mask, sum| mask | 1 << (sum - start));
        let last = here.last().map_or(0, |sum| sum - start);
        let args =
            [picked.at(done).into(), sums.at(start).into(), mask.into(), u32::from(back).into()];
        device.launch("pick_sums", Grid::new(1, last as u32 + 1), &args)?;
        done += here.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mpmd::aval::DType;

    use super::*;
    use crate::gpt::adamw;
    use crate::gpt::cuda::testing::{array, elsewhere, floats, floats_on_device, on_device};

    /// Uses enough rows for several blocks per column.
    #[test]
    fn columns_of_many_rows_are_summed() {
        if elsewhere!() {
            return;
        }
        let (rows, columns) = (300, 35);
        let (x, weights) = (floats(rows * columns, 1), floats(rows * columns, 2));
        let (plain, weighted) = (floats(columns, 3), floats(columns, 4));
        let sum = |before: &[f32], f: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let column =
                |column: usize| -> f64 { (0..rows).map(|row| f(row * columns + column)).sum() };
            before.iter().enumerate().map(|(at, before)| f64::from(*before) + column(at)).collect()
        };
        let expected = [
            sum(&plain, &|at| f64::from(x[at])),
            sum(&weighted, &|at| f64::from(x[at]) * f64::from(weights[at])),
        ];
        let inputs = vec![array(&x), array(&weights), array(&plain), array(&weighted)];
        let found = floats_on_device(inputs, &[columns; 2], move |device, x, y| {
            device.cuda().copy(x[2], y[0])?;
            device.cuda().copy(x[3], y[1])?;
            add_column_sums(device, (rows, columns), y[0], x[0], Some((y[1], x[1])))
        });
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{found}, not {expected}");
        }
    }

    #[test]
    fn squares_are_summed_in_doubles_for_any_size() {
        if elsewhere!() {
            return;
        }
        for elements in [1, 300, 2 * PART_ELEMENTS + 77] {
            let x = floats(elements, 5);
            let found = on_device(vec![array(&x)], &[(DType::F64, 1)], move |device, x, y| {
                square_sum(device, y[0], x[0], elements)
            });
            let (found, expected) = (found[0].to_vec::<f64>().unwrap()[0], adamw::square_sum(&x));
            assert!((found / expected - 1.0).abs() < 1e-12, "{found}, not {expected}");
        }
    }

    #[test]
    fn picked_sums_can_be_put_back() {
        if elsewhere!() {
            return;
        }
        let which = [0, 3, 63, 64, 65, 130, 140];
        let sums: Vec<f64> = (0..141).map(f64::from).collect();
        let outputs = [(DType::F64, which.len()), (DType::F64, sums.len())];
        let found = on_device(vec![array(&sums)], &outputs, move |device, x, y| {
            device.cuda().copy(x[0], y[1])?;
            pick_sums(device, y[0], y[1], &which, false)?;
            device.cuda().zero(y[1])?;
            pick_sums(device, y[0], y[1], &which, true)
        });
        let found: Vec<Vec<f64>> = found.iter().map(|found| found.to_vec().unwrap()).collect();
        assert_eq!(found[0], which.map(|at| at as f64));
        let expected: Vec<f64> =
            (0..141).map(|at| if which.contains(&at) { at as f64 } else { 0.0 }).collect();
        assert_eq!(found[1], expected);
    }
}
