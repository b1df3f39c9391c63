//! Streams. Each is a thread that does its work in order, and sleeps when it has none.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::device::races::{self, Use};
use crate::device::{Context, as_host_function, current};
use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::handles::{Handle, Handles};
use crate::settings::CallKind;
use crate::settings::{Pace, settings};

static STREAMS: Handles<Stream> = Handles::new(2);

/// The flag of a stream that is exempt from the order of the default stream.
const NON_BLOCKING: u32 = 1;

pub(crate) struct Stream {
    pub(crate) handle: Handle,
    pub(crate) context: Arc<Context>,
    flags: u32,
    priority: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Vector clock of the work issued so far, for detecting races.
    pub(crate) clock: Mutex<races::Clock>,
    pub(crate) number: usize,
}

/// A piece of work in a queue, and the time at which it was issued.
struct QueuedWork {
    issued: Instant,
    work: Work,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<QueuedWork>,
    /// Number of pieces of work issued so far. `done` is the number of pieces that are completed or
    /// skipped.
    issued: u64,
    done: u64,
    /// Number of the last piece of work that a thread has waited for or queried; see
    /// [`Pace::Lazy`].
    wanted: u64,
    closed: bool,
}

/// One piece of work of a stream, which the stream's thread runs once.
pub(crate) struct Work {
    /// Name of the work in messages about its failure.
    pub(crate) name: &'static str,
    /// True if the work also runs after the context failed, as events and waits do. Other work is
    /// skipped then.
    pub(crate) always: bool,
    pub(crate) run: Box<dyn FnOnce() -> Result + Send>,
}

impl Work {
    /// Creates work that is skipped after the context failed. An error of `run` makes the context
    /// fail.
    pub(crate) fn new(name: &'static str, run: impl FnOnce() -> Result + Send + 'static) -> Work {
        Work {
            name,
            always: false,
            run: Box::new(run),
        }
    }

    /// Creates work that runs even after the context failed, and cannot fail itself.
    pub(crate) fn always(name: &'static str, run: impl FnOnce() + Send + 'static) -> Work {
        Work {
            name,
            always: true,
            run: Box::new(move || {
                run();
                Ok(())
            }),
        }
    }
}

/// Returns the stream of a handle; 0 and 1 are the default stream of the current context.
///
/// # Errors
///
/// The error of a failed context, `CUDA_ERROR_INVALID_CONTEXT` without a context,
/// `CUDA_ERROR_INVALID_HANDLE` for an unknown handle, `CUDA_ERROR_NOT_SUPPORTED` for handle 2.
pub(crate) fn stream(handle: Handle) -> Result<Arc<Stream>> {
    let context = current()?;
    context.check()?;
    let stream = match handle {
        0 | 1 => context.null(),
        2 => {
            eprintln!("softcuda: per-thread default streams are unsupported; create a stream");
            return Err(Code::NOT_SUPPORTED);
        }
        _ => STREAMS.get(handle)?,
    };
    stream.context.check()?;
    Ok(stream)
}

/// Returns the stream of a handle as [`stream`] does. Fails with `CUDA_ERROR_INVALID_HANDLE` if the
/// stream belongs to another context than the current one.
pub(crate) fn own_stream(handle: Handle) -> Result<Arc<Stream>> {
    let stream = stream(handle)?;
    if stream.context.handle == current()?.handle {
        Ok(stream)
    } else {
        Err(Code::INVALID_HANDLE)
    }
}

/// Closes the streams of a context that is being destroyed. Their threads end after the remaining
/// work.
pub(crate) fn end_all(context: &Context) {
    for stream in STREAMS.remove_all(|stream| stream.context.handle == context.handle) {
        stream.close();
    }
    if let Some(null) = context.null_if_used() {
        null.close();
    }
}

impl Stream {
    /// Creates a stream with an empty queue and starts its thread, which runs until the stream is
    /// closed.
    pub(crate) fn start(
        context: Arc<Context>,
        handle: Handle,
        flags: u32,
        priority: i32,
    ) -> Arc<Stream> {
        let stream = Arc::new(Stream::new(context, handle, flags, priority));
        stream.run();
        stream
    }

    fn new(context: Arc<Context>, handle: Handle, flags: u32, priority: i32) -> Stream {
        Stream {
            handle,
            context,
            flags,
            priority,
            queue: Mutex::default(),
            changed: Condvar::new(),
            clock: Mutex::default(),
            number: races::new_stream(),
        }
    }

    fn run(self: &Arc<Self>) {
        self.context.add(self);
        let stream = self.clone();
        let thread = std::thread::Builder::new().name("softcuda stream".into());
        thread
            .spawn(move || stream.work_off())
            .expect("a thread for a stream");
    }

    /// Appends work to the stream, without waiting for it. Returns the work's number in this
    /// stream, from 1. `uses` are the memory ranges that the work is known to access; they are
    /// checked for races.
    pub(crate) fn issue(self: &Arc<Self>, work: Work, uses: &[Use]) -> u64 {
        let _order = self.follow_default_stream();
        races::used(self, work.name, uses);
        self.push(work)
    }

    fn push(&self, work: Work) -> u64 {
        let mut queue = self.queue.lock();
        queue.work.push_back(QueuedWork {
            issued: Instant::now(),
            work,
        });
        queue.issued += 1;
        self.changed.notify_all();
        queue.issued
    }

    /// Applies CUDA's order of the default stream. Work on it follows earlier work of other
    /// streams, and precedes their later work. Appends a wait for each such stream. Returns a guard
    /// that keeps the order while the work is appended, or `None` for non-blocking streams.
    fn follow_default_stream(self: &Arc<Self>) -> Option<parking_lot::MutexGuard<'_, ()>> {
        if self.flags & NON_BLOCKING != 0 {
            return None;
        }

        let order = self.context.order.lock();
        let before: Vec<Arc<Stream>> = if self.handle == 0 {
            let all = self.context.streams().into_iter();
            all.filter(|other| other.handle != 0 && other.flags & NON_BLOCKING == 0)
                .collect()
        } else {
            self.context.null_if_used().into_iter().collect()
        };

        for other in before {
            let issued = other.queue.lock().issued;
            races::follows(self, &races::now(&other));
            self.push(Work::always("order of the default stream", move || {
                other.wait_for(issued)
            }));
        }
        Some(order)
    }

    /// Returns the number of pieces of work issued so far, including waits for other streams.
    pub(crate) fn issued(&self) -> u64 {
        self.queue.lock().issued
    }

    /// Blocks until the piece of work with this number, and all before it, are done. Starts lazy
    /// work.
    pub(crate) fn wait_for(&self, number: u64) {
        let mut queue = self.queue.lock();
        self.want(&mut queue, number);
        while queue.done < number {
            self.changed.wait(&mut queue);
        }
    }

    /// Blocks until all work issued so far is done.
    pub(crate) fn synchronize(&self) {
        self.wait_for(self.issued());
    }

    /// Records that a thread queries the work up to a number, so that a lazy stream starts that
    /// work. Does not wait.
    pub(crate) fn asked_for(&self, number: u64) {
        self.want(&mut self.queue.lock(), number);
    }

    fn want(&self, queue: &mut Queue, number: u64) {
        if queue.wanted < number {
            queue.wanted = number;
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    fn work_off(&self) {
        let mut random = match settings().pace {
            Pace::Seed(seed) => Some(seed ^ (self.number as u64) << 32 | 1),
            _ => None,
        };

        while let Some(work) = self.next() {
            if let Some(random) = &mut random {
                pause(random);
            }
            if work.always || self.context.check().is_ok() {
                let name = work.name;
                match catch_unwind(AssertUnwindSafe(work.run)) {
                    Ok(Ok(())) => {}
                    Ok(Err(code)) => self.context.fail(code, name),
                    Err(_) => self.context.fail(Code::UNKNOWN, name),
                }
            }

            self.queue.lock().done += 1;
            self.changed.notify_all();
        }
    }

    /// Blocks until a piece of work may run under the setting `SOFTCUDA_PACE`, and removes it from
    /// the queue. Returns `None` when the stream is closed and empty.
    fn next(&self) -> Option<Work> {
        let mut queue = self.queue.lock();
        loop {
            match queue.work.front() {
                None if queue.closed => return None,
                None => self.changed.wait(&mut queue),
                Some(QueuedWork { issued, .. }) => match settings().pace {
                    Pace::Lazy(longest) if queue.wanted <= queue.done && !queue.closed => {
                        let due = *issued + longest;
                        if Instant::now() >= due {
                            break;
                        }
                        self.changed.wait_until(&mut queue, due);
                    }
                    _ => break,
                },
            }
        }

        queue.work.pop_front().map(|queued| queued.work)
    }
}

/// Sleeps for up to 200 microseconds in about half of the calls. `random` is the state of the
/// random generator.
fn pause(random: &mut u64) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    if *random & 1 == 0 {
        std::thread::sleep(Duration::from_micros((*random >> 8) % 200));
    }
}

fn create(stream: &Out<Handle>, flags: u32, priority: i32) -> Result {
    let context = current()?;
    context.check()?;
    stream.required()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    meet(CallKind::Stream)?;
    // Priorities outside the range are clamped, as CUDA does.
    let made = STREAMS.insert(|handle| Stream::new(context, handle, flags, priority.clamp(-5, 0)));
    made.run();
    stream.set(made.handle)
}

api! {
    /// Creates a stream of the current context with the lowest priority. Flag 1 exempts it from the
    /// order of the default stream.
    fn cuStreamCreate(stream: Out<Handle>, flags: u32) {
        create(&stream, flags, 0)
    }
}

api! {
    /// Creates a stream of the current context with a priority. The priority is stored, but has no
    /// effect here.
    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: u32, priority: i32) {
        create(&stream, flags, priority)
    }
}

api! {
    /// Destroys a stream without waiting. Work that is already issued still runs.
    fn cuStreamDestroy_v2(handle: Handle) {
        let context = current()?;
        STREAMS.remove(handle)?.close();
        context.check()
    }
}

api! {
    /// Blocks until all work issued so far on a stream is done. Fails with the context's first
    /// error.
    fn cuStreamSynchronize(handle: Handle) {
        let stream = stream(handle)?;
        let clock = races::now(&stream);
        stream.synchronize();
        races::host_saw(&clock);
        stream.context.check()
    }
}

api! {
    /// Returns `CUDA_SUCCESS` if all work issued on a stream is done, otherwise
    /// `CUDA_ERROR_NOT_READY`. Does not wait; starts lazy work.
    fn cuStreamQuery(handle: Handle) {
        let stream = stream(handle)?;
        let clock = races::now(&stream);
        let mut queue = stream.queue.lock();
        let issued = queue.issued;
        stream.want(&mut queue, issued);
        if queue.done < issued {
            return Err(Code::NOT_READY);
        }
        drop(queue);
        stream.context.check()?;
        races::host_saw(&clock);
        Ok(())
    }
}

api! {
    /// Returns the context of a stream.
    fn cuStreamGetCtx(handle: Handle, ctx: Out<Handle>) {
        ctx.set(stream(handle)?.context.handle)
    }
}

api! {
    /// Returns the flags with which a stream was created; 1 is non-blocking.
    fn cuStreamGetFlags(handle: Handle, flags: Out<u32>) {
        flags.set(stream(handle)?.flags)
    }
}

api! {
    /// Returns the priority of a stream, from -5 (highest) to 0.
    fn cuStreamGetPriority(handle: Handle, priority: Out<i32>) {
        priority.set(stream(handle)?.priority)
    }
}

api! {
    /// Returns a number that is unique to a stream in this process.
    fn cuStreamGetId(handle: Handle, id: Out<u64>) {
        id.set(stream(handle)?.number as u64)
    }
}

api! {
    /// Returns the device of a stream.
    fn cuStreamGetDevice(handle: Handle, device: Out<i32>) {
        device.set(stream(handle)?.context.device as i32)
    }
}

api! {
    /// Reports whether a stream is being captured into a graph: always 0, as there are no graphs.
    fn cuStreamIsCapturing(handle: Handle, status: Out<u32>) {
        stream(handle)?;
        status.set(0)
    }
}

/// A host function of the program, which a stream calls between other work.
type HostFunction = unsafe extern "C" fn(data: usize);

api! {
    /// Issues a call of a host function, which runs in the stream's thread after the work issued
    /// before. It is not called after an error. Does not wait.
    fn cuLaunchHostFunc(handle: Handle, function: Option<HostFunction>, data: usize) {
        let stream = own_stream(handle)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;

        let clock = races::now(&stream);
        stream.issue(
            Work::new("a host function", move || {
                races::host_saw(&clock);
                // SAFETY: the caller of `cuLaunchHostFunc` promised that it may be called from
                // another thread with this argument.
                as_host_function(|| unsafe { function(data) });
                Ok(())
            }),
            &[],
        );
        Ok(())
    }
}
