//! A call in a dry run: on all devices of all processes.

use super::plan::{CallPlan, ObjectPlace, OutputPlan};
use crate::exec::array::MpmdArray;
use crate::exec::dry_run::DryRunBuilder;
use mpmd_layout::topology::DeviceId;
use mpmd_record::dry_run::{self, Kind, Memory, OpDescriptor, Shard};

impl CallPlan {
    /// Returns (index of the input, bytes on each device) of each object that the call makes grow.
    fn growth(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.objects.bytes.iter().filter_map(|(place, bytes)| match place {
            ObjectPlace::Input(index) => Some((*index, *bytes)),
            ObjectPlace::Output(_) => None,
        })
    }

    /// Tells the dry run which results of operation `op` are the growth of objects.
    /// They come after the outputs, and live as long as the object.
    pub(super) fn note_growth(&self, dry_run: &DryRunBuilder, leaves: &[&MpmdArray], op: u64) {
        for (i, (input, _)) in self.growth().enumerate() {
            if let Some(object) = leaves[input].origin() {
                dry_run.grows(object, (op, (self.outputs.len() + i) as u32));
            }
        }
    }

    /// Returns the descriptor of the call for the plan of a dry run: its results and messages on
    /// all devices of all processes.
    pub(super) fn descriptor(&self) -> OpDescriptor {
        let declared = |index| {
            let of = |(place, _): &&(ObjectPlace, u64)| *place == ObjectPlace::Output(index);
            self.objects.bytes.iter().find(of).map(|(_, bytes)| *bytes)
        };
        let shards = |(index, output): (usize, &OutputPlan)| {
            let memory = match output.alias {
                Some(input) if self.takes_over(output) => Memory::Of(input as u32),
                _ => Memory::Own,
            };
            let mut shards =
                dry_run::shards(&output.made.layout, output.made.aval.dtype().size(), |_| memory);
            if let Some(bytes) = declared(index) {
                shards.iter_mut().for_each(|shard| shard.bytes = bytes);
            }
            shards
        };
        let devices = self.mesh.mesh.devices();
        let growth = self.growth().map(|(_, bytes)| {
            let shard = |device: &DeviceId| Shard { device: device.0, bytes, memory: Memory::Own };
            devices.iter().map(shard).collect()
        });
        // Collectives over an axis that the mesh lacks were refused before.
        let messages = crate::kernel::dry_run::messages(
            &self.mesh.mesh,
            &self.mesh.collectives,
            &self.runtime.topology,
        );
        OpDescriptor {
            what: self.what.to_string(),
            kind: Kind::Call {
                kernel: self.what.name.clone(),
                devices: devices.iter().map(|device| device.0).collect(),
            },
            results: self.outputs.iter().enumerate().map(shards).chain(growth).collect(),
            messages: messages.unwrap_or_default(),
        }
    }
}
