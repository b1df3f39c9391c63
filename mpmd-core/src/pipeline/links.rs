//! From where a stage has its inputs: the outputs of stages before it.

use std::marker::PhantomData;
use std::sync::Arc;

use super::wired::Bundle;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::{Structure, Tree};

/// The outputs of a stage of a pipeline, as the input of a later one: see
/// [`Pipeline::then_from`](super::Pipeline::then_from). Given by
/// [`Pipeline::output`](super::Pipeline::output).
#[derive(Clone)]
pub struct Output<T> {
    part: Part,
    /// Which pipeline's.
    of: Arc<()>,
    tree: PhantomData<fn() -> T>,
}

impl<T: Tree<Leaf = MpmdArray>> Output<T> {
    pub(super) fn new(stage: usize, of: Arc<()>) -> Self {
        Self { part: Part { stage, path: None }, of, tree: PhantomData }
    }

    /// The number of the stage.
    pub fn stage(&self) -> usize {
        self.part.stage
    }

    /// The one array at a path of the outputs. Whether there is one is known with the first
    /// microbatch.
    #[must_use]
    pub fn leaf(&self, path: impl Into<String>) -> Output<MpmdArray> {
        let part = Part { stage: self.part.stage, path: Some(path.into()) };
        Output { part, of: self.of.clone(), tree: PhantomData }
    }
}

/// Outputs of earlier stages that are together what a later one takes: an [`Output`], a tuple of
/// them, or a vector of equal ones.
pub trait Outputs {
    /// What the stage takes.
    type In: Tree<Leaf = MpmdArray>;

    #[doc(hidden)]
    fn feed(&self) -> FeedOf;
}

/// What [`Outputs`] says to its pipeline.
#[doc(hidden)]
pub struct FeedOf {
    feed: Feed,
    of: Vec<Arc<()>>,
}

impl FeedOf {
    /// The feed, where it is of this pipeline.
    pub(super) fn checked(self, pipeline: &Arc<()>) -> Result<Feed> {
        if self.of.iter().all(|of| Arc::ptr_eq(of, pipeline)) {
            return Ok(self.feed);
        }
        Err(Error::kernel(
            "it is given an output of another pipeline: take `output()` of the one that the stage \
             is added to",
        ))
    }
}

impl<T: Tree<Leaf = MpmdArray>> Outputs for Output<T> {
    type In = T;

    fn feed(&self) -> FeedOf {
        FeedOf {
            feed: Feed { parts: vec![self.part.clone()], whole: true },
            of: vec![self.of.clone()],
        }
    }
}

impl<T: Tree<Leaf = MpmdArray>> Outputs for Vec<Output<T>> {
    type In = Vec<T>;

    fn feed(&self) -> FeedOf {
        let parts = self.iter().map(|output| output.part.clone()).collect();
        FeedOf {
            feed: Feed { parts, whole: false },
            of: self.iter().map(|output| output.of.clone()).collect(),
        }
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))*) => {$(
        impl<$($name: Tree<Leaf = MpmdArray>),+> Outputs for ($(Output<$name>,)+) {
            type In = ($($name,)+);

            fn feed(&self) -> FeedOf {
                let parts = vec![$(self.$index.part.clone()),+];
                FeedOf { feed: Feed { parts, whole: false }, of: vec![$(self.$index.of.clone()),+] }
            }
        }
    )*};
}

tuples! {
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
}

/// What a stage takes.
#[derive(Clone, Debug)]
pub(super) struct Feed {
    pub(super) parts: Vec<Part>,
    /// Whether the one part is all of it, and not the element of a tuple.
    whole: bool,
}

/// Outputs of one stage: all, or one array.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) stage: usize,
    pub(super) path: Option<String>,
}

impl Feed {
    /// Of the first stage: nothing comes from other stages.
    pub(super) fn of_pipeline() -> Self {
        Self { parts: Vec::new(), whole: true }
    }

    /// The structure of the input whose parts have these structures.
    pub(super) fn structure(&self, mut parts: Vec<Structure>) -> Structure {
        if self.whole && parts.len() == 1 {
            parts.swap_remove(0)
        } else {
            Structure::sequence(parts)
        }
    }
}

impl Part {
    /// The places of its leaves among those of the stage's outputs.
    pub(super) fn places(&self, outputs: &Structure) -> Result<std::ops::Range<usize>> {
        let Some(path) = &self.path else { return Ok(0..outputs.leaves()) };
        let paths = outputs.paths();
        let place = paths.iter().position(|known| known == path).ok_or_else(|| {
            let stage = self.stage;
            let known = paths.iter().map(|path| format!("{path:?}")).collect::<Vec<_>>().join(", ");
            Error::kernel(format!(
                "stage {stage} has no output {path:?} for `.leaf(…)`; it has {known}"
            ))
        })?;
        Ok(place..place + 1)
    }

    /// The structure of this part.
    pub(super) fn structure(&self, outputs: &Structure) -> Structure {
        if self.path.is_some() { Structure::Leaf } else { outputs.clone() }
    }

    /// This part of a stage's outputs.
    pub(super) fn of(&self, outputs: &Bundle) -> Result<Bundle> {
        let places = self.places(&outputs.structure)?;
        Ok(Bundle {
            structure: self.structure(&outputs.structure),
            leaves: outputs.leaves[places].to_vec(),
        })
    }
}

/// Refuses outputs that no part reads: nobody could say what their gradient is.
pub(super) fn check_all_read<'a>(
    stage: usize,
    outputs: &Structure,
    parts: impl IntoIterator<Item = &'a Part>,
) -> Result<()> {
    let mut read = vec![false; outputs.leaves()];
    for part in parts {
        read[part.places(outputs)?].fill(true);
    }
    match read.iter().position(|read| !read) {
        None => Ok(()),
        Some(place) => {
            let path = &outputs.paths()[place];
            Err(Error::kernel(format!(
                "output {path:?} of stage {stage} is read by no later stage, so that it has no \
                 gradient: have a stage \
                 take it with `then_from`, or do not give it"
            )))
        }
    }
}
