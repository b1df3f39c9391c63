//! Stand-ins for all processes of a job but one. They accept its messages, send the pieces that it
//! waits for, and answer its heartbeats.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_proto::{Header, Kind};
use mpmd_transport::{Handler, Payload, SharedBuffer, Ticket, Transport};

use super::step::ELEMENTS;

/// Bytes of a piece that a stand-in sends.
const BYTES: u64 = (ELEMENTS * size_of::<f32>()) as u64;

/// The number of the only piece of a move between two devices.
const PIECE: u64 = 0;

/// The hash in the header of a stand-in's piece. A stand-in computes none.
const NO_HASH: u128 = 0;

/// The credit in bytes that a stand-in returns for a received piece, at least as much as the piece
/// took.
const CREDIT: u64 = 1024;

/// The number of received pieces for which a stand-in returns credit at a time.
const PORTION: u64 = 64;

/// The epoch in the headers of the job's messages.
const EPOCH: u64 = 1;

/// A transport that connects one real process with stand-ins. One thread simulates all of them.
pub(super) struct Peers {
    me: ProcessId,
    processes: usize,
    words: Sender<Word>,
    state: Mutex<State>,
}

enum State {
    New(Receiver<Word>),
    Started(JoinHandle<()>),
    Ended,
}

/// An order for the thread that simulates the stand-ins.
enum Word {
    /// The real process has posted a message to the stand-in with this id.
    Posted(ProcessId, Header, Ticket),
    /// A stand-in is to send its piece: (the stand-in's id, the number of the operation).
    Send(ProcessId, u64),
    End,
}

impl Peers {
    pub(super) fn new(me: ProcessId, processes: usize) -> Arc<Self> {
        let (words, waiting) = channel();
        Arc::new(Self { me, processes, words, state: Mutex::new(State::New(waiting)) })
    }

    /// Orders the stand-ins to send the pieces of a step that begins after `before` operations;
    /// does not wait. `arrivals` are (sender, number of the operation in the step, from 1). Pieces
    /// arrive early, as from processes that are ahead.
    pub(super) fn send(&self, before: u64, arrivals: &[(ProcessId, u64)]) {
        arrivals.iter().for_each(|(from, place)| self.say(Word::Send(*from, before + place)));
    }

    fn say(&self, word: Word) {
        // The thread is gone once the program has ended.
        let _ = self.words.send(word);
    }

    fn exchange(&self, state: State) -> State {
        std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), state)
    }
}

impl Transport for Peers {
    fn name(&self) -> &'static str {
        "nobody"
    }

    fn process(&self) -> ProcessId {
        self.me
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn is_stand_in(&self) -> bool {
        true
    }

    fn start(&self, handler: Arc<dyn Handler>) {
        match self.exchange(State::Ended) {
            State::New(words) => {
                let payload: SharedBuffer = vec![0u8; BYTES as usize].into();
                let thread = std::thread::spawn(move || serve(&words, &*handler, &payload));
                drop(self.exchange(State::Started(thread)));
            }
            _ => panic!("a transport is started once"),
        }
    }

    fn post(&self, to: ProcessId, header: Header, _: Option<SharedBuffer>, ticket: Ticket) {
        self.say(Word::Posted(to, header, ticket));
    }

    fn shutdown(&self, _: Duration) {
        if let State::Started(thread) = self.exchange(State::Ended) {
            self.say(Word::End);
            // A panic of the thread has already printed its message.
            let _ = thread.join();
        }
    }
}

fn serve(words: &Receiver<Word>, handler: &dyn Handler, payload: &SharedBuffer) {
    let arrived = |from, header: Header, payload| {
        handler.arrived(from, Header { epoch: EPOCH, ..header }, payload);
    };
    let mut taken = std::collections::HashMap::<ProcessId, u64>::new();
    for word in words {
        match word {
            Word::End => return,
            Word::Send(from, op) => {
                let header = Header {
                    op,
                    piece: PIECE,
                    bytes: BYTES,
                    hash: NO_HASH,
                    ..Header::new(Kind::Eager)
                };
                arrived(from, header, Payload::Inline(payload.clone()));
            }
            Word::Posted(to, header, ticket) => {
                if ticket != Ticket::NONE {
                    handler.done(ticket, Ok(()));
                }
                match header.kind {
                    Kind::Eager => {
                        let taken = taken.entry(to).or_default();
                        *taken += 1;
                        if taken.is_multiple_of(PORTION) {
                            let header =
                                Header { count: PORTION * CREDIT, ..Header::new(Kind::Credit) };
                            arrived(to, header, Payload::Empty);
                        }
                    }
                    // The answer is that of a peer that has issued the same operations.
                    Kind::Heartbeat | Kind::Goodbye if header.bytes == 0 => {
                        arrived(to, header, Payload::Empty)
                    }
                    _ => {}
                }
            }
        }
    }
}
