//! Models from the folders of model hubs, as stages of a pipeline.
//!
//! A [`Folder`] is a model on disk: config, tokenizer and weights. It is checked as a whole before
//! anything is computed. [`Stages`] divides the layers over stages and loads the weights, so that
//! each process reads only its own regions. [`train`] and [`score`] are the two jobs of the
//! program `finetune`.
//!
//! ```no_run
//! use mpmd::prelude::*;
//! use mpmd::train::data::Text;
//! use mpmd_models::{Folder, Stages, Tokens, score, tokenizer};
//!
//! fn main() -> Result<()> {
//!     let folder = Folder::open("model")?;
//!     Program::builder().devices(2).run(|p| {
//!         // Process 0 reads the text, and all get its tokens.
//!         let read = || Tokens::of(&Text::of(&["README.md"])?, &folder);
//!         let tokens = Tokens::spread(p, read)?;
//!         let model = Stages::new(&folder, 2, tokens.ids().len())?;
//!         let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
//!         if let Some(nats) = score::nats_per_token(p, &model, &meshes, &tokens)? {
//!             println!("{nats} nats per token");
//!         }
//!         Ok(())
//!     })
//! }
//! ```

#![forbid(unsafe_code)]

mod choice;
mod clock;
mod config;
mod content;
mod cut;
mod decoder;
mod divide;
mod examples;
mod family;
mod files;
mod folder;
mod forward;
pub mod generate;
mod generator;
mod inference;
mod initial;
mod inputs;
mod load;
mod lora;
mod matrix;
mod over;
mod pass;
mod publish;
mod rope;
mod sample;
mod save;
pub mod score;
mod stages;
mod stored;
mod template;
mod text;
mod token_order;
mod tokens;
pub mod train;
mod versions;

use std::fmt;
use std::path::Path;

use mpmd::Error;

pub use choice::{Choice, Unchosen};
pub use clock::StageTimes;
pub use config::{Config, Experts, HeadNorm, LayerConfig, Norm};
pub use cut::{CutArgs, Held, Room};
pub use examples::{read_examples, spread_examples};
pub use folder::Folder;
pub use generator::Generator;
pub use inference::{Choices, Inference, Times};
pub use lora::{Lora, merged};
pub use pass::{Begin, Chunk, MOST_TOKENS, Pass, TOP, most_words};
pub use publish::{PublishArgs, SubscribeArgs, Weights};
pub use rope::{Angles, Places, Rope, Rotation, Scaling};
pub use sample::Sampling;
pub use save::{save, save_adapter};
pub use stages::Stages;
pub use template::{Message, Templates};
pub use text::Text;
pub use tokens::{Tokens, encode_prompt, tokenizer};
pub use versions::{Versions, next_of_folder, version_number};

/// Returns the error for something in a file that is other than expected. `subject` is a tensor or
/// a key; it may be empty if the file itself is meant.
fn unexpected(
    file: &Path,
    subject: &str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Error {
    let colon = if subject.is_empty() { "" } else { ": " };
    let file = file.display();
    Error::Environment(format!("{file}: {subject}{colon}expected {expected}, found {found}"))
}

/// Returns the error for an option that is other than expected.
fn wrong(option: &str, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
    Error::Environment(format!("{option}: expected {expected}, found {found}"))
}
