//! A prompt has a token for which the embedding has no row.
//!
//! kind: an input that would fail on one stage alone
//! found by: issue
//! named: all
//! says: token 1000000 has no row in the model's embedding of 320 rows

use mpmd::{Program, Result};

use super::{inference, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let choices = inference.pass(p, &pass(vec![prompt(0, &[5, 1_000_000])]), None)?;
    inference.read(&choices)?;
    Ok(())
}
