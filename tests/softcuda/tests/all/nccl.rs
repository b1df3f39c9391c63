//! Tests of NCCL through its C functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result::{malloc_sync, memcpy_dtoh_async, memcpy_htod_async};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream};

/// Statuses, a dtype and a reduction of NCCL's header.
const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// A communicator.
type Raw = *mut c_void;

/// The id by which the ranks of a group find each other.
#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; 128]);

/// The configuration of NCCL 2.14: size, magic, version, blocking, padding.
#[repr(C)]
struct Config(usize, u32, u32, c_int, c_int);

/// Declares functions of the library that programs find as NCCL.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[expect(non_snake_case, reason = "NCCL's own names")]
        unsafe fn $name($($argument: $type),*) -> $result {
            // SAFETY: the type is that of NCCL's header, and the library stays loaded.
            unsafe {
                let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
                assert!(!library.is_null(), "it is in LD_LIBRARY_PATH");
                let name = concat!(stringify!($name), "\0");
                let found = libc::dlsym(library, name.as_ptr().cast());
                assert!(!found.is_null(), "it has {name}");
                let function: unsafe extern "C" fn($($type),*) -> $result =
                    std::mem::transmute(found);
                function($($argument),*)
            }
        }
    )*};
}

functions! {
    fn ncclGetUniqueId(id: *mut Id) -> c_int;
    fn ncclCommInitRankConfig(
        raw: *mut Raw, ranks: c_int, id: Id, rank: c_int, config: *mut Config
    ) -> c_int;
    fn ncclCommGetAsyncError(raw: Raw, state: *mut c_int) -> c_int;
    fn ncclCommFinalize(raw: Raw) -> c_int;
    fn ncclCommDestroy(raw: Raw) -> c_int;
    fn ncclCommAbort(raw: Raw) -> c_int;
    fn ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, dtype: c_int, reduce: c_int, raw: Raw,
        stream: *mut c_void
    ) -> c_int;
    fn ncclGetLastError(raw: Raw) -> *const c_char;
}

/// A non-blocking rank, with `COUNT` `f32` values on its device.
struct Rank {
    stream: Arc<CudaStream>,
    raw: Raw,
    values: CUdeviceptr,
}

const COUNT: usize = 1000;

fn id() -> Id {
    let mut id = Id([0; 128]);
    // SAFETY: there is room for the id.
    assert_eq!(unsafe { ncclGetUniqueId(&mut id) }, SUCCESS);
    id
}

impl Rank {
    /// Begins to join a group, without waiting for the other ranks. Returns the rank, with values
    /// of `rank + 1`, and the status of the call.
    fn begin(device: usize, id: Id, ranks: i32, rank: i32) -> (Rank, c_int) {
        let context = CudaContext::new(device).unwrap();
        let stream = context.new_stream().unwrap();
        let mut raw = std::ptr::null_mut();
        let mut config = Config(size_of::<Config>(), 0xcafe_beef, 21_400, 0, 0);
        // SAFETY: there is room for the communicator, and the memory has the length of the copy.
        unsafe {
            let values = malloc_sync(4 * COUNT).unwrap();
            let ones: Vec<f32> = vec![rank as f32 + 1.0; COUNT];
            memcpy_htod_async(values, &ones, stream.cu_stream()).unwrap();
            let answer = ncclCommInitRankConfig(&mut raw, ranks, id, rank, &mut config);
            (
                Rank {
                    stream,
                    raw,
                    values,
                },
                answer,
            )
        }
    }

    /// Waits until no operation is in progress, and returns the status of the last one. Panics
    /// after 20 seconds.
    fn settled(&self) -> c_int {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let mut state = SUCCESS;
            // SAFETY: the communicator is alive, and there is room for its state.
            let answer = unsafe { ncclCommGetAsyncError(self.raw, &mut state) };
            assert_eq!(answer, SUCCESS);
            if state != IN_PROGRESS {
                return state;
            }
            assert!(Instant::now() < deadline, "the operation does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sum(&self) -> c_int {
        self.stream.context().bind_to_thread().unwrap();
        let at = self.values as *mut c_void;
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the memory is as long as that, and stays.
        unsafe { ncclAllReduce(at, at, COUNT, FLOAT32, SUM, self.raw, stream) }
    }

    fn read(&self) -> Vec<f32> {
        self.stream.context().bind_to_thread().unwrap();
        let mut values = vec![0.0; COUNT];
        // SAFETY: the memory is as long as that.
        unsafe { memcpy_dtoh_async(&mut values, self.values, self.stream.cu_stream()) }.unwrap();
        self.stream.synchronize().unwrap();
        values
    }
}

#[test]
fn all_reduce_sums_once_all_ranks_have_joined() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let id = id();
    let (one, answer) = Rank::begin(0, id, 2, 0);
    assert_eq!(answer, IN_PROGRESS);
    assert_eq!(
        one.sum(),
        INVALID_ARGUMENT,
        "not ready before all ranks have joined"
    );
    let (other, _) = Rank::begin(1, id, 2, 1);
    for rank in [&one, &other] {
        assert_eq!(rank.settled(), SUCCESS);
    }
    for rank in [&one, &other] {
        assert_eq!(rank.sum(), IN_PROGRESS);
        assert_eq!(rank.settled(), SUCCESS);
    }
    assert_eq!(
        (one.read(), other.read()),
        (vec![3.0; COUNT], vec![3.0; COUNT])
    );
    for rank in [one, other] {
        // SAFETY: the communicator is alive until it is destroyed.
        unsafe {
            ncclCommFinalize(rank.raw);
            assert_eq!(rank.settled(), SUCCESS);
            assert_eq!(ncclCommDestroy(rank.raw), SUCCESS);
        }
    }
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    if softcuda::again!() {
        return;
    }
    let id = id();
    let ranks = [0, 1].map(|rank| Rank::begin(0, id, 2, rank).0);
    for rank in ranks {
        assert_eq!(rank.settled(), INVALID_USAGE);
        // SAFETY: the communicator is alive; its text stays.
        let said = unsafe { CStr::from_ptr(ncclGetLastError(rank.raw)) };
        assert!(
            said.to_str().unwrap().starts_with("Duplicate GPU detected"),
            "{said:?}"
        );
    }
}

#[test]
fn wait_for_missing_rank_ends_on_abort() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let id = id();
    let (one, other) = (Rank::begin(0, id, 2, 0).0, Rank::begin(1, id, 2, 1).0);
    assert_eq!((one.settled(), other.settled()), (SUCCESS, SUCCESS));
    one.sum();
    assert_eq!(one.settled(), SUCCESS, "the operation was issued");
    let event = one.stream.record_event(None).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!event.is_complete(), "the other rank has not called it");
    // SAFETY: the communicator is alive until it is aborted.
    assert_eq!(unsafe { ncclCommAbort(one.raw) }, SUCCESS);
    assert_eq!(
        one.read(),
        vec![1.0; COUNT],
        "the stream continues after the aborted operation"
    );
}
