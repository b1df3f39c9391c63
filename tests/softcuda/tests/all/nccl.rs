//! Tests of NCCL through its C functions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result::{malloc_sync, memcpy_dtoh_async, memcpy_htod_async};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::sys::{
    self, ncclDataType_t as Type, ncclRedOp_t as Reduce, ncclResult_t as Answer,
};

/// A non-blocking rank, with `COUNT` `f32` values on its device.
struct Rank {
    stream: Arc<CudaStream>,
    raw: sys::ncclComm_t,
    values: CUdeviceptr,
}

const COUNT: usize = 1000;

fn id() -> sys::ncclUniqueId {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: there is room for the id.
    assert_eq!(unsafe { sys::ncclGetUniqueId(&mut id) }, Answer::ncclSuccess);
    id
}

impl Rank {
    /// Begins to join a group, without waiting for the other ranks. Returns the rank, with values
    /// of `rank + 1`, and the result of the call.
    fn begin(device: usize, id: sys::ncclUniqueId, ranks: i32, rank: i32) -> (Rank, Answer) {
        let context = CudaContext::new(device).unwrap();
        let stream = context.new_stream().unwrap();
        let mut raw = std::ptr::null_mut();
        // SAFETY: numbers and pointers, for which zeros are valid.
        let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
        (config.size, config.magic, config.version) = (24, 0xcafe_beef, 21_400);
        // SAFETY: there is room for the communicator, and the memory has the length of the copy.
        unsafe {
            let values = malloc_sync(4 * COUNT).unwrap();
            let ones: Vec<f32> = vec![rank as f32 + 1.0; COUNT];
            memcpy_htod_async(values, &ones, stream.cu_stream()).unwrap();
            let answer = sys::ncclCommInitRankConfig(&mut raw, ranks, id, rank, &mut config);
            (Rank { stream, raw, values }, answer)
        }
    }

    /// Waits until no operation is in progress, and returns the result of the last one. Panics
    /// after 20 seconds.
    fn settled(&self) -> Answer {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let mut state = Answer::ncclSuccess;
            // SAFETY: the communicator is alive, and there is room for its state.
            let answer = unsafe { sys::ncclCommGetAsyncError(self.raw, &mut state) };
            assert_eq!(answer, Answer::ncclSuccess);
            if state != Answer::ncclInProgress {
                return state;
            }
            assert!(Instant::now() < deadline, "the operation does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sum(&self) -> Answer {
        self.stream.context().bind_to_thread().unwrap();
        let at = self.values as *mut std::ffi::c_void;
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the memory is as long as that, and stays.
        unsafe {
            sys::ncclAllReduce(at, at, COUNT, Type::ncclFloat32, Reduce::ncclSum, self.raw, stream)
        }
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
    assert_eq!(answer, Answer::ncclInProgress);
    assert_eq!(one.sum(), Answer::ncclInvalidArgument, "not ready before all ranks have joined");
    let (other, _) = Rank::begin(1, id, 2, 1);
    for rank in [&one, &other] {
        assert_eq!(rank.settled(), Answer::ncclSuccess);
    }
    for rank in [&one, &other] {
        assert_eq!(rank.sum(), Answer::ncclInProgress);
        assert_eq!(rank.settled(), Answer::ncclSuccess);
    }
    assert_eq!((one.read(), other.read()), (vec![3.0; COUNT], vec![3.0; COUNT]));
    for rank in [one, other] {
        // SAFETY: the communicator is alive until it is destroyed.
        unsafe {
            sys::ncclCommFinalize(rank.raw);
            assert_eq!(rank.settled(), Answer::ncclSuccess);
            assert_eq!(sys::ncclCommDestroy(rank.raw), Answer::ncclSuccess);
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
        assert_eq!(rank.settled(), Answer::ncclInvalidUsage);
        // SAFETY: the communicator is alive; its text stays.
        let said = unsafe { std::ffi::CStr::from_ptr(sys::ncclGetLastError(rank.raw)) };
        assert!(said.to_str().unwrap().starts_with("Duplicate GPU detected"), "{said:?}");
    }
}

#[test]
fn wait_for_missing_rank_ends_on_abort() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let id = id();
    let (one, other) = (Rank::begin(0, id, 2, 0).0, Rank::begin(1, id, 2, 1).0);
    assert_eq!((one.settled(), other.settled()), (Answer::ncclSuccess, Answer::ncclSuccess));
    one.sum();
    assert_eq!(one.settled(), Answer::ncclSuccess, "the operation was issued");
    let event = one.stream.record_event(None).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!event.is_complete(), "the other rank has not called it");
    // SAFETY: the communicator is alive until it is aborted.
    assert_eq!(unsafe { sys::ncclCommAbort(one.raw) }, Answer::ncclSuccess);
    assert_eq!(one.read(), vec![1.0; COUNT], "the stream continues after the aborted operation");
}
