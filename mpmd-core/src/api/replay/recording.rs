//! The record of a step's operations while it is recorded, and its conversion to a `ReplayStep`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::span::{Name, Names};
use super::step::{Input, Operation, Outcome, ReplayStep, Source};
use crate::api::program::Again;
use crate::error::{IssueProblem, leaf};
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{Rolling, Runtime};
use crate::trace::Label;
use mpmd_layout::tree::Structure;

/// A step that is being recorded.
pub(crate) struct Recording {
    /// The number of operations issued before the step.
    before: u64,
    at: &'static Location<'static>,
    structure: Structure,
    inputs: Vec<Input>,
    /// Input index by origin: the array's operation and result index.
    placed: HashMap<(u64, u32), u32>,
    /// Input index of host values, by the address of their bytes.
    uncommitted: HashMap<usize, u32>,
    /// Keeps those host values alive, so that their addresses are not reused.
    _held: Vec<MpmdArray>,
    /// Arrays from outside the step that are not inputs.
    constants: Vec<MpmdArray>,
    constant: HashMap<(u64, u32), u32>,
    /// Host values, and arrays of the step without a shard on this process.
    others: Vec<MpmdArray>,
    here: Vec<Noted>,
}

/// An operation in which this process takes part.
pub(crate) struct Here {
    what: Arc<dyn fmt::Display + Send + Sync>,
    again: Arc<dyn Again>,
}

struct Noted {
    place: u64,
    label: Option<Label>,
    at: &'static Location<'static>,
    here: Here,
    inputs: Vec<ArrayOrigin>,
}

/// The origin of an operation's array, while the step is recorded.
#[derive(Clone, Copy)]
enum ArrayOrigin {
    Input(u32),
    Constant(u32),
    Other(u32),
    /// The operation at a place of the step, and the index of the result.
    Made(u64, u32),
}

impl Here {
    pub(crate) fn new(what: Arc<dyn fmt::Display + Send + Sync>, again: Arc<dyn Again>) -> Self {
        Self { what, again }
    }
}

impl Recording {
    pub(super) fn new(
        before: u64,
        structure: Structure,
        leaves: &[MpmdArray],
        at: &'static Location<'static>,
    ) -> Self {
        let mut this = Self {
            before,
            at,
            inputs: Vec::with_capacity(leaves.len()),
            placed: HashMap::new(),
            uncommitted: HashMap::new(),
            _held: leaves.iter().filter(|leaf| leaf.sharding().is_none()).cloned().collect(),
            constants: Vec::new(),
            constant: HashMap::new(),
            others: Vec::new(),
            here: Vec::new(),
            structure,
        };
        for (place, (path, leaf)) in this.structure.paths().into_iter().zip(leaves).enumerate() {
            let place = place as u32;
            let first = match &leaf.repr {
                Repr::Placed(placed) => *this.placed.entry(placed.origin()).or_insert(place),
                Repr::Host(host) => {
                    // Empty values have no address to recognize them by.
                    if !host.bytes().is_empty() {
                        this.uncommitted.insert(host.bytes().as_ptr() as usize, place);
                    }
                    place
                }
            };
            let (aval, sharding) = (leaf.aval().clone(), leaf.sharding().cloned());
            this.inputs.push(Input { path, aval, sharding, first, donated: None });
        }
        this
    }

    /// Returns the line that records the step.
    pub(super) fn at(&self) -> &'static Location<'static> {
        self.at
    }

    /// Refuses to donate an array from outside that is not an input of the step.
    pub(crate) fn check_given_up(&self, path: &str, array: &MpmdArray) -> Result<(), IssueProblem> {
        let Repr::Placed(placed) = &array.repr else { return Ok(()) };
        let origin = placed.origin();
        if origin.0 > self.before || self.placed.contains_key(&origin) {
            return Ok(());
        }
        let problem = "is donated by a step that is recorded, but is neither made by it nor an \
            input of it: a replay \
                       would find it gone; make it an input";
        Err(IssueProblem::Recording(format!("{}{} {problem}", leaf(path), placed.describe())))
    }

    /// Records an operation that was issued. `here` is given if this process takes part in it.
    pub(crate) fn note(
        &mut self,
        op: u64,
        (label, at): (Option<Label>, &'static Location<'static>),
        inputs: &[&MpmdArray],
        donated: impl Fn(usize) -> bool,
        here: Option<Here>,
    ) {
        let place = op - self.before;
        let mut found = Vec::with_capacity(if here.is_some() { inputs.len() } else { 0 });
        for (i, input) in inputs.iter().enumerate() {
            let source = self.find(input, here.is_some());
            if let Some(ArrayOrigin::Input(input)) = source
                && donated(i)
            {
                self.inputs[input as usize].donated.get_or_insert((place, at));
            }
            found.extend(source.filter(|_| here.is_some()));
        }
        if let Some(here) = here {
            self.here.push(Noted { place, label, at, here, inputs: found });
        }
    }

    /// Finds the origin of an array. Keeps arrays from outside, and arrays without another source
    /// if they are `needed`.
    fn find(&mut self, array: &MpmdArray, needed: bool) -> Option<ArrayOrigin> {
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
            let elsewhere = placed.shards.is_empty() && placed.made.runtime.recorder.is_none();
            return match needed && elsewhere {
                true => Some(self.other(array)),
                false => Some(ArrayOrigin::Made(origin.0 - self.before, origin.1)),
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

    fn other(&mut self, array: &MpmdArray) -> ArrayOrigin {
        self.others.push(array.clone());
        ArrayOrigin::Other(self.others.len() as u32 - 1)
    }

    /// Returns the recorded step with these results.
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
        let (mut operations, values, of_results) = self.place_values(&found);
        let constants = self.constants.len();
        let kept = |found: ArrayOrigin| match found {
            ArrayOrigin::Input(input) => Some(Source::Input(input)),
            ArrayOrigin::Constant(constant) => Some(Source::Kept(constant)),
            ArrayOrigin::Other(other) => Some(Source::Kept(constants as u32 + other)),
            ArrayOrigin::Made(..) => None,
        };
        for (operation, noted) in operations.iter_mut().zip(&self.here) {
            for (source, found) in operation.inputs.iter_mut().zip(&noted.inputs) {
                *source = kept(*found).unwrap_or(*source);
            }
        }
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
                (source, _) => Outcome::Here { source: source.unwrap_or(Source::Kept(0)), donated },
            }
        };
        let outcomes = results.iter().zip(&found).zip(&of_results).map(outcome).collect();
        let name = |noted: &Noted| Name {
            place: noted.place,
            what: noted.here.what.clone(),
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
            values,
            outcomes,
            hash,
            names: Arc::new(names),
        }
    }

    /// Assigns a storage place to each array that an operation makes and a later one or a result
    /// needs. A place is reused after the last use. Returns the operations, the number of places,
    /// and the places of the results.
    fn place_values(&self, results: &[ArrayOrigin]) -> (Vec<Operation>, usize, Vec<Option<u32>>) {
        let maker = |place: u64| self.here.binary_search_by_key(&place, |noted| noted.place).ok();
        let value = |found: &ArrayOrigin| match found {
            ArrayOrigin::Made(place, leaf) => maker(*place).map(|maker| (maker, *leaf)),
            _ => None,
        };
        let mut last: HashMap<(usize, u32), usize> = HashMap::new();
        for (user, noted) in self.here.iter().enumerate() {
            last.extend(noted.inputs.iter().filter_map(value).map(|made| (made, user)));
        }
        last.extend(results.iter().filter_map(value).map(|made| (made, usize::MAX)));
        let mut makes: Vec<Vec<u32>> = vec![Vec::new(); self.here.len()];
        last.keys().for_each(|(maker, leaf)| makes[*maker].push(*leaf));
        let mut places: HashMap<(usize, u32), u32> = HashMap::new();
        let (mut free, mut count) = (Vec::new(), 0);
        let mut operations = Vec::with_capacity(self.here.len());
        for (index, (noted, mut leaves)) in self.here.iter().zip(makes).enumerate() {
            leaves.sort_unstable();
            let mut drops = Vec::new();
            let inputs = noted.inputs.iter().map(|input| match value(input) {
                Some(made) => {
                    let place = places[&made];
                    if last[&made] == index && !drops.contains(&place) {
                        drops.push(place);
                    }
                    Source::Value(place)
                }
                None => Source::Kept(0),
            });
            let inputs = inputs.collect();
            let mut next = || {
                free.pop().unwrap_or_else(|| {
                    count += 1;
                    count - 1
                })
            };
            let outputs: Vec<(u32, u32)> = leaves.into_iter().map(|leaf| (leaf, next())).collect();
            places.extend(outputs.iter().map(|(leaf, place)| ((index, *leaf), *place)));
            free.extend(&drops);
            let (place, label, at) = (noted.place, noted.label, noted.at);
            let again = noted.here.again.clone();
            operations.push(Operation { place, label, at, again, inputs, outputs, drops });
        }
        let of_results =
            results.iter().map(|found| value(found).map(|made| places[&made])).collect();
        (operations, count as usize, of_results)
    }
}
