//! Processes with other options or other files than the rest.

use super::super::super::super::{CommitStanding, JoinedEpoch};
use super::*;

/// True if the error names the weights of process 0 and of another one.
fn differs(error: &RendezvousError) -> bool {
    let said = error.to_string();
    matches!(error, RendezvousError::Differs { .. })
        && said.contains("weights: process 0 has old, process ")
        && said.contains(" has new. Give all processes the same options and the same files")
}

fn weights(table: &mut Table, value: &str) {
    table.facts = vec![Fact::new("weights", value)];
}

/// Returns a job of three that runs, in which all have the old weights.
fn running(sizes: &[u32]) -> Table {
    let mut table = Table {
        sizes: SizeRange::of(sizes.iter().copied()),
        ..Table::new()
    };
    weights(&mut table, "old");
    (0..3).for_each(|process| table.join(1, process));
    assert_eq!(table.joined(), [(10, 0, 1), (11, 1, 1), (12, 2, 1)]);
    table
}

/// Lets the processes at these links return to epoch 2.
fn go_on(table: &mut Table, links: &[Link]) {
    links.iter().for_each(|link| table.leave(*link, true));
    for link in links {
        table.join(2, (link % 10) as u32);
    }
}

#[test]
fn other_facts_fail_the_first_epoch_for_all() {
    let mut table = Table::new();
    weights(&mut table, "old");
    table.join(1, 0);
    weights(&mut table, "new");
    table.join(1, 2);
    let answers = table.answers();
    let links: Vec<Link> = answers.iter().map(|(link, _)| *link).collect();
    assert_eq!(links, [10, 12]);
    assert!(
        answers
            .iter()
            .all(|(_, answer)| answer.as_ref().is_err_and(differs)),
        "{answers:?}"
    );
    table.join(1, 1);
    assert!(
        table.answers()[0].1.as_ref().is_err_and(differs),
        "the late one hears it, too"
    );
}

#[test]
fn members_are_told_the_facts_of_the_first() {
    let mut table = Table::new();
    weights(&mut table, "old");
    (0..3).for_each(|process| table.join(1, process));
    for (_, answer) in table.answers() {
        let Ok(RequestAnswer::Members { members, .. }) = answer else {
            panic!("{answer:?}")
        };
        let counts: Vec<usize> = members.iter().map(|member| member.facts.len()).collect();
        assert_eq!(counts, [1, 0, 0]);
    }
}

#[test]
fn spare_with_other_facts_is_refused_and_another_has_the_place() {
    let mut table = running(&[]);
    weights(&mut table, "new");
    table.join_as(90, 1, 3);
    let answers = table.answers();
    assert!(
        matches!(&answers[..], [(90, Err(why))] if differs(why)),
        "{answers:?}"
    );
    table.die(11);
    weights(&mut table, "old");
    go_on(&mut table, &[10, 12]);
    weights(&mut table, "new");
    table.join_as(91, 1, 4);
    assert!(table.answers()[0].1.as_ref().is_err_and(differs));
    weights(&mut table, "old");
    table.join_as(92, 1, 5);
    assert_eq!(table.joined(), [(20, 0, 2), (92, 1, 2), (22, 2, 2)]);
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
fn spare_that_came_first_is_refused_when_the_job_begins() {
    let mut table = Table::new();
    weights(&mut table, "new");
    table.join_as(90, 1, 3);
    weights(&mut table, "old");
    (0..3).for_each(|process| table.join(1, process));
    let answers = table.answers();
    let refused = answers.iter().find(|(link, _)| *link == 90);
    assert!(
        refused.is_some_and(|(_, answer)| answer.as_ref().is_err_and(differs)),
        "{answers:?}"
    );
    assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
}

#[test]
fn place_that_a_spare_gives_back_goes_to_another() {
    let mut table = running(&[]);
    table.join_as(90, 1, 3);
    table.die(11);
    go_on(&mut table, &[10, 12]);
    assert_eq!(table.joined(), [(20, 0, 2), (90, 1, 2), (22, 2, 2)]);
    let how = LeaveKind::GivesBack("its weights have changed".to_owned());
    table
        .job
        .said(90, ClientRequest::Leave { ask: 2, how }, table.now);
    let parts = table.job.epochs.parts();
    assert!(
        parts.contains(&(ProcessId(3), ProcessPart::Out)),
        "{parts:?}"
    );
    assert_eq!(table.job.epochs.wanted(), 1, "its place is free");
    table.join_as(91, 1, 4);
    [20, 22]
        .into_iter()
        .for_each(|link| table.leave(link, true));
    [0, 2]
        .into_iter()
        .for_each(|process| table.join(3, process));
    assert_eq!(table.joined(), [(30, 0, 3), (91, 1, 3), (32, 2, 3)]);
}

#[test]
fn lack_of_processes_has_the_reason_of_a_refusal() {
    let mut table = running(&[]);
    table.die(11);
    go_on(&mut table, &[10, 12]);
    weights(&mut table, "new");
    table.join_as(90, 1, 3);
    table.answers();
    table.pass(TIME_LIMIT, &[20, 22]);
    let answers = table.answers();
    assert_eq!(answers.len(), 2, "{answers:?}");
    for (_, answer) in answers {
        let said = answer.unwrap_err().to_string();
        assert!(
            said.contains("process 1 of 3 has not joined after 60s"),
            "{said}"
        );
        assert!(
            said.contains("was refused: process 3 on host  differs from process 0"),
            "{said}"
        );
    }
}

#[test]
fn job_that_shrinks_goes_on_without_a_refused_spare() {
    let mut table = running(&[2, 3]);
    weights(&mut table, "new");
    table.join_as(90, 1, 3);
    table.answers();
    table.die(11);
    weights(&mut table, "old");
    go_on(&mut table, &[10, 12]);
    assert_eq!(table.joined(), [(20, 0, 2), (22, 1, 2)]);
}

#[test]
fn service_that_goes_on_knows_the_facts_before_a_process_returns() {
    let facts = Box::new([Fact::new("weights", "old")]);
    let host = JobMember {
        facts,
        ..JobMember::default()
    };
    let members = vec![host, JobMember::default(), JobMember::default()];
    let past = JoinedEpoch {
        process: ProcessId(1),
        epoch: 4,
        run: RUN,
        members,
        standing: CommitStanding::default(),
    };
    let mut table = Table::new();
    table.job = JobState::resumed(3, TIME_LIMIT, &past, &[false, true, true], table.now);
    weights(&mut table, "new");
    table.join_as(90, 1, 7);
    assert!(table.answers()[0].1.as_ref().is_err_and(differs));
}
