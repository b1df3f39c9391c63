//! What is here where UCX is not compiled in.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use super::{NAME, Report, UcxConfig};
use crate::memory::SharedBuffer;
use crate::transport::{Handler, Ticket, Transport, TransportError};
use crate::wire::{Header, ProcessId};

/// UCX, opened but not connected. There is none without the feature `ucx`.
#[derive(Debug)]
pub struct Opened(Infallible);

/// The transport over UCX. There is none without the feature `ucx`.
#[derive(Debug)]
pub struct Ucx(Infallible);

/// What UCX finds on this machine.
///
/// # Errors
///
/// Says that it is not compiled in.
pub fn examine(_: Duration) -> Result<Report, TransportError> {
    Err(not_compiled_in())
}

impl Opened {
    /// Opens UCX on this machine for a job of so many processes.
    ///
    /// # Errors
    ///
    /// Says that it is not compiled in.
    pub fn open(_: usize) -> Result<Self, TransportError> {
        Err(not_compiled_in())
    }

    /// What peers need to know to reach this process.
    pub fn address(&self) -> &str {
        match self.0 {}
    }

    /// Connects to all peers.
    ///
    /// # Errors
    ///
    /// Cannot be called.
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
    TransportError::Unavailable { transport: NAME, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_hears_how_to_get_it() {
        let said = Opened::open(2).unwrap_err().to_string();
        assert_eq!(said, examine(Duration::ZERO).unwrap_err().to_string());
        assert!(said.contains("ucx is not available") && said.contains("--features ucx"), "{said}");
    }
}
