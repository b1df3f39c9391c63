//! Zero-copy transfer through shared memory, between processes of one host.
//!
//! Every process's buffers lie in segments that peers can map for reading
//! ([`Arena`](mpmd_memory::Arena)). A message with a payload names the payload's place. The
//! receiver maps the segment once, reads the payload in place, and gives it back when the last
//! holder drops it. So the cost of a message does not depend on its size.
//!
//! Processes of the same user that know the job's secret are trusted not to be malicious. They are
//! not trusted to be free of bugs. None can write another's buffers or read segments that it was
//! not given. A wrong number, place or size ends the connection and has no other effect. If an
//! owner changes values while they are lent, their readers see the change.
//!
//! # Where things are
//!
//! Each pair has four rings (`ring.rs`) in memory that both write: messages and returned loans,
//! each way. Each process has a doorbell (`doorbell.rs`) that peers ring if no thread of it is
//! awake. A thread that waits for a message may poll the rings itself. If none does, the
//! transport's thread is woken.
//!
//! # The end of a peer
//!
//! A peer is down when it has said goodbye or its socket has closed; everything that it sent before
//! is delivered first. Memory lent to it comes back only when its process has provably exited,
//! since a stopped process may wake up and read. Memory that it re-lent to others stays with them.
//! Each of them tells all owners the last loan that it has got from the peer: later loans were lost
//! with it, and end. Memory that the peer has lent stays readable until the last reader drops it,
//! however the peer ended.
//!
//! # Segments and loans
//!
//! The pools of a process carve their blocks from the segments of an `Arena` (`memory/arena.rs`,
//! `memory/segment.rs`). A segment is a memory file (memfd). It is prefaulted and then sealed: no
//! reader can open it for writing, and the owner cannot take pages away from under a reader.
//! Nothing has a name in the file system, so a killed process leaves nothing behind.
//!
//! A message is a record in a ring (`record.rs`). A small payload follows its header. For a larger
//! payload the record has the segment, the place and the length. The receiver maps the segment at
//! its first use (`peer.rs`). A peer that has got payloads before hears of a new segment at once.
//! It maps the pages on a thread of its own (`reaper.rs`), so that the first payload in the segment
//! does not wait for that. When the last holder drops the payload, its number goes back in the ring
//! of returned loans (`returns.rs`). The owner takes blocks back from there before it maps new ones
//! (`Arena::on_shortage`), after every 64 loans, and when a ring fills up. If the receiver's pool
//! has a limit, the payload is copied into that pool: a program that fits over TCP also fits here.
//!
//! # Re-lending
//!
//! The owner has one ledger of all loans of its memory (`ledger.rs`), each known by (borrower,
//! lender, number). A process that re-lends memory first tells the owner in its ring of returned
//! loans, which copies the lender's entry for the new borrower. Then it names the owner in its
//! message. The new borrower gives the memory back to the owner itself. So loans form no chains:
//! each ends when its borrower drops the payload. If the ring has no room for the note, the payload
//! is copied. All processes that one process reaches here also reach each other, as the conditions
//! for it (`address.rs`) are the same for all.
//!
//! A message to the owner itself names a range of the sender's loan. The owner delivers that part
//! of its own buffer, without a mapping or a new loan. The borrower counts these messages. The loan
//! ends when it was returned and the owner has taken all of them.
//!
//! The sending operation stays in flight until the receiver has *taken* the payload. The receiver
//! reports this at once after every 16 payloads or if the sender's program waits for it, otherwise
//! with its next tick. The operation does not wait for the return of the memory, since a receiver
//! may keep it for ever. If the payload is not the sender's own memory, the operation ends when the
//! message is posted, as with a small payload. So a process without memory waits for returns only
//! as long as the peer timeout. Lent memory counts with its owner. A piece that is not contiguous
//! is not packed: the whole shard is lent, and the receiver copies or adds the piece from there.
//!
//! A thread that waits for a message polls the rings itself (`Transport::parking`). Only if no
//! thread polls does the peer ring the doorbell, which costs a system call. `meeting.rs` and
//! `socket.rs` connect two processes and pass the descriptors of rings and doorbells. `mixed.rs`
//! combines this transport with TCP, each for some of the peers.
//!
//! `tests/interleavings` runs ring and doorbell under loom, in every order of events: no record and
//! no wake-up is lost.
//!
//! # Device memory
//!
//! Device memory is lent in the same way (`devices.rs`). The transport carries opaque words, by
//! which another process opens a segment once; the device back end does the opening. A shard is
//! lent once the work that fills it has ended, because a device that waits for a dead process's
//! device may wait for ever. The work may have succeeded on invalid inputs. So the lender reports
//! later whether the shard is valid, and results computed from an invalid one fail with it. Calls
//! that may block in the driver (freeing, closing) have a thread of their own (`reaper.rs`).

mod address;
mod agreeing;
mod bare_word;
mod devices;
mod doorbell;
mod foreign_memory;
mod futex;
mod ledger;
mod lending;
mod lending_devices;
mod loans;
mod mappings;
mod meeting;
mod note;
mod peer;
mod reaper;
mod record;
mod returns;
mod ring;
mod shared_mapping;
mod shared_words;
mod socket;
mod state;
mod sync;
mod taking;
#[cfg(test)]
mod tests;
mod transport;

use std::fmt;
use std::time::Duration;

pub use address::{no_address, why_apart};
pub use bare_word::BareWord;
pub use transport::{OpenedShm, Shm};

use crate::transport::TransportError;
use mpmd_proto::wire::ProcessId;

/// The transport's name in options and environment variables.
pub const NAME: &str = "shm";

/// The job's configuration for [`OpenedShm::connect`].
#[derive(Clone)]
pub struct ShmConfig {
    /// This process's id.
    pub process: ProcessId,
    /// Each process's [`OpenedShm::address`], by process; `None` for processes that this transport
    /// does not reach. This process's own element is ignored.
    pub peers: Vec<Option<String>>,
    /// The job's secret token. A process that cannot prove that it knows the token is refused.
    pub token: [u8; 32],
    /// The epoch of the job: the number of the incarnation, the same on every process.
    pub epoch: u64,
    /// Time limit for connecting to all peers together.
    pub peer_timeout: Duration,
}

impl fmt::Debug for ShmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays secret.
        f.debug_struct("ShmConfig")
            .field("process", &self.process)
            .field("peers", &self.peers)
            .field("epoch", &self.epoch)
            .field("peer_timeout", &self.peer_timeout)
            .finish_non_exhaustive()
    }
}

fn environment(doing: String, error: &std::io::Error) -> TransportError {
    TransportError::Environment {
        doing,
        why: error.to_string(),
    }
}
