//! Moves messages and memory between the processes of a job.
//!
//! This crate knows processes, messages and memory. It knows nothing of arrays, meshes or shapes
//! (invariant *transport-knows-bytes*). From the bottom up:
//!
//! - [`batch`]: several small messages in one.
//! - [`transport`]: the [`Transport`] trait, implemented by [`inproc`], [`shm`], [`tcp`] and
//!   [`ucx`].
//! - [`mixed`]: two transports at once, each for some of the peers.
//! - `party`: the facts that two ends of a connection tell each other in their
//!   [handshake](mpmd_handshake).

#![allow(unsafe_code)]

pub mod batch;
pub mod inproc;
pub mod mixed;
mod party;
pub mod shm;
pub mod tcp;
pub mod transport;
pub mod ucx;

pub use transport::{Handler, Parking, Payload, Ticket, Transport, TransportError};
