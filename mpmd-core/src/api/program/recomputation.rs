//! The check of kernel calls by recomputation: the choice of calls and of the processes that
//! recompute them, and the verdicts from the comparisons. `api/jit/recompute/` issues the
//! operations.

use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::sync::Arc;

use super::Program;
use super::membership::MemberPlace;
use crate::exec::Rolling;
use crate::exec::array::MpmdArray;
use crate::warning::warn_user;
use mpmd_base::ProcessId;
use mpmd_layout::topology::{DeviceId, Topology};

/// Maximum number of unread comparisons. More operations than that cannot run ahead, so reading the
/// oldest comparison does not wait.
const MOST_PENDING: usize = 4096;

/// The state of the check by recomputation in a program.
#[derive(Default)]
pub(crate) struct Recomputed {
    /// Number of calls so far that could be recomputed.
    calls: u64,
    /// Number of recomputed calls, by the process that made the call.
    checks: BTreeMap<ProcessId, u64>,
    /// True while the operations of a check are issued: these are not recomputed themselves.
    is_paused: bool,
    /// The comparisons whose results were not read yet, in order of issue.
    pending: VecDeque<Comparison>,
    ledger: ComparisonLedger,
}

/// The comparison of a call with its recomputation.
#[derive(Clone)]
pub(crate) struct Comparison {
    pub(crate) call: RecomputedCall,
    /// Hashes of the outputs: of the process that made the call, and of the process that recomputed
    /// it. Every process gets both.
    pub(crate) hashes: [MpmdArray; 2],
}

/// A call that two processes have computed.
#[derive(Clone)]
pub(crate) struct RecomputedCall {
    /// The process that made the call, and the process that recomputed it.
    pub(crate) processes: [ProcessId; 2],
    /// True if no third process has devices of this kind.
    pub(crate) is_only_pair: bool,
    pub(crate) kernel: Arc<str>,
    pub(crate) at: &'static Location<'static>,
    /// The number of steps that had ended when the call was issued.
    pub(crate) step: u64,
}

/// A process that the comparisons have shown to compute wrong bits.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Convicted {
    pub(crate) process: ProcessId,
    pub(crate) why: String,
    /// The step of the process's first difference.
    pub(crate) first: u64,
}

/// The device and processes for the recomputation of a call.
pub(crate) struct Recomputation {
    /// The device that computes the call again.
    pub(crate) device: DeviceId,
    /// The process that made the call, and the process that recomputes it.
    pub(crate) processes: [ProcessId; 2],
    /// True if no third process has devices of this kind.
    pub(crate) is_only_pair: bool,
}

/// The results of all comparisons so far, the same on every process.
#[derive(Default)]
struct ComparisonLedger {
    records: BTreeMap<ProcessId, ComparisonRecord>,
    /// The convicted processes that [`Program::convicted`] has yet to return.
    convicted: VecDeque<Convicted>,
}

/// The comparisons in which a process took part.
#[derive(Default)]
struct ComparisonRecord {
    compared: u64,
    differed: u64,
    /// Number of differences from each other process. Differences from convicted processes are left
    /// out, because the conviction explains them.
    others: BTreeMap<ProcessId, u64>,
    /// The step of the process's first difference; `None` if there was no difference.
    first: Option<u64>,
    is_convicted: bool,
}

/// The result of a comparison.
#[derive(Debug, Eq, PartialEq)]
enum ComparisonFinding {
    Nothing,
    /// The two processes differ for the first time.
    First,
    /// The two processes have differed twice, and no third process can recompute these calls.
    EitherOf,
    Convicted(Convicted),
}

impl Program {
    /// Counts a call that can be recomputed, and returns true if it should be. This is one in each
    /// [`check_replay`](super::Builder::check_replay) calls, at a varying position, so that no
    /// periodic call escapes the check. The same on every process.
    pub(crate) fn is_turn_to_recompute(&mut self) -> bool {
        let every = self.runtime.config.check_replay;
        if every == 0 || self.recomputed.is_paused || self.is_dry_run {
            return false;
        }

        let round = self.recomputed.calls / every;
        let place = self.recomputed.calls % every;
        self.recomputed.calls += 1;
        place == Rolling::default().mix(round).word() % every
    }

    /// Runs `issue`. Kernel calls that it issues are not recomputed.
    pub(crate) fn without_recomputing<T>(&mut self, issue: impl FnOnce(&mut Self) -> T) -> T {
        let before = std::mem::replace(&mut self.recomputed.is_paused, true);
        let issued = issue(self);
        self.recomputed.is_paused = before;
        issued
    }

    /// Chooses the process and device that recompute the next call on `device`. The other processes
    /// take turns. `None` if no other process has such a device.
    pub(crate) fn next_checker(&mut self, device: DeviceId) -> Option<Recomputation> {
        let topology = &self.runtime.topology;
        let owner = topology.process_of(device)?;
        let kind = topology.kind_of(device)?;
        let others = checkers(topology, device);

        let turn = self.recomputed.checks.entry(owner).or_default();
        let process = others.get(*turn as usize % others.len().max(1))?;
        let devices = topology.devices_of(*process).iter();
        let devices: Vec<_> = devices
            .filter(|device| topology.kind_of(**device) == Some(kind))
            .collect();
        let device = **devices.get(*turn as usize / others.len() % devices.len().max(1))?;
        *turn += 1;
        Some(Recomputation {
            device,
            processes: [owner, *process],
            is_only_pair: others.len() == 1,
        })
    }

    /// Records comparisons that were issued, and adds them to the step that is being captured, if
    /// there is one.
    pub(crate) fn will_compare(&mut self, comparisons: impl IntoIterator<Item = Comparison>) {
        let steps = self.steps;
        for mut comparison in comparisons {
            comparison.call.step = steps;
            if let Some(capture) = &mut self.capture {
                capture.comparisons.push(comparison.clone());
            }
            self.recomputed.pending.push_back(comparison);
        }

        while self.capture.is_none() && self.recomputed.pending.len() > MOST_PENDING {
            self.read_comparison();
        }
    }

    /// Reads the comparisons that were issued two or more step ends ago, or with `all` every one.
    /// Blocks until they have arrived; this is rare, since a whole step was issued after them.
    pub(super) fn read_comparisons(&mut self, all: bool) {
        let is_due = |comparison: &Comparison| all || comparison.call.step + 2 <= self.steps;
        let due = self
            .recomputed
            .pending
            .iter()
            .take_while(|comparison| is_due(comparison));
        (0..due.count()).for_each(|_| self.read_comparison());
    }

    /// Reads the oldest comparison. Process 0 reports a difference to the user. Ignores a
    /// comparison whose operation has failed: the failure ends the job, or was forgiven.
    fn read_comparison(&mut self) {
        let Some(Comparison { call, hashes }) = self.recomputed.pending.pop_front() else {
            return;
        };
        let read = |hash: &MpmdArray| hash.to_host().ok().flatten();
        let [Some(first), Some(again)] = hashes.each_ref().map(read) else {
            return;
        };

        let differ = first.bytes()[..] != again.bytes()[..];
        let finding = self.recomputed.ledger.note(&call, differ);
        if self.process() != ProcessId(0) {
            return;
        }

        let RecomputedCall {
            processes: [a, b],
            kernel,
            at,
            ..
        } = &call;
        let bits =
            format!("kernel {kernel} at {at}: processes {a} and {b} computed different bits");
        match finding {
            ComparisonFinding::Nothing => {}
            ComparisonFinding::First => warn_user(&format!("{bits} from the same inputs")),
            ComparisonFinding::EitherOf => warn_user(&format!(
                "{bits} from the same inputs, not for the first time: one of the two computes \
                 wrong bits, and there is no third process that could tell which; {a}: {}; {b}: {}",
                self.place_of(*a),
                self.place_of(*b)
            )),
            ComparisonFinding::Convicted(Convicted { process, why, .. }) => {
                warn_user(&format!(
                    "process {process} ({}) {why}",
                    self.place_of(process)
                ));
            }
        }
    }

    /// Returns the next convicted process. Returns each process only once. The same on every
    /// process after the same calls.
    pub(crate) fn convicted(&mut self) -> Option<Convicted> {
        self.recomputed.ledger.convicted.pop_front()
    }

    /// Convicts a process as if the comparisons had shown wrong bits. All processes must call it.
    #[cfg(test)]
    pub(crate) fn accuse(&mut self, process: ProcessId) {
        let why = "computes wrong bits".to_owned();
        self.recomputed.ledger.convicted.push_back(Convicted {
            process,
            why,
            first: 1,
        });
    }

    /// Returns (number of comparisons read, number of comparisons with a difference).
    #[cfg(test)]
    pub(crate) fn compared(&self) -> (u64, u64) {
        let records = self.recomputed.ledger.records.values();
        let sums = records.map(|record| (record.compared, record.differed));
        let (compared, differed) = sums.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        (compared / 2, differed / 2)
    }

    /// Describes the host and system id of a process.
    fn place_of(&self, process: ProcessId) -> String {
        let members = self
            .membership
            .as_ref()
            .map(|membership| &membership.places);
        match members.and_then(|places| places.get(process.index())) {
            Some(MemberPlace { host, pid }) => format!("pid {pid} on {host}"),
            None => "its host is not known".to_owned(),
        }
    }
}

/// Returns the processes that can recompute the calls on a device: all others with devices of its
/// kind, starting with the next process number. Empty if a process of the job has no device,
/// because such a process could not receive comparisons.
pub(crate) fn checkers(topology: &Topology, device: DeviceId) -> Vec<ProcessId> {
    let (Some(owner), Some(kind)) = (topology.process_of(device), topology.kind_of(device)) else {
        return Vec::new();
    };

    let all = topology.processes() as u32;
    if (0..all).any(|process| topology.devices_of(ProcessId(process)).is_empty()) {
        return Vec::new();
    }
    let others = (1..all).map(|after| ProcessId((owner.0 + after) % all));
    others
        .filter(|process| topology.has_kind(*process, kind))
        .collect()
}

impl ComparisonLedger {
    /// Records the result of a comparison.
    ///
    /// Convicts a process that has differed from two or more others, and from more than its present
    /// counterpart has. A single faulty process then explains all of these differences.
    fn note(&mut self, call: &RecomputedCall, differ: bool) -> ComparisonFinding {
        let [a, b] = call.processes;
        let mut is_explained = false;
        for process in call.processes {
            let record = self.records.entry(process).or_default();
            record.compared += 1;
            record.differed += u64::from(differ);
            if differ {
                record.first.get_or_insert(call.step + 1);
            }
            is_explained |= record.is_convicted;
        }
        if !differ || is_explained {
            return ComparisonFinding::Nothing;
        }

        let mut times = 0;
        let [of_a, of_b] = [(a, b), (b, a)].map(|(process, other)| {
            let others = &mut self.records.entry(process).or_default().others;
            times = *others
                .entry(other)
                .and_modify(|times| *times += 1)
                .or_insert(1);
            others.len()
        });

        let found = match of_a.cmp(&of_b) {
            std::cmp::Ordering::Greater if of_a > 1 => Some(a),
            std::cmp::Ordering::Less if of_b > 1 => Some(b),
            _ => None,
        };
        if let Some(process) = found {
            return ComparisonFinding::Convicted(self.convict(process, call));
        }
        match times {
            1 => ComparisonFinding::First,
            2 if call.is_only_pair => ComparisonFinding::EitherOf,
            _ => ComparisonFinding::Nothing,
        }
    }

    fn convict(&mut self, process: ProcessId, call: &RecomputedCall) -> Convicted {
        let record = self.records.entry(process).or_default();
        record.is_convicted = true;
        let first = record.first.unwrap_or(call.step + 1);
        let others: Vec<String> = record.others.keys().map(ToString::to_string).collect();
        let why = format!(
            "computes wrong bits: {} of {} recomputed calls in which it took part differed, with \
             processes {}; the last was of kernel {} at {}",
            record.differed,
            record.compared,
            others.join(", "),
            call.kernel,
            call.at
        );

        self.records.values_mut().for_each(|record| {
            record.others.remove(&process);
        });
        let convicted = Convicted {
            process,
            why,
            first,
        };
        self.convicted.push_back(convicted.clone());
        convicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(processes: [u32; 2], is_only_pair: bool) -> RecomputedCall {
        let (processes, kernel, at) = (processes.map(ProcessId), "k".into(), Location::caller());
        RecomputedCall {
            processes,
            is_only_pair,
            kernel,
            at,
            step: 0,
        }
    }

    /// Notes differences between these processes, in order. Returns the findings, with the
    /// convicted processes alone.
    fn differences(pairs: &[[u32; 2]], is_only_pair: bool) -> Vec<Result<u32, ComparisonFinding>> {
        let mut ledger = ComparisonLedger::default();
        let note = |pair: &[u32; 2]| match ledger.note(&call(*pair, is_only_pair), true) {
            ComparisonFinding::Convicted(Convicted { process, .. }) => Ok(process.0),
            other => Err(other),
        };
        pairs.iter().map(note).collect()
    }

    #[test]
    fn process_that_differs_from_two_others_is_convicted_once() {
        use ComparisonFinding::{First, Nothing};
        let found = differences(&[[0, 1], [2, 0], [0, 1], [3, 0], [1, 2]], false);
        assert_eq!(
            found,
            [Err(First), Ok(0), Err(Nothing), Err(Nothing), Err(First)]
        );
        // The same pair again says nothing new: a third process must tell.
        let found = differences(&[[0, 1], [0, 1], [1, 0], [1, 2]], false);
        assert_eq!(found, [Err(First), Err(Nothing), Err(Nothing), Ok(1)]);
        // Either of 0 and 2 could be at fault at first.
        let found = differences(&[[0, 1], [2, 3], [0, 2], [0, 3]], false);
        assert_eq!(found, [Err(First), Err(First), Err(First), Ok(0)]);
        let mut ledger = ComparisonLedger::default();
        ledger.note(&call([0, 1], false), false);
        ledger.note(&call([0, 1], false), true);
        ledger.note(&call([2, 0], false), true);
        let why = ledger.convicted.pop_front().unwrap().why;
        assert!(
            why.contains("2 of 3 recomputed calls") && why.contains("processes 1, 2;"),
            "{why}"
        );
    }

    #[test]
    fn two_processes_alone_are_told_once_and_never_convicted() {
        use ComparisonFinding::{EitherOf, First, Nothing};
        let found = differences(&[[0, 1], [1, 0], [0, 1], [1, 0]], true);
        assert_eq!(
            found,
            [Err(First), Err(EitherOf), Err(Nothing), Err(Nothing)]
        );
    }

    #[test]
    fn checkers_have_the_kind_and_every_process_has_a_device() {
        use mpmd_layout::topology::DeviceKind::{Cpu, Cuda};
        let checkers = |topology: &Topology, device| -> Vec<u32> {
            checkers(topology, DeviceId(device))
                .iter()
                .map(|process| process.0)
                .collect()
        };
        assert_eq!(checkers(&Topology::even(4, 2), 4), [3, 0, 1]);
        assert!(checkers(&Topology::even(1, 2), 0).is_empty());
        let mixed = Topology::even(4, 1)
            .of_kinds(&[Cpu, Cuda, Cpu, Cpu])
            .unwrap();
        assert_eq!(
            (checkers(&mixed, 0), checkers(&mixed, 1)),
            (vec![2, 3], vec![])
        );
        assert!(checkers(&Topology::with_devices(&[1, 0, 1]), 0).is_empty());
    }
}
