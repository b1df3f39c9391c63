//! Parsing of `MPMD_DEVICE`, the kinds of a job's devices, and of `MPMD_CUDA_COLLECTIVES`, the path
//! of their collectives.

use crate::{LaunchError, variables};
use mpmd_layout::topology::{CudaCollectives, DeviceKind};

/// Parses a value of `MPMD_DEVICE`: one device kind, or a comma-separated list with one kind for
/// each process.
///
/// # Errors
///
/// [`LaunchError::Variable`] if an entry is no device kind.
pub fn device_kinds(text: &str) -> Result<Vec<DeviceKind>, LaunchError> {
    DeviceKind::list(text).ok_or_else(|| {
        wrong(
            text,
            "cpu or cuda, or one of them for each process in order, such as cpu,cuda,cuda: the \
             last \
                     counts for all that follow",
        )
    })
}

/// Returns the device kind of each of the job's `processes`, from a value of `MPMD_DEVICE`. If the
/// list is shorter, its last kind applies to all further processes.
///
/// # Errors
///
/// The errors of [`device_kinds`], and an error if there are more kinds than processes.
#[doc(hidden)]
pub fn kinds_by_process(text: &str, processes: usize) -> Result<Vec<DeviceKind>, LaunchError> {
    let mut kinds = device_kinds(text)?;
    if kinds.len() > processes {
        return Err(wrong(
            text,
            &format!("of at most as many kinds as the job has processes, {processes}"),
        ));
    }
    // A list has at least one kind.
    let last = kinds.last().copied().unwrap_or(DeviceKind::Cpu);
    kinds.resize(processes, last);
    Ok(kinds)
}

/// Returns, as text, the numbers of processes that divide `devices` devices evenly: `1, 2, 4`.
#[doc(hidden)]
pub fn process_counts(devices: usize) -> String {
    let roots = (1..).take_while(|count| devices / count >= *count);
    let mut counts: Vec<usize> = roots
        .filter(|count| devices.is_multiple_of(*count))
        .flat_map(|count| [count, devices / count])
        .collect();
    counts.sort_unstable();
    counts.dedup();
    let counts: Vec<String> = counts.iter().map(ToString::to_string).collect();
    counts.join(", ")
}

/// Parses a value of `MPMD_CUDA_COLLECTIVES`: `host` or `nccl`.
///
/// # Errors
///
/// [`LaunchError::Variable`] if the text is neither.
pub fn cuda_collectives(text: &str) -> Result<CudaCollectives, LaunchError> {
    CudaCollectives::named(text).ok_or_else(|| LaunchError::Variable {
        variable: variables::CUDA_COLLECTIVES.to_owned(),
        value: text.to_owned(),
        expected: "host or nccl".to_owned(),
    })
}

fn wrong(value: &str, expected: &str) -> LaunchError {
    LaunchError::Variable {
        variable: variables::DEVICE.to_owned(),
        value: value.to_owned(),
        expected: expected.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceKind::{Cpu, Cuda};
    use super::*;

    #[test]
    fn last_kind_applies_to_the_rest() {
        assert_eq!(kinds_by_process("cuda", 3), Ok(vec![Cuda; 3]));
        assert_eq!(
            kinds_by_process("cpu,cuda", 4),
            Ok(vec![Cpu, Cuda, Cuda, Cuda])
        );
        assert_eq!(kinds_by_process("cuda,cpu", 2), Ok(vec![Cuda, Cpu]));
    }

    #[test]
    fn process_counts_divide_the_devices() {
        for (devices, counts) in [
            (0, ""),
            (1, "1"),
            (7, "1, 7"),
            (12, "1, 2, 3, 4, 6, 12"),
            (36, "1, 2, 3, 4, 6, 9, 12, 18, 36"),
        ] {
            assert_eq!(process_counts(devices), counts);
        }
        // In far fewer steps than devices.
        assert!(process_counts(1 << 40).ends_with(", 549755813888, 1099511627776"));
    }

    #[test]
    fn cuda_collectives_accepts_host_and_nccl_only() {
        assert_eq!(cuda_collectives("host"), Ok(CudaCollectives::Host));
        assert_eq!(cuda_collectives("nccl"), Ok(CudaCollectives::Nccl));
        let said = cuda_collectives("NCCL").unwrap_err().to_string();
        assert_eq!(
            said,
            "MPMD_CUDA_COLLECTIVES=NCCL makes no sense: it must be host or nccl"
        );
    }

    #[test]
    fn wrong_kind_or_one_too_many_names_the_variable() {
        for (text, expected) in [
            ("gpu", "cpu or cuda"),
            ("cpu,,cuda", "cpu or cuda"),
            ("cpu,cpu,cuda", "processes, 2"),
        ] {
            let said = kinds_by_process(text, 2).unwrap_err().to_string();
            assert!(
                said.starts_with(&format!("MPMD_DEVICE={text} makes no sense")),
                "{said}"
            );
            assert!(said.contains(expected), "{said}");
        }
    }
}
