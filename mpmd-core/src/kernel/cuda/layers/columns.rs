//! Sums of the columns of a matrix.

use mpmd_device::cuda::kernels::COLUMNS;

use super::{Cuda, CudaPart, Grid, LayerCall, MatrixShape, ResultTarget, args, product};
use crate::error::{Error, Result};
use mpmd_layout::aval::DType;

/// Number of columns that a block sums.
const COLUMNS_EACH: usize = 32;
/// Number of rows that a block reads at the same time.
const ROWS_EACH: u32 = 8;
/// Maximum number of row chunks.
const CHUNKS: usize = 64;

/// A division of a matrix's rows into chunks. Each chunk is summed separately; then the sums are
/// added in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowChunks {
    /// Number of rows in a chunk. The last chunk may have fewer.
    pub(super) rows: usize,
    pub(super) count: usize,
}

impl RowChunks {
    pub(super) fn of(rows: usize) -> Self {
        let each = rows.div_ceil(CHUNKS).max(2 * ROWS_EACH as usize);
        Self {
            rows: each,
            count: rows.div_ceil(each),
        }
    }

    /// Returns a launch grid: blocks of [`COLUMNS_EACH`] columns along x, chunks along y.
    pub(super) fn grid(self, width: usize) -> Grid {
        // At most `CHUNKS` along y, and fewer than 2^31 along x for any array that fits a device.
        let blocks = (width.div_ceil(COLUMNS_EACH) as u32, self.count as u32, 1);
        Grid {
            blocks,
            threads: (COLUMNS_EACH as u32, ROWS_EACH, 1),
            shared_bytes: 0,
        }
    }
}

/// Computes the sum of each column of `x`, `[rows, width]`. The sums are `f32`, as for the gradient
/// of a bias.
///
/// # Errors
///
/// If lengths or dtypes do not fit, the device has no memory left, or the driver refuses the work.
pub fn sum_rows<'x>(
    cuda: &Cuda<'_>,
    shape: MatrixShape,
    x: impl Into<CudaPart<'x>>,
    sums: impl Into<ResultTarget<'x>>,
) -> Result<()> {
    let x = x.into();
    let call = LayerCall::new(cuda, "sum of rows", &COLUMNS, &x)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("x", &x, all)])?;

    let chunks = RowChunks::of(rows);
    let parts = cuda.scratch(DType::F32, product(&[chunks.count, width]))?;
    if all > 0 {
        let args = args![rows, width, chunks.rows, x, &parts];
        call.launch("column_sums", chunks.grid(width), args)?;
    }

    finish(&call, chunks, width, parts.at(0), sums.into())
}

/// Adds the sums of chunks, `[chunks, width]`, in order.
pub(super) fn finish(
    call: &LayerCall<'_>,
    chunks: RowChunks,
    width: usize,
    parts: CudaPart<'_>,
    ResultTarget { part, adds }: ResultTarget<'_>,
) -> Result<()> {
    call.has_f32(&[("the sums", &part, width)])?;
    call.writes(&[&part])?;
    if width == 0 {
        return Ok(());
    }

    let source = COLUMNS
        .of(call.dtype)
        .ok_or_else(|| Error::kernel("sums of no float"))?;
    let args = args![chunks.count, width, parts, part, u32::from(adds)];
    call.cuda
        .launch(source, "add_chunks", Grid::over(width), args)
}
