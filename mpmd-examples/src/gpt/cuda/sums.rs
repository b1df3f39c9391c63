//! Sums of columns and of squares on a CUDA device, in an order that follows from the sizes alone.

use mpmd_core::cuda::{Grid, Part};
use mpmd_core::prelude::*;

use super::device::{Device, size};

/// Columns and rows of a block of the kernel `column_sums`.
const COLUMNS: usize = 32;
const ROW_LANES: usize = 8;

/// Rows that a block sums up at least, and most parts: so that large arrays keep all of a device busy.
const PART_ROWS: usize = 128;
const MOST_PARTS: usize = 64;

/// Threads of a block that sums up.
const SUM_THREADS: usize = 256;

/// Elements that a block sums up at least, and most of them for an array.
const PART_ELEMENTS: usize = 16 << 10;
const MOST_SUM_BLOCKS: usize = 512;

/// *Adds* to `d` the sum of the rows of `x`, `[rows, columns]`; with `weighted`, `(d, weights)`, also the sum of the
/// products of both to that `d`.
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
    let grid = Grid { blocks: (tiles, parts as u32, 1), ..Grid::new(1, (COLUMNS * ROW_LANES) as u32) };
    device.launch(
        "column_sums",
        grid,
        &[
            sums.into(),
            products.into(),
            x.into(),
            // Where there is none it is not looked at.
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

/// `sum` is the sum of the squares of the floats in `x`, a double.
pub(crate) fn square_sum(device: Device<'_>, sum: Part<'_>, x: Part<'_>, elements: usize) -> Result<()> {
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

/// `sum` is the sum of the doubles in `x`.
pub(crate) fn sum_doubles(device: Device<'_>, sum: Part<'_>, x: Part<'_>, elements: usize) -> Result<()> {
    let grid = Grid::new(1, SUM_THREADS as u32);
    device.launch("sum_doubles", grid, &[sum.into(), x.into(), elements.into()])
}

/// Sums that are numbered by `which`, in ascending order, to `picked`, one after another; or with `back` from there
/// to their places in `sums`.
pub(crate) fn pick_sums(
    device: Device<'_>,
    picked: Part<'_>,
    sums: Part<'_>,
    which: &[usize],
    back: bool,
) -> Result<()> {
    let mut done = 0;
    while let Some(first) = which.get(done) {
        // A launch for each 64 sums that there are.
        let start = first / 64 * 64;
        let here: Vec<usize> = which[done..].iter().copied().take_while(|sum| *sum < start + 64).collect();
        let mask = here.iter().fold(0u64, |mask, sum| mask | 1 << (sum - start));
        let last = here.last().map_or(0, |sum| sum - start);
        let args = [picked.at(done).into(), sums.at(start).into(), mask.into(), u32::from(back).into()];
        device.launch("pick_sums", Grid::new(1, last as u32 + 1), &args)?;
        done += here.len();
    }
    Ok(())
}
