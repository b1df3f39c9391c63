//! The reasons why CUDA cannot be used, and the versions of its parts.

use std::fmt;

use serde::{Serialize, Serializer};

/// A version of CUDA or of one of its libraries, or a compute capability.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct CudaVersion {
    /// The number before the point.
    pub major: u32,
    /// The number after the point.
    pub minor: u32,
}

/// A reason in the environment why CUDA or one of its libraries cannot be used. Its serialized form
/// is its text.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCuda {
    /// No file with one of the library's names can be loaded.
    #[error(
        "no {library} found: looked for {} in the loader's own folders, in LD_LIBRARY_PATH ({}), \
         and in {}{}",
        .looked_for.join(", "),
        .library_path.as_deref().unwrap_or("not set"),
        .folders.join(", "),
        .failed.iter().map(|why| format!("; {why}")).collect::<String>()
    )]
    NoLibrary {
        /// The library's name in messages: `CUDA driver`, `NVRTC`.
        library: &'static str,
        /// All file names that were tried.
        looked_for: Vec<String>,
        /// The value of `LD_LIBRARY_PATH`, if set.
        library_path: Option<String>,
        /// The other folders that were searched, even if they do not exist. A path may list several
        /// names in braces, as in a shell.
        folders: Vec<String>,
        /// The loader's messages for files that exist but cannot be loaded.
        failed: Vec<String>,
    },
    /// The library lacks functions: it is incomplete or too old for this program.
    #[error("no {library} found that can be used: the library here has no {}", .symbols.join(", "))]
    NoSymbols {
        /// The library's name in messages.
        library: &'static str,
        /// The names of the missing functions.
        symbols: Vec<String>,
    },
    /// A function of the library fails, for instance since the kernel module is missing or has
    /// another version.
    #[error("no {library} found that can be used: {call} fails with {name} ({text})")]
    Refused {
        /// The library's name in messages.
        library: &'static str,
        /// The name of the function that was called.
        call: &'static str,
        /// The name of the error.
        name: String,
        /// The library's description of the error.
        text: String,
    },
    /// The library that was found as the driver is the stub of a CUDA toolkit, which is only for
    /// the linker.
    #[error(
        "no CUDA driver found that can be used: libcuda.so is the stub of a CUDA toolkit, which is \
         for linking only; take the toolkit's folder `stubs` out of LD_LIBRARY_PATH ({})",
        .library_path.as_deref().unwrap_or("not set")
    )]
    Stub {
        /// The value of `LD_LIBRARY_PATH`, if set.
        library_path: Option<String>,
    },
    /// The driver is older than [`OLDEST`].
    #[error(
        "no CUDA driver found that can be used: the one here is for CUDA {version}, this program \
         needs {OLDEST}"
    )]
    TooOld {
        /// The CUDA version that the driver supports.
        version: CudaVersion,
    },
    /// The driver works but shows no graphics processor.
    #[error(
        "the CUDA driver shows no graphics processor; CUDA_VISIBLE_DEVICES is {}",
        .visible.as_deref().unwrap_or("not set")
    )]
    NoGpu {
        /// The value of `CUDA_VISIBLE_DEVICES`, if set.
        visible: Option<String>,
    },
}

impl serde::Serialize for NoCuda {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl NoCuda {
    /// Returns true if the missing library is NCCL.
    pub fn is_of_nccl(&self) -> bool {
        match self {
            Self::NoLibrary { library, .. }
            | Self::NoSymbols { library, .. }
            | Self::Refused { library, .. } => *library == NCCL,
            _ => false,
        }
    }
}

/// NCCL's name in messages.
pub(super) const NCCL: &str = "NCCL";

/// The oldest CUDA version that a driver must support.
pub const OLDEST: CudaVersion = CudaVersion {
    major: 12,
    minor: 0,
};

impl CudaVersion {
    /// Converts CUDA's number of a version: 12080 is 12.8.
    pub fn of_number(number: u32) -> Self {
        Self {
            major: number / 1000,
            minor: number % 1000 / 10,
        }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Serialised as the text `major.minor`.
impl Serialize for CudaVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_error_lists_names_and_folders() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let none = |library_path: Option<&str>, failed: &[&str]| NoCuda::NoLibrary {
            library: "NVRTC",
            looked_for: texts(&["libnvrtc.so.13", "libnvrtc.so"]),
            library_path: library_path.map(str::to_owned),
            folders: texts(&["/cuda/lib64", "/packages/nvidia/{cu13,cuda_nvrtc}/lib"]),
            failed: texts(failed),
        };
        assert_eq!(
            none(None, &[]).to_string(),
            "no NVRTC found: looked for libnvrtc.so.13, libnvrtc.so in the loader's own folders, \
             in LD_LIBRARY_PATH (not set), and in /cuda/lib64, \
             /packages/nvidia/{cu13,cuda_nvrtc}/lib"
        );
        let said = none(Some("/a:/b"), &["libnvrtc.so: file too short"]).to_string();
        assert!(
            said.contains(" LD_LIBRARY_PATH (/a:/b), ")
                && said.ends_with("; libnvrtc.so: file too short")
        );
        let hidden = NoCuda::NoGpu {
            visible: Some("7".to_owned()),
        };
        assert!(
            hidden
                .to_string()
                .contains("driver shows no graphics processor; CUDA_VISIBLE_DEVICES is 7")
        );
    }
}
