//! The encoding of messages between a rendezvous server and its clients.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{CommitStanding, FailureReport, Identity, JobMember, RendezvousError};
use mpmd_handshake::Protocol;
use mpmd_proto::control::{self, ControlError};
use mpmd_proto::wire::{MAX_CONTROL_BYTES, ProcessId};

/// The version of the rendezvous protocol of this crate. Server and clients must have the same.
pub const VERSION: u16 = 15;

/// The longest value that can be set under a key, in bytes.
///
/// It is a little less than the longest message, so that every value also fits an answer.
pub const MAX_VALUE_BYTES: usize = MAX_CONTROL_BYTES as usize - 4096;

/// The longest key, and the longest name of a barrier, in bytes.
pub(super) const MAX_KEY_BYTES: usize = 1024;

const MAX_FRAME_BYTES: usize = MAX_CONTROL_BYTES as usize;

/// The handshake at the start of a connection.
pub(super) const HANDSHAKE: Protocol = Protocol {
    magic: *b"MPMDMEET",
    version: VERSION,
    facts: [0, 4],
};

/// Encodes the interval of the server's pings, which the server sends in its handshake.
pub(super) fn encode_ping(ping: Duration) -> [u8; 4] {
    u32::try_from(ping.as_millis())
        .unwrap_or(u32::MAX)
        .max(1)
        .to_le_bytes()
}

/// Decodes the interval of the server's pings. Returns `None` unless `facts` has 4 bytes.
pub(super) fn decode_ping(facts: &[u8]) -> Option<Duration> {
    let millis = u32::from_le_bytes(facts.try_into().ok()?);
    Some(Duration::from_millis(millis.into()))
}

/// A client's message to the server. Its answer repeats the number `ask`.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum ClientRequest {
    Join {
        ask: u64,
        process: ProcessId,
        processes: u64,
        /// The epoch to join: 1, or the number after that of the failed epoch.
        epoch: u64,
        identity: Identity,
        /// True if the client wants to wait for another process's place, if it has no place of its
        /// own.
        waits: bool,
        peer_timeout: Duration,
        member: Box<JobMember>,
    },
    Set {
        ask: u64,
        key: String,
        value: Vec<u8>,
    },
    Get {
        ask: u64,
        key: String,
        peer_timeout: Duration,
    },
    Barrier {
        ask: u64,
        name: String,
        peer_timeout: Duration,
    },
    Clock {
        ask: u64,
    },
    Leave {
        ask: u64,
        how: LeaveKind,
    },
    Pong,
    /// Reports that all processes have completed a commit of the client's epoch. It has no answer.
    Whole,
    Report {
        ask: u64,
        report: FailureReport,
    },
    /// Asks for the status of every process. The client need not have joined the job.
    Look {
        ask: u64,
        /// Bytes that are passed to each process; empty to ask only for the status.
        words: Vec<u8>,
    },
    /// A process's answer to [`ServerReply::Look`].
    Status {
        look: u64,
        status: ProcessStatus,
    },
}

/// The way in which a process leaves an epoch.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum LeaveKind {
    /// The job has ended well: all processes of the epoch have reached the end.
    Ends,
    /// The process has failed, or the job goes on without it.
    Leaves,
    /// The process will join the next epoch.
    Returns,
    /// The process does not take the place that it has got, for this reason.
    GivesBack(String),
}

/// The status of a process in its own encoding, or the reason why there is none.
pub type ProcessStatus = Result<Vec<u8>, String>;

/// A message from the server to a client.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum ServerReply {
    Answer {
        ask: u64,
        result: Result<RequestAnswer, RendezvousError>,
    },
    Ping,
    Down {
        process: ProcessId,
        why: String,
    },
    /// The epoch of this client is over: process `by` has left it and will join the next one. Sent
    /// once in an epoch.
    EpochOver {
        by: ProcessId,
    },
    /// The client has a place in the epoch that waits for its processes. No other process gets that
    /// place while the client is connected.
    Place,
    /// Tells process 0 how many processes the next epoch can have: more than this epoch if others
    /// wait for a place. `replacements` is the number of processes that can replace processes of
    /// this epoch.
    CouldHave {
        processes: u32,
        replacements: u32,
    },
    /// The server gives this client up and closes the connection.
    Dropped {
        why: String,
    },
    /// The epoch that this client has joined cannot begin. In the first epoch, these processes have
    /// not joined yet. In a later one they are alive, but are still running their own code in the
    /// previous epoch.
    Busy {
        epoch: u64,
        processes: Vec<ProcessId>,
        /// Time since the server began to wait for the epoch's processes, or in the first epoch
        /// since the first of them has joined.
        waited: Duration,
    },
    /// Asks the process of this client for its status. The answer repeats the number `look`.
    Look {
        look: u64,
        /// The bytes from [`ClientRequest::Look`].
        words: Vec<u8>,
    },
    /// The status of one process, for the client's [`ClientRequest::Look`]. After the statuses of
    /// all processes, [`RequestAnswer::Done`] follows.
    Status {
        ask: u64,
        process: ProcessId,
        status: ProcessStatus,
    },
    /// The addresses of the processes that can take over the service, in order. Sent to a client
    /// that waits for a place.
    Heirs {
        /// The identity of the job's run.
        run: u128,
        addresses: Vec<String>,
    },
}

/// The answer to a successful request.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) enum RequestAnswer {
    Done,
    /// The members of the epoch by process number. If `more` is true, the next message continues
    /// the list.
    Members {
        /// The number of the client's process in the epoch.
        process: ProcessId,
        epoch: u64,
        run: u128,
        members: Arc<[JobMember]>,
        standing: CommitStanding,
        more: bool,
    },
    Value(Vec<u8>),
    /// The current time of the server's clock, in nanoseconds since 1970.
    Clock(i64),
}

/// Splits a reply into messages one by one: the members of a large job do not fit one message.
pub(super) fn parts(reply: ServerReply) -> Box<dyn Iterator<Item = ServerReply> + Send> {
    let ServerReply::Answer {
        ask,
        result: Ok(answer),
    } = reply
    else {
        return Box::new(iter::once(reply));
    };

    let RequestAnswer::Members {
        process,
        epoch,
        run,
        members,
        standing,
        more: false,
    } = answer
    else {
        return Box::new(iter::once(ServerReply::Answer {
            ask,
            result: Ok(answer),
        }));
    };

    let mut next = Some(0);
    Box::new(iter::from_fn(move || {
        let first = next?;
        let mut bytes = 0;
        let fits = members[first..].iter().take_while(|member| {
            // `frame` refuses a single member that is too long.
            bytes += control::encode(member).map_or(MAX_FRAME_BYTES, |encoded| encoded.len());
            bytes <= MAX_VALUE_BYTES
        });

        let end = (first + fits.count().max(1)).min(members.len());
        let more = end < members.len();
        next = more.then_some(end);
        let members = members[first..end].into();
        let result = Ok(RequestAnswer::Members {
            process,
            epoch,
            run,
            members,
            standing,
            more,
        });
        Some(ServerReply::Answer { ask, result })
    }))
}

/// Encodes a message with its length in front, in 4 bytes. Fails if the message is too long.
pub(super) fn frame<T: Serialize>(message: &T) -> Result<Vec<u8>, RendezvousError> {
    let too_long = |bytes| RendezvousError::TooLong {
        what: "a rendezvous message".into(),
        bytes,
        limit: MAX_FRAME_BYTES,
    };

    let payload = control::encode(message).map_err(|_| too_long(MAX_FRAME_BYTES + 1))?;
    let Some(length) = u32::try_from(payload.len())
        .ok()
        .filter(|&n| n as usize <= MAX_FRAME_BYTES)
    else {
        return Err(too_long(payload.len()));
    };

    let mut bytes = Vec::with_capacity(4 + payload.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&payload);
    Ok(bytes)
}

/// The fault of an invalid message. The sender is at fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a message announces {bytes} bytes; 1 to {MAX_FRAME_BYTES} are allowed")]
    Length { bytes: usize },
    #[error(transparent)]
    Content(#[from] ControlError),
}

/// A buffer that splits a byte stream into messages, however the stream is cut.
#[derive(Default)]
pub(super) struct FrameBuffer {
    bytes: Vec<u8>,
    taken: usize,
}

impl FrameBuffer {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Decodes the next complete message. Returns `Ok(None)` if more bytes are needed.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let rest = &self.bytes[self.taken..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };

        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > MAX_FRAME_BYTES {
            return Err(FrameError::Length { bytes: length });
        }
        let Some(payload) = rest.get(..length) else {
            return Ok(None);
        };

        let message = control::decode(payload)?;
        self.taken += 4 + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use mpmd_base::VectorWidth;

    use super::super::{Fact, Heir, SizeRange};
    use super::*;

    #[test]
    fn messages_are_decoded_from_any_chunks() {
        let sent: Vec<ServerReply> = (0..5)
            .map(|ask| ServerReply::Answer {
                ask,
                result: Ok(RequestAnswer::Value(vec![ask as u8; 100])),
            })
            .chain([ServerReply::Ping])
            .collect();
        let bytes: Vec<u8> = sent
            .iter()
            .flat_map(|reply| frame(reply).unwrap())
            .collect();
        for size in [1, 3, 50, 113, bytes.len()] {
            let mut frames = FrameBuffer::default();
            let mut found = Vec::new();
            for chunk in bytes.chunks(size) {
                frames.push(chunk);
                while let Some(reply) = frames.next::<ServerReply>().unwrap() {
                    found.push(reply);
                }
            }
            assert_eq!(found, sent, "cut into {size}");
        }
    }

    #[test]
    fn long_member_list_is_split_into_messages() {
        // A large cluster, with addresses of many devices.
        let member = |process: u32| JobMember {
            pid: process,
            addresses: vec![("ucx".into(), "f".repeat(1500))],
            ..JobMember::default()
        };
        for processes in [0, 1, 600, 4000] {
            let members: Arc<[JobMember]> = (0..processes).map(member).collect();
            let (process, epoch, run) = (ProcessId(1), 2, 1 << 99);
            let all = members.clone();
            let standing = CommitStanding {
                whole: Some(1),
                leavers: 2,
            };
            let answer = RequestAnswer::Members {
                process,
                epoch,
                run,
                members: all,
                standing,
                more: false,
            };
            let mut heard = Vec::new();
            let mut last = false;
            for part in parts(ServerReply::Answer {
                ask: 3,
                result: Ok(answer),
            }) {
                assert!(!last, "nothing follows the last part");
                assert!(frame(&part).is_ok());
                let ServerReply::Answer {
                    ask: 3,
                    result:
                        Ok(RequestAnswer::Members {
                            process: ProcessId(1),
                            epoch: 2,
                            run: told,
                            members,
                            standing:
                                CommitStanding {
                                    whole: Some(1),
                                    leavers: 2,
                                },
                            more,
                        }),
                } = part
                else {
                    panic!("{part:?}");
                };
                assert_eq!(told, run);
                assert!(!members.is_empty() || processes == 0);
                heard.extend_from_slice(&members);
                last = !more;
            }
            assert!(last && *heard == *members, "{processes} processes");
        }
        assert_eq!(
            parts(ServerReply::Ping).collect::<Vec<_>>(),
            [ServerReply::Ping]
        );
    }

    /// Decodes `bytes`, in pieces of `size` bytes, up to the first invalid message. Returns the
    /// messages and the fault, if any.
    fn heard<T: DeserializeOwned>(bytes: &[u8], size: usize) -> (Vec<T>, Option<String>) {
        let (mut frames, mut heard) = (FrameBuffer::default(), Vec::new());
        for piece in bytes.chunks(size) {
            frames.push(piece);
            loop {
                match frames.next() {
                    Ok(Some(message)) => heard.push(message),
                    Ok(None) => break,
                    Err(error) => return (heard, Some(error.to_string())),
                }
            }
        }
        (heard, None)
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn fuzz_rendezvous_frames() {
        let (peer_timeout, process) = (Duration::from_secs(9), ProcessId(1));
        let member = JobMember {
            host: "left".into(),
            pid: 7,
            devices: 2,
            addresses: vec![
                ("tcp".into(), "10.0.0.1:77".into()),
                ("shm".into(), "shm/1".into()),
            ],
            program: "p".into(),
            facts: Box::new([Fact::new("--seed", "1")]),
            vectors: VectorWidth::Avx2,
            trouble: Some("none".into()),
            sizes: SizeRange::of([1, 2, 4]),
            is_added: true,
            leaves: true,
            heir: Some(Heir {
                address: "10.0.0.1:78".into(),
                mark: 1 << 80,
                since: 2,
            }),
        };
        let (epoch, waits, processes) = (1, true, 2);
        let joining = member.clone();
        let join = ClientRequest::Join {
            ask: 1,
            process,
            processes,
            epoch,
            identity: Identity {
                key: 3 << 90,
                run: Some(1 << 100),
            },
            waits,
            peer_timeout,
            member: Box::new(joining),
        };
        let requests = [
            join,
            ClientRequest::Set {
                ask: 2,
                key: "k".into(),
                value: vec![7; 20],
            },
            ClientRequest::Get {
                ask: 300,
                key: "k".into(),
                peer_timeout,
            },
            ClientRequest::Barrier {
                ask: 4,
                name: "b".into(),
                peer_timeout,
            },
            ClientRequest::Clock { ask: 70_000 },
            ClientRequest::Leave {
                ask: 6,
                how: LeaveKind::Returns,
            },
            ClientRequest::Pong,
            ClientRequest::Whole,
            ClientRequest::Look {
                ask: 7,
                words: vec![5; 9],
            },
            ClientRequest::Status {
                look: 8,
                status: Ok(vec![3; 25]),
            },
            ClientRequest::Status {
                look: 9,
                status: Err("it starts".into()),
            },
        ];
        let (name, why) = ("b".to_owned(), "it has gone".to_owned());
        let missing = RendezvousError::Barrier {
            name,
            missing: vec![process],
            processes: 2,
            peer_timeout,
        };
        let answer = |result| ServerReply::Answer {
            ask: 1 << 40,
            result,
        };
        let replies = [
            answer(Ok(RequestAnswer::Done)),
            answer(Ok(RequestAnswer::Members {
                process,
                epoch: 3,
                run: 5,
                members: vec![member; 2].into(),
                standing: CommitStanding {
                    whole: Some(2),
                    leavers: 1,
                },
                more: true,
            })),
            answer(Ok(RequestAnswer::Value(vec![1; 30]))),
            answer(Ok(RequestAnswer::Clock(-1))),
            answer(Err(missing)),
            ServerReply::Ping,
            ServerReply::Down {
                process,
                why: why.clone(),
            },
            ServerReply::Place,
            ServerReply::CouldHave {
                processes: 3,
                replacements: 1,
            },
            ServerReply::Busy {
                epoch: 2,
                processes: vec![process; 3],
                waited: peer_timeout,
            },
            ServerReply::Look {
                look: 8,
                words: vec![5; 9],
            },
            ServerReply::Status {
                ask: 7,
                process,
                status: Ok(vec![3; 25]),
            },
            ServerReply::Status {
                ask: 7,
                process,
                status: Err(why.clone()),
            },
            ServerReply::Dropped { why },
            ServerReply::Heirs {
                run: 5,
                addresses: vec!["10.0.0.1:78".into(); 2],
            },
        ];
        let mut samples: Vec<Vec<u8>> = requests
            .iter()
            .map(|request| frame(request).unwrap())
            .collect();
        samples.extend(replies.iter().map(|reply| frame(reply).unwrap()));
        samples.extend([samples[..7].concat(), samples[7..].concat()]);
        mpmd_fuzz::bytes("rendezvous-frames", &samples, |bytes| {
            let (requests, why) = heard::<ClientRequest>(bytes, usize::MAX);
            let (cut, cut_why) = heard::<ClientRequest>(bytes, 7);
            assert_eq!((requests.len(), why), (cut.len(), cut_why));
            let (replies, why) = heard::<ServerReply>(bytes, usize::MAX);
            assert_eq!(heard(bytes, 7), (replies.clone(), why));
            for reply in replies {
                let said: Vec<u8> = parts(reply.clone())
                    .flat_map(|part| frame(&part).unwrap())
                    .collect();
                assert_eq!(heard(&said, usize::MAX), (vec![reply], None));
            }
        });
    }

    #[test]
    fn too_long_and_invalid_messages_are_refused() {
        let mut frames = FrameBuffer::default();
        frames.push(&(MAX_FRAME_BYTES as u32 + 1).to_le_bytes());
        assert!(
            frames
                .next::<ServerReply>()
                .unwrap_err()
                .to_string()
                .contains("announces")
        );
        let mut frames = FrameBuffer::default();
        frames.push(&[3, 0, 0, 0, 200, 200, 200]);
        assert!(frames.next::<ServerReply>().is_err());
        let long = ServerReply::Answer {
            ask: 1,
            result: Ok(RequestAnswer::Value(vec![0; MAX_FRAME_BYTES])),
        };
        assert!(matches!(frame(&long), Err(RendezvousError::TooLong { .. })));
        let most = ServerReply::Answer {
            ask: u64::MAX,
            result: Ok(RequestAnswer::Value(vec![0; MAX_VALUE_BYTES])),
        };
        assert!(frame(&most).is_ok());
    }
}
