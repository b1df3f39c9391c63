//! The transport between processes of one host: small messages in rings of shared memory.
// What of it is not used yet is what the transport is being made of.
#![allow(dead_code)]

mod door;
mod futex;
mod ring;
mod sync;
#[cfg(test)]
mod tests;
mod words;
