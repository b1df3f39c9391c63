//! Waits for shards, operations and payloads, and the reports of long ones.
//!
//! An `async_buffer` is the buffer of a shard, which its resolver fills later. `in_flight` lists
//! the operations that have not ended, `under_way` the payloads that the transport moves. Threads
//! sleep in `parker`. `status` reports hangs.

pub(super) mod async_buffer;
pub(super) mod in_flight;
pub(super) mod parker;
pub(super) mod status;
pub(super) mod under_way;
