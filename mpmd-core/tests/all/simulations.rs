//! Simulations for tests that run twice: [`handed_over`](crate::handed_over) includes this file
//! again.

use mpmd_core::Simulation;

/// True in the copy for zero-copy transfers (`handed_over.rs`).
pub(crate) fn zero_copy() -> bool {
    module_path!().contains("handed_over")
}

/// As [`Simulation::new`]. In the copy for zero-copy transfers, every process uses them with every
/// other.
pub(crate) fn simulation(processes: usize, devices: usize) -> Simulation {
    let simulation = Simulation::new(processes, devices);
    if zero_copy() {
        simulation.zero_copy(&vec![0; processes])
    } else {
        simulation
    }
}
