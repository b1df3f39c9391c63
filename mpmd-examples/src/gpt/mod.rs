//! The arithmetic of a byte-level decoder-only transformer, as plain functions on slices.
//!
//! [`embed`] turns bytes into rows, [`block`]s (causal [`attention`], then an [`mlp`], each behind
//! a layer [`norm`] and beside a path that skips it) transform them, the [`head`] turns them into
//! logits and a [`loss`]; [`adamw`] updates parameters. Every backward pass is in two halves, as
//! pipelines need it: `backward_input` gives what the part before waits for and leaves the *weight
//! residuals* (the gradients at the output of each layer that has parameters), from which
//! `backward_weight` can be done later. Gradients of parameters are *added* to what is there;
//! everything else is written over.
//!
//! All matrices are dense and row-major, `rows` stands for `[batch, time]`, and a weight `[inputs,
//! outputs]` is applied as `x w`. Sums run in a fixed order on the calling thread.
//!
//! # Arrays
//!
//! "Sharded" names the dimension that tensor parallelism splits; everything else is the same on
//! every device of a model-parallel group. `heads` and `hidden` are a device's own where the shape
//! is local. Gradients and the optimiser's state have their parameter's shape. [`BlockShape`]'s
//! methods give the same table as data, and what parameters start from.
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
//! Of each block's two branches a device computes one summand of the output, and of the gradient of
//! the branch's input. So there are four places where devices add up `[rows, width]` values: two in
//! the forward pass and two in the input gradient. [`block::forward`] and [`block::backward_input`]
//! call back there, and their parts are public for callers that want to be in between themselves.
//! What is replicated gets the same gradient on every device, so nothing else is reduced.
//!
//! # Fully sharded data parallelism
//!
//! The sequences of a microbatch can be divided, too; [`placement`] says where parameters are then.
//!
//! # CUDA devices
//!
//! The module `cuda` has the same for them: other functions, the same arrays and residuals.

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
pub mod stop;
#[cfg(test)]
mod testing;
pub mod train;

pub use shape::{BlockShape, Initial, LeafShape};

/// How many values a byte has, and the head logits.
pub const BYTES: usize = crate::next_byte::BYTES;

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
            /// What `f` makes of a reference to every leaf, in order.
            pub fn each<'a, M>(&'a self, mut f: impl FnMut(&'a L) -> M) -> $name<M> {
                $name { $($field: f(&self.$field),)* }
            }

            /// What `f` makes of every leaf, each borrowed for writing, in order.
            pub fn each_mut<'a, M>(&'a mut self, mut f: impl FnMut(&'a mut L) -> M) -> $name<M> {
                $name { $($field: f(&mut self.$field),)* }
            }

            /// As [`each`](Self::each), where `f` can fail.
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

            /// As [`each_mut`](Self::each_mut), where `f` can fail.
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
