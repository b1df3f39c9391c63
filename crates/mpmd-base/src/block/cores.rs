//! The number of cores that a job has on this host.

use super::thread::available_parallelism;

/// The variable with the number of cores that a job has on this host, for processes that are bound
/// to a part of them.
pub const CORES: &str = "MPMD_CORES";

/// Returns the number of cores that the processes of this job share on this host: the value of
/// [`CORES`], else the number of cores that this process may use. An invalid value counts as unset.
pub fn host_cores() -> usize {
    of(
        std::env::var(CORES).ok().as_deref(),
        available_parallelism(),
    )
}

fn of(value: Option<&str>, own: usize) -> usize {
    value
        .and_then(|text| text.trim().parse().ok())
        .filter(|cores| *cores > 0)
        .unwrap_or(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_of_the_job_replace_those_of_the_process() {
        assert_eq!(
            [of(Some("8"), 2), of(Some(" 1 "), 2), of(None, 2)],
            [8, 1, 2]
        );
        assert_eq!(
            [of(Some("0"), 2), of(Some("all"), 2), of(Some(""), 2)],
            [2; 3]
        );
        assert!(host_cores() > 0);
    }
}
