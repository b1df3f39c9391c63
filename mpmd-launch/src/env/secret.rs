//! The file with the user's secret, `MPMD_JOB_TOKEN_FILE`.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use rustix::fs::OFlags;
use rustix::process::geteuid;

use crate::{LaunchError, variables as ours};

/// The shortest secret in bytes, so that it cannot be guessed, and the longest, to detect a wrong
/// file.
const LEAST: usize = 32;
const MOST: usize = 4096;

/// Permissions of the group and of others.
const OF_OTHERS: u32 = 0o077;

/// Reads the secret from a file that no other user can read or write. Returns it without white
/// space at its ends. Fails for any other file, and if the secret is too short or too long.
pub(super) fn read(path: &str) -> Result<Vec<u8>, LaunchError> {
    let wrong = |why: String| LaunchError::TokenFile {
        variable: ours::JOB_TOKEN_FILE,
        path: path.to_owned(),
        why,
    };
    let failed = |error: std::io::Error| wrong(error.to_string());
    // Opening a pipe without this flag would wait for its writer.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    // From the open file: the path may name another file by now.
    let data = file.metadata().map_err(failed)?;
    if !data.is_file() {
        return Err(wrong("it is no regular file".to_owned()));
    }
    if data.uid() != 0 && data.uid() != geteuid().as_raw() {
        return Err(wrong(format!(
            "it belongs to user {}, neither to this one nor to root",
            data.uid()
        )));
    }
    if data.mode() & OF_OTHERS != 0 {
        let mode = data.mode() & 0o7777;
        return Err(wrong(format!("others can use it, its mode is {mode:04o}; make that 0600")));
    }
    let mut bytes = Vec::new();
    file.take(MOST as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    let secret = bytes.trim_ascii();
    if bytes.len() > MOST || secret.len() < LEAST {
        let bytes = if bytes.len() > MOST { "more".to_owned() } else { secret.len().to_string() };
        return Err(wrong(format!(
            "a secret is {LEAST} to {MOST} bytes long; this one has {bytes}"
        )));
    }
    Ok(secret.to_vec())
}
