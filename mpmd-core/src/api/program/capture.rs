//! The capture of a step: the operations that the program issues, and the sources of their arrays.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::{Again, Comparison, NewOp, Program};
use crate::error::{IssueProblem, Result, leaf};
use crate::exec::OriginMap;
use crate::exec::array::{MpmdArray, Repr};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::Structure;
use mpmd_record::trace::Label;

/// The record of a step that is being captured.
pub(crate) struct Capture {
    /// The number of operations issued before the step.
    pub(crate) before: u64,
    pub(crate) at: &'static Location<'static>,
    pub(crate) structure: Structure,
    pub(crate) inputs: Vec<CapturedInput>,
    /// Index into `inputs` of an array, by (operation that made it, index among that operation's
    /// results).
    placed: OriginMap<u32>,
    /// Index into `inputs` of host values, by the address of their bytes.
    uncommitted: HashMap<usize, u32>,
    /// The host values among the inputs, kept alive so that their addresses are not reused.
    _held: Vec<MpmdArray>,
    /// Arrays from outside the step that its operations use, other than the inputs.
    pub(crate) constants: Vec<MpmdArray>,
    constant: OriginMap<u32>,
    /// Host values that are not inputs of the step, and arrays of the step that have no shard on
    /// this process.
    pub(crate) others: Vec<MpmdArray>,
    pub(crate) here: Vec<CapturedOp>,
    /// Comparisons of the calls that were recomputed in the step.
    pub(crate) comparisons: Vec<Comparison>,
}

/// The position and source line of an operation that donates an array in a step.
#[derive(Clone, Copy)]
pub(crate) struct StepDonation {
    /// Position of the operation in the step, from 1.
    pub(crate) place: u64,
    /// Source line of the operation.
    pub(crate) at: &'static Location<'static>,
}

/// The properties that an input of the step had at capture.
pub(crate) struct CapturedInput {
    pub(crate) path: String,
    pub(crate) aval: ShapedArray,
    pub(crate) sharding: Option<Sharding>,
    /// Index of the first input that is the same array; this input's own index if there is no
    /// earlier one.
    pub(crate) first: u32,
    pub(crate) donated: Option<StepDonation>,
}

/// An operation of the step in which this process takes part. `again` issues it in a replay.
pub(crate) struct CapturedOp {
    pub(crate) place: u64,
    pub(crate) label: Option<Label>,
    pub(crate) at: &'static Location<'static>,
    pub(crate) what: Arc<dyn fmt::Display + Send + Sync>,
    pub(crate) again: Arc<dyn Again>,
    pub(crate) inputs: Vec<ArrayOrigin>,
}

/// The origin of an array that an operation of a captured step takes. The numbers are indices into
/// `inputs`, `constants` and `others` of [`Capture`].
#[derive(Clone, Copy)]
pub(crate) enum ArrayOrigin {
    Input(u32),
    Constant(u32),
    Other(u32),
    /// An array that an operation of the step made.
    Made {
        /// Position in the step, from 1, of the operation that made the array.
        place: u64,
        /// Index of the array among the operation's results.
        index: u32,
    },
}

impl Capture {
    pub(crate) fn new(
        before: u64,
        structure: Structure,
        leaves: &[MpmdArray],
        at: &'static Location<'static>,
    ) -> Self {
        let mut this = Self {
            before,
            at,
            inputs: Vec::with_capacity(leaves.len()),
            placed: OriginMap::default(),
            uncommitted: HashMap::new(),
            _held: leaves
                .iter()
                .filter(|leaf| leaf.sharding().is_none())
                .cloned()
                .collect(),
            constants: Vec::new(),
            constant: OriginMap::default(),
            others: Vec::new(),
            here: Vec::new(),
            comparisons: Vec::new(),
            structure,
        };

        for (place, (path, leaf)) in this.structure.paths().into_iter().zip(leaves).enumerate() {
            let place = place as u32;
            let first = match &leaf.repr {
                Repr::Placed(placed) => *this.placed.entry(placed.origin()).or_insert(place),
                Repr::Host(host) => {
                    // Empty values have no address to recognize them by.
                    if !host.bytes().is_empty() {
                        this.uncommitted
                            .insert(host.bytes().as_ptr() as usize, place);
                    }
                    place
                }
            };
            this.inputs.push(CapturedInput {
                path,
                aval: leaf.aval().clone(),
                sharding: leaf.sharding().cloned(),
                first,
                donated: None,
            });
        }
        this
    }

    /// Returns an error if the step donates `array` but neither made it nor has it as an input. A
    /// second replay would find such an array donated.
    fn check_given_up(&self, path: &str, array: &MpmdArray) -> Result<(), IssueProblem> {
        let Repr::Placed(placed) = &array.repr else {
            return Ok(());
        };
        let origin = placed.origin();
        if origin.0 > self.before || self.placed.contains_key(&origin) {
            return Ok(());
        }

        let problem = "is donated by a step that is captured, but is neither made by it nor an \
            input of it: a replay \
                       would find it gone; make it an input";
        Err(IssueProblem::Capture(format!(
            "{}{} {problem}",
            leaf(path),
            placed.describe()
        )))
    }

    /// Records operation `op`, which was issued with this label. Records the inputs that it donates
    /// and, if this process takes part, how to issue it again.
    pub(super) fn note(&mut self, op: u64, label: Option<Label>, new: &NewOp<'_>) {
        let place = op - self.before;
        let at = new.at;
        let again = (new.again)();
        let mut inputs = Vec::with_capacity(if again.is_some() { new.takes.len() } else { 0 });
        for (i, input) in new.takes.iter().enumerate() {
            let source = self.find(input, again.is_some());
            if let Some(ArrayOrigin::Input(input)) = source
                && (new.donates)(i)
            {
                self.inputs[input as usize]
                    .donated
                    .get_or_insert(StepDonation { place, at });
            }
            inputs.extend(source.filter(|_| again.is_some()));
        }

        if let Some(again) = again {
            self.here.push(CapturedOp {
                place,
                label,
                at,
                what: (new.what)(),
                again,
                inputs,
            });
        }
    }

    /// Returns the origin of an array. Adds an array from outside the step to `constants`. Adds
    /// host values that are no inputs, and arrays without a shard here, to `others` if `needed`.
    /// Otherwise returns `None` for them.
    pub(crate) fn find(&mut self, array: &MpmdArray, needed: bool) -> Option<ArrayOrigin> {
        let placed = match &array.repr {
            Repr::Placed(placed) => placed,
            Repr::Host(host) => {
                let input = self.uncommitted.get(&(host.bytes().as_ptr() as usize));
                return match input {
                    Some(input) if !host.bytes().is_empty() => Some(ArrayOrigin::Input(*input)),
                    _ => needed.then(|| self.other(array)),
                };
            }
        };

        let origin = placed.origin();
        if origin.0 > self.before {
            let elsewhere = placed.shards.is_empty() && placed.made.runtime.dry_run.is_none();
            return match needed && elsewhere {
                true => Some(self.other(array)),
                false => Some(ArrayOrigin::Made {
                    place: origin.0 - self.before,
                    index: origin.1,
                }),
            };
        }

        if let Some(input) = self.placed.get(&origin) {
            return Some(ArrayOrigin::Input(*input));
        }
        let next = self.constants.len() as u32;
        Some(ArrayOrigin::Constant(match self.constant.entry(origin) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                self.constants.push(array.clone());
                *new.insert(next)
            }
        }))
    }

    pub(crate) fn other(&mut self, array: &MpmdArray) -> ArrayOrigin {
        self.others.push(array.clone());
        ArrayOrigin::Other(self.others.len() as u32 - 1)
    }
}

impl Program {
    /// Returns an error if a step is being captured, for a call that cannot be replayed. `call` is
    /// the name of the call.
    pub(crate) fn refuse_in_capture(
        &self,
        at: &'static Location<'static>,
        call: &str,
    ) -> Result<()> {
        let Some(capture) = &self.capture else {
            return Ok(());
        };
        let problem = format!("not within a step that is captured (at {})", capture.at);
        Err(IssueProblem::Capture(problem).at(at, call))
    }

    /// Returns an error if a step is being captured and one of these arrays cannot be donated in
    /// it: a second replay would find the array donated.
    pub(crate) fn check_given_up(
        &self,
        leaves: &[(String, &MpmdArray)],
    ) -> std::result::Result<(), IssueProblem> {
        let Some(capture) = &self.capture else {
            return Ok(());
        };
        leaves
            .iter()
            .try_for_each(|(path, leaf)| capture.check_given_up(path, leaf))
    }
}
