//! The model and the sums of the optimiser are committed one by one, under the same step. After a
//! loss the newer commit would be restored into the model.
//!
//! kind: a state in two commits of one step
//! found by: issue
//! named: all
//! says: the state of step 1 is committed already, with other contents

use mpmd::Commits;
use mpmd::prelude::*;

use super::{filled, halves};

pub(crate) fn run(p: &mut Program, commits: &Commits) -> Result<()> {
    let (mut model, mut sums) = (filled(p, 1.0)?, filled(p, 0.0)?);
    let first = commits.restore(p, &mut model)?;
    let halves = halves(p)?;
    let mesh = p.mesh(&[("x", 2)])?;
    let double = p
        .jit(elementwise(|x: f32| 2.0 * x))
        .on(&mesh)
        .outputs(&halves)
        .build()?;
    for step in first..3 {
        model = double.call(p, model)?;
        sums = double.call(p, sums)?;
        p.step_end()?;
        p.commit(step + 1, &model)?;
        p.commit(step + 1, &sums)?; // at fault
    }
    Ok(())
}
