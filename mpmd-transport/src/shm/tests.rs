//! Tests of whole transports, and of the ring and the door with the system's atomics and futex.
//! That no interleaving loses anything is for `tests/interleavings` to show, which is why these are
//! not at the bottom of the files it takes in.

mod devices;
mod door;
mod ear;
mod ends;
mod fuzz;
mod nonsense;
mod ring;
mod strangers;
