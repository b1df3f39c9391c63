//! The calls that a program makes: each is one or more operations, issued in program order.

pub mod compute;
pub(crate) mod jit;
pub(crate) mod object;
pub(crate) mod program;
pub(crate) mod put;
pub(crate) mod recover;
pub(crate) mod replay;
pub(crate) mod reshard;
pub(crate) mod split;
pub mod weights;
