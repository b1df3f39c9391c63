//! Programs of other projects that do the same work as a measurement, and print the same lines.
//!
//! Open MPI's is in C, and is compiled here. Those of torch and llama.cpp need a Python with them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;

use crate::program_output::quiet;

/// Time limit for a compilation, or for the start of Python with torch.
const PREPARE: Duration = Duration::from_secs(120);

/// The program of another project that does the work of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) enum Peer {
    /// `xtask/peers/mpi_transfers.c` under `mpirun`.
    OpenMpi {
        /// Number of processes.
        processes: &'static str,
        /// The transport between them: the names of components of Open MPI.
        transport: &'static str,
        /// The argument of the program.
        case: &'static str,
    },
    /// `xtask/peers/torch_pipeline.py`.
    Torch { arguments: &'static [&'static str] },
    /// `xtask/peers/llama_training.py`.
    Transformers { arguments: &'static [&'static str] },
    /// `xtask/peers/llama_model.py`.
    LlamaCpp { arguments: &'static [&'static str] },
}

/// The peers of this machine, built. The text is the reason why one is missing.
pub(super) struct Peers {
    open_mpi: Result<BuiltPeer, String>,
    torch: Result<BuiltPeer, String>,
    transformers: Result<BuiltPeer, String>,
    llama_cpp: Result<BuiltPeer, String>,
}

struct BuiltPeer {
    /// Name and version, for people.
    name: String,
    program: PathBuf,
    /// The first argument: a script.
    script: Option<PathBuf>,
}

impl Peers {
    /// Compiles Open MPI's program into `folder`, and looks for the others in `python`.
    ///
    /// # Errors
    ///
    /// If the folder cannot be made. A missing peer is no error.
    pub(super) fn prepare(
        root: &Path,
        folder: &Path,
        python: &str,
        stop: &AtomicBool,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let sources = root.join("xtask/peers");
        Ok(Self {
            open_mpi: open_mpi(&sources, folder, stop),
            torch: of_python(&TORCH, &sources, python, stop),
            transformers: of_python(&TRANSFORMERS, &sources, python, stop),
            llama_cpp: of_python(&LLAMA_CPP, &sources, python, stop),
        })
    }

    /// Returns the name and version of a peer.
    pub(super) fn name(&self, peer: Peer) -> Option<&str> {
        let built = self.built(peer).as_ref().ok()?;
        Some(&built.name)
    }

    /// Returns the names and versions of all peers that are there.
    pub(super) fn names(&self) -> Vec<&str> {
        let all = [
            &self.open_mpi,
            &self.torch,
            &self.transformers,
            &self.llama_cpp,
        ];
        let all = all.into_iter().flatten();
        all.map(|built| built.name.as_str()).collect()
    }

    /// Returns the command that runs a peer, or the reason why it is missing.
    pub(super) fn command(&self, peer: Peer) -> Result<Command, String> {
        let built = self.built(peer).as_ref().map_err(Clone::clone)?;
        let mut command = Command::new(match peer {
            Peer::OpenMpi { .. } => Path::new("mpirun"),
            Peer::Torch { .. } | Peer::Transformers { .. } | Peer::LlamaCpp { .. } => {
                &built.program
            }
        });
        match peer {
            Peer::OpenMpi {
                processes,
                transport,
                case,
            } => {
                // As root, and with fewer cores than processes, it has to be told so.
                command
                    .args(["--allow-run-as-root", "--oversubscribe", "-n", processes])
                    .args(["--mca", "btl", transport])
                    .arg(&built.program)
                    .arg(case);
            }
            Peer::Torch { arguments }
            | Peer::Transformers { arguments }
            | Peer::LlamaCpp { arguments } => {
                command.args(&built.script).args(arguments);
            }
        }
        Ok(command)
    }

    fn built(&self, peer: Peer) -> &Result<BuiltPeer, String> {
        match peer {
            Peer::OpenMpi { .. } => &self.open_mpi,
            Peer::Torch { .. } => &self.torch,
            Peer::Transformers { .. } => &self.transformers,
            Peer::LlamaCpp { .. } => &self.llama_cpp,
        }
    }
}

/// Compiles Open MPI's program.
fn open_mpi(sources: &Path, folder: &Path, stop: &AtomicBool) -> Result<BuiltPeer, String> {
    let missing =
        |why: String| format!("Open MPI: {why}; Debian has it in openmpi-bin and libopenmpi-dev");
    let program = folder.join("mpi_transfers");
    let mut compile = Command::new("mpicc");
    compile.args(["-O2", "-o"]).arg(&program);
    compile.arg(sources.join("mpi_transfers.c"));
    output(&mut compile, stop).map_err(missing)?;

    let version = output(Command::new("mpirun").arg("--version"), stop).map_err(missing)?;
    // `mpirun (Open MPI) 4.1.4`
    let line = version.lines().next().unwrap_or_default();
    let number = line.rsplit(' ').next().unwrap_or_default();
    Ok(BuiltPeer {
        name: format!("Open MPI {number}"),
        program,
        script: None,
    })
}

/// A peer that is a package of Python.
struct PythonPackage {
    name: &'static str,
    /// The modules that the script needs, the one with the version first.
    modules: &'static str,
    /// The file in `xtask/peers`.
    script: &'static str,
}

const TORCH: PythonPackage = PythonPackage {
    name: "torch",
    modules: "torch",
    script: "torch_pipeline.py",
};
const TRANSFORMERS: PythonPackage = PythonPackage {
    name: "transformers",
    modules: "transformers, torch",
    script: "llama_training.py",
};
const LLAMA_CPP: PythonPackage = PythonPackage {
    name: "llama-cpp-python",
    modules: "llama_cpp, gguf",
    script: "llama_model.py",
};

/// Looks for a package of Python.
fn of_python(
    package: &PythonPackage,
    sources: &Path,
    python: &str,
    stop: &AtomicBool,
) -> Result<BuiltPeer, String> {
    let PythonPackage {
        name,
        modules,
        script,
    } = package;
    let first = modules.split(',').next().unwrap_or_default();
    let program = format!("import {modules}; print({first}.__version__)");
    let version = output(Command::new(python).args(["-c", &program]), stop)
        .map_err(|why| format!("{name}: {why}; --python FILE names a Python that has it"))?;
    Ok(BuiltPeer {
        name: format!("{name} {}", version.trim()),
        program: python.into(),
        script: Some(sources.join(script)),
    })
}

/// Returns what a command prints, or the reason why it fails.
fn output(command: &mut Command, stop: &AtomicBool) -> Result<String, String> {
    let said = quiet(command, PREPARE, stop).map_err(|error| format!("{error:#}"))?;
    match said.code {
        Some(0) => Ok(said.stdout),
        _ => Err(said.last_words()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_peer_says_why_and_how_to_get_it() {
        let stop = AtomicBool::new(false);
        let missing = of_python(&TORCH, Path::new("."), "no-such-python", &stop);
        let peers = Peers {
            open_mpi: Err("there is none".to_owned()),
            torch: missing.map(|_| unreachable!("there is no such Python")),
            transformers: Err("there is none".to_owned()),
            llama_cpp: Err("there is none".to_owned()),
        };
        let torch = Peer::Torch { arguments: &["1"] };
        let why = peers.command(torch).unwrap_err();
        assert!(
            why.contains("no-such-python") && why.contains("--python FILE"),
            "{why}"
        );
        assert_eq!((peers.name(torch), peers.names().len()), (None, 0));
    }

    #[test]
    fn command_has_the_measurements_case() {
        let peers = Peers {
            open_mpi: Ok(BuiltPeer {
                name: "Open MPI 4".to_owned(),
                program: "/built/mpi_transfers".into(),
                script: None,
            }),
            torch: Err(String::new()),
            transformers: Err(String::new()),
            llama_cpp: Err(String::new()),
        };
        let peer = Peer::OpenMpi {
            processes: "2",
            transport: "tcp,self",
            case: "latency",
        };
        let command = peers.command(peer).unwrap();
        let line = crate::commands::shown(&command);
        assert!(
            line.ends_with("-n 2 --mca btl tcp,self /built/mpi_transfers latency"),
            "{line}"
        );
        assert_eq!(peers.name(peer), Some("Open MPI 4"));
    }
}
