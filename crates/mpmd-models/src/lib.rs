//! Models from the folders of model hubs, and from GGUF files, as stages of a pipeline.
//!
//! A [`Folder`] is a model on disk: config, tokenizer and weights, in a folder or a GGUF file. It
//! is checked as a whole before anything is computed. [`Stages`] divides the layers over stages and
//! loads the weights, so that each process reads only its own regions. Then [`trainer`] trains it,
//! [`score`] computes its loss, [`Stages::generator`] continues a text, and [`Inference`] computes
//! many texts at a time.
//!
//! ```no_run
//! use mpmd::prelude::*;
//! use mpmd::train::data::TextBytes;
//! use mpmd_models::{Folder, Stages, Tokens, score, tokenizer};
//!
//! fn main() -> Result<()> {
//!     let folder = Folder::open("model")?;
//!     Program::builder().devices(2).run(|p| {
//!         // Process 0 reads the text, and all get its tokens.
//!         let read = || Tokens::of(&TextBytes::of(&["README.md"])?, &folder);
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

mod config;
mod decoder;
mod division;
mod error;
mod family;
mod hub;
mod inference;
mod rope;
mod stages;
mod text;

pub use config::neutral::asks_for_nothing;
pub use config::{ExpertsConfig, HeadNorm, LayerConfig, ModelConfig, NormKind};
pub use decoder::lora::{Lora, merged};
pub use division::Division;
pub use division::costs::{HeldBytes, Room};
pub use error::{DivisionError, InvalidSetting};
pub use hub::adapter::Adapter;
pub use hub::content::CHANGED;
pub use hub::folder::Folder;
pub use hub::save::{save, save_adapter};
pub use inference::choice::{Choice, Unchosen};
pub use inference::generator::Generator;
pub use inference::pass::{InferencePass, MOST_TOKENS, NewSequence, PassChunk, TOP, most_words};
pub use inference::sample::Sampling;
pub use inference::stage_times::StageTimes;
pub use inference::versions::{
    PublisherState, VersionsState, WeightVersions, next_of_folder, version_number,
};
pub use inference::weight_store::WeightType;
pub use inference::{Choices, Inference, PendingTimes};
pub use rope::{Rope, RopeAngles, RopePlaces, RopeRotation, Scaling};
pub use stages::Stages;
pub use stages::publish::WeightPublisher;
pub use stages::score;
pub use stages::trainer::{TrainerSettings, evaluator, trainer};
pub use text::conversation::{Conversation, ConversationError, ConversationFault};
pub use text::examples::{read_examples, spread_examples};
pub use text::prompts::{PromptEncoder, PromptFault, RenderedPrompt};
pub use text::stream::TextStream;
pub use text::template::{Day, InvalidDay, TemplateFault};
pub use text::token_bytes::TokenBytes;
pub use text::token_decoder::TokenDecoder;
pub use text::token_file::TokenType;
pub use text::tokens::{Tokens, check_rows, spread, tokenizer};
