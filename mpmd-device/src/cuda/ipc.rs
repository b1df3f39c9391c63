//! Sharing of device memory and events between the processes of one host, with CUDA IPC.
//!
//! A description (`Words`) that travels between processes is a CUDA handle of 64 bytes followed by
//! the UUID of the device. CUDA cannot open a handle in the process that created it, so this
//! process looks up its own handles in a table ([`Shown`]).
//!
//! If this process uses the device that holds the memory, the memory is opened in that device's
//! context and used like local memory. Otherwise it is opened in the context of this process's
//! first device, provided the machine has a link between the two. Then the memory can only be
//! [copied](DeviceMemory::is_far).
//!
//! Another process can use an event from its record until it is recorded again. This process does
//! not record it again while the [`Event`] exists. Events are created shareable
//! ([`Context::shares_events`]) only if there is another process to share them with. Events that
//! record times cannot be shared; in that case the owner's host reports the end of the work in a
//! message.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_char;
use std::io;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use mpmd_ids::block::Mutex;
use mpmd_transport::memory::{Arriving, DeviceMemory, DeviceSharing, Fence, Latch};

use super::calls;
use super::error::CudaError;
use super::gpu::{Context, Gpu, cuda};
use super::library::DRIVER;
use super::orphan;
use super::stream::{Event, RawEvent, RawStream, WAIT_DEFAULT, create_event, is_passed};
use mpmd_launch::variables;

/// Lengths in bytes of a CUDA handle and of a device's UUID.
const HANDLE: usize = 64;
const UUID: usize = 16;

/// An IPC description: a CUDA handle, then the UUID of its device.
pub(super) type Words = [u8; HANDLE + UUID];

/// First byte of the samples that peers try to open: it says if memory or an event follows.
const OF_MEMORY: u8 = b'M';
const OF_EVENT: u8 = b'E';

/// Driver functions that sharing needs.
const SYMBOLS: [&str; 5] = [
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
];

/// Returns an object that exports memory and events of these devices to other processes, and opens
/// theirs. `None` if there are no devices.
pub fn sharing(gpus: Vec<Arc<Gpu>>) -> Option<Arc<dyn DeviceSharing>> {
    if gpus.is_empty() {
        return None;
    }
    let contexts = gpus.iter().map(|gpu| gpu.context().clone()).collect();
    Some(Arc::new(Sharing { gpus, contexts, events: Mutex::default(), samples: OnceLock::new() }))
}

struct Sharing {
    gpus: Vec<Arc<Gpu>>,
    contexts: Vec<Arc<Context>>,
    /// Events of other processes by their descriptions. Each is opened once and kept.
    events: Mutex<HashMap<Vec<u8>, Arc<Imported>>>,
    samples: OnceLock<Result<Vec<Sample>, String>>,
}

/// Memory or an event that peers try to open at the start, to find out if sharing works. Kept alive
/// as long as the `Sharing`.
struct Sample {
    words: Vec<u8>,
    _of: Box<dyn Any + Send + Sync>,
}

/// Memory and events of a device that were shown to other processes, by handle. Used when such a
/// handle comes back.
#[derive(Default)]
pub(super) struct Shown {
    /// (address, length in bytes) of each memory, by its CUDA handle.
    memory: Mutex<HashMap<[u8; HANDLE], (u64, usize)>>,
    events: Mutex<HashMap<[u8; HANDLE], Recorded>>,
}

/// An event of this process that is never destroyed.
#[derive(Clone, Copy)]
struct Recorded(sys::CUevent);

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for Recorded {}

impl Sharing {
    /// Returns (context, is far): the context in which memory and events of the device `uuid` are
    /// opened. Far means that it is the context of another device of this process.
    fn place(&self, uuid: &[u8]) -> (&Arc<Context>, bool) {
        let near = self.contexts.iter().find(|context| context.uuid() == uuid);
        near.map_or((&self.contexts[0], true), |context| (context, false))
    }

    /// Looks up memory or an event that this process has shown to others. Calls `find` for each of
    /// this process's devices with this UUID, as several may have the same. `None` if all return
    /// `None`.
    fn own<T>(
        &self,
        uuid: &[u8],
        find: impl Fn(&Shown) -> Option<T>,
    ) -> Option<(&Arc<Context>, T)> {
        let mut same = self.contexts.iter().filter(|context| context.uuid() == uuid);
        same.find_map(|context| Some((context, find(context.shown())?)))
    }

    fn make_samples(&self) -> Result<Vec<Sample>, String> {
        if std::env::var_os(variables::CUDA_IPC).is_some_and(|value| value == "0") {
            return Err(format!("{}=0 turns it off", variables::CUDA_IPC));
        }
        if let Some(missing) = SYMBOLS.iter().find(|name| !DRIVER.has(name)) {
            return Err(format!("the CUDA driver has no {missing}"));
        }
        let mut samples = Vec::new();
        for gpu in &self.gpus {
            let context = gpu.context();
            let memory = gpu.allocator().allocate(1).map_err(|error| error.to_string())?;
            let words =
                memory.export().ok_or("the CUDA driver shows no memory to other processes")?;
            samples.push(Sample { words: [&[OF_MEMORY], words].concat(), _of: Box::new(memory) });
            let event = context.visit().and_then(|_visit| create_event(sharable()));
            let event = event.map_err(|error| error.to_string())?;
            let words = show_event(context, event.0)
                .ok_or("the CUDA driver shows no events to other processes")?;
            samples
                .push(Sample { words: [&[OF_EVENT][..], &words].concat(), _of: Box::new(event) });
        }
        // Shareable events can be created. No stream has created an event yet: this runs before the
        // first message.
        self.contexts.iter().for_each(|context| context.share_events());
        Ok(samples)
    }

    /// Returns the event with this description: opened from another process, or this process's own.
    /// An event is opened once and kept.
    fn event(&self, words: &[u8]) -> Result<Arc<Imported>, CudaError> {
        let (handle, uuid) = parts(words)?;
        let mut events = self.events.lock();
        if let Some(found) = events.get(words) {
            return Ok(found.clone());
        }
        let event = match self.own(uuid, |shown| shown.events.lock().get(&handle).copied()) {
            Some((context, Recorded(raw))) => {
                Imported { context: context.clone(), raw, is_own: true }
            }
            None => Imported::open(self.place(uuid).0, handle)?,
        };
        let event = Arc::new(event);
        events.insert(words.to_vec(), event.clone());
        Ok(event)
    }
}

impl DeviceSharing for Sharing {
    fn samples(&self) -> Result<Vec<Vec<u8>>, String> {
        match self.samples.get_or_init(|| self.make_samples()) {
            Ok(samples) => Ok(samples.iter().map(|sample| sample.words.clone()).collect()),
            Err(why) => Err(why.clone()),
        }
    }

    fn try_sample(&self, sample: &[u8]) -> Result<(), String> {
        match sample.split_first() {
            Some((&OF_MEMORY, words)) => {
                self.open(words, 1).map(drop).map_err(|error| error.to_string())
            }
            Some((&OF_EVENT, words)) => {
                self.event(words).map(drop).map_err(|error| error.to_string())
            }
            _ => Err("the sample of device memory has an unknown format".to_owned()),
        }
    }

    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        let (handle, uuid) = parts(words).map_err(io::Error::other)?;
        let own = self.own(uuid, |shown| shown.memory.lock().get(&handle).copied());
        let opened = match own {
            Some((context, (address, _))) => {
                Opened { context: context.clone(), address, bytes, is_far: false, is_own: true }
            }
            None => {
                let (context, is_far) = self.place(uuid);
                Opened::open(context, handle, bytes, is_far).map_err(io::Error::other)?
            }
        };
        let has = own.map(|(_, (_, bytes))| bytes).or_else(|| opened.found_bytes());
        if has.is_some_and(|has| has < bytes) {
            return Err(io::Error::other("memory of a device is shorter than its owner says"));
        }
        Ok(Box::new(opened))
    }

    fn tell(&self, fence: &dyn Fence) -> Option<Vec<u8>> {
        let fence = fence as &dyn Any;
        if let Some(event) = fence.downcast_ref::<Event>() {
            return event.words().map(|words| words.to_vec());
        }
        // A third process understands the description as it came from the event's owner.
        match &fence.downcast_ref::<Landing>()?.words[..] {
            [words] => Some(words.clone()),
            _ => None,
        }
    }

    fn hear(&self, words: &[&[u8]]) -> io::Result<Arc<dyn Arriving>> {
        let events = words.iter().map(|words| self.event(words)).collect::<Result<_, _>>();
        let events = events.map_err(io::Error::other)?;
        let words = words.iter().map(|words| words.to_vec()).collect();
        Ok(Arc::new(Landing::new(events, words)))
    }
}

/// Returns the description by which other processes open memory of this process, and notes the
/// memory as shown. `None` if the driver refuses.
pub(super) fn export(context: &Context, address: sys::CUdeviceptr, bytes: usize) -> Option<Words> {
    let show = || {
        let _visit = context.visit()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE] };
        // SAFETY: the address is that of an allocation, of the context that is bound; there is room
        // for the handle.
        unsafe { calls::cuIpcGetMemHandle(&raw mut handle, address) }
            .result()
            .map_err(|error| cuda("showing memory of a CUDA device to other processes", error))?;
        Ok::<_, CudaError>(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    };
    match show() {
        Ok(handle) => {
            context.shown().memory.lock().insert(handle, (address, bytes));
            Some(words(handle, context))
        }
        Err(error) => {
            tracing::debug!(%error, "memory that is not shared");
            None
        }
    }
}

/// Removes freed memory from the table of shown memory.
pub(super) fn forget(context: &Context, words: &Words) {
    if let Ok((handle, _)) = parts(words) {
        context.shown().memory.lock().remove(&handle);
    }
}

/// Returns the description by which other processes wait for an event of this process, and notes
/// the event as shown. `None` if the driver refuses. The event must never be destroyed afterwards.
pub(super) fn show_event(context: &Context, event: sys::CUevent) -> Option<Words> {
    let _visit = context.visit().ok()?;
    let mut handle = sys::CUipcEventHandle { reserved: [0; HANDLE] };
    // SAFETY: the event is alive, of the context that is bound; there is room for the handle.
    let shown = unsafe { calls::cuIpcGetEventHandle(&raw mut handle, event) }.result();
    // Events that record times cannot be shared.
    shown.inspect_err(|error| tracing::debug!(%error, "an event that is not shared")).ok()?;
    let handle = handle.reserved.map(|byte| byte.to_ne_bytes()[0]);
    context.shown().events.lock().insert(handle, Recorded(event));
    Some(words(handle, context))
}

/// Returns the creation flags of shareable events.
pub(super) fn sharable() -> u32 {
    sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32
        | sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
        | sys::CUevent_flags_enum::CU_EVENT_INTERPROCESS as u32
}

fn words(handle: [u8; HANDLE], context: &Context) -> Words {
    let mut words = [0; HANDLE + UUID];
    words[..HANDLE].copy_from_slice(&handle);
    words[HANDLE..].copy_from_slice(context.uuid());
    words
}

fn parts(words: &[u8]) -> Result<([u8; HANDLE], &[u8]), CudaError> {
    match words.split_first_chunk::<HANDLE>() {
        Some((handle, uuid)) if uuid.len() == UUID => Ok((*handle, uuid)),
        _ => Err(CudaError::new(
            "opening a CUDA IPC handle of another process",
            "",
            format!("a description of {} bytes is invalid", words.len()),
        )),
    }
}

/// Device memory of another process, or of this one if its own description came back.
struct Opened {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
    is_far: bool,
    /// True if the memory is this process's own, so there is nothing to close.
    is_own: bool,
}

impl Opened {
    fn open(
        context: &Arc<Context>,
        handle: [u8; HANDLE],
        bytes: usize,
        is_far: bool,
    ) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        // The only flag that exists, and it is required. For remote memory it enables access
        // between the devices.
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: a handle is plain bytes, which the driver validates; there is room for the
        // address.
        unsafe { calls::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }
            .result()
            .map_err(|error| cuda("opening memory of another process's CUDA device", error))?;
        Ok(Self { context: context.clone(), address, bytes, is_far, is_own: false })
    }

    /// Returns the length of the memory in bytes if the driver reports it.
    fn found_bytes(&self) -> Option<usize> {
        let _visit = self.context.visit().ok()?;
        let mut found: usize = 0;
        let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        // SAFETY: this attribute is a number of the size of `found`; the address is that of open
        // memory.
        let asked = unsafe {
            calls::cuPointerGetAttribute((&raw mut found).cast(), attribute, self.address)
        };
        asked.result().ok().map(|()| found)
    }
}

impl DeviceMemory for Opened {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn device(&self) -> u32 {
        self.context.ordinal()
    }

    fn is_far(&self) -> bool {
        self.is_far
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.is_own {
            return;
        }
        let Ok(_visit) = self.context.visit() else { return };
        // SAFETY: opened in `open`, closed once for that; work on it is over, as the owner of
        // memory has made sure before it drops it.
        if let Err(error) = unsafe { calls::cuIpcCloseMemHandle(self.address) }.result() {
            tracing::debug!(%error, "closing memory of another process's CUDA device");
        }
    }
}

/// An event of another process, or of this one if its own description came back.
pub(super) struct Imported {
    context: Arc<Context>,
    raw: sys::CUevent,
    is_own: bool,
}

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for Imported {}
// SAFETY: as above.
unsafe impl Sync for Imported {}

impl Imported {
    /// Returns true if the other process's device has reached the event, or if the driver reports
    /// an error. The context must be current.
    pub(super) fn is_passed(&self) -> bool {
        is_passed(self.raw)
    }

    fn open(context: &Arc<Context>, handle: [u8; HANDLE]) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let handle = sys::CUipcEventHandle { reserved: handle.map(|byte| byte as c_char) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a handle is plain bytes, which the driver validates; there is room for the event.
        unsafe { calls::cuIpcOpenEventHandle(&raw mut raw, handle) }
            .result()
            .map_err(|error| cuda("opening an event of another process's CUDA device", error))?;
        Ok(Self { context: context.clone(), raw, is_own: false })
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if self.is_own {
            return;
        }
        let Ok(_visit) = self.context.visit() else { return };
        // SAFETY: opened in `open`, destroyed once; CUDA lets waits for it come to their end.
        if let Err(error) = unsafe { calls::cuEventDestroy_v2(self.raw) }.result() {
            tracing::debug!(%error, "closing an event of another process");
        }
    }
}

/// A point in the work of another process's devices: the fence behind memory that the process
/// lends.
///
/// Devices of this process wait for its events. Host code learns of the end from a message of the
/// other process.
pub(super) struct Landing {
    events: Vec<Arc<Imported>>,
    words: Vec<Vec<u8>>,
    ended: OnceLock<Result<(), String>>,
    over: Latch,
    /// Contexts with work that waits for these events.
    users: Mutex<Vec<Arc<Context>>>,
}

impl Landing {
    fn new(events: Vec<Arc<Imported>>, words: Vec<Vec<u8>>) -> Self {
        let (ended, over, users) = Default::default();
        Self { events, words, ended, over, users }
    }

    /// Makes later work on a stream wait, on the device, for these events. If the other process has
    /// already failed, also starts to watch the stream's device for hanging work.
    pub(super) fn before(&self, stream: &RawStream) -> Result<(), CudaError> {
        for event in &self.events {
            // SAFETY: the event is open, as `self` holds it, and was recorded before its owner
            // described it to any process; the stream is alive.
            let issued = unsafe { calls::cuStreamWaitEvent(stream.raw, event.raw, WAIT_DEFAULT) };
            issued
                .result()
                .map_err(|error| cuda("waiting for work of another process's device", error))?;
        }
        let mut users = self.users.lock();
        if !users.iter().any(|known| Arc::ptr_eq(known, &stream.context)) {
            users.push(stream.context.clone());
        }
        drop(users);
        // If the failure arrived just before, no other call will look after this context.
        self.look_after_users();
        Ok(())
    }

    /// If the other process has reported a failure, starts threads that clean up hanging work of
    /// the contexts in `users`, and empties that list. Else does nothing.
    fn look_after_users(&self) {
        let Some(Err(why)) = self.ended.get() else { return };
        let users = std::mem::take(&mut *self.users.lock());
        users.into_iter().for_each(|user| orphan::watch(user, self.events.clone(), why.clone()));
    }
}

impl Fence for Landing {
    fn is_over(&self) -> bool {
        self.over.is_passed()
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.over.on_pass(then);
    }

    fn failure(&self) -> Option<String> {
        self.ended.get()?.clone().err()
    }
}

impl Arriving for Landing {
    fn pass(&self, result: Result<(), String>) {
        // Only the first result counts.
        let _ = self.ended.set(result);
        let waiting = self.over.pass();
        self.look_after_users();
        waiting.into_iter().for_each(|then| then());
    }

    fn fence(self: Arc<Self>) -> Arc<dyn Fence> {
        self
    }
}

impl RawEvent {
    /// Returns the description by which other processes wait for the event, created once. `None` if
    /// the event cannot be shared. From then on the event must not be destroyed.
    pub(super) fn words(&self, context: &Context) -> Option<Words> {
        *self
            .1
            .get_or_init(|| context.shares_events().then(|| show_event(context, self.0)).flatten())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::time::Duration;

    use mpmd_ids::block::mpsc::{Receiver, channel};
    use mpmd_transport::memory::Fences;

    use super::*;

    const TIME_LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn own_handles_are_found_again_and_bad_ones_refused() {
        if softcuda::again!() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let sharing = sharing(vec![gpu.clone()]).unwrap();
        assert!(super::sharing(Vec::new()).is_none());
        let memory = gpu.allocator().allocate(4096).unwrap();
        let words = memory.export().unwrap().to_vec();
        assert_eq!(memory.export().unwrap(), words);
        let again = sharing.open(&words, 4096).unwrap();
        assert_eq!(
            (again.address(), again.bytes(), again.is_far()),
            (memory.address(), 4096, false)
        );
        assert!(sharing.open(&words, 4097).map(drop).unwrap_err().to_string().contains("shorter"));
        drop((again, memory));
        assert!(sharing.open(&words, 4096).is_err(), "it is no more");
        for nonsense in [&[][..], &[7; 79], &[7; 80], &[7; 96]] {
            assert!(sharing.open(nonsense, 4096).is_err() && sharing.hear(&[nonsense]).is_err());
        }
        for sample in [&b""[..], b"?", b"M", b"E123"] {
            assert!(sharing.try_sample(sample).is_err());
        }
        let samples = sharing.samples().unwrap();
        assert_eq!((samples.len(), sharing.samples().unwrap()), (2, samples.clone()));
        // An event of a stream, shared and opened again in the same process.
        let (fence, told) = issued(&gpu, |_| Ok(()));
        let words = sharing.tell(&*fence).unwrap();
        let heard = sharing.hear(&[&words]).unwrap();
        assert_eq!(
            sharing.tell(&*heard.clone().fence()).unwrap(),
            words,
            "a third process gets the same description"
        );
        told.recv_timeout(TIME_LIMIT).unwrap().unwrap();
        assert!(!heard.is_over(), "only its owner reports the end");
        heard.pass(Err("it fell over".to_owned()));
        assert_eq!((heard.is_over(), heard.failure().as_deref()), (true, Some("it fell over")));
        let after = Fences::of([heard.fence()]);
        let (said, told) = channel();
        let then = Box::new(move |result| said.send(result).unwrap());
        gpu.compute().submit(&[&after], |_| unreachable!("its input is never made"), then);
        assert!(
            told.recv_timeout(TIME_LIMIT)
                .unwrap()
                .unwrap_err()
                .to_string()
                .contains("it fell over")
        );
    }

    type Told = Receiver<Result<(), CudaError>>;

    fn issued(
        gpu: &Gpu,
        work: impl FnOnce(&RawStream) -> Result<(), CudaError>,
    ) -> (Arc<dyn Fence>, Told) {
        let (said, told) = channel();
        let fence =
            gpu.inward().submit(&[], work, Box::new(move |result| said.send(result).unwrap()));
        (fence, told)
    }

    /// Blocks a stream until the sender of the channel `until` sends or is dropped.
    extern "C" fn stand_still(until: *mut c_void) {
        // SAFETY: the test passes this very type, once.
        let until = unsafe { Box::from_raw(until.cast::<Receiver<()>>()) };
        let _ = until.recv();
    }

    #[test]
    fn work_waiting_for_an_ended_process_fails_the_device() {
        if softcuda::again!() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let (go_on, until) = channel::<()>();
        let never = Arc::new(Mutex::new(None));
        let made = never.clone();
        let (_fence, told_there) = issued(&gpu, move |stream| {
            let until = Box::into_raw(Box::new(until)).cast();
            // SAFETY: the function takes the box over, and runs once.
            let stood = unsafe { calls::cuLaunchHostFunc(stream.raw, Some(stand_still), until) };
            stood.result().map_err(|error| cuda("standing still", error))?;
            let event = create_event(sharable())?;
            event.record(stream)?;
            *made.lock() = Some(event);
            Ok(())
        });
        let raw = never.lock().as_ref().unwrap().0;
        let event = Arc::new(Imported { context: gpu.context().clone(), raw, is_own: true });
        let landing = Arc::new(Landing::new(vec![event], vec![vec![1]]));
        let (said, told) = channel();
        let then = Box::new(move |result| said.send(result).unwrap());
        let fence =
            gpu.compute().submit(&[&Fences::of([landing.clone().fence()])], |_| Ok(()), then);
        assert!(!fence.is_over());
        landing.pass(Err("process 3 has ended".to_owned()));
        let error = told.recv_timeout(TIME_LIMIT).unwrap().unwrap_err();
        assert!(error.to_string().contains("process 3 has ended") && fence.is_over(), "{error}");
        assert!(error.is_lost() && fence.is_lost(), "the work may still run");
        assert_eq!(told_there.recv_timeout(TIME_LIMIT).unwrap(), Err(error.clone()));
        let (said, told) = channel();
        let fence = gpu.compute().submit(
            &[],
            |_| Ok(()),
            Box::new(move |result| said.send(result).unwrap()),
        );
        let later = told.recv_timeout(TIME_LIMIT).unwrap().unwrap_err();
        assert_eq!(later.to_string(), error.to_string(), "same message");
        assert!(
            !later.is_lost() && fence.is_over() && !fence.is_lost(),
            "nothing of it was issued"
        );
        drop(gpu);
        go_on.send(()).unwrap();
    }
}
