//! The matrix product, the one kernel that is ready made.

use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::cuda::Gemm;
use crate::kernel::host::check_region;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut, written_rule};
use mpmd_device::cpu::matmul::{Scalar, matmul as product};
use mpmd_device::cuda::source::{CUBLAS, Source};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::DimensionRule;

/// Returns a kernel that multiplies `[.., m, k]` by `[k, n]` to `[.., m, n]`, for `f32` and `f64`.
///
/// All dimensions of the first array but the last count as rows. On CUDA devices cuBLAS multiplies,
/// `f32` with full precision.
///
/// # Errors
///
/// A call is refused:
///
/// - if the first array has fewer than two dimensions, or the second not exactly two;
/// - if the sizes `k` differ;
/// - if the dtypes are not both `f32` or both `f64`;
/// - if a device's region of the output does not match its rows of the first array and its columns
///   of the second. If dimension `k` is divided, the output has to be unreduced over its axis.
pub fn matmul() -> impl Kernel<In = (MpmdArray, MpmdArray), Out = MpmdArray> {
    Matmul
}

struct Matmul;

impl Kernel for Matmul {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (a, b): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        let of_floats = matches!(a.dtype(), DType::F32 | DType::F64);

        match (a.shape(), b.shape()) {
            ([rows @ .., k], [same, n])
                if !rows.is_empty() && k == same && of_floats && a.dtype() == b.dtype() =>
            {
                Ok(Signature::new(ShapedArray::try_new(
                    &[rows, &[*n]].concat(),
                    a.dtype(),
                )?))
            }
            _ => Err(Error::kernel(format!(
                "matmul takes [.., m, k] and [k, n], both f32 or both f64, not {a} and {b}"
            ))),
        }
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (a, b): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let inner = a.global().ndim() - 1;
        let (of_a, of_b) = (a.region().range(inner), b.region().range(0));
        if of_a != of_b {
            return Err(Error::kernel(format!(
                "this device has {of_a:?} of dimension {inner} of input 0, but {of_b:?} of \
                 dimension 0 of input 1"
            )));
        }

        let rows = a.region().ranges().take(inner);
        let gives = Region::new(rows.chain([b.region().range(1)]).collect());
        check_region(
            "the output",
            y.region(),
            "the product of its inputs",
            &gives,
        )?;

        let m = a.shape()[..inner].iter().product();
        let k = a.shape()[inner];
        let n = b.shape()[1];

        if let Some(cuda) = cx.cuda() {
            return cuda.gemm(Gemm::new(m, n, k), &a, &b, &mut y);
        }

        match y.global().dtype() {
            DType::F64 => on_host::<f64>(a, b, y, m, k, n),
            _ => on_host::<f32>(a, b, y, m, k, n),
        }
    }

    fn rule(&self) -> Option<DimensionRule> {
        written_rule("... m k, k n -> ... m n")
    }

    fn name(&self) -> &str {
        "matmul"
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&CUBLAS]
    }
}

fn on_host<T: Element + Scalar>(
    a: View<'_>,
    b: View<'_>,
    y: ViewMut<'_>,
    m: usize,
    k: usize,
    n: usize,
) -> Result<()> {
    product(
        &mut y.typed::<T>()?,
        &a.typed::<T>()?,
        &b.typed::<T>()?,
        m,
        k,
        n,
        false,
    );
    Ok(())
}
