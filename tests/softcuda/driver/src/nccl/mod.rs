//! NCCL: communicators and the functions called on them.
//!
//! As in NCCL, ranks wait for each other in their streams. The wait ends only when all ranks have
//! come or the communicator is aborted. After an abort the stream continues without an error, but
//! the data has not arrived. Calls on a non-blocking communicator return `ncclInProgress` before
//! their work is issued. Using the communicator before then is an error. Sums are formed from the
//! last rank to the first, so that no test can depend on the usual order of rounding.

mod channel;
mod collect;

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::device::races::Use;
use crate::device::stream::{Stream, Work, own_stream};
use crate::device::{current, uuid};
use crate::entry::{In, Out, nccl};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::handles::{Handle, Handles};
use crate::settings::CallKind;

use channel::{Id, LOOK, MOST_RANKS, Shared};
use collect::{Kind, Operation, run};

static COMMUNICATORS: Handles<Communicator> = Handles::new(9);
/// Texts that `ncclGetLastError` returned to C programs; they are never freed.
static TEXTS: Mutex<Vec<CString>> = Mutex::new(Vec::new());

/// Result codes of NCCL, which the functions of this file return.
const SUCCESS: u32 = 0;
const UNHANDLED_CUDA_ERROR: Code = Code(1);
const SYSTEM_ERROR: Code = Code(2);
const INVALID_ARGUMENT: Code = Code(4);
const INVALID_USAGE: Code = Code(5);
const IN_PROGRESS: Code = Code(7);

/// Delay before the thread of a call issues its work. Until then the call counts as in progress.
const ISSUING: Duration = Duration::from_micros(100);
/// Limit on the wait for a communicator's work when it is destroyed or aborted. After it, the call
/// prints a message and returns.
const LONG: Duration = Duration::from_secs(20);

/// One rank's communicator. `shared` is `None` until all ranks have joined.
pub(crate) struct Communicator {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    device: u32,
    is_blocking: bool,
    shared: Mutex<Option<Arc<Shared>>>,
    aborted: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Result of the operation that was begun last. It is `ncclInProgress` while the operation's
    /// own thread runs.
    answer: u32,
    text: String,
    /// Number of pieces of work, in threads and in streams, that have not ended.
    work: u32,
}

/// A guard that counts one piece of work as unfinished until it is dropped.
struct InWork(Arc<Communicator>);

impl Drop for InWork {
    fn drop(&mut self) {
        self.0.state.lock().work -= 1;
        self.0.changed.notify_all();
    }
}

/// A call that a group recorded.
#[derive(Clone)]
struct GroupCall {
    communicator: Arc<Communicator>,
    stream: Arc<Stream>,
    operation: Operation,
}

/// The reason why a communicator cannot be used.
struct GroupFailure {
    code: Code,
    text: String,
}

/// The calls of a thread between `ncclGroupStart` and `ncclGroupEnd`. `depth` is the number of
/// groups that are not ended.
#[derive(Default)]
struct Group {
    depth: u32,
    calls: Vec<GroupCall>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

impl Communicator {
    /// True if the communicator was aborted. Work that waits for other ranks must then end.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    fn begin(&self) {
        self.state.lock().answer = IN_PROGRESS.0;
    }

    fn ends(&self, ended: std::result::Result<(), GroupFailure>) {
        let mut state = self.state.lock();
        match ended {
            Ok(()) => state.answer = SUCCESS,
            Err(GroupFailure { code, text }) => {
                eprintln!("softcuda: NCCL: {text}");
                state.answer = code.0;
                state.text = text;
            }
        }
        self.changed.notify_all();
    }

    /// Fails with `ncclInvalidArgument` if the last operation is still in progress, or with its
    /// code if it has failed.
    fn ready(&self) -> Result {
        let mut state = self.state.lock();
        match state.answer {
            SUCCESS => Ok(()),
            answer if answer == IN_PROGRESS.0 => {
                let text = "Attempt to use communicator before the previous operation returned \
                    ncclSuccess";
                eprintln!("softcuda: NCCL: {text}");
                state.text = text.to_owned();
                Err(INVALID_ARGUMENT)
            }
            answer => Err(Code(answer)),
        }
    }

    /// Joins the group and blocks until all its ranks have joined or the communicator is aborted.
    fn meet_all(&self, id: &Id) -> std::result::Result<(), GroupFailure> {
        let opened = id.open().map_err(|code| GroupFailure {
            code: SYSTEM_ERROR,
            text: format!("the group cannot be joined: {code:?}"),
        })?;

        let shared = Arc::new(opened);
        shared.join(self.rank, self.ranks, uuid(self.device), self.device);
        while !shared
            .are_all_here(self.ranks)
            .map_err(|text| GroupFailure {
                code: INVALID_USAGE,
                text,
            })?
        {
            if self.is_aborted() {
                return Err(GroupFailure {
                    code: SYSTEM_ERROR,
                    text: "the communicator was aborted".to_owned(),
                });
            }
            std::thread::sleep(LOOK);
        }

        *self.shared.lock() = Some(shared);
        Ok(())
    }

    /// Blocks until the communicator's work has ended. After [`LONG`], prints a message and
    /// returns.
    fn wait_for_work(&self) {
        let deadline = Instant::now() + LONG;
        let mut state = self.state.lock();
        while state.work > 0 {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                eprintln!("softcuda: NCCL: a communicator is destroyed before its work has ended");
                return;
            }
        }
    }

    /// Runs `work` in a new thread. A blocking communicator waits for `work` and returns its
    /// result. Another communicator returns the error `ncclInProgress` at once, while `work` runs.
    fn by_itself(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) -> Result {
        self.begin();
        self.state.lock().work += 1;
        let in_work = InWork(self.clone());

        let thread = std::thread::Builder::new()
            .name("softcuda nccl".into())
            .spawn(move || {
                work();
                drop(in_work);
            });
        let thread = thread.map_err(|_| SYSTEM_ERROR)?;

        if !self.is_blocking {
            return Err(IN_PROGRESS);
        }
        let _ = thread.join();
        match self.state.lock().answer {
            SUCCESS => Ok(()),
            answer => Err(Code(answer)),
        }
    }

    /// Issues operations as one piece of work on a stream, from a new thread. A non-blocking
    /// communicator returns `ncclInProgress` before the work is issued.
    fn launch(self: &Arc<Self>, stream: Arc<Stream>, operations: Vec<Operation>) -> Result {
        let uses: Vec<Use> = operations
            .iter()
            .flat_map(|operation| operation.uses(self))
            .collect();
        let Some(shared) = self.shared.lock().clone() else {
            return Err(INVALID_ARGUMENT);
        };

        let this = self.clone();
        self.state.lock().work += 1;
        let in_work = InWork(self.clone());
        self.by_itself(move || {
            std::thread::sleep(ISSUING);
            if this.is_aborted() {
                return;
            }

            let of = this.clone();
            let work = move || {
                let _in_work = in_work;
                meet(CallKind::Launch)?;
                run(&of, &shared, &operations)
            };
            stream.issue(Work::new("a collective of NCCL's", work), &uses);
            this.ends(Ok(()));
        })
    }
}

/// Issues an operation of a communicator in a stream. Between `ncclGroupStart` and `ncclGroupEnd`
/// of the calling thread, only records it.
fn call(communicator: Handle, stream: Handle, operation: Operation) -> Result {
    let communicator = COMMUNICATORS
        .get(communicator)
        .map_err(|_| INVALID_ARGUMENT)?;
    communicator.ready()?;
    operation
        .check(&communicator)
        .map_err(|()| INVALID_ARGUMENT)?;

    let stream = own_stream(stream).map_err(|code| {
        communicator.state.lock().text = format!("Cuda failure '{}'", code.text());
        UNHANDLED_CUDA_ERROR
    })?;
    if stream.context.device != communicator.device {
        return Err(INVALID_USAGE);
    }

    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.calls.push(GroupCall {
                communicator,
                stream,
                operation,
            });
            return Ok(());
        }
        communicator.launch(stream, vec![operation])
    })
}

nccl! {
    /// Returns the NCCL version that this driver imitates, 2.27.7. Some functions of that version
    /// are missing.
    fn ncclGetVersion(version: Out<i32>) {
        version.set(22_707)
    }
}

nccl! {
    /// Creates a group without ranks and returns its id. The group lives as long as this process.
    fn ncclGetUniqueId(id: Out<Id>) {
        id.set(Id::new().map_err(|why| {
            eprintln!("softcuda: NCCL: no memory for a group: {why:?}");
            SYSTEM_ERROR
        })?)
    }
}

/// The first fields of `ncclConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

nccl! {
    /// Joins a group as one of its ranks, on the device of the calling thread's context. A blocking
    /// communicator waits until all ranks have joined; another one returns `ncclInProgress` at
    /// once.
    fn ncclCommInitRankConfig(out: Out<Handle>, ranks: i32, id: Id, rank: i32, config: In<Config>) {
        out.required().map_err(|_| INVALID_ARGUMENT)?;
        let config = config.get().map_err(|_| INVALID_ARGUMENT)?;
        let size = |number: i32| usize::try_from(number).map_err(|_| INVALID_ARGUMENT);
        let ranks = size(ranks)?;
        let rank = size(rank)?;
        if config.magic != 0xcafe_beef || config.size < 20 || ranks > MOST_RANKS || rank >= ranks {
            return Err(INVALID_ARGUMENT);
        }

        let context = current()?;
        context.check()?;
        let mut made = 0;
        let communicator = COMMUNICATORS.insert(|handle| {
            made = handle;
            Communicator {
                rank,
                ranks,
                device: context.device,
                // Configurations of older versions lack the `blocking` field.
                is_blocking: config.version < 21_400 || config.blocking != 0,
                shared: Mutex::default(),
                aborted: AtomicBool::new(false),
                state: Mutex::new(State { answer: SUCCESS, text: String::new(), work: 0 }),
                changed: Condvar::new(),
            }
        });

        out.set(made)?;
        let this = communicator.clone();
        communicator.by_itself(move || this.ends(this.meet_all(&id)))
    }
}

nccl! {
    /// Returns the result of the operation that was begun last. It is `ncclInProgress` until the
    /// ranks have joined and the work is issued in the stream.
    fn ncclCommGetAsyncError(communicator: Handle, state: Out<u32>) {
        let communicator = COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?;
        let answer = communicator.state.lock().answer;
        state.set(answer)
    }
}

nccl! {
    /// Finalizes a communicator. The operation ends when all work issued before is done. A blocking
    /// communicator waits for that; another one returns `ncclInProgress` at once.
    fn ncclCommFinalize(communicator: Handle) {
        let communicator = COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.ready()?;
        let this = communicator.clone();
        communicator.by_itself(move || {
            // The work of this thread itself is not waited for.
            while this.state.lock().work > 1 && !this.is_aborted() {
                std::thread::sleep(LOOK);
            }
            this.ends(Ok(()));
        })
    }
}

nccl! {
    /// Removes a communicator, then waits up to 20 seconds for its work to end. After that, prints
    /// a message and succeeds nevertheless.
    fn ncclCommDestroy(communicator: Handle) {
        let communicator = COMMUNICATORS.remove(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.wait_for_work();
        Ok(())
    }
}

nccl! {
    /// Removes a communicator and ends all its waits for other ranks. Returns when its work in
    /// streams has ended, or after 20 seconds with a message.
    fn ncclCommAbort(communicator: Handle) {
        let communicator = COMMUNICATORS.remove(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.aborted.store(true, Ordering::SeqCst);
        communicator.wait_for_work();
        Ok(())
    }
}

nccl! {
    /// Returns the number of ranks of a communicator's group.
    fn ncclCommCount(communicator: Handle, count: Out<i32>) {
        count.set(COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?.ranks as i32)
    }
}

nccl! {
    /// Reduces `count` elements of every rank, and gives all ranks the result.
    fn ncclAllReduce(
        from: u64, to: u64, count: usize, dtype: u32, reduce: u32, communicator: Handle,
        stream: Handle,
    ) {
        let kind = Kind::AllReduce(reduce);
        call(communicator, stream, Operation { kind, from, to, count, dtype })
    }
}

nccl! {
    /// Reduces `count` elements per rank from every rank. Each rank gets its own share of `count`
    /// elements of the result.
    fn ncclReduceScatter(
        from: u64, to: u64, count: usize, dtype: u32, reduce: u32, communicator: Handle,
        stream: Handle,
    ) {
        let kind = Kind::ReduceScatter(reduce);
        call(communicator, stream, Operation { kind, from, to, count, dtype })
    }
}

nccl! {
    /// Gathers `count` elements of every rank on all ranks, in the order of ranks.
    fn ncclAllGather(
        from: u64, to: u64, count: usize, dtype: u32, communicator: Handle, stream: Handle,
    ) {
        call(communicator, stream, Operation { kind: Kind::AllGather, from, to, count, dtype })
    }
}

nccl! {
    /// Sends `count` elements to the rank `peer`, which must receive the same number. In the
    /// stream, the send may end before the elements are received.
    fn ncclSend(
        from: u64, count: usize, dtype: u32, peer: i32, communicator: Handle, stream: Handle,
    ) {
        let peer = usize::try_from(peer).map_err(|_| INVALID_ARGUMENT)?;
        call(communicator, stream, Operation { kind: Kind::Send(peer), from, to: 0, count, dtype })
    }
}

nccl! {
    /// Receives `count` elements from the rank `peer`; the stream waits until they have arrived.
    fn ncclRecv(
        to: u64, count: usize, dtype: u32, peer: i32, communicator: Handle, stream: Handle,
    ) {
        let peer = usize::try_from(peer).map_err(|_| INVALID_ARGUMENT)?;
        call(
            communicator,
            stream,
            Operation { kind: Kind::Receive(peer), from: 0, to, count, dtype },
        )
    }
}

nccl! {
    /// Starts a group, which may be inside another one. The calls of this thread are recorded until
    /// the outermost `ncclGroupEnd`.
    fn ncclGroupStart() {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    }
}

nccl! {
    /// Ends a group. The end of the outermost group issues the recorded calls, as one piece of work
    /// per communicator and stream.
    fn ncclGroupEnd() {
        let mut calls = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1).ok_or(INVALID_USAGE)?;
            Ok(if group.depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
        })?;

        let mut answer = Ok(());
        while let Some(GroupCall { communicator, stream, operation }) = calls.first().cloned() {
            let same = |call: &GroupCall| {
                Arc::ptr_eq(&call.communicator, &communicator)
                    && Arc::ptr_eq(&call.stream, &stream)
            };
            let of: Vec<Operation> =
                calls.extract_if(.., |call| same(call)).map(|call| call.operation).collect();
            debug_assert_eq!(of.first(), Some(&operation));

            match communicator.launch(stream, of) {
                Ok(()) => {}
                Err(code) if code == IN_PROGRESS => answer = answer.and(Err(code)),
                Err(code) => return Err(code),
            }
        }
        answer
    }
}

/// Returns the text of an NCCL code, which is never freed.
#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: u32) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Returns the message of a communicator's last failure; empty if there was none or the handle is
/// unknown. The text is never freed.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(communicator: Handle) -> *const c_char {
    let text = COMMUNICATORS
        .get(communicator)
        .map(|found| found.state.lock().text.clone())
        .unwrap_or_default();
    let text = CString::new(text).unwrap_or_default();
    let at = text.as_ptr();
    // Texts are few and kept for ever: C programs do not say when they have finished with one.
    TEXTS.lock().push(text);
    at
}
