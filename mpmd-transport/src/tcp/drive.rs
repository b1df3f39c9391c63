//! The transport's thread: starts the tasks of all peers, reports ends to the handler, and closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::transport::{Handler, Payload, Ticket, TransportError};
use mpmd_base::deadline::after;
use mpmd_memory::Pool;
use mpmd_proto::wire::{Header, ProcessId};

use super::connection::{ConnectionSender, Endings, TransferEnd};
use super::read::{self, LINGER, ReadEnd};
use super::state::{TcpPeer, TcpState};

/// Time that a shutdown waits beyond its deadline for a handler call that has not returned.
pub(super) const LAST_CALL: Duration = Duration::from_secs(1);

/// The connections to one peer: for control messages, then for bulk data.
pub(super) type Pair = [TcpStream; 2];

/// A request to close the transport.
pub(super) struct CloseRequest {
    pub(super) deadline: Duration,
    /// Notified once the handler is not called any more.
    pub(super) closed: std::sync::mpsc::Sender<()>,
}

/// The connections and the state that the transport's thread starts with.
pub(super) struct Drive {
    shared: Arc<TcpState>,
    halves: Vec<PeerHalves>,
}

/// The receiving halves of the two connections to one peer.
struct PeerHalves {
    peer: ProcessId,
    control: OwnedReadHalf,
    bulk: OwnedReadHalf,
}

impl Drive {
    pub(super) fn new(process: ProcessId, pool: Pool, pairs: Vec<Option<Pair>>) -> Self {
        let mut halves = Vec::new();
        let peers = pairs.into_iter().zip(0..).map(|(pair, id)| {
            let [control, bulk] = pair?;
            let (control_read, control) = control.into_split();
            let (bulk_read, bulk) = bulk.into_split();
            halves.push(PeerHalves {
                peer: ProcessId(id),
                control: control_read,
                bulk: bulk_read,
            });
            Some(TcpPeer {
                control: ConnectionSender::new(control),
                bulk: ConnectionSender::new(bulk),
            })
        });
        let peers = peers.collect();

        let shared = TcpState {
            process,
            pool,
            endings: Endings::new(),
            peers,
            closing: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            halves,
        }
    }

    pub(super) fn shared(&self) -> Arc<TcpState> {
        self.shared.clone()
    }

    /// Moves messages on all connections until `close` is sent or dropped. Then sends the queued
    /// messages, up to the deadline in `close`, and ends every ticket.
    pub(super) async fn run(
        self,
        mut start: oneshot::Receiver<Arc<dyn Handler>>,
        mut close: oneshot::Receiver<CloseRequest>,
    ) {
        let Self { shared, halves } = self;
        // Dropped with this future, for any reason: no ticket stays open, and later posts fail.
        let _last = FailAll(&shared);

        let mut tasks = JoinSet::new();
        for halves in &halves {
            for channel in [0, 1] {
                tasks.spawn(write(shared.clone(), halves.peer, channel));
            }
        }

        let (handler, asked) = tokio::select! {
            // Prefer `start`: a handler that was given before the end is told about all ends.
            biased;
            // An error means that the transport was dropped, and `close` with it.
            Ok(handler) = &mut start => (handler, None),
            asked = &mut close => (Arc::new(SilentHandler) as Arc<dyn Handler>, Some(asked)),
        };

        for halves in halves {
            tasks.spawn(read(shared.clone(), halves, handler.clone()));
        }
        let asked = match asked {
            Some(asked) => asked,
            None => loop {
                tokio::select! {
                    asked = &mut close => break asked,
                    () = shared.endings.some() => say(shared.endings.take(false), &handler),
                    Some(task) = tasks.join_next() => rethrow(task),
                }
            },
        };

        shared.closing.store(true, Ordering::Release);
        if let Ok(CloseRequest { deadline, .. }) = &asked {
            flush(&shared, *deadline, &mut tasks, &handler).await;
        }

        tasks.shutdown().await;
        shared.fail_all();
        // The tasks are gone, but a posting thread may be in the middle of a write, which never
        // waits.
        while shared.lines().any(ConnectionSender::is_in_use) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }

        loop {
            let endings = shared.endings.take(true);
            if endings.is_empty() {
                break;
            }
            say(endings, &handler);
        }

        drop(handler);
        if let Ok(CloseRequest { closed, .. }) = asked {
            let _ = closed.send(());
        }
    }
}

/// Sends the queued messages of all connections. Gives up at the deadline.
async fn flush(
    shared: &TcpState,
    deadline: Duration,
    tasks: &mut JoinSet<()>,
    handler: &Arc<dyn Handler>,
) {
    for line in shared.lines() {
        line.finish(TransportError::Closed);
    }

    let until = after(Instant::now(), deadline).into();
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(until) => break,
            () = shared.endings.some() => say(shared.endings.take(false), handler),
            task = tasks.join_next() => match task {
                Some(task) => rethrow(task),
                None => break,
            },
        }
    }
}

/// Fails all connections of the transport when it is dropped, also after a panic.
struct FailAll<'a>(&'a TcpState);

impl Drop for FailAll<'_> {
    fn drop(&mut self) {
        self.0.fail_all();
    }
}

/// Runs the task that writes one connection (`channel`) to a peer.
async fn write(shared: Arc<TcpState>, peer: ProcessId, channel: usize) {
    let Some(lines) = &shared.peers[peer.index()] else {
        return;
    };
    let line = if channel == 0 {
        &lines.control
    } else {
        &lines.bulk
    };
    line.write(&shared.endings, |error| {
        shared.lost(peer, &error.to_string())
    })
    .await;
}

/// Runs the task that reads both connections of a peer, and closes them once the peer is gone.
async fn read(shared: Arc<TcpState>, halves: PeerHalves, handler: Arc<dyn Handler>) {
    let PeerHalves {
        peer,
        control,
        bulk,
    } = halves;
    let end = read::read(&shared, peer, &handler, control, bulk).await;
    let Some(lines) = &shared.peers[peer.index()] else {
        return;
    };
    let lines = [&lines.control, &lines.bulk];

    // A peer that closed in order still gets the queued messages.
    let (down, polite) = match end {
        ReadEnd::Closed(why) => (TransportError::PeerGone { peer, why }, true),
        ReadEnd::Protocol(why) => (TransportError::Protocol { peer, why }, false),
    };
    let gone = if polite {
        down.clone()
    } else {
        TransportError::PeerGone {
            peer,
            why: down.to_string(),
        }
    };
    for line in lines {
        if polite {
            line.finish(gone.clone());
        } else {
            line.fail(gone.clone(), &shared.endings);
        }
    }

    if !shared.closing.load(Ordering::Acquire) {
        handler.peer_down(peer, down);
    }

    if polite {
        tokio::join!(lines[0].drained(LINGER), lines[1].drained(LINGER));
        for line in lines {
            line.fail(gone.clone(), &shared.endings);
        }
    }
}

/// Reports ended tickets to the handler, and calls the callbacks of failed fetches.
fn say(endings: Vec<TransferEnd>, handler: &Arc<dyn Handler>) {
    for ending in endings {
        match ending {
            TransferEnd::Ticket(ticket, result) => handler.done(ticket, result),
            TransferEnd::Fetch(then, error) => then(Err(error)),
        }
    }
}

/// Resumes the panic of a task, if it panicked. A task panics only if the handler does. The
/// transport then ends, and the peers notice.
fn rethrow(task: Result<(), tokio::task::JoinError>) {
    if let Err(error) = task
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// A handler that ignores everything, for a transport that is closed before it was started.
struct SilentHandler;

impl Handler for SilentHandler {
    fn arrived(&self, _: ProcessId, _: Header, _: Payload) {}

    fn done(&self, _: Ticket, _: Result<(), TransportError>) {}

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}
