//! The calls that a program makes: each is one or more operations, issued in program order.

pub mod device_put;
pub mod jit;
pub mod program;
pub mod replay;
pub mod reshard_tree;
pub mod split;
