//! The names of transports, which are the values of `MPMD_TRANSPORT`.

use crate::{LaunchError, variables};

/// The valid names of transports. `auto` is shared memory between processes that can share it, else
/// TCP. A transport may be unavailable on this machine, which shows when it is opened.
pub const TRANSPORTS: [&str; 4] = ["auto", "shm", "tcp", "ucx"];

/// Checks that `name` is a valid name of a transport. Does not check that the transport is
/// available.
///
/// # Errors
///
/// [`LaunchError::Variable`] for `MPMD_TRANSPORT` if the name is invalid. The error lists the valid
/// names.
pub fn check_transport(name: &str) -> Result<(), LaunchError> {
    if TRANSPORTS.contains(&name) {
        return Ok(());
    }
    Err(LaunchError::Variable {
        variable: variables::TRANSPORT.to_owned(),
        value: name.to_owned(),
        expected: format!("the name of a transport: {}", TRANSPORTS.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_transport_name_lists_the_valid_ones() {
        assert!(TRANSPORTS.iter().all(|name| check_transport(name).is_ok()));
        let said = check_transport("pigeon").unwrap_err().to_string();
        assert!(
            said.contains("MPMD_TRANSPORT=pigeon") && said.ends_with("auto, shm, tcp, ucx"),
            "{said}"
        );
    }
}
