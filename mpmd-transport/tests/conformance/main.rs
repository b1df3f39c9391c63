//! What every transport must do, checked in the same words over each of them.

mod checks;
mod cluster;
mod inproc;
mod recorder;
mod tcp;

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Runs a test on a thread of its own and fails it where it takes longer than `limit`.
pub(crate) fn within(limit: Duration, test: impl FnOnce() + Send + 'static) {
    let (alive, ended) = channel::<()>();
    let thread = std::thread::spawn(move || {
        // Dropped when the test ends, however it does.
        let _alive = alive;
        test();
    });
    match ended.recv_timeout(limit) {
        Err(RecvTimeoutError::Timeout) => panic!("the test has not ended after {limit:?}"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

macro_rules! over_each_transport {
    ($($check:ident)*) => {
        mod over_inproc {
            $(#[test]
            fn $check() {
                crate::within(std::time::Duration::from_secs(60), || {
                    crate::checks::$check(crate::cluster::Kind::Inproc);
                });
            })*
        }

        #[cfg(feature = "ucx")]
        mod over_ucx {
            $(#[test]
            fn $check() {
                crate::within(std::time::Duration::from_secs(60), || {
                    crate::checks::$check(crate::cluster::Kind::Ucx);
                });
            })*
        }

        mod over_tcp {
            $(#[test]
            fn $check() {
                crate::within(std::time::Duration::from_secs(60), || {
                    crate::checks::$check(crate::cluster::Kind::Tcp);
                });
            })*
        }
    };
}

over_each_transport! {
    payloads_of_every_size_arrive_intact
    payloads_above_four_gib_are_announced_without_taking_memory
    both_directions_at_once_with_payloads_larger_than_every_buffer
    eight_processes_all_to_all
    payload_buffers_are_released_when_done
    control_overtakes_a_bulk_payload_that_nobody_fetches
    a_dead_sender_ends_its_payloads
    a_dead_receiver_ends_all_tickets_towards_it
    posting_to_a_dead_peer_ends_the_ticket
    a_slow_reader_holds_up_nobody_else
    after_a_discarded_payload_the_next_arrives_right
    what_is_posted_before_peers_start_is_kept
    many_small_messages_keep_their_order
    shutdown_sends_what_was_posted
    shutdown_keeps_its_deadline_and_ends_every_ticket
    a_transport_that_was_never_started_shuts_down
}
