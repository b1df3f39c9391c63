//! Functions over sharded arrays.
//!
//! [`Program::compute`] traces a closure over expressions and issues it as one operation. The
//! sharding of each value follows from those of its operands, by the rule of dimensions that belong
//! together ([`DimensionLinks`](mpmd_layout::sharding::DimensionLinks)).
//!
//! The data path: `values.rs` makes expressions of the inputs. `expr.rs` and its neighbours write
//! the nodes of a trace (`trace.rs`). `segments.rs` divides them into kernels and moves.
//! `kernel.rs` and `eval` compute them on each device.

mod dims;
mod eval;
mod expr;
mod gradient;
mod indexed;
mod kernel;
mod node;
mod operators;
mod plan;
mod random;
mod reductions;
mod reshaped;
mod segments;
mod shapes;
mod trace;
mod values;

use std::panic::Location;

pub use dims::Dims;
pub use expr::{Expr, Operand};
pub use random::{normal, uniform};
pub use reductions::einsum;
pub use shapes::{concatenate, number};
pub use values::{ComputeInputs, ComputeResults};

use crate::api::program::Program;
use crate::error::Result;
use mpmd_layout::topology::Mesh;

impl Program {
    /// Computes a function of arrays, with any shardings by a mesh. The closure gets an expression
    /// for each input, and returns one or several. It is traced: it runs at once and writes down
    /// the computation. It may look at shapes and shardings, but not at elements.
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    /// use mpmd_layout::spec;
    ///
    /// let results = mpmd_core::simulate(1, 2, 7, |p| {
    ///     let mesh = p.mesh(&[("x", 2)])?;
    ///     let host = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
    ///     let x = p.device_put(&host, mesh.sharding(spec!["x"]))?;
    ///     let sum = p.compute((&x, &host), |(x, y)| (x * y).sum(..))?;
    ///     // It is a partial sum over `x`: each device has summed up its own elements.
    ///     let sum = p.device_put(&sum, mesh.replicated())?;
    ///     Ok(sum.to_host()?.map(|sum| sum.to_vec::<f32>()).transpose()?)
    /// });
    /// assert_eq!(results[0].as_ref().unwrap(), &Some(vec![30.0]));
    /// ```
    ///
    /// One call is one operation, or several if the function [moves](Expr::to) values: all values
    /// before a move are one operation, and so is the move. Each device computes its
    /// own part of every value; nothing else is moved. Arrays in host memory follow the others:
    /// each device takes its part. On CUDA devices the values are computed on the host.
    ///
    /// Results that are one expression are one array, and an input that is returned is that array.
    ///
    /// A closure that captures nothing is traced once for its line and the shapes, dtypes and
    /// shardings of its inputs; any other at each call. A call that computes the same as an earlier
    /// one takes its kernels from it.
    ///
    /// # Errors
    ///
    /// If shapes, dtypes or shardings do not fit, with the line of the expression and both
    /// operands; the same on every process. If no input is on devices by a mesh: see
    /// [`compute_on`](Self::compute_on). If an input is sharded by a list of regions or chunks.
    ///
    /// # Panics
    ///
    /// If an expression is used outside of the closure.
    #[track_caller]
    pub fn compute<'a, I: ComputeInputs<'a>, O: ComputeResults>(
        &mut self,
        inputs: I,
        function: impl FnOnce(I::Exprs) -> O,
    ) -> Result<O::Arrays> {
        let at = self.caller(Location::caller());
        plan::run(self, None, &inputs, function, at)
    }

    /// Computes a function of arrays as [`compute`](Self::compute) does. Values that depend on no
    /// array on devices, such as host values, are computed on every device of `mesh`.
    ///
    /// # Errors
    ///
    /// Those of `compute`, but for a missing mesh.
    #[track_caller]
    pub fn compute_on<'a, I: ComputeInputs<'a>, O: ComputeResults>(
        &mut self,
        mesh: &Mesh,
        inputs: I,
        function: impl FnOnce(I::Exprs) -> O,
    ) -> Result<O::Arrays> {
        let at = self.caller(Location::caller());
        plan::run(self, Some(mesh), &inputs, function, at)
    }
}
