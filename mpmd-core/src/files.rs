//! Reading of files that others may have made: only regular ones, and never waiting for a writer.

use std::fs::File;
use std::io::{Error, Read as _, Result};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use mpmd_base::block::{SystemTime, UNIX_EPOCH};
use mpmd_base::bytes_text;
use rustix::fs::OFlags;
use twox_hash::XxHash3_128;

/// Size in bytes of one sample that [`hash_samples`] reads.
const SAMPLE: u64 = 4096;
/// The last second of the year 9999, in seconds since 1970.
const LAST_SECOND: u64 = 253_402_300_799;

/// Opens a regular file for reading.
///
/// # Errors
///
/// If the file cannot be opened, or is a pipe, a device or a folder.
pub fn open_regular(path: &Path) -> Result<File> {
    // Opening a pipe without this flag would wait for its writer.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    // From the open file: the path may name another file by now.
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::other("it is no regular file")),
    }
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
///
/// As for [`open_regular`], and if the file is larger.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let file = open_regular(path)?;
    let large = |bytes| {
        Err(Error::other(format!(
            "it has {bytes} bytes, more than {most}"
        )))
    };
    match file.metadata()?.len() {
        bytes if bytes > most => return large(bytes),
        _ => {}
    }

    let mut bytes = Vec::new();
    // The file may grow meanwhile.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        large(bytes.len() as u64)
    } else {
        Ok(bytes)
    }
}

/// Returns a hash of the byte range `part` of a file: of the range's length and of up to `samples`
/// samples of 4 KiB. The samples are spread evenly over the range. If they cover the range, all its
/// bytes are hashed.
///
/// # Errors
///
/// If the file cannot be read, or ends before `part` does.
pub fn hash_samples(file: &File, part: Range<u64>, samples: u64) -> Result<u64> {
    let bytes = part.end.saturating_sub(part.start);
    let mut hash = XxHash3_128::new();
    hash.write(&bytes.to_le_bytes());
    let mut sample = vec![0; SAMPLE.min(bytes) as usize];
    let mut add = |start: u64, len: u64| {
        let sample = &mut sample[..len as usize];
        file.read_exact_at(sample, part.start + start)?;
        hash.write(sample);
        Result::Ok(())
    };

    if bytes <= samples.saturating_mul(SAMPLE) {
        let mut starts = (0..bytes).step_by(SAMPLE as usize);
        starts.try_for_each(|start| add(start, SAMPLE.min(bytes - start)))?;
    } else {
        // One sample is from the middle.
        let last = bytes - SAMPLE;
        let gaps = samples.max(2) - 1;
        let at = |sample: u64| (u128::from(last) * u128::from(sample) / u128::from(gaps)) as u64;
        match samples {
            0 | 1 => add(last / 2, SAMPLE)?,
            _ => (0..samples).try_for_each(|sample| add(at(sample), SAMPLE))?,
        }
    }
    Ok(hash.finish_128() as u64)
}

/// Describes a file, for messages: its path, its size, and the time of its last change.
pub fn file_note(path: &Path) -> String {
    let path_text = path.display();
    let Ok(found) = path.metadata() else {
        return path_text.to_string();
    };

    let changed = found.modified().map_or_else(|_| String::new(), utc);
    format!(
        "{path_text}, {}, changed {changed}",
        bytes_text(found.len())
    )
}

/// Formats a time, as `2026-11-28 18:03:12 UTC`.
fn utc(time: SystemTime) -> String {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    // A file may have any time.
    let seconds = seconds.min(LAST_SECOND);
    let mut days = seconds / 86_400;
    let of_day = seconds % 86_400;

    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }

    let mut month = 1;
    for length in [
        31,
        28 + u64::from(is_leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
    ] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }

    let [hour, minute, second] = [of_day / 3600, of_day / 60 % 60, of_day % 60];
    format!(
        "{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02} UTC",
        days + 1
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let [file, pipe, zeros] = ["file", "pipe", "zeros"].map(|name| folder.path().join(name));
        std::fs::write(&file, "12345").unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        symlink("/dev/zero", &zeros).unwrap();
        assert_eq!(read_regular(&file, 5).unwrap(), b"12345");
        let said = |path: &Path| read_regular(path, 4).unwrap_err().to_string();
        assert_eq!(said(&file), "it has 5 bytes, more than 4");
        for path in [&pipe, &zeros, folder.path()] {
            assert_eq!(said(path), "it is no regular file", "{}", path.display());
        }
    }
    #[test]
    fn samples_cover_small_parts_and_both_ends_of_large_ones() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let hash = |bytes: &[u8], part: Range<u64>| {
            std::fs::write(path.path(), bytes).unwrap();
            hash_samples(&File::open(path.path()).unwrap(), part, 3).unwrap()
        };
        for len in [1, 4096, 10_000, 3 * 4096, 100_000] {
            let bytes = vec![7; len + 20];
            let part = 10..10 + len as u64;
            let before = hash(&bytes, part.clone());
            assert_eq!(hash(&bytes, part.clone()), before);
            let changed = |at: usize| {
                let mut bytes = bytes.clone();
                bytes[at] = 8;
                hash(&bytes, part.clone()) != before
            };
            assert!(
                changed(10) && changed(10 + len / 2) && changed(9 + len),
                "{len}"
            );
            assert!(!changed(9) && !changed(10 + len), "beside the part");
            assert_ne!(hash(&bytes, 10..11 + len as u64), before, "another length");
        }
        let long = hash_samples(&File::open(path.path()).unwrap(), 0..1 << 20, 3);
        assert!(long.is_err(), "it ends before");
    }

    #[test]
    fn times_are_dates() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_767_225_599, "2025-12-31 23:59:59 UTC"),
            (1_767_225_600, "2026-01-01 00:00:00 UTC"),
            (1 << 60, "9999-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(
                utc(UNIX_EPOCH + std::time::Duration::from_secs(seconds)),
                expected
            );
        }
    }
}
