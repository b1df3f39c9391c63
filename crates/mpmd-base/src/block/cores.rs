//! The number of cores that a job has on this host.

use super::thread::available_parallelism;

/// Environment variable with the number of cores of a job on this host. It is needed if each
/// process is bound to only some of these cores.
pub const CORES: &str = "MPMD_CORES";

/// Returns the number of cores that this job's processes share on this host. It is the value of
/// [`CORES`], or else the number of cores that this process may use. An invalid value is ignored.
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
