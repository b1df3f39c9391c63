//! Makes the job of a red seed smaller, as long as it stays red.

use crate::Arguments;
use crate::child::run_worker;
use crate::program::STEPS;
use crate::worker::{Line, job_of};

/// Leaves out faults and steps of a seed whose job fails, and prints the smallest job that still
/// fails.
pub(crate) fn shrink(arguments: &Arguments, seed: u64) -> anyhow::Result<()> {
    let mut job = Arguments {
        from: seed,
        seeds: 1,
        first: false,
        ..arguments.clone()
    };
    for fault in 0..job_of(&job, seed).faults() {
        let mut less = job.clone();
        less.without_faults.push(fault);
        if is_red(&less)? {
            job = less;
        }
    }
    // First large parts, then single steps.
    let mut size = if arguments.kind().is_empty() {
        STEPS / 2
    } else {
        0
    };
    while size > 0 {
        for from in (0..STEPS).step_by(size) {
            let steps = (from..STEPS.min(from + size)).filter(|step| !job.without.contains(step));
            let steps: Vec<usize> = steps.collect();
            let mut less = job.clone();
            less.without.extend(&steps);
            if !steps.is_empty() && is_red(&less)? {
                job = less;
            }
        }
        size /= 2;
    }
    let case = job_of(&job, seed);
    println!(
        "{case}\n  again: cargo xtask explore --from {seed} --seeds 1{}",
        without(&job)
    );
    Ok(())
}

/// Returns the command line options that leave out the removed steps and faults.
fn without(job: &Arguments) -> String {
    let option = |name: &str, numbers: &[usize]| match numbers {
        [] => String::new(),
        numbers => {
            let numbers: Vec<_> = numbers.iter().map(usize::to_string).collect();
            format!(" --{name} {}", numbers.join(","))
        }
    };
    job.kind().to_owned()
        + &option("without", &job.without)
        + &option("without-faults", &job.without_faults)
}

fn is_red(job: &Arguments) -> anyhow::Result<bool> {
    let mut is_red = false;
    let died = run_worker(job, 0, |line| {
        is_red |= matches!(line, Line::Red(..));
        true
    })?;
    Ok(is_red || died.is_some())
}
