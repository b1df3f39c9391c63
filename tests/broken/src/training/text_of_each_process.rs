//! Each process trains on a text of its own.
//!
//! kind: data that are not the same on every process
//! found by: check
//! named: all
//! says: a text of

use mpmd::Program;
use mpmd::pipeline::Microbatch;
use mpmd::prelude::*;
use mpmd::topology::Mesh;
use mpmd::train::Run;
use mpmd::train::data::{Data, MicrobatchPlace, TextBytes};

use super::{Same, trainer};

/// A text, of which the microbatches here use nothing.
struct Text(TextBytes);

impl Data<MpmdArray> for Text {
    fn compare(&self, p: &mut Program) -> Result<()> {
        self.0.compare(p)
    }

    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        _: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        Same::microbatch(p, meshes)
    }
}

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut trainer = trainer(p, 0.01)?;
    let text = format!("the text of process {}", p.process());
    let text = Text(TextBytes::of_files(&[text.into_bytes()])?);
    let run = Run::steps(3).progress(false);
    trainer.run(p, run, &text).map(drop)
}
