//! Published arrays: a program gives out versions of a tree of arrays, and programs of other jobs
//! take them in layouts of their own, while both run.
//!
//! 1. `publisher`: copies a version's regions, cast to the dtype on the way, to memory of its own
//!    (`store`), where the next version's changes are found, too.
//! 2. `group`: the processes of each end stay at a rendezvous, where the other end calls them.
//! 3. `link`: for each subscriber, the processes of both ends run a small program beside their own:
//!    one job with devices of its own, so it moves arrays as any program does. `layouts` says which
//!    pieces of leaves travel, and `bits` has their hashes and changes.
//! 4. `subscriber`: compares the hashes, and gives the version to an [`Intake`] on each process.
//!
//! Nothing here is an operation of the user's program, which never waits for a link.

mod bits;
mod group;
mod layouts;
mod link;
mod publisher;
mod store;
mod subscriber;
#[cfg(test)]
mod tests;

pub use layouts::{Part, Wanted};
pub use publisher::{Publication, Publisher, PublisherMetrics};
pub use subscriber::{Intake, Received, Subscribing, Subscription, SubscriptionState};
