//! Reads inputs and writes outputs: files, or standard input and output.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use mpmd_launch::printable;

/// Reads a file as text.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Reads a file, or standard input if `file` is `None` or `-`. Also returns the input's name.
pub(crate) fn read_input(file: Option<&Path>) -> Result<(String, String)> {
    match file.filter(|file| *file != Path::new("-")) {
        Some(path) => Ok((path.display().to_string(), read(path)?)),
        None => {
            let name = "standard input".to_owned();
            let mut text = String::new();
            io::stdin()
                .read_to_string(&mut text)
                .context("cannot read standard input")?;
            Ok((name, text))
        }
    }
}

/// Writes a file.
pub(crate) fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file, or standard output if `file` is `None`.
pub(crate) fn write_output(file: Option<&PathBuf>, content: &str) -> Result<()> {
    file.map_or_else(|| say(content), |path| write(path, content))
}

/// Writes text to standard output, with control characters escaped. A closed pipe is not an error:
/// the reader may have seen enough.
pub(crate) fn say(text: &str) -> Result<()> {
    say_to_reader("", text).map(drop)
}

/// Writes an error to standard error, with control characters escaped.
pub(crate) fn complain(error: &dyn std::fmt::Display) {
    note(&format!("mpmd: {error:#}"));
}

/// Writes a line to standard error, with control characters escaped. Ignores a closed pipe, on
/// which `eprintln!` would panic.
pub(crate) fn note(line: &str) {
    let _ = io::stderr().write_all(format!("{}\n", printable(line)).as_bytes());
}

/// Writes to standard output: `commands` for a terminal unchanged, then `text` with control
/// characters escaped. Returns false if the pipe is closed, because nobody reads any more.
pub(crate) fn say_to_reader(commands: &str, text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    let all = format!("{commands}{}", printable(text));
    match out.write_all(all.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        done => done
            .map(|()| true)
            .context("cannot write to standard output"),
    }
}
