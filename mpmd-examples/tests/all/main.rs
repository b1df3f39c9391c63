//! Tests of the examples, one module per topic.

mod cuda_programs;
mod kernel_gpt;
mod pipeline_check;
mod programs;
