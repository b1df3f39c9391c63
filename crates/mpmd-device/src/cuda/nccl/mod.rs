//! NCCL communicators for groups of devices.
//!
//! A communicator is created when a group of devices first works together, and kept until the
//! runtime ends. All are *non-blocking*: no NCCL call waits for other ranks. The caller polls,
//! sleeping in between, until the call has finished in the background, or can no longer finish.
//!
//! On the device, work of a communicator waits for the other ranks. NCCL does not report that a
//! rank has died. When this process learns of it, it [gives up](Communicators::give_up) all
//! communicators: they are aborted, and the streams skip the unfinished work. So at the end of a
//! call, its issuer asks each communicator if it [was given up](Communicator::given_up).
//!
//! Each abort has its own thread, because it may wait for the device behind another communicator's
//! work.

pub(super) mod library;

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mpmd_base::block::{Condvar, Instant, Mutex, MutexGuard, now, thread};
use mpmd_base::deadline::after;
use mpmd_memory::DevicePlace;
use mpmd_proto::Failure;

use library::{
    IN_PROGRESS, NcclConfig, RawCommunicator, SUCCESS, UniqueId, check, data_type, operation, ready,
};

use super::context::DeviceContext;
use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::RawStream;
use super::{CommunicatorId, Joint, NotJoined};
use crate::collective::CollectiveKind;
use mpmd_layout::aval::DType;
use mpmd_layout::topology::DeviceId;

/// The first and the longest pause between two polls of NCCL.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(2)];
/// The longest wait for a communicator's abort to finish. Until then NCCL may still add work to the
/// stream.
const UNTIL_GONE: Duration = Duration::from_secs(2);

/// All NCCL communicators of this process, whether open, closing or being aborted.
#[derive(Default)]
pub struct Communicators {
    state: Mutex<CommunicatorsState>,
    is_watched: AtomicBool,
}

#[derive(Default)]
struct CommunicatorsState {
    open: HashMap<CommunicatorKey, Arc<Communicator>>,
    given_up: Option<Arc<Failure>>,
    /// Communicators that are being aborted or were aborted.
    leaving: Vec<Arc<Communicator>>,
}

/// A group of devices and a rank in it. Several ranks of a group may be in this process.
#[derive(Eq, Hash, PartialEq)]
struct CommunicatorKey {
    /// The group's devices, in the order of their ranks.
    devices: Vec<DeviceId>,
    rank: usize,
}

impl CommunicatorKey {
    fn new(devices: &[DeviceId], rank: usize) -> Self {
        Self {
            devices: devices.to_vec(),
            rank,
        }
    }
}

/// One rank of an NCCL communicator.
pub struct Communicator {
    context: Arc<DeviceContext>,
    rank: usize,
    /// The NCCL handle; `None` before its creation and after the communicator has ended.
    raw: Mutex<Option<NcclHandle>>,
    given_up: OnceLock<Arc<Failure>>,
    is_gone: Mutex<bool>,
    gone: Condvar,
}

#[derive(Clone, Copy)]
struct NcclHandle(RawCommunicator);

// SAFETY: a communicator may be used by any thread, but by one at a time, which the lock around it
// ensures.
unsafe impl Send for NcclHandle {}

/// Returns true if NCCL supports this dtype.
pub fn nccl_has(dtype: DType) -> bool {
    library::data_type(dtype).is_some()
}

/// Creates the id with which a group of devices creates its communicators.
///
/// # Errors
///
/// If NCCL is missing or finds no network interface.
pub fn new_id() -> Result<CommunicatorId, CudaError> {
    ready()?;
    let mut id = UniqueId { internal: [0; 128] };
    // SAFETY: there is room for the id.
    unsafe {
        check(
            "creating an NCCL group id",
            library::ncclGetUniqueId(&raw mut id),
            NONE,
        )?
    };
    Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
}

const NONE: RawCommunicator = std::ptr::null_mut();

impl Communicators {
    /// Returns the communicator of rank `rank` in the group `devices`. Returns `None` if it was not
    /// created yet.
    ///
    /// # Errors
    ///
    /// If all communicators were given up by [`Communicators::give_up`].
    pub fn find(
        &self,
        devices: &[DeviceId],
        rank: usize,
    ) -> Result<Option<Arc<Communicator>>, NotJoined> {
        let state = self.state.lock();
        match &state.given_up {
            Some(failure) => Err(NotJoined::GivenUp(failure.clone())),
            None => Ok(state
                .open
                .get(&CommunicatorKey::new(devices, rank))
                .cloned()),
        }
    }

    /// Creates the communicator of rank `rank` in the group `devices`. Blocks until every rank of
    /// the group has called it, or until `deadline`. The device's context must be current.
    ///
    /// # Errors
    ///
    /// If NCCL fails, the other ranks do not join before the deadline, or all communicators are
    /// given up meanwhile.
    pub fn open(
        &self,
        gpu: &Gpu,
        devices: &[DeviceId],
        rank: usize,
        id: &CommunicatorId,
        deadline: Instant,
    ) -> Result<Arc<Communicator>, NotJoined> {
        ready()?;

        let made = Arc::new(Communicator {
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
            // Registered before the wait, so that `give_up` reaches it.
            state
                .open
                .insert(CommunicatorKey::new(devices, rank), made.clone());
        }

        made.begin(devices.len(), id)?;
        made.until_done("creating an NCCL communicator", deadline)?;
        Ok(made)
    }

    /// Aborts all open communicators, each on its own thread, and refuses new ones with the failure
    /// `why`. Call it when a rank has died, because work that waits for the rank would never end.
    /// Never blocks.
    pub fn give_up(&self, why: &Arc<Failure>) {
        let open = {
            let mut state = self.state.lock();
            state.given_up.get_or_insert_with(|| why.clone());
            let open: Vec<_> = std::mem::take(&mut state.open).into_values().collect();
            state.leaving.extend(open.iter().cloned());
            open
        };

        for communicator in open {
            // Set only once: open communicators were not given up before.
            let _ = communicator.given_up.set(why.clone());
            in_a_thread("nccl-abort", move || {
                communicator.end(|raw| communicator.abort(raw))
            });
        }
    }

    /// Returns an error that NCCL reports for an open communicator, if any. Skips communicators
    /// that another thread is using.
    pub fn look(&self) -> Option<CudaError> {
        let open: Vec<_> = self.state.lock().open.values().cloned().collect();
        // A locked communicator is skipped: the thread that holds it gets the error.
        let states = open.iter().filter_map(|communicator| {
            let raw = communicator.raw.try_lock()?;
            communicator.state("working by NCCL", (*raw)?).err()
        });
        states.into_iter().next()
    }

    /// Returns true at the first call only. The caller must then start to watch the communicators.
    pub fn are_to_be_watched(&self) -> bool {
        !self.is_watched.swap(true, Ordering::Relaxed)
    }

    /// Closes all communicators that were not given up. Their work must have ended on all ranks.
    /// Blocks for at most `within`; communicators that are still open then are left to their
    /// closing threads.
    pub fn close(&self, within: Duration) {
        let mut state = self.state.lock();
        let open = std::mem::take(&mut state.open);
        let mut closing = std::mem::take(&mut state.leaving);
        drop(state);

        let deadline = after(now(), within);
        for communicator in open.into_values() {
            closing.push(communicator.clone());
            // In parallel: NCCL may make the ranks of one host wait for each other.
            in_a_thread("nccl-close", move || {
                communicator.end(|raw| communicator.close(raw, deadline))
            });
        }

        for communicator in closing {
            if !communicator.wait_until_gone(deadline) {
                tracing::debug!("an NCCL communicator did not end in time");
            }
        }
    }
}

impl Communicator {
    /// Returns the failure because of which this communicator was given up, if any. Its work may
    /// then be incomplete, although the device has passed the work.
    pub fn given_up(&self) -> Option<&Arc<Failure>> {
        self.given_up.get()
    }

    /// Starts to create the communicator for a group of `ranks` ranks, without waiting for the
    /// other ranks.
    fn begin(&self, ranks: usize, id: &CommunicatorId) -> Result<(), NotJoined> {
        const DOING: &str = "creating an NCCL communicator";
        let mut held = self.raw.lock();
        self.still_joined()?;

        let number = |number: usize| {
            c_int::try_from(number)
                .map_err(|_| CudaError::new(DOING, "", "the group has too many devices"))
        };
        let ranks = number(ranks)?;
        let rank = number(self.rank)?;
        let id = UniqueId {
            internal: id.map(|byte| byte as c_char),
        };

        let mut raw = NONE;
        let mut config = NcclConfig::non_blocking();
        // SAFETY: there is room for the communicator, and the configuration says how much of it is
        // filled. The context of the device is current, as the caller has seen to.
        let begun = unsafe {
            let answer =
                library::ncclCommInitRankConfig(&raw mut raw, ranks, id, rank, &raw mut config);
            check(DOING, answer, raw)
        };

        // A failed call may still have created one.
        *held = (raw != NONE).then_some(NcclHandle(raw));
        Ok(begun?)
    }

    /// Issues a collective to a stream of the device whose context is current. NCCL may still be
    /// issuing in the background until [`until_done`](Self::until_done) returns.
    ///
    /// # Errors
    ///
    /// If NCCL fails or the communicator was given up.
    pub fn issue(&self, stream: &RawStream, joint: &Joint<'_>) -> Result<(), NotJoined> {
        let held = self.held()?;
        let Some(NcclHandle(raw)) = *held else {
            return Err(self.is_over());
        };
        let Joint {
            kind,
            dtype,
            elements,
            ranks,
            from,
            to,
        } = *joint;
        let doing = || format!("{} by NCCL", kind.verb());
        let Some(dtype_number) = data_type(dtype) else {
            return Err(CudaError::new(doing(), "", format!("NCCL has no dtype {dtype}")).into());
        };

        let stream = stream.handle();
        let source = at(from, 0);
        let target = at(to, 0);
        // Sizes were checked where the collective was called: both places have the number of
        // elements that it needs. SAFETY: the communicator is alive and held by this thread, the
        // stream of its device and alive. The places are memory of the device, as long as NCCL
        // makes of the number of elements, and stay until the stream is past this.
        let answer = unsafe {
            match kind {
                CollectiveKind::AllReduce(reduce) => {
                    let reduce = operation(*reduce);
                    library::ncclAllReduce(
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
                    let reduce = operation(*reduce);
                    let share = elements / ranks;
                    library::ncclReduceScatter(
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
                    library::ncclAllGather(source, target, elements, dtype_number, raw, stream)
                }
                CollectiveKind::AllToAll => self.exchange_blocks(joint, dtype_number, raw, stream),
                CollectiveKind::Permute(pairs) => {
                    self.exchange_pairs(pairs, joint, dtype_number, raw, stream)
                }
            }
        };

        // SAFETY: it is alive.
        unsafe { check(&doing(), answer, raw) }.map_err(NotJoined::from)
    }

    /// Sends each other rank its block of the values, and receives one block from each. Returns
    /// NCCL's status.
    ///
    /// # Safety
    ///
    /// As for the calls in [`issue`](Self::issue), which checks sizes and holds the communicator
    /// `raw`.
    unsafe fn exchange_blocks(
        &self,
        joint: &Joint<'_>,
        dtype_number: u32,
        raw: RawCommunicator,
        stream: *mut c_void,
    ) -> u32 {
        let share = joint.elements / joint.ranks;
        let bytes = share * joint.dtype.size();
        let others = (0..joint.ranks).filter(|other| *other != self.rank);
        // SAFETY: as the caller says.
        unsafe {
            self.together(others.map(|other| {
                let from = at(joint.from, other * bytes);
                let to = at(joint.to, other * bytes);
                let peer = other as c_int;
                move || {
                    let sent = library::ncclSend(from, share, dtype_number, peer, raw, stream);
                    let received = library::ncclRecv(to, share, dtype_number, peer, raw, stream);
                    worse(sent, received)
                }
            }))
        }
    }

    /// Sends this rank's values to other ranks and receives another rank's values, as `pairs` of
    /// (sender, receiver) say. Returns NCCL's status.
    ///
    /// # Safety
    ///
    /// The requirements of [`exchange_blocks`](Self::exchange_blocks) apply.
    unsafe fn exchange_pairs(
        &self,
        pairs: &[(usize, usize)],
        joint: &Joint<'_>,
        dtype_number: u32,
        raw: RawCommunicator,
        stream: *mut c_void,
    ) -> u32 {
        let source = at(joint.from, 0);
        let target = at(joint.to, 0);
        let elements = joint.elements;
        let rank = self.rank;
        let mine = pairs
            .iter()
            .filter(|(from, to)| from != to)
            .filter(|(from, to)| *from == rank || *to == rank);
        // SAFETY: as the caller says.
        unsafe {
            self.together(mine.map(|&(from, to)| {
                move || {
                    if from == rank {
                        let peer = to as c_int;
                        library::ncclSend(source, elements, dtype_number, peer, raw, stream)
                    } else {
                        let peer = from as c_int;
                        library::ncclRecv(target, elements, dtype_number, peer, raw, stream)
                    }
                }
            }))
        }
    }

    /// Makes several NCCL calls as one group, which NCCL issues together. Returns the worst of
    /// their statuses; without calls, [`SUCCESS`].
    ///
    /// # Safety
    ///
    /// The requirements of each call apply.
    unsafe fn together(&self, calls: impl Iterator<Item = impl FnOnce() -> u32>) -> u32 {
        let mut calls = calls.peekable();
        if calls.peek().is_none() {
            return SUCCESS;
        }
        // SAFETY: it takes nothing, and ends below on the same thread.
        let begun = unsafe { library::ncclGroupStart() };
        if !matches!(begun, SUCCESS | IN_PROGRESS) {
            return begun;
        }

        let called = calls.fold(SUCCESS, |answer, call| worse(answer, call()));
        // SAFETY: begun above.
        worse(called, unsafe { library::ncclGroupEnd() })
    }

    /// Waits until the background work of the last NCCL call has finished, sleeping between polls.
    /// Errors name the operation `doing`.
    ///
    /// # Errors
    ///
    /// If the work failed, did not finish before the deadline, or the communicator was given up
    /// meanwhile.
    pub fn until_done(&self, doing: &str, deadline: Instant) -> Result<(), NotJoined> {
        let [mut pause, longest] = PAUSES;
        loop {
            {
                let held = self.held()?;
                let Some(raw) = *held else {
                    return Err(self.is_over());
                };
                if self.state(doing, raw)? == SUCCESS {
                    return Ok(());
                }
            }

            if now() >= deadline {
                let text = "the other devices of the group did not come in time";
                return Err(CudaError::new(doing, "", text).into());
            }
            thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
    }

    /// Returns the status of the communicator's background work: `SUCCESS` or `IN_PROGRESS`.
    fn state(&self, doing: &str, NcclHandle(raw): NcclHandle) -> Result<u32, CudaError> {
        let mut state = SUCCESS;
        // SAFETY: it is alive, as its lock is held, and there is room for the number.
        unsafe {
            let answer = library::ncclCommGetAsyncError(raw, &raw mut state);
            check(doing, answer, raw)?;
            check(doing, state, raw)?;
        }
        Ok(state)
    }

    fn still_joined(&self) -> Result<(), NotJoined> {
        match self.given_up.get() {
            Some(failure) => Err(NotJoined::GivenUp(failure.clone())),
            None => Ok(()),
        }
    }

    /// Locks the communicator's handle. If the communicator was given up, waits up to
    /// [`UNTIL_GONE`] for its abort, then fails.
    fn held(&self) -> Result<MutexGuard<'_, Option<NcclHandle>>, NotJoined> {
        if let Err(error) = self.still_joined() {
            // Until it is gone, NCCL may add work to the stream behind the caller's next work.
            self.wait_until_gone(now() + UNTIL_GONE);
            return Err(error);
        }
        Ok(self.raw.lock())
    }

    /// Returns the error that the communicator no longer exists, with the reason.
    fn is_over(&self) -> NotJoined {
        match self.still_joined() {
            Err(given_up) => given_up,
            Ok(()) => CudaError::new("working by NCCL", "", "the communicator was closed").into(),
        }
    }

    /// Takes the handle away from all users, calls `end` with it, and wakes the threads that wait
    /// for the communicator's end.
    fn end(&self, end: impl FnOnce(NcclHandle)) {
        let raw = self.raw.lock().take();
        if let Some(raw) = raw {
            // If the device has failed, NCCL reports the error itself.
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

    fn abort(&self, NcclHandle(raw): NcclHandle) {
        // SAFETY: it is alive, and no other thread can reach it any more.
        let aborted = unsafe { check("leaving NCCL", library::ncclCommAbort(raw), NONE) };
        if let Err(error) = aborted {
            tracing::debug!(%error, "aborting an NCCL communicator");
        }
    }

    /// Finalises and destroys the communicator. Aborts it if it does not finish before the
    /// deadline.
    fn close(&self, held: NcclHandle, deadline: Instant) {
        const DOING: &str = "leaving NCCL";
        let NcclHandle(raw) = held;
        // SAFETY: it is alive, and no other thread can reach it any more.
        let mut is_over = unsafe { check(DOING, library::ncclCommFinalize(raw), raw) }
            .and_then(|()| self.state(DOING, held));

        while matches!(is_over, Ok(IN_PROGRESS)) && now() < deadline {
            thread::sleep(PAUSES[1]);
            is_over = self.state(DOING, held);
        }

        if !matches!(is_over, Ok(SUCCESS)) {
            return self.abort(held);
        }

        // SAFETY: as above; it was finalised.
        let closed = unsafe { check(DOING, library::ncclCommDestroy(raw), NONE) };
        if let Err(error) = closed {
            tracing::debug!(%error, "closing an NCCL communicator");
        }
    }
}

/// Returns the more severe of two NCCL statuses: an error, else `IN_PROGRESS`, else `SUCCESS`.
fn worse(one: u32, other: u32) -> u32 {
    match (one, other) {
        (SUCCESS, other) => other,
        (IN_PROGRESS, SUCCESS) => IN_PROGRESS,
        (IN_PROGRESS, other) => other,
        (one, _) => one,
    }
}

/// Returns the device address that is `skip` bytes after `place`, as a pointer.
fn at(place: DevicePlace, skip: usize) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(place.address as usize + skip)
}

fn in_a_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(work) {
        tracing::warn!(%error, "cannot start the thread that ends an NCCL communicator");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use mpmd_base::ProcessId;
    use mpmd_base::block::mpsc::channel;
    use mpmd_layout::aval::DType;
    use mpmd_memory::{Arena, Pool};
    use mpmd_proto::FailureKind;

    use super::*;
    use crate::collective::Reduce;

    #[test]
    fn errors_are_worse_than_work_in_progress() {
        assert_eq!(
            [
                worse(0, 7),
                worse(7, 0),
                worse(7, 5),
                worse(3, 5),
                worse(0, 0)
            ],
            [7, 7, 5, 3, 0]
        );
    }

    #[test]
    fn no_communicator_is_found_after_give_up() {
        let all = Communicators::default();
        assert!(
            all.find(&[DeviceId(0), DeviceId(1)], 0)
                .is_ok_and(|found| found.is_none())
        );
        let why = Arc::new(Failure::new(
            FailureKind::PeerLost,
            ProcessId(1),
            3,
            "it is gone",
        ));
        all.give_up(&why);
        let found = all
            .find(&[DeviceId(0), DeviceId(1)], 0)
            .err()
            .map(|error| error.to_string());
        assert_eq!(found.as_deref(), Some("it was given up: it is gone"));
        assert!(all.are_to_be_watched() && !all.are_to_be_watched() && all.look().is_none());
        all.close(Duration::from_secs(1));
    }

    const SOON: Duration = Duration::from_secs(60);

    /// The only test that runs with NVIDIA's NCCL on a machine with one device: NCCL refuses two
    /// ranks on a device.
    #[test]
    fn single_rank_reduces_on_a_real_device() {
        const COUNT: usize = 1000;
        softcuda::registered!();
        if !softcuda::real() {
            println!("SKIPPED: MPMD_TEST_GPU=1 runs this on a real device");
            return;
        }
        if let Err(error) = ready() {
            println!("SKIPPED: {error}");
            return;
        }
        // NCCL needs a network interface even for one rank, and the machine may have no other.
        let prepare = |command: &mut Command| {
            command.env("NCCL_SOCKET_IFNAME", "lo");
        };
        if softcuda::anew!(prepare).is_some() {
            return;
        }
        let gpu = Gpu::open(0).unwrap();
        let pool = Pool::in_arena("device", None, &Arena::device(gpu.allocator()));
        let [from, to] = [0, 1].map(|_| pool.allocate(4 * COUNT).unwrap());
        let [source, target] = [&from, &to].map(|memory| memory.device().unwrap());
        let (all, deadline) = (Communicators::default(), now() + SOON);
        gpu.context().bind().unwrap();
        let id = new_id().unwrap();
        let communicator = all.open(&gpu, &[DeviceId(0)], 0, &id, deadline).unwrap();
        let kind = CollectiveKind::AllReduce(Reduce::Sum);
        let joint = Joint {
            kind: &kind,
            dtype: DType::F32,
            elements: COUNT,
            ranks: 1,
            from: source,
            to: target,
        };
        let mut values = vec![0; 4 * COUNT];
        let (said, told) = channel();
        gpu.compute().submit(
            &[],
            |stream| {
                stream.fill(source, &2.5_f32.to_ne_bytes())?;
                stream.fill(target, &[0; 4])?;
                communicator.issue(stream, &joint).unwrap();
                communicator.until_done("reducing alone", deadline).unwrap();
                stream.download(target, &mut values)
            },
            Box::new(move |result| said.send(result).unwrap()),
        );
        told.recv_timeout(SOON).unwrap().unwrap();
        assert_eq!(values, 2.5_f32.to_ne_bytes().repeat(COUNT));
        assert!(all.look().is_none());
        all.close(SOON);
        assert!(communicator.wait_until_gone(now()));
    }
}
