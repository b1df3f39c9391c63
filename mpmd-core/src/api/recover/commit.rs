//! Commits: copies of the state of a step, in the memory of two processes for each region.

use std::panic::Location;
use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_ids::block::Mutex;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_layout::spec;
use mpmd_layout::topology::{DeviceId, Topology};
use mpmd_layout::tree::Tree;

use crate::api::program::Program;
use crate::api::put::MoveOptions;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::kept::{CommitId, Issued, Kept};

/// State that a commit keeps: a tree of arrays, or a type that has arrays and small values.
pub trait Committed {
    /// Returns the arrays. Their number, order, shapes and dtypes are the same on every process and
    /// in every epoch. Their shardings may change from epoch to epoch.
    fn arrays(&self) -> Vec<MpmdArray>;

    /// Returns the names of the arrays, for messages. Without them their numbers are used.
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns small values, such as a counter, in any encoding. They are the same on every
    /// process. None by default.
    fn values(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Replaces the state by that of a commit: `arrays` have the shardings of
    /// [`Committed::arrays`] and are in the same order.
    ///
    /// # Errors
    ///
    /// If the state cannot be replaced, such as for values in another encoding. The same on every
    /// process.
    fn restore(&mut self, arrays: Vec<MpmdArray>, values: &[u8]) -> Result<()>;
}

impl<T> Committed for T
where
    T: Tree<Leaf = MpmdArray, With<MpmdArray> = T>,
{
    fn arrays(&self) -> Vec<MpmdArray> {
        self.leaves_with_paths().into_iter().map(|(_, array)| array.clone()).collect()
    }

    fn names(&self) -> Vec<String> {
        self.leaves_with_paths().into_iter().map(|(path, _)| path).collect()
    }

    fn restore(&mut self, arrays: Vec<MpmdArray>, _: &[u8]) -> Result<()> {
        let mut arrays = arrays.into_iter();
        *self = self.map_ref(&mut |_| arrays.next().expect("one for each leaf"));
        Ok(())
    }
}

impl Program {
    /// Keeps the state after `step` in memory, so that the job can go on from there after the loss
    /// of a process. Every process must call it. Returns without waiting.
    ///
    /// Each region of an array moves to the host memory of its first device's process, and to that
    /// of another process: on another host if there is one. The copies are no loans. Those of an
    /// older commit are freed once a newer one is known to be whole on every process, so there are
    /// two to three copies of the state in the memory of each of the two processes.
    ///
    /// An object is committed by the arrays of [`Program::save_object`].
    ///
    /// Does nothing if the program does not [recover](crate::RecoveringBuilder), if the job has one
    /// process, or if `step` is no multiple of
    /// [`RecoveringBuilder::every`](crate::RecoveringBuilder::every).
    ///
    /// # Errors
    ///
    /// If an array has partial sums, was donated, or belongs to an earlier epoch.
    #[track_caller]
    pub fn commit(&mut self, step: u64, state: &impl Committed) -> Result<()> {
        let at = self.caller(Location::caller());
        let Some(kept) = self.kept.clone().filter(|_| self.processes() > 1) else {
            return Ok(());
        };
        self.refuse_recording(at, "commit")?;
        if !kept.lock().reach(step) {
            return Ok(());
        }
        let before = self.set_caller(Some(at));
        let committed = self.issue_commit(step, state, &kept);
        self.set_caller(before);
        committed
    }

    pub(super) fn issue_commit(
        &mut self,
        step: u64,
        state: &impl Committed,
        kept: &Arc<Mutex<Kept>>,
    ) -> Result<()> {
        let arrays = state.arrays();
        let first = self.topology().device_ids()[0];
        let (mut own, mut buddies) = (Vec::new(), Vec::new());
        for array in &arrays {
            let sharding = array.sharding().cloned();
            let sharding = sharding.unwrap_or_else(|| Sharding::single_device(first));
            if sharding.layout(array.shape())?.terms() > 1 {
                let problem = format!("commit: {} holds partial sums: add them up", array.aval());
                return Err(Error::kernel(problem));
            }
            let owned = sharding.first_holders(array.shape())?.with_memory_kind(MemoryKind::Host);
            buddies.push(with_buddies(&owned, array.aval(), self.topology())?);
            own.push(owned);
        }
        // Later steps change the arrays in place, and a copy must outlive its source's process.
        let options = MoveOptions::default().may_alias(false);
        let own = self.device_put_with(&arrays, own, options)?;
        let buddies = self.device_put_with(&arrays, buddies, options)?;
        let arrays = own.into_iter().zip(buddies).map(|(own, buddy)| [own, buddy]).collect();
        let whole = self.tell_whole(kept)?;
        let mut kept = kept.lock();
        kept.forget_old();
        let (id, values) = (CommitId { step, epoch: self.epoch() }, state.values());
        kept.issued.push_back(Issued { id, values, arrays, whole });
        Ok(())
    }

    /// Tells every process the newest commit that is whole on each.
    fn tell_whole(&mut self, kept: &Arc<Mutex<Kept>>) -> Result<MpmdArray> {
        let devices = first_devices(self.topology());
        let everywhere = self.mesh_of(&[("process", devices.len())], &devices)?;
        let aval = ShapedArray::new(&[devices.len(), 2], DType::I64);
        let kept = Arc::downgrade(kept);
        let own = self.array_from_fn(aval, &everywhere.sharding(spec!["process"]), {
            move |_, mut values| {
                let whole = kept.upgrade().map(|kept| kept.lock().newest_whole());
                let CommitId { step, epoch } = whole.unwrap_or_default();
                let words = [step, epoch].map(u64::cast_signed);
                values.as_mut_slice::<i64>()?.copy_from_slice(&words);
                Ok(())
            }
        })?;
        self.device_put(&own, everywhere.replicated())
    }
}

/// Returns one device of each process, by process.
fn first_devices(topology: &Topology) -> Vec<DeviceId> {
    let processes = (0..topology.processes() as u32).map(ProcessId);
    processes.filter_map(|process| topology.devices_of(process).first().copied()).collect()
}

/// Returns the sharding in which the buddy of each device holds its region. The buddies of the
/// devices of a process are those of another process, in order.
fn with_buddies(owned: &Sharding, aval: &ShapedArray, topology: &Topology) -> Result<Sharding> {
    let distance = distance(topology);
    let buddy = |device: DeviceId| {
        let process = topology.device(device)?.process;
        let place = topology.devices_of(process).iter().position(|own| *own == device)?;
        let buddy = (process.index() + distance) % topology.processes();
        topology.devices_of(ProcessId(buddy as u32)).get(place).copied()
    };
    let layout = owned.layout(aval.shape())?;
    let shards =
        layout.iter().filter_map(|(device, region)| Some((buddy(device)?, region.clone())));
    Ok(Sharding::enumerated(shards.collect())?.with_memory_kind(MemoryKind::Host))
}

/// Returns the distance between the numbers of a process and its buddy, modulo the number of
/// processes: the smallest with which most buddies are on another host.
fn distance(topology: &Topology) -> usize {
    let processes = topology.processes();
    let host = |process: usize| topology.host_of(ProcessId((process % processes) as u32));
    let apart = |distance: &usize| {
        (0..processes).filter(|process| host(*process) != host(process + distance)).count()
    };
    (1..processes).rev().max_by_key(apart).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use mpmd_layout::region::Region;

    use super::*;
    use crate::Builder;

    fn topology(processes: usize, devices: usize, hosts: &[usize]) -> Topology {
        Builder::default().devices(devices).hosts(hosts).topology(processes, None).unwrap()
    }

    #[test]
    fn buddies_are_on_other_hosts_where_possible() {
        let of = |hosts: &[usize]| distance(&topology(hosts.len(), hosts.len(), hosts));
        assert_eq!(of(&[0]), 0);
        assert_eq!(of(&[0, 0, 0]), 1);
        assert_eq!(of(&[0, 1, 2]), 1);
        assert_eq!(of(&[0, 0, 1, 1]), 2);
        assert_eq!(of(&[0, 0, 0, 1, 1, 1]), 3);
        // Two of three.
        assert_eq!(of(&[0, 0, 1]), 1);
    }

    #[test]
    fn devices_of_a_buddy_have_the_regions_in_order() {
        let topology = topology(2, 4, &[0, 1]);
        let aval = ShapedArray::new(&[4], DType::F32);
        let region = |i: usize| Region::new(std::iter::once(i..i + 1).collect());
        let owned = [(3, region(0)), (0, region(1)), (2, region(2)), (1, region(3))];
        let owned = owned.into_iter().map(|(device, region)| (DeviceId(device), region));
        let owned = Sharding::enumerated(owned.collect()).unwrap();
        let buddies = with_buddies(&owned, &aval, &topology).unwrap();
        let layout = buddies.layout(&[4]).unwrap();
        let mut found: Vec<_> = layout.iter().map(|(device, r)| (device.0, r.clone())).collect();
        found.sort_by_key(|(device, _)| *device);
        let expected = [(0, region(2)), (1, region(0)), (2, region(1)), (3, region(3))];
        assert_eq!(found, expected);
        assert_eq!(buddies.memory_kind(), MemoryKind::Host);
    }
}
