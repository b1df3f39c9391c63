//! Programs run as real processes, one module per topic.

mod bad_start;
mod causes;
mod check;
mod counters;
mod cuda_ipc;
mod cuda_nccl;
mod devices;
mod divergence;
mod example_tests;
mod examples;
mod fault_injection;
mod hang;
mod holdings;
mod kill;
mod launcher;
mod launchers;
mod lending;
mod lost_rendezvous;
mod near_and_far;
mod resources;
mod sending;
mod soak;
mod traces;
mod train_gpt;
mod transfers;
mod transport;
