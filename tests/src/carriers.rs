//! What may carry the messages between processes: the one list of it, for all tests of real
//! processes.

use std::process::Command;

use mpmd_core::launch::variables;

/// A transport between processes, and what makes it take one way and no other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Carrier {
    /// The transport's name, as a user writes it.
    pub transport: &'static str,
    /// The only ways that UCX may take; its own choice where there are none.
    ways: Option<&'static str>,
}

impl Carrier {
    /// Sockets of our own.
    pub const TCP: Self = Self { transport: "tcp", ways: None };
    /// Memory that processes of one host share, of our own.
    pub const SHM: Self = Self { transport: "shm", ways: None };
    /// UCX by the ways that it thinks best.
    #[cfg(feature = "ucx")]
    pub const UCX: Self = Self { transport: "ucx", ways: None };
    /// UCX by the memory that processes of one host share.
    #[cfg(feature = "ucx")]
    pub const UCX_SHARED_MEMORY: Self =
        Self { transport: "ucx", ways: Some("posix,sysv,cma,self") };
    /// UCX by sockets.
    #[cfg(feature = "ucx")]
    pub const UCX_TCP: Self = Self { transport: "ucx", ways: Some("tcp,self") };

    /// Has a process, and all that it starts, use this carrier.
    pub fn set(self, command: &mut Command) {
        command.env(variables::TRANSPORT, self.transport);
        match self.ways {
            Some(ways) => command.env(WAYS, ways),
            None => command.env_remove(WAYS),
        };
    }

    /// Whether tests go through all that they can think of. Over the others they do each thing
    /// once: what does not depend on the carrier has been seen by then.
    pub fn is_thorough(self) -> bool {
        [Self::TCP, Self::SHM].contains(&self)
    }

    /// Whether a test that tries several numbers of processes tries this one.
    pub fn takes(self, processes: usize) -> bool {
        self.is_thorough() || [2, 4].contains(&processes)
    }
}

/// By which UCX is told which ways to take.
const WAYS: &str = "UCX_TLS";

/// Makes a test of each of these functions for each [`Carrier`], which they take: `over_tcp::name`
/// and so on.
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
    fn a_process_hears_of_its_carrier_whatever_was_set_before() {
        let said = |carrier: Carrier| {
            let mut command = Command::new("env");
            carrier.set(command.env(WAYS, "of somebody else").env(variables::TRANSPORT, "another"));
            let said = command.output().expect("env is everywhere").stdout;
            let mut lines: Vec<String> =
                String::from_utf8_lossy(&said).lines().map(str::to_owned).collect();
            lines.retain(|line| line.starts_with(WAYS) || line.starts_with(variables::TRANSPORT));
            lines.sort();
            lines
        };
        assert_eq!(said(Carrier::TCP), ["MPMD_TRANSPORT=tcp"]);
        assert_eq!(said(Carrier::SHM), ["MPMD_TRANSPORT=shm"]);
        let narrow = Carrier { transport: "ucx", ways: Some("tcp,self") };
        assert_eq!(said(narrow), ["MPMD_TRANSPORT=ucx", "UCX_TLS=tcp,self"]);
        assert!(
            !narrow.is_thorough() && narrow.takes(4) && !narrow.takes(8) && Carrier::TCP.takes(8)
        );
    }
}
