//! The vectors that all processes of a job compute with.

use mpmd_device::cpu;
use mpmd_rendezvous::{Fact, JoinedEpoch};

use crate::warning::tell_user;

/// Narrows this process's vectors to those of its job, before its first kernel. Process 0 says
/// which process is the narrowest if they differ.
pub(super) fn agree(joined: &JoinedEpoch) {
    let width = joined.vectors();
    if let Some(line) = difference(joined)
        && joined.process.index() == 0
    {
        tell_user(&line);
    }
    cpu::narrow(width);
    tracing::info!(vectors = %width, "kernels compute with the vectors of the job");
}

/// Names the process with the narrowest vectors. Returns `None` if all have the same.
fn difference(joined: &JoinedEpoch) -> Option<String> {
    let width = joined.vectors();
    let mut members = joined.members.iter().enumerate();
    let (process, narrowest) = members.find(|(_, member)| member.vectors == width)?;
    let widest = joined.members.iter().map(|member| member.vectors).max()?;
    (widest > width).then(|| {
        format!(
            "all processes compute with {width} vectors, since process {process} on host {} has no \
             wider ones; others have {widest}",
            narrowest.host
        )
    })
}

/// Returns the fact that all processors of the job must share because candle's own products follow
/// the processor alone. `None` without the feature `wide-candle`.
pub(super) fn candle_fact() -> Option<Fact> {
    let name = "the processor's vectors (feature wide-candle)";
    cfg!(feature = "wide-candle").then(|| Fact::new(name, cpu::processor_width().name()))
}

#[cfg(test)]
mod tests {
    use mpmd_base::{ProcessId, VectorWidth};
    use mpmd_rendezvous::{CommitStanding, JobMember};

    use super::*;

    fn joined(widths: &[VectorWidth]) -> JoinedEpoch {
        let member = |(host, vectors): (usize, &VectorWidth)| JobMember {
            host: format!("node{host}"),
            vectors: *vectors,
            ..JobMember::default()
        };
        JoinedEpoch {
            process: ProcessId(0),
            epoch: 1,
            run: 7,
            members: widths.iter().enumerate().map(member).collect(),
            standing: CommitStanding::default(),
        }
    }

    #[test]
    fn narrowest_process_is_named_if_widths_differ() {
        use VectorWidth::{Avx2, Avx512, Baseline};
        assert_eq!(difference(&joined(&[Avx2, Avx2])), None);
        let said = difference(&joined(&[Avx512, Avx2, Baseline, Avx2, Baseline]));
        assert_eq!(
            said.as_deref(),
            Some(
                "all processes compute with baseline vectors, since process 2 on host node2 has no \
                 wider ones; others have avx512"
            )
        );
    }
}
