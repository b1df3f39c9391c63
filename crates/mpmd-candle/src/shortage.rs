//! The holdings of a device's allocators when candle is out of memory there, for its errors.

use std::cell::RefCell;

thread_local! {
    /// A text on the memory of the device's allocators when an allocation of this thread last
    /// failed.
    static SHORTAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes the text `held` on the device's allocators, since an allocation of this thread has failed.
#[cfg(feature = "cuda")]
pub(crate) fn note(held: String) {
    SHORTAGE.set(Some(held));
}

/// Adds the noted text on the device's allocators to an error of candle, if the device was out of
/// memory.
pub(crate) fn with_shortage(why: String) -> String {
    match SHORTAGE.take() {
        Some(held) if why.contains("OUT_OF_MEMORY") => format!("{why}; {held}"),
        _ => why,
    }
}
