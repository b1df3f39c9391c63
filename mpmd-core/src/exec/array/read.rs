//! Waiting for arrays and reading their values.

use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_transport::SharedBuffer;
use mpmd_transport::deadline::after;
use parking_lot::Mutex;

use super::{LocalShard, Made, MpmdArray, Placed, Repr};
use crate::device::copy::copy_region;
use crate::error::{Error, Result};
use crate::exec::host_array::HostArray;
use crate::exec::{Doing, Outcome, Slot};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;

/// One device's part of an array.
#[derive(Clone, Debug)]
pub struct Shard {
    /// The device.
    pub device: DeviceId,
    /// Which part of the whole it holds.
    pub region: Region,
    /// Its values, shaped like the region.
    pub data: HostArray,
}

impl MpmdArray {
    /// Blocks until the local shards are ready; returns the array itself, as often as it is called.
    ///
    /// Waits as long as it takes, and says what it waits for each time the program's patience runs
    /// out. Do not call it on a thread that drives futures; await the array there.
    ///
    /// # Errors
    ///
    /// Where the operation that makes the array failed, here or elsewhere.
    #[track_caller]
    pub fn block_until_ready(&self) -> Result<&Self> {
        let at = Location::caller();
        self.note_read(false, at);
        self.wait_each(None, at)?;
        Ok(self)
    }

    /// As [`MpmdArray::block_until_ready`], for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] where it takes longer; the operation goes on.
    #[track_caller]
    pub fn wait_timeout(&self, timeout: Duration) -> Result<&Self> {
        self.wait_each(Some(timeout), Location::caller())?;
        Ok(self)
    }

    /// Whether the local shards are ready, or will never be.
    pub fn is_complete(&self) -> bool {
        match &self.repr {
            Repr::Host(_) => true,
            Repr::Placed(placed) => placed.shards.iter().all(|shard| shard.slot.has_ended()),
        }
    }

    /// The values of the whole array; `None` where it is fully remote. Blocks until they are ready.
    ///
    /// One program text serves owners and others: who has no part of the array gets `None`.
    ///
    /// # Errors
    ///
    /// Where the array's operation failed, where the array was donated, where this process owns
    /// some of the array but not all of its values ([`MpmdArray::addressable_shards`] has what is
    /// here), and, on every process, where its sharding has unreduced axes.
    #[track_caller]
    pub fn to_host(&self) -> Result<Option<HostArray>> {
        let at = Location::caller();
        self.check_whole(at)?;
        self.note_read(true, at);
        let placed = match &self.repr {
            Repr::Host(host) => return Ok(Some(host.clone())),
            Repr::Placed(placed) if placed.shards.is_empty() => return Ok(None),
            Repr::Placed(placed) => placed,
        };
        let buffers = self.wait(at)?;
        placed.gather(&buffers, at).map(Some)
    }

    /// The parts of the array that this process holds. Blocks until they are ready.
    ///
    /// # Errors
    ///
    /// Where the array is fully remote, uncommitted, or donated, its sharding has unreduced axes,
    /// or its operation failed.
    #[track_caller]
    pub fn addressable_shards(&self) -> Result<Vec<Shard>> {
        let at = Location::caller();
        let read = |why: String| Error::Read { at, why };
        self.check_whole(at)?;
        match &self.repr {
            Repr::Host(host) => {
                Err(read(format!("{} is uncommitted: it has no shards", host.aval())))
            }
            Repr::Placed(placed) if placed.shards.is_empty() => Err(read(format!(
                "the shards of {} were asked for, but this process ({}) owns none of its devices",
                placed.describe(),
                placed.made.runtime.me
            ))),
            Repr::Placed(placed) => {
                let buffers = self.wait(at)?;
                let shards = placed.shards.iter().zip(buffers);
                shards
                    .map(|(shard, buffer)| {
                        let region = placed.region(shard.device);
                        let aval = ShapedArray::try_new(&region.shape(), placed.made.aval.dtype())?;
                        Ok(Shard {
                            device: shard.device,
                            region,
                            data: HostArray::from_bytes(aval, buffer)?,
                        })
                    })
                    .collect()
            }
        }
    }

    /// Calls `f` with the values, or with why there are none, once they are there.
    ///
    /// Returns at once; `f` runs on a thread kept for such calls, in the order in which arrays
    /// complete. It is not called where the array is fully remote.
    #[track_caller]
    pub fn then(&self, f: impl FnOnce(Result<HostArray>) + Send + 'static) {
        let at = Location::caller();
        match &self.repr {
            Repr::Host(host) => f(Ok(host.clone())),
            Repr::Placed(placed) if placed.shards.is_empty() => {}
            Repr::Placed(placed) => {
                if let Err(error) = self.check_whole(at) {
                    placed.made.runtime.call_back(Box::new(move || f(Err(error))));
                    return;
                }
                // Queued when the last shard ends. The shards are picked up as each ends: the array
                // may be donated before `f` has its turn.
                let shards = placed.in_host_memory();
                let placed = placed.clone();
                collect_all(
                    &shards,
                    Box::new(move |outcomes| {
                        let runtime = placed.made.runtime.clone();
                        runtime.call_back(Box::new(move || {
                            let buffers: Result<Vec<_>, _> = outcomes.into_iter().collect();
                            f(buffers
                                .map_err(Error::failed)
                                .and_then(|buffers| placed.gather(&buffers, at)));
                        }));
                    }),
                );
            }
        }
    }

    /// In a plan, the program waits here.
    fn note_read(&self, values: bool, at: &'static Location<'static>) {
        if let Repr::Placed(placed) = &self.repr
            && let Some(recorder) = &placed.made.runtime.recorder
        {
            recorder.read(placed.origin(), values, at);
        }
    }

    /// Partial sums are nobody's values, and a replay reads none. The same on every process,
    /// whatever it owns.
    fn check_whole(&self, at: &'static Location<'static>) -> Result<()> {
        match &self.repr {
            Repr::Placed(placed) if placed.made.runtime.is_recording(placed.origin.op) => {
                Err(Error::Read {
                    at,
                    why: format!(
                        "the values of {} are asked for by the step that makes it and is \
                         recorded: no replay would ask",
                        placed.describe()
                    ),
                })
            }
            Repr::Placed(placed) if !placed.made.sharding.unreduced_axes().is_empty() => {
                Err(Error::Read {
                    at,
                    why: format!(
                        "the values of {} are sums of its shards; put it to a sharding without \
                         unreduced axes first",
                        placed.describe()
                    ),
                })
            }
            _ => Ok(()),
        }
    }

    fn wait(&self, at: &'static Location<'static>) -> Result<Vec<SharedBuffer>> {
        let Repr::Placed(placed) = &self.repr else { return Ok(Vec::new()) };
        if let Err(problem) = placed.check_usable("") {
            return Err(Error::Read { at, why: format!("the array {problem}") });
        }
        let mut buffers = Vec::new();
        // All begin before the first is waited for.
        for slot in placed.in_host_memory() {
            let found = placed.wait_look(&slot, None, at);
            // Without a deadline there is always one.
            buffers.extend(found.transpose().map_err(Error::failed)?);
        }
        Ok(buffers)
    }

    /// Waits for the local shards in order.
    fn wait_each(&self, timeout: Option<Duration>, at: &'static Location<'static>) -> Result<()> {
        let Repr::Placed(placed) = &self.repr else { return Ok(()) };
        if let Err(problem) = placed.check_usable("") {
            return Err(Error::Read { at, why: format!("the array {problem}") });
        }
        let deadline = timeout.map(|timeout| after(Instant::now(), timeout));
        for shard in placed.shards.iter() {
            match placed.wait_look(&shard.slot, deadline, at) {
                Some(outcome) => drop(outcome.map_err(Error::failed)?),
                None => {
                    let waited = timeout.unwrap_or_default();
                    return Err(Error::TimedOut { at, what: placed.describe(), waited });
                }
            }
        }
        Ok(())
    }
}

impl Placed {
    /// The local shards as the host reads them: those of CUDA devices are copied, from now on.
    fn in_host_memory(&self) -> Vec<Slot> {
        let Made { runtime, sharding, .. } = &*self.made;
        let slot = |shard: &LocalShard| match runtime.gpu_of(shard.device, sharding.memory_kind()) {
            Some(_) => runtime.in_host_memory(self.origin.op, &shard.slot),
            None => shard.slot.clone(),
        };
        self.shards.iter().map(slot).collect()
    }

    /// Looks whether a shard is there, then waits for it.
    fn wait_look(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
        at: &'static Location<'static>,
    ) -> Option<Outcome> {
        let runtime = &self.made.runtime;
        let ended = || slot.has_ended().then_some(());
        // Who drives looks by itself.
        let here = if runtime.waits.can_drive() { ended() } else { runtime.wait_spin.look(ended) };
        match here {
            Some(()) => slot.peek(),
            None => self.wait_for(slot, deadline, at),
        }
    }

    /// Waits for a shard, and reports each time patience runs out.
    fn wait_for(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
        at: &'static Location<'static>,
    ) -> Option<Outcome> {
        let runtime = &self.made.runtime;
        let _doing = runtime.status.enter(Doing::Waiting("a read of an array", at));
        let _waiting = runtime.trace.wait("a read of an array", at);
        loop {
            let patience = after(Instant::now(), runtime.config.patience);
            let until = deadline.map_or(patience, |deadline| deadline.min(patience));
            if let Some(outcome) = runtime.waits.wait(slot, Some(until)) {
                return Some(outcome);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            runtime.report_hang(&format!(
                "process {}: {at} waits for {}; {}",
                runtime.me,
                self.describe(),
                runtime.doing_and_why()
            ));
        }
    }

    /// Puts the local shards together, where they are the whole array.
    fn gather(
        &self,
        buffers: &[SharedBuffer],
        at: &'static Location<'static>,
    ) -> Result<HostArray> {
        let full = Region::full(self.made.aval.shape());
        let regions: Vec<Region> =
            self.shards.iter().map(|shard| self.region(shard.device)).collect();
        if let Some(index) = regions.iter().position(|region| *region == full) {
            return Ok(HostArray::from_bytes(self.made.aval.clone(), buffers[index].clone())?);
        }
        // Regions of one layout are equal or disjoint, so distinct ones add up.
        let distinct: Vec<usize> =
            (0..regions.len()).filter(|i| !regions[..*i].contains(&regions[*i])).collect();
        let covered: usize = distinct.iter().map(|i| regions[*i].elements()).sum();
        if covered != self.made.aval.elements() {
            return Err(Error::Read {
                at,
                why: format!(
                    "this process ({}) has {covered} of the {} elements of {}; read its \
                     addressable_shards, \
                     or device_put it to a sharding that this process owns",
                    self.made.runtime.me,
                    self.made.aval.elements(),
                    self.describe()
                ),
            });
        }
        let item = self.made.aval.dtype().size();
        let memory =
            |error: mpmd_transport::memory::OutOfMemory| Error::Environment(error.to_string());
        let mut whole =
            self.made.runtime.staging.allocate(self.made.aval.bytes()).map_err(memory)?;
        for i in distinct {
            copy_region(&buffers[i], &regions[i], &mut whole, &full, &regions[i], item);
        }
        Ok(HostArray::from_bytes(self.made.aval.clone(), whole.freeze())?)
    }
}

/// Calls `then` with how the slots ended, once all have.
///
/// Asks every slot now: what is issued later may take the buffer of one while another is not there
/// yet.
fn collect_all(slots: &[Slot], then: Box<dyn FnOnce(Vec<Outcome>) + Send>) {
    let missing = slots.iter().map(|_| None).collect::<Vec<Option<Outcome>>>();
    let collected = Arc::new(Mutex::new((missing, slots.len(), Some(then))));
    for (i, slot) in slots.iter().enumerate() {
        let collected = collected.clone();
        slot.on_end(move |outcome| {
            let mut guard = collected.lock();
            let (outcomes, missing, then) = &mut *guard;
            outcomes[i] = Some(outcome.clone());
            *missing -= 1;
            if *missing > 0 {
                return;
            }
            let (outcomes, then) = (std::mem::take(outcomes), then.take());
            drop(guard);
            if let Some(then) = then {
                then(outcomes.into_iter().flatten().collect());
            }
        });
    }
}
