//! Trains or scores a Llama-type model from a folder: `cargo run --release --bin finetune -- --model
//! DIR`.

fn main() {}
