//! Upper bounds of the messages that a collective sends. Plans use them: they know the declarations
//! but not the calls.

use mpmd_base::ProcessId;
use mpmd_device::collective::CollectiveKind;

use super::collectives::share;
use super::collectives_nccl::AGREEING_BYTES;
use super::signature::Collective;
use crate::exec::RoundFlow;

/// A message between two devices of a group, given by their ranks.
pub(crate) struct RankMessage {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: u64,
}

impl Collective {
    /// Returns the largest messages of one round, which has the flow `flow`. `rounds` is the number
    /// of rounds of the collective. `processes` are the owners of the group's devices, by rank.
    /// Bytes for several devices of one process are counted once, at the first of them.
    pub(crate) fn sent(
        &self,
        flow: &RoundFlow,
        rounds: usize,
        processes: &[ProcessId],
    ) -> Vec<RankMessage> {
        let n = processes.len();
        let item = self.aval.dtype().size();
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

/// Returns the messages of the round in which a group that uses NCCL compares a call. `processes`
/// are the owners of the group's devices, by rank.
pub(crate) fn agreeing(flow: &RoundFlow, processes: &[ProcessId]) -> Vec<RankMessage> {
    messages(flow, processes, |_, _| AGREEING_BYTES)
}

fn messages(
    flow: &RoundFlow,
    processes: &[ProcessId],
    bytes: impl Fn(usize, usize) -> usize,
) -> Vec<RankMessage> {
    let mut sent = Vec::new();
    for from in 0..processes.len() {
        let mut reached: Vec<ProcessId> = Vec::new();
        for to in (0..processes.len()).filter(|to| flow.goes(from, *to)) {
            let process = processes[to];
            if flow.shared && reached.contains(&process) {
                continue;
            }

            reached.push(process);
            sent.push(RankMessage {
                from,
                to,
                bytes: bytes(from, to) as u64,
            });
        }
    }
    sent
}
