//! Simulations whose processes hand arrays over to each other, in the test program that asks for
//! it.

use mpmd_core::Simulation;

/// Whether this is the test program in which arrays are handed over (`handed_over.rs`).
pub(crate) fn hands_over() -> bool {
    env!("CARGO_CRATE_NAME") == "handed_over"
}

/// As [`Simulation::new`]; where arrays are handed over, every process hands over to every other.
pub(crate) fn simulation(processes: usize, devices: usize) -> Simulation {
    let simulation = Simulation::new(processes, devices);
    if hands_over() { simulation.hands_over(&vec![0; processes]) } else { simulation }
}
