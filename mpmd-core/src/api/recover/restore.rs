//! Restoring a commit: chooses it, and replaces the state by it.

use std::panic::Location;

use mpmd_base::ProcessId;

use super::commit::Snapshot;
use super::inventory::{ChosenCommit, Inventory, choose, tell};
use super::restore_arrays::restore_arrays;
use super::{Commits, Committed};
use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result};
use crate::exec::recovery_store::{CommitContents, CommitCopies, CommitId};

/// Maximum number of epochs that may begin with the same commit. A job that keeps losing processes
/// without a newer commit then ends.
const MOST_RESTARTS: u32 = 5;

impl Commits {
    /// Replaces `state` by the state of the newest whole commit, and returns the commit's step. If
    /// there is no commit, returns 0 and changes nothing. Every process must call it once in every
    /// epoch, before its first commit. Blocks until the state is restored.
    ///
    /// Each region comes from its owner at the time of the commit, or from the owner's buddy if the
    /// owner is lost. It moves to the present sharding of its array in `state`, which may be over
    /// another number of processes. A copy is not used if its hash differs from the hash at the
    /// commit.
    ///
    /// # Errors
    ///
    /// [`Error::CommitsLost`] names the arrays of regions that are lost with both of their
    /// processes: a checkpoint file can help. If the arrays differ from those of the commit in
    /// number, name, shape or dtype; their order may be another one if their names are unique. If
    /// the state of this epoch was restored or committed already. If several epochs began at this
    /// commit and none came to a newer one. Every process gets the same error.
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
        if !self.kept.lock().may_restore() {
            let problem = "the state of this epoch is restored or committed already, and one \
                           commit has all of it: restore all parts of the state in one call, \
                           before the first commit";
            return Err(IssueProblem::Signature(problem.to_owned()).at(at, "restore"));
        }

        let restored = match p.is_dry_run() || p.epoch() == 1 {
            true => Ok(0),
            false => self.restore_newest(p, state, at),
        };
        self.kept.lock().is_restored = restored.is_ok();
        restored
    }

    fn restore_newest(
        &self,
        p: &mut Program,
        state: &mut impl Committed,
        at: &'static Location<'static>,
    ) -> Result<u64> {
        let inventories = self.tell_inventories(p, at)?;

        let arrays = state.arrays();
        let asked = CommitContents::of(&arrays, state.names(), Vec::new());
        let name = |id: CommitId, array: usize| {
            let kept = self.kept.lock();
            // A new process knows the order of its own arrays alone.
            let contents = kept
                .earlier
                .get(&id)
                .map_or(&asked, |copies| &*copies.contents);
            contents.arrays.get(array).map(|array| array.name.clone())
        };

        let chosen = choose(&inventories, &name);
        let chosen = chosen.inspect_err(|_| {
            self.kept.lock().forget_all();
            self.report(p, &inventories, 0, at);
        })?;
        let Some(ChosenCommit { id, sources }) = chosen else {
            self.report(p, &inventories, 0, at);
            // No process is left of an epoch with a commit.
            let lost = vec!["all steps: all arrays".to_owned()];
            return if p.had_whole_commit() {
                Err(Error::CommitsLost { lost })
            } else {
                Ok(0)
            };
        };

        self.count_restart(&inventories, id)?;
        let copies = self
            .kept
            .lock()
            .earlier
            .get(&id)
            .cloned()
            .unwrap_or_default();
        let contents = contents(p, id, &inventories, &copies)?;
        let places = contents.places(&asked).map_err(|difference| {
            let step = id.step;
            let problem =
                format!("the newest commit is of step {step} and does not fit: {difference}");
            IssueProblem::Signature(problem).at(at, "restore")
        })?;

        // In the order of the commit, which may be another one.
        let mut like = arrays.clone();
        places
            .iter()
            .zip(&arrays)
            .for_each(|(place, array)| like[*place] = array.clone());
        let restored = restore_arrays(p, &like, sources, copies.regions, at)?;
        let restored: Vec<_> = places
            .iter()
            .map(|place| restored[*place].clone())
            .collect();

        for array in &restored {
            array.block_until_ready()?;
        }
        state.restore(restored, &contents.values)?;
        self.kept.lock().earlier.retain(|kept, _| *kept <= id);
        self.report(p, &inventories, id.step, at);
        // Until the next commit, a further loss would find regions with one copy.
        p.issue_commit(id.step, Snapshot::of(state), &self.kept, at)?;
        Ok(id.step)
    }

    /// Counts the epochs that begin with commit `id`, and fails if there are too many.
    fn count_restart(&self, inventories: &[Inventory], id: CommitId) -> Result<()> {
        let before = inventories
            .iter()
            .map(|one| one.stuck)
            .max()
            .unwrap_or_default();

        let (last, count_before) = before;
        let count = restarts(last, count_before, id);
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

/// Returns the number of consecutive epochs that began with the state of commit `id`, including
/// this one. The epoch before began with the commit `last` and was the `before`-th such epoch.
fn restarts(last: CommitId, before: u32, id: CommitId) -> u32 {
    // The first commit of an epoch that restored one has the same state.
    let is_same = before > 0 && (id == last || id.epoch > last.epoch && id.number == 1);
    if is_same { before + 1 } else { 1 }
}

/// Returns the names and small values of a commit, from the first process that has them.
fn contents(
    p: &mut Program,
    id: CommitId,
    inventories: &[Inventory],
    copies: &CommitCopies,
) -> Result<CommitContents> {
    let has = |inventory: &Inventory| inventory.commits.iter().any(|(kept, _)| *kept == id);
    let from = inventories.iter().position(has).unwrap_or(0);
    let contents: CommitContents = tell(p, ProcessId(from as u32), || {
        CommitContents::clone(&copies.contents)
    })?;

    match contents.hash() == id.hash {
        true => Ok(contents),
        false => Err(Error::kernel(format!(
            "the commit of step {} was damaged",
            id.step
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::thread;
    use mpmd_layout::aval::f32s;
    use mpmd_layout::spec;

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
                let copies = kept
                    .earlier
                    .values_mut()
                    .flat_map(|copies| &mut copies.regions);
                for copy in copies.filter(|copy| copy.is_own) {
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
        let id = |epoch, number| CommitId {
            epoch,
            number,
            step: 7,
            ..CommitId::default()
        };
        let mut stuck: (CommitId, u32) = Default::default();
        let mut restart = |epoch, number| {
            stuck = (
                id(epoch, number),
                restarts(stuck.0, stuck.1, id(epoch, number)),
            );
            stuck.1
        };
        assert_eq!(restart(1, 30), 1);
        assert_eq!(
            restart(1, 30),
            2,
            "the copy that epoch 2 made was not whole"
        );
        assert_eq!(restart(3, 1), 3);
        assert_eq!(restart(4, 1), 4);
        assert_eq!(restart(5, 2), 1, "epoch 5 has made a commit of its own");
        assert_eq!(restart(6, 9), 1);
        assert_eq!(restart(7, 1), 2);
    }
}
