//! Files with a secret of the user, such as `MPMD_JOB_TOKEN_FILE`.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;

use crate::LaunchError;

/// Minimum and maximum length of a secret in bytes. A shorter one could be guessed; a longer one
/// suggests a wrong file.
const LEAST: usize = 32;
const MOST: usize = 4096;

/// Permission bits of the group and of other users.
const OF_OTHERS: u32 = 0o077;
/// Permission bits by which the group and other users can enter a folder.
const ENTERED_BY_OTHERS: u32 = 0o011;

/// Returns the ids of the users that this process trusts to own files: its own user and root.
pub(super) fn owners() -> [u32; 2] {
    [geteuid().as_raw(), 0]
}

/// Reads a secret from a file that belongs to this user or root and that no other user can read or
/// write. Trims white space at both ends. `variable` names the setting that has the path, for
/// errors.
///
/// # Errors
///
/// If the file does not meet these conditions, or the secret has fewer than 32 bytes or more than
/// 4096.
pub fn read_secret(path: &str, variable: &'static str) -> Result<Vec<u8>, LaunchError> {
    read(path, variable, &owners())
}

/// Reads a secret like [`read_secret`], but from a file that belongs to one of `owners`.
pub(super) fn read(
    path: &str,
    variable: &'static str,
    owners: &[u32],
) -> Result<Vec<u8>, LaunchError> {
    let bytes = read_private_of(path, variable, owners, MOST)?;
    let secret = bytes.trim_ascii();
    if secret.len() < LEAST {
        let found = secret.len();
        let why = format!("a secret is {LEAST} to {MOST} bytes long; this one has {found}");
        return Err(LaunchError::TokenFile {
            variable,
            path: path.to_owned(),
            why,
        });
    }
    Ok(secret.to_vec())
}

/// Reads a file of at most `most` bytes that belongs to this user or root and that no other user
/// can read or write, by its own mode or because a folder above it is closed to them. `variable`
/// names the setting that has the path, for errors.
///
/// # Errors
///
/// If the file does not meet these conditions.
pub fn read_private(
    path: &str,
    variable: &'static str,
    most: usize,
) -> Result<Vec<u8>, LaunchError> {
    read_private_of(path, variable, &owners(), most)
}

fn read_private_of(
    path: &str,
    variable: &'static str,
    owners: &[u32],
    most: usize,
) -> Result<Vec<u8>, LaunchError> {
    let wrong = |why: String| LaunchError::TokenFile {
        variable,
        path: path.to_owned(),
        why,
    };
    let failed = |error: std::io::Error| wrong(error.to_string());

    // Names the file without opening it: that could wait for the writer of a pipe, or start a
    // device.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let place = open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let data = File::from(place.try_clone().map_err(failed)?)
        .metadata()
        .map_err(failed)?;

    if !data.is_file() {
        return Err(wrong("it is no regular file".to_owned()));
    }
    if !owners.contains(&data.uid()) {
        return Err(wrong(format!(
            "it belongs to user {}, who is not trusted here",
            data.uid()
        )));
    }
    let is_reachable = data.nlink() > 1 || !is_in_private_folder(path, owners);
    if data.mode() & OF_OTHERS != 0 && is_reachable {
        let mode = data.mode() & 0o7777;
        return Err(wrong(format!(
            "others can use it, its mode is {mode:04o}; make that 0600"
        )));
    }

    // The same file, even if the path names another one by now.
    let file = File::open(format!("/proc/self/fd/{}", place.as_raw_fd())).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(most as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() > most {
        return Err(wrong(format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

/// True if a folder above a file can be entered by its owner alone, who is one of `owners`.
fn is_in_private_folder(path: &str, owners: &[u32]) -> bool {
    let Ok(path) = Path::new(path).canonicalize() else {
        return false;
    };
    let is_private = |folder: &Path| {
        let data = folder.metadata();
        data.is_ok_and(|data| owners.contains(&data.uid()) && data.mode() & ENTERED_BY_OTHERS == 0)
    };
    path.ancestors().skip(1).any(is_private)
}
