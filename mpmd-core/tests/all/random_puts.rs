//! Random chains of puts keep the values at every step and leak no memory.

use super::simulations::{simulation, zero_copy};
use crate::common::chains::chain;
use crate::common::watchdog;

#[test]
fn chains_0_to_23_keep_values_and_leak_no_memory() {
    let _limit = watchdog(120);
    (0..24).for_each(|seed| chain(seed, false, simulation, zero_copy()));
}
