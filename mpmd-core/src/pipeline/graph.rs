//! The stages of a pipeline and the links between them, with their types erased.

use std::sync::Arc;

use super::bound_stage::{BoundStage, TiedParam};
use super::erased::ErasedStage;
use super::kernels::AddArrays;
use super::links::StageFeed;
use super::prepare::Freshness;
use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{Structure, TreeError};
use mpmd_record::trace::{Label, Role};
use mpmd_schedule::Schedule;

/// The stages of a pipeline, their links, and the options of its runs.
pub(super) struct StageGraph {
    pub(super) stages: Vec<BoundStage>,
    /// For each stage, the earlier outputs that form its input.
    pub(super) feeds: Vec<StageFeed>,
    /// For each stage, the parts of later stages' inputs that read its outputs, in ascending order.
    pub(super) readers: Vec<Vec<InputPart>>,
    pub(super) ties: Vec<Tie>,
    /// For each stage, true if it runs its forward pass again before the backward pass.
    pub(super) recomputes: Vec<bool>,
    /// True if weight gradients are computed in ascending order of microbatches, even if the
    /// schedule has another order.
    pub(super) ascending: bool,
    /// For each stage, true if it runs backward passes: it has trained parameters, or reads a stage
    /// that runs backward passes.
    pub(super) trains: Vec<bool>,
    /// The first stage that must not be trained; `None` if every stage may be. If it is set, the
    /// pipeline runs forward passes only.
    pub(super) untrained_from: Option<usize>,
    /// The identity of this pipeline, which also marks its [`StageOutput`](super::StageOutput)s.
    pub(super) identity: Arc<()>,
    /// For each stage, the kernel that adds up gradients of its outputs; built at first use.
    adders: Vec<Option<Jit<AddArrays>>>,
}

/// A part of a stage's input. Parts are ordered by stage, then by part.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct InputPart {
    pub(super) stage: usize,
    /// Index of the part among the parts of the stage's input.
    pub(super) part: usize,
}

/// A parameter of a stage. Parameters are ordered by stage, then by leaf index.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct StageParam {
    pub(super) stage: usize,
    /// Index of the parameter among the leaves of the stage's parameters.
    pub(super) place: usize,
}

/// A pair of tied parameters: one stage stores the parameter and another uses it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Tie {
    /// The parameter in the stage that stores the values.
    pub(super) owner: StageParam,
    /// The parameter that is replaced by `owner`'s values.
    pub(super) user: StageParam,
}

/// Sets the label of the operations that the program issues from now on. `microbatch` is `None` for
/// operations that belong to no single microbatch.
pub(super) fn label(program: &mut Program, stage: usize, microbatch: Option<usize>, role: Role) {
    let microbatch = microbatch.map(|microbatch| microbatch as u32);
    program.set_label(Some(Label {
        stage: stage as u32,
        microbatch,
        role,
    }));
}

/// Formats a stage's number and name for messages.
pub(super) fn named(stage: usize, name: &str) -> String {
    format!("stage {stage} `{name}`")
}

/// The reason why the side inputs of a microbatch do not fit the stages. Messages show the stages'
/// numbers and names.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum SideError {
    /// The microbatch has a side input for a stage that does not exist.
    #[error(
        "a side input is for stage {stage}, and there is no stage {stage}; the pipeline has \
         stages 0 to {last}"
    )]
    NoStage { stage: usize, last: usize },
    /// The microbatch has no side input for a stage that takes one.
    #[error("{named} needs a side input: call `.side({stage}, …)`")]
    Missing { named: String, stage: usize },
    /// The microbatch has a side input for a stage that takes none.
    #[error("{named} takes no side input: leave out `.side({stage}, …)`")]
    Unexpected { named: String, stage: usize },
    /// The side input of a stage has another tree structure than the stage declares.
    #[error(
        "the side input of {named} is not the tree that it takes: {why}; see `.side({stage}, …)`"
    )]
    OtherTree {
        named: String,
        stage: usize,
        why: TreeError,
    },
}

impl StageGraph {
    pub(super) fn new(first: BoundStage) -> Self {
        let mut graph = Self {
            stages: vec![first],
            feeds: vec![StageFeed::of_pipeline()],
            readers: vec![Vec::new()],
            ties: Vec::new(),
            recomputes: vec![false],
            ascending: false,
            trains: Vec::new(),
            untrained_from: None,
            identity: Arc::new(()),
            adders: vec![None],
        };
        graph.find_trained();
        graph
    }

    /// Returns a new graph of the same stages with `last` instead of the last one. The graph has a
    /// new identity and default run options.
    pub(super) fn with_last(&self, last: Arc<dyn ErasedStage>) -> Result<Self> {
        let count = self.stages.len();
        let mut last = Some(last);
        let mut stages = Vec::with_capacity(count);
        for (index, stage) in self.stages.iter().enumerate() {
            let other = if index + 1 == count {
                last.take()
            } else {
                None
            };
            stages.push(stage.again(other).map_err(|why| self.at(index, &why))?);
        }

        let mut graph = Self {
            stages,
            feeds: self.feeds.clone(),
            readers: self.readers.clone(),
            ties: self.ties.clone(),
            recomputes: vec![false; count],
            ascending: false,
            trains: Vec::new(),
            untrained_from: Some(count - 1),
            identity: Arc::new(()),
            adders: (0..count).map(|_| None).collect(),
        };

        // The stages before it are shared with the trained pipeline, and stay as they are.
        graph.find_trained();
        Ok(graph)
    }

    /// Appends a stage that reads its input from `feed`.
    pub(super) fn push(&mut self, stage: BoundStage, feed: StageFeed) {
        let index = self.stages.len();
        for (part, from) in feed.parts.iter().enumerate() {
            self.readers[from.stage].push(InputPart { stage: index, part });
        }
        self.stages.push(stage);
        self.feeds.push(feed);
        self.readers.push(Vec::new());
        self.recomputes.push(false);
        self.adders.push(None);
        self.find_trained();
    }

    /// Updates `trains`, the stages that run backward passes, and tells each stage if it needs its
    /// input gradient.
    fn find_trained(&mut self) {
        self.trains.clear();
        for (index, (stage, feed)) in self.stages.iter_mut().zip(&self.feeds).enumerate() {
            let may_train = self.untrained_from.is_none_or(|from| index < from);
            let needs_dx = may_train && feed.parts.iter().any(|part| self.trains[part.stage]);
            stage.set_needs_dx(needs_dx);
            self.trains
                .push(needs_dx || may_train && stage.frozen().contains(&false));
        }
    }

    /// Returns an error if the pipeline can only run forward passes.
    pub(super) fn check_trains(&self) -> Result<()> {
        match self.untrained_from {
            None => Ok(()),
            Some(_) => Err(Error::kernel(
                "a pipeline made by `with_last` is not trained: call `forward` or `forward_all`",
            )),
        }
    }

    /// Returns true if stage `stage` has parameters that are trained.
    pub(super) fn has_trained(&self, stage: usize) -> bool {
        self.stages[stage].frozen().contains(&false)
    }

    /// Formats a stage's number and name for messages, even if the stage does not exist.
    pub(super) fn named(&self, stage: usize) -> String {
        self.stages.get(stage).map_or_else(
            || format!("stage {stage}"),
            |known| named(stage, known.name()),
        )
    }

    /// Returns the stage with index `stage`.
    ///
    /// # Panics
    ///
    /// If no stage has that number.
    #[track_caller]
    pub(super) fn stage(&self, stage: usize) -> &BoundStage {
        match self.stages.get(stage) {
            Some(stage) => stage,
            None => panic!("{}", self.no_stage(stage)),
        }
    }

    /// Calls `change` on stage `stage`. Errors get the stage's name. Fails if the stage does not
    /// exist.
    pub(super) fn change(
        &mut self,
        stage: usize,
        change: impl FnOnce(&mut BoundStage) -> Result<()>,
    ) -> Result<()> {
        let Some(known) = self.stages.get_mut(stage) else {
            return Err(Error::kernel(self.no_stage(stage)));
        };
        change(known).map_err(|why| self.at(stage, &why))
    }

    /// Prefixes an error with the number and name of the stage.
    pub(super) fn at(&self, stage: usize, why: &Error) -> Error {
        Error::kernel(format!("{}: {why}", self.named(stage)))
    }

    fn no_stage(&self, stage: usize) -> String {
        format!(
            "there is no stage {stage}; the pipeline has stages 0 to {}",
            self.stages.len() - 1
        )
    }

    /// Checks that each stage gets the side input that it takes. `sides` has (stage, structure) of
    /// the side inputs of one microbatch.
    pub(super) fn check_sides<'a>(
        &self,
        sides: impl Iterator<Item = (usize, &'a Structure)> + Clone,
    ) -> Result<(), SideError> {
        let stages = sides.clone().map(|(stage, _)| stage);
        if let Some(beyond) = stages.filter(|stage| *stage >= self.stages.len()).min() {
            return Err(SideError::NoStage {
                stage: beyond,
                last: self.stages.len() - 1,
            });
        }

        for (index, stage) in self.stages.iter().enumerate() {
            let side = sides
                .clone()
                .find_map(|(of, side)| (of == index).then_some(side));
            let Err(why) = stage.check_side(side) else {
                continue;
            };

            let named = self.named(index);
            return Err(match (side, why) {
                (None, _) => SideError::Missing {
                    named,
                    stage: index,
                },
                (Some(_), TreeError::Structure { path, expected, .. })
                    if path.is_empty() && expected == Structure::sequence([]).to_string() =>
                {
                    SideError::Unexpected {
                        named,
                        stage: index,
                    }
                }
                (Some(_), why) => SideError::OtherTree {
                    named,
                    stage: index,
                    why,
                },
            });
        }
        Ok(())
    }

    /// Returns an error if the schedule's number of stages differs from the pipeline's.
    pub(super) fn check_stages(&self, schedule: &Schedule) -> Result<()> {
        let expected = schedule.stages();
        let stages = self.stages.len();
        if expected == stages {
            return Ok(());
        }

        let name = schedule.name();
        let ranks = schedule.ranks();
        Err(Error::kernel(format!(
            "schedule {name} is for {expected} stages (on {ranks} ranks), and the pipeline has \
             {stages} stages: make a \
             schedule whose ranks times stages on each rank are {stages}"
        )))
    }

    /// Makes the stage `user` use a parameter of the stage `owner` instead of its own. Both
    /// arguments are (stage, path of the parameter).
    pub(super) fn tie(&mut self, owner: (usize, &str), user: (usize, &str)) -> Result<()> {
        let tie = Tie {
            owner: self.find_param(owner.0, owner.1)?,
            user: self.find_param(user.0, user.1)?,
        };
        self.check_tie(tie)?;

        let Tie { owner, user } = tie;
        let frozen = self.stages[owner.stage].frozen()[owner.place];
        self.change(user.stage, |stage| stage.give_up(user.place, frozen))?;
        self.find_trained();
        self.ties.push(tie);
        self.ties.sort_unstable();
        Ok(())
    }

    /// Finds a parameter of a stage by its path. Fails if there is no such parameter.
    fn find_param(&self, stage: usize, path: &str) -> Result<StageParam> {
        let found = self
            .stages
            .get(stage)
            .ok_or_else(|| Error::kernel(self.no_stage(stage)))?;
        let paths = found.paths();
        if let Some(place) = paths.iter().position(|known| known == path) {
            return Ok(StageParam { stage, place });
        }

        let known = paths
            .iter()
            .map(|path| format!("{path:?}"))
            .collect::<Vec<_>>()
            .join(", ");
        let known = if known.is_empty() { "none" } else { &known };
        Err(Error::kernel(format!(
            "{} has no parameter {path:?}; it has {known}",
            self.named(stage)
        )))
    }

    /// Returns an error if the two parameters cannot be tied.
    fn check_tie(&self, tie: Tie) -> Result<()> {
        let Tie { owner, user } = tie;
        let path = |param: StageParam| self.stages[param.stage].paths().swap_remove(param.place);
        if owner.stage == user.stage {
            let stage = self.named(owner.stage);
            let problem = format!(
                "parameters {:?} and {:?} of one stage cannot be tied: both are of {stage}",
                path(owner),
                path(user)
            );
            return Err(Error::kernel(problem));
        }

        // Values must not pass through two ties.
        for param in [owner, user] {
            if self.stages[param.stage].param(param.place).is_none() {
                let problem = format!(
                    "parameter {:?} of {} is tied to another already",
                    path(param),
                    self.named(param.stage)
                );
                return Err(Error::kernel(problem));
            }
        }
        if self.ties.iter().any(|known| known.owner == user) {
            let problem = format!(
                "other stages use parameter {:?} of {}: tie these to the new owner instead",
                path(user),
                self.named(user.stage)
            );
            return Err(Error::kernel(problem));
        }

        let [kept, other] =
            [owner, user].map(|param| &self.stages[param.stage].place(param.place).aval);
        if kept != other {
            return Err(Error::kernel(format!(
                "parameter {:?} of {} is {kept}, {:?} of {} is {other}: only equal shapes and \
                 dtypes can be tied",
                path(owner),
                self.named(owner.stage),
                path(user),
                self.named(user.stage)
            )));
        }
        Ok(())
    }

    /// Returns the sharding in which a parameter is stored.
    pub(super) fn stored_sharding(&self, param: StageParam) -> &Sharding {
        &self.stages[param.stage].place(param.place).sharding
    }

    /// Replaces the parameters that a stage stores.
    pub(super) fn set_params(&mut self, stage: usize, params: Vec<MpmdArray>) -> Result<()> {
        self.change(stage, |stage| stage.set_params(params))?;
        for tie in self.ties.iter().filter(|tie| tie.owner.stage == stage) {
            self.stages[tie.user.stage].set_stale(true);
        }
        Ok(())
    }

    /// Gathers a stage's parameters for its kernels if necessary, and brings their working form up
    /// to date. The gathered copies stay until `release`.
    pub(super) fn make_ready(&mut self, program: &mut Program, stage: usize) -> Result<()> {
        self.gather(program, stage)?;
        if self.stages[stage].freshness() == Freshness::Fresh {
            return Ok(());
        }
        label(program, stage, None, Role::Prepare);
        self.stages[stage].prepare(program)
    }

    fn gather(&mut self, program: &mut Program, stage: usize) -> Result<()> {
        if self.stages[stage].is_gathered() {
            return Ok(());
        }

        label(program, stage, None, Role::Gather);
        let used = self.ties.iter().filter(|tie| tie.user.stage == stage);
        let tied = used.filter_map(|tie| {
            let owner = &self.stages[tie.owner.stage];
            Some(TiedParam {
                place: tie.user.place,
                array: owner.param(tie.owner.place)?.clone(),
            })
        });
        let tied = tied.collect();
        self.stages[stage].gather(program, tied)
    }

    /// Drops the gathered parameters of all stages.
    pub(super) fn release(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.release());
    }

    /// Adds up `arrays`, gradients of the stage's outputs, in order and returns the sum. The first
    /// array is donated.
    pub(super) fn add_outputs(
        &mut self,
        program: &mut Program,
        stage: usize,
        arrays: Vec<MpmdArray>,
    ) -> Result<MpmdArray> {
        let mut arrays = arrays.into_iter();
        let none = || Error::kernel("no gradient of an output");
        let first = arrays.next().ok_or_else(none)?;

        let at = &self.stages[stage];
        let adder = &mut self.adders[stage];
        let mut sum = first;
        for more in arrays {
            let adder = match adder {
                Some(adder) => adder,
                None => adder.insert(
                    program
                        .jit(AddArrays)
                        .on(at.mesh())
                        .outputs(at.output())
                        .donate("0")
                        .build()?,
                ),
            };
            sum = adder.call(program, (sum, more))?;
        }
        Ok(sum)
    }
}
