//! The holdings of a device's allocators when candle is out of memory there, for its errors.

use std::cell::RefCell;

thread_local! {
    /// The holdings when an allocation of this thread failed last.
    static SHORTAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes what a device's allocators hold, as an allocation of this thread has failed.
#[cfg(feature = "cuda")]
pub(crate) fn note(held: String) {
    SHORTAGE.set(Some(held));
}

/// Adds to an error of candle what the device's allocators hold, if it was out of memory.
pub(crate) fn with_shortage(why: String) -> String {
    match SHORTAGE.take() {
        Some(held) if why.contains("OUT_OF_MEMORY") => format!("{why}; {held}"),
        _ => why,
    }
}
