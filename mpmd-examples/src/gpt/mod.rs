//! The arithmetic of a byte-level decoder-only transformer, as plain functions on slices.
//!
//! [`embed`] turns bytes into rows: one vector of `width` columns for each position. [`block`]s
//! transform the rows. A block is causal [`attention`], then an [`mlp`], each after a layer
//! [`norm`] and beside a residual path. The [`head`] computes logits and a [`loss`]. [`adamw`]
//! updates parameters.
//!
//! Every backward pass has two halves, for pipelines. `backward_input` computes the gradient that
//! the part before waits for. It also writes the *weight residuals*: the gradients at the output of
//! each layer with parameters. `backward_weight` can use them later. Gradients of parameters are
//! *added* to the values in their buffers. All other results overwrite theirs.
//!
//! All matrices are dense and row-major. `rows` stands for `[batch, time]`. A weight `[inputs,
//! outputs]` is applied as `x w`. Sums run in a fixed order on the calling thread.
//!
//! # Arrays
//!
//! "Sharded" names the dimension that tensor parallelism splits. All other dimensions are the same
//! on every device of a model-parallel group. In a local shape, `heads` and `hidden` are those of
//! the device. Gradients and the optimiser's state have their parameter's shape. [`BlockShape`]'s
//! methods return the same shapes as data, and the initial values of parameters.
//!
//! | parameter | shape | sharded |
//! |---|---|---|
//! | embed `bytes` | `[256, width]` | no |
//! | embed `positions` | `[time, width]` | no |
//! | block `norm1_gain`, `norm1_bias`, `norm2_gain`, `norm2_bias` | `[width]` | no |
//! | block `w_qkv` (queries, keys, values; columns by head) | `[width, 3, heads * head_dim]` | 2 |
//! | block `b_qkv` | `[3, heads * head_dim]` | 1 |
//! | block `w_out` | `[heads * head_dim, width]` | 0 |
//! | block `b_out` | `[width]` | no |
//! | block `w_up` | `[width, hidden]` | 1 |
//! | block `b_up` | `[hidden]` | 0 |
//! | block `w_down` | `[hidden, width]` | 0 |
//! | block `b_down` | `[width]` | no |
//! | head `norm_gain`, `norm_bias` | `[width]` | no |
//! | head `weight` | `[width, 256]` | no |
//!
//! | residual | shape | sharded | read by |
//! |---|---|---|---|
//! | block inputs `norm1_hat`, `norm2_hat` | `[batch, time, width]` | no | both halves |
//! | block inputs `norm1_out`, `norm2_out` | `[batch, time, width]` | no | weight |
//! | block inputs `context` | `[batch, time, heads * head_dim]` | 2 | weight |
//! | block inputs `activated` | `[batch, time, hidden]` | 2 | weight |
//! | block interior `norm1_inv_std`, `norm2_inv_std` | `[batch, time]` | no | input |
//! | block interior `qkv` | `[3, batch, heads, time, head_dim]` | 2 | input |
//! | block interior `probabilities` | `[batch, heads, time, time]` | 1 | input |
//! | block interior `slope` | `[batch, time, hidden]` | 2 | input |
//! | head `norm_hat` | `[batch, time, width]` | no | both |
//! | head `norm_out` | `[batch, time, width]` | no | weight |
//! | head `norm_inv_std` | `[batch, time]` | no | input |
//! | head `probabilities` | `[batch, time, 256]` | no | input |
//!
//! | weight residual | shape | sharded |
//! |---|---|---|
//! | embed `dx` (the gradient that arrives) | `[batch, time, width]` | no |
//! | block `d_norm1`, `d_norm2`, `d_attention`, `d_mlp` | `[batch, time, width]` | no |
//! | block `d_qkv` | `[batch, time, 3, heads * head_dim]` | 3 |
//! | block `d_pre` | `[batch, time, hidden]` | 2 |
//! | head `d_norm` | `[batch, time, width]` | no |
//! | head `d_logits` | `[batch, time, 256]` | no |
//!
//! # Tensor parallelism
//!
//! For each of a block's two branches, a device computes one summand of the output, and one of the
//! gradient of the branch's input. Devices therefore add up `[rows, width]` values in four places:
//! two in the forward pass and two in the input gradient. [`block::forward`] and
//! [`block::backward_input`] call a function of the caller there. Their parts are public, for
//! callers that reduce between them. Replicated parameters get the same gradient on every device,
//! so no other value is reduced.
//!
//! # Fully sharded data parallelism
//!
//! The sequences of a microbatch can also be divided: see [`placement`].
//!
//! # CUDA devices
//!
//! The module `cuda` has the same functions for CUDA devices, with the same arrays and residuals.

pub mod adamw;
pub mod attention;
pub mod bigram;
pub mod block;
pub mod checkpoint;
pub mod clock;
mod cuda;
pub mod data;
pub mod embed;
pub mod head;
mod lanes;
mod linear;
pub mod loss;
pub mod memory;
pub mod mlp;
pub mod norm;
pub mod optimizer;
pub mod params;
pub mod placement;
pub mod progress;
pub mod sample;
mod shape;
pub mod stages;
#[cfg(test)]
mod testing;
pub mod train;

pub use shape::{BlockShape, Initial, LeafShape};

/// Number of values of a byte, which is also the number of logits.
pub const BYTES: usize = 256;

/// Declares a structure of arrays that is a [`Tree`](mpmd::tree::Tree), with the maps that
/// slices need (a slice itself can be no tree's leaf).
macro_rules! leaves {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* $field:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Eq, PartialEq, mpmd::tree::Tree)]
        pub struct $name<L> {
            $($(#[$doc])* pub $field: L,)*
        }

        impl<L> $name<L> {
            /// Applies `f` to a reference to every leaf, in order. Returns the results as a tree.
            pub fn each<'a, M>(&'a self, mut f: impl FnMut(&'a L) -> M) -> $name<M> {
                $name { $($field: f(&self.$field),)* }
            }

            /// Applies `f` to a mutable reference to every leaf, in order. Returns the results as a
            /// tree.
            pub fn each_mut<'a, M>(&'a mut self, mut f: impl FnMut(&'a mut L) -> M) -> $name<M> {
                $name { $($field: f(&mut self.$field),)* }
            }

            /// Applies a fallible `f` to a reference to every leaf, in order, until it fails.
            /// Returns the results as a tree.
            ///
            /// # Errors
            ///
            /// The first error of `f`.
            pub fn try_each<'a, M, E>(
                &'a self,
                mut f: impl FnMut(&'a L) -> Result<M, E>,
            ) -> Result<$name<M>, E> {
                Ok($name { $($field: f(&self.$field)?,)* })
            }

            /// Applies a fallible `f` to a mutable reference to every leaf, in order, until it
            /// fails. Returns the results as a tree.
            ///
            /// # Errors
            ///
            /// The first error of `f`.
            pub fn try_each_mut<'a, M, E>(
                &'a mut self,
                mut f: impl FnMut(&'a mut L) -> Result<M, E>,
            ) -> Result<$name<M>, E> {
                Ok($name { $($field: f(&mut self.$field)?,)* })
            }
        }
    };
}
use leaves;
