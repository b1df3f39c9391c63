//! Devices, their primary contexts, and each thread's stack of current contexts. Below: all that
//! belongs to a context and ends with it, and its memory.

pub(crate) mod event;
pub(crate) mod ipc;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod races;
pub(crate) mod shared_event;
pub(crate) mod stream;

use std::cell::{Cell, RefCell};
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::faults::{First, first};
use crate::handles::{Handle, Handles};
use crate::settings::settings;

use memory::space;
use stream::Stream;

/// Version of CUDA that this driver has: 12.8, in CUDA's encoding.
const VERSION: i32 = 12080;
const NAME: &str = "softcuda (a driver in software, for tests)";

/// Id of the process that called `cuInit`. In a child that is forked after the call, CUDA does not
/// work.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);
/// The primary context of each device, by device number.
static PRIMARY: Mutex<Vec<PrimaryContext>> = Mutex::new(Vec::new());
static CONTEXTS: Handles<Context> = Handles::new(1);

thread_local! {
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// The primary context of a device, if it exists, and its retain count.
#[derive(Clone, Default)]
struct PrimaryContext {
    context: Option<Arc<Context>>,
    retained: u32,
}

/// The primary context of a device, with its streams. Any thread can make it current.
pub(crate) struct Context {
    pub(crate) device: u32,
    pub(crate) handle: Handle,
    flags: AtomicU32,
    /// `CUresult` of the first failure of the context's work, which every later call returns; 0 if
    /// none.
    failed: AtomicU32,
    ended: AtomicBool,
    /// Lock that is held while work is issued on the default stream or on a stream ordered with it.
    /// It makes their order the same as the order of the calls.
    pub(crate) order: Mutex<()>,
    streams: Mutex<Vec<Weak<Stream>>>,
    null: OnceLock<Arc<Stream>>,
    peers: Mutex<Vec<u32>>,
    pub(crate) stack_limit: AtomicU64,
}

impl Context {
    /// Fails with the first error of this context's work, if there is one. That error is never
    /// cleared.
    pub(crate) fn check(&self) -> Result {
        match self.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Records and prints the first failure of the context's work; later failures are ignored.
    pub(crate) fn fail(&self, code: Code, work: &str) {
        if self
            .failed
            .compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            eprintln!(
                "softcuda: device {}: {work} failed with error {}",
                self.device, code.0
            );
        }
    }

    /// Returns the streams that still exist. They include the default stream if it was used, and
    /// destroyed streams that still have work.
    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = self.streams.lock();
        streams.retain(|stream| stream.strong_count() > 0);
        streams.iter().filter_map(Weak::upgrade).collect()
    }

    /// Adds a stream to this context's list, without keeping it alive.
    pub(crate) fn add(&self, stream: &Arc<Stream>) {
        self.streams.lock().push(Arc::downgrade(stream));
    }

    /// Returns the default stream. The first call starts the stream's thread.
    pub(crate) fn null(self: &Arc<Self>) -> Arc<Stream> {
        self.null
            .get_or_init(|| Stream::start(self.clone(), 0, 0, 0))
            .clone()
    }

    /// Returns the default stream if it was ever used, otherwise `None`. Starts no thread.
    pub(crate) fn null_if_used(&self) -> Option<Arc<Stream>> {
        self.null.get().cloned()
    }

    /// Blocks until all work issued so far on all streams is done. Fails with the context's first
    /// error.
    pub(crate) fn synchronize(&self) -> Result {
        for stream in self.streams() {
            stream.synchronize();
        }
        self.check()
    }

    fn end(&self) {
        for stream in self.streams() {
            stream.synchronize();
        }
        self.ended.store(true, Ordering::Release);
        stream::end_all(self);
        event::end_all(self);
        module::end_all(self);
        ipc::end_all(self.device);
        space().free_all(self.device);
        let _ = CONTEXTS.remove(self.handle);
    }
}

/// Fails with `CUDA_ERROR_NOT_INITIALIZED` unless `cuInit` was called in this process itself. Fails
/// with `CUDA_ERROR_NOT_PERMITTED` (800) within a host function.
pub(crate) fn initialized() -> Result {
    if IN_HOST_FUNCTION.get() {
        eprintln!("softcuda: CUDA was called from a host function");
        return Err(Code(800));
    }
    if INITIALIZED.load(Ordering::Acquire) == std::process::id() {
        Ok(())
    } else {
        Err(Code::NOT_INITIALIZED)
    }
}

/// Runs a program's host function in the calling thread. CUDA calls in it fail.
pub(crate) fn as_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// Returns the context of the calling thread.
///
/// # Errors
///
/// `CUDA_ERROR_INVALID_CONTEXT` if the thread has none, `CUDA_ERROR_CONTEXT_IS_DESTROYED` if it has
/// ended. An error of the context's work is not checked here; see [`Context::check`].
pub(crate) fn current() -> Result<Arc<Context>> {
    initialized()?;
    context(stack(|stack| stack.last().copied())?.ok_or(Code::INVALID_CONTEXT)?)
}

/// Runs `with` on the calling thread's stack of context handles, the current one last. Fails with
/// `CUDA_ERROR_INVALID_CONTEXT` in a thread that is ending.
fn stack<R>(with: impl FnOnce(&mut Vec<Handle>) -> R) -> Result<R> {
    CURRENT
        .try_with(|stack| with(&mut stack.borrow_mut()))
        .map_err(|_| Code::INVALID_CONTEXT)
}

/// Returns the context of a handle; fails with `CUDA_ERROR_CONTEXT_IS_DESTROYED` if there is none.
pub(crate) fn context(handle: Handle) -> Result<Arc<Context>> {
    CONTEXTS.get(handle).map_err(|_| Code::CONTEXT_IS_DESTROYED)
}

/// Returns the primary context of a device; fails with `CUDA_ERROR_INVALID_CONTEXT` if the device
/// has none.
pub(crate) fn primary(device: u32) -> Result<Arc<Context>> {
    PRIMARY.lock()[device as usize]
        .context
        .clone()
        .ok_or(Code::INVALID_CONTEXT)
}

pub(crate) fn device(ordinal: i32) -> Result<u32> {
    initialized()?;
    u32::try_from(ordinal)
        .ok()
        .filter(|at| *at < settings().devices)
        .ok_or(Code::INVALID_DEVICE)
}

/// Returns an id of a device that is the same in all processes of one user and unique to that user.
pub(crate) fn uuid(device: u32) -> [u8; 16] {
    let mut uuid = *b"softcuda\0\0\0\0\0\0\0\0";
    // SAFETY: a call without arguments that cannot fail.
    let user = unsafe { libc::getuid() };
    uuid[8..12].copy_from_slice(&user.to_be_bytes());
    uuid[12..].copy_from_slice(&device.to_be_bytes());
    uuid
}

/// Bytes of shared memory that the driver reserves for each block.
pub(crate) const RESERVED_SHARED: u32 = 1 << 10;

/// Returns a device attribute by CUDA's number; attributes not listed here are 0.
fn attribute(device: u32, attribute: u32) -> i32 {
    match attribute {
        1..=3 => 1024,        // threads of a block; x, y
        4 => 64,              // z
        5 => i32::MAX,        // grid x
        6 | 7 => 65535,       // grid y, z
        8 => 48 << 10,        // shared memory of a block
        9 => 64 << 10,        // constant memory
        10 => 32,             // warp
        11 => i32::MAX,       // pitch
        12 | 82 => 65536,     // registers
        13 | 36 => 1_000_000, // clocks, kHz
        14 => 512,            // texture alignment
        // overlap, host mapping, kernels at once, ECC, one address space, priorities
        15 | 19 | 31 | 32 | 41 | 78 => 1,
        16 => 4,                 // multiprocessors
        33 => device as i32 + 1, // PCI bus
        37 => 1024,              // memory bus, bits
        38 => 4 << 20,           // L2
        39 => 2048,              // threads of a multiprocessor
        40 => 2,                 // copy engines
        75 => 8,                 // compute capability 8.0
        // shared memory of a multiprocessor, and of a block that asks for it
        81 => (settings().shared + RESERVED_SHARED) as i32,
        97 => settings().shared as i32,
        91 | 99 | 115 | 125 => 1, // registered memory at its own address, registering, pools
        106 => 32,                // blocks of a multiprocessor
        111 => RESERVED_SHARED as i32, // reserved shared memory
        _ => 0,
    }
}

api! {
    /// Initializes the driver for this process. Fails with `CUDA_ERROR_NO_DEVICE` if the settings
    /// give no device, and in a child forked after the first call.
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if settings().devices == 0 {
            return Err(Code::NO_DEVICE);
        }

        let earlier = INITIALIZED.compare_exchange(
            0,
            std::process::id(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        if earlier.is_ok() {
            PRIMARY
                .lock()
                .resize(settings().devices as usize, PrimaryContext::default());
        }

        initialized()
    }
}

api! {
    /// Returns the version of CUDA: 1000 times the major version plus 10 times the minor one.
    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(VERSION)
    }
}

api! {
    /// Returns the number of devices, from the setting `SOFTCUDA_DEVICES`.
    fn cuDeviceGetCount(count: Out<i32>) {
        initialized()?;
        count.set(settings().devices as i32)
    }
}

api! {
    /// Returns the handle of a device: its ordinal. Fails with `CUDA_ERROR_INVALID_DEVICE` for an
    /// ordinal without a device.
    fn cuDeviceGet(handle: Out<i32>, ordinal: i32) {
        handle.set(device(ordinal)? as i32)
    }
}

api! {
    /// Writes a device's name and a final zero, cut to `room` bytes.
    fn cuDeviceGetName(name: Out<c_char>, room: i32, dev: i32) {
        device(dev)?;
        let room = usize::try_from(room).ok().filter(|room| *room > 0).ok_or(Code::INVALID_VALUE)?;
        let text = NAME.bytes().take(room - 1).chain([0]);
        name.set_all(text.map(|byte| byte as c_char))
    }
}

api! {
    /// Returns a 16-byte id of a device, the same in every process of this user.
    fn cuDeviceGetUuid(id: Out<[u8; 16]>, dev: i32) {
        id.set(uuid(device(dev)?))
    }
}

api! {
    /// Returns a 16-byte id of a device, the same in every process of this user.
    fn cuDeviceGetUuid_v2(id: Out<[u8; 16]>, dev: i32) {
        id.set(uuid(device(dev)?))
    }
}

api! {
    /// Writes an invented PCI address of a device, `0000:01:00.0` for device 0, to a buffer of at
    /// least 13 bytes.
    fn cuDeviceGetPCIBusId(text: Out<c_char>, room: i32, dev: i32) {
        let device = device(dev)?;
        let room =
            usize::try_from(room).ok().filter(|room| *room >= 13).ok_or(Code::INVALID_VALUE)?;
        let id = format!("0000:{:02X}:00.0", device + 1);
        text.set_all(id.bytes().take(room - 1).chain([0]).map(|byte| byte as c_char))
    }
}

api! {
    /// Returns an attribute of a device by CUDA's number. Attributes that are not imitated are 0.
    fn cuDeviceGetAttribute(value: Out<i32>, number: u32, dev: i32) {
        if number == 0 {
            return Err(Code::INVALID_VALUE);
        }
        value.set(attribute(device(dev)?, number))
    }
}

api! {
    /// Returns the memory size of a device in bytes.
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, dev: i32) {
        device(dev)?;
        bytes.set(settings().memory as usize)
    }
}

api! {
    /// Reports whether one device can access another's memory: 1 for two different devices, 0 for
    /// the same.
    fn cuDeviceCanAccessPeer(can: Out<i32>, dev: i32, peer: i32) {
        can.set(i32::from(device(dev)? != device(peer)?))
    }
}

api! {
    /// Returns the handle of a device's primary context and adds one to its retain count. Creates
    /// the context if there is none.
    fn cuDevicePrimaryCtxRetain(ctx: Out<Handle>, dev: i32) {
        let device = device(dev)?;
        ctx.required()?;
        first(First::Context);

        let mut primary = PRIMARY.lock();
        let PrimaryContext { context, retained } = &mut primary[device as usize];
        let context = context.get_or_insert_with(|| {
            CONTEXTS.insert(|handle| Context {
                device,
                handle,
                flags: AtomicU32::new(0),
                failed: AtomicU32::new(0),
                ended: AtomicBool::new(false),
                order: Mutex::new(()),
                streams: Mutex::default(),
                null: OnceLock::new(),
                peers: Mutex::default(),
                stack_limit: AtomicU64::new(1024),
            })
        });

        *retained += 1;
        ctx.set(context.handle)
    }
}

fn release(device: u32, all: bool) -> Result {
    let mut primary = PRIMARY.lock();
    let PrimaryContext { context, retained } = &mut primary[device as usize];
    if *retained == 0 {
        return Err(Code::INVALID_CONTEXT);
    }
    *retained = if all { 0 } else { *retained - 1 };

    // Under the lock: this frees all memory of the device, including memory of a context retained
    // after it.
    if *retained == 0
        && let Some(context) = context.take()
    {
        context.end();
    }
    Ok(())
}

api! {
    /// Takes one from the retain count of a primary context. The last release waits for its work,
    /// ends it, and frees its streams, events, modules and memory.
    fn cuDevicePrimaryCtxRelease_v2(dev: i32) {
        release(device(dev)?, false)
    }
}

api! {
    /// Ends a primary context after its work, however often it is retained. Does nothing if the
    /// device has none.
    fn cuDevicePrimaryCtxReset_v2(dev: i32) {
        match release(device(dev)?, true) {
            // A device without a context needs no reset.
            Err(Code::INVALID_CONTEXT) => Ok(()),
            other => other,
        }
    }
}

api! {
    /// Stores the flags that choose how threads wait in a primary context; here all waits sleep. If
    /// the device has no context, the flags are lost.
    fn cuDevicePrimaryCtxSetFlags_v2(dev: i32, flags: u32) {
        let device = device(dev)?;
        if flags & !0x1F != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(context) = &PRIMARY.lock()[device as usize].context {
            context.flags.store(flags, Ordering::Relaxed);
        }
        Ok(())
    }
}

api! {
    /// Returns the flags of a primary context, and 1 if the context exists or 0 if not.
    fn cuDevicePrimaryCtxGetState(dev: i32, flags: Out<u32>, active: Out<i32>) {
        let device = device(dev)?;
        let primary = PRIMARY.lock();
        let context = &primary[device as usize].context;
        flags.set(context.as_ref().map_or(0, |context| context.flags.load(Ordering::Relaxed)))?;
        active.set(i32::from(context.is_some()))
    }
}

api! {
    /// Replaces the context on top of the calling thread's stack; a null handle only removes it.
    fn cuCtxSetCurrent(ctx: Handle) {
        initialized()?;
        if ctx != 0 {
            context(ctx)?;
        }
        stack(|stack| {
            stack.pop();
            if ctx != 0 {
                stack.push(ctx);
            }
        })
    }
}

api! {
    /// Returns the context on top of the calling thread's stack, or null.
    fn cuCtxGetCurrent(ctx: Out<Handle>) {
        initialized()?;
        ctx.set(stack(|stack| stack.last().copied())?.unwrap_or(0))
    }
}

api! {
    /// Pushes a context onto the calling thread's stack of contexts.
    fn cuCtxPushCurrent_v2(ctx: Handle) {
        initialized()?;
        context(ctx)?;
        stack(|stack| stack.push(ctx))
    }
}

api! {
    /// Removes the context on top of the calling thread's stack and returns it. Fails with
    /// `CUDA_ERROR_INVALID_CONTEXT` if the stack is empty.
    fn cuCtxPopCurrent_v2(ctx: Out<Handle>) {
        initialized()?;
        let popped = stack(Vec::pop)?.ok_or(Code::INVALID_CONTEXT)?;
        ctx.set_if_wanted(popped);
        Ok(())
    }
}

api! {
    /// Returns the device of the calling thread's context.
    fn cuCtxGetDevice(dev: Out<i32>) {
        dev.set(current()?.device as i32)
    }
}

api! {
    /// Blocks until all work issued in the calling thread's context is done. Fails with the
    /// context's first error.
    fn cuCtxSynchronize() {
        let context = current()?;
        let clock = races::now_of_all(&context);
        context.synchronize()?;
        races::host_saw(&clock);
        Ok(())
    }
}

api! {
    /// Always fails, because the primary contexts are the only ones.
    fn cuCtxDestroy_v2(context: Handle) {
        let _ = context;
        Err(Code::INVALID_CONTEXT)
    }
}

api! {
    /// Stores the flags of the current context; they change nothing here.
    fn cuCtxSetFlags(flags: u32) {
        current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
}

api! {
    /// Returns the flags of the current context.
    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.set(current()?.flags.load(Ordering::Relaxed))
    }
}

api! {
    /// Records that the current context may access another device's memory. Access works here
    /// without this call. A second call for the same device fails.
    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let mine = current()?;
        mine.check()?;
        let peer = context(peer)?.device;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if peer == mine.device {
            return Err(Code::INVALID_CONTEXT);
        }

        let mut peers = mine.peers.lock();
        if peers.contains(&peer) {
            return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
        }
        peers.push(peer);
        Ok(())
    }
}

api! {
    /// Returns a limit of the current context. Only the stack limit (0) can change. The limits of
    /// `printf` (1) and of the heap (2) are fixed.
    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        let context = current()?;
        match limit {
            0 => value.set(context.stack_limit.load(Ordering::Relaxed) as usize),
            1 => value.set(1 << 20),
            2 => value.set(8 << 20),
            _ => Err(Code::UNSUPPORTED_LIMIT),
        }
    }
}

api! {
    /// Sets a limit of the current context. Stores the stack limit (0), which has no effect.
    /// Ignores the limits of `printf` (1) and of the heap (2).
    fn cuCtxSetLimit(limit: u32, value: usize) {
        let context = current()?;
        match limit {
            0 => context.stack_limit.store(value as u64, Ordering::Relaxed),
            1 | 2 => {}
            _ => return Err(Code::UNSUPPORTED_LIMIT),
        }
        Ok(())
    }
}

api! {
    /// Returns the lowest priority of streams, 0, and the highest, -5.
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }
}
