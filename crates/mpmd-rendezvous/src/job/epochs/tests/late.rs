//! Processes that join the first epoch late.

use super::*;

#[test]
fn spare_takes_the_place_of_a_process_that_never_joins() {
    let mut table = Table::new();
    table.join(1, 0);
    table.join(1, 1);
    table.join(1, 7);
    assert_eq!(table.joined(), []);
    table.job.place_is_free(EndedProcess::at(2, 2));
    assert_eq!(table.joined(), [(10, 0, 1), (11, 1, 1), (17, 2, 1)]);
}

#[test]
fn late_processes_are_named_once_to_the_first_that_joined() {
    let mut table = Table::new();
    // A launcher may take long until it starts its processes.
    table.pass(TIME_LIMIT / 2, &[]);
    table.join(1, 1);
    table.pass(LATE - Duration::from_secs(1), &[11]);
    assert_eq!(busy(&mut table), []);
    table.pass(Duration::from_secs(1), &[11]);
    assert_eq!(busy(&mut table), [(11, vec![0, 2])]);
    table.pass(LATE, &[11]);
    assert_eq!(busy(&mut table), []);

    let mut in_time = Table::new();
    (0..3).for_each(|process| in_time.join(1, process));
    in_time.answers();
    in_time.pass(2 * LATE, &[10, 11, 12]);
    assert_eq!(busy(&mut in_time), []);
}
