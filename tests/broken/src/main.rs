//! `broken NAME`: a wrong program, as a process of a job.

use std::process::ExitCode;

use mpmd::Program;
use mpmd_broken::{PROGRAMS, Run};

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(broken) = PROGRAMS.iter().find(|broken| broken.name == name) else {
        eprintln!("broken NAME, with a name such as {}", PROGRAMS[0].name);
        return ExitCode::from(2);
    };
    let builder = Program::builder().devices(2);
    let ended = match broken.run {
        Run::Once(run) => builder.run(run),
        Run::Recovering(run) => builder.spares(0).run(run).map(drop),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
