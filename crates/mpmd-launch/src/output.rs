//! Forwarding of the job's output, line by line, with the process number as a prefix.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::last_words::LastWords;

/// Returns text from another process or a file in a form that is safe to print on a terminal.
/// Escapes control characters except line ends and tabs, and Unicode marks of text direction. The
/// escapes are those of JSON, such as `\\u001b`, so JSON text keeps its values.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(commands_terminal) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| match commands_terminal(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.to_string(),
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// True for control characters except line ends and tabs, and for Unicode marks of text direction.
/// A terminal could execute them or show text in another order.
fn commands_terminal(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' => true,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        c => c.is_control(),
    }
}

/// One of the launcher's own output streams.
#[derive(Clone, Copy, Debug)]
pub(super) enum OutputStream {
    Out,
    Err,
}

impl OutputStream {
    /// True if line prefixes are coloured: the stream is a terminal and `NO_COLOR` is not set.
    pub(super) fn is_coloured(self) -> bool {
        let terminal = match self {
            Self::Out => io::stdout().is_terminal(),
            Self::Err => io::stderr().is_terminal(),
        };
        terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Writes whole lines at once, so that the lines of two processes never mix.
    pub(super) fn write(self, bytes: &[u8]) -> io::Result<()> {
        match self {
            _ if bytes.is_empty() => Ok(()),
            Self::Out => {
                let mut out = io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            Self::Err => io::stderr().lock().write_all(bytes),
        }
    }
}

/// Prints a line of the launcher to standard error, with control characters escaped. Unlike
/// `eprintln!`, does not panic if nobody reads standard error any more.
pub(super) fn say(line: impl Display) {
    let line = format!("mpmd: {line}\n");
    let _ = OutputStream::Err.write(printable(&line).as_bytes());
}

/// Returns the prefix of each line of `process`: its number in brackets, padded to the width of the
/// largest process number.
pub(super) fn prefix(process: usize, processes: usize, color: bool) -> String {
    const COLORS: [u8; 12] = [36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91];
    let width = processes.saturating_sub(1).to_string().len();
    let plain = format!("[{process:>width$}] ");
    if color {
        format!("\x1b[{}m{plain}\x1b[0m", COLORS[process % COLORS.len()])
    } else {
        plain
    }
}

/// Copies a process's standard output to the launcher's until it ends. Calls `prefix` for the text
/// before each line. If writing fails, calls `failed` once and keeps reading, so that the process
/// is not blocked. Blocks.
pub(super) fn copy(
    mut from: impl Read,
    prefix: impl Fn() -> String,
    failed: impl FnOnce(io::Error),
) {
    let mut failed = Some(failed);
    let mut write = |bytes: &[u8]| {
        if failed.is_some()
            && let Err(error) = OutputStream::Out.write(bytes)
            && let Some(failed) = failed.take()
        {
            failed(error);
        }
    };

    let mut lines = OutputLines::new("");
    let mut bytes = vec![0; 16 * 1024];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => {
                lines.prefix = prefix().into_bytes();
                lines.push(&bytes[..n], Instant::now());
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        }
        write(&lines.take());
    }
    write(&lines.end());
}

/// Copies a process's standard error to the launcher's until it ends. Puts `prefix` before each
/// line. Holds back the last errors in `words` for a moment. Blocks.
pub(super) fn copy_errors(mut from: impl Read + AsFd, prefix: &str, words: &LastWords) {
    // An error is ignored: there is no other place for it.
    let write = |lines: &[u8]| _ = OutputStream::Err.write(&prefixed(prefix, lines));
    // `words` sees the lines without prefix.
    let mut lines = OutputLines::new("");
    let mut bytes = vec![0; 16 * 1024];
    loop {
        if let Some(due) = words.due(Instant::now())
            && (due.is_zero() || !has_input(&from, due))
        {
            write(words.take().concat().as_bytes());
            continue;
        }
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => lines.push(&bytes[..n], Instant::now()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        }
        write(&words.pass(&lines.take(), Instant::now()));
    }
    write(&words.pass(&lines.end(), Instant::now()));
}

/// Waits until `from` has input or has ended. Returns false if neither happens within `within`.
fn has_input(from: &impl AsFd, within: Duration) -> bool {
    let mut inputs = [PollFd::new(from, PollFlags::IN)];
    let within = Timespec::try_from(within).ok();
    // After an error, such as an interruption, reading shows it.
    within.is_some_and(|within| poll(&mut inputs, Some(&within)) != Ok(0))
}

/// Returns `lines` with a prefix before each.
pub(super) fn prefixed(prefix: &str, lines: &[u8]) -> Vec<u8> {
    let lines = lines.split_inclusive(|byte| *byte == b'\n');
    lines
        .flat_map(|line| [prefix.as_bytes(), line].concat())
        .collect()
}

/// Maximum length of a line in bytes; a longer line is split.
const LONGEST: usize = 64 * 1024;

/// Minimum time between two printed states of a line that the process overwrites repeatedly.
const REDRAW: Duration = Duration::from_secs(1);

/// Splits a stream into lines and adds a prefix to each.
///
/// A carriage return overwrites a line, as on a terminal. So of a progress bar, one state per
/// second and the last one are printed. Lines of more than 64 KiB are split.
struct OutputLines {
    prefix: Vec<u8>,
    line: Vec<u8>,
    /// True after a carriage return: the next bytes overwrite the line.
    returned: bool,
    shown: Option<Instant>,
    done: Vec<u8>,
}

impl OutputLines {
    fn new(prefix: &str) -> Self {
        let prefix = prefix.as_bytes().to_vec();
        Self {
            prefix,
            line: Vec::new(),
            returned: false,
            shown: None,
            done: Vec::new(),
        }
    }

    fn push(&mut self, bytes: &[u8], now: Instant) {
        for &byte in bytes {
            match byte {
                b'\n' => self.finish(),
                b'\r' => self.returned = true,
                _ => {
                    if std::mem::take(&mut self.returned) {
                        self.overwrite(now);
                    } else if self.line.len() >= LONGEST {
                        self.finish();
                    }
                    self.line.push(byte);
                }
            }
        }
    }

    /// Removes and returns the whole lines since the last call, with prefixes.
    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.done)
    }

    /// Ends the last line, then removes and returns all remaining lines, with prefixes.
    fn end(&mut self) -> Vec<u8> {
        if !self.line.is_empty() {
            self.finish();
        }
        self.take()
    }

    fn finish(&mut self) {
        self.returned = false;
        self.done.extend_from_slice(&self.prefix);
        self.done.append(&mut self.line);
        self.done.push(b'\n');
    }

    fn overwrite(&mut self, now: Instant) {
        let due = self
            .shown
            .is_none_or(|shown| now.saturating_duration_since(shown) >= REDRAW);
        if due && !self.line.is_empty() {
            self.shown = Some(now);
            self.finish();
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a\tb\n\u{e9}"), "a\tb\n\u{e9}");
        assert_eq!(
            printable("\u{1b}[2J\u{9b}2J\r\u{7f}\0x"),
            "\\u001b[2J\\u009b2J\\u000d\\u007f\\u0000x"
        );
        // Shown as "user", though it is no such text.
        assert_eq!(
            printable("\u{202e}resu\u{2069}\u{61c}"),
            "\\u202eresu\\u2069\\u061c"
        );
    }

    fn all(chunks: &[&[u8]]) -> String {
        let mut lines = OutputLines::new("[0] ");
        let mut said = Vec::new();
        for chunk in chunks {
            lines.push(chunk, Instant::now());
            said.extend(lines.take());
        }
        said.extend(lines.end());
        String::from_utf8(said).unwrap()
    }

    #[test]
    fn lines_split_over_reads_are_prefixed_once() {
        assert_eq!(
            all(&[b"one\ntw", b"o\n", b"\nno newline"]),
            "[0] one\n[0] two\n[0] \n[0] no newline\n"
        );
        assert_eq!(all(&[b"dos\r", b"\nx\n"]), "[0] dos\n[0] x\n");
        assert_eq!(all(&[]), "");
    }

    #[test]
    fn overwritten_line_shows_one_state_per_second() {
        let mut lines = OutputLines::new("");
        let start = Instant::now();
        for tenth in 0..25 {
            let text = format!("\r{tenth}");
            lines.push(text.as_bytes(), start + Duration::from_millis(100) * tenth);
        }
        lines.push(b"\rdone\n", start);
        assert_eq!(String::from_utf8(lines.end()).unwrap(), "0\n10\n20\ndone\n");
    }

    #[test]
    fn endless_line_is_cut() {
        let mut lines = OutputLines::new("");
        let mut total = 0;
        for _ in 0..100 {
            lines.push(&[b'x'; 10_000], Instant::now());
            assert!(lines.line.len() <= LONGEST);
            total += lines.take().iter().filter(|&&byte| byte == b'x').count();
        }
        total += lines.end().iter().filter(|&&byte| byte == b'x').count();
        assert_eq!(total, 1_000_000, "cut, not lost");
    }

    #[test]
    fn prefixes_have_equal_width() {
        assert_eq!(prefix(2, 4, false), "[2] ");
        assert_eq!(prefix(2, 11, false), "[ 2] ");
        assert_eq!(prefix(0, 1, true), "\x1b[36m[0] \x1b[0m");
    }
}
