//! Small pieces that a thread sends at the same time leave together: one message for each process.
//!
//! A thread gathers its small pieces in three cases: while it registers the sends of a move,
//! resolves the results of a kernel, or forwards pieces of a batch. None of these waits for a peer,
//! so the pieces are not late for long.

use std::cell::RefCell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mpmd_base::ProcessId;
use mpmd_memory::SharedBuffer;
use mpmd_proto::Header;
use mpmd_transport::batch::{self, MOST_BATCH, MOST_BATCHED};
use mpmd_transport::{Payload, Ticket};

use crate::exec::Runtime;

thread_local! {
    /// The small pieces that this thread has gathered. `None` while it does not gather pieces.
    static GATHERED: RefCell<Option<GatheredPieces>> = const { RefCell::new(None) };
}

/// Small pieces that wait to be sent together, in their order.
struct GatheredPieces {
    /// Address of the runtime that sends the pieces. In tests a thread may serve several runtimes.
    runtime: *const Runtime,
    pieces: Vec<SmallPiece>,
}

/// A piece small enough to be sent in a batch.
struct SmallPiece {
    to: ProcessId,
    header: Header,
    payload: SharedBuffer,
    ticket: Ticket,
}

/// Guard that sends the gathered pieces when it is dropped, also after a panic.
struct Gathering<'a>(&'a Arc<Runtime>);

impl Runtime {
    /// Runs `send`, then sends all small pieces that it posted, as one message per process. `send`
    /// must not wait for a peer.
    pub(crate) fn send_together<R>(self: &Arc<Self>, send: impl FnOnce() -> R) -> R {
        let begins = GATHERED.with_borrow_mut(|gathered| {
            let begins = gathered.is_none();
            gathered.get_or_insert_with(|| GatheredPieces {
                runtime: Arc::as_ptr(self),
                pieces: Vec::new(),
            });
            begins
        });
        let _gathering = begins.then(|| Gathering(self));
        send()
    }

    /// Posts a piece to the transport, or gathers it for a batch.
    pub(crate) fn post_piece(
        &self,
        to: ProcessId,
        header: Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        let is_small =
            |bytes: &SharedBuffer| bytes.len() <= MOST_BATCHED && bytes.device().is_none();
        match payload {
            Some(payload) if is_small(&payload) => {
                let piece = SmallPiece {
                    to,
                    header,
                    payload,
                    ticket,
                };

                let alone = GATHERED.with_borrow_mut(|gathered| match gathered {
                    Some(gathered) if ptr::eq(gathered.runtime, self) => {
                        gathered.pieces.push(piece);
                        None
                    }
                    _ => Some(piece),
                });
                if let Some(SmallPiece { payload, .. }) = alone {
                    self.post_message(to, header, Some(payload), ticket);
                }
            }
            payload => self.post_message(to, header, payload, ticket),
        }
    }

    /// Posts a message with one piece or several to the transport.
    fn post_message(
        &self,
        to: ProcessId,
        header: Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        let Some(transport) = &self.transport else {
            return;
        };
        self.messages_sent[to.index()].fetch_add(1, Ordering::Relaxed);
        transport.post(to, header, payload, ticket);
    }

    /// Posts pieces for one process, as one batch if there are several.
    fn post_batch(&self, pieces: Vec<SmallPiece>) {
        let messages: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.header, piece.payload.clone()))
            .collect();
        let batch = match &messages[..] {
            [_] => None,
            several => batch::pack(several, &self.staging).ok(),
        };

        match batch {
            Some((header, payload)) => {
                let tickets = pieces.iter().map(|piece| piece.ticket).collect();
                let ticket = self.under_way.lock().bundle(tickets);
                self.post_message(pieces[0].to, header, Some(payload), ticket);
            }
            // Alone, or without memory for a batch.
            None => pieces.into_iter().for_each(
                |SmallPiece {
                     to,
                     header,
                     payload,
                     ticket,
                 }| {
                    self.post_message(to, header, Some(payload), ticket);
                },
            ),
        }
    }

    /// Splits a batch from a peer into its pieces and passes them on.
    pub(crate) fn take_batch(self: &Arc<Self>, from: ProcessId, batch: &Payload) {
        let messages = match batch {
            Payload::Inline(bytes) | Payload::Lent(bytes) if bytes.device().is_none() => {
                batch::unpack(bytes)
            }
            _ => Err(batch::BatchError::NoBytes),
        };

        match messages {
            Ok(messages) => self.send_together(|| self.take_pieces(from, messages)),
            Err(why) => {
                self.with_router(|router| router.broken(from, &format!("it sent {why}")));
            }
        }
    }
}

impl Drop for Gathering<'_> {
    fn drop(&mut self) {
        let gathered = GATHERED.with_borrow_mut(Option::take);
        let mut pieces = gathered.map_or_else(Vec::new, |gathered| gathered.pieces);
        // Stable: the pieces for a process stay in order.
        pieces.sort_by_key(|piece| piece.to);

        let mut pieces = pieces.into_iter().peekable();
        while let Some(first) = pieces.next() {
            let to = first.to;
            let mut bytes = batch::size(&first.payload);
            let mut batch = vec![first];
            while let Some(next) = pieces.next_if(|next| {
                bytes += batch::size(&next.payload);
                next.to == to && bytes <= MOST_BATCH
            }) {
                batch.push(next);
            }
            self.0.post_batch(batch);
        }
    }
}
