//! Tests of whole transports, and of the ring and the doorbell with the system's atomics and futex.
//! `tests/interleavings` shows that no interleaving loses anything. It includes the source files,
//! so these tests are not at their bottom.

mod devices;
mod doorbell;
mod ear;
mod ends;
mod fuzz;
mod loans;
mod meeting;
mod nonsense;
mod ring;
mod strangers;
