//! How the processes of a job find each other and move messages and memory.
//!
//! This crate knows processes, messages and memory; it never hears of arrays, meshes or shapes
//! (invariant *transport-knows-bytes*). From the bottom up:
//!
//! - [`memory`]: buffers and the pools they come from; what a transport reads from and writes into.
//! - [`wire`]: the fixed, versioned header that every message starts with.
//! - [`control`]: the encoding of small control payloads.
//! - [`transport`]: the [`Transport`] trait, implemented by [`inproc`], [`shm`], [`tcp`] and
//!   [`ucx`].
//! - [`mixed`]: two transports at once, each for some of the peers.
//! - [`router`]: the pure state machine that matches messages to operations. It does no I/O and
//!   reads no clock; whoever drives it feeds it events and carries out its actions.
//! - [`rendezvous`]: how processes meet before there is a transport.
//! - [`probe`]: what the machine lets processes do to each other.
//! - [`deadline`]: the ends of waits that users may want to be endless.

pub mod control;
pub mod deadline;
pub mod inproc;
pub mod memory;
pub mod mixed;
pub mod probe;
pub mod rendezvous;
pub mod router;
pub mod shm;
mod strangers;
pub mod tcp;
pub mod transport;
pub mod ucx;
pub mod wire;

pub use memory::{OwnedBuffer, Pool, SharedBuffer};
pub use router::{Failure, FailureKind};
pub use transport::{Handler, Parking, Payload, Ticket, Transport, TransportError};
pub use wire::{Header, Kind, ProcessId};
