//! Tests of the order of work: streams, events, the pace of work, and races.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream};

const BYTES: usize = 1 << 16;
const NOT_READY: Result<(), DriverError> = Err(DriverError(CUresult::CUDA_ERROR_NOT_READY));

/// Two streams, a device allocation of `BYTES` bytes at `there`, and pinned host memory of the same
/// size.
struct Fixture {
    context: Arc<CudaContext>,
    one: Arc<CudaStream>,
    two: Arc<CudaStream>,
    there: CUdeviceptr,
    pinned: *mut u8,
}

impl Fixture {
    fn new() -> Fixture {
        let context = CudaContext::new(0).unwrap();
        let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        // SAFETY: freed by the end of the process.
        let (there, pinned) = unsafe {
            (
                result::malloc_sync(BYTES).unwrap(),
                result::malloc_host(BYTES, 0).unwrap().cast(),
            )
        };
        Fixture {
            context,
            one,
            two,
            there,
            pinned,
        }
    }

    fn fill(&self, stream: &CudaStream, value: u8) {
        // SAFETY: within the allocation.
        unsafe { result::memset_d8_async(self.there, value, BYTES, stream.cu_stream()) }.unwrap();
    }

    fn fetch(&self, stream: &CudaStream) {
        // SAFETY: both are this long, and live as long as the process.
        unsafe {
            sys::cuMemcpyDtoHAsync_v2(self.pinned.cast(), self.there, BYTES, stream.cu_stream())
                .result()
                .unwrap();
        }
    }

    fn fetched(&self) -> u8 {
        // SAFETY: no copy into it is under way.
        let bytes = unsafe { std::slice::from_raw_parts(self.pinned, BYTES) };
        assert!(
            bytes.iter().all(|byte| *byte == bytes[0]),
            "half of one, half of another"
        );
        bytes[0]
    }
}

#[test]
fn lazy_streams_do_nothing_until_waited_for() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let fixture = Fixture::new();
    fixture.fill(&fixture.one, 7);
    // The second stream does not wait for the first: it sees the memory before the fill.
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    assert_eq!(fixture.fetched(), 0xCD);
    // With an event it waits, and starts the first stream's lazy work.
    fixture.two.join(&fixture.one).unwrap();
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    assert_eq!(fixture.fetched(), 7);
}

#[test]
fn query_starts_lazy_work() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let fixture = Fixture::new();
    fixture.fill(&fixture.one, 7);
    let event = fixture.one.record_event(None).unwrap();
    assert!(!event.is_complete());
    while !event.is_complete() {
        std::thread::yield_now();
    }
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    assert_eq!(fixture.fetched(), 7);
}

#[test]
fn lazy_work_runs_after_its_delay() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:20") {
        return;
    }
    let fixture = Fixture::new();
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    // SAFETY: the function takes the box that is passed to it, once.
    unsafe {
        unsafe extern "C" fn tell(sender: *mut std::ffi::c_void) {
            // SAFETY: made from a box, below.
            let sender = unsafe { Box::from_raw(sender.cast::<std::sync::mpsc::Sender<()>>()) };
            let _ = sender.send(());
        }
        let data = Box::into_raw(Box::new(sender)).cast();
        sys::cuLaunchHostFunc(fixture.one.cu_stream(), Some(tell), data)
            .result()
            .unwrap();
    }
    assert_eq!(receiver.recv(), Ok(()));
}

#[test]
fn event_wait_uses_newest_record_at_issue() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let fixture = Fixture::new();
    let event = fixture.context.new_event(None).unwrap();
    // The event was never recorded, so there is nothing to wait for.
    fixture.two.wait(&event).unwrap();
    event.record(&fixture.one).unwrap();
    fixture.two.wait(&event).unwrap();
    fixture.fill(&fixture.one, 9);
    event.record(&fixture.one).unwrap();
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    // The wait was for the first record, which precedes the fill.
    assert_eq!(fixture.fetched(), 0xCD);
    assert_eq!(softcuda::driver().unwrap().races(), 1);
    assert!(!event.is_complete());
    event.synchronize().unwrap();
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    assert_eq!(fixture.fetched(), 9);
}

#[test]
fn default_stream_is_ordered_with_blocking_streams() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let fixture = Fixture::new();
    let minds = result::stream::create(result::stream::StreamKind::Default).unwrap();
    // SAFETY: within the allocations, which live as long as the process.
    unsafe {
        result::memset_d8_async(fixture.there, 5, BYTES, minds).unwrap();
        let mut back = vec![0_u8; BYTES];
        result::memcpy_dtoh_sync(&mut back, fixture.there).unwrap();
        assert_eq!(back, [5; BYTES]);
        result::memset_d8_sync(fixture.there, 6, BYTES).unwrap();
        sys::cuMemcpyDtoHAsync_v2(fixture.pinned.cast(), fixture.there, BYTES, minds)
            .result()
            .unwrap();
        result::stream::synchronize(minds).unwrap();
    }
    assert_eq!(fixture.fetched(), 6);
    assert_eq!(softcuda::driver().unwrap().races(), 0);
}

#[test]
fn async_copy_reads_pageable_at_once_and_pinned_later() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let fixture = Fixture::new();
    let stream = fixture.one.cu_stream();
    let mut pageable = vec![1_u8; BYTES];
    // SAFETY: the lengths are right, and the pinned memory lives as long as the process. The test
    // writes it on purpose while a copy of it is pending.
    unsafe {
        result::memcpy_htod_async(fixture.there, &pageable, stream).unwrap();
        pageable.fill(2);
        fixture.fetch(&fixture.one);
        fixture.one.synchronize().unwrap();
        assert_eq!(fixture.fetched(), 1);

        fixture.pinned.write_bytes(3, BYTES);
        sys::cuMemcpyHtoDAsync_v2(fixture.there, fixture.pinned.cast(), BYTES, stream)
            .result()
            .unwrap();
        fixture.pinned.write_bytes(4, BYTES);
        // A copy from the device to pageable host memory ends before the call returns.
        result::memcpy_dtoh_async(&mut pageable, fixture.there, stream).unwrap();
        assert_eq!(pageable, [4; BYTES]);
    }
}

#[test]
fn timed_events_measure_elapsed_time() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let start = fixture.one.record_event(flags).unwrap();
    fixture.fill(&fixture.one, 1);
    let end = fixture.one.record_event(flags).unwrap();
    assert!(start.elapsed_ms(&end).unwrap() > 0.0);
    assert!(end.elapsed_ms(&start).unwrap() < 0.0);
    let invalid = Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let untimed = fixture.one.record_event(None).unwrap();
    assert_eq!(start.elapsed_ms(&untimed), invalid);
    let never = fixture.context.new_event(flags).unwrap();
    assert_eq!(start.elapsed_ms(&never), invalid);
}

/// A host function that blocks a stream until this value is dropped.
struct Held {
    _sender: std::sync::mpsc::Sender<()>,
}

impl Held {
    fn up(stream: &CudaStream) -> Held {
        unsafe extern "C" fn wait(receiver: *mut std::ffi::c_void) {
            // SAFETY: made from a box, below.
            let receiver =
                unsafe { Box::from_raw(receiver.cast::<std::sync::mpsc::Receiver<()>>()) };
            let _ = receiver.recv();
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        let data = Box::into_raw(Box::new(receiver)).cast();
        // SAFETY: the function takes the box that is passed to it, once.
        unsafe {
            sys::cuLaunchHostFunc(stream.cu_stream(), Some(wait), data)
                .result()
                .unwrap()
        };
        Held { _sender: sender }
    }
}

#[test]
fn streams_run_concurrently_and_queries_show_it() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let held = Held::up(&fixture.one);
    fixture.fill(&fixture.one, 1);
    // SAFETY: the stream lives.
    let state = unsafe { sys::cuStreamQuery(fixture.one.cu_stream()) };
    assert_eq!(state.result(), NOT_READY);
    fixture.fetch(&fixture.two);
    fixture.two.synchronize().unwrap();
    assert_eq!(fixture.fetched(), 0xCD);
    // SAFETY: the stream lives.
    let state = unsafe { sys::cuStreamQuery(fixture.one.cu_stream()) };
    assert_eq!(state.result(), NOT_READY);
    drop(held);
    fixture.one.synchronize().unwrap();
    // SAFETY: the stream lives.
    let state = unsafe { sys::cuStreamQuery(fixture.one.cu_stream()) };
    assert_eq!(state.result(), Ok(()));
}

#[test]
fn unordered_accesses_are_races_and_ordered_ones_are_not() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let driver = softcuda::driver().unwrap();
    // Ordered: in one stream, by an event, by a host wait, by a host query.
    fixture.fill(&fixture.one, 1);
    fixture.fill(&fixture.one, 2);
    fixture.two.join(&fixture.one).unwrap();
    fixture.fill(&fixture.two, 3);
    fixture.two.synchronize().unwrap();
    fixture.fill(&fixture.one, 4);
    let event = fixture.one.record_event(None).unwrap();
    while !event.is_complete() {
        std::thread::yield_now();
    }
    fixture.fetch(&fixture.two);
    // Two reads need no order.
    fixture.fetch(&fixture.one);
    assert_eq!(driver.races(), 0);
    // A write is unordered to a read for which nobody waited.
    fixture.fill(&fixture.one, 5);
    assert_eq!(driver.races(), 1);
    fixture.context.synchronize().unwrap();
    // An event recorded too early does not order later work.
    let early = fixture.one.record_event(None).unwrap();
    fixture.fill(&fixture.one, 6);
    fixture.two.wait(&early).unwrap();
    fixture.fetch(&fixture.two);
    assert_eq!(driver.races(), 2);
    fixture.context.synchronize().unwrap();
    // Accesses to different bytes of one allocation are no race.
    let half = BYTES / 2;
    // SAFETY: within the allocation.
    unsafe {
        result::memset_d8_async(fixture.there, 1, half, fixture.one.cu_stream()).unwrap();
        result::memset_d8_async(
            fixture.there + half as u64,
            1,
            half,
            fixture.two.cu_stream(),
        )
        .unwrap();
    }
    assert_eq!(driver.races(), 2);
    fixture.context.synchronize().unwrap();
}

#[test]
fn kernel_races_are_found_for_declared_uses() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let driver = softcuda::driver().unwrap();
    let ptx =
        cudarc::nvrtc::compile_ptx(r#"extern "C" __global__ void nothing(char *x) {}"#).unwrap();
    let kernel = fixture
        .context
        .load_module(ptx)
        .unwrap()
        .load_function("nothing")
        .unwrap();
    // SAFETY: the driver is loaded already, and its function has this type.
    let note: unsafe extern "C" fn(sys::CUstream, u64, u64, i32) = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        std::mem::transmute(libc::dlsym(library, c"softcuda_note_use".as_ptr()))
    };
    let launch = |stream: &CudaStream, told: Option<i32>| {
        let mut builder = stream.launch_builder(&kernel);
        use cudarc::driver::PushKernelArg;
        builder.arg(&fixture.there);
        let config = cudarc::driver::LaunchConfig::for_num_elems(1);
        // SAFETY: the kernel does nothing; the bytes are of the allocation.
        unsafe {
            if let Some(write) = told {
                note(stream.cu_stream(), fixture.there, BYTES as u64, write);
            }
            builder.launch(config).unwrap();
        }
    };
    launch(&fixture.one, None);
    launch(&fixture.two, Some(1));
    assert_eq!(driver.races(), 0);
    launch(&fixture.one, Some(0));
    assert_eq!(driver.races(), 1);
    // The declaration was for one launch, not for the next.
    launch(&fixture.one, None);
    assert_eq!(driver.races(), 1);
}

#[test]
fn counters_count_calls_and_bytes() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let driver = softcuda::driver().unwrap();
    driver.reset();
    fixture.fill(&fixture.one, 1);
    fixture.fetch(&fixture.one);
    fixture.fetch(&fixture.one);
    assert_eq!(driver.calls("cuMemcpyDtoHAsync_v2"), 2);
    assert_eq!(driver.bytes("device_to_pinned"), 2 * BYTES as u64);
    assert_eq!(driver.bytes("device_to_device"), 0);
    driver.reset();
    assert_eq!(
        (
            driver.calls("cuMemcpyDtoHAsync_v2"),
            driver.bytes("device_to_pinned")
        ),
        (0, 0)
    );
}

#[test]
fn requested_failures_happen() {
    if softcuda::again!("SOFTCUDA_FAIL" = "alloc:2") {
        return;
    }
    // The first allocation is the fixture's.
    let fixture = Fixture::new();
    let driver = softcuda::driver().unwrap();
    let alloc = || {
        // SAFETY: freed by the end of the process.
        let allocated = unsafe { result::malloc_sync(16) };
        allocated.map(drop).map_err(|error| error.0)
    };
    assert_eq!(alloc(), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(alloc(), Ok(()));
    driver.fail("event", 1);
    assert_eq!(
        fixture.context.new_event(None).unwrap_err().0,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY
    );
    driver.fail("cuStreamQuery", 1);
    let asked = || {
        // SAFETY: the stream lives.
        let state = unsafe { sys::cuStreamQuery(fixture.one.cu_stream()) };
        state.result().map_err(|error| error.0)
    };
    assert_eq!(
        (asked(), asked()),
        (Err(CUresult::CUDA_ERROR_UNKNOWN), Ok(()))
    );
    driver.fail("compile", 1);
    assert!(cudarc::nvrtc::compile_ptx("").is_err());
    driver.fail("copy", 2);
    fixture.fill(&fixture.one, 1);
    fixture.one.synchronize().unwrap();
    fixture.fill(&fixture.one, 1);
    assert_eq!(
        fixture.one.synchronize().unwrap_err().0,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    );
}

#[test]
fn after_failure_work_is_skipped_but_waits_end() {
    if softcuda::again!() {
        return;
    }
    let fixture = Fixture::new();
    let held = Held::up(&fixture.one);
    // SAFETY: the address is in no allocation, on purpose; failed work accesses nothing.
    unsafe { result::memset_d8_async(fixture.there + (1 << 20), 1, 1, fixture.one.cu_stream()) }
        .unwrap();
    let event = fixture.one.record_event(None).unwrap();
    fixture.two.wait(&event).unwrap();
    fixture.fetch(&fixture.two);
    drop(held);
    let failed = Err(DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
    assert_eq!(event.synchronize(), failed);
    assert_eq!(event.try_is_complete(), failed.map(|()| true));
    assert_eq!(fixture.two.synchronize(), failed);
    let mut handle = ptr::null_mut();
    // SAFETY: a place for a stream.
    let created = unsafe { sys::cuStreamCreate(&mut handle, 1) };
    assert_eq!(created.result(), failed);
}
