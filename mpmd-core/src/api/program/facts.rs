//! The facts about a process that must be equal on all processes of its job.

use std::fmt;
use std::sync::{Arc, OnceLock};

use mpmd_launch::LaunchError;
use mpmd_rendezvous::{Difference, Fact, RendezvousError};

use crate::error::{Error, Result};

type FactFinder = dyn Fn() -> Vec<Fact> + Send + Sync;

/// The function given to [`Builder::facts`](super::Builder::facts), and the facts that it first
/// returned. Clones share both.
#[derive(Clone)]
pub(super) struct ProgramFacts {
    find: Arc<FactFinder>,
    /// The facts that this process reported when it first joined its job.
    told: Arc<OnceLock<Vec<Fact>>>,
}

impl ProgramFacts {
    pub(super) fn new(find: impl Fn() -> Vec<Fact> + Send + Sync + 'static) -> Self {
        Self {
            find: Arc::new(find),
            told: Arc::default(),
        }
    }

    /// Returns the facts of the time when this process first joined its job. They stay the same in
    /// later epochs, because the process continues with values in its memory.
    pub(super) fn told(&self) -> &[Fact] {
        self.told.get_or_init(|| (self.find)())
    }

    /// Calls the function again, and fails if the facts have changed.
    pub(super) fn check(&self) -> Result<()> {
        let facts = Difference::between(self.told(), &(self.find)());
        match facts.is_empty() {
            true => Ok(()),
            false => Err(Error::Launch(LaunchError::Rendezvous(
                RendezvousError::Changed { facts },
            ))),
        }
    }
}

impl fmt::Debug for ProgramFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Facts").field(&self.told.get()).finish()
    }
}
