//! Prints the tokens of texts, by the tokenizer of a model. `tests/make_gguf.py` compares them with
//! those that llama.cpp has beside its vocabularies.
//!
//! `tokens MODEL` reads a JSON list of texts from stdin, and prints a list of numbers for each.

use std::env;
use std::io;

use mpmd::{Error, Result};
use mpmd_models::{Folder, PromptEncoder};

fn main() -> Result<()> {
    let model = env::args().nth(1);
    let model = model.ok_or_else(|| Error::Environment("expected a model".to_owned()))?;
    let texts: Vec<String> = serde_json::from_reader(io::stdin())
        .map_err(|why| Error::Environment(format!("a list of texts: {why}")))?;
    let encoder = PromptEncoder::of(&Folder::open(model)?)?;
    for text in texts {
        println!("{:?}", encoder.text_tokens(&text, false)?);
    }
    Ok(())
}
