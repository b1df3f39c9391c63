//! Conversion of a capture to a `ReplayStep`.

use std::collections::HashMap;
use std::sync::Arc;

use super::span::{CapturedName, CapturedNames};
use super::step::{KeptOutput, ReplayLinks, ReplayOutcome, ReplaySource, ReplayStep, ReplayedOp};
use crate::api::program::{ArrayOrigin, Capture, CapturedOp, StepDonation};
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{Rolling, Runtime};

impl Capture {
    /// Converts the capture to a replayable step with these results. `issued` is the number of the
    /// step's last operation, and `hash` the rolling hash after it.
    pub(super) fn finish(
        mut self,
        runtime: &Arc<Runtime>,
        results: &[&MpmdArray],
        issued: u64,
        hash: Rolling,
    ) -> ReplayStep {
        let found: Vec<ArrayOrigin> = results
            .iter()
            .map(|result| match self.find(result, false) {
                Some(found) => found,
                None => self.other(result),
            })
            .collect();
        let constants = self.constants.len();
        let kept = |found: ArrayOrigin| match found {
            ArrayOrigin::Input(input) => Some(ReplaySource::Input(input)),
            ArrayOrigin::Constant(constant) => Some(ReplaySource::Kept(constant)),
            ArrayOrigin::Other(other) => Some(ReplaySource::Kept(constants as u32 + other)),
            ArrayOrigin::Made { .. } => None,
        };
        let placed = self.place_values(&found, kept);

        let outcome = |((result, found), value): ((&&MpmdArray, &ArrayOrigin), &Option<u32>)| {
            let source = kept(*found).or(value.map(ReplaySource::Value));
            let donated = match &result.repr {
                Repr::Placed(placed) if placed.origin().0 > self.before => {
                    placed.donated_to().map(|(op, at)| StepDonation {
                        place: op - self.before,
                        at,
                    })
                }
                _ => None,
            };
            match (source, &result.repr) {
                (None, Repr::Placed(placed)) => {
                    let origin = placed.origin;
                    ReplayOutcome::Remote {
                        made: placed.made.clone(),
                        origin,
                        before: self.before,
                        donated,
                    }
                }
                (source, _) => ReplayOutcome::Here {
                    source: source.unwrap_or(ReplaySource::Kept(0)),
                    donated,
                },
            }
        };
        let outcomes = results
            .iter()
            .zip(&found)
            .zip(&placed.of_results)
            .map(outcome)
            .collect();

        let name = |noted: &CapturedOp| CapturedName {
            place: noted.place,
            what: noted.what.clone(),
            label: noted.label,
            at: noted.at,
        };
        let names = CapturedNames {
            operations: issued - self.before,
            at: self.at,
            here: self.here.iter().map(name).collect(),
        };

        self.constants.append(&mut self.others);
        ReplayStep {
            runtime: runtime.clone(),
            structure: self.structure,
            inputs: self.inputs,
            kept: self.constants,
            constants,
            operations: placed.operations,
            links: placed.links,
            values: placed.count,
            outcomes,
            hash,
            names: Arc::new(names),
        }
    }

    /// Assigns a storage slot to each array that an operation makes and that a later operation or a
    /// result needs. A slot is reused after its array's last use. `kept` returns the source of any
    /// array that is not made by the step.
    fn place_values(
        &self,
        results: &[ArrayOrigin],
        kept: impl Fn(ArrayOrigin) -> Option<ReplaySource>,
    ) -> PlacedValues {
        let maker = |place: u64| {
            self.here
                .binary_search_by_key(&place, |noted| noted.place)
                .ok()
        };
        let value = |found: &ArrayOrigin| match found {
            ArrayOrigin::Made { place, index } => maker(*place).map(|maker| MadeValue {
                maker,
                leaf: *index,
            }),
            _ => None,
        };
        let last = self.last_uses(results, value);
        let mut makes: Vec<Vec<u32>> = vec![Vec::new(); self.here.len()];
        last.keys()
            .for_each(|made| makes[made.maker].push(made.leaf));

        let mut places: HashMap<MadeValue, u32> = HashMap::new();
        let mut free = Vec::new();
        let mut count = 0;
        let mut operations = Vec::with_capacity(self.here.len());
        let mut links = ReplayLinks::default();
        for (index, (noted, mut leaves)) in self.here.iter().zip(makes).enumerate() {
            leaves.sort_unstable();
            let mut drops = Vec::new();
            links
                .inputs
                .extend(noted.inputs.iter().map(|input| match value(input) {
                    Some(made) => {
                        let place = places[&made];
                        if last[&made] == index && !drops.contains(&place) {
                            drops.push(place);
                        }
                        ReplaySource::Value(place)
                    }
                    None => kept(*input).unwrap_or(ReplaySource::Kept(0)),
                }));

            // The outputs get places before those of this operation's inputs are free.
            let mut next = || {
                free.pop().unwrap_or_else(|| {
                    count += 1;
                    count - 1
                })
            };
            for leaf in leaves {
                let place = next();
                places.insert(MadeValue { maker: index, leaf }, place);
                links.outputs.push(KeptOutput {
                    result: leaf,
                    place,
                });
            }
            free.extend(&drops);
            links.drops.extend(drops);
            operations.push(ReplayedOp {
                place: noted.place,
                label: noted.label,
                at: noted.at,
                again: noted.again.clone(),
                ends: links.ends(),
            });
        }

        let of_results = results
            .iter()
            .map(|found| value(found).map(|made| places[&made]))
            .collect();
        PlacedValues {
            operations,
            links,
            count: count as usize,
            of_results,
        }
    }

    /// For each array that an operation makes, returns the index in `here` of the last operation
    /// that takes it. The index is `usize::MAX` if the array is a result of the step.
    fn last_uses(
        &self,
        results: &[ArrayOrigin],
        value: impl Fn(&ArrayOrigin) -> Option<MadeValue>,
    ) -> HashMap<MadeValue, usize> {
        let mut last = HashMap::new();
        for (user, noted) in self.here.iter().enumerate() {
            let made = noted.inputs.iter().filter_map(&value);
            last.extend(made.map(|made| (made, user)));
        }
        let made = results.iter().filter_map(&value);
        last.extend(made.map(|made| (made, usize::MAX)));
        last
    }
}

/// An array that the step makes: the index in `here` of the operation that makes it, and its index
/// among that operation's results.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
struct MadeValue {
    maker: usize,
    leaf: u32,
}

/// The storage slots of the arrays that a step makes.
struct PlacedValues {
    operations: Vec<ReplayedOp>,
    /// The inputs and outputs of the operations.
    links: ReplayLinks,
    /// The number of storage slots.
    count: usize,
    /// The slot of each result of the step. `None` for a result that no operation of this process
    /// makes.
    of_results: Vec<Option<u32>>,
}
