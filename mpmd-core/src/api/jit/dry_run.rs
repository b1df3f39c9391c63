//! A call in a dry run: on all devices of all processes.

use super::plan::CallPlan;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

impl CallPlan {
    /// Returns the descriptor of the call for a dry run: its results and messages on all devices of
    /// all processes.
    pub(super) fn descriptor(&self) -> OpDescriptor {
        let results = self.outputs.iter().enumerate().map(|(index, output)| {
            let memory = match output.alias {
                Some(input) if self.takes_over(output) => ShardMemory::Of(input as u32),
                _ => ShardMemory::Own,
            };
            let mut shards =
                dry_run::shards(&output.made.layout, output.made.aval.dtype().size(), |_| {
                    memory
                });
            if let Some(bytes) = self.objects.declared(index) {
                shards.iter_mut().for_each(|shard| shard.bytes = bytes);
            }
            shards
        });

        let devices = self.mesh.mesh.devices();
        // Collectives over an axis that the mesh lacks were refused before.
        let messages = crate::kernel::dry_run::messages(
            &self.mesh.mesh,
            &self.mesh.collectives,
            &self.runtime.topology,
        );
        OpDescriptor {
            what: self.what.to_string(),
            kind: OpKind::Call {
                kernel: self.what.name.clone(),
                devices: devices.iter().map(|device| device.0).collect(),
            },
            results: results.collect(),
            messages: messages.unwrap_or_default(),
        }
    }
}
