//! What is waited for, and how.
//!
//! The owner of a shard's `async_buffer` fills it by its resolver. `in_flight` has the operations
//! that have not ended, `under_way` the payloads that the transport moves. A thread waits in
//! `parker`. `status` reports hangs.

pub(super) mod async_buffer;
pub(super) mod in_flight;
pub(super) mod parker;
pub(super) mod status;
pub(super) mod under_way;
