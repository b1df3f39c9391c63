//! Each process trains on a text of its own.
//!
//! kind: data that are not the same on every process
//! found by: check
//! named: all
//! says: a text of

use mpmd::Program;
use mpmd::prelude::*;
use mpmd::train::Run;
use mpmd::train::data::TextBytes;

use super::{Same, trainer};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut trainer = trainer(p, 0.01)?;
    let text = format!("the text of process {}", p.process());
    let data = Same {
        text: Some(TextBytes::of_files(&[text.into_bytes()])?),
    };
    let run = Run::steps(3).progress(false);
    trainer.run(p, run, &data).map(drop)
}
