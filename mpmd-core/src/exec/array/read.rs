//! Waiting for arrays and reading their values.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Instant, Mutex, now};
use mpmd_base::deadline::after;
use mpmd_device::copy::copy_region;
use mpmd_memory::SharedBuffer;

use super::{LocalShard, Made, MpmdArray, Placed, Repr};
use crate::error::{Error, Result};
use crate::exec::array::host_array::HostArray;
use crate::exec::{AsyncBuffer, Doing, Outcome};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;

/// One device's part of an array.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Id of the device.
    pub device: DeviceId,
    /// The region of the array that the device holds.
    pub region: Region,
    /// The values of the region, an array of the region's shape.
    pub data: HostArray,
}

impl MpmdArray {
    /// Blocks until this process's part of the array is done, and returns the array itself. That is
    /// when the local shards are filled, and the receivers have taken this process's sends and
    /// forwards, or the bytes were copied out. Returns at once on a process without a part.
    ///
    /// Has no time limit. Reports the awaited operation after the program's peer timeout, then at
    /// growing intervals. Do not call it on a thread that drives futures; await the array there.
    ///
    /// # Errors
    ///
    /// If a shard or a send of this process failed, also if the cause is another process, or if the
    /// array was donated. A process without a part gets no error.
    #[track_caller]
    pub fn block_until_ready(&self) -> Result<&Self> {
        let at = Location::caller();
        self.note_read(false, at);
        self.wait_each(None, at)?;
        Ok(self)
    }

    /// Blocks until this process's part of the array is done, as
    /// [`MpmdArray::block_until_ready`] does, but at most for `timeout`. Returns the array itself.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if it takes longer; the operation goes on. Other errors are those of
    /// [`MpmdArray::block_until_ready`].
    #[track_caller]
    pub fn wait_timeout(&self, timeout: Duration) -> Result<&Self> {
        self.wait_each(Some(timeout), Location::caller())?;
        Ok(self)
    }

    /// Returns true if this process's part of the array is done or has failed. The part is the same
    /// as for [`MpmdArray::block_until_ready`]. Does not block, and sends no message.
    pub fn is_complete(&self) -> bool {
        match &self.repr {
            Repr::Host(_) => true,
            Repr::Placed(placed) => placed.parts().all(AsyncBuffer::has_ended),
        }
    }

    /// Returns the values of the whole array, or `None` if it is fully remote. Blocks until the
    /// values are ready. Does not wait for sends.
    ///
    /// All processes can run the same code: a process without a part of the array gets `None`.
    ///
    /// # Errors
    ///
    /// If the array's operation failed or the array was donated. If this process owns some but not
    /// all of the values; [`MpmdArray::addressable_shards`] returns its part. On every process, if
    /// the sharding has unreduced axes.
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

    /// Returns the shards that this process holds. Blocks until the shards are ready. Does not wait
    /// for sends.
    ///
    /// # Errors
    ///
    /// If the array is fully remote, uncommitted or donated, its sharding has unreduced axes, or
    /// its operation failed.
    #[track_caller]
    pub fn addressable_shards(&self) -> Result<Vec<Shard>> {
        let at = Location::caller();
        let read = |why: String| Error::Read { at, why };
        self.check_whole(at)?;

        match &self.repr {
            Repr::Host(host) => Err(read(format!(
                "{} is uncommitted: it has no shards",
                host.aval()
            ))),
            Repr::Placed(placed) if placed.shards.is_empty() => {
                let runtime = &placed.made.runtime;
                let why = match &runtime.dry_run {
                    None => format!("this process ({}) owns none of its devices", runtime.me),
                    Some(_) => "the process of the dry run owns no device, as processes of a run \
                                may own none of these: ask `is_fully_remote` before"
                        .to_owned(),
                };
                Err(read(format!(
                    "cannot read the shards of {}: {why}",
                    placed.describe()
                )))
            }
            Repr::Placed(_) => self.shards_here(at),
        }
    }

    /// Calls `f` with the values, or the error, as soon as the array is complete here. Does not
    /// wait for sends.
    ///
    /// Returns at once. `f` runs on this process's callback thread, in the order in which arrays
    /// complete. For an uncommitted array it runs on the calling thread. It is not called if the
    /// array is fully remote.
    #[track_caller]
    pub fn then(&self, f: impl FnOnce(Result<HostArray>) + Send + 'static) {
        let at = Location::caller();
        match &self.repr {
            Repr::Host(host) => f(Ok(host.clone())),
            Repr::Placed(placed) if placed.shards.is_empty() => {}
            Repr::Placed(placed) => {
                if let Err(error) = self.check_whole(at) {
                    placed
                        .made
                        .runtime
                        .call_back(Box::new(move || f(Err(error))));
                    return;
                }

                // Queued when the last shard ends. Each shard is taken as it ends, because the
                // array may be donated before `f` runs.
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

    /// In a dry run, notes that the program waits for the array at line `at`. `values` is true if
    /// the wait is a read of the values.
    fn note_read(&self, values: bool, at: &'static Location<'static>) {
        if let Repr::Placed(placed) = &self.repr
            && let Some(dry_run) = &placed.made.runtime.dry_run
        {
            dry_run.read(placed.dry_run_array(), values, at);
        }
    }

    /// Returns an error if the array has partial sums, or if the step that makes it is being
    /// captured: a replay reads no values. The result is the same on every process.
    fn check_whole(&self, at: &'static Location<'static>) -> Result<()> {
        match &self.repr {
            Repr::Placed(placed) if placed.made.runtime.is_in_capture(placed.origin.op) => {
                Err(Error::Read {
                    at,
                    why: format!(
                        "the values of {} are read in the captured step that makes it; a \
                         replay reads no values: read them after the step",
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

    /// Returns the shards that this process holds, even if they are partial sums. Blocks until the
    /// shards are ready. Empty for an uncommitted array.
    pub(crate) fn shards_here(&self, at: &'static Location<'static>) -> Result<Vec<Shard>> {
        let Repr::Placed(placed) = &self.repr else {
            return Ok(Vec::new());
        };
        let shards = placed.shards.iter().zip(self.wait(at)?);
        let values = shards.map(|(shard, buffer)| {
            let region = placed.region(shard.device);
            let aval = ShapedArray::try_new(&region.shape(), placed.made.aval.dtype())?;
            Ok(Shard {
                device: shard.device,
                region,
                data: HostArray::from_bytes(aval, buffer)?,
            })
        });
        values.collect()
    }

    fn wait(&self, at: &'static Location<'static>) -> Result<Vec<SharedBuffer>> {
        let Repr::Placed(placed) = &self.repr else {
            return Ok(Vec::new());
        };
        if let Err(problem) = placed.check_usable("") {
            return Err(Error::Read {
                at,
                why: format!("the array {problem}"),
            });
        }
        let mut buffers = Vec::new();
        // All copies begin before the first wait.
        for slot in placed.in_host_memory() {
            let found = placed.wait_look(&slot, None, at);
            // Without a deadline the wait always returns an outcome.
            buffers.extend(found.transpose().map_err(Error::failed)?);
        }
        Ok(buffers)
    }

    /// Blocks until all local shards and sends have ended or one has failed. If that takes longer
    /// than `timeout`, returns [`Error::TimedOut`].
    fn wait_each(&self, timeout: Option<Duration>, at: &'static Location<'static>) -> Result<()> {
        let Repr::Placed(placed) = &self.repr else {
            return Ok(());
        };
        if let Err(problem) = placed.check_usable("") {
            return Err(Error::Read {
                at,
                why: format!("the array {problem}"),
            });
        }

        let deadline = timeout.map(|timeout| after(now(), timeout));
        placed.ask_taken();
        for part in placed.parts() {
            match placed.wait_look(part, deadline, at) {
                Some(outcome) => drop(outcome.map_err(Error::failed)?),
                None => {
                    let waited = timeout.unwrap_or_default();
                    return Err(Error::TimedOut {
                        at,
                        subject: placed.describe(),
                        waited,
                    });
                }
            }
        }
        Ok(())
    }
}

impl Placed {
    /// Returns the local shards as async buffers in host memory. Starts copies of shards on
    /// accelerators.
    pub(crate) fn in_host_memory(&self) -> Vec<AsyncBuffer> {
        let Made {
            runtime, sharding, ..
        } = &*self.made;
        let slot = |shard: &LocalShard| match runtime
            .accelerator_of(shard.device, sharding.memory_kind())
        {
            Some(_) => runtime.in_host_memory(self.origin.op, &shard.slot),
            None => shard.slot.clone(),
        };
        self.shards.iter().map(slot).collect()
    }

    /// Polls a shard or send of the array for a short time, then blocks until it ends. Returns its
    /// buffer or failure, or `None` after `deadline`.
    fn wait_look(
        &self,
        slot: &AsyncBuffer,
        deadline: Option<Instant>,
        at: &'static Location<'static>,
    ) -> Option<Outcome> {
        let runtime = &self.made.runtime;
        let ended = || slot.has_ended().then_some(());
        // A thread that drives the transport polls by itself.
        let here = if runtime.parker.can_drive() {
            ended()
        } else {
            runtime.wait_spin.look(ended)
        };
        match here {
            Some(()) => slot.peek(),
            None => self.wait_for(slot, deadline, at),
        }
    }

    /// Blocks until a shard or send of the array ends. Returns its buffer or failure, or `None`
    /// after `deadline`. Reports a hang after the peer timeout, then at growing intervals.
    fn wait_for(
        &self,
        slot: &AsyncBuffer,
        deadline: Option<Instant>,
        at: &'static Location<'static>,
    ) -> Option<Outcome> {
        let runtime = &self.made.runtime;
        let _doing = runtime
            .status
            .enter(Doing::Waiting("a read of an array", at));
        let _waiting = runtime.trace.wait("a read of an array", at);

        loop {
            let peer_timeout = after(now(), runtime.config.peer_timeout);
            let until = deadline.map_or(peer_timeout, |deadline| deadline.min(peer_timeout));
            if let Some(outcome) = runtime.parker.wait(slot, Some(until)) {
                return Some(outcome);
            }
            if deadline.is_some_and(|deadline| now() >= deadline) {
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

    /// Assembles the whole array from the buffers of the local shards. Returns an error if the
    /// shards do not cover the array.
    fn gather(
        &self,
        buffers: &[SharedBuffer],
        at: &'static Location<'static>,
    ) -> Result<HostArray> {
        let full = Region::full(self.made.aval.shape());
        let regions: Vec<Region> = self
            .shards
            .iter()
            .map(|shard| self.region(shard.device))
            .collect();
        if let Some(index) = regions.iter().position(|region| *region == full) {
            return Ok(HostArray::from_bytes(
                self.made.aval.clone(),
                buffers[index].clone(),
            )?);
        }

        // Regions of one layout are equal or disjoint, so the sizes of distinct ones add up.
        let distinct: Vec<usize> = (0..regions.len())
            .filter(|i| !regions[..*i].contains(&regions[*i]))
            .collect();
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
        let memory = |error: mpmd_memory::OutOfMemory| Error::Environment(error.to_string());
        let mut whole = self
            .made
            .runtime
            .staging
            .allocate(self.made.aval.bytes())
            .map_err(memory)?;
        for i in distinct {
            copy_region(
                &buffers[i],
                &regions[i],
                &mut whole,
                &full,
                &regions[i],
                item,
            );
        }
        Ok(HostArray::from_bytes(
            self.made.aval.clone(),
            whole.freeze(),
        )?)
    }
}

/// The outcomes of several async buffers, collected until all have ended.
struct CollectedOutcomes {
    outcomes: Vec<Option<Outcome>>,
    /// Number of async buffers that have not ended.
    missing: usize,
    then: Option<Box<dyn FnOnce(Vec<Outcome>) + Send>>,
}

/// Calls `then` with the outcomes of all async buffers, in order, once all have ended. Does not
/// block: `then` runs on the thread that ends the last async buffer.
///
/// Registers with every async buffer at once, because a later operation may take one's buffer
/// before the others have ended.
fn collect_all(slots: &[AsyncBuffer], then: Box<dyn FnOnce(Vec<Outcome>) + Send>) {
    let collected = Arc::new(Mutex::new(CollectedOutcomes {
        outcomes: slots.iter().map(|_| None).collect(),
        missing: slots.len(),
        then: Some(then),
    }));
    for (i, slot) in slots.iter().enumerate() {
        let collected = collected.clone();
        slot.on_end(move |outcome| {
            let mut collected = collected.lock();
            collected.outcomes[i] = Some(outcome.clone());
            collected.missing -= 1;
            if collected.missing > 0 {
                return;
            }

            let outcomes = std::mem::take(&mut collected.outcomes);
            let then = collected.then.take();
            drop(collected);
            if let Some(then) = then {
                then(outcomes.into_iter().flatten().collect());
            }
        });
    }
}
