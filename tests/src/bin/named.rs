//! `named NAME ARGS…`: one of the tests' programs, as a process of a job.

use std::io::Write;
use std::process::ExitCode;

use mpmd_core::prelude::*;
use mpmd_tests::programs::find;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let Some((name, args)) = args.split_first() else {
        eprintln!("named NAME ARGS…");
        return ExitCode::from(2);
    };
    match run(name, args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: &str, args: &[&str]) -> Result<()> {
    if std::env::var_os("RUST_LOG").is_some() {
        Program::log_to_stderr();
    }
    let named = find(name);
    let mut builder = (named.settings)(Program::builder());
    if named.devices > 0 {
        builder = builder.devices(named.devices);
    }
    builder.run(|p| {
        // Flushed at once, so that a test can wait for a line.
        let mut out = std::io::stdout();
        (named.run)(p, args, &mut |line| {
            // If the output is no longer read, the exit code still tells the result.
            let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        })
    })
}
