//! Replaces the transport in builds without the feature `ucx`: opening it returns an error.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use super::{NAME, UcxConfig, UcxReport};
use crate::transport::{Handler, Ticket, Transport, TransportError};
use mpmd_memory::SharedBuffer;
use mpmd_proto::wire::{Header, ProcessId};

/// UCX, opened but not connected. Cannot be created without the feature `ucx`.
#[derive(Debug)]
pub struct OpenedUcx(Infallible);

/// The transport over UCX. Cannot be created without the feature `ucx`.
#[derive(Debug)]
pub struct Ucx(Infallible);

/// Always fails: UCX is not compiled in.
///
/// # Errors
///
/// Always [`TransportError::Unavailable`].
pub fn examine() -> Result<UcxReport, TransportError> {
    Err(not_compiled_in())
}

impl OpenedUcx {
    /// Always fails: UCX is not compiled in.
    ///
    /// # Errors
    ///
    /// Always [`TransportError::Unavailable`].
    pub fn open(_: usize) -> Result<Self, TransportError> {
        Err(not_compiled_in())
    }

    /// Returns the address by which peers reach this process. Cannot be called.
    pub fn address(&self) -> &str {
        match self.0 {}
    }

    /// Connects to all peers. Cannot be called.
    ///
    /// # Errors
    ///
    /// None, because it cannot be called.
    pub fn connect(self, _: UcxConfig) -> Result<Arc<Ucx>, TransportError> {
        match self.0 {}
    }
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn process(&self) -> ProcessId {
        match self.0 {}
    }

    fn processes(&self) -> usize {
        match self.0 {}
    }

    fn start(&self, _: Arc<dyn Handler>) {
        match self.0 {}
    }

    fn post(&self, _: ProcessId, _: Header, _: Option<SharedBuffer>, _: Ticket) {
        match self.0 {}
    }

    fn shutdown(&self, _: Duration) {
        match self.0 {}
    }
}

fn not_compiled_in() -> TransportError {
    let why = "this program was built without it; build it with `--features ucx`".to_owned();
    TransportError::Unavailable {
        transport: NAME,
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_missing_cargo_feature() {
        let said = OpenedUcx::open(2).unwrap_err().to_string();
        assert_eq!(said, examine().unwrap_err().to_string());
        assert!(
            said.contains("ucx is not available") && said.contains("--features ucx"),
            "{said}"
        );
    }
}
