//! Each process reads a folder of its own, and these have different models.
//!
//! kind: another model on each process
//! found by: check
//! named: 0
//! says: the programs diverged

use mpmd::{Program, Result};

use super::{inference, model};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let name = ["plain", "llama3"][p.process().index() % 2];
    inference(p, &model(name))?.warm_up(p, |_, _| true)
}
