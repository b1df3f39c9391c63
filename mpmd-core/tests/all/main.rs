//! Tests of the public interface, in one program: building one per topic takes minutes.
//!
//! No test sets state of its process. Those that need an environment of their own run again in a
//! process that has it ([`softcuda::again`]).

mod blank_stages;
mod common;
mod models;
mod simulations;
mod stages;

mod annotations;
mod any_to_any;
mod api;
mod bad_use;
mod closure_stages;
mod closures;
mod collectives;
mod commits;
mod compute;
mod compute_functions;
mod compute_gradients;
mod compute_oracle;
mod corners;
mod cuda_calls;
mod cuda_kernels;
mod cuda_layers;
mod cuda_libraries;
mod cuda_moves;
mod cuda_nccl;
mod dry_run;
mod failures;
mod handed_over;
mod joined_moves;
mod lending;
mod many_leaves;
mod matmul;
mod memory_accounts;
mod objects;
mod partial_sums;
mod pipeline;
mod pipeline_buffers;
mod pipeline_errors;
mod pipeline_models;
mod pipeline_probes;
mod pipeline_replay;
mod pipeline_schedules;
mod pipeline_stages;
mod pipeline_wiring;
mod program;
mod put_vjp;
mod random_puts;
mod recovery;
mod relays;
mod replay;
mod reshard;
mod resources;
mod routing;
mod same_call;
mod seeded;
mod sends;
mod sends_awaited;
mod sharding_kinds;
mod spans;
mod split;
