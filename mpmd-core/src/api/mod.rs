//! The calls that a program makes: each is one or more operations, issued in program order.

pub mod jit;
pub mod program;
pub mod put;
pub mod replay;
pub mod reshard;
pub mod split;
