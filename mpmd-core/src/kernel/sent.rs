//! Upper bounds of the messages that a collective sends. Plans use them: they know the declarations
//! but not the calls.

use mpmd_base::ProcessId;
use mpmd_device::collective::CollectiveKind;

use super::collectives::share;
use super::collectives_nccl::AGREEING_BYTES;
use super::signature::Collective;
use crate::exec::Flow;

impl Collective {
    /// Returns the messages of one round with this flow, as `(from, to, bytes)` by rank. `rounds`
    /// is the number of rounds of the collective. `processes` are the owners of the group's
    /// devices, by rank. Bytes for several devices of one process are counted once, at the first of
    /// them.
    pub(crate) fn sent(
        &self,
        flow: &Flow,
        rounds: usize,
        processes: &[ProcessId],
    ) -> Vec<(usize, usize, u64)> {
        let (n, item) = (processes.len(), self.aval.dtype().size());
        let segment = |rank| share(self.aval.elements(), n, rank).len() * item;
        messages(flow, processes, |from, to| {
            match (&self.kind, flow.shared, rounds) {
                (CollectiveKind::Permute(_), ..) | (_, true, 1) => self.aval.bytes(),
                (_, true, _) => segment(from),
                (_, false, _) => segment(to),
            }
        })
    }
}

/// Returns the messages of the round in which a group that uses NCCL agrees on a call, as `(from,
/// to, bytes)` by rank. `processes` are the owners of the group's devices, by rank.
pub(crate) fn agreeing(flow: &Flow, processes: &[ProcessId]) -> Vec<(usize, usize, u64)> {
    messages(flow, processes, |_, _| AGREEING_BYTES)
}

fn messages(
    flow: &Flow,
    processes: &[ProcessId],
    bytes: impl Fn(usize, usize) -> usize,
) -> Vec<(usize, usize, u64)> {
    let mut sent = Vec::new();
    for from in 0..processes.len() {
        let mut reached: Vec<ProcessId> = Vec::new();
        for to in (0..processes.len()).filter(|to| flow.goes(from, *to)) {
            let process = processes[to];
            if flow.shared && reached.contains(&process) {
                continue;
            }
            reached.push(process);
            sent.push((from, to, bytes(from, to) as u64));
        }
    }
    sent
}
