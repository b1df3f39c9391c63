//! [`Driver`]: what the CUDA driver of this machine shows this process, or why there is none.
//!
//! The libraries are loaded when they are first asked for, so one executable runs with and without
//! them. `cudarc` panics where a library or one of its functions is missing; [`found`] looks for
//! both first and says it as an error, so whoever has a [`Driver`] may call everything that
//! `DRIVER` in `calls` lists.

#[cfg(feature = "cuda")]
mod ask;

use std::fmt;

use serde::{Serialize, Serializer};

/// The driver, as this process sees it. It does not change while the process runs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Driver {
    /// The CUDA version that it knows.
    pub version: Version,
    /// Its graphics processors, by the numbers that it gives them: at least one.
    /// `CUDA_VISIBLE_DEVICES` hides others, and numbers those that are left.
    pub gpus: Vec<Gpu>,
}

/// A graphics processor.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Gpu {
    /// The number that the driver gives it in this process.
    pub ordinal: u32,
    /// Its name for people.
    pub name: String,
    /// The same in every process, whatever number it has there.
    pub uuid: Uuid,
    /// Its memory, in bytes, whoever uses it.
    pub memory_bytes: u64,
    /// What it can do, as the version of its architecture.
    pub capability: Version,
    /// What decides how it is used.
    pub attributes: Attributes,
}

/// What a graphics processor has and can.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Attributes {
    /// Streaming multiprocessors.
    pub processors: u32,
    /// Engines that copy while kernels run: with two, both ways at once.
    pub copy_engines: u32,
    /// One range of addresses for the host and all processors, so that an address says where it is.
    pub unified_addressing: bool,
    /// Other processes can open its memory and its events (IPC).
    pub ipc: bool,
    /// One process alone may use it, as `nvidia-smi -c EXCLUSIVE_PROCESS` has it.
    pub exclusive: bool,
    /// Nobody may use it for computing.
    pub prohibited: bool,
    /// Shares the host's memory; there IPC of memory does not exist.
    pub integrated: bool,
    /// The most shared memory that a block may have where it asks for more than usual, in bytes.
    pub shared_memory_bytes: u32,
}

/// What a graphics processor is known by in all processes.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Uuid(pub [u8; 16]);

/// A version of CUDA or of one of its libraries, or of an architecture.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Version {
    /// Before the point.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

/// Why there is no CUDA here, or not the library of it that was asked for. The environment's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCuda {
    /// The program lacks the back end.
    #[error("no CUDA driver found: this program was built without the feature `cuda`")]
    NotBuilt,
    /// No library of any of these names can be loaded.
    #[error(
        "no {what} found: looked for {}; the loader looks in its own folders and in \
         LD_LIBRARY_PATH, which is {}",
        some_of(.looked_for),
        .library_path.as_deref().unwrap_or("not set")
    )]
    NoLibrary {
        /// What it is for people: `CUDA driver`, `NVRTC`.
        what: &'static str,
        /// All names that were tried.
        looked_for: Vec<String>,
        /// `LD_LIBRARY_PATH`, where it is set.
        library_path: Option<String>,
    },
    /// The library is there and not whole, or too old for this program.
    #[error("no {what} found that can be used: the library here has no {}", .symbols.join(", "))]
    NoSymbols {
        /// What it is for people.
        what: &'static str,
        /// The functions that it lacks.
        symbols: Vec<String>,
    },
    /// The library refuses to work. A kernel module that is missing or of another version says so
    /// here.
    #[error("no {what} found that can be used: {call} fails with {name} ({text})")]
    Refused {
        /// What it is for people.
        what: &'static str,
        /// The function that was called.
        call: &'static str,
        /// The error's name.
        name: String,
        /// The library's words for it.
        text: String,
    },
    /// The driver is older than this program can use.
    #[error(
        "no CUDA driver found that can be used: the one here is for CUDA {version}, this program \
         needs {OLDEST}"
    )]
    TooOld {
        /// What the driver knows.
        version: Version,
    },
    /// The driver works, but has no graphics processor to show.
    #[error(
        "the CUDA driver shows no graphics processor; CUDA_VISIBLE_DEVICES is {}",
        .visible.as_deref().unwrap_or("not set")
    )]
    NoGpu {
        /// `CUDA_VISIBLE_DEVICES`, where it is set.
        visible: Option<String>,
    },
    /// Looking for it ended in a panic of the binding's.
    #[error("no {what} found that can be used: {why}")]
    Broken {
        /// What it is for people.
        what: &'static str,
        /// The panic's words.
        why: String,
    },
}

impl NoCuda {
    /// Whether it is NCCL that is missing.
    pub(crate) fn is_of_nccl(&self) -> bool {
        match self {
            Self::NoLibrary { what, .. }
            | Self::NoSymbols { what, .. }
            | Self::Refused { what, .. }
            | Self::Broken { what, .. } => *what == NCCL,
            _ => false,
        }
    }
}

/// NCCL for people.
const NCCL: &str = "NCCL";

/// The oldest driver that is used, as the CUDA version that it knows.
pub const OLDEST: Version = Version { major: 12, minor: 0 };

/// The driver, looked for once in a process. The first call may take seconds: it starts the driver.
///
/// # Errors
///
/// [`NoCuda`] where there is no driver, none that works, or no graphics processor. Never panics.
pub fn found() -> Result<&'static Driver, NoCuda> {
    #[cfg(feature = "cuda")]
    return ask::driver();
    #[cfg(not(feature = "cuda"))]
    Err(NoCuda::NotBuilt)
}

/// The version of NVRTC, the compiler of kernels.
///
/// # Errors
///
/// [`NoCuda`] where it cannot be loaded or does not work.
pub fn nvrtc() -> Result<String, NoCuda> {
    #[cfg(feature = "cuda")]
    return ask::nvrtc();
    #[cfg(not(feature = "cuda"))]
    Err(NoCuda::NotBuilt)
}

/// The version of cuBLAS, the products of matrices.
///
/// # Errors
///
/// [`NoCuda`] where it cannot be loaded or does not work.
pub fn cublas() -> Result<String, NoCuda> {
    #[cfg(feature = "cuda")]
    return ask::cublas();
    #[cfg(not(feature = "cuda"))]
    Err(NoCuda::NotBuilt)
}

/// The version of NCCL, the collectives.
///
/// # Errors
///
/// [`NoCuda`] where it cannot be loaded or does not work.
pub fn nccl() -> Result<String, NoCuda> {
    #[cfg(feature = "cuda")]
    return ask::nccl();
    #[cfg(not(feature = "cuda"))]
    Err(NoCuda::NotBuilt)
}

impl Version {
    /// From CUDA's own way to write it in a number: 12080 is 12.8.
    pub fn of_number(number: u32) -> Self {
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// As `nvidia-smi -L` writes it.
impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for length in [4, 2, 2, 2, 6] {
            f.write_str("-")?;
            bytes.by_ref().take(length).try_for_each(|byte| write!(f, "{byte:02x}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// As text.
impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// As text.
impl Serialize for Uuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The names that a system is likely to have, and how many others there are.
fn some_of(names: &[String]) -> String {
    /// More do not fit on a line.
    const FEW: usize = 4;
    // Others have the number of a version in the middle, as no library on Linux does.
    let plain = |name: &&String| {
        let stem = name.split_once(".so").map_or(name.as_str(), |(stem, _)| stem);
        !stem.contains(|c: char| c.is_ascii_digit())
    };
    let shown: Vec<&str> = names.iter().filter(plain).take(FEW).map(String::as_str).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        others => format!("{} and {others} other names", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_uuids_are_written_as_cuda_does() {
        assert_eq!(Version::of_number(12080).to_string(), "12.8");
        assert_eq!(Version::of_number(13000).to_string(), "13.0");
        assert!(Version::of_number(11080) < OLDEST && Version::of_number(12000) >= OLDEST);
        let uuid =
            Uuid([0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 0xff]);
        assert_eq!(uuid.to_string(), "GPU-12345678-9abc-def0-0102-0304050607ff");
    }

    #[test]
    fn what_is_missing_is_said_with_what_was_looked_for() {
        let names =
            ["libcuda.so", "libcuda64.so", "libcuda64_12.so", "libcuda.so.12", "libcuda.so.1"];
        let none = |library_path: Option<&str>| NoCuda::NoLibrary {
            what: "CUDA driver",
            looked_for: names.map(str::to_owned).to_vec(),
            library_path: library_path.map(str::to_owned),
        };
        let said = none(None).to_string();
        let expected = "no CUDA driver found: looked for libcuda.so, libcuda.so.12, libcuda.so.1 \
            and 2 other names; \
                        the loader looks in its own folders and in LD_LIBRARY_PATH, which is not \
                        set";
        assert_eq!(said, expected);
        assert!(none(Some("/a:/b")).to_string().ends_with("which is /a:/b"));
        assert_eq!(some_of(&["liba.so".to_owned()]), "liba.so");
        let hidden = NoCuda::NoGpu { visible: Some("7".to_owned()) };
        assert!(
            hidden
                .to_string()
                .contains("driver shows no graphics processor; CUDA_VISIBLE_DEVICES is 7")
        );
    }

    #[test]
    fn looking_twice_finds_the_same_and_never_panics() {
        assert_eq!(found(), found());
        match found() {
            Ok(driver) => {
                assert!(driver.gpus.iter().enumerate().all(|(i, gpu)| gpu.ordinal as usize == i))
            }
            Err(error) => assert!(error.to_string().contains("CUDA driver"), "{error}"),
        }
        for library in [nvrtc(), cublas(), nccl()] {
            assert!(
                library.is_ok_and(|version| !version.is_empty())
                    || nvrtc().is_err()
                    || found().is_err()
            );
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_the_back_end_says_so() {
        assert_eq!(found(), Err(NoCuda::NotBuilt));
        assert_eq!([nvrtc(), cublas(), nccl()], [const { Err(NoCuda::NotBuilt) }; 3]);
        assert!(NoCuda::NotBuilt.to_string().contains("built without the feature `cuda`"));
    }
}
