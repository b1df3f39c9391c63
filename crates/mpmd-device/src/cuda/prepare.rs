//! Preparation of the sources that kernels announce: compiling, loading, initialising cuBLAS and a
//! first product of each dtype.

use std::sync::Arc;

use mpmd_layout::aval::DType;
use mpmd_memory::{DevicePlace, Pool};

use super::blas::Blas;
use super::descriptions::{CublasProduct, Operand};
use super::error::CudaError;
use super::gpu::Gpu;
use crate::cuda::source::Source;
use crate::cuda::source::SourceKind;
use crate::cuda::spare_blocks::place;
use crate::cuda::work::{Math, Types};

/// The dtypes of the first products. The constants below are a matrix's rows and columns, and its
/// bytes.
const FIRST_DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];
const FIRST_SIDE: u8 = 16;
const FIRST_BYTES: usize = FIRST_SIDE as usize * FIRST_SIDE as usize * 8;

impl Gpu {
    /// Compiles and loads these sources, so that no launch has to wait for that. Blocks until all
    /// are ready, or one fails. `pool` is the pool of the device's memory.
    ///
    /// # Errors
    ///
    /// Returns the error of the first source that cannot be prepared.
    pub fn prepare(
        self: &Arc<Self>,
        pool: &Pool,
        sources: &[&'static Source],
    ) -> Result<(), CudaError> {
        let smaller = sources
            .iter()
            .filter_map(|source| source.smaller_for(self.shared_bytes()));
        let all: Vec<&'static Source> = sources.iter().copied().chain(smaller).collect();

        for source in all
            .iter()
            .filter(|source| source.kind != SourceKind::Cublas)
        {
            self.modules().announce(source);
        }

        all.iter()
            .try_for_each(|source| self.make_ready(source, pool))
    }

    fn make_ready(&self, source: &'static Source, pool: &Pool) -> Result<(), CudaError> {
        match source.kind {
            SourceKind::Cublas => {
                let blas = self.blas(pool)?;
                self.products()
                    .get_or_init(|| self.first_products(blas, pool));
                Ok(())
            }
            SourceKind::Cuda { .. } | SourceKind::Ptx => self.modules().make_ready(source),
        }
    }

    /// Issues a small product of each dtype, because cuBLAS loads its kernels at their first use.
    /// Does not wait for the device. A dtype that the device lacks is no error, since kernels may
    /// not need it.
    pub(super) fn first_products(&self, blas: &Blas, pool: &Pool) {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(%error, "cannot compute a first product with cuBLAS");
        };
        let mut memory = match pool.allocate(3 * FIRST_BYTES) {
            Ok(memory) => memory,
            Err(error) => return failed(&error),
        };

        let at = place(&memory);
        let places = [0, 1, 2].map(|index: u64| DevicePlace {
            address: at.address + index * FIRST_BYTES as u64,
            bytes: FIRST_BYTES,
            ..at
        });

        let side = i32::from(FIRST_SIDE);
        let matrix = Operand {
            transposed: false,
            leading: side,
            stride: 0,
        };

        let work = |_: &_| {
            for dtype in FIRST_DTYPES {
                let types = Types {
                    factors: dtype,
                    result: dtype,
                    math: Math::F32,
                };
                let product = CublasProduct {
                    m: side,
                    n: side,
                    k: side,
                    first: matrix,
                    second: matrix,
                    result: matrix,
                    batch: 1,
                    alpha: 1.0,
                    beta: 0.0,
                    types,
                };
                if let Err(error) = blas.product(&product, places) {
                    failed(&error);
                }
            }
            Ok(())
        };

        // A failure of the device is the error of all later work.
        let fence = self
            .compute()
            .submit(&[memory.fences()], work, Box::new(|_| ()));
        memory.add_fence(fence);
    }
}
