//! The sizes that an epoch of a job may have.

/// A number of processes that an epoch of a job may have, and its number of devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobSize {
    pub(crate) processes: u32,
    pub(crate) devices: u32,
}
