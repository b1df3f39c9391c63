//! The handshake of two processes: only a peer that proves itself gets a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::ear::{TIME_LIMIT, config, later};
use crate::shm::address::{ShmAddress, VERSION};
use crate::shm::doorbell::Doorbell;
use crate::shm::meeting::{CAPACITIES, OwnDoor, party};
use crate::shm::ring::Ring;
use crate::shm::socket::{LocalListener, Socket, something_comes};
use crate::shm::{OpenedShm, ShmConfig};
use crate::transport::Transport;
use mpmd_handshake::Refusal;
use mpmd_proto::wire::ProcessId;

/// Creates a file in memory of `bytes` bytes, sealed or not.
pub(super) fn file(bytes: u64, sealed: bool) -> OwnedFd {
    let file = memfd_create("nonsense", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    if sealed {
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    }
    file
}

/// Connects to the process at address `at`.
fn connect(at: &str) -> Socket {
    let address: ShmAddress = at.parse().unwrap();
    Socket::connect(&address.socket_name(), Instant::now() + TIME_LIMIT).unwrap()
}

/// Connects to process 0 at address `at`, and proves to be the process of `config`. Gives these
/// descriptors.
pub(super) fn prove(at: &str, config: &ShmConfig, give: &[BorrowedFd<'_>]) -> Socket {
    let socket = connect(at);
    prove_over(&socket, config, give);
    socket
}

fn prove_over(socket: &Socket, config: &ShmConfig, give: &[BorrowedFd<'_>]) {
    let until = Instant::now() + TIME_LIMIT;
    let mut handshake = party(config).call(ProcessId(0), 0, [9; 32]);
    socket.send_until(&handshake.say(), &[], until).unwrap();
    let answer = socket.receive_until(until).unwrap();
    assert!(
        answer.descriptors.is_empty(),
        "nothing is given before the proof"
    );
    let proof = handshake.take_packet(&answer.bytes).unwrap();
    socket.send_until(&proof, give, until).unwrap();
}

/// Connects to the process at address `at` and sends these bytes. Returns the socket.
fn knock(at: &str, bytes: &[u8]) -> Socket {
    let socket = connect(at);
    socket
        .send_until(bytes, &[], Instant::now() + TIME_LIMIT)
        .unwrap();
    socket
}

/// Waits for the other end to close. Returns the bytes of its packets; they have no descriptors.
fn last_words(socket: &Socket) -> Vec<Vec<u8>> {
    let mut words = Vec::new();
    loop {
        match socket.receive_until(Instant::now() + TIME_LIMIT) {
            Ok(packet) => {
                assert!(packet.descriptors.is_empty());
                words.push(packet.bytes);
            }
            Err(error) => {
                assert_ne!(error.kind(), io::ErrorKind::TimedOut);
                return words;
            }
        }
    }
}

#[test]
fn strangers_get_no_descriptor_and_do_not_disturb() {
    let (zero, one) = (OpenedShm::open().unwrap(), OpenedShm::open().unwrap());
    let addresses = [zero.address(), one.address()];
    let of = |process| config(process, &[&addresses[0], &addresses[1]]);
    let silent: Vec<Socket> = (0..40).map(|_| connect(&addresses[0])).collect();
    let good = party(&of(1)).call(ProcessId(0), 0, [9; 32]).say();
    let bent = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        knock(&addresses[0], &bytes)
    };
    let refused = [
        bent(0),
        knock(&addresses[0], &good[..20]),
        knock(&addresses[0], &[&good[..], &[0]].concat()),
        knock(&addresses[0], &[7; 500]),
    ];
    let (other_version, unproved) = (bent(8), knock(&addresses[0], &good));
    let (zero_config, one_config) = (of(0), of(1));
    let zero = later(move || zero.connect(&zero_config).unwrap());
    for stranger in refused {
        assert!(last_words(&stranger).is_empty());
    }
    let told = last_words(&other_version);
    let expected = [&b"MPMDSHM\0\x01\0"[..], &VERSION.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(told, [expected]);
    // Any proof but the right one.
    let answer = unproved.receive_until(Instant::now() + TIME_LIMIT).unwrap();
    assert!(answer.descriptors.is_empty());
    let shown = answer.bytes.last_chunk::<32>().unwrap();
    unproved
        .send_until(shown, &[], Instant::now() + TIME_LIMIT)
        .unwrap();
    assert!(last_words(&unproved).is_empty());
    let one = one.connect(&one_config).unwrap();
    let zero = zero.join().unwrap();
    let fds: Vec<_> = silent.iter().map(AsFd::as_fd).collect();
    let until = Instant::now() + TIME_LIMIT;
    assert!(
        something_comes(&fds, until).unwrap(),
        "they are sent away when all have met"
    );
    one.shutdown(TIME_LIMIT);
    zero.shutdown(TIME_LIMIT);
}

/// Returns a squatter's reply to a hello.
type Reply<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;

#[test]
fn squatter_learns_nothing_that_lets_it_in() {
    // The answer of process 0 to an earlier hello.
    let of = |process, at: &str| config(process, &[at, at]);
    let earlier = {
        let zero = OpenedShm::open().unwrap();
        let at = zero.address();
        let zero_config = of(0, &at);
        let zero = later(move || zero.connect(&zero_config).map(drop));
        let stranger = knock(
            &at,
            &party(&of(1, &at)).call(ProcessId(0), 0, [9; 32]).say(),
        );
        let answer = stranger
            .receive_until(Instant::now() + TIME_LIMIT)
            .unwrap()
            .bytes;
        let met = prove(&at, &of(1, &at), &[]);
        zero.join().unwrap().unwrap_err();
        drop(met);
        answer
    };
    let reply: [Reply<'_>; 4] = [
        &|_| earlier.clone(),
        &|hello| hello.to_vec(),
        &|hello| [hello, &[0; 34]].concat(),
        &|_| [&earlier[..60], &[0; 32]].concat(),
    ];
    for reply in reply {
        let (lower, higher) = (
            ShmAddress::of_this_process().unwrap(),
            OpenedShm::open().unwrap(),
        );
        let squatter = LocalListener::bind(&lower.socket_name()).unwrap();
        let of_one = config(1, &[&lower.to_string(), &higher.address()]);
        let token = of_one.token;
        let one = later(move || higher.connect(&of_one).map(drop));
        let until = Instant::now() + TIME_LIMIT;
        assert!(something_comes(&[squatter.as_fd()], until).unwrap());
        let socket = squatter.accept().unwrap().unwrap();
        let hello = socket.receive_until(until).unwrap();
        assert!(hello.descriptors.is_empty());
        assert!(
            !hello
                .bytes
                .windows(4)
                .any(|part| token.windows(4).any(|secret| secret == part))
        );
        socket.send_until(&reply(&hello.bytes), &[], until).unwrap();
        let error = one.join().unwrap().unwrap_err().to_string();
        assert!(
            error.contains("process 0") && !error.contains("longer"),
            "{error}"
        );
        assert!(
            last_words(&socket).is_empty(),
            "it proves nothing to a stranger"
        );
    }
}

#[test]
fn misfit_is_named_by_both_processes() {
    let (zero, one) = (OpenedShm::open().unwrap(), OpenedShm::open().unwrap());
    let addresses = [zero.address(), one.address()];
    let of = |process, epoch| ShmConfig {
        epoch,
        ..config(process, &[&addresses[0], &addresses[1]])
    };
    let (zero_config, one_config) = (of(0, 3), of(1, 9));
    let zero = later(move || zero.connect(&zero_config).map(drop));
    let error = one.connect(&one_config).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("process 0") && error.contains("belongs to epoch 3"),
        "{error}"
    );
    let error = zero.join().unwrap().unwrap_err().to_string();
    assert!(
        error.contains("process 1") && error.contains("belongs to epoch 9"),
        "{error}"
    );
}

#[test]
fn process_that_gives_invalid_memory_is_named() {
    let door = Doorbell::BYTES as u64;
    let cases: [&[(u64, bool)]; 5] = [
        &[(door, false)],
        &[(1, true)],
        &[(4096, true)],
        &[],
        &[(door, true), (door, true)],
    ];
    for memory in cases {
        let zero = OpenedShm::open().unwrap();
        let at = zero.address();
        let zero_config = config(0, &[&at, &at]);
        let zero = later(move || zero.connect(&zero_config));
        let files: Vec<_> = memory
            .iter()
            .map(|(bytes, sealed)| file(*bytes, *sealed))
            .collect();
        let give: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let _socket = prove(&at, &config(1, &[&at, &at]), &give);
        let error = zero.join().unwrap().map(drop).unwrap_err().to_string();
        assert!(error.contains("process 1"), "{error}");
    }
}

#[test]
fn process_that_ended_after_its_proof_is_gone() {
    let (zero, own) = (OpenedShm::open().unwrap(), OwnDoor::new().unwrap());
    let at = zero.address();
    let address: ShmAddress = at.parse().unwrap();
    let socket = Socket::connected_by_the_dead(&address.socket_name()).unwrap();
    let zero_config = config(0, &[&at, &at]);
    let zero = later(move || zero.connect(&zero_config).map(drop));
    prove_over(&socket, &config(1, &[&at, &at]), &[own.descriptor()]);
    let error = zero.join().unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "process 1 is gone: its process has ended"
    );
}

/// Process 0 finds that process 1 is gone before process 2 has said hello.
#[test]
fn gone_peer_does_not_keep_others_waiting() {
    let (zero, two, own) = (
        OpenedShm::open().unwrap(),
        OpenedShm::open().unwrap(),
        OwnDoor::new(),
    );
    let (zero_at, two_at, own) = (zero.address(), two.address(), own.unwrap());
    let address: ShmAddress = zero_at.parse().unwrap();
    let dead = Socket::connected_by_the_dead(&address.socket_name()).unwrap();
    let of = |process| config(process, &[&zero_at, &zero_at, &two_at]);
    let zero_config = of(0);
    let zero = later(move || zero.connect(&zero_config).map(drop));
    prove_over(&dead, &of(1), &[own.descriptor()]);
    let until = Instant::now() + TIME_LIMIT;
    dead.receive_until(until).expect("it is welcomed");
    assert_ne!(
        dead.receive_until(until).err().unwrap().kind(),
        io::ErrorKind::TimedOut
    );
    let mut two_config = of(2);
    two_config.peers[1] = None;
    two.connect(&two_config)
        .map(drop)
        .expect("process 0 meets it all the same");
    let error = zero.join().unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "process 1 is gone: its process has ended"
    );
}

#[test]
fn nothing_is_said_to_other_users() {
    let (lower, higher) = (
        ShmAddress::of_this_process().unwrap(),
        OpenedShm::open().unwrap(),
    );
    let name = lower.socket_name();
    // Taken by another user before process 0 could.
    let squatter = std::thread::spawn(move || {
        let other = rustix::process::Uid::from_raw(12345);
        // Only this thread changes its user.
        rustix::thread::set_thread_res_uid(other, other, other).ok()?;
        Some(LocalListener::bind(&name).unwrap())
    });
    let Some(squatter) = squatter.join().unwrap() else {
        eprintln!("skipped: only root can act as another user");
        return;
    };
    let of_one = config(1, &[&lower.to_string(), &higher.address()]);
    let error = higher.connect(&of_one).map(drop).unwrap_err();
    assert!(
        error.to_string().contains("it belongs to user 12345"),
        "{error}"
    );
    let heard = squatter
        .accept()
        .unwrap()
        .unwrap()
        .receive()
        .map(|packet| packet.is_some());
    assert!(heard.is_err(), "nothing was said to it: {heard:?}");
}

#[test]
fn process_with_invalid_answer_is_named() {
    let rings = CAPACITIES.iter().copied().map(Ring::bytes).sum::<usize>() as u64;
    let door = Doorbell::BYTES as u64;
    let cases = [
        (
            "does not know the job token",
            8,
            [(door, true), (rings, true)],
        ),
        ("process 0", 7, [(door, false), (rings, true)]),
        ("process 0", 7, [(door, true), (rings, false)]),
        ("process 0", 7, [(door, true), (64, true)]),
    ];
    for (says, token, memory) in cases {
        let (lower, higher) = (
            ShmAddress::of_this_process().unwrap(),
            OpenedShm::open().unwrap(),
        );
        let listener = LocalListener::bind(&lower.socket_name()).unwrap();
        let of = |process| config(process, &[&lower.to_string(), &higher.address()]);
        let (zero_config, one_config) = (
            ShmConfig {
                token: [token; 32],
                ..of(0)
            },
            of(1),
        );
        let one = later(move || higher.connect(&one_config));
        let until = Instant::now() + TIME_LIMIT;
        assert!(something_comes(&[listener.as_fd()], until).unwrap());
        let socket = listener.accept().unwrap().unwrap();
        let mut handshake = party(&zero_config).answer([5; 32]);
        let answer = handshake
            .take_packet(&socket.receive_until(until).unwrap().bytes)
            .unwrap();
        socket.send_until(&answer, &[], until).unwrap();
        if let Ok(proof) = socket.receive_until(until) {
            assert_eq!(proof.descriptors.len(), 1);
            let welcome = handshake.take_packet(&proof.bytes).unwrap();
            let memory = memory.map(|(bytes, sealed)| file(bytes, sealed));
            socket
                .send_until(&welcome, &[memory[0].as_fd(), memory[1].as_fd()], until)
                .unwrap();
        }
        let error = one.join().unwrap().map(drop).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
    }
}

#[test]
fn caller_of_another_version_hears_both_versions() {
    let config = config(1, &["", ""]);
    let mut handshake = party(&config).call(ProcessId(0), 0, [9; 32]);
    let told = [&b"MPMDSHM\0\x01\0\x02\0"[..], &[0; 4]].concat();
    let refusal = handshake.take_packet(&told).unwrap_err();
    assert_eq!(refusal, Refusal::OtherVersion { theirs: 2 });
    let why = party(&config).why(refusal);
    assert!(
        why.contains("version 2") && why.contains(&format!("speaks {VERSION}")),
        "{why}"
    );
}
