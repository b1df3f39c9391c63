//! Messages of the collectives in a kernel's signature, between the devices of its mesh.
//!
//! Collectives through NCCL are shown like those without it, after the round in which the devices
//! agree. Their traffic is about the same.

use super::rank_messages::RankMessage;
use super::{Collective, agreeing};
use mpmd_layout::topology::{DeviceId, Mesh, MeshError, ProcessId, Topology};
use mpmd_record::dry_run::OpMessage;

/// Returns the largest possible messages of the declared collectives, in the order of their rounds:
/// each device passes the declared number of elements. Bytes for several devices of one process are
/// sent once.
///
/// # Errors
///
/// If a collective is over an axis that the mesh does not have.
pub(crate) fn messages(
    mesh: &Mesh,
    collectives: &[Collective],
    topology: &Topology,
) -> Result<Vec<OpMessage>, MeshError> {
    let mut messages = Vec::new();
    let mut step = 0;

    for collective in collectives {
        let mut rounds = 0;
        for device in mesh.devices() {
            let group = mesh.group_of(*device, &collective.axis)?;
            if group.first() != Some(device) {
                // Handles each group once, at its first device.
                continue;
            }

            let processes: Vec<ProcessId> = group
                .iter()
                .filter_map(|device| topology.process_of(*device))
                .collect();
            let joined = collective.is_joined(&group, topology);
            let flows = collective.rounds(&processes, joined);
            rounds = rounds.max(flows.len() as u32);

            for (round, flow) in (step + 1..).zip(&flows) {
                let sent = match joined && round == step + 1 {
                    true => agreeing(flow, &processes),
                    false => collective.sent(flow, flows.len() - usize::from(joined), &processes),
                };
                for RankMessage { from, to, bytes } in sent {
                    messages.push(message(group[from], group[to], bytes, round));
                }
            }
        }
        step += rounds;
    }

    messages.sort_by_key(|message| message.step);
    Ok(messages)
}

fn message(from: DeviceId, to: DeviceId, bytes: u64, step: u32) -> OpMessage {
    OpMessage {
        from: from.0,
        to: to.0,
        bytes,
        step,
        leaf: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Signature;
    use mpmd_layout::aval::{ShapedArray, f32s, u8s};

    /// Returns the messages between devices of a mesh of one axis, as `(from, to, bytes, step)`.
    fn of(
        processes: usize,
        each: usize,
        add: impl FnOnce(Signature<ShapedArray>) -> Signature<ShapedArray>,
    ) -> Vec<[u64; 4]> {
        let topology = Topology::even(processes, each);
        let devices = topology.device_ids().to_vec();
        let mesh = Mesh::new(&[("x", devices.len())], devices).unwrap();
        let signature = add(Signature::new(f32s([1])));
        let found = messages(&mesh, &signature.collectives, &topology).unwrap();
        let plain = |m: OpMessage| {
            [
                u64::from(m.from),
                u64::from(m.to),
                m.bytes,
                u64::from(m.step),
            ]
        };
        found.into_iter().map(plain).collect()
    }

    #[test]
    fn shared_bytes_cross_once_and_segments_per_device() {
        let small = of(2, 2, |s| s.all_reduce("x", f32s([4])));
        // Each device sends to the other of its process, and to one of the other process.
        assert_eq!(small.len(), 8);
        assert!(small.iter().all(|m| m[2] == 16 && m[3] == 1));
        assert!(small.contains(&[0, 2, 16, 1]) && !small.contains(&[0, 3, 16, 1]));
        let scatter = of(2, 2, |s| s.reduce_scatter("x", f32s([8])));
        assert_eq!(scatter.len(), 12);
        assert!(scatter.iter().all(|m| m[2] == 8));
        let pairs = of(2, 1, |s| s.permute("x", u8s([5]), [(0, 1)]));
        assert_eq!(pairs, [[0, 1, 5, 1]]);
    }

    #[test]
    fn large_collectives_take_two_rounds() {
        let count = 100_002;
        let reduce = of(3, 1, |s| s.all_reduce("x", u8s([count])));
        assert_eq!(reduce.len(), 12);
        assert!(reduce.iter().all(|m| m[2] == count as u64 / 3));
        assert_eq!(reduce.iter().filter(|m| m[3] == 2).count(), 6);
        assert!(of(1, 1, |s| s.all_reduce("x", u8s([count]))).is_empty());
    }
}
