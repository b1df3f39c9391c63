//! Stages and what goes between them, with their types erased.

use std::sync::Arc;

use super::kernels::AddArrays;
use super::links::Feed;
use super::wired::AnyStage;
use crate::array::MpmdArray;
use crate::error::{Error, Result};
use crate::jit::Jit;
use crate::program::{Label, Program, Role};

/// The stages of a pipeline, and how it is run.
pub(super) struct Net {
    pub(super) stages: Vec<Box<dyn AnyStage>>,
    /// From where each stage has its input.
    pub(super) feeds: Vec<Feed>,
    /// Who reads the outputs of each stage: a later stage, and the part of its input; ascending.
    pub(super) readers: Vec<Vec<(usize, usize)>>,
    pub(super) ties: Vec<Tie>,
    /// Which stages compute their forward pass again for the backward one.
    pub(super) recomputes: Vec<bool>,
    /// Whether weight gradients are computed in ascending order of microbatches, whatever the schedule says.
    pub(super) ascending: bool,
    /// Tells this pipeline's outputs from those of others.
    pub(super) identity: Arc<()>,
    /// For each stage what adds up gradients of its outputs, once there was something to add.
    adders: Vec<Option<Jit<AddArrays>>>,
}

/// A parameter that one stage stores and another uses.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Tie {
    /// The stage that stores it, and which of its parameters it is.
    pub(super) owner: (usize, usize),
    /// The stage that uses it, and as which of its parameters.
    pub(super) user: (usize, usize),
}

/// Says what the operations that follow are for.
pub(super) fn label(program: &mut Program, (stage, microbatch): (usize, Option<usize>), role: Role) {
    let microbatch = microbatch.map(|microbatch| microbatch as u32);
    program.set_label(Some(Label { stage: stage as u32, microbatch, role }));
}

impl Net {
    /// A pipeline of one stage.
    pub(super) fn new(first: Box<dyn AnyStage>) -> Self {
        Self {
            stages: vec![first],
            feeds: vec![Feed::of_pipeline()],
            readers: vec![Vec::new()],
            ties: Vec::new(),
            recomputes: vec![false],
            ascending: false,
            identity: Arc::new(()),
            adders: vec![None],
        }
    }

    /// One stage more, which takes that.
    pub(super) fn push(&mut self, stage: Box<dyn AnyStage>, feed: Feed) {
        let index = self.stages.len();
        for (part, from) in feed.parts.iter().enumerate() {
            self.readers[from.stage].push((index, part));
        }
        self.stages.push(stage);
        self.feeds.push(feed);
        self.readers.push(Vec::new());
        self.recomputes.push(false);
        self.adders.push(None);
    }

    /// Has a stage use another's parameter in place of its own.
    pub(super) fn tie(&mut self, owner: (usize, &str), user: (usize, &str)) -> Result<()> {
        let place = |(stage, path): (usize, &str)| {
            let problem = || format!("there is no stage {stage} to tie parameter {path:?} of");
            let found = self.stages.get(stage).ok_or_else(|| Error::kernel(problem()))?;
            let paths = found.paths();
            paths.iter().position(|known| known == path).ok_or_else(|| {
                let (name, known) = (found.name(), paths.join(", "));
                Error::kernel(format!("stage {stage}, {name}, has no parameter {path:?}; it has {known}"))
            })
        };
        let tie = Tie { owner: (owner.0, place(owner)?), user: (user.0, place(user)?) };
        if tie.owner.0 == tie.user.0 {
            let problem = format!("parameters {:?} and {:?} of one stage cannot be tied", owner.1, user.1);
            return Err(Error::kernel(problem));
        }
        for ((stage, path), (_, place)) in [(owner, tie.owner), (user, tie.user)] {
            if self.stages[stage].param(place).is_none() {
                let problem = format!("parameter {path:?} of stage {stage} is tied to another already");
                return Err(Error::kernel(problem));
            }
        }
        if self.ties.iter().any(|known| known.owner == tie.user) {
            let problem = format!("other stages use parameter {:?} of stage {}", user.1, user.0);
            return Err(Error::kernel(problem));
        }
        let [kept, other] = [tie.owner, tie.user].map(|(stage, place)| &self.stages[stage].place(place).aval);
        if kept != other {
            return Err(Error::kernel(format!(
                "parameter {:?} of stage {} is {kept}, {:?} of stage {} is {other}: they cannot be tied",
                owner.1, owner.0, user.1, user.0
            )));
        }
        self.stages[tie.user.0].give_up(tie.user.1);
        self.ties.push(tie);
        self.ties.sort_unstable();
        Ok(())
    }

    /// Has a stage's parameters ready for its kernels, until they are released.
    pub(super) fn gather(&mut self, program: &mut Program, stage: usize) -> Result<()> {
        if self.stages[stage].is_gathered() {
            return Ok(());
        }
        label(program, (stage, None), Role::Gather);
        let used = self.ties.iter().filter(|tie| tie.user.0 == stage);
        let tied =
            used.filter_map(|tie| Some((tie.user.1, self.stages[tie.owner.0].param(tie.owner.1)?.clone())));
        let tied = tied.collect();
        self.stages[stage].gather(program, tied)
    }

    /// Forgets what a step that failed has left.
    pub(super) fn release(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.release());
    }

    /// Adds up arrays that are sharded as the outputs of a stage, in their order.
    pub(super) fn add_outputs(
        &mut self,
        program: &mut Program,
        stage: usize,
        arrays: Vec<MpmdArray>,
    ) -> Result<MpmdArray> {
        let mut arrays = arrays.into_iter();
        let none = || Error::kernel(format!("no gradient of an output of stage {stage}"));
        let first = arrays.next().ok_or_else(none)?;
        let (at, adder) = (&self.stages[stage], &mut self.adders[stage]);
        let mut sum = first;
        for more in arrays {
            let adder = match adder {
                Some(adder) => adder,
                None => adder
                    .insert(program.jit(AddArrays).on(at.mesh()).outputs(at.output()).donate("0").build()?),
            };
            sum = adder.call(program, (sum, more))?;
        }
        Ok(sum)
    }
}
