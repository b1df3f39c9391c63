//! Trees, shapes and dtypes, regions, meshes, shardings and rules for them, reshard plans, and
//! random keys.
//!
//! Everything here is a pure function of its arguments: no clock, no I/O, no threads, and no
//! knowledge of the process that it runs on. From the bottom up:
//!
//! - [`tree`]: structures of leaves, and paths to them.
//! - [`aval`]: shapes and dtypes.
//! - [`region`]: boxes of array elements.
//! - [`topology`]: devices, the processes that own them, meshes of devices.
//! - [`sharding`]: the region of an array that each device holds, and rules that choose it.
//! - [`reshard`]: the pieces that move from device to device between two shardings.
//! - [`random`]: numbers that depend on a key and an element's index alone.

// `#[derive(Tree)]` names the crate that users depend on; inside this one that is this one.
extern crate self as mpmd;

pub mod aval;
mod bytes;
mod fingerprint;
pub mod random;
pub mod region;
pub mod reshard;
pub mod sharding;
pub mod topology;
pub mod tree;

#[doc(hidden)]
pub use bytes::bytes_text;
#[doc(hidden)]
pub use fingerprint::Fingerprint;
