//! The product of a weight gradient, which cuBLAS adds to the gradient so far: candle has no
//! product that adds.

use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{DType, Tensor};
use mpmd_core::Error;
use mpmd_core::Result;
use mpmd_core::cuda::CudaPart;

use super::OnCuda;

impl OnCuda<'_> {
    /// Adds `d_yᵀ x` to `sums`. `d_y` is `[rows, outputs]` and `x` is `[rows, inputs]`, both f32 or
    /// both bf16; `sums` is f32 `[outputs, inputs]`. All are contiguous.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other, or cuBLAS fails.
    pub(super) fn add_product(&self, d_y: &Tensor, x: &Tensor, sums: CudaPart<'_>) -> Result<()> {
        let sizes = (d_y.dims2().ok()).zip(x.dims2().ok());
        let factors = match (d_y.dtype(), x.dtype()) {
            (DType::F32, DType::F32) => Some(sys::cudaDataType_t::CUDA_R_32F),
            (DType::BF16, DType::BF16) => Some(sys::cudaDataType_t::CUDA_R_16BF),
            _ => None,
        };
        let Some((((rows, outputs), (x_rows, inputs)), factors)) = sizes.zip(factors) else {
            return Err(Error::kernel(
                "the product of a weight gradient is of f32 or bf16",
            ));
        };
        let to = self.compute.address(sums)?;
        if rows != x_rows || sums.count() < outputs * inputs {
            return Err(Error::kernel(
                "the matrices of a weight gradient do not fit each other",
            ));
        }
        if rows * outputs * inputs == 0 {
            return Ok(());
        }
        let size = |size: usize| {
            i32::try_from(size).map_err(|_| Error::kernel(format!("{size} rows are too many")))
        };
        let rows = size(rows)?;
        let outputs = size(outputs)?;
        let inputs = size(inputs)?;
        // cuBLAS takes TF32 for factors of f32 alone.
        let is_single = d_y.dtype() == DType::F32;
        let compute = match is_single && gemm_reduced_precision_f32() {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let f32s = sys::cudaDataType_t::CUDA_R_32F;
        let one = 1f32;
        let blas = self.device.cublas_handle();
        self.with([d_y, x], |[d_y, x]| {
            let [d_y, x] = [self.compute.address(d_y)?, self.compute.address(x)?];
            // SAFETY: the handle issues to candle's stream, whose context `enter` has made current.
            // A row-major matrix is a column-major one transposed: so `sumsᵀ += xᵀ d_y` is
            // computed. All three have as many elements as their sizes say, and cuBLAS reads the
            // factors before it returns.
            let issued = unsafe {
                result::gemm_ex(
                    *blas.handle(),
                    sys::cublasOperation_t::CUBLAS_OP_N,
                    sys::cublasOperation_t::CUBLAS_OP_T,
                    inputs,
                    outputs,
                    rows,
                    (&raw const one).cast(),
                    x as *const _,
                    factors,
                    inputs,
                    d_y as *const _,
                    factors,
                    outputs,
                    (&raw const one).cast(),
                    to as *mut _,
                    f32s,
                    inputs,
                    compute,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
            issued.map_err(|error| Error::kernel(format!("a weight gradient by cuBLAS: {error}")))
        })
    }
}
