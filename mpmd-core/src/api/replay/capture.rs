//! Conversion of a capture to a `ReplayStep`.

use std::collections::HashMap;
use std::sync::Arc;

use super::span::{Name, Names};
use super::step::{Links, Operation, Outcome, ReplayStep, Source};
use crate::api::program::{ArrayOrigin, Capture, Noted};
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{Rolling, Runtime};

impl Capture {
    /// Converts the capture to a step that can be replayed, with these results. `issued` is the
    /// number of the step's last operation, and `hash` the rolling hash after it.
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
            ArrayOrigin::Input(input) => Some(Source::Input(input)),
            ArrayOrigin::Constant(constant) => Some(Source::Kept(constant)),
            ArrayOrigin::Other(other) => Some(Source::Kept(constants as u32 + other)),
            ArrayOrigin::Made(..) => None,
        };
        let (operations, links, values, of_results) = self.place_values(&found, kept);
        let outcome = |((result, found), value): ((&&MpmdArray, &ArrayOrigin), &Option<u32>)| {
            let source = kept(*found).or(value.map(Source::Value));
            let donated = match &result.repr {
                Repr::Placed(placed) if placed.origin().0 > self.before => {
                    placed.donated_to().map(|(op, at)| (op - self.before, at))
                }
                _ => None,
            };
            match (source, &result.repr) {
                (None, Repr::Placed(placed)) => {
                    let origin = placed.origin;
                    Outcome::Remote {
                        made: placed.made.clone(),
                        origin,
                        before: self.before,
                        donated,
                    }
                }
                (source, _) => Outcome::Here {
                    source: source.unwrap_or(Source::Kept(0)),
                    donated,
                },
            }
        };
        let outcomes = results
            .iter()
            .zip(&found)
            .zip(&of_results)
            .map(outcome)
            .collect();
        let name = |noted: &Noted| Name {
            place: noted.place,
            what: noted.what.clone(),
            label: noted.label,
            at: noted.at,
        };
        let names = Names {
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
            operations,
            links,
            values,
            outcomes,
            hash,
            names: Arc::new(names),
        }
    }

    /// Assigns a storage place to each array that an operation makes and a later one or a result
    /// needs. A place is reused after the last use. `kept` returns the source of any other array.
    /// Returns (the operations, their inputs and outputs, the number of places, the place of each
    /// result). The place is `None` for a result that no operation here makes.
    fn place_values(
        &self,
        results: &[ArrayOrigin],
        kept: impl Fn(ArrayOrigin) -> Option<Source>,
    ) -> (Vec<Operation>, Links, usize, Vec<Option<u32>>) {
        let maker = |place: u64| {
            self.here
                .binary_search_by_key(&place, |noted| noted.place)
                .ok()
        };
        let value = |found: &ArrayOrigin| match found {
            ArrayOrigin::Made(place, leaf) => maker(*place).map(|maker| (maker, *leaf)),
            _ => None,
        };
        let mut last: HashMap<(usize, u32), usize> = HashMap::new();
        for (user, noted) in self.here.iter().enumerate() {
            last.extend(
                noted
                    .inputs
                    .iter()
                    .filter_map(value)
                    .map(|made| (made, user)),
            );
        }
        last.extend(
            results
                .iter()
                .filter_map(value)
                .map(|made| (made, usize::MAX)),
        );
        let mut makes: Vec<Vec<u32>> = vec![Vec::new(); self.here.len()];
        last.keys()
            .for_each(|(maker, leaf)| makes[*maker].push(*leaf));
        let mut places: HashMap<(usize, u32), u32> = HashMap::new();
        let (mut free, mut count) = (Vec::new(), 0);
        let mut operations = Vec::with_capacity(self.here.len());
        let mut links = Links::default();
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
                        Source::Value(place)
                    }
                    None => kept(*input).unwrap_or(Source::Kept(0)),
                }));
            let mut next = || {
                free.pop().unwrap_or_else(|| {
                    count += 1;
                    count - 1
                })
            };
            let outputs: Vec<(u32, u32)> = leaves.into_iter().map(|leaf| (leaf, next())).collect();
            places.extend(outputs.iter().map(|(leaf, place)| ((index, *leaf), *place)));
            free.extend(&drops);
            links.outputs.extend(outputs);
            links.drops.extend(drops);
            let (place, label, at) = (noted.place, noted.label, noted.at);
            let (again, ends) = (noted.again.clone(), links.ends());
            operations.push(Operation {
                place,
                label,
                at,
                again,
                ends,
            });
        }
        let of_results = results
            .iter()
            .map(|found| value(found).map(|made| places[&made]))
            .collect();
        (operations, links, count as usize, of_results)
    }
}
