//! The list of transports between processes, for all tests with real processes.

use std::ffi::OsString;
use std::process::Command;

use mpmd_core::launch::variables;
use mpmd_launch::testing::Processes;

/// A transport between processes, and the UCX transports to which it is restricted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Carrier {
    /// The transport's name as the user writes it.
    pub transport: &'static str,
    /// The only transports that UCX may use. `None` for UCX's own choice.
    ways: Option<&'static str>,
}

impl Carrier {
    /// This library's transport over TCP sockets.
    pub const TCP: Self = Self {
        transport: "tcp",
        ways: None,
    };
    /// This library's transport over shared memory of one host.
    pub const SHM: Self = Self {
        transport: "shm",
        ways: None,
    };
    /// UCX with the transports that it chooses.
    #[cfg(feature = "ucx")]
    pub const UCX: Self = Self {
        transport: "ucx",
        ways: None,
    };
    /// UCX over shared memory of one host.
    #[cfg(feature = "ucx")]
    pub const UCX_SHARED_MEMORY: Self = Self {
        transport: "ucx",
        ways: Some("posix,sysv,cma,self"),
    };
    /// UCX over sockets.
    #[cfg(feature = "ucx")]
    pub const UCX_TCP: Self = Self {
        transport: "ucx",
        ways: Some("tcp,self"),
    };

    /// Returns settings that start `program` as `processes` processes over this carrier.
    pub fn processes(self, program: impl Into<OsString>, processes: usize) -> Processes {
        let all = Processes::new(processes, program).env(variables::TRANSPORT, self.transport);
        // Without the variable, `Processes` inherits none.
        self.ways
            .into_iter()
            .fold(all, |all, ways| all.env(WAYS, ways))
    }

    /// Makes a process, and all processes that it starts, use this carrier.
    pub fn set(self, command: &mut Command) {
        command.env(variables::TRANSPORT, self.transport);
        match self.ways {
            Some(ways) => command.env(WAYS, ways),
            None => command.env_remove(WAYS),
        };
    }

    /// True if tests run all their cases over this carrier. Over other carriers they run each case
    /// once, because most results do not depend on the carrier.
    pub fn is_thorough(self) -> bool {
        [Self::TCP, Self::SHM].contains(&self)
    }

    /// True if a test with several numbers of processes runs with this number. Over a thorough
    /// carrier it runs with any number, over others with 2 and 4.
    pub fn takes(self, processes: usize) -> bool {
        self.is_thorough() || [2, 4].contains(&processes)
    }
}

/// Environment variable that selects the transports of UCX.
const WAYS: &str = "UCX_TLS";

/// Defines a test for each pair of a [`Carrier`] and one of these functions, which take a carrier.
/// The tests are named `over_tcp::name` and so on.
#[macro_export]
macro_rules! over_each_carrier {
    ($($check:ident)*) => {
        $crate::over_each_carrier! { @over over_tcp TCP $($check)* }
        $crate::over_each_carrier! { @over over_shm SHM $($check)* }
        #[cfg(feature = "ucx")]
        $crate::over_each_carrier! { @over over_ucx UCX $($check)* }
        #[cfg(feature = "ucx")]
        $crate::over_each_carrier! { @over over_ucx_shared_memory UCX_SHARED_MEMORY $($check)* }
        #[cfg(feature = "ucx")]
        $crate::over_each_carrier! { @over over_ucx_tcp UCX_TCP $($check)* }
    };
    (@over $name:ident $carrier:ident $($check:ident)*) => {
        mod $name {
            $(#[test]
            fn $check() {
                super::$check($crate::Carrier::$carrier);
            })*
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carrier_overrides_earlier_variables() {
        let said = |carrier: Carrier| {
            let mut command = Command::new("env");
            carrier.set(
                command
                    .env(WAYS, "of somebody else")
                    .env(variables::TRANSPORT, "another"),
            );
            let said = command.output().expect("env is everywhere").stdout;
            let mut lines: Vec<String> = String::from_utf8_lossy(&said)
                .lines()
                .map(str::to_owned)
                .collect();
            lines.retain(|line| line.starts_with(WAYS) || line.starts_with(variables::TRANSPORT));
            lines.sort();
            lines
        };
        assert_eq!(said(Carrier::TCP), ["MPMD_TRANSPORT=tcp"]);
        assert_eq!(said(Carrier::SHM), ["MPMD_TRANSPORT=shm"]);
        let narrow = Carrier {
            transport: "ucx",
            ways: Some("tcp,self"),
        };
        assert_eq!(said(narrow), ["MPMD_TRANSPORT=ucx", "UCX_TLS=tcp,self"]);
        assert!(
            !narrow.is_thorough() && narrow.takes(4) && !narrow.takes(8) && Carrier::TCP.takes(8)
        );
    }
}
