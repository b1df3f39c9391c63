//! A training has spoiled a weight, and the folder that it has saved is read.
//!
//! kind: values that spoil all results
//! found by: run
//! named: all
//! says: model.layers.1.mlp.up_proj.weight: expected finite values, found NaN

use mpmd::{Program, Result};

use super::{inference, own};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    inference(p, &own("nan"))?.warm_up(p, |_, _| true)
}
