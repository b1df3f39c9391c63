//! The rules for all transports, checked by the same code over each of them.

mod checks;
mod cluster;
#[path = "../../../crates/mpmd-handshake/tests/played/end.rs"]
mod handshake;
mod inproc;
mod recorder;
mod rerun;
mod soak;
mod tcp;
#[cfg(feature = "ucx")]
mod ucx;

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Time limit for a check. Few take a second, but under valgrind one takes long.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs a test on a thread of its own and waits for its end. Panics if it panics or takes longer
/// than `limit`.
pub(crate) fn within(limit: Duration, test: impl FnOnce() + Send + 'static) {
    let (alive, ended) = channel::<()>();
    let thread = std::thread::spawn(move || {
        // Dropped when the test ends, also by a panic.
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
    ($($module:ident::$check:ident)*) => {
        over_each_transport! { @over over_shm Shm $($module::$check)* }
        over_each_transport! {
            @elsewhere over_inproc over_inproc_that_lends over_tcp over_ucx; $($module::$check)*
        }
    };
    // Transports other than shared memory.
    (
        @elsewhere $inproc:ident $lends:ident $tcp:ident $ucx:ident;
        $($module:ident::$check:ident)*
    ) => {
        over_each_transport! { @over $inproc Inproc $($module::$check)* }
        over_each_transport! { @over $lends InprocLends $($module::$check)* }
        over_each_transport! { @over $tcp Tcp $($module::$check)* }
        #[cfg(feature = "ucx")]
        over_each_transport! { @over $ucx Ucx $($module::$check)* }
    };
    (@over $name:ident $kind:ident $($module:ident::$check:ident)*) => {
        mod $name {
            $(#[test]
            fn $check() {
                crate::within(crate::LIMIT, || crate::$module::$check(crate::cluster::Kind::$kind));
            })*
        }
    };
}

over_each_transport! {
    checks::payloads_of_every_size_arrive_intact
    checks::both_directions_at_once_with_payloads_larger_than_buffers
    checks::eight_processes_all_to_all
    checks::payload_buffers_are_released_when_done
    checks::control_overtakes_a_bulk_payload_that_nobody_fetches
    checks::a_dead_sender_ends_its_payloads
    checks::a_dead_receiver_ends_all_tickets_towards_it
    checks::posting_to_a_dead_peer_ends_the_ticket
    checks::a_slow_reader_holds_up_nobody_else
    checks::after_a_discarded_payload_the_next_arrives_right
    checks::what_is_posted_before_peers_start_is_kept
    checks::many_small_messages_keep_their_order
    checks::shutdown_sends_what_was_posted
    checks::shutdown_keeps_its_deadline_and_ends_every_ticket
    checks::a_transport_that_was_never_started_shuts_down
    soak::payloads_are_dropped_at_any_time
}

// Shared memory is left out: memory for zero-copy transfers is committed, and 5 GiB are more than
// some test machines have.
over_each_transport! {
    @elsewhere huge_over_inproc huge_over_inproc_that_lends huge_over_tcp huge_over_ucx;
    checks::payloads_above_four_gib_are_announced_without_taking_memory
}
