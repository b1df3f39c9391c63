//! The kinds of devices, and the parser for the list of kinds of a job's processes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a device.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A thread on the host's CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

impl DeviceKind {
    /// All kinds, in the order of declaration.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Cuda];

    /// Returns the kind's name for users: `cpu` or `cuda`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// True if devices of this kind have separate memory that the host cannot read.
    pub fn is_accelerator(self) -> bool {
        self == Self::Cuda
    }

    /// Returns the kind with this name, or `None` if no kind has it. Case matters.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Parses a list of device kinds separated by commas: one kind for all processes of a job, or
    /// one for each. Returns `None` if a name is not a kind.
    pub fn list(text: &str) -> Option<Vec<Self>> {
        text.split(',')
            .map(|name| Self::named(name.trim()))
            .collect()
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_one_name_everywhere() {
        for kind in DeviceKind::ALL {
            assert_eq!(DeviceKind::named(kind.name()), Some(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.to_string());
        }
    }

    #[test]
    fn lists_are_of_kinds_and_nothing_else() {
        use DeviceKind::{Cpu, Cuda};
        assert_eq!(DeviceKind::list("cuda"), Some(vec![Cuda]));
        assert_eq!(
            DeviceKind::list("cpu, cuda,cuda"),
            Some(vec![Cpu, Cuda, Cuda])
        );
        for wrong in ["", "gpu", "CUDA", "cpu,", "cpu;cuda"] {
            assert_eq!(DeviceKind::list(wrong), None, "{wrong}");
        }
    }
}
