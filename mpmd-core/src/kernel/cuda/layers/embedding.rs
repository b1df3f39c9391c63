//! Rows of a table by their indices.

use mpmd_device::cuda::kernels::EMBEDDING;

use super::{Cuda, CudaPart, LayerCall, ResultTarget, args, product};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// Number of sorted tokens whose gradients one block adds.
const CHUNK: usize = 32;

/// A lookup in a table of `entries` rows by `tokens` indices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CudaEmbedding {
    /// Number of indices.
    pub tokens: usize,
    /// Number of rows of the table.
    pub entries: usize,
    /// Length of a row.
    pub width: usize,
}

impl CudaEmbedding {
    /// Copies to `y`, `[tokens, width]`, the row of `table` for each index of u8, u32 or i64. Adds
    /// row `i` of `positions`, `[time, width]`, to each token whose number is `i` modulo `time`. An
    /// index beyond the table gives a row of NaN.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn forward<'x>(
        &self,
        cuda: &Cuda<'_>,
        table: impl Into<CudaPart<'x>>,
        indices: impl Into<CudaPart<'x>>,
        positions: Option<(CudaPart<'x>, usize)>,
        y: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let Self {
            tokens,
            entries,
            width,
        } = *self;

        let table = table.into();
        let indices = indices.into();
        let y = y.into();

        let call = LayerCall::new(cuda, "embedding", &EMBEDDING, &table)?;
        let all = product(&[tokens, width]);
        call.has(&[
            ("the table", &table, product(&[entries, width])),
            ("y", &y, all),
        ])?;

        let bytes = call.indices("the indices", &indices, tokens)?;
        let time = positions.map_or(1, |(_, time)| time.max(1));
        if let Some((positions, _)) = &positions {
            call.has(&[("the positions", positions, product(&[time, width]))])?;
        }

        call.writes(&[&y])?;
        let positions = positions.map(|(positions, _)| positions);
        let args = args![entries, width, time, table, indices, bytes, positions, y];
        call.blocks("embed", tokens, args)
    }

    /// Computes the gradient of the table, `f32`, from `d_y`, the gradient of the result. Indices
    /// beyond the table are left out. The gradient of positions is [`sum_rows`](super::sum_rows) of
    /// `d_y` as a matrix `[tokens / time, time * width]`.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, the device has no memory left, or the driver refuses
    /// the work.
    pub fn backward<'x>(
        &self,
        cuda: &Cuda<'_>,
        indices: impl Into<CudaPart<'x>>,
        d_y: impl Into<CudaPart<'x>>,
        d_table: impl Into<ResultTarget<'x>>,
    ) -> Result<()> {
        let Self {
            tokens,
            entries,
            width,
        } = *self;

        let indices = indices.into();
        let d_y = d_y.into();
        let ResultTarget {
            part: d_table,
            adds,
        } = d_table.into();

        let call = LayerCall::new(cuda, "gradient of an embedding", &EMBEDDING, &d_y)?;
        let bytes = call.indices("the indices", &indices, tokens)?;
        call.has(&[("d_y", &d_y, product(&[tokens, width]))])?;
        let table = product(&[entries, width]);
        call.has_f32(&[("d_table", &d_table, table)])?;
        call.writes(&[&d_table])?;

        if u32::try_from(tokens).is_err() {
            return call.fail(&format!("{tokens} tokens are too many"));
        }
        if !adds {
            call.over("clear", table, args![table, d_table])?;
        }

        let order = cuda.scratch(DType::U32, tokens)?;
        let args = args![tokens, indices, bytes, &order];
        call.over("sort_tokens", tokens, args)?;

        // For each chunk: the sum of its last index, and of its first one.
        let chunks = tokens.div_ceil(CHUNK);
        let open = cuda.scratch(DType::F32, product(&[chunks, 2, width]))?;
        let args = args![
            tokens, entries, width, indices, bytes, &order, d_y, &open, d_table
        ];

        call.blocks("embed_backward", chunks, args)?;
        call.blocks("embed_backward_open", chunks, args)
    }
}
