//! The rendezvous over real sockets, and who goes on with it after a loss.

#[path = "../../../mpmd-handshake/tests/played/end.rs"]
mod handshake;
mod rendezvous;
mod succession;
