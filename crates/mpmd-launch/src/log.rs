//! The log of the command line and of programs that want one: `tracing` events on standard error.
//! The end of a program whose standard output fails.

mod patient_output;

use std::fmt;
use std::io::{IsTerminal, Write, stderr};
use std::panic::{set_hook, take_hook};
use std::process::exit;

use patient_output::PatientOutput;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

use crate::output::printable;

/// The log filter if `RUST_LOG` is not set: the requests and states of a server, and warnings and
/// errors, except the warnings that the runtime prints itself.
const FILTER: &str = "warn,mpmd::serve=info,mpmd::warning=off,mpmd::hang=off";

/// Makes `tracing` events appear on standard error, with control characters escaped. `RUST_LOG`
/// filters them. By default warnings, errors, and a server's lines about its requests and state are
/// written. Does nothing if the process already has a subscriber.
///
/// A reader of standard error that stops reading does not stop the program: lines that it does not
/// take are counted, and left out.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(FILTER));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(PatientOutput::new(stderr()))
        // Standard error is the place for such an error, and has just failed.
        .log_internal_errors(false);
    let log = log.fmt_fields(debug_fn(write_field).delimited(" "));
    // Fails if the caller has installed a subscriber.
    let _ = log.with_ansi(stderr().is_terminal()).try_init();
}

/// Writes a field of an event: the message as it is, any other field with its name.
fn write_field(to: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = format!("{value:?}");
    match field.name() {
        "message" => to.write_str(&printable(&value)),
        name => write!(to, "{name}={}", printable(&value)),
    }
}

/// Exit code of a program whose output is no longer read. A shell shows the same code for a program
/// that SIGPIPE ended.
pub const NO_READER: i32 = 141;

/// Makes this process exit instead of panic if `println!` fails. If nobody reads the output any
/// more, it exits silently with [`NO_READER`]. Otherwise it prints an error and exits with code 1.
pub fn end_with_stdout() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        let message = panic
            .payload()
            .downcast_ref::<String>()
            .map_or("", String::as_str);
        // The words of the standard library.
        let Some(why) = message.strip_prefix("failed printing to stdout: ") else {
            return before(panic);
        };
        if why.starts_with("Broken pipe") {
            exit(NO_READER);
        }
        let line = format!("error: cannot write to standard output: {why}\n");
        let _ = stderr().write_all(line.as_bytes());
        exit(1);
    }));
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The captured text of a log.
    #[derive(Clone, Default)]
    struct Text(Arc<Mutex<Vec<u8>>>);

    impl Write for Text {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn log_has_no_control_characters_of_strangers() {
        let text = Text::default();
        let writer = text.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false);
        let log = log
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .finish();
        let name = "\u{1b}[31mRED\u{9b}\u{202e}";
        tracing::subscriber::with_default(log, || {
            let _span = tracing::error_span!("reads", file = %name).entered();
            tracing::error!(key = %name, quoted = name, "unknown key {name}");
        });
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        let shown = "\\u001b[31mRED\\u009b\\u202e";
        assert!(
            text.contains(&format!("unknown key {shown} key={shown} quoted=")),
            "{text}"
        );
        assert!(text.contains(&format!("reads{{file={shown}}}")), "{text}");
        assert!(
            !text
                .trim_end()
                .contains(|c: char| c.is_control() || c == '\u{202e}'),
            "{text}"
        );
    }
}
