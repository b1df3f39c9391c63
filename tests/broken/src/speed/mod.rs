//! Programs that were made faster, on each process in its own way.

pub(crate) mod cost_told_by_one;
pub(crate) mod double_where_it_is_fast;
pub(crate) mod fastest_kernel_first;
pub(crate) mod microbatches_by_own_speed;
pub(crate) mod sum_by_cores;

use mpmd::Program;

/// True on the process that stands for the faster machine. A dry run is no process of a job.
fn is_fast(p: &Program) -> bool {
    !p.is_dry_run() && p.process().index() == 1
}
