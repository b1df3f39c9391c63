//! The command `mpmd bench probe`.

use anyhow::{Result, ensure};
use clap::Args;
use mpmd_layout::topology::DeviceKind;

use crate::options::DeviceOption;

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ProbeArgs {
    /// Print one line of JSON for each fact instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    on: DeviceOption,
    /// The largest number of interprocess events to create.
    #[arg(long, default_value_t = 40_000)]
    events: usize,
    /// Works as the other process, which opens memory and events; set by the probe.
    #[arg(long, hide = true)]
    peer: bool,
}

/// Prints the facts of the CUDA driver one by one. If a fact cannot be found out, prints the error
/// in place of the fact.
pub(crate) fn probe(args: &ProbeArgs) -> Result<()> {
    ensure!(
        args.on.device == DeviceKind::Cuda,
        "the probe is of a CUDA driver: add --device cuda"
    );
    if args.peer {
        super::peer::serve()
    } else {
        super::facts::print(args.json, args.events)
    }
}
