//! Communicators of NCCL: what devices work together by.
//!
//! A communicator is made when a group of devices first works together, and kept until the runtime
//! ends. All of them are *non-blocking*: no call of NCCL's waits for other ranks, and what a call
//! began goes on by itself while its caller looks, asleep in between, how it ends, and whether it
//! still can.
//!
//! Work of a communicator waits on the device for that of the other ranks. NCCL does not say when
//! one of those is no more, so whoever hears of it [gives up](Communicators::give_up) all
//! communicators: they are aborted, and the streams go on, past work that has not been done. Who
//! issued it asks each communicator at its end whether it [was given up](Communicator::given_up).
//! Aborting may wait for the device, so each has a thread for it: one may be stuck behind the work
//! of another.

pub(super) mod library;

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use mpmd_transport::Failure;
use mpmd_transport::memory::DevicePlace;
use parking_lot::{Condvar, Mutex, MutexGuard};

use library::{Functions, IN_PROGRESS, SUCCESS, data_type, functions, operation};

use super::error::CudaError;
use super::gpu::{Context, Gpu};
use super::line::Stream;
use super::{CommunicatorId, Joint, NotJoined};
use crate::device::collective::CollectiveKind;
use mpmd_layout::topology::DeviceId;

/// The first pause between two looks at what goes on by itself, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];
/// How long who cannot go on waits for the communicator to be gone, so that nothing more of it
/// comes to the stream.
const UNTIL_GONE: Duration = Duration::from_secs(2);

/// A process's communicators.
#[derive(Default)]
pub(crate) struct Communicators {
    state: Mutex<State>,
    is_watched: AtomicBool,
}

#[derive(Default)]
struct State {
    /// By the group's devices, in order, and the rank among them: several may be of this process.
    open: HashMap<(Vec<DeviceId>, usize), Arc<Communicator>>,
    given_up: Option<Arc<Failure>>,
    /// Those that are being aborted, or were.
    leaving: Vec<Arc<Communicator>>,
}

/// A device's place in a group that works together.
pub(crate) struct Communicator {
    functions: &'static Functions,
    context: Arc<Context>,
    rank: usize,
    /// None before it is made and after it was ended.
    raw: Mutex<Option<Raw>>,
    given_up: OnceLock<Arc<Failure>>,
    is_gone: Mutex<bool>,
    gone: Condvar,
}

#[derive(Clone, Copy)]
struct Raw(sys::ncclComm_t);

// SAFETY: a communicator may be used by any thread, by one at a time, which the lock around it sees
// to.
unsafe impl Send for Raw {}

/// What a group of devices knows its communicators by, before they are made.
///
/// # Errors
///
/// Where there is no NCCL, or it finds no network.
pub(crate) fn new_id() -> Result<CommunicatorId, CudaError> {
    let functions = functions()?;
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: there is room for the id.
    unsafe {
        functions.check(
            "beginning a group of NCCL's",
            (functions.ncclGetUniqueId)(&raw mut id),
            NONE,
        )?
    };
    Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
}

const NONE: sys::ncclComm_t = std::ptr::null_mut();

impl Communicators {
    /// The communicator of a rank of these devices; `None` where it was not made yet.
    ///
    /// # Errors
    ///
    /// Where all were given up.
    pub(crate) fn find(
        &self,
        devices: &[DeviceId],
        rank: usize,
    ) -> Result<Option<Arc<Communicator>>, NotJoined> {
        let state = self.state.lock();
        match &state.given_up {
            Some(failure) => Err(NotJoined::GivenUp(failure.clone())),
            None => Ok(state.open.get(&(devices.to_vec(), rank)).cloned()),
        }
    }

    /// Makes the communicator of a rank of these devices, which all others of the group do too;
    /// waits for that. The device's context is this thread's current one.
    ///
    /// # Errors
    ///
    /// Where NCCL refuses, the others do not come until the deadline, or all are given up
    /// meanwhile.
    pub(crate) fn open(
        &self,
        gpu: &Gpu,
        (devices, rank): (&[DeviceId], usize),
        id: &CommunicatorId,
        deadline: Instant,
    ) -> Result<Arc<Communicator>, NotJoined> {
        let made = Arc::new(Communicator {
            functions: functions()?,
            context: gpu.context().clone(),
            rank,
            raw: Mutex::default(),
            given_up: OnceLock::new(),
            is_gone: Mutex::default(),
            gone: Condvar::new(),
        });
        {
            let mut state = self.state.lock();
            if let Some(failure) = &state.given_up {
                return Err(NotJoined::GivenUp(failure.clone()));
            }
            // Known before there is anything to wait for, so that it is given up with the others.
            state.open.insert((devices.to_vec(), rank), made.clone());
        }
        made.begin(devices.len(), id)?;
        made.until_done("joining a group of NCCL's", deadline)?;
        Ok(made)
    }

    /// Nothing that waits for others will end: all communicators are aborted, by threads of their
    /// own, and there will be no others. Never blocks.
    pub(crate) fn give_up(&self, why: &Arc<Failure>) {
        let open = {
            let mut state = self.state.lock();
            state.given_up.get_or_insert_with(|| why.clone());
            let open: Vec<_> = std::mem::take(&mut state.open).into_values().collect();
            state.leaving.extend(open.iter().cloned());
            open
        };
        for communicator in open {
            // Once: those that are open were not given up before.
            let _ = communicator.given_up.set(why.clone());
            in_a_thread("nccl-abort", move || communicator.end(|raw| communicator.abort(raw)));
        }
    }

    /// What went wrong with one of them, by NCCL's own account, unless all were given up.
    pub(crate) fn look(&self) -> Option<CudaError> {
        let open: Vec<_> = self.state.lock().open.values().cloned().collect();
        // Whoever has it locked is told.
        let states = open.iter().filter_map(|communicator| {
            let raw = communicator.raw.try_lock()?;
            communicator.state("working by NCCL", (*raw)?).err()
        });
        states.into_iter().next()
    }

    /// Whether nobody looks after them yet; from now on the caller does.
    pub(crate) fn are_to_be_watched(&self) -> bool {
        !self.is_watched.swap(true, Ordering::Relaxed)
    }

    /// Ends all communicators that were not given up: their work is over, and so is the others'.
    /// Waits for the ends of all so long at most, then leaves them to their threads.
    pub(crate) fn close(&self, within: Duration) {
        let (open, mut closing) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.open), std::mem::take(&mut state.leaving))
        };
        let deadline = Instant::now() + within;
        for communicator in open.into_values() {
            closing.push(communicator.clone());
            // All at once: NCCL may have the ranks of a host wait for each other.
            in_a_thread("nccl-close", move || {
                communicator.end(|raw| communicator.close(raw, deadline))
            });
        }
        for communicator in closing {
            if !communicator.wait_until_gone(deadline) {
                tracing::debug!("a communicator of NCCL's did not end in time");
            }
        }
    }
}

impl Communicator {
    /// Why its work may not have been done, though the device has come past it.
    pub(crate) fn given_up(&self) -> Option<&Arc<Failure>> {
        self.given_up.get()
    }

    /// Begins to make it.
    fn begin(&self, ranks: usize, id: &CommunicatorId) -> Result<(), NotJoined> {
        const DOING: &str = "joining a group of NCCL's";
        let mut held = self.raw.lock();
        self.still_joined()?;
        let number = |number: usize| {
            c_int::try_from(number)
                .map_err(|_| CudaError::new(DOING, "", "the group has too many devices"))
        };
        let (ranks, rank) = (number(ranks)?, number(self.rank)?);
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let (mut raw, mut config) = (NONE, config());
        // SAFETY: there is room for the communicator, and the configuration says how much of it is
        // filled. The context of the device is current, as the caller has seen to.
        let begun = unsafe {
            let answer = (self.functions.ncclCommInitRankConfig)(
                &raw mut raw,
                ranks,
                id,
                rank,
                &raw mut config,
            );
            self.functions.check(DOING, answer, raw)
        };
        // What has failed may have left one all the same.
        *held = (raw != NONE).then_some(Raw(raw));
        Ok(begun?)
    }

    /// Issues work to a stream, of the device whose context is current. It is not all there before
    /// [`until_done`](Self::until_done) says so.
    ///
    /// # Errors
    ///
    /// Where NCCL refuses, or the communicator was given up.
    pub(crate) fn issue(&self, stream: &Stream, joint: &Joint<'_>) -> Result<(), NotJoined> {
        let held = self.held()?;
        let Some(Raw(raw)) = *held else { return Err(self.is_over()) };
        let Joint { kind, dtype, elements, ranks, from, to } = *joint;
        let doing = || format!("{} by NCCL", kind.verb());
        let Some(dtype_number) = data_type(dtype) else {
            return Err(CudaError::new(doing(), "", format!("it has no {dtype} values")).into());
        };
        let functions = self.functions;
        let stream = stream.handle().cast();
        let (source, target) = (at(from, 0), at(to, 0));
        // Sizes were checked where the collective was called: both places have as many elements as
        // it takes. SAFETY: the communicator is alive and held by this thread, the stream of its
        // device and alive. The places are memory of the device, as long as NCCL makes of the
        // number of elements, and stay until the stream is past this.
        let answer = unsafe {
            match kind {
                CollectiveKind::AllReduce(reduce) => {
                    let reduce = operation(*reduce);
                    (functions.ncclAllReduce)(
                        source,
                        target,
                        elements,
                        dtype_number,
                        reduce,
                        raw,
                        stream,
                    )
                }
                CollectiveKind::ReduceScatter(reduce) => {
                    let (reduce, share) = (operation(*reduce), elements / ranks);
                    (functions.ncclReduceScatter)(
                        source,
                        target,
                        share,
                        dtype_number,
                        reduce,
                        raw,
                        stream,
                    )
                }
                CollectiveKind::AllGather => {
                    (functions.ncclAllGather)(source, target, elements, dtype_number, raw, stream)
                }
                CollectiveKind::Broadcast(root) => {
                    // A rank, of which there are as many as NCCL's numbers reach.
                    let root = *root as c_int;
                    (functions.ncclBroadcast)(
                        source,
                        target,
                        elements,
                        dtype_number,
                        root,
                        raw,
                        stream,
                    )
                }
                CollectiveKind::AllToAll => {
                    let (share, bytes) = (elements / ranks, elements / ranks * dtype.size());
                    self.together((0..ranks).filter(|other| *other != self.rank).map(|other| {
                        let (from, to) = (at(from, other * bytes), at(to, other * bytes));
                        let peer = other as c_int;
                        move || {
                            let sent =
                                (functions.ncclSend)(from, share, dtype_number, peer, raw, stream);
                            worse(
                                sent,
                                (functions.ncclRecv)(to, share, dtype_number, peer, raw, stream),
                            )
                        }
                    }))
                }
                CollectiveKind::Permute(pairs) => {
                    let mine = pairs.iter().filter(|(from, to)| from != to);
                    self.together(
                        mine.filter(|pair| pair.0 == self.rank || pair.1 == self.rank).map(
                            |pair| {
                                move || match *pair {
                                    (from, to) if from == self.rank => (functions.ncclSend)(
                                        source,
                                        elements,
                                        dtype_number,
                                        to as c_int,
                                        raw,
                                        stream,
                                    ),
                                    (from, _) => {
                                        let peer = from as c_int;
                                        (functions.ncclRecv)(
                                            target,
                                            elements,
                                            dtype_number,
                                            peer,
                                            raw,
                                            stream,
                                        )
                                    }
                                }
                            },
                        ),
                    )
                }
            }
        };
        // SAFETY: it is alive.
        unsafe { functions.check(&doing(), answer, raw) }.map_err(NotJoined::from)
    }

    /// Makes several calls as one piece of work, none of which comes without the others.
    ///
    /// # Safety
    ///
    /// As each of the calls.
    unsafe fn together(&self, calls: impl Iterator<Item = impl FnOnce() -> u32>) -> u32 {
        let mut calls = calls.peekable();
        if calls.peek().is_none() {
            return SUCCESS;
        }
        // SAFETY: it takes nothing, and ends below on the same thread.
        let begun = unsafe { (self.functions.ncclGroupStart)() };
        if !matches!(begun, SUCCESS | IN_PROGRESS) {
            return begun;
        }
        let called = calls.fold(SUCCESS, |answer, call| worse(answer, call()));
        // SAFETY: begun above.
        worse(called, unsafe { (self.functions.ncclGroupEnd)() })
    }

    /// Waits until what was begun is done: asleep, and no longer than until the deadline.
    ///
    /// # Errors
    ///
    /// Where it failed, did not end, or the communicator is given up meanwhile.
    pub(crate) fn until_done(&self, doing: &str, deadline: Instant) -> Result<(), NotJoined> {
        let [mut pause, longest] = PAUSES;
        loop {
            {
                let held = self.held()?;
                let Some(raw) = *held else { return Err(self.is_over()) };
                if self.state(doing, raw)? == SUCCESS {
                    return Ok(());
                }
            }
            if Instant::now() >= deadline {
                let text = "the other devices of the group did not come in time";
                return Err(CudaError::new(doing, "", text).into());
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
    }

    /// How it is with what was begun: done or not.
    fn state(&self, doing: &str, Raw(raw): Raw) -> Result<u32, CudaError> {
        let mut state = SUCCESS;
        // SAFETY: it is alive, as its lock is held, and there is room for the number.
        unsafe {
            let answer = (self.functions.ncclCommGetAsyncError)(raw, &raw mut state);
            self.functions.check(doing, answer, raw)?;
            self.functions.check(doing, state, raw)?;
        }
        Ok(state)
    }

    fn still_joined(&self) -> Result<(), NotJoined> {
        match self.given_up.get() {
            Some(failure) => Err(NotJoined::GivenUp(failure.clone())),
            None => Ok(()),
        }
    }

    /// The communicator, for this thread alone.
    fn held(&self) -> Result<MutexGuard<'_, Option<Raw>>, NotJoined> {
        if let Err(error) = self.still_joined() {
            // What NCCL has begun may still come to the stream: not behind what the caller does
            // next.
            self.wait_until_gone(Instant::now() + UNTIL_GONE);
            return Err(error);
        }
        Ok(self.raw.lock())
    }

    /// Why there is nothing any more.
    fn is_over(&self) -> NotJoined {
        match self.still_joined() {
            Err(given_up) => given_up,
            Ok(()) => CudaError::new("working by NCCL", "", "the communicator was closed").into(),
        }
    }

    /// Takes it from whoever would use it and has it ended.
    fn end(&self, end: impl FnOnce(Raw)) {
        let raw = self.raw.lock().take();
        if let Some(raw) = raw {
            // Where the device has failed NCCL says so too.
            let _ = self.context.bind();
            end(raw);
        }
        *self.is_gone.lock() = true;
        self.gone.notify_all();
    }

    fn wait_until_gone(&self, deadline: Instant) -> bool {
        let mut is_gone = self.is_gone.lock();
        while !*is_gone && !self.gone.wait_until(&mut is_gone, deadline).timed_out() {}
        *is_gone
    }

    fn abort(&self, Raw(raw): Raw) {
        // SAFETY: it is alive, and was taken from where others would use it.
        let aborted = unsafe {
            self.functions.check("leaving NCCL", (self.functions.ncclCommAbort)(raw), NONE)
        };
        if let Err(error) = aborted {
            tracing::debug!(%error, "giving up a communicator");
        }
    }

    /// Ends it in order, or without where it does not come to an end.
    fn close(&self, held: Raw, deadline: Instant) {
        const DOING: &str = "leaving NCCL";
        let Raw(raw) = held;
        // SAFETY: it is alive, and was taken from where others would use it.
        let mut is_over =
            unsafe { self.functions.check(DOING, (self.functions.ncclCommFinalize)(raw), raw) }
                .and_then(|()| self.state(DOING, held));
        while matches!(is_over, Ok(IN_PROGRESS)) && Instant::now() < deadline {
            std::thread::sleep(PAUSES[1]);
            is_over = self.state(DOING, held);
        }
        if !matches!(is_over, Ok(SUCCESS)) {
            return self.abort(held);
        }
        // SAFETY: as above; it was finalised.
        let closed =
            unsafe { self.functions.check(DOING, (self.functions.ncclCommDestroy)(raw), NONE) };
        if let Err(error) = closed {
            tracing::debug!(%error, "closing a communicator");
        }
    }
}

/// What of two answers says more: an error before anything else.
fn worse(one: u32, other: u32) -> u32 {
    match (one, other) {
        (SUCCESS, other) => other,
        (IN_PROGRESS, SUCCESS) => IN_PROGRESS,
        (IN_PROGRESS, other) => other,
        (one, _) => one,
    }
}

/// An address of a device's memory, as NCCL takes it.
fn at(place: DevicePlace, skip: usize) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(place.address as usize + skip)
}

/// Non-blocking; for the rest as NCCL likes. Filled as far as NCCL 2.14 knew it, and said to be of
/// that: what it has not, younger libraries set by themselves.
fn config() -> sys::ncclConfig_t {
    /// What C makes of the length: a multiple of that of the first field.
    const BYTES: usize = (std::mem::offset_of!(sys::ncclConfig_t, blocking) + size_of::<c_int>())
        .next_multiple_of(size_of::<usize>());
    // SAFETY: it is of numbers and pointers, for all of which zeros are valid.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = BYTES;
    config.magic = 0xcafe_beef;
    config.version = 21_400;
    config.blocking = 0;
    // Within the length, and of no meaning in that version: not said.
    config.cgaClusterSize = c_int::MIN;
    config
}

fn in_a_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
        tracing::warn!(%error, "starting a thread that ends a communicator of NCCL's");
    }
}

#[cfg(test)]
mod tests {
    use mpmd_ids::ProcessId;
    use mpmd_transport::FailureKind;

    use super::*;

    #[test]
    fn errors_count_for_more_than_what_goes_on() {
        assert_eq!(
            [worse(0, 7), worse(7, 0), worse(7, 5), worse(3, 5), worse(0, 0)],
            [7, 7, 5, 3, 0]
        );
    }

    #[test]
    fn the_configuration_is_that_of_the_first_version_that_does_not_block() {
        let config = config();
        assert_eq!(
            (config.size, config.magic, config.version, config.blocking),
            (24, 0xcafe_beef, 21_400, 0)
        );
    }

    #[test]
    fn nobody_joins_a_group_once_all_were_given_up() {
        let all = Communicators::default();
        assert!(all.find(&[DeviceId(0), DeviceId(1)], 0).is_ok_and(|found| found.is_none()));
        let why = Arc::new(Failure::new(FailureKind::PeerLost, ProcessId(1), 3, "it is gone"));
        all.give_up(&why);
        let found = all.find(&[DeviceId(0), DeviceId(1)], 0).err().map(|error| error.to_string());
        assert_eq!(found.as_deref(), Some("it was given up: it is gone"));
        assert!(all.are_to_be_watched() && !all.are_to_be_watched() && all.look().is_none());
        all.close(Duration::from_secs(1));
    }
}
