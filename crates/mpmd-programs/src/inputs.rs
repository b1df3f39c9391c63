//! The inputs of a program, which its processes compare.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mpmd::job::JobArgs;
use mpmd::launch::JobEnv;
use mpmd::train::data::hash_files;
use mpmd::train::tensors::file_note;
use mpmd::{Error, Fact, Result};
use mpmd_models::{CHANGED, Folder, tokenizer};

/// Returns `job` with a comparison of a folder and files between its processes.
pub(crate) fn compared(job: &JobArgs, folder: &Folder, files: &[&InputFiles]) -> JobArgs {
    let of_folder = folder.clone();
    let job = job.clone().input(move || of_folder.facts());
    files.iter().fold(job, |job, files| {
        let files = InputFiles::clone(files);
        job.input(move || files.fact().into_iter().collect())
    })
}

/// Checks that the tokenizer of a folder is valid, and that `texts` and `files` can be opened.
/// Texts may be folders. Reads no text.
///
/// Does nothing in a process that a launcher has started. There only process 0 reads the files, and
/// all processes get its error.
///
/// # Errors
///
/// If the tokenizer is invalid, a text cannot be opened, or a variable of the job is invalid.
pub(crate) fn check_inputs(
    folder: &Folder,
    texts: &[PathBuf],
    files: &[PathBuf],
) -> anyhow::Result<()> {
    if JobEnv::from_env()?.is_some() {
        return Ok(());
    }
    let check = |path: &Path, may_be_folder| match path.metadata()? {
        kind if kind.is_file() || (kind.is_dir() && may_be_folder) => File::open(path).map(drop),
        _ => Err(io::Error::other("it is no regular file")),
    };
    let texts = texts.iter().map(|path| (path, true));
    let mut all = texts.chain(files.iter().map(|path| (path, false)));
    all.try_for_each(|(path, may_be_folder)| {
        let why = |why| Error::Environment(format!("cannot read {}: {why}", path.display()));
        check(path, may_be_folder).map_err(why)
    })?;
    tokenizer(folder)?;
    Ok(())
}

/// Files that only process 0 reads, such as a text to train on.
#[derive(Clone, Debug)]
pub(crate) struct InputFiles {
    option: &'static str,
    paths: Vec<PathBuf>,
    /// The hash of the files when the processes compared them. `None` if they could not be read.
    known: Arc<OnceLock<Option<u64>>>,
}

impl InputFiles {
    /// Creates the input files that were given by `option`.
    pub(crate) fn new(option: &'static str, paths: &[PathBuf]) -> Self {
        Self {
            option,
            paths: paths.to_vec(),
            known: Arc::default(),
        }
    }

    pub(crate) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns the option and the paths of the files, for messages.
    pub(crate) fn named(&self) -> String {
        let mut named = self.option.to_owned();
        for path in &self.paths {
            named += &format!(" {}", path.display());
        }
        named
    }

    /// Returns the hash of the files as a fact for comparison. The fact has no value if this
    /// process cannot read the files. `None` if there are no files.
    pub(crate) fn fact(&self) -> Option<Fact> {
        let first = self.paths.first()?;
        let hash = hash_files(&self.paths).ok();
        _ = self.known.set(hash);
        let others = match self.paths.len() {
            1 => String::new(),
            count => format!(", and {} more", count - 1),
        };
        Some(Fact {
            name: self.option.to_owned(),
            value: hash.map(|hash| format!("hash {hash:016x}")),
            note: file_note(first) + &others,
        })
    }

    /// Returns an error if the files have changed since the processes compared them. Without a
    /// comparison there is no error.
    ///
    /// # Errors
    ///
    /// If a file has changed or cannot be read.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(Some(known)) = self.known.get() else {
            return Ok(());
        };
        match hash_files(&self.paths)? {
            found if found == *known => Ok(()),
            _ => Err(Error::Environment(format!(
                "{}: the file {CHANGED}",
                self.named()
            ))),
        }
    }
}
