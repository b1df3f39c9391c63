//! Random chains of puts keep the values at every step and leak no memory.

#[path = "common/arrays.rs"]
mod arrays;
#[path = "common/chains.rs"]
mod chains;
mod common;
#[path = "common/simulations.rs"]
mod simulations;

use chains::chain;
use common::watchdog;
use simulations::{hands_over, simulation};

#[test]
fn chains_0_to_23_keep_values_and_leak_no_memory() {
    let _limit = watchdog(120);
    (0..24).for_each(|seed| chain(seed, false, simulation, hands_over()));
}
