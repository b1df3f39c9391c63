//! Credit, grants and timeouts when messages and ticks are late.

use std::collections::VecDeque;

use super::*;

fn flying(job: &Job, kind: MessageKind) -> usize {
    job.flying
        .iter()
        .filter(|message| message.header.kind == kind)
        .count()
}

/// Offers small pieces from process 0 to process 1, in new operations, until one finds no credit.
/// Returns the number of pieces sent eagerly before.
fn use_up_credit(job: &mut Job) -> u64 {
    for eager in 0.. {
        let op = job.issue(0, 5, "small");
        job.offer(0, 1, (op, 0), EAGER_BYTES);
        if job
            .flying
            .last()
            .is_some_and(|message| message.header.kind == MessageKind::Offer)
        {
            return eager;
        }
    }
    unreachable!("credit ends")
}

#[test]
fn unclaimed_bytes_stay_within_credit_that_came_back() {
    let each = EAGER_BYTES + EAGER_OVERHEAD;
    let mut job = Job::new(2, 5, 0);
    let (mut unclaimed, mut returns) = (VecDeque::new(), 0);
    for round in 0..12 {
        let eager = use_up_credit(&mut job);
        unclaimed.extend((0..eager).map(|_| each).chain([0]));
        let bytes: u64 = unclaimed.iter().sum();
        assert!(
            bytes <= EAGER_CREDIT,
            "round {round}: {bytes} bytes are unclaimed"
        );
        job.run(1);
        // A little more than brings credit back, so that some is owed from round to round.
        for _ in 0..20.min(unclaimed.len()) {
            let op = job.issue(1, 5, "small");
            job.expect(1, 0, (op, 0), EAGER_BYTES);
            unclaimed.pop_front();
        }
        returns += flying(&job, MessageKind::Credit);
        job.run(3);
    }
    assert!(returns >= 10, "credit came back {returns} times");
    assert!(job.lost.is_empty(), "{:?}", job.lost);
    assert!(job.outcomes.values().all(Result::is_ok));
}

#[test]
fn parked_offer_gets_one_grant_once_it_is_expected() {
    let mut job = Job::new(2, 6, 0);
    use_up_credit(&mut job);
    let last = job.routers[0].count();
    let mut grants = 0;
    job.run(100);
    for _ in 0..last {
        job.issue(1, 5, "small");
        assert_eq!(
            flying(&job, MessageKind::Grant),
            0,
            "issued, and not expected"
        );
    }
    job.run(100);
    assert_eq!(flying(&job, MessageKind::Grant), 0);
    job.expect(1, 0, (last, 0), EAGER_BYTES);
    // The offer a second time, which no correct sender does, and time that passes.
    let offer = Header {
        op: last,
        bytes: EAGER_BYTES,
        hash: 5,
        ..Header::new(MessageKind::Offer)
    };
    job.say(0, 1, offer, &[]);
    for _ in 0..200 {
        grants += flying(&job, MessageKind::Grant);
        job.step();
    }
    assert_eq!(grants, 1);
    assert!(job.outcomes[&(1, (last, 0))].is_ok());
}

#[test]
fn late_tick_loses_no_peer_and_starts_a_full_time_out() {
    let mut job = Job::new(3, 3, 0);
    job.run(1000);
    // This process was stopped for longer than the timeout, or its clock jumped.
    job.now += 100_000;
    job.routers[0].tick(at(job.now));
    job.act(0);
    assert!(
        job.silent.is_empty() && job.lost.is_empty(),
        "{:?}",
        job.silent
    );
    // From then on one peer is silent, the other is not.
    job.dead[1] = true;
    job.flying.retain(|message| message.from != ProcessId(1));
    job.run(59_000);
    assert!(job.silent.is_empty(), "{:?}", job.silent);
    job.run(2_000);
    assert!(job.silent.contains(&(0, 1)), "{:?}", job.silent);
    assert!(
        job.silent.iter().all(|(_, lost)| *lost == 1),
        "{:?}",
        job.silent
    );
}
