//! Memory and events of CUDA devices, between processes of one host (CUDA IPC).
//!
//! Words, to those who carry them, are CUDA's own handle of 64 bytes and the identity of the device
//! that it is of. What this process has shown itself it finds again in its own books: CUDA opens no
//! handle in the process that made it.
//!
//! Memory is opened in the context of the very device that it is in, where this process has that
//! one, and is used there as its own. Else it is opened in the context of this process's first
//! device, which reaches it from afar if the machine has a way between the two: then it is only to
//! be [copied](DeviceMemory::is_far).
//!
//! An event is of use to another process from its record on until it is recorded again, which this
//! one does not do while it holds the [`Event`]. Events are made to be shown
//! ([`Context::shares_events`]) only where there is somebody to show them to: those that keep time
//! cannot be, so where that is wanted peers hear of an end on the host.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_char;
use std::io;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use mpmd_transport::memory::{Arriving, DeviceMemory, DeviceSharing, Fence, Latch};
use parking_lot::Mutex;

use super::calls;
use super::error::CudaError;
use super::gpu::{Context, Gpu, cuda};
use super::line::{Event, RawEvent, Stream, WAIT_DEFAULT, create_event, is_passed};
use super::orphan;
use mpmd_launch::variables;

/// Bytes of CUDA's handles, and of what a device is known by.
const HANDLE: usize = 64;
const UUID: usize = 16;

/// A handle, then the device that it is of.
pub(super) type Words = [u8; HANDLE + UUID];

/// What samples begin with: one of memory, or of an event.
const OF_MEMORY: u8 = b'M';
const OF_EVENT: u8 = b'E';

/// Functions without which nothing is shared.
const SYMBOLS: [&str; 5] = [
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
];

/// How a process with these devices shares their memory with others; `None` where it has none.
pub(crate) fn sharing(gpus: Vec<Arc<Gpu>>) -> Option<Arc<dyn DeviceSharing>> {
    if gpus.is_empty() {
        return None;
    }
    let contexts = gpus.iter().map(|gpu| gpu.context().clone()).collect();
    Some(Arc::new(Sharing { gpus, contexts, events: Mutex::default(), samples: OnceLock::new() }))
}

struct Sharing {
    gpus: Vec<Arc<Gpu>>,
    contexts: Vec<Arc<Context>>,
    /// Events of others, by their words: opened once.
    events: Mutex<HashMap<Vec<u8>, Arc<Imported>>>,
    samples: OnceLock<Result<Vec<Sample>, String>>,
}

/// What others try to open; stays as long as they may.
struct Sample {
    words: Vec<u8>,
    _of: Box<dyn Any + Send + Sync>,
}

/// What of a device's was shown to other processes, by its handle: what comes back is found here.
#[derive(Default)]
pub(super) struct Shown {
    /// Address and length.
    memory: Mutex<HashMap<[u8; HANDLE], (u64, usize)>>,
    events: Mutex<HashMap<[u8; HANDLE], Recorded>>,
}

/// An event of this process, which is not destroyed.
#[derive(Clone, Copy)]
struct Recorded(sys::CUevent);

// SAFETY: events may be used by any thread that has bound their context; CUDA's calls are
// thread-safe.
unsafe impl Send for Recorded {}

impl Sharing {
    /// The context in which what is of this device is opened, and whether it reaches it from afar.
    fn place(&self, uuid: &[u8]) -> (&Arc<Context>, bool) {
        let near = self.contexts.iter().find(|context| context.uuid() == uuid);
        near.map_or((&self.contexts[0], true), |context| (context, false))
    }

    /// What this process has shown of this device itself. Several of its devices may be the same
    /// one to the driver.
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
            return Err(format!("{}=0 says not to", variables::CUDA_IPC));
        }
        // SAFETY: the driver is there, as there are devices. Names are only looked up: nothing is
        // called by this type.
        let has =
            |name: &&str| unsafe { sys::culib().get::<unsafe extern "C" fn()>(*name).is_ok() };
        if let Some(missing) = SYMBOLS.iter().find(|name| !has(name)) {
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
        // Such events can be made. No line has made one yet: this is before the first message.
        self.contexts.iter().for_each(|context| context.share_events());
        Ok(samples)
    }

    /// An event of another process, or the one of this process that another was shown.
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
            _ => Err("what it shows of its devices means nothing here".to_owned()),
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
        // What another process told of it means the same to a third.
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

/// What other processes open memory of this one's by.
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

/// Memory that was shown is no more.
pub(super) fn forget(context: &Context, words: &Words) {
    if let Ok((handle, _)) = parts(words) {
        context.shown().memory.lock().remove(&handle);
    }
}

/// What other processes have work come after an event of this one's by. It must never be destroyed.
pub(super) fn show_event(context: &Context, event: sys::CUevent) -> Option<Words> {
    let _visit = context.visit().ok()?;
    let mut handle = sys::CUipcEventHandle { reserved: [0; HANDLE] };
    // SAFETY: the event is alive, of the context that is bound; there is room for the handle.
    let shown = unsafe { calls::cuIpcGetEventHandle(&raw mut handle, event) }.result();
    // An event that keeps time cannot be.
    shown.inspect_err(|error| tracing::debug!(%error, "an event that is not shared")).ok()?;
    let handle = handle.reserved.map(|byte| byte.to_ne_bytes()[0]);
    context.shown().events.lock().insert(handle, Recorded(event));
    Some(words(handle, context))
}

/// What events are made with that others may be shown.
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
            "opening what another process shows of its CUDA devices",
            "",
            format!("{} bytes mean nothing", words.len()),
        )),
    }
}

/// Memory of another process's device, or of this one's that came back.
struct Opened {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
    is_far: bool,
    /// It is not open, but this process's own.
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
        // The only flag that there is, and one that must be: from afar it lets the devices reach
        // each other.
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: a handle is plain bytes, which the driver looks through; there is room for the
        // address.
        unsafe { calls::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }
            .result()
            .map_err(|error| cuda("opening memory of another process's CUDA device", error))?;
        Ok(Self { context: context.clone(), address, bytes, is_far, is_own: false })
    }

    /// How long it is by the driver's word, where it has one.
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
        // SAFETY: opened in `open`, closed once for that; work on it is over, as who drops memory
        // has seen.
        if let Err(error) = unsafe { calls::cuIpcCloseMemHandle(self.address) }.result() {
            tracing::debug!(%error, "closing memory of another process's CUDA device");
        }
    }
}

/// An event of another process, or of this one's that came back.
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
    /// Whether the other's device has come there, as far as this process sees it. The context is
    /// bound.
    pub(super) fn is_passed(&self) -> bool {
        is_passed(self.raw)
    }

    fn open(context: &Arc<Context>, handle: [u8; HANDLE]) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let handle = sys::CUipcEventHandle { reserved: handle.map(|byte| byte as c_char) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a handle is plain bytes, which the driver looks through; there is room for the
        // event.
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

/// A point in the work of another process's devices, behind which there is what it lent.
///
/// Devices of this process come after its events. Whoever does not work on a device hears of it by
/// the other's word.
pub(super) struct Landing {
    events: Vec<Arc<Imported>>,
    words: Vec<Vec<u8>>,
    ended: OnceLock<Result<(), String>>,
    over: Latch,
    /// Whose work comes after it.
    users: Mutex<Vec<Arc<Context>>>,
}

impl Landing {
    fn new(events: Vec<Arc<Imported>>, words: Vec<Vec<u8>>) -> Self {
        let (ended, over, users) = Default::default();
        Self { events, words, ended, over, users }
    }

    /// Has what is issued to a stream from now on come after it.
    pub(super) fn before(&self, stream: &Stream) -> Result<(), CudaError> {
        for event in &self.events {
            // SAFETY: the event is open, as `self` holds it, and was recorded before anybody was
            // told of it; the stream is alive.
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
        // Where that was heard just now, nobody else looks after this.
        self.look_after_users();
        Ok(())
    }

    /// Where the other will not get there, those that come after it must not wait for ever.
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
        // The first word counts.
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
    /// By what other processes come after it; asked for once. From then on it must not be
    /// destroyed.
    pub(super) fn words(&self, context: &Context) -> Option<Words> {
        *self
            .1
            .get_or_init(|| context.shares_events().then(|| show_event(context, self.0)).flatten())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use mpmd_transport::memory::Fences;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn what_this_process_has_shown_itself_it_finds_again_and_nonsense_is_refused() {
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
        // An event of a line, shown and heard of again in the process that it is of.
        let (fence, told) = issued(&gpu, |_| Ok(()));
        let words = sharing.tell(&*fence).unwrap();
        let heard = sharing.hear(&[&words]).unwrap();
        assert_eq!(
            sharing.tell(&*heard.clone().fence()).unwrap(),
            words,
            "a third is told the same"
        );
        told.recv_timeout(PATIENCE).unwrap().unwrap();
        assert!(!heard.is_over(), "that is for its owner to say");
        heard.pass(Err("it fell over".to_owned()));
        assert_eq!((heard.is_over(), heard.failure().as_deref()), (true, Some("it fell over")));
        let after = Fences::of([heard.fence()]);
        let (said, told) = channel();
        let then = Box::new(move |result| said.send(result).unwrap());
        gpu.compute().submit(&[&after], |_| unreachable!("its input is never made"), then);
        assert!(
            told.recv_timeout(PATIENCE).unwrap().unwrap_err().to_string().contains("it fell over")
        );
    }

    type Told = Receiver<Result<(), CudaError>>;

    fn issued(
        gpu: &Gpu,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> (Arc<dyn Fence>, Told) {
        let (said, told) = channel();
        let fence =
            gpu.inward().submit(&[], work, Box::new(move |result| said.send(result).unwrap()));
        (fence, told)
    }

    /// Keeps a stream until the test is over.
    extern "C" fn stand_still(until: *mut c_void) {
        // SAFETY: the test passes this very type, once.
        let until = unsafe { Box::from_raw(until.cast::<Receiver<()>>()) };
        let _ = until.recv();
    }

    #[test]
    fn work_that_waits_for_a_process_that_is_no_more_ends_with_an_error_and_all_that_comes_does() {
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
        let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert!(error.to_string().contains("process 3 has ended") && fence.is_over(), "{error}");
        assert!(error.is_lost() && fence.is_lost(), "nobody knows what it still does");
        assert_eq!(told_there.recv_timeout(PATIENCE).unwrap(), Err(error.clone()));
        let (said, told) = channel();
        let fence = gpu.compute().submit(
            &[],
            |_| Ok(()),
            Box::new(move |result| said.send(result).unwrap()),
        );
        let later = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
        assert_eq!(later.to_string(), error.to_string(), "with the same words");
        assert!(
            !later.is_lost() && fence.is_over() && !fence.is_lost(),
            "nothing of it was issued"
        );
        drop(gpu);
        go_on.send(()).unwrap();
    }
}
