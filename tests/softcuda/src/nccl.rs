//! NCCL: communicators and what is called on them.
//!
//! As in NCCL, ranks wait in their streams for each other, for ever where one does not come, until
//! their communicator is aborted: then the stream goes on without an error, and what was to come
//! has not. Calls on a communicator that does not block come back before they have issued anything
//! (`ncclInProgress`); who uses it before they have is told that he must not. Sums are formed from
//! the last rank to the first, so that they are rounded otherwise than most would expect.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::channel::{Id, LOOK, MOST_RANKS, Shared};
use crate::collect::{Kind, Operation, run};
use crate::device::{current, uuid};
use crate::entry::{In, Out, nccl};
use crate::error::{Code, Result};
use crate::faults::{What, meet};
use crate::handles::{Handle, Handles};
use crate::races::Use;
use crate::stream::{Stream, Work, own_stream};

static COMMUNICATORS: Handles<Communicator> = Handles::new(9);
/// Texts that C programs were given.
static TEXTS: Mutex<Vec<CString>> = Mutex::new(Vec::new());

/// Codes of `ncclResult_t`.
const SUCCESS: u32 = 0;
const UNHANDLED_CUDA_ERROR: Code = Code(1);
const SYSTEM_ERROR: Code = Code(2);
const INVALID_ARGUMENT: Code = Code(4);
const INVALID_USAGE: Code = Code(5);
const IN_PROGRESS: Code = Code(7);

/// How long a call takes until it has issued its work.
const ISSUING: Duration = Duration::from_micros(100);
/// How long who ends a communicator waits for its work before it says so.
const LONG: Duration = Duration::from_secs(20);

/// A communicator.
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
    /// Of what was begun last.
    answer: u32,
    text: String,
    /// Pieces of work that are not over.
    work: u32,
}

/// Keeps a piece of work among those that are not over.
struct InWork(Arc<Communicator>);

impl Drop for InWork {
    fn drop(&mut self) {
        self.0.state.lock().work -= 1;
        self.0.changed.notify_all();
    }
}

/// What a thread has called between the beginning and the end of a group.
#[derive(Default)]
struct Group {
    depth: u32,
    calls: Vec<(Arc<Communicator>, Arc<Stream>, Operation)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

impl Communicator {
    /// Whether what waits for others is to end.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    fn begin(&self) {
        self.state.lock().answer = IN_PROGRESS.0;
    }

    fn ends(&self, ended: std::result::Result<(), (Code, String)>) {
        let mut state = self.state.lock();
        match ended {
            Ok(()) => state.answer = SUCCESS,
            Err((code, text)) => {
                eprintln!("softcuda: NCCL: {text}");
                (state.answer, state.text) = (code.0, text);
            }
        }
        self.changed.notify_all();
    }

    /// Fails where it may not be used yet, or not any more.
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

    /// Meets all other ranks.
    fn meet_all(&self, id: &Id) -> std::result::Result<(), (Code, String)> {
        let opened = id
            .open()
            .map_err(|code| (SYSTEM_ERROR, format!("the group cannot be joined: {code:?}")))?;
        let shared = Arc::new(opened);
        shared.join(self.rank, self.ranks, uuid(self.device), self.device);
        while !shared.are_all_here(self.ranks).map_err(|why| (INVALID_USAGE, why))? {
            if self.is_aborted() {
                return Err((SYSTEM_ERROR, "the communicator was aborted".to_owned()));
            }
            std::thread::sleep(LOOK);
        }
        *self.shared.lock() = Some(shared);
        Ok(())
    }

    /// Waits until its work is over; says so where that takes long.
    fn wait_for_work(&self) {
        let deadline = Instant::now() + LONG;
        let mut state = self.state.lock();
        while state.work > 0 {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                eprintln!(
                    "softcuda: NCCL: a communicator with work that does not end is being ended"
                );
                return;
            }
        }
    }

    /// Does something by itself where callers do not wait for it.
    fn by_itself(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) -> Result {
        self.begin();
        self.state.lock().work += 1;
        let in_work = InWork(self.clone());
        let thread = std::thread::Builder::new().name("softcuda nccl".into()).spawn(move || {
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

    /// Issues calls as one piece of work.
    fn launch(self: &Arc<Self>, stream: Arc<Stream>, operations: Vec<Operation>) -> Result {
        let uses: Vec<Use> = operations.iter().flat_map(|operation| operation.uses(self)).collect();
        let Some(shared) = self.shared.lock().clone() else { return Err(INVALID_ARGUMENT) };
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
                meet(What::Launch)?;
                run(&of, &shared, &operations)
            };
            stream.issue(Work::new("a collective of NCCL's", work), &uses);
            this.ends(Ok(()));
        })
    }
}

/// Calls something on a communicator, or notes it for the end of the group.
fn call(communicator: Handle, stream: Handle, operation: Operation) -> Result {
    let communicator = COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?;
    communicator.ready()?;
    operation.check(&communicator).map_err(|()| INVALID_ARGUMENT)?;
    let stream = own_stream(stream).map_err(|code| {
        communicator.state.lock().text = format!("Cuda failure '{}'", code.text());
        UNHANDLED_CUDA_ERROR
    })?;
    if stream.context.device != communicator.device {
        return Err(INVALID_USAGE);
    }
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.calls.push((communicator, stream, operation));
            return Ok(());
        }
        communicator.launch(stream, vec![operation])
    })
}

nccl! {
    /// The version of NCCL that this has the functions of, as far as it has them.
    fn ncclGetVersion(version: Out<i32>) {
        version.set(22_707)
    }
}

nccl! {
    /// The id of a new group.
    fn ncclGetUniqueId(id: Out<Id>) {
        id.set(Id::new().map_err(|why| {
            eprintln!("softcuda: NCCL: no memory for a group: {why:?}");
            SYSTEM_ERROR
        })?)
    }
}

/// The beginning of `ncclConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

nccl! {
    /// A rank of a group, on the device of the calling thread's context.
    fn ncclCommInitRankConfig(out: Out<Handle>, ranks: i32, id: Id, rank: i32, config: In<Config>) {
        out.required().map_err(|_| INVALID_ARGUMENT)?;
        let config = config.get().map_err(|_| INVALID_ARGUMENT)?;
        let size = |number: i32| usize::try_from(number).map_err(|_| INVALID_ARGUMENT);
        let (ranks, rank) = (size(ranks)?, size(rank)?);
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
                // What older versions did not know they do not say.
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
    /// How it is with what was begun last.
    fn ncclCommGetAsyncError(communicator: Handle, state: Out<u32>) {
        let communicator = COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?;
        let answer = communicator.state.lock().answer;
        state.set(answer)
    }
}

nccl! {
    /// Begins to end a communicator: what was issued is done.
    fn ncclCommFinalize(communicator: Handle) {
        let communicator = COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.ready()?;
        let this = communicator.clone();
        communicator.by_itself(move || {
            // But for this thread's own.
            while this.state.lock().work > 1 && !this.is_aborted() {
                std::thread::sleep(LOOK);
            }
            this.ends(Ok(()));
        })
    }
}

nccl! {
    /// Ends a communicator, once its work is over.
    fn ncclCommDestroy(communicator: Handle) {
        let communicator = COMMUNICATORS.remove(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.wait_for_work();
        Ok(())
    }
}

nccl! {
    /// Ends a communicator and all that waits in it; comes back when the streams are past its work.
    fn ncclCommAbort(communicator: Handle) {
        let communicator = COMMUNICATORS.remove(communicator).map_err(|_| INVALID_ARGUMENT)?;
        communicator.aborted.store(true, Ordering::SeqCst);
        communicator.wait_for_work();
        Ok(())
    }
}

nccl! {
    /// How many ranks there are.
    fn ncclCommCount(communicator: Handle, count: Out<i32>) {
        count.set(COMMUNICATORS.get(communicator).map_err(|_| INVALID_ARGUMENT)?.ranks as i32)
    }
}

nccl! {
    /// Reduces to all ranks.
    fn ncclAllReduce(from: u64, to: u64, count: usize, dtype: u32, reduce: u32, communicator: Handle, stream: Handle) {
        call(communicator, stream, Operation { kind: Kind::AllReduce(reduce), from, to, count, dtype })
    }
}

nccl! {
    /// Reduces, and gives each rank its share, of this length.
    fn ncclReduceScatter(from: u64, to: u64, count: usize, dtype: u32, reduce: u32, communicator: Handle, stream: Handle) {
        call(communicator, stream, Operation { kind: Kind::ReduceScatter(reduce), from, to, count, dtype })
    }
}

nccl! {
    /// Gives all ranks the parts of all, of this length.
    fn ncclAllGather(from: u64, to: u64, count: usize, dtype: u32, communicator: Handle, stream: Handle) {
        call(communicator, stream, Operation { kind: Kind::AllGather, from, to, count, dtype })
    }
}

nccl! {
    /// Gives all ranks what one has.
    fn ncclBroadcast(from: u64, to: u64, count: usize, dtype: u32, root: i32, communicator: Handle, stream: Handle) {
        let root = usize::try_from(root).map_err(|_| INVALID_ARGUMENT)?;
        call(communicator, stream, Operation { kind: Kind::Broadcast(root), from, to, count, dtype })
    }
}

nccl! {
    /// Gives another rank what it receives.
    fn ncclSend(from: u64, count: usize, dtype: u32, peer: i32, communicator: Handle, stream: Handle) {
        let peer = usize::try_from(peer).map_err(|_| INVALID_ARGUMENT)?;
        call(communicator, stream, Operation { kind: Kind::Send(peer), from, to: 0, count, dtype })
    }
}

nccl! {
    /// Receives what another rank sends.
    fn ncclRecv(to: u64, count: usize, dtype: u32, peer: i32, communicator: Handle, stream: Handle) {
        let peer = usize::try_from(peer).map_err(|_| INVALID_ARGUMENT)?;
        call(communicator, stream, Operation { kind: Kind::Receive(peer), from: 0, to, count, dtype })
    }
}

nccl! {
    /// From here on the thread's calls are one piece of work.
    fn ncclGroupStart() {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    }
}

nccl! {
    /// Issues what was called since the beginning of the outermost group.
    fn ncclGroupEnd() {
        let mut calls = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1).ok_or(INVALID_USAGE)?;
            Ok(if group.depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
        })?;
        let mut answer = Ok(());
        while let Some((communicator, stream, operation)) = calls.first().cloned() {
            let same = |call: &(Arc<Communicator>, Arc<Stream>, Operation)| {
                Arc::ptr_eq(&call.0, &communicator) && Arc::ptr_eq(&call.1, &stream)
            };
            let of: Vec<Operation> = calls.extract_if(.., |call| same(call)).map(|call| call.2).collect();
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

/// Text of a code of NCCL.
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

/// What went wrong last with a communicator.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(communicator: Handle) -> *const c_char {
    let text = COMMUNICATORS
        .get(communicator)
        .map(|found| found.state.lock().text.clone())
        .unwrap_or_default();
    let text = CString::new(text).unwrap_or_default();
    let at = text.as_ptr();
    // A few, and for ever: nobody says when he is done with one.
    TEXTS.lock().push(text);
    at
}
