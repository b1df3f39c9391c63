//! The state is committed as one, and restored in two parts. After a loss the second part would
//! find the commit of the first one.
//!
//! kind: a state that is restored in parts
//! found by: issue
//! named: all
//! says: restored or committed already

use mpmd::Commits;
use mpmd::prelude::*;

use super::filled;

pub(crate) fn run(p: &mut Program, commits: &Commits) -> Result<()> {
    let (mut model, mut sums) = (filled(p, 1.0)?, filled(p, 0.0)?);
    let first = commits.restore(p, &mut model)?;
    commits.restore(p, &mut sums)?; // at fault
    for step in first..3 {
        p.step_end()?;
        p.commit(step + 1, &[model.clone(), sums.clone()])?;
    }
    Ok(())
}
