//! Malformed frames of faulty peers, read without sockets.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::super::drive::Drive;
use super::*;
use crate::transport::{Ticket, TransportError};

/// The receiving half of a connection that delivers its bytes in pieces of `size`, then ends.
struct Bytes<'a> {
    rest: RefCell<&'a [u8]>,
    size: usize,
}

impl ReceivingHalf for Bytes<'_> {
    fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut rest = self.rest.borrow_mut();
        let (read, left) = rest.split_at(into.len().min(self.size).min(rest.len()));
        into[..read.len()].copy_from_slice(read);
        *rest = left;
        Ok(read.len())
    }

    async fn readable(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A received message: (header, its payload, or its length in bytes if the payload was not
/// fetched).
type Heard = (Header, Result<Vec<u8>, u64>);

/// A handler that fetches payloads of limited size and records everything.
#[derive(Default)]
struct Ear(Arc<Mutex<Vec<Heard>>>);

/// The largest payload that is fetched, in bytes.
const MOST: u64 = 1 << 16;

impl Handler for Ear {
    fn arrived(&self, _: ProcessId, header: Header, payload: Payload) {
        let bytes = match payload {
            Payload::Empty => Ok(Vec::new()),
            Payload::Inline(bytes) => Ok(bytes.to_vec()),
            Payload::Lent(_) => panic!("nobody lends anything over sockets"),
            Payload::Waiting(fetch) if fetch.bytes() <= MOST => {
                let (into, heard) = (vec![0; fetch.bytes() as usize].into(), self.0.clone());
                let then = move |result: Result<OwnedBuffer, TransportError>| {
                    heard
                        .lock()
                        .push((header, result.map(|bytes| bytes.to_vec()).map_err(|_| 0)));
                };
                return fetch.fetch(into, Box::new(then));
            }
            Payload::Waiting(fetch) => Err(fetch.bytes()),
        };
        self.0.lock().push((header, bytes));
    }

    fn done(&self, _: Ticket, _: Result<(), TransportError>) {}

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}

/// Reads `bytes`, in pieces of `size`, as those of a bulk or control connection. Returns the
/// received messages and the reason for the end.
fn read(shared: &Arc<TcpState>, bytes: &[u8], bulk: bool, size: usize) -> (Vec<Heard>, String) {
    let ear = Ear::default();
    let heard = ear.0.clone();
    let handler: Arc<dyn Handler> = Arc::new(ear);
    let reader = PeerReader {
        shared,
        peer: ProcessId(1),
        handler: &handler,
        progress: AtomicU64::new(0),
    };
    let half = Bytes {
        rest: RefCell::new(bytes),
        size,
    };
    let mut reading = pin!(async {
        match bulk {
            true => reader.bulk(half).await,
            false => reader.control(half).await,
        }
    });
    let mut context = Context::from_waker(Waker::noop());
    let polls = bytes.len() + 10;
    let end = (0..polls).find_map(|_| match reading.as_mut().poll(&mut context) {
        Poll::Ready(end) => Some(end),
        Poll::Pending => None,
    });
    let end = end.expect("the bytes have an end");
    let heard = std::mem::take(&mut *heard.lock());
    (heard, format!("{end:?}"))
}

#[test]
fn fuzz_tcp_frames() {
    let shared = Drive::new(ProcessId(0), Pool::new("test", None), vec![None, None]).shared();
    let message = |kind, bytes: usize| {
        let header = Header {
            op: 7,
            bytes: bytes as u64,
            ..Header::new(kind)
        };
        [
            &header.encode()[..],
            &vec![kind as u8; if kind.carries_payload() { bytes } else { 0 }],
        ]
        .concat()
    };
    let control = [
        message(MessageKind::Eager, 9),
        message(MessageKind::Grant, 1 << 30),
        message(MessageKind::Goodbye, 0),
    ];
    let bulk = [
        message(MessageKind::Data, 30),
        message(MessageKind::Data, 0),
        message(MessageKind::Data, 5),
    ];
    let mut samples = [
        control.concat(),
        bulk.concat(),
        message(MessageKind::Data, MOST as usize + 1),
    ]
    .to_vec();
    samples.extend(control.into_iter().chain(bulk));
    mpmd_fuzz::bytes("tcp-frames", &samples, |bytes| {
        for bulk in [false, true] {
            let (heard, end) = read(&shared, bytes, bulk, usize::MAX);
            assert!(
                heard
                    .iter()
                    .all(|(header, _)| (header.kind == MessageKind::Data) == bulk)
            );
            for (header, payload) in &heard {
                let there = payload
                    .as_ref()
                    .map_or_else(|bytes| *bytes, |bytes| bytes.len() as u64);
                assert!(there == header.payload_bytes() || there == 0);
            }
            if bytes.len() < 1000 {
                assert_eq!(read(&shared, bytes, bulk, 13), (heard, end));
            }
        }
    });
}
