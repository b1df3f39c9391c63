//! The compiler `nvcc` in software: see [`softcuda_driver::nvcc`].

use std::process::ExitCode;

fn main() -> ExitCode {
    match softcuda_driver::nvcc(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
