//! The last words of processes: the errors that they print before they end. Often all processes of
//! a failed job print the same one. So each is held back for a moment, and shown once.

use std::time::{Duration, Instant};

use mpmd_base::block::Mutex;

/// Maximum time for which a printed error is held back.
pub(super) const HOLD: Duration = Duration::from_secs(2);

/// Maximum number of bytes that are held back for a process.
const MOST: usize = 64 * 1024;

/// The text that begins the list of causes of an `anyhow` error.
const CAUSES: &str = "\n\nCaused by:\n";

/// The errors that a process printed last and that the launcher has not shown yet.
#[derive(Debug, Default)]
pub(super) struct LastWords(Mutex<HeldErrors>);

#[derive(Debug, Default)]
struct HeldErrors {
    since: Option<Instant>,
    errors: Vec<String>,
    /// True once the process has printed an error.
    has_error: bool,
    /// True if the job goes on without the process. The launcher then no longer holds back its
    /// errors.
    is_released: bool,
}

impl HeldErrors {
    fn take(&mut self) -> Vec<String> {
        self.since = None;
        std::mem::take(&mut self.errors)
    }
}

impl LastWords {
    /// Takes whole lines that a process printed, and returns the lines to show now. Holds back an
    /// error and all lines that follow it.
    pub(super) fn pass(&self, lines: &[u8], now: Instant) -> Vec<u8> {
        let held = &mut *self.0.lock();
        let mut shown = Vec::new();
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            let text = String::from_utf8_lossy(line);
            match held.errors.last_mut() {
                _ if begins_error(&text) && !held.is_released => {
                    held.since.get_or_insert(now);
                    held.has_error = true;
                    held.errors.push(text.into_owned());
                }
                Some(error) => error.push_str(&text),
                None => shown.extend_from_slice(line),
            }
        }

        if held.errors.iter().map(String::len).sum::<usize>() > MOST {
            shown.extend(held.take().concat().into_bytes());
        }
        shown
    }

    /// Returns the time after which the held errors must be shown; `None` if there are none.
    pub(super) fn due(&self, now: Instant) -> Option<Duration> {
        let since = self.0.lock().since?;
        Some(HOLD.saturating_sub(now.saturating_duration_since(since)))
    }

    /// True once the process has printed an error, shown or not.
    pub(super) fn has_error(&self) -> bool {
        self.0.lock().has_error
    }

    /// Removes and returns the held errors.
    pub(super) fn take(&self) -> Vec<String> {
        self.0.lock().take()
    }

    /// Removes and returns the held errors. From now on no errors are held back.
    pub(super) fn release(&self) -> Vec<String> {
        let mut held = self.0.lock();
        held.is_released = true;
        held.take()
    }
}

/// True if a line looks like the first line of an error that ends a program: `Error: `, `error: `,
/// a panic, or the words of Rust's allocator when memory is full.
fn begins_error(line: &str) -> bool {
    let line = without_process(line);
    ["Error: ", "error: ", "memory allocation of "]
        .iter()
        .any(|start| line.starts_with(start))
        || (line.starts_with("thread '") && line.contains(" panicked at "))
}

/// Returns a line without a leading `process 3: `.
fn without_process(line: &str) -> &str {
    let rest = line
        .strip_prefix("process ")
        .map(|rest| rest.trim_start_matches(char::is_numeric));
    rest.and_then(|rest| rest.strip_prefix(": "))
        .unwrap_or(line)
}

/// An error, and the processes that printed it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PrintedError {
    pub(super) processes: Vec<usize>,
    /// The text of the error as printed by the first of `processes`.
    pub(super) text: String,
}

impl PrintedError {
    /// Returns the message and its causes on one line, without the parts that differ between
    /// processes.
    pub(super) fn message(&self) -> String {
        message(&self.text)
    }

    /// Returns the lines of the error's backtrace; empty if there is none.
    pub(super) fn backtrace(&self) -> &str {
        backtrace_at(&self.text).map_or("", |at| &self.text[at..])
    }
}

fn backtrace_at(text: &str) -> Option<usize> {
    text.find("\nStack backtrace:")
        .or_else(|| text.find("\nstack backtrace:"))
        .map(|at| at + 1)
}

fn message(text: &str) -> String {
    let text = &text[..backtrace_at(text).unwrap_or(text.len())];
    let mut text = without_process(text);
    for start in ["Error: ", "error: "] {
        text = text.strip_prefix(start).unwrap_or(text);
    }

    // Newer panics have the number of the thread.
    if text.starts_with("thread '")
        && let Some((thread, rest)) = text.split_once(" (")
        && let Some((_, rest)) = rest.split_once(") panicked at ")
    {
        return format!("{thread} panicked at {rest}").trim_end().to_owned();
    }

    let (first, causes) = text.split_once(CAUSES).unwrap_or((text, ""));
    let causes = causes
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let line = line.trim_start();
            let rest = line.trim_start_matches(char::is_numeric);
            if rest.len() < line.len() {
                rest.strip_prefix(": ").unwrap_or(line)
            } else {
                line
            }
        });

    let all: Vec<&str> = std::iter::once(first.trim_end()).chain(causes).collect();
    let all = all.join(": ");
    // A main that returns a text prints it in quotes.
    let quoted = all.strip_prefix('"').and_then(|all| all.strip_suffix('"'));
    quoted.unwrap_or(&all).to_owned()
}

/// Merges the errors that processes printed, in order. An error printed by several processes
/// appears once. An error that one process printed twice appears twice.
pub(super) fn merged(words: &[(usize, Vec<String>)]) -> Vec<PrintedError> {
    // By message, which is the same for all processes.
    let mut errors: Vec<(String, PrintedError)> = Vec::new();
    for (process, texts) in words {
        for text in texts {
            let key = message(text);
            let is_same = |(of, error): &&mut (_, PrintedError)| {
                *of == key && !error.processes.contains(process)
            };
            match errors.iter_mut().find(is_same) {
                Some((_, error)) => error.processes.push(*process),
                None => {
                    errors.push((
                        key,
                        PrintedError {
                            processes: vec![*process],
                            text: text.clone(),
                        },
                    ));
                }
            }
        }
    }
    errors.into_iter().map(|(_, error)| error).collect()
}

/// Returns `errors` without the errors in `shown`. Removes one error for each entry of `shown`.
pub(super) fn without(mut errors: Vec<PrintedError>, shown: &[PrintedError]) -> Vec<PrintedError> {
    for shown in shown.iter().map(PrintedError::message) {
        if let Some(at) = errors.iter().position(|error| error.message() == shown) {
            errors.remove(at);
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_and_what_follows_is_held_back() {
        let (words, now) = (LastWords::default(), Instant::now());
        assert_eq!(
            words.pass(b"step 1\nno error: here\n", now),
            b"step 1\nno error: here\n"
        );
        assert_eq!(words.due(now), None);
        assert_eq!(words.pass(b"step 2\nError: full\n", now), b"step 2\n");
        assert_eq!(words.pass(b"\nCaused by:\n    disk\n", now), b"");
        assert_eq!(words.pass(b"process 1: error: gone\n", now), b"");
        assert_eq!(words.due(now + HOLD / 2), Some(HOLD / 2));
        assert_eq!(words.due(now + 2 * HOLD), Some(Duration::ZERO));
        let expected = [
            "Error: full\n\nCaused by:\n    disk\n",
            "process 1: error: gone\n",
        ];
        assert_eq!(words.take(), expected);
        assert_eq!((words.take(), words.due(now)), (Vec::new(), None));
        assert_eq!(words.pass(b"more\n", now), b"more\n");
        assert_eq!(words.pass(b"Error: full\n", now), b"");
        assert_eq!(words.release(), ["Error: full\n"]);
        assert_eq!(
            words.pass(b"  cause\nError: late\n", now),
            b"  cause\nError: late\n"
        );
    }

    #[test]
    fn endless_words_are_not_kept() {
        let (words, now) = (LastWords::default(), Instant::now());
        assert_eq!(words.pass(b"Error: all\n", now), b"");
        let long = vec![b'x'; MOST];
        assert_eq!(words.pass(&long, now).len(), MOST + 11);
        assert_eq!(words.take(), Vec::<String>::new());
    }

    #[test]
    fn messages_lack_what_differs_between_processes() {
        for (text, expected) in [
            ("Error: a\n", "a"),
            ("process 12: error: a\n  b\n", "a\n  b"),
            ("Error: \"the disk is full\"\n", "the disk is full"),
            (
                "Error: a\n\nCaused by:\n    b\n\nStack backtrace:\n   0: main\n",
                "a: b",
            ),
            ("Error: a\n\nCaused by:\n    0: b\n    1: c\n", "a: b: c"),
            (
                "thread 'main' (77) panicked at src/main.rs:1:2:\nno\n",
                "thread 'main' panicked at src/main.rs:1:2:\nno",
            ),
            (
                "thread 'main' panicked at x (y) z\n",
                "thread 'main' panicked at x (y) z",
            ),
        ] {
            assert_eq!(message(text), expected, "{text}");
        }
    }

    #[test]
    fn equal_errors_are_merged() {
        let of = |text: &str| vec![text.to_owned()];
        let first = "process 0: error: a\nstack backtrace:\n 1\n";
        let errors = merged(&[
            (0, of(first)),
            (1, of("process 1: error: a\nstack backtrace:\n 2\n")),
            (2, of("Error: b\n")),
        ]);
        let expected = [(vec![0, 1], first), (vec![2], "Error: b\n")];
        let found: Vec<_> = errors
            .iter()
            .map(|error| (error.processes.clone(), error.text.as_str()))
            .collect();
        assert_eq!(found, expected);
        assert_eq!(errors[0].backtrace(), "stack backtrace:\n 1\n");
        assert_eq!(errors[1].backtrace(), "");
    }

    #[test]
    fn error_that_a_process_repeats_is_shown_as_often() {
        let words = |counts: &[usize]| -> Vec<(usize, Vec<String>)> {
            let of = |count: &usize| vec!["Error: a\n".to_owned(); *count];
            counts.iter().map(of).enumerate().collect()
        };
        let processes = |errors: &[PrintedError]| {
            errors
                .iter()
                .map(|it| it.processes.clone())
                .collect::<Vec<_>>()
        };
        let all = merged(&words(&[2, 1, 2]));
        assert_eq!(processes(&all), [vec![0, 1, 2], vec![0, 2]]);
        // Words that one has printed before are those of the others too.
        let unseen = without(all, &merged(&words(&[1])));
        assert_eq!(processes(&unseen), [[0, 2]]);
    }
}
