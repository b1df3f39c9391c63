//! Tests of interprocess memory and events. A test under the driver starts its own program again as
//! the other process. The two processes exchange lines through the other's standard input and
//! output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream};

const OTHER: &str = "SOFTCUDA_TEST_OTHER";
const LAZY: u32 = 1;

/// The second process of a test, with pipes to talk to it; dropping this value kills the process.
struct Other {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the named test again in a second process, which finds `OTHER` in its environment.
    fn start(name: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                &format!("ipc::{name}"),
                "--nocapture",
                "--test-threads=1",
            ])
            .env(OTHER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Other { child, to, from }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Returns the next line from the second process, and skips the output of the test runner.
    /// Blocks until there is a line.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.from.read_line(&mut line).unwrap() > 0,
                "the other side has ended"
            );
            if let Some((_, said)) = line.trim_end().split_once("says: ") {
                return said.to_owned();
            }
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_other() -> bool {
    std::env::var_os(OTHER).is_some()
}

/// Sends a line from the second process to the first.
fn say(line: &str) {
    println!("says: {line}");
}

/// Returns the next line from the first process, in the second. Blocks until there is one. Exits if
/// the first process has ended.
fn hear() -> String {
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).unwrap() == 0 {
        std::process::exit(0);
    }
    line.trim_end().to_owned()
}

fn to_text(bytes: [i8; 64]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{:02x}", *byte as u8))
        .collect()
}

fn from_text(text: &str) -> [i8; 64] {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap() as i8;
    std::array::from_fn(byte)
}

fn start() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    (context, stream)
}

fn malloc(bytes: usize) -> sys::CUdeviceptr {
    // SAFETY: allocation has no conditions beyond a context.
    unsafe { result::malloc_sync(bytes) }.unwrap()
}

fn export(address: sys::CUdeviceptr) -> Result<sys::CUipcMemHandle, DriverError> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: a place for the handle; any address may be asked about.
    unsafe { sys::cuIpcGetMemHandle(&mut handle, address) }
        .result()
        .map(|()| handle)
}

fn open(handle: sys::CUipcMemHandle) -> Result<sys::CUdeviceptr, DriverError> {
    let mut address = 0;
    // SAFETY: a place for the address; any handle may be tried.
    unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, LAZY) }
        .result()
        .map(|()| address)
}

fn close(address: sys::CUdeviceptr) -> Result<(), DriverError> {
    // SAFETY: nothing uses the mapping any more.
    unsafe { sys::cuIpcCloseMemHandle(address) }.result()
}

fn read(stream: &CudaStream, address: sys::CUdeviceptr, bytes: usize) -> Vec<u8> {
    let mut back = vec![0_u8; bytes];
    // SAFETY: the address is of mapped device memory that is this long.
    unsafe { result::memcpy_dtoh_async(&mut back, address, stream.cu_stream()) }.unwrap();
    stream.synchronize().unwrap();
    back
}

fn write(stream: &CudaStream, address: sys::CUdeviceptr, bytes: &[u8]) {
    // SAFETY: the address is of mapped device memory that is this long.
    unsafe { result::memcpy_htod_async(address, bytes, stream.cu_stream()) }.unwrap();
    stream.synchronize().unwrap();
}

/// Runs the second process: exports 10 bytes with the values 1 to 10, then obeys the commands
/// `read` and `free`.
fn exporter() -> ! {
    let (_context, stream) = start();
    let address = malloc(10);
    write(&stream, address, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    say(&to_text(export(address).unwrap().reserved));
    loop {
        match hear().as_str() {
            "read" => say(&format!("{:?}", read(&stream, address, 10))),
            "free" => {
                // SAFETY: allocated above. The first process still has it open, which is the test.
                unsafe { result::free_sync(address) }.unwrap();
                say("freed");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn memory_is_shared_by_processes() {
    if !is_other() && softcuda::again!() {
        return;
    }
    if is_other() {
        exporter();
    }
    let mut other = Other::start("memory_is_shared_by_processes");
    let (_context, stream) = start();
    let handle = sys::CUipcMemHandle {
        reserved: from_text(&other.hear()),
    };
    let address = open(handle).unwrap();
    assert_eq!(read(&stream, address, 10), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    write(&stream, address, &[9; 10]);
    other.say("read");
    assert_eq!(other.hear(), format!("{:?}", [9; 10]));

    // A second open gives the same address, which stays valid until it is closed as often.
    assert_eq!(open(handle), Ok(address));
    close(address).unwrap();
    assert_eq!(read(&stream, address, 10), [9; 10]);
    // This process can neither free nor export it.
    let invalid = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: refused, so nothing happens.
    assert_eq!(unsafe { result::free_sync(address) }, Err(invalid));
    assert_eq!(export(address).unwrap_err(), invalid);
    // Undefined in CUDA: after the owner frees it, the memory stays mapped and is garbage.
    other.say("free");
    assert_eq!(other.hear(), "freed");
    assert_eq!(read(&stream, address, 10), [0xDD; 10]);
    close(address).unwrap();
    assert_eq!(close(address), Err(invalid));
    assert_eq!(
        open(handle),
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE))
    );
}

#[test]
fn killed_exporter_keeps_mappings_but_opens_fail() {
    if !is_other() && softcuda::again!() {
        return;
    }
    if is_other() {
        exporter();
    }
    let mut other = Other::start("killed_exporter_keeps_mappings_but_opens_fail");
    let (_context, stream) = start();
    let handle = sys::CUipcMemHandle {
        reserved: from_text(&other.hear()),
    };
    let address = open(handle).unwrap();
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    assert_eq!(read(&stream, address, 10), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(
        open(handle),
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_HANDLE))
    );
    close(address).unwrap();
}

#[test]
fn export_of_unsuitable_memory_is_refused() {
    if softcuda::again!() {
        return;
    }
    let (_context, stream) = start();
    let invalid = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);
    // SAFETY: freed by the end of the process.
    let in_order = unsafe { result::malloc_async(stream.cu_stream(), 64) }.unwrap();
    assert_eq!(export(in_order).unwrap_err(), invalid);
    let address = malloc(64);
    assert_eq!(export(address + 8).unwrap_err(), invalid);
    let own = export(address).unwrap();
    assert_eq!(
        open(own),
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT))
    );
    assert_eq!(
        open(sys::CUipcMemHandle { reserved: [7; 64] }),
        Err(invalid)
    );
    let mut nowhere = 0;
    // SAFETY: a place for an address.
    let without_flag = unsafe { sys::cuIpcOpenMemHandle_v2(&mut nowhere, own, 0) };
    assert_eq!(without_flag, CUresult::CUDA_ERROR_INVALID_VALUE);
}

fn event(flags: u32) -> Result<sys::CUevent, DriverError> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a place for the event.
    unsafe { sys::cuEventCreate(&mut event, flags) }
        .result()
        .map(|()| event)
}

/// Runs the second process: exports an event that is recorded on a stream. A host function blocks
/// the stream until the first process sends `go`.
fn recorder() -> ! {
    unsafe extern "C" fn until_told(_: *mut std::ffi::c_void) {
        assert_eq!(hear(), "go");
    }
    let (_context, stream) = start();
    let event = event(2 | 4).unwrap();
    let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
    // SAFETY: a place for the handle; a function that may be called from any thread; a stream and
    // an event that live.
    unsafe {
        sys::cuIpcGetEventHandle(&mut handle, event)
            .result()
            .unwrap();
        sys::cuLaunchHostFunc(stream.cu_stream(), Some(until_told), std::ptr::null_mut())
            .result()
            .unwrap();
        result::event::record(event, stream.cu_stream()).unwrap();
    }
    say(&to_text(handle.reserved));
    stream.synchronize().unwrap();
    say("done");
    hear();
    std::process::exit(0);
}

fn opened_event(other: &mut Other) -> sys::CUevent {
    let handle = sys::CUipcEventHandle {
        reserved: from_text(&other.hear()),
    };
    let mut event = std::ptr::null_mut();
    // SAFETY: a place for the event.
    unsafe { sys::cuIpcOpenEventHandle(&mut event, handle) }
        .result()
        .unwrap();
    event
}

#[test]
fn a_stream_waits_for_an_event_of_another_process() {
    if !is_other() && softcuda::again!() {
        return;
    }
    if is_other() {
        recorder();
    }
    let mut other = Other::start("a_stream_waits_for_an_event_of_another_process");
    let (_context, stream) = start();
    let event = opened_event(&mut other);
    let not_ready = Err(DriverError(CUresult::CUDA_ERROR_NOT_READY));
    // SAFETY: stream and event live.
    unsafe {
        assert_eq!(result::event::query(event), not_ready);
        result::stream::wait_event(
            stream.cu_stream(),
            event,
            sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
        )
        .unwrap();
        assert_eq!(sys::cuStreamQuery(stream.cu_stream()).result(), not_ready);
        other.say("go");
        stream.synchronize().unwrap();
        assert_eq!(result::event::query(event), Ok(()));
    }
    assert_eq!(other.hear(), "done");
}

#[test]
fn a_wait_ends_when_the_recorder_was_killed() {
    if !is_other() && softcuda::again!() {
        return;
    }
    if is_other() {
        recorder();
    }
    let mut other = Other::start("a_wait_ends_when_the_recorder_was_killed");
    let (_context, stream) = start();
    let event = opened_event(&mut other);
    // SAFETY: stream and event live.
    unsafe {
        result::stream::wait_event(
            stream.cu_stream(),
            event,
            sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
        )
        .unwrap();
        assert!(sys::cuStreamQuery(stream.cu_stream()) == CUresult::CUDA_ERROR_NOT_READY);
    }
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn only_interprocess_events_are_exported() {
    if softcuda::again!() {
        return;
    }
    let (_context, _stream) = start();
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(
        event(4),
        Err(DriverError(invalid)),
        "timed events are not for other processes"
    );
    let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
    let plain = event(2).unwrap();
    // SAFETY: a place for the handle, and an event that lives.
    let refused = unsafe { sys::cuIpcGetEventHandle(&mut handle, plain) };
    assert_eq!(refused, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn open_block_refuses_a_second_handle() {
    if !is_other() && softcuda::again!("SOFTCUDA_BLOCK" = "2097152") {
        return;
    }
    if is_other() {
        let (_context, stream) = start();
        // The last one is too large for the rest of the block.
        let made = [10, 10, 2 << 20].map(malloc);
        for (address, value) in made.into_iter().zip(1..) {
            write(&stream, address, &[value; 10]);
            say(&to_text(export(address).unwrap().reserved));
        }
        assert_eq!(made[0] >> 21, made[1] >> 21);
        hear();
        std::process::exit(0);
    }
    let mut other = Other::start("open_block_refuses_a_second_handle");
    let (_context, stream) = start();
    let [one, two, three] = [(); 3].map(|()| sys::CUipcMemHandle {
        reserved: from_text(&other.hear()),
    });
    let first = open(one).unwrap();
    let mapped = DriverError(CUresult::CUDA_ERROR_ALREADY_MAPPED);
    assert_eq!((open(one), open(two)), (Ok(first), Err(mapped)));
    assert_eq!(read(&stream, first, 10), [1; 10]);
    // The whole block is visible.
    assert_eq!(read(&stream, first + 4096, 10), [2; 10]);
    (0..2).for_each(|_| close(first).unwrap());
    let second = open(two).unwrap();
    assert_eq!(read(&stream, second, 10), [2; 10]);
    assert_eq!(read(&stream, open(three).unwrap(), 10), [3; 10]);
    close(second).unwrap();
}

#[test]
fn events_beyond_the_limits_are_refused() {
    if softcuda::again!("SOFTCUDA_EVENTS" = "3", "SOFTCUDA_IPC_EVENTS" = "1") {
        return;
    }
    let (_context, _stream) = start();
    // A stream of cudarc's may have events of its own.
    let refused = Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    let shared = event(2 | 4).unwrap();
    assert_eq!(event(2 | 4), refused);
    let more: Vec<_> = std::iter::repeat_with(|| event(2))
        .take_while(Result::is_ok)
        .collect();
    assert_eq!((more.len() <= 2, event(2)), (true, refused));
    // SAFETY: created above, and destroyed once.
    unsafe { result::event::destroy(shared) }.unwrap();
    assert!(event(2 | 4).is_ok());
}

#[test]
fn wait_for_a_killed_recorder_hangs_on_request() {
    if !is_other() && softcuda::again!("SOFTCUDA_ORPHANS" = "hang") {
        return;
    }
    if is_other() {
        recorder();
    }
    let mut other = Other::start("wait_for_a_killed_recorder_hangs_on_request");
    let (context, stream) = start();
    let event = opened_event(&mut other);
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: stream and event live.
    unsafe {
        result::stream::wait_event(stream.cu_stream(), event, flags).unwrap();
        for _ in 0..10 {
            assert!(sys::cuStreamQuery(stream.cu_stream()) == CUresult::CUDA_ERROR_NOT_READY);
            assert!(result::event::query(event).is_err());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    // To close them would wait for the stream.
    std::mem::forget((context, stream));
}

#[test]
fn registering_is_refused_on_request() {
    if softcuda::again!("SOFTCUDA_PIN" = "refuse") {
        return;
    }
    let (_context, _stream) = start();
    let mut page = vec![0u8; 4096];
    // SAFETY: refused, so nothing happens.
    let refused = unsafe { sys::cuMemHostRegister_v2(page.as_mut_ptr().cast(), page.len(), 0) };
    assert_eq!(refused, CUresult::CUDA_ERROR_OPERATING_SYSTEM);
}
