//! Futures of arrays.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::try_join_all;

use super::{MpmdArray, Repr};
use crate::error::{Error, Result};
use mpmd_layout::tree::Tree;

/// The future of an array. It completes with the array once its local shards are ready, or with the
/// failure of its operation.
///
/// # Cancel safety
///
/// Dropping it at any time has no effect on the array or on the operation that makes it.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ArrayFuture {
    array: MpmdArray,
}

impl IntoFuture for MpmdArray {
    type Output = Result<MpmdArray>;
    type IntoFuture = ArrayFuture;

    fn into_future(self) -> ArrayFuture {
        ArrayFuture { array: self }
    }
}

impl Future for ArrayFuture {
    type Output = Result<MpmdArray>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Repr::Placed(placed) = &self.array.repr {
            for shard in placed.shards.iter() {
                match shard.slot.poll(cx.waker()) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(failure)) => return Poll::Ready(Err(Error::failed(failure))),
                    Poll::Ready(Ok(_)) => {}
                }
            }
        }
        Poll::Ready(Ok(self.array.clone()))
    }
}

/// Waits until the local shards of all arrays in a tree are ready and returns the tree.
///
/// # Errors
///
/// The first failure of an operation that makes one of the arrays, on any process.
///
/// # Cancel safety
///
/// Dropping the future at any time has no effect on the arrays.
pub async fn all_ready<T: Tree<Leaf = MpmdArray>>(tree: T) -> Result<T> {
    let arrays: Vec<ArrayFuture> =
        tree.leaves().into_iter().map(|array| array.clone().into_future()).collect();
    try_join_all(arrays).await?;
    Ok(tree)
}
