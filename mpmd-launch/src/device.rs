//! How `MPMD_DEVICE` says of which kinds the devices of a job are, and `MPMD_CUDA_COLLECTIVES`
//! which way they work together.

use super::{LaunchError, variables};
use mpmd_layout::topology::{CudaCollectives, DeviceKind};

/// Reads a value of `MPMD_DEVICE`: a kind of devices, or several with commas between them, by
/// process.
///
/// # Errors
///
/// [`LaunchError::Variable`] where one of them is no kind.
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

/// The kind of each of the job's `processes` from a value of `MPMD_DEVICE`: its last counts for the
/// rest.
///
/// # Errors
///
/// As [`device_kinds`], and where it has more kinds than there are processes.
#[doc(hidden)]
pub fn kinds_by_process(text: &str, processes: usize) -> Result<Vec<DeviceKind>, LaunchError> {
    let mut kinds = device_kinds(text)?;
    if kinds.len() > processes {
        return Err(wrong(
            text,
            &format!("of at most as many kinds as the job has processes, {processes}"),
        ));
    }
    // A list has at least one.
    let last = kinds.last().copied().unwrap_or(DeviceKind::Cpu);
    kinds.resize(processes, last);
    Ok(kinds)
}

/// Reads a value of `MPMD_CUDA_COLLECTIVES`: `host` or `nccl`.
///
/// # Errors
///
/// [`LaunchError::Variable`] where it is neither.
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
    fn the_last_kind_counts_for_the_rest() {
        assert_eq!(kinds_by_process("cuda", 3), Ok(vec![Cuda; 3]));
        assert_eq!(kinds_by_process("cpu,cuda", 4), Ok(vec![Cpu, Cuda, Cuda, Cuda]));
        assert_eq!(kinds_by_process("cuda,cpu", 2), Ok(vec![Cuda, Cpu]));
    }

    #[test]
    fn ways_of_collectives_are_read_and_nothing_else() {
        assert_eq!(cuda_collectives("host"), Ok(CudaCollectives::Host));
        assert_eq!(cuda_collectives("nccl"), Ok(CudaCollectives::Nccl));
        let said = cuda_collectives("NCCL").unwrap_err().to_string();
        assert_eq!(said, "MPMD_CUDA_COLLECTIVES=NCCL makes no sense: it must be host or nccl");
    }

    #[test]
    fn what_is_no_kind_or_one_too_many_names_the_variable() {
        for (text, expected) in
            [("gpu", "cpu or cuda"), ("cpu,,cuda", "cpu or cuda"), ("cpu,cpu,cuda", "processes, 2")]
        {
            let said = kinds_by_process(text, 2).unwrap_err().to_string();
            assert!(said.starts_with(&format!("MPMD_DEVICE={text} makes no sense")), "{said}");
            assert!(said.contains(expected), "{said}");
        }
    }
}
