//! A captured step: this process's operations and the arrays that they need.

use std::collections::HashSet;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::span::{CapturedNames, Replaying};
use crate::api::program::{Again, CapturedInput, Program, Replayed, StepDonation};
use crate::error::IssueProblem;
use crate::exec::array::{Made, MpmdArray, Origin, Placed, Repr, Shards, emptied};
use crate::exec::{OpSpan, OriginMap, Rolling, Runtime, ValueHashes};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{Structure, Tree};
use mpmd_record::trace::Label;

/// This process's part of a captured step.
pub(super) struct ReplayStep {
    pub(super) runtime: Arc<Runtime>,
    pub(super) structure: Structure,
    pub(super) inputs: Vec<CapturedInput>,
    /// Arrays that every replay uses: first those from outside the step, then the host values and
    /// remote arrays that operations or results need.
    pub(super) kept: Vec<MpmdArray>,
    /// The number of arrays in `kept` that come from outside the step. They are first.
    pub(super) constants: usize,
    /// The operations in which this process takes part, in order. Their inputs and outputs are in
    /// `links`.
    pub(super) operations: Vec<ReplayedOp>,
    pub(super) links: ReplayLinks,
    /// The number of storage slots for arrays that the step makes.
    pub(super) values: usize,
    pub(super) outcomes: Vec<ReplayOutcome>,
    /// The rolling hash at the end of the capture.
    pub(super) hash: Rolling,
    pub(super) names: Arc<CapturedNames>,
}

/// An operation of the step in which this process takes part.
pub(super) struct ReplayedOp {
    /// Position of the operation in the step, from 1.
    pub(super) place: u64,
    pub(super) label: Option<Label>,
    pub(super) at: &'static Location<'static>,
    pub(super) again: Arc<dyn Again>,
    /// The ends of this operation's ranges in the lists of [`ReplayLinks`]. The ranges begin at the
    /// ends of the operation before.
    pub(super) ends: LinkEnds,
}

/// The inputs and outputs of all operations of a step, in the order of the operations. All
/// operations share three lists, so that a replay reads memory in order.
#[derive(Default)]
pub(super) struct ReplayLinks {
    pub(super) inputs: Vec<ReplaySource>,
    /// Results of operations that are stored for later use.
    pub(super) outputs: Vec<KeptOutput>,
    /// Storage slots that are freed after the operation.
    pub(super) drops: Vec<u32>,
}

/// A result of an operation that is stored for later use.
#[derive(Clone, Copy)]
pub(super) struct KeptOutput {
    /// Index of the result among the operation's results.
    pub(super) result: u32,
    /// Storage slot of the result.
    pub(super) place: u32,
}

/// Lengths of the lists of [`ReplayLinks`] at one point of the step.
#[derive(Clone, Copy, Default)]
pub(super) struct LinkEnds {
    inputs: u32,
    outputs: u32,
    drops: u32,
}

impl ReplayLinks {
    /// Returns the present lengths of the three lists.
    pub(super) fn ends(&self) -> LinkEnds {
        LinkEnds {
            inputs: self.inputs.len() as u32,
            outputs: self.outputs.len() as u32,
            drops: self.drops.len() as u32,
        }
    }
}

/// The source of an array that an operation takes in a replay: the index of an input, of an entry
/// of `kept`, or of a storage slot.
#[derive(Clone, Copy)]
pub(super) enum ReplaySource {
    Input(u32),
    Kept(u32),
    Value(u32),
}

/// The source of a result of the step, in a replay.
pub(super) enum ReplayOutcome {
    /// An array that this process has after the replay: an input, a kept array, or one that its
    /// operations made.
    Here {
        source: ReplaySource,
        donated: Option<StepDonation>,
    },
    /// An array that other processes made, so it is fully remote here. `origin` is the array's
    /// origin at capture, which began after operation `before`.
    Remote {
        made: Arc<Made>,
        origin: Origin,
        before: u64,
        donated: Option<StepDonation>,
    },
}

impl ReplayStep {
    pub(super) fn operations(&self) -> u64 {
        self.names.operations
    }

    pub(super) fn operations_here(&self) -> usize {
        self.operations.len()
    }

    /// Returns an error if the step cannot be replayed on these inputs. Issues nothing.
    pub(super) fn check(
        &self,
        program: &Program,
        x: &impl Tree<Leaf = MpmdArray>,
    ) -> Result<(), IssueProblem> {
        if !Arc::ptr_eq(&self.runtime, &program.runtime) {
            return Err(IssueProblem::Foreign {
                path: "the captured step".to_owned(),
            });
        }
        if !x.has_structure(&self.structure) {
            let expected = leaves_of(&self.structure);
            let found = leaves_of(&x.structure());
            return Err(IssueProblem::Captured {
                path: String::new(),
                expected,
                found,
            });
        }

        let x = x.leaves();
        let mut firsts: OriginMap<usize> =
            OriginMap::with_capacity_and_hasher(x.len(), Default::default());
        for (place, (input, leaf)) in self.inputs.iter().zip(&x).enumerate() {
            leaf.check_usable(&input.path)?;
            program.check_own(&input.path, leaf)?;
            if input.aval != *leaf.aval() || input.sharding.as_ref() != leaf.sharding() {
                let expected = describe(&input.aval, input.sharding.as_ref());
                let found = describe(leaf.aval(), leaf.sharding());
                return Err(IssueProblem::Captured {
                    path: input.path.clone(),
                    expected,
                    found,
                });
            }
            let Repr::Placed(placed) = &leaf.repr else {
                continue;
            };
            let first = *firsts.entry(placed.origin()).or_insert(place);
            self.check_same(place, first)?;
        }

        // Checked last: few steps donate an input, and even fewer also use the array from outside.
        let constants = &self.kept[..self.constants];
        constants
            .iter()
            .try_for_each(|constant| constant.check_usable("an array from outside of the step"))?;
        let donated: HashSet<(u64, u32)> = self
            .inputs
            .iter()
            .zip(&x)
            .filter_map(|(input, leaf)| input.donated.and(leaf.origin()))
            .collect();
        if !donated.is_empty()
            && constants
                .iter()
                .filter_map(MpmdArray::origin)
                .any(|key| donated.contains(&key))
        {
            let problem = "an input that the step donates is an array from outside that the step \
                uses as well";
            return Err(IssueProblem::Capture(problem.to_owned()));
        }
        Ok(())
    }

    /// Checks that two inputs which are the same array now may be the same. `first` is the first
    /// input that is the same array as input `place`.
    ///
    /// If input `place` was the same array as another input at capture, that input must be `first`.
    /// If the two were different arrays at capture, the step must donate neither of them.
    fn check_same(&self, place: usize, first: usize) -> Result<(), IssueProblem> {
        let input = &self.inputs[place];
        let twin = &self.inputs[first];

        let known = input.first as usize;
        if known == first {
            return Ok(());
        }
        if known != place {
            return Err(IssueProblem::Capture(format!(
                "{:?} was the same array as {:?} when the step was captured, and is another one",
                input.path, self.inputs[known].path
            )));
        }
        if input.donated.or(twin.donated).is_some() {
            return Err(IssueProblem::Capture(format!(
                "{:?} is the same array as {:?}, and was not when the step was captured, which \
                 donates one of them",
                input.path, twin.path
            )));
        }
        Ok(())
    }

    /// Issues this process's operations of the step, skips the others, and returns the results.
    /// Blocks only at the run-ahead limits and for memory. The inputs must have been checked.
    pub(super) fn run(
        &self,
        program: &mut Program,
        x: &[&MpmdArray],
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        let before = program.operations();
        let (start, values) = self.start(program, x);
        let replaying = Replaying {
            before,
            start,
            values,
            names: self.names.clone(),
            at,
        };
        let end = replaying.hash(self.operations());
        let span: Arc<dyn OpSpan> = Arc::new(replaying);

        let mut values: Vec<Option<MpmdArray>> = vec![None; self.values];
        let label = program.label();
        let mut taken = Vec::new();
        let mut made = Vec::new();
        let mut from = LinkEnds::default();
        for ReplayedOp {
            place,
            label,
            at,
            again,
            ends,
        } in &self.operations
        {
            program.set_label(*label);
            let replayed = Replayed {
                op: before + place,
                span: &span,
            };
            let ReplayLinks {
                inputs,
                outputs,
                drops,
            } = &self.links;
            let mut all: Vec<&MpmdArray> = taken;
            let inputs = &inputs[from.inputs as usize..ends.inputs as usize];
            all.extend(inputs.iter().filter_map(|source| match source {
                ReplaySource::Input(input) => Some(x[*input as usize]),
                ReplaySource::Kept(kept) => Some(&self.kept[*kept as usize]),
                ReplaySource::Value(value) => values[*value as usize].as_ref(),
            }));

            again.clone().again(program, &all, replayed, at, &mut made);
            taken = emptied(all);
            let drops = &drops[from.drops as usize..ends.drops as usize];
            drops
                .iter()
                .for_each(|place| values[*place as usize] = None);
            for output in &outputs[from.outputs as usize..ends.outputs as usize] {
                values[output.place as usize] = made.get(output.result as usize).cloned();
            }
            made.clear();
            from = *ends;
        }
        program.set_label(label);
        program.advance(before + self.operations(), &span);
        program.set_rolling(end);
        self.results(x, &values, before)
    }

    /// Returns the results of a replay after its operations were issued. `values` has the arrays in
    /// the storage slots. `before` is the number of operations issued before the replay.
    fn results(
        &self,
        x: &[&MpmdArray],
        values: &[Option<MpmdArray>],
        before: u64,
    ) -> Vec<MpmdArray> {
        // Marks donated inputs also if another process runs the donating operation, so that every
        // process refuses later uses.
        for (input, leaf) in self.inputs.iter().zip(x) {
            donate(leaf, input.donated, before);
        }

        let result = |outcome: &ReplayOutcome| match outcome {
            ReplayOutcome::Here { source, donated } => {
                let array = match *source {
                    ReplaySource::Input(input) => x[input as usize].clone(),
                    ReplaySource::Kept(kept) => self.kept[kept as usize].clone(),
                    ReplaySource::Value(value) => values[value as usize].clone()?,
                };
                donate(&array, *donated, before);
                Some(array)
            }
            ReplayOutcome::Remote {
                made,
                origin,
                before: captured,
                donated,
            } => {
                let origin = Origin {
                    op: origin.op - captured + before,
                    ..*origin
                };
                let array = Placed::array(made.clone(), Shards::Several(Vec::new()), origin);
                donate(&array, *donated, before);
                Some(array)
            }
        };
        self.outcomes.iter().filter_map(result).collect()
    }

    /// Returns (rolling hash at the start of a replay, hash of the host values among its inputs).
    /// The rolling hash includes the step and its inputs, which must be equal on all processes.
    fn start(&self, program: &mut Program, x: &[&MpmdArray]) -> (Rolling, Option<ValueHashes>) {
        let captured = self.hash.value();
        let step = [
            0x4e97a,
            captured as u64,
            (captured >> 64) as u64,
            self.operations(),
        ];
        let inputs = x.iter().map(|leaf| leaf.word());
        let call = step
            .into_iter()
            .chain(inputs)
            .fold(program.rolling(), Rolling::mix);
        call.mix_values(program.hash_values(x))
    }
}

impl fmt::Display for ReplayStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.operations();
        let here = self.operations_here();
        write!(
            f,
            "{here} of {all} operations here, captured at {}",
            self.names.at
        )
    }
}

fn donate(array: &MpmdArray, donated: Option<StepDonation>, before: u64) {
    if let (Repr::Placed(placed), Some(StepDonation { place, at })) = (&array.repr, donated) {
        placed.donate(before + place, at);
    }
}

/// Describes a tree by the paths of its first 8 leaves.
fn leaves_of(structure: &Structure) -> String {
    let paths = structure.paths();
    let shown = paths.len().min(8);
    let rest = if shown < paths.len() {
        format!(" and {} more", paths.len() - shown)
    } else {
        String::new()
    };
    format!("a tree of {}{rest}", paths[..shown].join(", "))
}

fn describe(aval: &ShapedArray, sharding: Option<&Sharding>) -> String {
    match sharding {
        Some(sharding) => format!("{aval} as {sharding}"),
        None => format!("{aval} uncommitted"),
    }
}
