//! The gradient of a move: gradients of the moved arrays move back.

use std::marker::PhantomData;
use std::panic::Location;

use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};

use super::MoveOptions;
use crate::api::program::Program;
use crate::error::{IssueProblem, Result};
use crate::exec::array::MpmdArray;

/// The vector-Jacobian product of a move: moves gradients of its results back to its sources.
/// Created by [`Program::put_vjp`]. `T` is the tree of the results.
#[derive(Clone, Debug)]
#[must_use = "gradients move back only by a call"]
pub struct PutVjp<T> {
    structure: Structure,
    /// For each leaf the sharding of its gradient. `None` for an uncommitted leaf.
    back: Vec<Option<Sharding>>,
    tree: PhantomData<fn() -> T>,
}

impl Program {
    /// Moves every array of a tree to a sharding, as [`Program::device_put`] does. Also returns the
    /// vector-Jacobian product of the move.
    ///
    /// A move changes no value, so the gradient of an array is that of its result, in the array's
    /// own sharding. Each of several partial sums has the gradient of their sum: it is whole on
    /// all devices of the [unreduced axes](Sharding::unreduced_axes), as in JAX.
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    ///
    /// mpmd_core::simulate(2, 2, 1, |p| {
    ///     let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
    ///     let x = p.device_put(&MpmdArray::scalar(2.0f32), stages[0].replicated())?;
    ///     let (y, vjp) = p.put_vjp(&x, stages[1].replicated())?;
    ///     // The second stage computes the gradient of y; here it is y itself.
    ///     let dx = vjp.call(p, &y)?;
    ///     assert_eq!(dx.sharding(), x.sharding());
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`Program::device_put`].
    #[track_caller]
    pub fn put_vjp<T, Y>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
    ) -> Result<(Y, PutVjp<Y>)>
    where
        T: Tree<Leaf = MpmdArray, With<MpmdArray> = Y>,
    {
        let at = self.caller(Location::caller());
        let moved = self.put_at(x, &to.into(), MoveOptions::default(), at)?;
        let leaves = x.leaves().into_iter();
        let vjp = PutVjp {
            structure: x.structure(),
            back: leaves
                .map(|leaf| leaf.sharding().map(Sharding::reduced))
                .collect(),
            tree: PhantomData,
        };
        Ok((moved, vjp))
    }
}

impl<T: Tree<Leaf = MpmdArray, With<MpmdArray> = T>> PutVjp<T> {
    /// Issues the moves of the gradients of the results, which may have any shardings, and returns
    /// the gradients of the sources. Returns without waiting. The gradient of an uncommitted
    /// source stays where it is.
    ///
    /// # Errors
    ///
    /// If the tree has another structure than the one that was moved, or a gradient has a shape
    /// that does not fit the source's sharding. If a gradient was donated.
    #[track_caller]
    pub fn call(&self, p: &mut Program, gradients: &T) -> Result<T> {
        let at = p.caller(Location::caller());
        let found = gradients.structure();
        if found != self.structure {
            let misfit = TreeError::Structure {
                path: String::new(),
                expected: self.structure.to_string(),
                found: found.to_string(),
            };
            return Err(IssueProblem::Tree(misfit).at(at, "gradient of put_vjp"));
        }

        let leaves = gradients.leaves();
        let moves = leaves.iter().zip(&self.back);
        let moves: Vec<_> = moves
            .filter_map(|(leaf, to)| Some((*leaf, to.as_ref()?)))
            .collect();
        let mut moved = p.put_list(&moves)?.into_iter();
        let mut all = leaves
            .into_iter()
            .zip(&self.back)
            .map(|(leaf, to)| match to {
                Some(_) => moved.next().expect("one result for each move"),
                None => leaf.clone(),
            });
        Ok(gradients.map_ref(&mut |_| all.next().expect("one for each leaf")))
    }
}
