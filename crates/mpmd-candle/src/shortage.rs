//! The holdings of a device's allocators when candle is out of memory there, for its errors.

use std::cell::RefCell;

thread_local! {
    /// Description of the device allocators' memory at this thread's last failed allocation.
    static SHORTAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Stores `held`, which describes the device allocators' memory, after a failed allocation of this
/// thread.
#[cfg(feature = "cuda")]
pub(crate) fn note(held: String) {
    SHORTAGE.set(Some(held));
}

/// Appends the stored description of the allocators' memory to an out-of-memory error of candle.
pub(crate) fn with_shortage(why: String) -> String {
    match SHORTAGE.take() {
        Some(held) if why.contains("OUT_OF_MEMORY") => format!("{why}; {held}"),
        _ => why,
    }
}
