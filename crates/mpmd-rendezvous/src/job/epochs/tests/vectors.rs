//! Processes whose processors have vectors of different widths.

use super::super::super::super::{CommitStanding, JoinedEpoch, narrowest};
use super::*;
use VectorWidth::{Avx2, Avx512, Baseline};

impl Table {
    fn join_with_vectors(&mut self, link: Link, epoch: u64, process: u32, vectors: VectorWidth) {
        self.vectors = vectors;
        self.join_as(link, epoch, process);
    }

    /// Returns the vectors of the job, as each process that has got a place since the last call
    /// hears of them.
    fn agreed(&mut self) -> Vec<(Link, VectorWidth)> {
        let mut answers = self.answers();
        answers.sort_by_key(|(link, _)| *link);
        let agreed = |(link, answer)| match answer {
            Ok(RequestAnswer::Members { members, .. }) => (link, narrowest(&*members)),
            other => panic!("{link}: {other:?}"),
        };
        answers.into_iter().map(agreed).collect()
    }
}

/// True if this is the refusal of a process that has `vectors` at most.
fn is_refused(
    answers: &[(Link, Result<RequestAnswer, RendezvousError>)],
    link: Link,
    vectors: VectorWidth,
) -> bool {
    let [(found, Err(error))] = answers else {
        return false;
    };
    let said = error.to_string();
    *found == link
        && matches!(error, RendezvousError::Narrower { .. })
        && said.contains(&format!("this process has {vectors} at most"))
        && said.contains(&format!("MPMD_SIMD={vectors} on all processes"))
}

/// Returns a job of three that runs with AVX2, since process 1 has no wider vectors.
fn running() -> Table {
    let mut table = Table::new();
    table.join_with_vectors(10, 1, 0, Avx512);
    table.join_with_vectors(11, 1, 1, Avx2);
    table.join_with_vectors(12, 1, 2, Avx512);
    assert_eq!(table.agreed(), [(10, Avx2), (11, Avx2), (12, Avx2)]);
    table
}

/// Loses process 1, and lets the others return with the vectors of the job.
fn lose_the_narrowest(table: &mut Table) {
    table.die(11);
    table.leave(10, true);
    table.leave(12, true);
    table.join_with_vectors(20, 2, 0, Avx2);
    table.join_with_vectors(22, 2, 2, Avx2);
}

#[test]
fn narrowest_process_counts_for_all_epochs() {
    let mut table = running();
    lose_the_narrowest(&mut table);
    table.join_with_vectors(90, 1, 3, Avx512);
    assert_eq!(table.agreed(), [(20, Avx2), (22, Avx2), (90, Avx2)]);
}

#[test]
fn late_process_that_is_narrower_is_refused() {
    let mut table = running();
    table.join_with_vectors(90, 1, 3, Baseline);
    assert!(is_refused(&table.answers(), 90, Baseline));

    lose_the_narrowest(&mut table);
    table.join_with_vectors(91, 1, 4, Baseline);
    assert!(is_refused(&table.answers(), 91, Baseline));
    table.join_with_vectors(92, 1, 5, Avx2);
    assert_eq!(table.agreed(), [(20, Avx2), (22, Avx2), (92, Avx2)]);
    let refused: Vec<u32> = table
        .job
        .epochs
        .refused()
        .iter()
        .map(|(number, _)| number.0)
        .collect();
    assert_eq!(refused, [3, 4]);
}

#[test]
fn spare_that_came_first_and_is_narrower_is_refused() {
    let mut table = Table::new();
    table.join_with_vectors(90, 1, 3, Baseline);
    table.vectors = Avx2;
    (0..3).for_each(|process| table.join(1, process));
    let (refused, joined): (Vec<_>, Vec<_>) = table
        .answers()
        .into_iter()
        .partition(|(_, answer)| answer.is_err());
    assert!(is_refused(&refused, 90, Baseline), "{refused:?}");
    assert_eq!(joined.len(), 3);
}

#[test]
fn service_that_another_process_takes_over_knows_the_width() {
    let member = |vectors| JobMember {
        vectors,
        ..JobMember::default()
    };
    let past = JoinedEpoch {
        process: ProcessId(0),
        epoch: 1,
        run: RUN,
        members: [Avx512, Avx2, Avx512].map(member).into(),
        standing: CommitStanding::default(),
    };
    assert_eq!(past.vectors(), Avx2);
    let now = Instant::now();
    let epochs = Epochs::resumed(3, TIME_LIMIT, &past, &[true, false, true], now);
    let late = epochs.differs(ProcessId(3), &member(Baseline));
    assert!(matches!(late, Some(RendezvousError::Narrower { .. })));
    assert_eq!(epochs.differs(ProcessId(3), &member(Avx2)), None);
}
