//! The work of NCCL's calls in a stream. Each rank sends its bytes to the ranks that need them, and
//! the receivers reduce them.

use half::{bf16, f16};

use crate::device::memory::space;
use crate::device::races::Use;
use crate::error::{Code, Result};
use crate::nccl::Communicator;
use crate::nccl::channel::{LOOK, Shared};

/// The called NCCL function, with NCCL's number of the reduction or the rank of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(u32),
    ReduceScatter(u32),
    AllGather,
    Send(usize),
    Receive(usize),
}

impl Kind {
    /// Returns a number in message headers. It must be equal in the calls of the sender and the
    /// receiver.
    fn number(self) -> u32 {
        match self {
            Kind::AllReduce(reduce) => 0x100 | reduce,
            Kind::ReduceScatter(reduce) => 0x200 | reduce,
            Kind::AllGather => 0x300,
            Kind::Send(_) | Kind::Receive(_) => 0x500,
        }
    }
}

/// The arguments of one call. `from` and `to` are device addresses, `count` is in elements, and
/// `dtype` is NCCL's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: usize,
    pub(crate) dtype: u32,
}

/// Bytes of a message's header: kind (4 bytes), dtype (4), and number of bytes that follow (8).
const HEAD: usize = 16;

/// A message to or from the rank `peer`. `bytes` includes the header, and `done` is the number of
/// bytes that are transferred.
struct Message {
    peer: usize,
    bytes: Vec<u8>,
    done: usize,
    /// The header that an incoming message must have; empty for an outgoing one.
    expected: Vec<u8>,
    /// Device address for the bytes of an incoming message, if they need no reduction.
    to: Option<u64>,
}

impl Operation {
    fn item(&self) -> usize {
        match self.dtype {
            0 | 1 => 1,
            6 | 9 => 2,
            2 | 3 | 7 => 4,
            _ => 8,
        }
    }

    fn bytes(&self) -> usize {
        self.count * self.item()
    }

    /// Fails if NCCL would refuse the call: for an unknown dtype or reduction, or a peer outside of
    /// the group.
    pub(crate) fn check(&self, of: &Communicator) -> std::result::Result<(), ()> {
        let peer = match self.kind {
            Kind::Send(peer) | Kind::Receive(peer) => peer,
            Kind::AllReduce(reduce) | Kind::ReduceScatter(reduce) if reduce > 3 => return Err(()),
            _ => 0,
        };
        if self.dtype <= 9 && peer < of.ranks {
            Ok(())
        } else {
            Err(())
        }
    }

    /// Returns (bytes read from `from`, bytes written to `to`) on this rank.
    fn lengths(&self, of: &Communicator) -> (usize, usize) {
        let bytes = self.bytes();
        match self.kind {
            Kind::AllReduce(_) => (bytes, bytes),
            Kind::ReduceScatter(_) => (of.ranks * bytes, bytes),
            Kind::AllGather => (bytes, of.ranks * bytes),
            Kind::Receive(_) => (0, bytes),
            Kind::Send(_) => (bytes, 0),
        }
    }

    /// Returns the device memory ranges that the call reads and writes on this rank.
    pub(crate) fn uses(&self, of: &Communicator) -> Vec<Use> {
        let (reads, writes) = self.lengths(of);
        let uses = [(self.from, reads, false), (self.to, writes, true)];
        let uses = uses.into_iter().filter(|(_, bytes, _)| *bytes > 0);
        uses.map(|(address, bytes, write)| Use {
            address,
            bytes: bytes as u64,
            write,
        })
        .collect()
    }

    fn head(&self, bytes: usize) -> Vec<u8> {
        [
            &self.kind.number().to_ne_bytes()[..],
            &self.dtype.to_ne_bytes(),
            &(bytes as u64).to_ne_bytes(),
        ]
        .concat()
    }
}

fn take(address: u64, bytes: usize) -> Result<Vec<u8>> {
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let span = space().span(address, bytes as u64)?;
    // SAFETY: the span has that many bytes, and stays mapped.
    Ok(unsafe { std::slice::from_raw_parts(span.pointer(), bytes) }.to_vec())
}

fn put(address: u64, bytes: &[u8]) -> Result {
    if bytes.is_empty() {
        return Ok(());
    }
    let span = space().span(address, bytes.len() as u64)?;
    // SAFETY: the span has that many bytes, and stays mapped. All callers pass a vector of their
    // own, so source and target do not overlap.
    unsafe {
        span.pointer()
            .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
    };
    Ok(())
}

/// Runs a group of sends and receives, or one collective, in the calling thread. Blocks until all
/// its messages are in the rings, and all messages from other ranks have arrived. Returns early,
/// without writing results, if the communicator is aborted.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` for bytes outside of a live allocation. `CUDA_ERROR_LAUNCH_FAILED`
/// if ranks have called different operations, where NCCL would mix up their bytes.
pub(crate) fn run(of: &Communicator, shared: &Shared, operations: &[Operation]) -> Result {
    let mut out = Vec::new();
    let mut coming = Vec::new();

    let send = |operation: &Operation, peer: usize, bytes: &[u8]| Message {
        peer,
        bytes: [&operation.head(bytes.len())[..], bytes].concat(),
        done: 0,
        expected: Vec::new(),
        to: None,
    };
    let receive = |operation: &Operation, peer: usize, bytes: usize, to: Option<u64>| Message {
        peer,
        bytes: vec![0; HEAD + bytes],
        done: 0,
        expected: operation.head(bytes),
        to,
    };

    let others = || (0..of.ranks).filter(|other| *other != of.rank);
    let mut own = Vec::new();
    for operation in operations {
        let (reads, _) = operation.lengths(of);
        let bytes = operation.bytes();
        let given = take(operation.from, reads)?;

        match operation.kind {
            Kind::AllReduce(_) | Kind::AllGather => {
                out.extend(others().map(|peer| send(operation, peer, &given)));
                coming.extend(others().map(|peer| receive(operation, peer, bytes, None)));
            }
            Kind::ReduceScatter(_) => {
                let share = |peer: usize| &given[peer * bytes..][..bytes];
                out.extend(others().map(|peer| send(operation, peer, share(peer))));
                coming.extend(others().map(|peer| receive(operation, peer, bytes, None)));
            }
            Kind::Send(peer) => out.push(send(operation, peer, &given)),
            Kind::Receive(peer) => coming.push(receive(operation, peer, bytes, Some(operation.to))),
        }
        own = given;
    }

    if !exchange(of, shared, &mut out, &mut coming)? {
        return Ok(());
    }
    for message in &coming {
        if let Some(to) = message.to {
            put(to, &message.bytes[HEAD..])?;
        }
    }

    // Only sends and receives may be grouped: a collective is expected to be alone in `operations`.
    let Some(operation) = operations.first() else {
        return Ok(());
    };
    let bytes = operation.bytes();
    let mine = match operation.kind {
        Kind::ReduceScatter(_) => own[of.rank * bytes..][..bytes].to_vec(),
        _ => own,
    };

    let part = |rank: usize| {
        let found = coming.iter().find(|message| message.peer == rank);
        found.map_or(&mine[..], |message| &message.bytes[HEAD..])
    };

    match operation.kind {
        Kind::AllReduce(reduce) | Kind::ReduceScatter(reduce) => {
            let mut sum = part(of.ranks - 1).to_vec();
            for rank in (0..of.ranks - 1).rev() {
                combine(operation.dtype, reduce, &mut sum, part(rank));
            }
            put(operation.to, &sum)
        }
        Kind::AllGather => {
            let all: Vec<u8> = (0..of.ranks).flat_map(|rank| part(rank).to_vec()).collect();
            put(operation.to, &all)
        }
        Kind::Send(_) | Kind::Receive(_) => Ok(()),
    }
}

/// Blocks until all messages in `out` are in the rings, and all in `coming` have arrived. Returns
/// false if the communicator was aborted before. Fails with `CUDA_ERROR_LAUNCH_FAILED` if a message
/// does not have the expected header.
fn exchange(
    of: &Communicator,
    shared: &Shared,
    out: &mut [Message],
    coming: &mut [Message],
) -> Result<bool> {
    loop {
        if of.is_aborted() {
            return Ok(false);
        }

        let mut moved = false;
        let mut left = false;
        // Messages to the same rank are sent in order.
        let mut busy = vec![false; of.ranks];
        for message in out
            .iter_mut()
            .filter(|message| message.done < message.bytes.len())
        {
            left = true;
            if !std::mem::replace(&mut busy[message.peer], true) {
                let count = shared.write(of.rank, message.peer, &message.bytes[message.done..]);
                message.done += count;
                moved |= count > 0;
            }
        }

        let mut busy = vec![false; of.ranks];
        for message in coming
            .iter_mut()
            .filter(|message| message.done < message.bytes.len())
        {
            left = true;
            if std::mem::replace(&mut busy[message.peer], true) {
                continue;
            }

            let until = if message.done < HEAD {
                HEAD
            } else {
                message.bytes.len()
            };
            let count = shared.read(
                message.peer,
                of.rank,
                &mut message.bytes[message.done..until],
            );
            message.done += count;
            moved |= count > 0;

            if message.done >= HEAD && message.bytes[..HEAD] != message.expected[..] {
                eprintln!(
                    "softcuda: NCCL: rank {} and rank {} have called different operations: {:?} \
                     against {:?}",
                    of.rank,
                    message.peer,
                    message.expected,
                    &message.bytes[..HEAD]
                );
                return Err(Code::LAUNCH_FAILED);
            }
        }

        if !left {
            return Ok(true);
        }
        if !moved {
            std::thread::sleep(LOOK);
        }
    }
}

/// Reduces `other` into `into`, element by element. `dtype` is NCCL's number of the element type.
/// `reduce` 0 adds, 1 multiplies, 2 takes the larger, 3 the smaller.
fn combine(dtype: u32, reduce: u32, into: &mut [u8], other: &[u8]) {
    macro_rules! elements {
        ($t:ty, $add:expr, $times:expr) => {{
            const SIZE: usize = size_of::<$t>();
            for (into, other) in into
                .as_chunks_mut::<SIZE>()
                .0
                .iter_mut()
                .zip(other.as_chunks::<SIZE>().0)
            {
                let a = <$t>::from_ne_bytes(*into);
                let b = <$t>::from_ne_bytes(*other);
                let made: $t = match reduce {
                    0 => $add(a, b),
                    1 => $times(a, b),
                    2 => a.max(b),
                    _ => a.min(b),
                };
                *into = made.to_ne_bytes();
            }
        }};
    }
    macro_rules! integers {
        ($t:ty) => {
            elements!($t, <$t>::wrapping_add, <$t>::wrapping_mul)
        };
    }
    macro_rules! floats {
        ($t:ty) => {
            elements!($t, |a: $t, b: $t| a + b, |a: $t, b: $t| a * b)
        };
    }

    match dtype {
        0 => integers!(i8),
        1 => integers!(u8),
        2 => integers!(i32),
        3 => integers!(u32),
        4 => integers!(i64),
        5 => integers!(u64),
        6 => floats!(f16),
        7 => floats!(f32),
        8 => floats!(f64),
        _ => floats!(bf16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_reduced_in_their_dtype() {
        let mut into = [250_u8, 3];
        combine(1, 0, &mut into, &[10, 4]);
        assert_eq!(into, [4, 7]);
        let mut into = 1.5_f32.to_ne_bytes();
        combine(7, 2, &mut into, &2.5_f32.to_ne_bytes());
        assert_eq!(f32::from_ne_bytes(into), 2.5);
        let mut into = bf16::from_f32(3.0).to_ne_bytes();
        combine(9, 3, &mut into, &bf16::from_f32(-1.0).to_ne_bytes());
        assert_eq!(bf16::from_ne_bytes(into), bf16::from_f32(-1.0));
    }
}
