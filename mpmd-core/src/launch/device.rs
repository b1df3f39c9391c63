//! How `MPMD_DEVICE` says of which kinds the devices of a job are.

use super::{LaunchError, variables};
use crate::topology::DeviceKind;

/// Reads a value of `MPMD_DEVICE`: a kind of devices, or several with commas between them, by process.
///
/// # Errors
///
/// [`LaunchError::Variable`] where one of them is no kind.
pub fn device_kinds(text: &str) -> Result<Vec<DeviceKind>, LaunchError> {
    DeviceKind::list(text).ok_or_else(|| {
        wrong(
            text,
            "cpu or cuda, or one of them for each process in order, such as cpu,cuda,cuda: the last \
                     counts for all that follow",
        )
    })
}

/// The kind of each of the job's `processes` from a value of `MPMD_DEVICE`: its last counts for the rest.
///
/// # Errors
///
/// As [`device_kinds`], and where it has more kinds than there are processes.
pub(crate) fn kinds_by_process(text: &str, processes: usize) -> Result<Vec<DeviceKind>, LaunchError> {
    let mut kinds = device_kinds(text)?;
    if kinds.len() > processes {
        return Err(wrong(text, &format!("of at most as many kinds as the job has processes, {processes}")));
    }
    // A list has at least one.
    let last = kinds.last().copied().unwrap_or(DeviceKind::Cpu);
    kinds.resize(processes, last);
    Ok(kinds)
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
