//! A program that was built without UCX, or without CUDA, says so, and how to get it, instead of
//! hanging or using another.
#![cfg(not(any(feature = "ucx", feature = "cuda")))]

use mpmd_core::launch::variables;
use mpmd_tests::{Job, JobOptions};

#[test]
fn who_asks_for_ucx_hears_that_it_is_not_compiled_in() {
    each_says(variables::TRANSPORT, "ucx", |said| {
        // How to get it, or what there is instead.
        said.contains("ucx")
            && (said.contains("--features ucx") || said.contains("that this build has"))
    });
}

#[test]
fn who_asks_for_cuda_devices_hears_that_they_are_not_compiled_in() {
    each_says(variables::DEVICE, "cuda", |said| said.contains("built without the feature `cuda`"));
}

/// Two processes that are told something by a variable end at once, and each says what is to be
/// said.
fn each_says(variable: &str, value: &str, is_said: impl Fn(&str) -> bool) {
    const PROCESSES: usize = 2;
    let mut job = Job::prepare(JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES));
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        command.arg("hello").env(variable, value);
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code, 1, "{}", job.report());
        assert!(is_said(&end.stderr), "{}", job.report());
    }
}
