//! Whether accesses of streams to the same bytes have an order.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::device::Context;
use crate::stream::Stream;

/// Bytes of device memory that work reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
}

/// What is known to have happened: how much of each stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock;

/// A number for a new stream.
pub(crate) fn new_stream() -> usize {
    static STREAMS: AtomicUsize = AtomicUsize::new(1);
    STREAMS.fetch_add(1, Ordering::Relaxed)
}

/// Notes that work with these uses was issued.
pub(crate) fn used(_stream: &Stream, _what: &'static str, _uses: &[Use]) {}

/// What comes on a stream from now on comes after what a clock says.
pub(crate) fn follows(_stream: &Stream, _clock: &Clock) {}

/// The host has waited for all work of a stream, or seen that it is done.
pub(crate) fn host_saw(_stream: &Stream) {}

/// The host has waited for all work of a context.
pub(crate) fn host_saw_all(context: &Context) {
    for stream in context.streams() {
        host_saw(&stream);
    }
}

/// The host has seen what a clock says.
pub(crate) fn host_saw_clock(_clock: &Clock) {}

#[allow(dead_code)]
fn _unused(_: Arc<Stream>) {}

/// The uses that were told for the next launch on a stream.
pub(crate) fn noted(_stream: crate::handles::Handle) -> Vec<Use> {
    Vec::new()
}
