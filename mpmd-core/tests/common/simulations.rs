//! Simulations with zero-copy transfers between processes, in the test program that asks for them.

use mpmd_core::Simulation;

/// True in the test program with zero-copy transfers (`handed_over.rs`).
pub(crate) fn hands_over() -> bool {
    env!("CARGO_CRATE_NAME") == "handed_over"
}

/// As [`Simulation::new`]. In the test program with zero-copy transfers, every process uses them
/// with every other.
pub(crate) fn simulation(processes: usize, devices: usize) -> Simulation {
    let simulation = Simulation::new(processes, devices);
    if hands_over() { simulation.hands_over(&vec![0; processes]) } else { simulation }
}
