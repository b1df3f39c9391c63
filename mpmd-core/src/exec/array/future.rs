//! Futures of arrays.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::try_join_all;

use super::{MpmdArray, Repr};
use crate::error::{Error, Result};
use mpmd_layout::tree::Tree;

/// The future of an array. It completes with the array once this process's part of the array is
/// done. That is when the local shards are filled, and the receivers have taken this process's
/// sends and forwards, or the bytes were copied out. If a shard or a send fails, the future
/// completes with an error.
///
/// The future keeps only the waker of its last poll.
///
/// # Cancel safety
///
/// Dropping the future at any time has no effect on the array or on the operation that makes it.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ArrayFuture {
    array: MpmdArray,
    /// Index of the async buffer, among [`Placed::parts`](super::Placed::parts), that the last poll
    /// waited for.
    part: usize,
    /// Number of this future at that async buffer. `None` until it waits there.
    number: Option<u64>,
}

impl IntoFuture for MpmdArray {
    type Output = Result<MpmdArray>;
    type IntoFuture = ArrayFuture;

    fn into_future(self) -> ArrayFuture {
        ArrayFuture {
            array: self,
            part: 0,
            number: None,
        }
    }
}

impl Future for ArrayFuture {
    type Output = Result<MpmdArray>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self {
            array,
            part,
            number,
        } = &mut *self;
        if let Repr::Placed(placed) = &array.repr {
            for slot in placed.parts().skip(*part) {
                match slot.poll(number, cx.waker()) {
                    Poll::Pending => {
                        placed.ask_taken();
                        return Poll::Pending;
                    }
                    Poll::Ready(Err(failure)) => return Poll::Ready(Err(Error::failed(failure))),
                    Poll::Ready(Ok(_)) => (*part, *number) = (*part + 1, None),
                }
            }
        }
        Poll::Ready(Ok(array.clone()))
    }
}

impl Drop for ArrayFuture {
    fn drop(&mut self) {
        if let (Repr::Placed(placed), Some(number)) = (&self.array.repr, self.number)
            && let Some(slot) = placed.parts().nth(self.part)
        {
            slot.forget(number);
        }
    }
}

/// Waits until this process's part of every array in a tree is done, and returns the tree.
/// [`ArrayFuture`] says what belongs to this part.
///
/// # Errors
///
/// The first failure of a shard or a send of this process, also if the cause is another process.
///
/// # Cancel safety
///
/// Dropping the future at any time has no effect on the arrays.
pub async fn all_ready<T: Tree<Leaf = MpmdArray>>(tree: T) -> Result<T> {
    let arrays: Vec<ArrayFuture> = tree
        .leaves()
        .into_iter()
        .map(|array| array.clone().into_future())
        .collect();
    try_join_all(arrays).await?;
    Ok(tree)
}
