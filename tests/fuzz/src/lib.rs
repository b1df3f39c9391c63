//! Runs a parser or a state machine on many generated inputs, on the stable toolchain.
//!
//! A target is an ordinary unit test with a name that starts with `fuzz_`. It calls [`bytes`] (for
//! a parser of bytes) or [`cases`] (for other code) once. The test fails if an input panics or
//! takes longer than [`LONGEST`]. It also fails if the process allocates more than [`MEMORY`]
//! beyond its size at the start. The memory limit works only if the target has its own process:
//! under `cargo xtask fuzz` and cargo-nextest.
//!
//! `cargo xtask fuzz --inputs N` runs all targets. Input number `i` depends only on the seed and on
//! `i`, so `MPMD_FUZZ_SEED=S MPMD_FUZZ_FIRST=i MPMD_FUZZ_INPUTS=1` runs that input again.

mod mutate;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

pub use fastrand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub use mutate::{integer, mutate};

/// Number of inputs for each target if `MPMD_FUZZ_INPUTS` is not set.
pub const INPUTS: u64 = 20_000;

/// Time limit for one input. It is checked at intervals of this length, so an input may take up to
/// twice as long.
pub const LONGEST: Duration = Duration::from_secs(20);

/// Limit in bytes on the address space that a target may add after its start.
pub const MEMORY: u64 = 4 << 30;

/// Number of failing inputs of a target that are printed in full. Further ones are only counted.
const SHOWN: u64 = 5;

/// Runs `parse` on [`INPUTS`] inputs, or the number that the environment sets. The inputs are
/// mutations of `samples` and random bytes. Blocks until all inputs have run.
///
/// `samples` are valid inputs. Most mutations change a few bytes of one sample, so that they pass
/// the first checks.
///
/// # Panics
///
/// If `parse` panicked on any input. The other inputs still run. An input over the time limit ends
/// the process instead.
pub fn bytes(target: &str, samples: &[Vec<u8>], parse: impl Fn(&[u8])) {
    let shown = AtomicU64::new(0);
    cases(target, |rng| {
        let input = mutate::input(rng, samples);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| parse(&input))) {
            if shown.fetch_add(1, Ordering::Relaxed) < SHOWN {
                eprintln!("{target}: input {}", input.escape_ascii());
            }
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs `case` on [`INPUTS`] inputs, or the number that the environment sets. Each input is a new
/// random generator. Blocks until all inputs have run.
///
/// # Panics
///
/// If `case` panicked on any input. The other inputs still run. An input over the time limit ends
/// the process instead.
pub fn cases(target: &str, mut case: impl FnMut(&mut Rng)) {
    let (inputs, first, seed) = (
        number("MPMD_FUZZ_INPUTS", INPUTS),
        number("MPMD_FUZZ_FIRST", 0),
        number("MPMD_FUZZ_SEED", 1),
    );
    if is_alone() {
        limit_memory();
        limit_output();
    }
    let current = AtomicU64::new(first);
    let (end, ended) = channel::<()>();
    let failures = std::thread::scope(|scope| {
        let current = &current;
        scope.spawn(move || watch(target, current, &ended));
        // Dropping it ends the watcher, also if this thread panics.
        let _end = end;
        let mut failures = 0;
        for input in first..first.saturating_add(inputs) {
            current.store(input, Ordering::Relaxed);
            let mut rng = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ input);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| case(&mut rng))) {
                failures += 1;
                if failures <= SHOWN {
                    eprintln!(
                        "{target}: input {input} of seed {seed} failed: {}",
                        message(&*panic)
                    );
                }
            }
        }
        failures
    });
    println!("{target}: {inputs} inputs, {failures} failures");
    // Not an `assert`: the panic hook may hide its message.
    if failures > 0 {
        std::panic::resume_unwind(Box::new(format!("{target} failed")));
    }
}

/// Ends the process if two successive checks, [`LONGEST`] apart, find the same input running.
/// Nothing else can stop an endless loop. Returns when the sender of `ended` is dropped.
fn watch(target: &str, current: &AtomicU64, ended: &std::sync::mpsc::Receiver<()>) {
    let mut seen = u64::MAX;
    while ended.recv_timeout(LONGEST) == Err(RecvTimeoutError::Timeout) {
        let now = current.load(Ordering::Relaxed);
        if now == seen {
            eprintln!("{target}: input {now} takes longer than {LONGEST:?}");
            std::process::exit(101);
        }
        seen = now;
    }
}

/// True if the environment shows that this process runs a single target and no other test.
fn is_alone() -> bool {
    ["NEXTEST", "MPMD_FUZZ_INPUTS"]
        .iter()
        .any(|variable| std::env::var_os(variable).is_some())
}

/// Replaces the panic hook by a hook that shows only the first panics. With a million failing
/// inputs, their messages would fill the disk.
fn limit_output() {
    let (said, hook) = (AtomicU64::new(0), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        if said.fetch_add(1, Ordering::Relaxed) < SHOWN {
            hook(panic);
        }
    }));
}

/// Lowers the limit on this process's address space to its present size plus [`MEMORY`]. A wrong
/// length in an input then cannot take all memory of the machine.
fn limit_memory() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| {
        line.strip_prefix("VmSize:")?
            .strip_suffix("kB")?
            .trim()
            .parse()
            .ok()
    });
    let most = size.map_or(u64::MAX, |kib: u64| kib * 1024 + MEMORY);
    let limit = getrlimit(Resource::As);
    if limit.current.is_none_or(|current| current > most) {
        setrlimit(
            Resource::As,
            Rlimit {
                current: Some(most),
                ..limit
            },
        )
        .expect("the limit only gets lower");
    }
}

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is not a number")),
        Err(_) => default,
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_failing_input_fails_the_target() {
        let failed = catch_unwind(|| cases("some fail", |rng| assert!(rng.u32(..1000) != 7)));
        assert!(message(&*failed.unwrap_err()).ends_with("some fail failed"));
        cases("none fails", |rng| assert!(rng.u32(..1000) < 1000));
    }

    #[test]
    fn samples_are_mutated_and_kept() {
        let (kept, other) = (AtomicU64::new(0), AtomicU64::new(0));
        bytes("samples", &[b"sample".to_vec()], |input| {
            let count = if input == b"sample" { &kept } else { &other };
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert!(kept.into_inner() > 10 && other.into_inner() > 10_000);
    }
}
