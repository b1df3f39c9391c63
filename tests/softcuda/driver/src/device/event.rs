//! Events: marks in streams that others wait for, and between which time is measured.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::device::ipc::{Kind, Ticket};
use crate::device::races;
use crate::device::shared_event::SharedEvent;
use crate::device::stream::{Stream, Work, own_stream, stream};
use crate::device::{Context, context, current, initialized};
use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::handles::{Handle, Handles};
use crate::settings::{CallKind, settings};

static EVENTS: Handles<Event> = Handles::new(3);

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(crate) struct Event {
    pub(crate) handle: Handle,
    context: Handle,
    flags: u32,
    /// The newest record that this process has made. `None` before the first.
    record: Mutex<Option<Arc<Record>>>,
    /// The state that an interprocess event shares with other processes. `None` for other events.
    shared: Option<Arc<SharedEvent>>,
    /// True if this process created the event, false if it opened an event of another process.
    is_own: bool,
}

/// The newest record of an event at the time of a call. Later records do not change it.
#[derive(Clone)]
enum Mark {
    /// A record of an event that only this process knows.
    Here(Arc<Record>),
    /// A record of an interprocess event, as (shared state, number of the record, newest record of
    /// this process).
    Shared(Arc<SharedEvent>, u64, Option<Arc<Record>>),
}

impl Event {
    /// Returns the newest record of any process; `None` if no process has recorded the event.
    fn newest(&self) -> Option<Mark> {
        let record = self.record.lock().clone();
        match &self.shared {
            Some(shared) => match shared.newest() {
                0 => None,
                number => Some(Mark::Shared(shared.clone(), number, record)),
            },
            None => record.map(Mark::Here),
        }
    }
}

impl Mark {
    fn wait(&self) {
        match self {
            Mark::Here(record) => record.wait(),
            Mark::Shared(event, number, _) => event.wait(*number),
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Mark::Here(record) => record.is_done(),
            Mark::Shared(event, number, _) => event.is_done(*number),
        }
    }

    /// Returns the vector clock of all work that precedes the record, as far as it is known to this
    /// process.
    fn clock(&self) -> races::Clock {
        match self {
            Mark::Here(record) | Mark::Shared(_, _, Some(record)) => record.clock.clone(),
            Mark::Shared(_, _, None) => races::Clock::default(),
        }
    }
}

/// One record of an event in a stream of this process. It is done when the stream reaches it.
pub(crate) struct Record {
    stream: Arc<Stream>,
    /// Number of the record in the stream's work. 0 until the record is issued.
    number: Mutex<u64>,
    done: Mutex<Option<Instant>>,
    fired: Condvar,
    clock: races::Clock,
}

impl Record {
    fn wait(&self) {
        self.stream.asked_for(*self.number.lock());
        let mut done = self.done.lock();
        while done.is_none() {
            self.fired.wait(&mut done);
        }
    }

    fn is_done(&self) -> bool {
        // Read the state first: a query of lazy work finds it not done, and then starts it.
        let done = self.done.lock().is_some();
        self.stream.asked_for(*self.number.lock());
        done
    }
}

/// Removes the events of a context that is being destroyed. Their handles become invalid.
pub(crate) fn end_all(context: &Context) {
    EVENTS.remove_all(|event| event.context == context.handle);
}

fn create(flags: u32) -> Result<Arc<Event>> {
    let context = current()?;
    context.check()?;
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Code::INVALID_VALUE);
    }

    meet(CallKind::Event)?;
    let shared = (flags & INTERPROCESS != 0)
        .then(SharedEvent::new)
        .transpose()?;
    let events = settings().events;
    let ipc_events = settings().ipc_events;

    let is_shareable = |event: &Event| event.is_own && event.shared.is_some();
    if (events < u64::MAX && EVENTS.count_of(|_| true) >= events)
        || (shared.is_some()
            && ipc_events < u64::MAX
            && EVENTS.count_of(is_shareable) >= ipc_events)
    {
        return Err(Code::OUT_OF_MEMORY);
    }
    Ok(insert(context.handle, flags, shared, true))
}

fn insert(context: Handle, flags: u32, shared: Option<SharedEvent>, is_own: bool) -> Arc<Event> {
    let shared = shared.map(Arc::new);
    let record = Mutex::default();
    EVENTS.insert(|handle| Event {
        handle,
        context,
        flags,
        record,
        shared,
        is_own,
    })
}

fn record(event: Handle, on: Handle) -> Result {
    let stream = own_stream(on)?;
    let event = EVENTS.get(event)?;
    if event.context != stream.context.handle {
        return Err(Code::INVALID_HANDLE);
    }

    let mut newest = event.record.lock();
    let clock = races::now(&stream);
    let record = Arc::new(Record {
        stream: stream.clone(),
        number: Mutex::new(0),
        done: Mutex::default(),
        fired: Condvar::new(),
        clock,
    });

    let shared = event
        .shared
        .as_ref()
        .map(|shared| (shared.clone(), shared.record()));
    let among_processes = shared.is_some();

    let work = record.clone();
    let number = stream.issue(
        Work::always("an event", move || {
            *work.done.lock() = Some(Instant::now());
            work.fired.notify_all();
            if let Some((event, number)) = shared {
                event.fire(number);
            }
        }),
        &[],
    );
    *record.number.lock() = number;

    if among_processes {
        // A waiter in another process cannot start lazy work of this stream, so it is started now.
        stream.asked_for(number);
    }

    *newest = Some(record);
    Ok(())
}

fn elapsed(milliseconds: &Out<f32>, start: Handle, end: Handle) -> Result {
    current()?.check()?;
    let mut times = Vec::new();
    for handle in [start, end] {
        let event = EVENTS.get(handle)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        let record = event.record.lock().clone().ok_or(Code::INVALID_HANDLE)?;
        let done = *record.done.lock();
        times.push(done.ok_or(Code::NOT_READY)?);
    }

    let forward = times[1].saturating_duration_since(times[0]).as_secs_f32();
    let backward = times[0].saturating_duration_since(times[1]).as_secs_f32();
    milliseconds.set((forward - backward) * 1e3)
}

api! {
    /// Creates an event in the current context. An event for other processes (flag 4) must have
    /// timing disabled (flag 2).
    fn cuEventCreate(event: Out<Handle>, flags: u32) {
        event.required()?;
        event.set(create(flags)?.handle)
    }
}

api! {
    /// Destroys an event without waiting; waits for its records continue.
    fn cuEventDestroy_v2(event: Handle) {
        let context = current()?;
        EVENTS.remove(event)?;
        context.check()
    }
}

api! {
    /// Records an event at the current end of a stream's work, without waiting. The stream must
    /// belong to the event's context.
    fn cuEventRecord(event: Handle, stream: Handle) {
        record(event, stream)
    }
}

api! {
    /// Records an event at the current end of a stream's work, without waiting. Any flag is refused
    /// with `CUDA_ERROR_INVALID_VALUE`.
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        record(event, stream)
    }
}

api! {
    /// Returns `CUDA_SUCCESS` if the newest record is done or there is none, otherwise
    /// `CUDA_ERROR_NOT_READY`.
    fn cuEventQuery(event: Handle) {
        initialized()?;
        let event = EVENTS.get(event)?;
        let context = context(event.context)?;
        context.check()?;
        if let Some(mark) = event.newest() {
            if !mark.is_done() {
                return Err(Code::NOT_READY);
            }
            context.check()?;
            races::host_saw(&mark.clock());
        }
        Ok(())
    }
}

api! {
    /// Blocks until the event's newest record is done; returns at once if there is none.
    fn cuEventSynchronize(event: Handle) {
        let context = current()?;
        context.check()?;
        let event = EVENTS.get(event)?;
        if let Some(mark) = event.newest() {
            mark.wait();
            races::host_saw(&mark.clock());
        }
        context.check()
    }
}

api! {
    /// Makes later work of a stream wait for the record that is the event's newest at this call.
    /// Does nothing if there is no record. The host does not wait.
    fn cuStreamWaitEvent(handle: Handle, event: Handle, flags: u32) {
        let stream = stream(handle)?;
        if flags & !1 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let event = EVENTS.get(event)?;
        if let Some(mark) = event.newest() {
            races::follows(&stream, &mark.clock());
            stream.issue(Work::always("a wait for an event", move || mark.wait()), &[]);
        }
        Ok(())
    }
}

api! {
    /// Returns the milliseconds from `start`'s newest record to `end`'s, negative in the other
    /// order. Fails if a record is not done, or an event has no record or no timing.
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        elapsed(&milliseconds, start, end)
    }
}

api! {
    /// Returns the milliseconds from `start`'s newest record to `end`'s, as `cuEventElapsedTime`
    /// does.
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Handle, end: Handle) {
        elapsed(&milliseconds, start, end)
    }
}

api! {
    /// Returns a handle with which other processes can open an event. The event must have been
    /// created with the flag for that (4).
    fn cuIpcGetEventHandle(ticket: Out<Ticket>, event: Handle) {
        current()?.check()?;
        let event = EVENTS.get(event)?;
        let shared = event.shared.as_ref().ok_or(Code::INVALID_HANDLE)?;
        ticket.set(Ticket::new(Kind::Event, shared.file(), context(event.context)?.device)?)
    }
}

api! {
    /// Opens an event of another process that still runs. It may be recorded here too. All
    /// processes wait for the newest record of any of them.
    fn cuIpcOpenEventHandle(event: Out<Handle>, ticket: Ticket) {
        let context = current()?;
        context.check()?;
        event.required()?;
        let shared = SharedEvent::map(ticket.open(Kind::Event)?)?;
        let flags = DISABLE_TIMING | INTERPROCESS;
        event.set(insert(context.handle, flags, Some(shared), false).handle)
    }
}
