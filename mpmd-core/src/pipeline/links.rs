//! Links between stages: the outputs of earlier stages that form the input of a later one.

use std::marker::PhantomData;
use std::sync::Arc;

use super::erased_tree::ErasedTree;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::tree::{Leaf, Structure, Tree};

/// A handle to the outputs of a stage, to be used as input of a later stage: see
/// [`Pipeline::then_from`](super::Pipeline::then_from). Created by
/// [`Pipeline::output`](super::Pipeline::output).
#[derive(Clone)]
pub struct StageOutput<T> {
    part: OutputPart,
    /// The identity of the pipeline to which the stage belongs.
    of: Arc<()>,
    tree: PhantomData<fn() -> T>,
}

impl<T: Tree<Leaf = MpmdArray>> StageOutput<T> {
    pub(super) fn new(stage: usize, of: Arc<()>) -> Self {
        Self {
            part: OutputPart { stage, path: None },
            of,
            tree: PhantomData,
        }
    }

    /// Returns the index, from 0, of the stage that computes these outputs.
    pub fn stage(&self) -> usize {
        self.part.stage
    }

    /// Selects one array of the outputs by its path. An unknown path is an error at the first
    /// microbatch.
    #[must_use]
    pub fn leaf(&self, path: impl Into<String>) -> StageOutput<MpmdArray> {
        let part = OutputPart {
            stage: self.part.stage,
            path: Some(path.into()),
        };
        StageOutput {
            part,
            of: self.of.clone(),
            tree: PhantomData,
        }
    }
}

/// Outputs of earlier stages that together form the input of a later stage: a [`StageOutput`], a
/// tuple of such outputs, or a vector of outputs of one type.
pub trait StageOutputs {
    /// The input type of the later stage.
    type In: Tree<Leaf = MpmdArray>;

    #[doc(hidden)]
    fn feed(&self) -> FeedOf;
}

/// The parts of a stage's input, each with the identity of its pipeline. Made from
/// [`StageOutputs`].
#[doc(hidden)]
pub struct FeedOf {
    feed: StageFeed,
    of: Vec<Arc<()>>,
}

impl FeedOf {
    /// Returns the parts, or an error if one of them belongs to another pipeline.
    pub(super) fn checked(self, pipeline: &Arc<()>) -> Result<StageFeed> {
        if self.of.iter().all(|of| Arc::ptr_eq(of, pipeline)) {
            return Ok(self.feed);
        }
        Err(Error::kernel(
            "it is given an output of another pipeline: take `output()` of the one that the stage \
             is added to",
        ))
    }
}

impl<T: Tree<Leaf = MpmdArray>> StageOutputs for StageOutput<T> {
    type In = T;

    fn feed(&self) -> FeedOf {
        FeedOf {
            feed: StageFeed {
                parts: vec![self.part.clone()],
                whole: true,
            },
            of: vec![self.of.clone()],
        }
    }
}

impl<T: Tree<Leaf = MpmdArray>> StageOutputs for Vec<StageOutput<T>> {
    type In = Vec<T>;

    fn feed(&self) -> FeedOf {
        let parts = self.iter().map(|output| output.part.clone()).collect();
        FeedOf {
            feed: StageFeed {
                parts,
                whole: false,
            },
            of: self.iter().map(|output| output.of.clone()).collect(),
        }
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))*) => {$(
        impl<$($name: Tree<Leaf = MpmdArray>),+> StageOutputs for ($(StageOutput<$name>,)+) {
            type In = ($($name,)+);

            fn feed(&self) -> FeedOf {
                let parts = vec![$(self.$index.part.clone()),+];
                let feed = StageFeed { parts, whole: false };
                FeedOf { feed, of: vec![$(self.$index.of.clone()),+] }
            }
        }
    )*};
}

tuples! {
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
}

/// The parts that form the input of a stage.
#[derive(Clone, Debug)]
pub(super) struct StageFeed {
    pub(super) parts: Vec<OutputPart>,
    /// True if the only part is the whole input. False if the input is a tuple or vector of the
    /// parts.
    whole: bool,
}

/// The outputs of one stage as part of a later stage's input: all of them, or the array at `path`.
#[derive(Clone, Debug)]
pub(super) struct OutputPart {
    pub(super) stage: usize,
    pub(super) path: Option<String>,
}

impl StageFeed {
    /// Returns the feed of the first stage, which takes the pipeline's input.
    pub(super) fn of_pipeline() -> Self {
        Self {
            parts: Vec::new(),
            whole: true,
        }
    }

    /// Returns the structure of a stage's input from the structures of its parts.
    pub(super) fn structure(&self, mut parts: Vec<Structure>) -> Structure {
        if self.whole && parts.len() == 1 {
            parts.swap_remove(0)
        } else {
            Structure::sequence(parts)
        }
    }
}

impl OutputPart {
    /// Returns the range of this part's leaves among the leaves of the stage's outputs. An unknown
    /// path is an error.
    pub(super) fn places(&self, outputs: &Structure) -> Result<std::ops::Range<usize>> {
        let Some(path) = &self.path else {
            return Ok(0..outputs.leaves());
        };
        let paths = outputs.paths();

        let place = paths
            .iter()
            .position(|known| known == path)
            .ok_or_else(|| {
                let stage = self.stage;
                let known = paths
                    .iter()
                    .map(|path| format!("{path:?}"))
                    .collect::<Vec<_>>()
                    .join(", ");
                Error::kernel(format!(
                    "stage {stage} has no output {path:?} for `.leaf(…)`; it has {known}"
                ))
            })?;
        Ok(place..place + 1)
    }

    pub(super) fn structure(&self, outputs: &Structure) -> Structure {
        if self.path.is_some() {
            Structure::Leaf
        } else {
            outputs.clone()
        }
    }

    /// Selects this part from a stage's outputs. An unknown path is an error.
    pub(super) fn of<L: Leaf + Clone>(&self, outputs: &ErasedTree<L>) -> Result<ErasedTree<L>> {
        let places = self.places(&outputs.structure)?;
        Ok(ErasedTree {
            structure: self.structure(&outputs.structure),
            leaves: outputs.leaves[places].to_vec(),
        })
    }
}

/// Returns an error if a leaf of the outputs belongs to none of `parts`: its gradient would be
/// undefined.
pub(super) fn check_all_read<'a>(
    stage: usize,
    outputs: &Structure,
    parts: impl IntoIterator<Item = &'a OutputPart>,
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
