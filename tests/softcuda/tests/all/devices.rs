//! Tests of devices, contexts, memory and its attributes, and strided copies.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream};

const INVALID_VALUE: DriverError = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);

fn start() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    (context, stream)
}

fn malloc(bytes: usize) -> CUdeviceptr {
    // SAFETY: allocation has no conditions beyond a context; freed by the end of the process.
    unsafe { result::malloc_sync(bytes) }.unwrap()
}

fn read(stream: &CudaStream, address: CUdeviceptr, bytes: usize) -> Vec<u8> {
    let mut back = vec![0_u8; bytes];
    // SAFETY: the address is of device memory that is this long.
    unsafe { result::memcpy_dtoh_async(&mut back, address, stream.cu_stream()) }.unwrap();
    back
}

#[test]
fn init_without_devices_fails() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "0") {
        return;
    }
    assert_eq!(
        result::init().unwrap_err().0,
        CUresult::CUDA_ERROR_NO_DEVICE
    );
}

#[test]
fn devices_are_distinct() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "3", "SOFTCUDA_MEMORY" = "1048576") {
        return;
    }
    assert_eq!(CudaContext::device_count(), Ok(3));
    assert_eq!(
        CudaContext::new(3).unwrap_err().0,
        CUresult::CUDA_ERROR_INVALID_DEVICE
    );
    let (first, last) = (CudaContext::new(0).unwrap(), CudaContext::new(2).unwrap());
    assert_ne!(first.uuid().unwrap().bytes, last.uuid().unwrap().bytes);
    assert!(first.name().unwrap().contains("softcuda"));
    assert_eq!(
        (
            first.total_mem().unwrap(),
            first.compute_capability().unwrap()
        ),
        (1 << 20, (8, 0))
    );
    assert_eq!(
        first.attribute(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
        Ok(1)
    );

    // Each device counts its own memory, and copies go from one device to the other.
    let (here, there) = (first.new_stream().unwrap(), last.new_stream().unwrap());
    first.bind_to_thread().unwrap();
    let source = malloc(1000);
    assert!(first.mem_get_info().unwrap().0 < last.mem_get_info().unwrap().0);
    let target = malloc(1000);
    first.bind_to_thread().unwrap();
    // SAFETY: both are this long, and the host waits between uses of them in different streams.
    unsafe {
        result::memset_d8_async(source, 5, 1000, here.cu_stream()).unwrap();
        here.synchronize().unwrap();
        last.bind_to_thread().unwrap();
        result::memcpy_dtod_async(target, source, 1000, there.cu_stream()).unwrap();
    }
    assert_eq!(read(&there, target, 1000), [5; 1000]);
    first.bind_to_thread().unwrap();

    // An object of one device cannot be used on the other.
    let event = first.new_event(None).unwrap();
    last.bind_to_thread().unwrap();
    // SAFETY: event and streams live.
    unsafe {
        let invalid = Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE));
        assert_eq!(
            result::event::record(event.cu_event(), there.cu_stream()),
            invalid
        );
        assert_eq!(
            result::event::record(event.cu_event(), here.cu_stream()),
            invalid
        );
    }
}

#[test]
fn memory_runs_out_and_is_usable_after_free() {
    if softcuda::again!("SOFTCUDA_MEMORY" = "1048576") {
        return;
    }
    let (context, _stream) = start();
    // SAFETY: allocations, and a release of one that nothing uses.
    unsafe {
        let most = result::malloc_sync(1 << 20).unwrap();
        assert_eq!(context.mem_get_info(), Ok((0, 1 << 20)));
        assert_eq!(
            result::malloc_sync(1),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY))
        );
        assert_eq!(result::malloc_sync(0), Err(INVALID_VALUE));
        assert_eq!(result::free_sync(most + 8), Err(INVALID_VALUE));
        result::free_sync(most).unwrap();
        assert_eq!(result::free_sync(most), Err(INVALID_VALUE));
        assert_eq!(context.mem_get_info(), Ok((1 << 20, 1 << 20)));
    }
}

#[test]
fn new_memory_is_garbage_and_freed_memory_faults() {
    if softcuda::again!() {
        return;
    }
    let (_context, stream) = start();
    let address = malloc(100);
    assert_eq!(address % 256, 0);
    assert_eq!(read(&stream, address, 100), [0xCD; 100]);
    // SAFETY: nothing uses it any more. The fill after the release is the error under test.
    unsafe {
        result::free_sync(address).unwrap();
        result::memset_d8_async(address, 1, 100, stream.cu_stream()).unwrap();
    }
    assert_eq!(
        stream.synchronize().unwrap_err().0,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    );
}

#[test]
fn stream_ordered_memory_lives_until_its_release_runs() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:3600000") {
        return;
    }
    let (_context, stream) = start();
    // SAFETY: used in one stream, before it is released there.
    unsafe {
        let address = result::malloc_async(stream.cu_stream(), 64).unwrap();
        result::memset_d8_async(address, 1, 64, stream.cu_stream()).unwrap();
        result::free_async(address, stream.cu_stream()).unwrap();
        assert_eq!(
            result::free_async(address, stream.cu_stream()),
            Err(INVALID_VALUE)
        );
        stream.synchronize().unwrap();
        assert_eq!(result::free_sync(address), Err(INVALID_VALUE));
    }
}

#[test]
fn the_host_cannot_touch_device_memory() {
    const TOUCH: &str = "SOFTCUDA_TEST_TOUCH";
    if softcuda::again!() {
        return;
    }
    if std::env::var_os(TOUCH).is_some() {
        let (_context, _stream) = start();
        let address = malloc(64) as *const u8;
        // SAFETY: the read is invalid, which is the test.
        let byte = unsafe { address.read_volatile() };
        println!("the host read {byte}");
        return;
    }
    use std::os::unix::process::ExitStatusExt;
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "devices::the_host_cannot_touch_device_memory",
            "--nocapture",
        ])
        .env(TOUCH, "1")
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(11), "{output:?}");
}

#[test]
fn calls_without_a_context_are_refused() {
    if softcuda::again!() {
        return;
    }
    let alloc = || {
        // SAFETY: refused, or an allocation.
        let allocated = unsafe { result::malloc_sync(16) };
        allocated.map(drop).map_err(|error| error.0)
    };
    assert_eq!(alloc(), Err(CUresult::CUDA_ERROR_NOT_INITIALIZED));
    result::init().unwrap();
    assert_eq!(alloc(), Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    let context = CudaContext::new(0).unwrap();
    assert_eq!(alloc(), Ok(()));
    // Each thread has its own current context.
    let other = std::thread::scope(|scope| scope.spawn(alloc).join().unwrap());
    assert_eq!(other, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    drop(context);
    // The last release ends the context and all its resources.
    assert_eq!(alloc(), Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
}

#[test]
fn destroyed_handles_are_refused() {
    if softcuda::again!() {
        return;
    }
    let (_context, _stream) = start();
    let invalid = Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE));
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
    // SAFETY: the driver recognizes destroyed handles, which is the test.
    unsafe {
        result::stream::destroy(stream).unwrap();
        result::event::destroy(event).unwrap();
        assert_eq!(result::stream::synchronize(stream), invalid);
        assert_eq!(result::stream::destroy(stream), invalid);
        assert_eq!(result::event::query(event), invalid);
        assert_eq!(result::event::destroy(event), invalid);
    }
}

#[test]
fn pointer_attributes_are_reported() {
    if softcuda::again!() {
        return;
    }
    let (context, _stream) = start();
    let address = malloc(1000);
    use sys::CUpointer_attribute_enum as Pointer;
    let ask = |attribute, address| {
        let mut value = 0_u64;
        // SAFETY: there is room for the widest attribute.
        unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }
            .result()
            .map(|()| value)
    };
    assert_eq!(
        ask(Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 999),
        Ok(2)
    );
    assert_eq!(
        ask(
            Pointer::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            address + 999
        ),
        Ok(address)
    );
    assert_eq!(
        ask(Pointer::CU_POINTER_ATTRIBUTE_RANGE_SIZE, address),
        Ok(1000)
    );
    assert_eq!(
        ask(Pointer::CU_POINTER_ATTRIBUTE_CONTEXT, address),
        Ok(context.cu_ctx() as u64)
    );
    assert_eq!(
        ask(Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 4096),
        Err(INVALID_VALUE)
    );
    let local = 0_u8;
    let host = (&raw const local) as u64;
    assert_eq!(
        ask(Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host),
        Err(INVALID_VALUE)
    );
    let mut kind = 7_u32;
    let mut attribute = Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let mut data = (&raw mut kind).cast();
    // SAFETY: one attribute, and room for it.
    let several = unsafe { sys::cuPointerGetAttributes(1, &mut attribute, &mut data, host) };
    assert_eq!((several, kind), (CUresult::CUDA_SUCCESS, 0));

    // Pinned memory is reported as host memory.
    let mut page = vec![0_u8; 8192];
    let pinned = page.as_mut_ptr();
    // SAFETY: the memory lives until it is unregistered.
    unsafe {
        sys::cuMemHostRegister_v2(pinned.cast(), 8192, 0)
            .result()
            .unwrap();
        let again = sys::cuMemHostRegister_v2(pinned.add(100).cast(), 10, 0);
        assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(
            ask(Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned as u64),
            Ok(1)
        );
        sys::cuMemHostUnregister(pinned.cast()).result().unwrap();
        let gone = sys::cuMemHostUnregister(pinned.cast());
        assert_eq!(gone, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
}

#[test]
fn rows_and_slices_are_copied() {
    if softcuda::again!() {
        return;
    }
    let (_context, stream) = start();
    // The source has four rows of ten bytes. Bytes 3 to 6 of its middle two rows go into rows with
    // a pitch of eight.
    let from: Vec<u8> = (0..40).collect();
    let address = malloc(16);
    let (host, device) = (
        sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
    );
    let mut copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 3,
        srcY: 1,
        srcMemoryType: host,
        srcHost: from.as_ptr().cast(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        srcPitch: 10,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: ptr::null_mut(),
        dstDevice: address,
        dstArray: ptr::null_mut(),
        dstPitch: 8,
        WidthInBytes: 4,
        Height: 2,
    };
    // SAFETY: the extents are those of the memory.
    unsafe {
        sys::cuMemcpy2DAsync_v2(&copy, stream.cu_stream())
            .result()
            .unwrap();
        let back = read(&stream, address, 16);
        assert_eq!(
            (&back[..4], &back[4..8], &back[8..12]),
            (&[13, 14, 15, 16][..], &[0xCD; 4][..], &[23, 24, 25, 26][..])
        );
        copy.dstPitch = 3;
        assert_eq!(
            sys::cuMemcpy2DAsync_v2(&copy, stream.cu_stream()).result(),
            Err(INVALID_VALUE)
        );
    }
    // Two slices of two rows of two bytes, from slices of five rows of four bytes.
    let copy = sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: host,
        srcHost: from.as_ptr().cast(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        srcPitch: 4,
        srcHeight: 5,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: device,
        dstHost: ptr::null_mut(),
        dstDevice: address,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: 2,
        dstHeight: 2,
        WidthInBytes: 2,
        Height: 2,
        Depth: 2,
    };
    // SAFETY: the extents are those of the memory.
    unsafe {
        sys::cuMemcpy3DAsync_v2(&copy, stream.cu_stream())
            .result()
            .unwrap();
        assert_eq!(read(&stream, address, 8), [0, 1, 4, 5, 20, 21, 24, 25]);
    }
}

#[test]
fn arguments_of_copies_are_checked_at_once() {
    if softcuda::again!() {
        return;
    }
    let (_context, stream) = start();
    let address = malloc(64);
    let host = [0_u8; 64];
    let on = stream.cu_stream();
    // SAFETY: refused.
    unsafe {
        let not_a_device_address = host.as_ptr() as CUdeviceptr;
        let refused = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(
            sys::cuMemcpyHtoDAsync_v2(not_a_device_address, host.as_ptr().cast(), 64, on),
            refused
        );
        assert_eq!(
            sys::cuMemcpyHtoDAsync_v2(address, address as *const _, 64, on),
            refused
        );
        assert_eq!(sys::cuMemcpyDtoDAsync_v2(address, 0, 64, on), refused);
        assert_eq!(sys::cuMemsetD32Async(address + 2, 1, 1, on), refused);
        assert_eq!(
            sys::cuMemcpyDtoDAsync_v2(address, address, 0, on),
            CUresult::CUDA_SUCCESS
        );
    }
    stream.synchronize().unwrap();
}

#[test]
fn forked_child_cannot_use_driver() {
    if softcuda::again!() {
        return;
    }
    let (_context, _stream) = start();
    // SAFETY: the child calls one function, which checks the process id before it takes any lock,
    // and exits.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let mut count = 0;
            let refused = sys::cuDeviceGetCount(&mut count) == CUresult::CUDA_ERROR_NOT_INITIALIZED;
            libc::_exit(if refused { 0 } else { 1 });
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
}

#[test]
fn random_pauses_change_no_result() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:11") {
        return;
    }
    let (context, one) = start();
    let two = context.new_stream().unwrap();
    let address = malloc(1000);
    for value in 0..50_u8 {
        let (writer, reader) = if value % 2 == 0 {
            (&one, &two)
        } else {
            (&two, &one)
        };
        // SAFETY: within the allocation.
        unsafe { result::memset_d8_async(address, value, 1000, writer.cu_stream()) }.unwrap();
        reader.join(writer).unwrap();
        assert_eq!(read(reader, address, 1000), [value; 1000]);
    }
    assert_eq!(softcuda::driver().map(|driver| driver.races()), Some(0));
}
