//! Access to environment variables, with a record of those that were read.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::str::FromStr;

use super::address::{address, derived_port, hash};
use super::launchers::DefaultCoordinator;
use crate::{LaunchError, variables as ours};

/// Environment variables. Records every lookup, so that errors can list them.
pub(super) struct LauncherVars<'a> {
    look: &'a dyn Fn(&str) -> Option<String>,
    owners: &'a [u32],
    looked: RefCell<BTreeMap<String, Option<String>>>,
}

impl<'a> LauncherVars<'a> {
    /// Creates an accessor to the variables that `look` finds. Files that they name must belong to
    /// one of the users `owners`.
    pub(super) fn new(look: &'a dyn Fn(&str) -> Option<String>, owners: &'a [u32]) -> Self {
        Self {
            look,
            owners,
            looked: RefCell::new(BTreeMap::new()),
        }
    }

    /// Returns the users that a file may belong to.
    pub(super) fn owners(&self) -> &'a [u32] {
        self.owners
    }

    /// Returns the trimmed value of a variable. An empty one counts as unset.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        let value = (self.look)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty());
        self.looked
            .borrow_mut()
            .insert(name.to_owned(), value.clone());
        value
    }

    /// Returns the number in a variable, or `None` if it is not set. Fails if the value is no
    /// number.
    pub(super) fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, LaunchError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.parse().map_err(|_| LaunchError::Variable {
            variable: name.into(),
            value,
            expected: "a number".to_owned(),
        });
        number.map(Some)
    }

    /// Returns the number in a variable that the launcher `source` must have set. Fails if it is
    /// not set or no number.
    pub(super) fn needed<T: FromStr>(
        &self,
        source: &'static str,
        name: &str,
    ) -> Result<T, LaunchError> {
        self.number(name)?
            .ok_or_else(|| self.half_set(source, name))
    }

    /// Returns the error for a launcher that has set some variables but not `missing`.
    pub(super) fn half_set(&self, source_name: &'static str, missing: &str) -> LaunchError {
        let looked = self.looked.borrow();
        let found: Vec<String> = looked
            .iter()
            .map(|(name, value)| match value {
                // The token is secret, so its value is not shown.
                Some(_) if name == ours::JOB_TOKEN => format!("{name} is set"),
                Some(value) => format!("{name}={value}"),
                None => format!("{name} is not set"),
            })
            .collect();
        LaunchError::HalfSet {
            source_name,
            missing: missing.to_owned(),
            found: format!("looked at: {}", found.join(", ")),
        }
    }

    /// Returns a text that identifies an MPI job: the first of its variables that is set, if any.
    pub(super) fn namespace(&self) -> Option<String> {
        [
            "PMIX_NAMESPACE",
            "OMPI_MCA_ess_base_jobid",
            "OMPI_MCA_orte_hnp_uri",
            "PMI_JOBID",
            "PMI_KVSNAME",
        ]
        .iter()
        .find_map(|name| self.get(name))
    }

    /// Returns (rendezvous address, text that identifies the job) for an MPI job on one host.
    pub(super) fn on_this_host(&self) -> (DefaultCoordinator, Option<String>) {
        let job = self.namespace();
        let coordinator = match &job {
            Some(job) => DefaultCoordinator::At(address("127.0.0.1", derived_port(hash(job)))),
            None => DefaultCoordinator::Needs(format!(
                "{} (or PMIX_NAMESPACE, to derive one)",
                ours::COORDINATOR
            )),
        };
        (coordinator, job)
    }
}
