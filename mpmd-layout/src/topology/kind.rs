//! What devices are, and what each process of a job is said to have.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a device is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A thread of its own on the host's processors.
    Cpu,
    /// A CUDA graphics processor.
    Cuda,
}

impl DeviceKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Cuda];

    /// Its name for users: `cpu`, `cuda`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// The kind of that name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Reads what users say of the devices of a job: one kind for all processes, or several, by
    /// process, with commas between them. `None` where one of them is no kind.
    pub fn list(text: &str) -> Option<Vec<Self>> {
        text.split(',').map(|name| Self::named(name.trim())).collect()
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
        assert_eq!(DeviceKind::list("cpu, cuda,cuda"), Some(vec![Cpu, Cuda, Cuda]));
        for wrong in ["", "gpu", "CUDA", "cpu,", "cpu;cuda"] {
            assert_eq!(DeviceKind::list(wrong), None, "{wrong}");
        }
    }
}
