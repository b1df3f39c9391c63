//! The weights of another model are to replace those in use.
//!
//! kind: half of one model and half of another
//! found by: issue
//! named: all
//! says: as in the model in use, found

use mpmd::{Program, Result};

use super::{inference, model};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let inference = inference(p, &model("plain"))?;
    inference.read_weights(p, &model("grouped"), 1)
}
