//! The checks that every transport passes.

use std::time::{Duration, Instant};

use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::{Header, MessageKind};
use mpmd_transport::{Ticket, TransportError};

use crate::cluster::{Cluster, Kind, id, is_gone};
use crate::recorder::Manner;

const MIB: usize = 1 << 20;
/// Bytes of a payload that is larger than any socket buffers by itself.
const LARGE: usize = 64 * MIB;

pub(crate) fn payloads_of_every_size_arrive_intact(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    let control = [0, 1, 16 << 10, MIB];
    let bulk = [0, 1, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, MIB, LARGE];
    for bytes in control {
        cluster.post(0, 1, MessageKind::Eager, bytes);
    }
    for bytes in bulk {
        cluster.post(1, 0, MessageKind::Data, bytes);
    }
    // A grant announces bytes that it does not carry.
    cluster.post(0, 1, MessageKind::Grant, LARGE);
    let arrived = cluster.recorders[1].wait_complete(control.len() + 1);
    assert!(arrived.iter().all(|message| message.from == id(0)));
    let mut sizes: Vec<_> = arrived
        .iter()
        .map(|message| message.header.bytes as usize)
        .collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [0, 1, 16 << 10, MIB, LARGE]);
    cluster.recorders[0].wait_complete(bulk.len());
    cluster.finish_fine();
}

pub(crate) fn payloads_above_four_gib_are_announced_without_taking_memory(kind: Kind) {
    const BYTES: u64 = 5 << 30;
    let mut cluster = Cluster::new(kind, 2, Manner::Hold);
    // Pages that are never written are not committed: this costs address space only.
    let pool = Pool::new("huge", None);
    let payload = match pool.allocate(BYTES as usize) {
        Ok(payload) => payload.freeze(),
        Err(error) => {
            eprintln!("SKIPPED: this machine gives no 5 GiB of address space: {error}");
            return;
        }
    };
    let header = Header {
        bytes: BYTES,
        ..Header::new(MessageKind::Data)
    };
    let ticket = cluster.post_payload(0, 1, header, payload);
    cluster.recorders[1].wait_held(1);
    cluster.recorders[1].read(|seen| assert_eq!(seen.held[0].2.bytes(), BYTES));
    cluster.kill(0);
    assert!(is_gone(&cluster.recorders[1].wait_down(id(0)), 0));
    assert!(cluster.recorders[0].wait_done(ticket).is_err());
    assert_eq!(cluster.recorders[1].pool.stats().peak, 0);
    cluster.recorders[1].discard();
    cluster.finish();
}

pub(crate) fn both_directions_at_once_with_payloads_larger_than_buffers(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    for _ in 0..2 {
        cluster.post(0, 1, MessageKind::Data, LARGE / 2);
        cluster.post(1, 0, MessageKind::Data, LARGE / 2);
    }
    for _ in 0..8 {
        cluster.post(0, 1, MessageKind::Eager, MIB);
        cluster.post(1, 0, MessageKind::Eager, MIB);
    }
    cluster.recorders[0].wait_complete(10);
    cluster.recorders[1].wait_complete(10);
    cluster.finish_fine();
}

pub(crate) fn eight_processes_all_to_all(kind: Kind) {
    let mut cluster = Cluster::new(kind, 8, Manner::Fetch);
    for round in 0..4 {
        for from in 0..8 {
            for to in (0..8).filter(|to| *to != from) {
                cluster.post(from, to, MessageKind::Eager, 100 * round);
                cluster.post(from, to, MessageKind::Data, 100_000 + round);
            }
        }
    }
    for recorder in &cluster.recorders {
        let arrived = recorder.wait_complete(4 * 2 * 7);
        for from in 0..8 {
            let count = arrived
                .iter()
                .filter(|message| message.from == id(from))
                .count();
            assert!(count == 0 || count == 8, "{count} messages of {from}");
        }
    }
    cluster.finish_fine();
}

pub(crate) fn payload_buffers_are_released_when_done(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    let pool = Pool::new("sender", None);
    for (message, bytes) in [
        (MessageKind::Eager, 1),
        (MessageKind::Eager, MIB),
        (MessageKind::Data, 8 * MIB),
    ] {
        for manner in [Manner::Fetch, Manner::Discard] {
            cluster.recorders[1].set_manner(manner);
            let mut buffer = pool.allocate(bytes).unwrap();
            buffer.fill(0);
            let payload = buffer.freeze();
            let header = Header {
                bytes: bytes as u64,
                ..Header::new(message)
            };
            let ticket = cluster.post_payload(0, 1, header, payload.clone());
            assert_eq!(cluster.recorders[0].wait_done(ticket), Ok(()));
            assert!(
                payload.into_owned().is_ok(),
                "{bytes} bytes are still held after their end"
            );
        }
    }
    assert_eq!(pool.stats().live, 0);
    cluster.finish_fine();
}

pub(crate) fn control_overtakes_a_bulk_payload_that_nobody_fetches(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Hold);
    let data = cluster.post(0, 1, MessageKind::Data, LARGE);
    cluster.recorders[1].wait_held(1);
    let control = cluster.post(0, 1, MessageKind::Heartbeat, 0);
    let arrived = cluster.recorders[1].wait_complete(1);
    assert_eq!(arrived[0].header.op, control.0);
    cluster.recorders[1].release();
    let arrived = cluster.recorders[1].wait_complete(2);
    assert_eq!(arrived[1].header.op, data.0);
    cluster.finish_fine();
}

pub(crate) fn a_dead_sender_ends_its_payloads(kind: Kind) {
    let mut cluster = Cluster::new(kind, 3, Manner::Hold);
    let ticket = cluster.post(0, 1, MessageKind::Data, LARGE);
    cluster.recorders[1].wait_held(1);
    cluster.kill(0);
    for survivor in [1, 2] {
        assert!(is_gone(&cluster.recorders[survivor].wait_down(id(0)), 0));
    }
    cluster.recorders[1].release();
    let saved = usize::from(kind.lends());
    if kind.lends() {
        // The lent memory stays readable.
        cluster.recorders[1].wait_complete(saved);
    } else {
        let lost =
            cluster.recorders[1].wait("the loss of the payload", |seen| seen.lost.first().cloned());
        assert!(is_gone(&lost, 0), "{lost}");
    }
    assert!(cluster.recorders[0].wait_done(ticket).is_err());
    // The others live on.
    cluster.post(2, 1, MessageKind::Eager, 10);
    cluster.recorders[1].wait_complete(saved + 1);
    assert_eq!(cluster.recorders[1].pool.stats().live, 0);
    cluster.finish();
}

pub(crate) fn a_dead_receiver_ends_all_tickets_towards_it(kind: Kind) {
    let mut cluster = Cluster::new(kind, 3, Manner::Hold);
    let open: Vec<_> = (0..3)
        .map(|_| cluster.post(0, 1, MessageKind::Data, LARGE))
        .collect();
    cluster.recorders[1].wait_held(1);
    cluster.kill(1);
    for ticket in open {
        let error = cluster.recorders[0].wait_done(ticket).unwrap_err();
        assert!(is_gone(&error, 1), "{error}");
    }
    assert!(is_gone(&cluster.recorders[0].wait_down(id(1)), 1));
    cluster.recorders[2].set_manner(Manner::Fetch);
    cluster.post(0, 2, MessageKind::Data, MIB);
    cluster.recorders[2].wait_complete(1);
    cluster.recorders[1].discard();
    cluster.finish();
}

pub(crate) fn posting_to_a_dead_peer_ends_the_ticket(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    cluster.kill(1);
    cluster.recorders[0].wait_down(id(1));
    for message in [MessageKind::Data, MessageKind::Eager] {
        let ticket = cluster.post(0, 1, message, 100);
        let error = cluster.recorders[0].wait_done(ticket).unwrap_err();
        assert!(is_gone(&error, 1), "{error}");
    }
    cluster.finish();
}

pub(crate) fn a_slow_reader_holds_up_nobody_else(kind: Kind) {
    let mut cluster = Cluster::new(kind, 3, Manner::Fetch);
    cluster.recorders[1].set_manner(Manner::Hold);
    cluster.post(0, 1, MessageKind::Data, LARGE);
    cluster.recorders[1].wait_held(1);
    // To others, from the slow one, and to the slow one from others.
    cluster.post(0, 2, MessageKind::Data, 8 * MIB);
    cluster.recorders[2].wait_complete(1);
    cluster.post(1, 0, MessageKind::Data, 8 * MIB);
    cluster.recorders[0].wait_complete(1);
    cluster.recorders[1].set_manner(Manner::Fetch);
    cluster.post(2, 1, MessageKind::Data, 8 * MIB);
    cluster.recorders[1].wait_complete(1);
    cluster.recorders[1].release();
    cluster.recorders[1].wait_complete(2);
    cluster.finish_fine();
}

pub(crate) fn after_a_discarded_payload_the_next_arrives_right(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Discard);
    for bytes in [16 << 10, 5 * MIB + 3, 100_000] {
        let discarded = cluster.post(0, 1, MessageKind::Data, bytes);
        assert_eq!(cluster.recorders[0].wait_done(discarded), Ok(()));
    }
    cluster.recorders[1].wait("two or three discarded", |seen| {
        (seen.discarded >= 2).then_some(())
    });
    cluster.recorders[1].wait("all three heard of", |seen| {
        (seen.discarded + seen.complete.len() == 3).then_some(())
    });
    let before = cluster.recorders[1].read(|seen| seen.complete.len());
    cluster.recorders[1].set_manner(Manner::Fetch);
    let next = cluster.post(0, 1, MessageKind::Data, 3 * MIB + 1);
    let arrived = cluster.recorders[1].wait_complete(before + 1);
    assert_eq!(arrived[before].header.op, next.0);
    cluster.finish_fine();
}

pub(crate) fn what_is_posted_before_peers_start_is_kept(kind: Kind) {
    let mut cluster = Cluster::not_started(kind, 2, Manner::Fetch);
    cluster.start(0);
    cluster.post(0, 1, MessageKind::Eager, 100);
    cluster.post(0, 1, MessageKind::Data, 100);
    let large = cluster.post(0, 1, MessageKind::Data, LARGE);
    // Neither end has a handler for this one yet.
    cluster.post(1, 0, MessageKind::Eager, 7);
    cluster.recorders[0].wait_complete(1);
    // A zero-copy payload counts as sent once its place was announced.
    let has_left = cluster.transport(0).zero_copy(id(1));
    assert!(has_left || cluster.recorders[0].read(|seen| !seen.done.contains_key(&large)));
    assert!(
        cluster.recorders[1].read(|seen| seen.log.is_empty()),
        "heard before it was started"
    );
    cluster.start(1);
    cluster.recorders[1].wait_complete(3);
    cluster.finish_fine();
}

pub(crate) fn many_small_messages_keep_their_order(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    let posted: Vec<_> = (0..5000)
        .map(|n| cluster.post(0, 1, MessageKind::Eager, n % 300).0)
        .collect();
    let arrived = cluster.recorders[1].wait_complete(posted.len());
    // No fault is set, so nothing has a reason to overtake.
    assert_eq!(
        arrived
            .iter()
            .map(|message| message.header.op)
            .collect::<Vec<_>>(),
        posted
    );
    cluster.finish_fine();
}

pub(crate) fn shutdown_sends_what_was_posted(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Fetch);
    let data = cluster.post(0, 1, MessageKind::Data, LARGE);
    let goodbye = cluster.post(0, 1, MessageKind::Goodbye, 20);
    cluster.transport(0).shutdown(Duration::from_secs(20));
    for ticket in [data, goodbye] {
        cluster.recorders[0].read(|seen| assert_eq!(seen.done[&ticket], [Ok(())]));
    }
    cluster.recorders[1].wait_complete(2);
    assert!(is_gone(&cluster.recorders[1].wait_down(id(0)), 0));
    cluster.recorders[1].read(|seen| assert_eq!(seen.log.last(), Some(&"down")));
    // Too late for both: one has left, the other is gone.
    let late = cluster.post(1, 0, MessageKind::Eager, 1);
    assert!(is_gone(
        &cluster.recorders[1].wait_done(late).unwrap_err(),
        0
    ));
    let payload = SharedBuffer::from(vec![1]);
    let header = Header {
        bytes: 1,
        ..Header::new(MessageKind::Eager)
    };
    cluster
        .transport(0)
        .post(id(1), header, Some(payload.clone()), Ticket(u64::MAX));
    assert!(
        payload.into_owned().is_ok(),
        "a payload posted after shutdown is dropped"
    );
    cluster.finish();
}

pub(crate) fn shutdown_keeps_its_deadline_and_ends_every_ticket(kind: Kind) {
    let mut cluster = Cluster::new(kind, 2, Manner::Hold);
    let tickets: Vec<_> = (0..3)
        .map(|_| cluster.post(0, 1, MessageKind::Data, LARGE))
        .collect();
    // Lent payloads count as sent; nothing more is in flight.
    cluster.recorders[1].wait_held(if kind.lends() { tickets.len() } else { 1 });
    let began = Instant::now();
    cluster.transport(0).shutdown(Duration::from_millis(50));
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "took {:?}",
        began.elapsed()
    );
    cluster.recorders[0].read(|seen| {
        for ticket in &tickets {
            // A lent payload counts as sent, though it has not come back.
            let has_left = kind.lends() && seen.done[ticket] == [Ok(())];
            assert!(
                has_left || seen.done[ticket] == [Err(TransportError::Closed)],
                "{:?}",
                seen.done
            );
        }
    });
    cluster.recorders[1].wait_down(id(0));
    cluster.recorders[1].release();
    if kind.lends() {
        cluster.recorders[1].wait_complete(tickets.len());
    } else {
        let lost =
            cluster.recorders[1].wait("the loss of the payload", |seen| seen.lost.first().cloned());
        assert!(is_gone(&lost, 0), "{lost}");
    }
    cluster.finish();
}

pub(crate) fn a_transport_that_was_never_started_shuts_down(kind: Kind) {
    let cluster = Cluster::not_started(kind, 3, Manner::Fetch);
    cluster.start(0);
    // Process 2 does not listen yet, so process 1 may have to wait for the whole deadline.
    cluster.transport(1).shutdown(Duration::from_millis(200));
    cluster.recorders[0].wait_down(id(1));
    assert!(cluster.recorders[1].read(|seen| seen.log.is_empty()));
    cluster.finish();
}
