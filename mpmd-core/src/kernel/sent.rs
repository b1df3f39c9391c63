//! What a collective sends, at most: for plans, which know declarations and not calls.

use mpmd_transport::ProcessId;

use super::collectives::share;
use super::signature::{Collective, CollectiveKind};
use crate::runtime::Flow;

impl Collective {
    /// The messages of one of its `rounds` rounds in a group of devices that these processes own, as `(from, to,
    /// bytes)` by rank. What several devices of a process get crosses to it once, and is the first's.
    pub(crate) fn sent(
        &self,
        flow: &Flow,
        rounds: usize,
        processes: &[ProcessId],
    ) -> Vec<(usize, usize, u64)> {
        let (n, item) = (processes.len(), self.aval.dtype().size());
        let segment = |rank| share(self.aval.elements(), n, rank).len() * item;
        let mut sent = Vec::new();
        for from in 0..n {
            let mut reached: Vec<ProcessId> = Vec::new();
            for to in (0..n).filter(|to| flow.goes(from, *to)) {
                let process = processes[to];
                if flow.shared && reached.contains(&process) {
                    continue;
                }
                reached.push(process);
                let bytes = match (&self.kind, flow.shared, rounds) {
                    (CollectiveKind::Permute(_), ..) | (_, true, 1) => self.aval.bytes(),
                    (_, true, _) => segment(from),
                    (_, false, _) => segment(to),
                };
                sent.push((from, to, bytes as u64));
            }
        }
        sent
    }
}
