//! The log of the command line and of programs that want one: `tracing` events on standard error.
//! The end of a program whose standard output fails.

use std::io::{IsTerminal, Write, stderr};
use std::panic::{set_hook, take_hook};
use std::process::exit;

use tracing_subscriber::EnvFilter;

/// The filter without `RUST_LOG`: warnings, except those that the runtime prints itself.
const WARNINGS: &str = "warn,mpmd::warning=off,mpmd::hang=off";

/// Writes `tracing` events to standard error, filtered by the variable `RUST_LOG`. Without it,
/// writes warnings and errors. Does nothing if the process has a subscriber already.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(WARNINGS));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    // Fails if the caller has installed a subscriber.
    let _ = log.with_ansi(stderr().is_terminal()).try_init();
}

/// The exit code of a program whose output has lost its reader. A shell shows the same for a
/// program that SIGPIPE has ended.
pub const NO_READER: i32 = 141;

/// Ends this process if `println!` fails, instead of a panic. It ends without a word and with
/// [`NO_READER`] if nobody reads the output any more, else with an error and code 1.
pub fn end_with_stdout() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
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
