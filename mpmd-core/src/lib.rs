//! mpmd core

pub mod backend;
