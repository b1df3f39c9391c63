//! The programs as real processes.

mod best;
mod changed;
#[path = "../../../mpmd-serve/tests/all/client.rs"]
#[allow(dead_code, reason = "shared with the tests of mpmd-serve")]
mod client;
mod elastic;
mod finetune;
#[path = "../../../mpmd-models/tests/all/folders.rs"]
#[allow(dead_code, reason = "shared with the tests of mpmd-models")]
mod folders;
mod generate;
mod gguf;
mod hosts;
mod model_names;
mod new;
mod serve;
mod stopping;
mod training_messages;
