//! Access to environment variables, with a record of those that were read.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::str::FromStr;

use super::address::{address, derived_port, hash};
use super::launchers::DefaultCoordinator;
use crate::{LaunchError, variables as ours};

/// The environment variables of a process. Records every lookup, so that errors can list them.
pub(super) struct LauncherVars<'a> {
    look: &'a dyn Fn(&str) -> Option<String>,
    owners: &'a [u32],
    looked: RefCell<BTreeMap<String, Option<String>>>,
}

impl<'a> LauncherVars<'a> {
    /// Creates an accessor to the variables that `look` returns. Files named in variables must
    /// belong to one of the users `owners`.
    pub(super) fn new(look: &'a dyn Fn(&str) -> Option<String>, owners: &'a [u32]) -> Self {
        Self {
            look,
            owners,
            looked: RefCell::new(BTreeMap::new()),
        }
    }

    /// Returns the users that files named in variables may belong to.
    pub(super) fn owners(&self) -> &'a [u32] {
        self.owners
    }

    /// Returns the value of a variable without white space at its ends. An empty value counts as
    /// unset.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        let value = (self.look)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty());
        self.looked
            .borrow_mut()
            .insert(name.to_owned(), value.clone());
        value
    }

    /// Returns the value of a variable as a number, or `None` if the variable is not set. Fails if
    /// the value is no number.
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

    /// Returns the value of a variable, which the launcher `source` must have set, as a number.
    /// Fails if the variable is not set or is no number.
    pub(super) fn needed<T: FromStr>(
        &self,
        source: &'static str,
        name: &str,
    ) -> Result<T, LaunchError> {
        self.number(name)?
            .ok_or_else(|| self.half_set(source, name))
    }

    /// Returns the error that a launcher has set some of its variables but not `missing`.
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

    /// Returns a text that identifies an MPI job: the value of the first of its job variables that
    /// is set, if any.
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

    /// Returns (rendezvous address, text that identifies the job) for an MPI job whose processes
    /// are all on this host.
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
