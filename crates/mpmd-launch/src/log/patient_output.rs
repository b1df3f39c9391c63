//! An output for a log that waits for its reader only for a short time.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Largest number of bytes that a pipe takes at once without blocking if it takes any: PIPE_BUF.
const PIECE: usize = 4096;
/// Time for the reader to take a warning or an error. Other lines do not wait.
const PATIENCE: Duration = Duration::from_millis(200);

/// An output to which each line is written whole or not at all. A line is left out if the reader of
/// a pipe or terminal does not take it in time. The next line is preceded by the number of lines
/// that were left out.
#[derive(Debug)]
pub(super) struct PatientOutput<T> {
    state: Mutex<OutputState<T>>,
}

#[derive(Debug)]
struct OutputState<T> {
    output: T,
    /// Number of lines left out since the last one that was written.
    missing: u64,
    /// True if the last line was left out after a part of it had been written.
    is_torn: bool,
}

impl<T> PatientOutput<T> {
    pub(super) fn new(output: T) -> Self {
        let state = OutputState {
            output,
            missing: 0,
            is_torn: false,
        };
        Self {
            state: Mutex::new(state),
        }
    }
}

impl<'a, T: AsFd + Write + 'a> MakeWriter<'a> for PatientOutput<T> {
    type Writer = LineWriter<'a, T>;

    fn make_writer(&'a self) -> Self::Writer {
        LineWriter {
            output: self,
            patience: Duration::ZERO,
        }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Self::Writer {
        // Errors are less than warnings.
        let patience = match *event.level() <= Level::WARN {
            true => PATIENCE,
            false => Duration::ZERO,
        };
        LineWriter {
            output: self,
            patience,
        }
    }
}

/// The output for a line. Each call of `write` is a line.
pub(super) struct LineWriter<'a, T> {
    output: &'a PatientOutput<T>,
    patience: Duration,
}

impl<T: AsFd + Write> Write for LineWriter<'_, T> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self
            .output
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        state.write_line(line, self.patience)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<T: AsFd + Write> OutputState<T> {
    fn write_line(&mut self, line: &[u8], patience: Duration) -> io::Result<()> {
        let start = if self.is_torn { "\n" } else { "" };
        let note = match self.missing {
            0 => start.to_owned(),
            missing => format!(
                "{start}{missing} lines of the log are missing here: it is read too slowly\n"
            ),
        };

        let text = [note.as_bytes(), line].concat();
        for (at, piece) in text.chunks(PIECE).enumerate() {
            if !is_writable(&self.output, patience)? {
                self.missing += 1;
                self.is_torn |= at > 0;
                return Ok(());
            }
            self.output.write_all(piece)?;
            (self.missing, self.is_torn) = (0, false);
        }
        Ok(())
    }
}

/// Waits until an output takes [`PIECE`] bytes without blocking. Returns false if it does not do
/// so within `patience`.
fn is_writable(output: &impl AsFd, patience: Duration) -> io::Result<bool> {
    let patience = Timespec::try_from(patience).ok();
    let mut outputs = [PollFd::new(output, PollFlags::OUT)];
    loop {
        match poll(&mut outputs, patience.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read as _, pipe};

    use super::*;

    /// Returns the output of a pipe, and the end at which it is read.
    fn piped() -> (PatientOutput<PipeWriter>, PipeReader) {
        let (reader, writer) = pipe().unwrap();
        (PatientOutput::new(writer), reader)
    }

    #[test]
    fn reader_that_stops_blocks_no_line_and_learns_their_number() {
        let (output, mut reader) = piped();
        let line = format!("{}\n", "x".repeat(99));
        // A pipe has room for 64 KiB.
        for _ in 0..1000 {
            output.make_writer().write_all(line.as_bytes()).unwrap();
        }
        let missing = output.state.lock().unwrap().missing;
        assert!((300..1000).contains(&missing), "{missing}");

        let mut taken = vec![0; 1 << 20];
        let count = reader.read(&mut taken).unwrap();
        assert!(taken[..count].ends_with(line.as_bytes()), "whole lines");
        output.make_writer().write_all(b"next\n").unwrap();
        let count = reader.read(&mut taken).unwrap();
        let expected =
            format!("{missing} lines of the log are missing here: it is read too slowly\nnext\n");
        assert_eq!(String::from_utf8_lossy(&taken[..count]), expected);
    }

    #[test]
    fn line_that_is_torn_ends_before_the_next() {
        let (output, mut reader) = piped();
        let long = "y".repeat(1 << 20);
        output.make_writer().write_all(long.as_bytes()).unwrap();
        let mut taken = vec![0; 1 << 20];
        let count = reader.read(&mut taken).unwrap();
        assert!(count < long.len());
        output.make_writer().write_all(b"next\n").unwrap();
        let count = reader.read(&mut taken).unwrap();
        let next = String::from_utf8_lossy(&taken[..count]);
        assert!(
            next.starts_with("\n1 lines of the log") && next.ends_with("\nnext\n"),
            "{next}"
        );
    }

    #[test]
    fn output_without_a_reader_is_an_error() {
        let (output, reader) = piped();
        drop(reader);
        let written = output.make_writer().write_all(b"a line\n");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
