//! Commits: copies of the state of a step, in the memory of two processes for each region.

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_layout::topology::{DeviceId, Mesh, Topology};
use mpmd_layout::tree::Tree;

use super::copies::{ArrayToCopy, IssuedCopies};
use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result};
use crate::exec::Rolling;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::recovery_store::{CommitContents, IssuedCommit, RecoveryStore, hash};

/// State that a commit copies: a tree of arrays, or a type with arrays and small values.
pub trait Committed {
    /// Returns the arrays of the state. Their number, shapes and dtypes are the same on every
    /// process and in every epoch. Their order must also be the same, unless they have
    /// [names](Committed::names). Their shardings may change from epoch to epoch.
    fn arrays(&self) -> Vec<MpmdArray>;

    /// Returns the names of the arrays. A commit is restored only into arrays of the same names. If
    /// names are unique, their order may change from epoch to epoch. Without names, arrays are
    /// known by their index.
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns small values, such as a counter, in any encoding. They must be the same on every
    /// process, or the programs diverge. Default: none.
    fn values(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Replaces the state by that of a commit. `arrays` have the order and the shardings of
    /// [`Committed::arrays`].
    ///
    /// # Errors
    ///
    /// If the state cannot be replaced, such as for values in another encoding. The error must be
    /// the same on every process.
    fn restore(&mut self, arrays: Vec<MpmdArray>, values: &[u8]) -> Result<()>;
}

impl<T> Committed for T
where
    T: Tree<Leaf = MpmdArray, With<MpmdArray> = T>,
{
    fn arrays(&self) -> Vec<MpmdArray> {
        self.leaves_with_paths()
            .into_iter()
            .map(|(_, array)| array.clone())
            .collect()
    }

    fn names(&self) -> Vec<String> {
        self.leaves_with_paths()
            .into_iter()
            .map(|(path, _)| path)
            .collect()
    }

    fn restore(&mut self, arrays: Vec<MpmdArray>, _: &[u8]) -> Result<()> {
        let mut arrays = arrays.into_iter();
        *self = self.map_ref(&mut |_| arrays.next().expect("one for each leaf"));
        Ok(())
    }
}

impl Program {
    /// Copies the state after `step` to memory, so that the job can continue from it after the loss
    /// of a process. Every process must call it, with the same step and the same small values.
    ///
    /// Each region of an array is copied to memory of its first device's process, and of another
    /// process: on another host if there is one. The copies are freed once a newer commit is known
    /// to be whole on every process. So each of the two processes holds two to three copies.
    ///
    /// Does not wait for the copies, but at most two commits may be unfinished. A third call blocks
    /// until one of them is known to be whole on every process. A commit holds all of the state.
    /// The same step may be committed again, but not with other contents.
    ///
    /// To commit an object, commit arrays that a method makes of it.
    ///
    /// Does nothing if the program does not [recover](crate::RecoveringBuilder), if the job has one
    /// process and [cannot grow](crate::OnLoss::Shrink), or if `step` is no multiple of
    /// [`RecoveringBuilder::every`](crate::RecoveringBuilder::every).
    ///
    /// # Errors
    ///
    /// [`Error::EpochOver`] after a commit at which the processes of the job change: it is whole,
    /// and the program is called again. Every process gets it at the same step.
    ///
    /// If this step was the last one to be committed, with other arrays or values. If a process has
    /// no device. If an array has partial sums, was donated, or belongs to an earlier epoch. If an
    /// earlier commit has failed for which this call waits, such as by the loss of a process.
    /// Processes may see this last error at different steps.
    #[track_caller]
    pub fn commit(&mut self, step: u64, state: &impl Committed) -> Result<()> {
        let at = self.caller(Location::caller());
        let keeps = self.processes() > 1 || self.may_change;
        let Some(kept) = self.kept.clone().filter(|_| keeps) else {
            return Ok(());
        };

        self.refuse_in_capture(at, "commit")?;
        if self.topology().counts().contains(&0) {
            return Err(Error::Environment(
                "a job that recovers needs a device on each process: see \
                 `Builder::devices_by_process`"
                    .to_owned(),
            ));
        }

        if !kept.lock().reach(step) {
            return Ok(());
        }
        let state = Snapshot::of(state);
        if !kept.lock().is_new_or_same(step, state.identity()) {
            let problem = format!(
                "the state of step {step} is committed already, with other contents: commit all \
                 parts of a state in one call, or give each commit a step of its own"
            );
            return Err(IssueProblem::Signature(problem).at(at, "commit"));
        }

        // A dry run makes no copies, so none is ever confirmed.
        while !self.is_dry_run() {
            let Some(unconfirmed) = kept.lock().first_awaited() else {
                break;
            };
            unconfirmed.shards_here(at)?;
        }

        let change = self.agreed_change(&kept, at)?;
        let before = self.set_caller(Some(at));
        let committed = self.issue_commit(step, state, &kept, at);
        self.set_caller(before);

        match change {
            None => committed,
            Some(change) => committed.and_then(|()| self.end_by(change, &kept, at)),
        }
    }

    pub(super) fn issue_commit(
        &mut self,
        step: u64,
        state: Snapshot,
        kept: &Arc<Mutex<RecoveryStore>>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let Snapshot { arrays, contents } = state;
        let first = self.topology().device_ids()[0];
        let distance = distance(self.topology());
        let mut homes = Vec::new();
        let mut buddies = Vec::new();
        for array in &arrays {
            let sharding = array.sharding().cloned();
            let sharding = sharding.unwrap_or_else(|| Sharding::single_device(first));
            if sharding.layout(array.shape())?.terms() > 1 {
                let problem = format!("commit: {} holds partial sums: add them up", array.aval());
                return Err(Error::kernel(problem));
            }

            let owned = sharding.first_holders(array.shape())?;
            buddies.push(with_buddies(
                &owned,
                array.aval(),
                self.topology(),
                distance,
            )?);
            homes.push(owned.layout(array.shape())?);
        }

        let buddies = self.device_put(&arrays, buddies)?;
        let id = kept.lock().next_id(self.epoch(), step, &contents);
        let sources: Vec<_> = arrays
            .iter()
            .zip(&buddies)
            .zip(homes)
            .map(|((array, buddies), layout)| ArrayToCopy {
                array,
                buddies,
                layout,
            })
            .collect();
        let word = self.word(kept);
        let memory = kept.lock().memory.clone();
        let IssuedCopies { made, whole: all } =
            self.issue_copies(id, word, &sources, memory, at)?;

        let devices = first_devices(self.topology());
        let everywhere = self
            .mesh_of(&[("process", devices.len())], &devices)?
            .replicated();
        let whole = self.device_put(&all, everywhere.with_memory_kind(MemoryKind::Host))?;

        if !self.is_dry_run() {
            if id.number == 1 {
                self.tell_when_whole(&whole);
            }
            let mut kept = kept.lock();
            kept.words.push_back(whole.clone());
            kept.issued.push_back(IssuedCommit {
                id,
                contents,
                made,
                whole,
            });
        }
        Ok(())
    }
}

impl Program {
    /// Reports to the rendezvous service when the first commit of the epoch is whole on every
    /// process. Leaving processes are not needed from then on. Does not block.
    fn tell_when_whole(&self, whole: &MpmdArray) {
        if let (Some(tell), Some(shard)) = (self.whole_teller(), whole.shards().first()) {
            shard.slot.on_end(move |outcome| {
                if outcome.is_ok() {
                    tell();
                }
            });
        }
    }
}

/// The arrays of a committed state, and its names and small values.
pub(super) struct Snapshot {
    arrays: Vec<MpmdArray>,
    contents: Arc<CommitContents>,
}

impl Snapshot {
    pub(super) fn of(state: &impl Committed) -> Self {
        let arrays = state.arrays();
        let contents = Arc::new(CommitContents::of(&arrays, state.names(), state.values()));
        Self { arrays, contents }
    }

    /// Returns a hash of the names, small values and arrays, the same on every process. Arrays on
    /// devices are compared by identity, not by value.
    fn identity(&self) -> u128 {
        let contents = self.contents.hash();
        let [low, high] = [contents as u64, (contents >> 64) as u64];
        let mix = |rolling: Rolling, array: &MpmdArray| match &array.repr {
            Repr::Host(host) => rolling.mix_bytes(&hash(host.bytes()).to_le_bytes()),
            Repr::Placed(placed) => rolling
                .mix(placed.origin.op)
                .mix(u64::from(placed.origin.leaf)),
        };

        self.arrays
            .iter()
            .fold(Rolling::default().mix(low).mix(high), mix)
            .value()
    }
}

/// Returns the first device of each process, indexed by process.
pub(super) fn first_devices(topology: &Topology) -> Vec<DeviceId> {
    let processes = (0..topology.processes() as u32).map(ProcessId);
    processes
        .filter_map(|process| topology.devices_of(process).first().copied())
        .collect()
}

/// Returns the sharding in which each device's buddy holds the device's region in host memory.
/// Without `distance`, one device of each process holds the whole array.
fn with_buddies(
    owned: &Sharding,
    aval: &ShapedArray,
    topology: &Topology,
    distance: Option<usize>,
) -> Result<Sharding> {
    let Some(distance) = distance else {
        let devices = first_devices(topology);
        let processes = Mesh::new(&[("process", devices.len())], devices)?;
        return Ok(processes.replicated().with_memory_kind(MemoryKind::Host));
    };
    let devices = topology.device_ids();
    let buddy = |device: &DeviceId| {
        let place = devices.binary_search(device).ok()?;
        Some(devices[(place + distance) % devices.len()])
    };

    let layout = owned.layout(aval.shape())?;
    let shards = layout
        .iter()
        .filter_map(|(device, region)| Some((buddy(&device)?, region.clone())));
    Ok(Sharding::enumerated(shards.collect())?.with_memory_kind(MemoryKind::Host))
}

/// Returns the number that is added to a device's index, modulo the number of devices, to get its
/// buddy. It is the smallest with which all buddies are on other processes, and as many as possible
/// on other hosts.
///
/// `None` if no number works, since a process has more than half of the devices; 0 for a job of one
/// process.
fn distance(topology: &Topology) -> Option<usize> {
    if topology.processes() == 1 {
        return Some(0);
    }

    let owners: Vec<ProcessId> = topology
        .devices()
        .iter()
        .map(|device| device.process)
        .collect();
    let all = owners.len();
    let hosts: Vec<u32> = owners
        .iter()
        .map(|owner| topology.host_of(*owner))
        .collect();
    let of_host = |host: &u32| hosts.iter().filter(|other| *other == host).count();
    // All devices of a host have buddies on others, if these have enough.
    let most: usize = (hosts
        .iter()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .map(of_host))
    .map(|devices| devices.min(all - devices))
    .sum();

    let mut best = None;
    for distance in 1..all {
        let pairs = (0..all).map(|place| (place, (place + distance) % all));
        if pairs
            .clone()
            .any(|(place, buddy)| owners[place] == owners[buddy])
        {
            continue;
        }
        let apart = pairs
            .filter(|(place, buddy)| hosts[*place] != hosts[*buddy])
            .count();
        if best.is_none_or(|(before, _)| apart > before) {
            best = Some((apart, distance));
        }
        if apart == most {
            break;
        }
    }
    best.map(|(_, distance)| distance)
}

/// True if each region keeps a copy on a remaining process when `process` leaves in addition to
/// those in `leave`.
pub(super) fn can_leave(topology: &Topology, leave: &[ProcessId], process: ProcessId) -> bool {
    let stays = |owner: ProcessId| owner != process && !leave.contains(&owner);
    let owners: Vec<ProcessId> = topology
        .devices()
        .iter()
        .map(|device| device.process)
        .collect();
    match distance(topology) {
        None => owners.iter().any(|owner| stays(*owner)),
        Some(distance) => (0..owners.len())
            .all(|place| stays(owners[place]) || stays(owners[(place + distance) % owners.len()])),
    }
}

#[cfg(test)]
mod tests {
    use mpmd_layout::aval::DType;
    use mpmd_layout::region::Region;

    use super::*;
    use crate::Builder;

    fn topology(processes: usize, devices: usize, hosts: &[usize]) -> Topology {
        Builder::default()
            .devices(devices)
            .hosts(hosts)
            .topology(processes, None)
            .unwrap()
    }

    #[test]
    fn buddies_are_on_other_hosts_where_possible() {
        let of = |hosts: &[usize]| distance(&topology(hosts.len(), hosts.len(), hosts));
        assert_eq!(of(&[0]), Some(0));
        assert_eq!(of(&[0, 0, 0]), Some(1));
        assert_eq!(of(&[0, 1, 2]), Some(1));
        assert_eq!(of(&[0, 0, 1, 1]), Some(2));
        assert_eq!(of(&[0, 0, 0, 1, 1, 1]), Some(3));
        // Two of three.
        assert_eq!(of(&[0, 0, 1]), Some(1));
        assert_eq!(distance(&topology(2, 6, &[0, 1])), Some(3));
    }

    #[test]
    fn buddies_are_on_other_processes_if_no_process_has_more_than_half() {
        let of = |counts: &[usize]| {
            let builder = Builder::default().devices_by_process(counts);
            distance(&builder.topology(counts.len(), None).unwrap())
        };
        assert_eq!(of(&[1, 1, 2]), Some(2));
        assert_eq!(of(&[2, 1, 2, 1]), Some(2));
        assert_eq!(of(&[3, 1, 2]), Some(3));
        assert_eq!(of(&[2, 1]), None);
        assert_eq!(of(&[1, 4, 1]), None);
    }

    #[test]
    fn devices_of_a_buddy_have_the_regions_in_order() {
        let topology = topology(2, 4, &[0, 1]);
        let aval = ShapedArray::new(&[4], DType::F32);
        let region = |i: usize| Region::new(std::iter::once(i..i + 1).collect());
        let owned = [
            (3, region(0)),
            (0, region(1)),
            (2, region(2)),
            (1, region(3)),
        ];
        let owned = owned
            .into_iter()
            .map(|(device, region)| (DeviceId(device), region));
        let owned = Sharding::enumerated(owned.collect()).unwrap();
        let buddies = with_buddies(&owned, &aval, &topology, distance(&topology)).unwrap();
        let layout = buddies.layout(&[4]).unwrap();
        let mut found: Vec<_> = layout
            .iter()
            .map(|(device, r)| (device.0, r.clone()))
            .collect();
        found.sort_by_key(|(device, _)| *device);
        let expected = [
            (0, region(2)),
            (1, region(0)),
            (2, region(1)),
            (3, region(3)),
        ];
        assert_eq!(found, expected);
        assert_eq!(buddies.memory_kind(), MemoryKind::Host);
    }
}
