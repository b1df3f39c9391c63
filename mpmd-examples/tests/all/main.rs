//! Tests of the examples, one module per topic.

mod cuda_programs;
mod gpt_autodiff;
mod gpt_cuda;
mod gpt_pipeline;
mod pipeline_check;
mod programs;
