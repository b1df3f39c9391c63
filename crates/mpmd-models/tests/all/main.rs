//! Models in folders that `transformers` has made, against its results. `make_folders.py` makes
//! the folders again.

mod adapters;
mod divided;
mod examples;
mod experts;
mod folders;
mod generation;
mod gguf;
mod gguf_change;
mod gguf_refusals;
mod gguf_tokenizers;
mod given;
mod guide;
mod inputs;
mod new;
mod other_weights;
mod saving;
mod scores;
mod strangers;
mod token_files;
mod tokenizers;
mod training;
