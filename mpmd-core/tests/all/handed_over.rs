//! Runs the tests of values, memory and failures again with zero-copy transfers between processes.
//! Nothing else may change.

#![allow(
    clippy::duplicate_mod,
    reason = "`simulations.rs` is another in this copy"
)]

#[path = "collectives.rs"]
mod collectives;
#[path = "failures.rs"]
mod failures;
#[path = "partial_sums.rs"]
mod partial_sums;
#[path = "random_puts.rs"]
mod random_puts;
#[path = "relays.rs"]
mod relays;
#[path = "resources.rs"]
mod resources;
#[path = "routing.rs"]
mod routing;
#[path = "sends.rs"]
mod sends;
#[path = "simulations.rs"]
mod simulations;
