//! The gradient of a move: gradients of the moved arrays move back.

use std::marker::PhantomData;
use std::panic::Location;

use super::MoveOptions;
use crate::api::program::Program;
use crate::error::{IssueProblem, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};

/// The tree of the results of a move.
type Moved<T> = <T as Tree>::With<MpmdArray>;

/// Moves gradients back to where a [`Program::put_vjp`] came from. `T` is the tree that it moved.
#[derive(Clone, Debug)]
pub struct PutVjp<T> {
    structure: Structure,
    /// For each leaf the sharding of its gradient; `None` for an uncommitted leaf.
    back: Vec<Option<Sharding>>,
    tree: PhantomData<fn() -> T>,
}

impl Program {
    /// Moves every array of a tree to a sharding, as [`Program::device_put`] does. Also returns the
    /// vector-Jacobian product of the move: it takes the gradients of the results, in any
    /// shardings, and gives those of `x`.
    ///
    /// A move changes no value, so the gradient of an array is that of its result in the array's
    /// own sharding. Each of several partial sums has the gradient of their sum: it is whole on
    /// all devices of the [unreduced axes](Sharding::unreduced_axes). The gradient of an
    /// uncommitted array stays where it is.
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
    /// Those of [`Program::device_put`].
    #[track_caller]
    pub fn put_vjp<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
    ) -> Result<(Moved<T>, PutVjp<Moved<T>>)> {
        let at = self.caller(Location::caller());
        let moved = self.put_at(x, &to.into(), MoveOptions::default(), at)?;
        let back = x.leaves().into_iter().map(|leaf| leaf.sharding().map(Sharding::reduced));
        let vjp = PutVjp { structure: x.structure(), back: back.collect(), tree: PhantomData };
        Ok((moved, vjp))
    }
}

impl<T: Tree<Leaf = MpmdArray, With<MpmdArray> = T>> PutVjp<T> {
    /// Issues the moves of the gradients, and returns them. Returns without waiting.
    ///
    /// # Errors
    ///
    /// If the tree has another structure than the one that was moved, or a gradient another shape,
    /// so that it does not fit the sharding. Also if a gradient was donated.
    #[track_caller]
    pub fn call(&self, program: &mut Program, gradients: &T) -> Result<T> {
        let at = program.caller(Location::caller());
        let found = gradients.structure();
        if found != self.structure {
            let (path, expected, found) =
                (String::new(), self.structure.to_string(), found.to_string());
            let misfit = TreeError::Structure { path, expected, found };
            return Err(IssueProblem::Tree(misfit).at(at, "gradient of put_vjp"));
        }
        let leaves = gradients.leaves();
        let moves = leaves.iter().zip(&self.back);
        let moves: Vec<_> = moves.filter_map(|(leaf, to)| Some((*leaf, to.as_ref()?))).collect();
        let mut moved = program.put_list(&moves)?.into_iter();
        let mut all = leaves.into_iter().zip(&self.back).map(|(leaf, to)| match to {
            Some(_) => moved.next().expect("one result for each move"),
            None => leaf.clone(),
        });
        Ok(gradients.map_ref(&mut |_| all.next().expect("one for each leaf")))
    }
}
