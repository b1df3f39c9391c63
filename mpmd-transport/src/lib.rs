//! Lets the processes of a job find each other, and moves messages and memory between them.
//!
//! This crate knows processes, messages and memory. It knows nothing of arrays, meshes or shapes
//! (invariant *transport-knows-bytes*). From the bottom up:
//!
//! - [`memory`]: buffers and the pools that they come from. Transports read from them and write
//!   into them.
//! - [`batch`]: several small messages in one.
//! - [`transport`]: the [`Transport`] trait, implemented by [`inproc`], [`shm`], [`tcp`] and
//!   [`ucx`].
//! - [`mixed`]: two transports at once, each for some of the peers.
//! - `handshake`: the pure state machine by which two ends of a connection prove to each other that
//!   they know the job's token.
//! - [`rendezvous`]: how processes meet before there is a transport.
//! - [`deadline`]: deadlines for waits that may be endless.

#![allow(unsafe_code)]

pub mod batch;
pub mod deadline;
mod handshake;
pub mod inproc;
pub mod memory;
pub mod mixed;
pub mod rendezvous;
pub mod shm;
mod strangers;
pub mod tcp;
mod token;
pub mod transport;
pub mod ucx;

pub use memory::{OwnedBuffer, Pool, SharedBuffer};
pub use transport::{Handler, Parking, Payload, Ticket, Transport, TransportError};
