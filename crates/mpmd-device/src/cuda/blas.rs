//! Matrix products with cuBLAS.

use std::sync::Arc;

use cudarc::cublas::sys;
use mpmd_base::block::Mutex;
use mpmd_memory::OwnedBuffer;
use mpmd_memory::{DevicePlace, Pool};

use super::calls::{self, CallStatus, static_text};
use super::compile::Architecture;
use super::context::DeviceContext;
use super::descriptions::{CublasProduct, Operand};
use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::RawStream;
use crate::cuda::work::{Math, Types};
use mpmd_layout::aval::DType;

/// Workspace sizes that cuBLAS's documentation recommends: for compute capability 9.0 and later,
/// then for older devices.
const WORKSPACE_BYTES: [usize; 2] = [32 << 20, 4 << 20];

/// cuBLAS on one device: a handle for the compute stream, and a workspace, so that calls need not
/// allocate memory.
pub(super) struct Blas {
    handle: Mutex<BlasHandle>,
}

struct BlasHandle {
    raw: sys::cublasHandle_t,
    context: Arc<DeviceContext>,
    /// cuBLAS's scratch memory on the device. It returns to its pool after the handle is destroyed.
    /// Destroying the handle waits for the device.
    #[expect(dead_code, reason = "held for its drop")]
    workspace: OwnedBuffer,
}

// SAFETY: a handle may be used by any thread that has bound its context, by one at a time.
unsafe impl Send for BlasHandle {}

impl Blas {
    /// Creates the handle and allocates the workspace. May wait for the device, so call it during
    /// warm-up.
    ///
    /// # Errors
    ///
    /// If cuBLAS is missing or fails, or the pool has no memory for the workspace.
    pub(super) fn new(
        context: &Arc<DeviceContext>,
        stream: &RawStream,
        architecture: Architecture,
        pool: &Pool,
    ) -> Result<Self, CudaError> {
        const DOING: &str = "making cuBLAS ready";
        super::driver::cublas().map_err(|error| CudaError::new(DOING, "", error.to_string()))?;
        let bytes = WORKSPACE_BYTES[usize::from(architecture.major() < 9)];
        let workspace = pool.allocate(bytes).map_err(|error| {
            CudaError::new(
                DOING,
                "",
                format!("no memory for cuBLAS's workspace: {error}"),
            )
        })?;
        let address = workspace.device().map_or(0, |place| place.address);

        context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is bound, and there is room for the handle.
        check(DOING, unsafe { calls::cublasCreate_v2(&raw mut raw) })?;

        let handle = BlasHandle {
            raw,
            context: context.clone(),
            workspace,
        };

        // SAFETY: the handle and the stream are alive and of this context. The workspace lives as
        // long as the handle and is aligned to 256 bytes, as all device segments are. Only work of
        // this stream uses it. The order matters: setting the stream resets the workspace.
        unsafe {
            check(
                DOING,
                calls::cublasSetStream_v2(raw, stream.handle().cast()),
            )?;
            check(
                DOING,
                calls::cublasSetWorkspace_v2(
                    raw,
                    std::ptr::with_exposed_provenance_mut(address as usize),
                    bytes,
                ),
            )?;
            // Sums of half-precision products stay in f32 even if cuBLAS splits a product.
            let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            check(DOING, calls::cublasSetMathMode(raw, mode))?;
        }

        Ok(Self {
            handle: Mutex::new(handle),
        })
    }

    /// Issues `C = alpha A B + beta C` to the handle's stream, without waiting for its result. `[a,
    /// b, c]` is the memory of the row-major matrices A, B and C.
    pub(super) fn product(
        &self,
        product: &CublasProduct,
        [a, b, c]: [DevicePlace; 3],
    ) -> Result<(), CudaError> {
        let CublasProduct {
            m,
            n,
            k,
            first,
            second,
            result,
            batch,
            types,
            ..
        } = *product;

        let handle = self.handle.lock();
        let [factor, into] = [types.factors, types.result].map(data_type);
        let compute = compute_type(types);

        // The scalars must have the type of the sums.
        let singles = [product.alpha as f32, product.beta as f32];
        let doubles = [product.alpha, product.beta];
        let scalars = if types.factors == DType::F64 {
            doubles
                .each_ref()
                .map(|scalar| std::ptr::from_ref(scalar).cast())
        } else {
            singles
                .each_ref()
                .map(|scalar| std::ptr::from_ref(scalar).cast())
        };

        let algorithm = sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT;
        let at = |place: DevicePlace| std::ptr::with_exposed_provenance_mut(place.address as usize);
        let [first_at, second_at, result_at] = [b, a, c].map(at);
        let [first_op, second_op] = [first, second].map(operation);

        // SAFETY: the handle is alive, and the issuing thread has bound its context. Sizes were
        // checked against the lengths of the places (`Gemm::product`). The scalars live until the
        // call returns, which reads them.
        let issued = unsafe {
            if batch == 1 {
                calls::cublasGemmEx(
                    handle.raw,
                    first_op,
                    second_op,
                    m,
                    n,
                    k,
                    scalars[0],
                    first_at,
                    factor,
                    first.leading,
                    second_at,
                    factor,
                    second.leading,
                    scalars[1],
                    result_at,
                    into,
                    result.leading,
                    compute,
                    algorithm,
                )
            } else {
                calls::cublasGemmStridedBatchedEx(
                    handle.raw,
                    first_op,
                    second_op,
                    m,
                    n,
                    k,
                    scalars[0],
                    first_at,
                    factor,
                    first.leading,
                    first.stride,
                    second_at,
                    factor,
                    second.leading,
                    second.stride,
                    scalars[1],
                    result_at,
                    into,
                    result.leading,
                    result.stride,
                    batch,
                    compute,
                    algorithm,
                )
            }
        };

        check("multiplying matrices", issued)
    }
}

impl Drop for BlasHandle {
    fn drop(&mut self) {
        let Ok(_visit) = self.context.visit() else {
            return;
        };
        // SAFETY: made in `Blas::new`, destroyed once. It waits for the device.
        if let Err(error) = check("closing cuBLAS", unsafe {
            calls::cublasDestroy_v2(self.raw)
        }) {
            tracing::debug!(%error, "closing cuBLAS");
        }
    }
}

impl Gpu {
    /// Issues a matrix product to the device's compute stream. `stream` must be this stream, since
    /// cuBLAS's handle issues to no other. `places` has the memory of both factors and of the
    /// result. Creates the handle if no warm-up has created it.
    ///
    /// # Errors
    ///
    /// If `stream` is another stream, or cuBLAS is missing or fails.
    pub fn gemm(
        &self,
        stream: &RawStream,
        pool: &Pool,
        product: &CublasProduct,
        places: [DevicePlace; 3],
    ) -> Result<(), CudaError> {
        if stream.raw != self.compute().stream().raw {
            return Err(CudaError::new(
                "multiplying matrices on another library's stream",
                "",
                "cuBLAS issues to the device's own stream alone: call `gemm` on the `Cuda` of the \
                 context, after `Cuda::after` and before `Cuda::before` of the stream, or give \
                 that library's own cuBLAS the product",
            ));
        }

        if self.blas_if_ready().is_none() {
            tracing::warn!(
                "initialising cuBLAS during a call, because no kernel lists it as a source \
                 (`cuda::CUBLAS`)"
            );
        }
        self.blas(pool)?.product(product, places)
    }
}

fn operation(operand: Operand) -> sys::cublasOperation_t {
    if operand.transposed {
        sys::cublasOperation_t::CUBLAS_OP_T
    } else {
        sys::cublasOperation_t::CUBLAS_OP_N
    }
}

/// Returns cuBLAS's number for f64, f16 or bf16, and else its number for f32. `Gemm::product`
/// refuses other dtypes.
fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

/// Returns the type in which cuBLAS computes a product. Only factors of f32 have faster types.
fn compute_type(types: Types) -> sys::cublasComputeType_t {
    match (types.factors, types.math) {
        (DType::F64, _) => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
        (DType::F32, Math::Tf32) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        (DType::F32, Math::F16) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_16F,
        (DType::F32, Math::Bf16) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_16BF,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}

fn check(doing: &str, answer: CallStatus) -> Result<(), CudaError> {
    if answer.is_success() {
        return Ok(());
    }
    // SAFETY: cuBLAS has static texts for each status, and for numbers that are none.
    let (name, text) = unsafe {
        (
            static_text(calls::cublasGetStatusName(answer)),
            static_text(calls::cublasGetStatusString(answer)),
        )
    };

    let number = || format!("cuBLAS error {}", answer.0);
    Err(CudaError::new(
        doing,
        name.unwrap_or_else(number),
        format!("{}, {}", number(), text.unwrap_or_default()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_on_other_streams_are_refused() {
        if softcuda::again!() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let arena = mpmd_memory::Arena::device(gpu.allocator());
        let pool = Pool::in_arena("device", None, &arena);
        let side = Operand {
            transposed: false,
            leading: 1,
            stride: 0,
        };
        let types = Types {
            factors: DType::F32,
            result: DType::F32,
            math: Math::F32,
        };
        let product = CublasProduct {
            m: 1,
            n: 1,
            k: 1,
            first: side,
            second: side,
            result: side,
            batch: 1,
            alpha: 1.0,
            beta: 0.0,
            types,
        };
        let memory = pool.allocate(4).unwrap();
        let place = memory.device().unwrap();
        let multiply = |stream| gpu.gemm(stream, &pool, &product, [place; 3]);
        assert_eq!(multiply(gpu.compute().stream()), Ok(()));
        let said = multiply(gpu.inward().stream()).unwrap_err().to_string();
        assert!(
            said.contains("cuBLAS issues to the device's own stream alone"),
            "{said}"
        );
    }

    #[test]
    fn fast_types_are_for_factors_of_f32() {
        let of = |factors, math| {
            compute_type(Types {
                factors,
                result: DType::F32,
                math,
            })
        };
        let fast = [Math::Tf32, Math::F16, Math::Bf16];
        let plain = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        assert!(fast.iter().all(|math| of(DType::F32, *math) != plain));
        for factors in [DType::F16, DType::Bf16] {
            assert!(
                fast.iter().all(|math| of(factors, *math) == plain),
                "{factors}"
            );
        }
    }
}
