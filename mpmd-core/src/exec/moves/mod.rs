//! The way of a piece of an array between devices and processes.
//!
//! `put` starts a `device_put`, and `transfer` is one region of it. `send` packs pieces and offers
//! them to the [router](mpmd_proto::router), `receive` takes them from it. `together` joins small
//! pieces to one message. `driver` carries events between router and transport. `assembly` puts a
//! shard together from its pieces; `chunks` copies to accelerators from host memory that they
//! cannot reach. `exchange` sends the messages of collectives, inside a process by way of
//! `mailbox`. `reach` knows the memory that devices and peers can read.

pub(super) mod assembly;
pub(super) mod chunks;
pub(super) mod driver;
pub(super) mod dry_run;
pub(super) mod exchange;
pub(super) mod mailbox;
pub(super) mod put;
pub(super) mod reach;
pub(super) mod receive;
pub(super) mod send;
pub(super) mod together;
pub(super) mod transfer;
