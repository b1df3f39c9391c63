//! Published arrays: a program gives out versions of a tree of arrays, and programs of other jobs
//! take them in layouts of their own, while both run.
//!
//! 1. `publisher`: copies a version's regions, cast to the dtype on the way, to memory of its own
//!    (`store`), where the next version's changes are found, too.
//! 2. `group`: the processes of each end stay at a rendezvous, where the other end calls them.
//! 3. `link`: for each subscriber, the processes of both ends run a small program beside their own:
//!    one job with devices of its own, so it moves arrays as any program does. `layouts` says which
//!    pieces of leaves travel, and `bits` has their hashes and changes.
//! 4. `seeker`: looks for the publisher, on process 0 of a subscriber, and invites all to a link.
//! 5. `taker`: joins links on each process, compares the hashes, and gives the version to an
//!    [`Intake`] (`subscriber`).
//!
//! Nothing here is an operation of the user's program, which never waits for a link.

mod bits;
mod buffers;
mod group;
mod held_versions;
mod layouts;
mod link;
mod net;
mod publisher;
mod seeker;
#[cfg(test)]
mod simulated;
mod store;
mod subscriber;
mod taker;
#[cfg(test)]
mod tests;

pub use layouts::{LeafPart, WantedLeaf};
pub use publisher::{Publication, Publisher, PublisherMetrics};
pub use subscriber::{Intake, NotReceived, Received, Subscribing, Subscription, SubscriptionState};
