//! Reasons for idle times in a merged run, as texts for messages.

use super::merge::{CollectiveWait, KernelRun, TracedOperation, TracedRun};
use crate::trace::{Label, Role};

impl TracedRun {
    /// Describes the cause of a wait of process `process` for the values of operation `op`. The
    /// wait began at `since`, in seconds. The cause is the transfer of the values if it took more
    /// than half of the wait. Otherwise it is the pass that computed the values, with its process.
    pub(super) fn reason(&self, process: u32, op: u64, since: f64) -> String {
        let Some(operation) = self.operation(process, op) else {
            return format!("operation {op}");
        };
        let come =
            |piece: &&super::TracedPiece| piece.to == process && piece.on_its_way().is_some();
        let end = |piece: &super::TracedPiece| piece.on_its_way().map_or(0.0, |(_, end)| end);
        let last = self
            .pieces_of(op)
            .iter()
            .filter(come)
            .max_by(|a, b| end(a).total_cmp(&end(b)));

        let from = last.map_or(process, |piece| piece.from);
        let maker = self.made_by(operation, op, from);
        let Some((piece, (left, came))) = last.and_then(|piece| Some((piece, piece.on_its_way()?)))
        else {
            return format!("{maker} on process {process}");
        };

        // True if the transfer took more than half of the wait.
        let moving = came - left.max(since);
        match moving > 0.5 * (came - since) {
            true => format!(
                "{} on its way from process {from}: {maker}",
                bytes(piece.bytes)
            ),
            false => format!("{maker} on process {from}"),
        }
    }

    /// Describes the reason that a device, idle since time `idle`, did not begin `kernel` earlier.
    pub(super) fn why_idle(&self, kernel: &KernelRun, idle: f64) -> String {
        if let Some(input) = kernel.waited_for {
            return self.reason(kernel.process, input, idle);
        }

        let issued = self
            .operation(kernel.process, kernel.op)
            .map_or(0.0, |operation| operation.issued);
        if issued <= idle {
            return why_thread(
                kernel,
                &self.device_name(kernel.process, kernel.device),
                idle,
            );
        }

        let overlap = |wait: &&super::ProgramWait| wait.end.min(issued) - wait.start.max(idle);
        // Waits of one process do not overlap, so they are also sorted by their ends.
        let before = |wait: &super::ProgramWait| (wait.process, wait.end) < (kernel.process, idle);
        let waits = self.waits[self.waits.partition_point(before)..].iter();
        let waits = waits.take_while(|wait| wait.process == kernel.process && wait.start < issued);
        let longest = waits.max_by(|a, b| overlap(a).total_cmp(&overlap(b)));

        match longest.filter(|wait| overlap(wait) > 0.5 * (issued - idle)) {
            Some(wait) => format!("the program, which waited in {} at {}", wait.call, wait.at),
            None => "the program to issue it".to_owned(),
        }
    }

    /// Describes the reason that a kernel waited in a collective.
    pub(super) fn why_in_collective(&self, wait: &CollectiveWait) -> String {
        let operation = self.operation(wait.process, wait.op);
        let kernel = operation.map_or("a kernel", |operation| short(&operation.description));
        format!("other devices, inside a collective of {kernel}")
    }

    /// Describes the operation that computed the values of operation `op`. That is `op` itself, or
    /// for a move the operation of process `from` that made the array.
    fn made_by(&self, operation: &TracedOperation, op: u64, from: u32) -> String {
        let source = operation
            .source
            .and_then(|source| Some((source, self.operation(from, source)?)));

        let label = source
            .and_then(|(_, source)| source.label)
            .or(operation.label.map(made));

        match (label, source) {
            (Some(label), _) => label.to_string(),
            (None, Some((source, operation))) => {
                format!("{} (operation {source})", short(&operation.description))
            }
            (None, None) => format!("{} (operation {op})", short(&operation.description)),
        }
    }
}

/// Describes the work of a device's thread between time `idle` and the start of `kernel`, which did
/// not wait for inputs. A trace cannot tell that work from a wait for a processor core.
fn why_thread(kernel: &KernelRun, device: &str, idle: f64) -> String {
    let did = match kernel.since - idle > 0.5 * (kernel.start - idle) {
        true => "handed over earlier outputs",
        false => "collected the inputs",
    };
    format!("the thread of {device}, which {did} or had no core")
}

/// Returns the label of the pass that computed the values of a move with the label `label`. Returns
/// any other label unchanged.
fn made(label: Label) -> Label {
    let role = match label.role {
        Role::SendForward => Role::Forward,
        Role::SendBackward => Role::BackwardInput,
        role => role,
    };
    Label { role, ..label }
}

/// Returns an operation's description without its mesh, shardings and types.
pub(super) fn short(description: &str) -> &str {
    let kernel = description
        .strip_prefix("jit ")
        .and_then(|rest| rest.split(" on ").next());
    kernel.unwrap_or_else(|| description.split(" from ").next().unwrap_or(description))
}

/// Formats a number of bytes with a unit that suits its size, up to GiB.
pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
