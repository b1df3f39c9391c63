//! Restoring a commit: brings each region home, and moves it to the sharding of the new epoch.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_transport::SharedBuffer;

use super::inventory::{Inventory, Source, choose, tell};
use super::{Commits, Committed};
use crate::api::program::Program;
use crate::api::put::MoveOptions;
use crate::error::{Error, IssueProblem, Result};
use crate::exec::array::MpmdArray;
use crate::exec::kept::{CommitId, Contents, Copies, hash};

/// The number of epochs that may begin at one commit. A job that loses processes again and again
/// without a newer commit ends.
const MOST_RESTARTS: u32 = 5;

impl Commits {
    /// Replaces `state` by the state of the newest whole commit, and returns the commit's step.
    /// Returns 0 and changes nothing if there is no commit. Every process must call it, in every
    /// epoch, before its first commit. Blocks until the state is there.
    ///
    /// Each region comes from its owner at the time of the commit, or from the owner's buddy if the
    /// owner is lost. It moves to the present sharding of its array in `state`. A copy is not used
    /// if its hash differs from the one that was taken at the commit.
    ///
    /// # Errors
    ///
    /// [`Error::CommitsLost`] names the arrays of regions that are lost with both of their
    /// processes: a checkpoint file can help. If the arrays differ from those of the commit in
    /// number, name, shape or dtype. If several epochs began at this commit and none came to a
    /// newer one. Every process gets the same error.
    #[track_caller]
    pub fn restore(&self, p: &mut Program, state: &mut impl Committed) -> Result<u64> {
        let at = p.caller(Location::caller());
        let before = p.set_caller(Some(at));
        let restored = self.restore_at(p, state, at);
        p.set_caller(before);
        restored
    }

    fn restore_at(
        &self,
        p: &mut Program,
        state: &mut impl Committed,
        at: &'static Location<'static>,
    ) -> Result<u64> {
        if p.is_dry_run() || p.epoch() == 1 {
            return Ok(0);
        }
        let inventories = self.tell_inventories(p, at)?;
        let arrays = state.arrays();
        let asked = Contents::of(&arrays, state.names(), Vec::new());
        let chosen = choose(&inventories, &asked, p.topology());
        let chosen = chosen.inspect_err(|_| {
            self.kept.lock().forget_all();
            self.report(p, &inventories, 0, at);
        })?;
        let Some((id, sources)) = chosen else {
            self.report(p, &inventories, 0, at);
            return Ok(0);
        };
        self.count_restart(&inventories, id)?;
        let copies = self.kept.lock().earlier.get(&id).cloned().unwrap_or_default();
        let contents = contents(p, id, &inventories, &copies)?;
        if let Some(difference) = contents.difference(&asked) {
            let step = id.step;
            let problem =
                format!("the newest commit is of step {step} and does not fit: {difference}");
            return Err(IssueProblem::Signature(problem).at(at, "restore"));
        }
        let mut here = vec![HashMap::new(); arrays.len()];
        for copy in copies.regions {
            here[copy.array].insert(copy.region, copy.bytes);
        }
        let mut restored = Vec::with_capacity(arrays.len());
        for ((array, sources), here) in arrays.iter().zip(sources).zip(here) {
            restored.push(bring_home(p, array, sources, here)?);
        }
        for array in &restored {
            array.block_until_ready()?;
        }
        state.restore(restored, &contents.values)?;
        self.kept.lock().earlier.retain(|kept, _| *kept <= id);
        self.report(p, &inventories, id.step, at);
        // Until the next commit, a further loss would find regions with one copy.
        p.issue_commit(id.step, state, &self.kept, at)?;
        Ok(id.step)
    }

    /// Counts an epoch that begins with a commit, and fails if too many began with its state.
    fn count_restart(&self, inventories: &[Inventory], id: CommitId) -> Result<()> {
        let before = inventories.iter().map(|one| one.stuck).max().unwrap_or_default();
        let count = restarts(before, id);
        self.kept.lock().stuck = (id, count);
        if count > MOST_RESTARTS {
            return Err(Error::Environment(format!(
                "{count} epochs of the job began at the commit of step {}, and each lost a process \
                 before there was a newer one",
                id.step
            )));
        }
        Ok(())
    }
}

/// Returns the number of epochs that began with the state of the commit `id`, the last of them now.
/// `before` is the commit with which the epoch before began, and their number then.
fn restarts((last, before): (CommitId, u32), id: CommitId) -> u32 {
    // The first commit of an epoch that restored one has the same state.
    let is_same = before > 0 && (id == last || id.epoch > last.epoch && id.number == 1);
    if is_same { before + 1 } else { 1 }
}

/// Returns the contents of a commit, from the first process that has them.
fn contents(
    p: &mut Program,
    id: CommitId,
    inventories: &[Inventory],
    copies: &Copies,
) -> Result<Contents> {
    let has = |inventory: &Inventory| inventory.commits.iter().any(|(kept, _)| *kept == id);
    let from = inventories.iter().position(has).unwrap_or(0);
    let contents: Contents = tell(p, ProcessId(from as u32), || Contents::clone(&copies.contents))?;
    match contents.hash() == id.hash {
        true => Ok(contents),
        false => Err(Error::kernel(format!("the commit of step {} was damaged", id.step))),
    }
}

/// Issues the moves of an array's regions to their homes, makes the array there, and moves it to
/// the sharding of `like`. `here` has the copies of this process. Blocks until the regions are
/// home.
fn bring_home(
    p: &mut Program,
    like: &MpmdArray,
    sources: Vec<Source>,
    mut here: HashMap<Region, SharedBuffer>,
) -> Result<MpmdArray> {
    let once = MoveOptions::default().cache_plans(false).may_alias(false);
    let mut coming = Vec::new();
    for Source { home, region, holder, .. } in &sources {
        let owner = p.topology().device(*home).map(|device| device.process);
        if owner == Some(*holder) {
            continue;
        }
        let from = p.topology().devices_of(*holder)[0];
        let aval = ShapedArray::new(&region.shape(), like.dtype());
        let bytes = here.get(region).cloned();
        let on = |device| Sharding::single_device(device).with_memory_kind(MemoryKind::Host);
        let copied = p.array_from_fn(aval, on(from), move |_, mut values| {
            let bytes = bytes.as_ref().ok_or_else(|| Error::kernel("the copy is gone"))?;
            values.as_bytes_mut().copy_from_slice(bytes);
            Ok(())
        })?;
        coming.push((region.clone(), p.device_put_with(&copied, on(*home), once)?));
    }
    for (region, array) in coming {
        if let Some(data) = array.to_host()? {
            here.insert(region, data.bytes().clone());
        }
    }
    let homes = sources.iter().map(|source| (source.home, source.region.clone())).collect();
    let homes = Sharding::enumerated(homes)?;
    let hashes: HashMap<Region, u128> =
        sources.into_iter().map(|source| (source.region, source.hash)).collect();
    let here = Arc::new(here);
    let array = p.array_from_fn(like.aval().clone(), &homes, move |region, mut values| {
        let bytes = here.get(region).ok_or_else(|| Error::kernel("the copy is gone"))?;
        if hashes.get(region) != Some(&hash(bytes)) {
            return Err(Error::kernel(format!("the copy of region {region} was damaged")));
        }
        values.as_bytes_mut().copy_from_slice(bytes);
        Ok(())
    })?;
    let to = like.sharding().cloned();
    let to = to.unwrap_or_else(|| Sharding::single_device(p.topology().device_ids()[0]));
    p.device_put_with(&array, to, MoveOptions::default().donate(true).cache_plans(false))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::thread;
    use mpmd_layout::aval::f32s;
    use mpmd_layout::spec;
    use mpmd_layout::topology::DeviceId;

    use super::*;
    use crate::api::program::Simulation;

    /// A process is lost, and another one's copy of its own region has changed in memory.
    #[test]
    fn changed_copy_is_replaced_by_that_of_the_buddy() {
        let program = |p: &mut Program, commits: &Commits| {
            let mesh = p.mesh(&[("x", 3)])?;
            let here = mesh.sharding(spec!["x"]);
            let mut x = p.array_from_fn(f32s([3]), &here, |region, mut values| {
                Ok(values.fill(region.range(0).start as f32)?)
            })?;
            if p.epoch() == 1 {
                for step in 1.. {
                    p.commit(step, &x)?;
                    p.step_end()?;
                    thread::sleep(Duration::from_millis(1));
                }
            }
            if p.process() == ProcessId(0) {
                let mut kept = commits.kept.lock();
                let copies = kept.earlier.values_mut().flat_map(|copies| &mut copies.regions);
                for copy in copies.filter(|copy| copy.home == DeviceId(0)) {
                    copy.bytes = vec![7; copy.bytes.len()].into();
                }
            }
            let step = commits.restore(p, &mut x)?;
            let all = p.device_put(&x, mesh.replicated())?.to_host()?;
            Ok((step, all.expect("every process has it").to_vec::<f32>()?))
        };
        let job = Simulation::new(3, 3).seed(2).spare_after(Duration::ZERO);
        let job = job.lose_after(ProcessId(2), Duration::from_millis(30));
        let (results, _) = job.run_recovering(1, program);
        for process in [0, 1, 3] {
            let (step, values) = results[process].as_ref().unwrap().clone().unwrap();
            assert!(step > 5, "{step}");
            assert_eq!(values, [0.0, 1.0, 2.0]);
        }
    }

    #[test]
    fn restarts_without_a_newer_commit_are_counted() {
        // All commits are of one step, as in a program that commits many times in it.
        let id = |epoch, number| CommitId { epoch, number, step: 7, ..CommitId::default() };
        let mut stuck = Default::default();
        let mut restart = |epoch, number| {
            stuck = (id(epoch, number), restarts(stuck, id(epoch, number)));
            stuck.1
        };
        assert_eq!(restart(1, 30), 1);
        assert_eq!(restart(1, 30), 2, "the copy that epoch 2 made was not whole");
        assert_eq!(restart(3, 1), 3);
        assert_eq!(restart(4, 1), 4);
        assert_eq!(restart(5, 2), 1, "epoch 5 has made a commit of its own");
        assert_eq!(restart(6, 9), 1);
        assert_eq!(restart(7, 1), 2);
    }
}
