//! A call in a recorded plan: on all devices of all processes.

use std::panic::Location;

use super::plan::{CallPlan, OutputPlan};
use crate::api::program::Program;
use crate::dry_run::{self, Kind, Memory, OpDescriptor};
use crate::exec::array::MpmdArray;

impl CallPlan {
    /// Records a call in a dry run; does nothing otherwise.
    pub(super) fn record(
        &self,
        program: &Program,
        leaves: &[&MpmdArray],
        at: &'static Location<'static>,
    ) {
        let takes = leaves.iter().zip(&self.inputs).map(|(leaf, input)| (*leaf, input.donated));
        program.record_operation(at, takes, Some(&self.known_form), || self.form(program));
    }

    fn form(&self, program: &Program) -> OpDescriptor {
        let shards = |output: &OutputPlan| {
            let memory = match output.alias {
                Some(input) if self.takes_over(output) => Memory::Of(input as u32),
                _ => Memory::Own,
            };
            dry_run::shards(&output.made.layout, output.made.aval.dtype().size(), |_| memory)
        };
        let devices = self.mesh.mesh.devices();
        // Collectives over an axis that the mesh lacks were refused before.
        let messages = crate::kernel::planned::messages(
            &self.mesh.mesh,
            &self.mesh.collectives,
            program.topology(),
        );
        OpDescriptor {
            what: self.what.to_string(),
            kind: Kind::Call {
                kernel: self.what.name.clone(),
                devices: devices.iter().map(|device| device.0).collect(),
            },
            results: self.outputs.iter().map(shards).collect(),
            messages: messages.unwrap_or_default(),
        }
    }
}
