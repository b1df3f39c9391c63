//! Builds the [`DryRun`] of a program while it runs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::Location;
use std::path::PathBuf;
use std::sync::OnceLock;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;

use crate::error::{Error, Result};
use crate::exec::array::{MpmdArray, Repr};
use mpmd_layout::topology::Topology;
use mpmd_record::dry_run::{
    Array, Dropped, DryRun, DryRunEnd, IssuedOperation, OpDescriptor, Read, StepEnd, TakenArray,
};
use mpmd_record::trace::Label;

/// The maximum number of steps of a dry run for which the user requests no number of steps.
const MOST_STEPS: u64 = 16;

/// An operation that is issued in a dry run.
#[derive(Clone, Copy)]
pub(crate) struct OperationNote {
    pub(crate) label: Option<Label>,
    /// The line of the program that issues the operation.
    pub(crate) at: &'static Location<'static>,
    /// The rolling hash of the operations up to this one.
    pub(crate) hash: u64,
}

/// The builder of a dry run while the program runs. Array handles may be dropped on any thread.
pub(crate) struct DryRunBuilder {
    state: Mutex<DryRunState>,
    /// The process whose view of the job this dry run records.
    process: ProcessId,
    /// The settings of a process that was started to write its dry run to a file. `None` otherwise.
    order: Option<Order>,
}

/// The settings in [`variables::DRY_RUN`](mpmd_launch::variables::DRY_RUN).
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Order {
    /// The output file of the dry run.
    pub(crate) file: PathBuf,
    /// The number of steps to run, also if two in a row are equal. `None` to end at two equal steps
    /// in a row, or after [`MOST_STEPS`].
    pub(crate) requested_steps: Option<u64>,
}

/// The dry run recorded so far, with indices for its descriptors and lines.
#[derive(Default)]
struct DryRunState {
    dry_run: DryRun,
    descriptors: HashMap<OpDescriptor, u32>,
    lines: HashMap<&'static Location<'static>, u32>,
    /// The number of the last operation before the latest wait for all operations.
    synced: u64,
}

/// A cached index of the descriptor of a call or a move in the dry run. It is valid for one
/// program, which is enough: a process runs one program.
#[derive(Debug, Default)]
pub(crate) struct KnownDescriptor(OnceLock<u32>);

impl DryRunBuilder {
    pub(crate) fn new(process: ProcessId, topology: &Topology, order: Option<Order>) -> Self {
        let devices = topology
            .devices()
            .iter()
            .map(|device| device.process.0)
            .collect();
        let dry_run = DryRun::new(topology.processes() as u32, devices);
        Self {
            state: Mutex::new(DryRunState {
                dry_run,
                ..DryRunState::default()
            }),
            process,
            order,
        }
    }

    pub(crate) fn process(&self) -> ProcessId {
        self.process
    }

    /// Notes the next operation. `takes` has each input, with true if it is donated. `known` caches
    /// the index of the descriptor, so that `descriptor` is called only once.
    pub(crate) fn operation<'a>(
        &self,
        note: OperationNote,
        takes: impl IntoIterator<Item = (&'a MpmdArray, bool)>,
        known: Option<&KnownDescriptor>,
        descriptor: impl FnOnce() -> OpDescriptor,
    ) {
        let takes = takes.into_iter().map(|(array, donated)| match &array.repr {
            Repr::Host(_) => TakenArray {
                array: None,
                donated: false,
            },
            Repr::Placed(placed) => TakenArray {
                array: Some(placed.dry_run_array()),
                donated,
            },
        });
        let takes: Vec<TakenArray> = takes.collect();

        let mut state = self.state.lock();
        let descriptor = match known.and_then(|known| known.0.get()) {
            Some(descriptor) => *descriptor,
            None => state.descriptor(descriptor()),
        };
        if let Some(known) = known {
            known.0.get_or_init(|| descriptor);
        }

        let line = state.line(note.at);
        state.dry_run.operations.push(IssuedOperation {
            descriptor,
            line,
            label: note.label,
            takes,
        });
        state.dry_run.hashes.push(note.hash);
    }

    /// Notes that the last handle of an array was dropped.
    pub(crate) fn dropped(&self, array: Array) {
        let mut state = self.state.lock();
        let after = state.dry_run.operations.len() as u64;
        state.dry_run.drops.push(Dropped { array, after });
    }

    /// Notes that the program waits for an array at line `at`. `values` is true if the wait is a
    /// read of the values.
    pub(crate) fn read(&self, array: Array, values: bool, at: &'static Location<'static>) {
        let mut state = self.state.lock();
        let after = state.dry_run.operations.len() as u64;
        let line = state.line(at);
        state.dry_run.reads.push(Read {
            array,
            after,
            line,
            values,
        });
    }

    /// Notes that the program waits at line `at` for all operations issued so far. Records a wait
    /// for each array that they made since the last such wait.
    pub(crate) fn sync(&self, at: &'static Location<'static>) {
        let mut state = self.state.lock();
        let after = state.dry_run.operations.len() as u64;
        let line = state.line(at);
        let since = std::mem::replace(&mut state.synced, after);
        for operation in since + 1..=after {
            let made = state
                .dry_run
                .descriptor_of(operation)
                .map_or(0, |made| made.results.len());
            let read = |result| Read {
                array: Array { operation, result },
                after,
                line,
                values: false,
            };
            state.dry_run.reads.extend((0..made as u32).map(read));
        }
    }

    /// Notes the end of a step. Returns the reason if the dry run ends with this step.
    pub(crate) fn step_end(&self) -> Option<DryRunEnd> {
        let mut state = self.state.lock();
        let DryRun {
            operations,
            drops,
            reads,
            ..
        } = &state.dry_run;
        let end = StepEnd {
            operation: operations.len() as u64,
            drops: drops.len() as u64,
            reads: reads.len() as u64,
        };
        state.dry_run.steps.push(end);

        let requested = self.order.as_ref()?.requested_steps;
        let is_last = state.dry_run.steps.len() as u64 >= requested.unwrap_or(MOST_STEPS);
        if !is_last && requested.is_some() {
            return None;
        }
        if state.dry_run.is_steady() {
            return Some(DryRunEnd::Steady);
        }
        is_last.then_some(DryRunEnd::Steps)
    }

    pub(crate) fn so_far(&self, end: DryRunEnd) -> DryRun {
        let mut dry_run = self.state.lock().dry_run.clone();
        dry_run.end = end;
        dry_run
    }

    /// Writes the dry run to the file of the [`Order`] and returns true. Without an order, returns
    /// false. Fails if the file cannot be written.
    pub(crate) fn deliver(&self, end: DryRunEnd) -> Result<bool> {
        let Some(order) = &self.order else {
            return Ok(false);
        };
        let written = self.so_far(end).write(&order.file);
        written
            .map(|()| true)
            .map_err(|error| Error::Environment(error.to_string()))
    }
}

impl DryRunState {
    fn descriptor(&mut self, descriptor: OpDescriptor) -> u32 {
        let next = self.dry_run.descriptors.len() as u32;
        match self.descriptors.entry(descriptor) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                self.dry_run.descriptors.push(new.key().clone());
                *new.insert(next)
            }
        }
    }

    fn line(&mut self, at: &'static Location<'static>) -> u32 {
        let next = self.dry_run.lines.len() as u32;
        match self.lines.entry(at) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                self.dry_run.lines.push(at.to_string());
                *new.insert(next)
            }
        }
    }
}
