//! A pass continues its sequence one position too late.
//!
//! kind: a condition of one sequence, which must be no failure of its pass
//! found by: run
//! named: all
//! says: does not continue the sequence where the one before has ended

use mpmd::{Error, Program, Result};
use mpmd_models::Unchosen;

use super::{inference, next, pass, prompt};

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let mut inference = inference(p)?;
    let first = pass(vec![prompt(0, &[5, 17, 3]), prompt(1, &[5, 17, 3])]);
    let choices = inference.pass(p, &first, None)?;
    let choices = inference.pass(p, &pass(vec![next(0, 4), next(1, 3)]), Some(&choices))?;
    let read = || {
        let choices = inference.read(&choices)?.unwrap_or_default();
        Ok(choices.into_values().map(|choice| choice.token).collect())
    };
    let tokens: Vec<_> = p.broadcast_value(inference.owner(), Vec::new(), read)?;
    match tokens[..] {
        // The other sequence has its token.
        [Err(why @ Unchosen::OutOfOrder), Ok(_)] => Err(Error::kernel(why.to_string())),
        _ => Ok(()),
    }
}
