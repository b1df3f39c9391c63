//! Tests of matrix products against sums computed here.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::cublas::result;
use cudarc::cublas::sys::{
    self, cublasComputeType_t as Compute, cublasGemmAlgo_t as Algorithm, cublasMath_t as Math,
    cublasOperation_t as Operation, cublasStatus_t as Status, cudaDataType as Data,
};
use cudarc::driver::result::{malloc_sync, memcpy_dtoh_async, memcpy_htod_async};
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr};
use half::{bf16, f16};

const N: Operation = Operation::CUBLAS_OP_N;
const T: Operation = Operation::CUBLAS_OP_T;

struct Fixture {
    _context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    handle: sys::cublasHandle_t,
}

impl Fixture {
    fn new() -> Fixture {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let handle = result::create_handle().unwrap();
        // SAFETY: handle and stream were just made; CUDA's two names for a stream are the same
        // pointer.
        unsafe { result::set_stream(handle, stream.cu_stream().cast()) }.unwrap();
        Fixture {
            _context: context,
            stream,
            handle,
        }
    }

    fn put<V: DeviceRepr>(&self, values: &[V]) -> CUdeviceptr {
        // SAFETY: memory of that size, and a copy of that size; freed by the end of the process.
        unsafe {
            let at = malloc_sync(size_of_val(values)).unwrap();
            memcpy_htod_async(at, values, self.stream.cu_stream()).unwrap();
            at
        }
    }

    fn get<V: DeviceRepr + Copy + Default>(&self, at: CUdeviceptr, count: usize) -> Vec<V> {
        let mut values = vec![V::default(); count];
        // SAFETY: the memory was made with this many values.
        unsafe { memcpy_dtoh_async(&mut values, at, self.stream.cu_stream()) }.unwrap();
        self.stream.synchronize().unwrap();
        values
    }
}

fn values(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|at| ((at * 37 + seed * 11) % 23) as f32 / 4.0 - 2.5)
        .collect()
}

/// The arguments of one product of column-major matrices; `leading` holds the leading dimensions of
/// (A, B, C) in elements.
struct Case {
    taken: (Operation, Operation),
    m: usize,
    n: usize,
    k: usize,
    leading: (usize, usize, usize),
    alpha: f32,
    beta: f32,
}

impl Case {
    fn want(&self, a: &[f32], b: &[f32], c: &[f32]) -> Vec<f32> {
        let mut out = c.to_vec();
        for j in 0..self.n {
            for i in 0..self.m {
                let mut sum = 0.0;
                for l in 0..self.k {
                    let x = if self.taken.0 == N {
                        a[l * self.leading.0 + i]
                    } else {
                        a[i * self.leading.0 + l]
                    };
                    let y = if self.taken.1 == N {
                        b[j * self.leading.1 + l]
                    } else {
                        b[l * self.leading.1 + j]
                    };
                    sum += x * y;
                }
                let at = j * self.leading.2 + i;
                out[at] = self.alpha * sum
                    + if self.beta == 0.0 {
                        0.0
                    } else {
                        self.beta * c[at]
                    };
            }
        }
        out
    }

    /// Returns the numbers of elements that A, B and C occupy in memory.
    fn counts(&self) -> (usize, usize, usize) {
        let a = self.leading.0 * if self.taken.0 == N { self.k } else { self.m };
        let b = self.leading.1 * if self.taken.1 == N { self.n } else { self.k };
        (a, b, self.leading.2 * self.n)
    }
}

fn sgemm(fixture: &Fixture, case: &Case, [a, b, c]: [CUdeviceptr; 3]) -> Status {
    // SAFETY: handle and scales live. The addresses are of device memory, which is accessed only
    // later.
    unsafe {
        sys::cublasSgemm_v2(
            fixture.handle,
            case.taken.0,
            case.taken.1,
            case.m as i32,
            case.n as i32,
            case.k as i32,
            &case.alpha,
            a as *const f32,
            case.leading.0 as i32,
            b as *const f32,
            case.leading.1 as i32,
            &case.beta,
            c as *mut f32,
            case.leading.2 as i32,
        )
    }
}

#[test]
fn sgemm_matches_sums_for_all_transpositions() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    for (at, taken) in [(N, N), (T, N), (N, T), (T, T)].into_iter().enumerate() {
        for (alpha, beta) in [(1.0, 0.0), (0.5, 2.0), (0.0, -1.0)] {
            let case = Case {
                taken,
                m: 13,
                n: 7,
                k: 9,
                leading: (14, 15, 16),
                alpha,
                beta,
            };
            let counts = case.counts();
            let (a, b) = (values(counts.0, 1), values(counts.1, at as u32));
            let mut c = values(counts.2, 3);
            if beta == 0.0 {
                // With a scale of zero, C is not read.
                c.fill(f32::NAN);
            }
            let there = [fixture.put(&a), fixture.put(&b), fixture.put(&c)];
            assert_eq!(sgemm(&fixture, &case, there), Status::CUBLAS_STATUS_SUCCESS);
            let found = fixture.get::<f32>(there[2], counts.2);
            let want = case.want(&a, &b, &c);
            // Compares bits: elements between the columns must stay as they were, even NaNs. Adding
            // zero makes all zeros positive.
            let bits = |values: &[f32]| {
                values
                    .iter()
                    .map(|value| (value + 0.0).to_bits())
                    .collect::<Vec<_>>()
            };
            assert_eq!(bits(&found), bits(&want), "{taken:?}, {alpha}, {beta}");
        }
    }
}

fn gemm_ex(
    fixture: &Fixture,
    size: i32,
    data: [Data; 3],
    compute: Compute,
    there: [CUdeviceptr; 3],
) -> Status {
    // Each has the bytes of the largest type.
    let one = [1.0_f32; 2];
    let zero = [0.0_f32; 2];
    // SAFETY: as for `sgemm`, with square matrices.
    unsafe {
        sys::cublasGemmEx(
            fixture.handle,
            N,
            N,
            size,
            size,
            size,
            one.as_ptr().cast(),
            there[0] as *const c_void,
            data[0],
            size,
            there[1] as *const c_void,
            data[1],
            size,
            zero.as_ptr().cast(),
            there[2] as *mut c_void,
            data[2],
            size,
            compute,
            Algorithm::CUBLAS_GEMM_DEFAULT,
        )
    }
}

#[test]
fn half_precisions_are_summed_in_single() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let (a, b) = (values(64, 1), values(64, 2));
    let case = Case {
        taken: (N, N),
        m: 8,
        n: 8,
        k: 8,
        leading: (8, 8, 8),
        alpha: 1.0,
        beta: 0.0,
    };
    let want = case.want(&a, &b, &[0.0; 64]);
    let compute = Compute::CUBLAS_COMPUTE_32F;

    let half = |values: &[f32]| {
        values
            .iter()
            .map(|value| f16::from_f32(*value))
            .collect::<Vec<_>>()
    };
    let there = [
        fixture.put(&half(&a)),
        fixture.put(&half(&b)),
        fixture.put(&[f16::NAN; 64]),
    ];
    let data = [Data::CUDA_R_16F; 3];
    assert_eq!(
        gemm_ex(&fixture, 8, data, compute, there),
        Status::CUBLAS_STATUS_SUCCESS
    );
    assert_eq!(fixture.get::<f16>(there[2], 64), half(&want));

    let brain = |values: &[f32]| {
        values
            .iter()
            .map(|value| bf16::from_f32(*value))
            .collect::<Vec<_>>()
    };
    let there = [
        fixture.put(&brain(&a)),
        fixture.put(&brain(&b)),
        fixture.put(&[0.0_f32; 64]),
    ];
    let data = [Data::CUDA_R_16BF, Data::CUDA_R_16BF, Data::CUDA_R_32F];
    assert_eq!(
        gemm_ex(&fixture, 8, data, compute, there),
        Status::CUBLAS_STATUS_SUCCESS
    );
    assert_eq!(fixture.get::<f32>(there[2], 64), want);

    let mixed = [Data::CUDA_R_16BF, Data::CUDA_R_16F, Data::CUDA_R_32F];
    assert_eq!(
        gemm_ex(&fixture, 8, mixed, compute, there),
        Status::CUBLAS_STATUS_NOT_SUPPORTED
    );
}

#[test]
fn products_take_only_the_types_that_cublas_has() {
    if softcuda::again!() {
        return;
    }
    use Compute::{
        CUBLAS_COMPUTE_16F as C16, CUBLAS_COMPUTE_16F_PEDANTIC as P16, CUBLAS_COMPUTE_32F as C32,
        CUBLAS_COMPUTE_32F_FAST_16BF as BRAIN, CUBLAS_COMPUTE_32F_FAST_16F as HALF,
        CUBLAS_COMPUTE_32F_FAST_TF32 as TF32, CUBLAS_COMPUTE_32F_PEDANTIC as P32,
        CUBLAS_COMPUTE_64F as C64, CUBLAS_COMPUTE_64F_PEDANTIC as P64,
    };
    use Data::{CUDA_R_16BF as BF16, CUDA_R_16F as F16, CUDA_R_32F as F32, CUDA_R_64F as F64};
    // The table of `cublasGemmEx` for real numbers: factors, result, compute types.
    let table: [(Data, Data, &[Compute]); 6] = [
        (F16, F16, &[C16, P16, C32, P32]),
        (F16, F32, &[C32, P32]),
        (BF16, BF16, &[C32, P32]),
        (BF16, F32, &[C32, P32]),
        (F32, F32, &[C32, P32, HALF, BRAIN, TF32]),
        (F64, F64, &[C64, P64]),
    ];
    let fixture = Fixture::new();
    let there = [0; 3].map(|number: u64| fixture.put(&[number; 4]));
    let computes = [C16, P16, C32, P32, HALF, BRAIN, TF32, C64, P64];
    let check = |[a, b, c]: [Data; 3]| {
        let row = table
            .iter()
            .find(|(of, into, _)| [a, b, c] == [*of, *of, *into]);
        for compute in computes {
            let expected = match row.is_some_and(|(.., computes)| computes.contains(&compute)) {
                true => Status::CUBLAS_STATUS_SUCCESS,
                false => Status::CUBLAS_STATUS_NOT_SUPPORTED,
            };
            let found = gemm_ex(&fixture, 2, [a, b, c], compute, there);
            assert_eq!(found, expected, "{a:?} by {b:?} into {c:?} in {compute:?}");
        }
    };
    let types = [F16, BF16, F32, F64];
    for a in types {
        for b in types {
            types.into_iter().for_each(|c| check([a, b, c]));
        }
    }
    fixture.stream.synchronize().unwrap();
}

#[test]
fn tf32_loses_bits_that_single_precision_keeps() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let there = [
        fixture.put(&[1.0 + 2.0_f32.powi(-14)]),
        fixture.put(&[1.0_f32]),
        fixture.put(&[0.0_f32]),
    ];
    let data = [Data::CUDA_R_32F; 3];
    let product = |compute| {
        assert_eq!(
            gemm_ex(&fixture, 1, data, compute, there),
            Status::CUBLAS_STATUS_SUCCESS
        );
        fixture.get::<f32>(there[2], 1)[0]
    };
    assert_eq!(
        product(Compute::CUBLAS_COMPUTE_32F),
        1.0 + 2.0_f32.powi(-14)
    );
    assert_eq!(product(Compute::CUBLAS_COMPUTE_32F_FAST_TF32), 1.0);
    // SAFETY: the handle lives.
    let set = unsafe { sys::cublasSetMathMode(fixture.handle, Math::CUBLAS_TF32_TENSOR_OP_MATH) };
    assert_eq!(set, Status::CUBLAS_STATUS_SUCCESS);
    assert_eq!(product(Compute::CUBLAS_COMPUTE_32F), 1.0);
    assert_eq!(
        product(Compute::CUBLAS_COMPUTE_32F_PEDANTIC),
        1.0 + 2.0_f32.powi(-14)
    );
}

#[test]
fn strided_batched_sgemm_matches_sums() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let case = Case {
        taken: (N, T),
        m: 5,
        n: 6,
        k: 4,
        leading: (5, 6, 5),
        alpha: 1.0,
        beta: 1.0,
    };
    let batch = 3;
    // A is the same for all products.
    let (a, b, c) = (values(20, 1), values(24 * batch, 2), values(30 * batch, 3));
    let there = [fixture.put(&a), fixture.put(&b), fixture.put(&c)];
    // SAFETY: as for `sgemm`.
    let status = unsafe {
        sys::cublasSgemmStridedBatched(
            fixture.handle,
            case.taken.0,
            case.taken.1,
            5,
            6,
            4,
            &case.alpha,
            there[0] as *const f32,
            5,
            0,
            there[1] as *const f32,
            6,
            24,
            &case.beta,
            there[2] as *mut f32,
            5,
            30,
            batch as i32,
        )
    };
    assert_eq!(status, Status::CUBLAS_STATUS_SUCCESS);
    let want: Vec<f32> = (0..batch)
        .flat_map(|at| case.want(&a, &b[24 * at..][..24], &c[30 * at..][..30]))
        .collect();
    assert_eq!(fixture.get::<f32>(there[2], 30 * batch), want);
}

#[test]
fn wrong_arguments_are_refused_and_wrong_addresses_fail_later() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let good = || Case {
        taken: (N, N),
        m: 4,
        n: 4,
        k: 4,
        leading: (4, 4, 4),
        alpha: 1.0,
        beta: 0.0,
    };
    let there = [
        fixture.put(&[1.0_f32; 16]),
        fixture.put(&[1.0_f32; 16]),
        fixture.put(&[0.0_f32; 15]),
    ];
    let invalid = Status::CUBLAS_STATUS_INVALID_VALUE;
    assert_eq!(
        sgemm(
            &fixture,
            &Case {
                leading: (3, 4, 4),
                ..good()
            },
            there
        ),
        invalid
    );
    assert_eq!(
        sgemm(
            &fixture,
            &Case {
                leading: (4, 3, 4),
                ..good()
            },
            there
        ),
        invalid
    );
    assert_eq!(
        sgemm(
            &fixture,
            &Case {
                leading: (4, 4, 3),
                ..good()
            },
            there
        ),
        invalid
    );
    assert_eq!(
        sgemm(
            &fixture,
            &Case {
                m: usize::MAX,
                ..good()
            },
            there
        ),
        invalid
    );
    let nobody = Fixture {
        handle: ptr::null_mut(),
        stream: fixture.stream.clone(),
        _context: CudaContext::new(0).unwrap(),
    };
    assert_eq!(
        sgemm(&nobody, &good(), there),
        Status::CUBLAS_STATUS_NOT_INITIALIZED
    );
    fixture.stream.synchronize().unwrap();
    // C is one element too short: found only when the product runs.
    assert_eq!(
        sgemm(&fixture, &good(), there),
        Status::CUBLAS_STATUS_SUCCESS
    );
    assert_eq!(
        fixture.stream.synchronize().unwrap_err().0,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    );
    assert_eq!(
        sgemm(&fixture, &good(), there),
        Status::CUBLAS_STATUS_EXECUTION_FAILED
    );
}
