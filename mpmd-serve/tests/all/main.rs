//! The server against the results of `transformers`, with the folders of `mpmd-models`.

mod engine;
