//! cuBLAS: handles, their modes, and matrix products.

use std::ffi::c_char;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::current;
use crate::device::memory::space;
use crate::device::stream::{Work, own_stream};
use crate::entry::{In, Out, blas};
use crate::error::{Code, Result};
use crate::faults::{First, first, meet};
use crate::gemm::{Element, Matrix, Product, Rounding, Scale, compute};
use crate::handles::{Handle, Handles};
use crate::settings::CallKind;

static HANDLES: Handles<Mutex<Library>> = Handles::new(7);

/// Status codes of cuBLAS, which the functions of this file return.
const NOT_INITIALIZED: Code = Code(1);
const INVALID_VALUE: Code = Code(7);
const EXECUTION_FAILED: Code = Code(13);
const NOT_SUPPORTED: Code = Code(15);

/// The settings of a cuBLAS handle, as its setters stored them; `atomics` has no effect.
struct Library {
    stream: Handle,
    math: u32,
    scales_on_device: bool,
    atomics: u32,
}

fn handle(handle: Handle) -> Result<Arc<Mutex<Library>>> {
    HANDLES.get(handle).map_err(|_| NOT_INITIALIZED)
}

blas! {
    /// Creates a handle on the default stream. The calling thread must have a context, but the
    /// handle is not bound to it.
    fn cublasCreate_v2(out: Out<Handle>) {
        out.required().map_err(|_| INVALID_VALUE)?;
        current().and_then(|context| context.check()).map_err(|_| NOT_INITIALIZED)?;
        let mut made = 0;
        HANDLES.insert(|handle| {
            made = handle;
            Mutex::new(Library { stream: 0, math: 0, scales_on_device: false, atomics: 0 })
        });
        out.set(made).map_err(|_| INVALID_VALUE)
    }
}

blas! {
    /// Destroys a handle without waiting. Work that is already issued still runs.
    fn cublasDestroy_v2(library: Handle) {
        HANDLES.remove(library).map(drop).map_err(|_| NOT_INITIALIZED)
    }
}

blas! {
    /// Sets the stream on which later products are issued. Each product checks the stream.
    fn cublasSetStream_v2(library: Handle, stream: Handle) {
        handle(library)?.lock().stream = stream;
        Ok(())
    }
}

blas! {
    /// Returns the stream on which products are issued.
    fn cublasGetStream_v2(library: Handle, stream: Out<Handle>) {
        stream.set(handle(library)?.lock().stream)
    }
}

blas! {
    /// Accepts a workspace in device memory, which is not needed here. Only its address is checked:
    /// device memory at a multiple of 256.
    fn cublasSetWorkspace_v2(library: Handle, address: u64, bytes: usize) {
        handle(library)?;
        if bytes > 0 && (!space().covers(address) || !address.is_multiple_of(256)) {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }
}

blas! {
    /// Sets the precision mode of later products of `f32` matrices. Only mode 3 (TF32) changes
    /// their precision here.
    fn cublasSetMathMode(library: Handle, mode: u32) {
        // 16 is the flag that forbids sums of reduced precision, which this driver never uses.
        if !(0..=3).contains(&(mode & !16)) {
            return Err(INVALID_VALUE);
        }
        handle(library)?.lock().math = mode;
        Ok(())
    }
}

blas! {
    /// Returns the precision mode set by `cublasSetMathMode`, 0 by default.
    fn cublasGetMathMode(library: Handle, mode: Out<u32>) {
        mode.set(handle(library)?.lock().math)
    }
}

blas! {
    /// Sets the memory in which later products find alpha and beta: 0 is host memory, 1 is device
    /// memory.
    fn cublasSetPointerMode_v2(library: Handle, mode: u32) {
        if mode > 1 {
            return Err(INVALID_VALUE);
        }
        handle(library)?.lock().scales_on_device = mode == 1;
        Ok(())
    }
}

blas! {
    /// Returns the memory in which products find alpha and beta: 0 is host memory, 1 is device
    /// memory.
    fn cublasGetPointerMode_v2(library: Handle, mode: Out<u32>) {
        mode.set(u32::from(handle(library)?.lock().scales_on_device))
    }
}

blas! {
    /// Stores a mode that allows or forbids sums in varying order. The mode has no effect here.
    fn cublasSetAtomicsMode(library: Handle, mode: u32) {
        handle(library)?.lock().atomics = mode;
        Ok(())
    }
}

blas! {
    /// Returns the mode set by `cublasSetAtomicsMode`.
    fn cublasGetAtomicsMode(library: Handle, mode: Out<u32>) {
        mode.set(handle(library)?.lock().atomics)
    }
}

blas! {
    /// Returns the version of cuBLAS that this driver imitates: 12.8.0 as 120800.
    fn cublasGetVersion_v2(library: Handle, version: Out<i32>) {
        // The call succeeds without a handle too.
        let _ = library;
        version.set(120_800)
    }
}

blas! {
    /// Returns a number of the version. `which` selects it: 0 the major, 1 the minor, 2 the patch
    /// number.
    fn cublasGetProperty(which: u32, value: Out<i32>) {
        value.set(match which {
            0 => 12,
            1 => 8,
            2 => 0,
            _ => return Err(INVALID_VALUE),
        })
    }
}

/// Returns the name of a cuBLAS code. The text is never freed.
#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusName(status: u32) -> *const c_char {
    let name = match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        3 => c"CUBLAS_STATUS_ALLOC_FAILED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        8 => c"CUBLAS_STATUS_ARCH_MISMATCH",
        11 => c"CUBLAS_STATUS_MAPPING_ERROR",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        14 => c"CUBLAS_STATUS_INTERNAL_ERROR",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS unknown",
    };
    name.as_ptr()
}

/// Returns the text of a cuBLAS code, which is never freed.
#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusString(status: u32) -> *const c_char {
    let text = match status {
        0 => c"success",
        1 => c"the library was not initialized",
        3 => c"the resource allocation failed",
        7 => c"an invalid value was used as an argument",
        8 => c"an absent device architectural feature is required",
        11 => c"an access to GPU memory space failed",
        13 => c"the function failed to launch on the GPU",
        14 => c"an internal operation failed",
        15 => c"the functionality is not supported",
        _ => c"unknown",
    };
    text.as_ptr()
}

/// A matrix argument of a call, or a batch of matrices. `leading` is the distance between columns,
/// `stride` the distance between matrices, in elements.
struct Side {
    address: u64,
    element: Element,
    leading: i32,
    stride: i64,
}

/// The arithmetic of a product, derived from `cublasComputeType_t`. `double` is true for sums in
/// `f64`.
struct Way {
    rounding: Rounding,
    double: bool,
    /// Element type of alpha and beta.
    scale: Element,
}

/// The arguments of a call for a product. `sizes` are (m, n, k); `alpha` and `beta` are addresses.
struct Call {
    /// Operations on A and on B: 0 uses the matrix as stored, 1 and 2 transpose it.
    taken: [u32; 2],
    sizes: [i32; 3],
    alpha: u64,
    beta: u64,
    a: Side,
    b: Side,
    c: Side,
    batch: i32,
    way: Way,
}

fn element(kind: u32) -> Result<Element> {
    match kind {
        0 => Ok(Element::F32),
        1 => Ok(Element::F64),
        2 => Ok(Element::F16),
        14 => Ok(Element::Bf16),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Returns the rounding of the elements of A and B that a handle's precision mode selects for `f32`
/// products.
fn by_mode(library: Handle) -> Result<Rounding> {
    let math = handle(library)?.lock().math & !16;
    Ok(if math == 3 {
        Rounding::Tf32
    } else {
        Rounding::Exact
    })
}

/// Returns the arithmetic of the compute type `kind` for elements of A, B and C. Fails with
/// `CUBLAS_STATUS_NOT_SUPPORTED` for element types that cuBLAS does not support with it.
fn way(library: Handle, kind: u32, a: Element, b: Element, c: Element) -> Result<Way> {
    use Element::{Bf16, F16, F32, F64};
    let single = |rounding| Way {
        rounding,
        double: false,
        scale: F32,
    };

    let fast = |rounding| {
        if (a, b, c) == (F32, F32, F32) {
            Ok(single(rounding))
        } else {
            Err(NOT_SUPPORTED)
        }
    };

    match (kind, a, b, c) {
        (64 | 65, F16, F16, F16) => Ok(Way {
            rounding: Rounding::Exact,
            double: false,
            scale: F16,
        }),
        (68, F32, F32, F32) => Ok(single(by_mode(library)?)),
        (69, F32, F32, F32) => Ok(single(Rounding::Exact)),
        (68 | 69, F16, F16, F16 | F32) | (68 | 69, Bf16, Bf16, Bf16 | F32) => {
            Ok(single(Rounding::Exact))
        }
        (70 | 71, F64, F64, F64) => Ok(Way {
            rounding: Rounding::Exact,
            double: true,
            scale: F64,
        }),
        (74, ..) => fast(Rounding::F16),
        (75, ..) => fast(Rounding::Bf16),
        (77, ..) => fast(Rounding::Tf32),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Checks the arguments of a call and issues the product on the handle's stream, without waiting.
/// Alpha and beta in host memory are read before the return.
fn issue(library: Handle, call: Call) -> Result {
    first(First::Product);
    let library = handle(library)?;
    let library = library.lock();

    let size = |number: i32| u64::try_from(number).map_err(|_| INVALID_VALUE);
    let m = size(call.sizes[0])?;
    let n = size(call.sizes[1])?;
    let k = size(call.sizes[2])?;
    let batch = size(call.batch)?;

    let matrix = |side: &Side, rows: u64, columns: u64, taken: u32| {
        // For real numbers, the conjugate transpose (2) is the transpose (1).
        let transposed = match taken {
            0 => false,
            1 | 2 => true,
            _ => return Err(INVALID_VALUE),
        };

        let (rows, columns) = if transposed {
            (columns, rows)
        } else {
            (rows, columns)
        };

        let leading = size(side.leading)?;
        let stride = u64::try_from(side.stride).map_err(|_| INVALID_VALUE)?;
        if leading < rows.max(1) || !side.address.is_multiple_of(side.element.bytes()) {
            return Err(INVALID_VALUE);
        }
        Ok(Matrix {
            address: side.address,
            element: side.element,
            leading,
            stride,
            rows,
            columns,
            transposed,
        })
    };

    let a = matrix(&call.a, m, k, call.taken[0])?;
    let b = matrix(&call.b, k, n, call.taken[1])?;
    let c = matrix(&call.c, m, n, 0)?;

    if m == 0 || n == 0 || batch == 0 {
        return Ok(());
    }

    let scale = |address: u64| {
        if library.scales_on_device {
            return Ok(Scale::There(address, call.way.scale));
        }
        let known = match call.way.scale {
            Element::F64 => In::<f64>::untyped(address).get(),
            Element::F16 => In::<half::f16>::untyped(address).get().map(f64::from),
            Element::F32 | Element::Bf16 => In::<f32>::untyped(address).get().map(f64::from),
        };
        known.map(Scale::Known).map_err(|_| INVALID_VALUE)
    };

    let alpha = scale(call.alpha)?;
    let beta = scale(call.beta)?;
    let product = Product {
        a,
        b,
        c,
        inner: k,
        batch,
        alpha,
        beta,
        rounding: call.way.rounding,
        double: call.way.double,
    };

    let stream = own_stream(library.stream).map_err(|_| EXECUTION_FAILED)?;
    let mut uses = vec![c.used(batch, true)];
    if k > 0 && !matches!(alpha, Scale::Known(0.0)) {
        uses.extend([a.used(batch, false), b.used(batch, false)]);
    }

    stream.issue(
        Work::new("a product of matrices", move || {
            meet(CallKind::Launch)?;
            compute(&product)
        }),
        &uses,
    );
    Ok(())
}

blas! {
    /// Issues a product of `f32` matrices, `C = alpha * A * B + beta * C`, without waiting.
    fn cublasSgemm_v2(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        lda: i32, b: u64, ldb: i32, beta: u64, c: u64, ldc: i32,
    ) {
        let side = |address, leading| Side { address, element: Element::F32, leading, stride: 0 };
        let way = Way { rounding: by_mode(library)?, double: false, scale: Element::F32 };
        let a = side(a, lda);
        let b = side(b, ldb);
        let c = side(c, ldc);
        let taken = [transa, transb];
        let sizes = [m, n, k];
        let batch = 1;
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}

blas! {
    /// Issues a product of `f64` matrices, `C = alpha * A * B + beta * C`, without waiting.
    fn cublasDgemm_v2(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        lda: i32, b: u64, ldb: i32, beta: u64, c: u64, ldc: i32,
    ) {
        let side = |address, leading| Side { address, element: Element::F64, leading, stride: 0 };
        let way = Way { rounding: Rounding::Exact, double: true, scale: Element::F64 };
        let a = side(a, lda);
        let b = side(b, ldb);
        let c = side(c, ldc);
        let taken = [transa, transb];
        let sizes = [m, n, k];
        let batch = 1;
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}

blas! {
    /// Issues `batch` products of `f32` matrices, without waiting. The strides are the distances
    /// between matrices in elements.
    fn cublasSgemmStridedBatched(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        lda: i32, stride_a: i64, b: u64, ldb: i32, stride_b: i64, beta: u64, c: u64, ldc: i32,
        stride_c: i64, batch: i32,
    ) {
        let side =
            |address, leading, stride| Side { address, element: Element::F32, leading, stride };
        let way = Way { rounding: by_mode(library)?, double: false, scale: Element::F32 };
        let a = side(a, lda, stride_a);
        let b = side(b, ldb, stride_b);
        let c = side(c, ldc, stride_c);
        let taken = [transa, transb];
        let sizes = [m, n, k];
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}

blas! {
    /// Issues `batch` products of `f64` matrices, without waiting. The strides are the distances
    /// between matrices in elements.
    fn cublasDgemmStridedBatched(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        lda: i32, stride_a: i64, b: u64, ldb: i32, stride_b: i64, beta: u64, c: u64, ldc: i32,
        stride_c: i64, batch: i32,
    ) {
        let side =
            |address, leading, stride| Side { address, element: Element::F64, leading, stride };
        let way = Way { rounding: Rounding::Exact, double: true, scale: Element::F64 };
        let a = side(a, lda, stride_a);
        let b = side(b, ldb, stride_b);
        let c = side(c, ldc, stride_c);
        let taken = [transa, transb];
        let sizes = [m, n, k];
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}

blas! {
    /// Issues a product of the given element types and compute type, without waiting. `algorithm`
    /// is ignored.
    fn cublasGemmEx(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        a_type: u32, lda: i32, b: u64, b_type: u32, ldb: i32, beta: u64, c: u64, c_type: u32,
        ldc: i32, compute_type: u32, algorithm: i32,
    ) {
        let _ = algorithm;
        let side = |address, kind, leading| {
            Ok::<_, Code>(Side { address, element: element(kind)?, leading, stride: 0 })
        };
        let a = side(a, a_type, lda)?;
        let b = side(b, b_type, ldb)?;
        let c = side(c, c_type, ldc)?;
        let way = way(library, compute_type, a.element, b.element, c.element)?;
        let taken = [transa, transb];
        let sizes = [m, n, k];
        let batch = 1;
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}

blas! {
    /// Issues `batch` products of the given element types and compute type, without waiting. The
    /// strides are the distances between matrices in elements; `algorithm` is ignored.
    fn cublasGemmStridedBatchedEx(
        library: Handle, transa: u32, transb: u32, m: i32, n: i32, k: i32, alpha: u64, a: u64,
        a_type: u32, lda: i32, stride_a: i64, b: u64, b_type: u32, ldb: i32, stride_b: i64,
        beta: u64, c: u64, c_type: u32, ldc: i32, stride_c: i64, batch: i32, compute_type: u32,
        algorithm: i32,
    ) {
        let _ = algorithm;
        let side = |address, kind, leading, stride| {
            Ok::<_, Code>(Side { address, element: element(kind)?, leading, stride })
        };
        let a = side(a, a_type, lda, stride_a)?;
        let b = side(b, b_type, ldb, stride_b)?;
        let c = side(c, c_type, ldc, stride_c)?;
        let way = way(library, compute_type, a.element, b.element, c.element)?;
        let taken = [transa, transb];
        let sizes = [m, n, k];
        issue(library, Call { taken, sizes, alpha, beta, a, b, c, batch, way })
    }
}
