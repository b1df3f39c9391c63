//! Tests of the handshake: it ends well for two ends with the same token, and for nobody else.

use super::*;

const PROTOCOL: Protocol = Protocol {
    magic: *b"MPMDTEST",
    version: 3,
    facts: [2, 4],
};
const OTHER: Protocol = Protocol {
    magic: *b"MPMDELSE",
    ..PROTOCOL
};
const NEWER: Protocol = Protocol {
    version: 0x0104,
    facts: [9, 9],
    ..PROTOCOL
};

fn token() -> Token {
    Token::new([7; 32])
}

fn caller(nonce: u8) -> Handshake {
    Handshake::call(PROTOCOL, token(), [nonce; 32], b"ca")
}

fn answerer(nonce: u8) -> Handshake {
    Handshake::answer(PROTOCOL, token(), [nonce; 32], b"answ")
}

/// Carries the messages between two ends until nobody says more. `bend` may change each message, by
/// its number. Returns the refusals of the ends.
fn talk(
    caller: &mut Handshake,
    answerer: &mut Handshake,
    mut bend: impl FnMut(usize, &mut Vec<u8>),
) -> [Option<Refusal>; 2] {
    let mut refused = [None; 2];
    for number in 0.. {
        let (from, to, by) = match number % 2 {
            0 => (&mut *caller, &mut *answerer, &mut refused[1]),
            _ => (&mut *answerer, &mut *caller, &mut refused[0]),
        };
        let mut message = from.say();
        if message.is_empty() {
            break;
        }
        bend(number, &mut message);
        *by = by.or(to.take(&message).err());
    }
    refused
}

/// Returns the messages of a handshake that ends well.
fn messages(caller: &mut Handshake, answerer: &mut Handshake) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    let refused = talk(caller, answerer, |_, message| {
        messages.push(message.clone())
    });
    assert_eq!(refused, [None; 2]);
    assert!(caller.is_done() && answerer.is_done());
    messages
}

#[test]
fn ends_with_the_same_token_meet_and_know_the_facts() {
    let (mut caller, mut answerer) = (caller(1), answerer(2));
    let messages = messages(&mut caller, &mut answerer);
    assert_eq!(caller.proved_facts(), Some(&b"answ"[..]));
    assert_eq!(answerer.proved_facts(), Some(&b"ca"[..]));
    assert_eq!((caller.wants(), answerer.wants()), (0, 0));
    let lengths: Vec<_> = messages.iter().map(Vec::len).collect();
    assert_eq!(lengths, [44, 80, 32, 32]);
    assert_eq!(
        messages[0],
        [&b"MPMDTEST\x03\0"[..], &[1; 32], b"ca"].concat()
    );
    assert_eq!(
        messages[1][..48],
        [&b"MPMDTEST\0\0\x03\0"[..], &[2; 32], b"answ"].concat()
    );
    // The documented proofs, and no byte of the token.
    let said = [&messages[0][..], &messages[1][..48]].concat();
    let proof = |label: &str| token().mac(&[b"mpmd handshake: ", label.as_bytes(), &[0], &said]);
    assert_eq!(messages[1][48..], proof("answer"));
    assert_eq!(messages[2], proof("call"));
    assert_eq!(messages[3], proof("welcome"));
    assert!(messages.iter().flatten().filter(|byte| **byte == 7).count() < 16);
}

#[test]
fn wrong_token_is_refused_by_either_end() {
    let wrong = || Token::new([8; 32]);
    let mut stranger = Handshake::answer(PROTOCOL, wrong(), [2; 32], b"answ");
    let mut calls = caller(1);
    let refused = talk(&mut calls, &mut stranger, |_, _| {});
    assert_eq!(refused, [Some(Refusal::WrongProof), None]);
    assert!(calls.say().is_empty(), "nothing is proved to it");
    assert!(calls.proved_facts().is_none() && !stranger.is_done());

    // A caller without the token knows no proof, and none that it has heard will do.
    for shown in [[0; 32], token().mac(&[b"guess"])] {
        let mut answers = answerer(2);
        answers.take(&caller(1).say()).unwrap();
        let answer = answers.say();
        let mut again = answers.clone();
        assert_eq!(answers.take(&shown), Err(Refusal::WrongProof));
        assert_eq!(
            again.take(&answer[48..]),
            Err(Refusal::WrongProof),
            "its own proof"
        );
        assert!(answers.say().is_empty() && again.say().is_empty());
        assert!(answers.proved_facts().is_none() && !answers.is_done());
        assert_eq!(answers.take(&[0; 1]), Err(Refusal::Stranger), "it is over");
    }
}

#[test]
fn reflected_messages_are_refused() {
    // The own hello as the answer.
    let mut calls = caller(1);
    let hello = calls.say();
    let padded = [&hello[..], &[0; 64]].concat();
    assert!(calls.take(&padded).is_err());
    // The hello of an answerer's own process, by which it would prove itself.
    let mut calls = caller(1);
    let (mut one, mut other) = (answerer(2), answerer(2));
    let hello = calls.say();
    one.take(&hello).unwrap();
    other.take(&hello).unwrap();
    let answer = one.say();
    assert!(calls.take(&answer).is_ok());
    let proof = calls.say();
    // The same bytes as a welcome, and the welcome as a proof.
    assert_eq!(calls.take(&proof), Err(Refusal::WrongProof));
    one.take(&proof).unwrap();
    assert_eq!(other.take(&one.say()), Err(Refusal::WrongProof));
}

#[test]
fn replayed_messages_are_refused() {
    let before = messages(&mut caller(1), &mut answerer(2));
    // An answerer of before, as a stranger replays it to a caller with another nonce.
    let mut calls = caller(3);
    calls.say();
    assert_eq!(calls.take(&before[1]), Err(Refusal::WrongProof));
    // The whole caller of before.
    let mut answers = answerer(4);
    answers.take(&before[0]).unwrap();
    answers.say();
    assert_eq!(answers.take(&before[2]), Err(Refusal::WrongProof));
    // Its proof, after a new hello.
    let mut answers = answerer(2);
    answers.take(&caller(3).say()).unwrap();
    assert_eq!(answers.take(&before[2]), Err(Refusal::WrongProof));
}

#[test]
fn proof_for_another_protocol_is_refused() {
    // A stranger between a caller of one protocol and an answerer of another.
    let mut answers = Handshake::answer(OTHER, token(), [2; 32], b"answ");
    assert_eq!(answers.take(&caller(1).say()), Err(Refusal::Stranger));
    let mut answers = Handshake::answer(OTHER, token(), [2; 32], b"answ");
    let mut calls = caller(1);
    let mut bend = |number: usize, message: &mut Vec<u8>| match number {
        0 => message[..8].copy_from_slice(&OTHER.magic),
        1 => message[..8].copy_from_slice(&PROTOCOL.magic),
        _ => {}
    };
    assert_eq!(
        talk(&mut calls, &mut answers, &mut bend),
        [Some(Refusal::WrongProof), None]
    );
    assert!(!answers.is_done());
}

#[test]
fn other_versions_are_told_without_the_token() {
    let stranger = || Token::new([8; 32]);
    let mut calls = Handshake::call(NEWER, stranger(), [1; 32], b"ninebytes");
    let mut answers = answerer(2);
    let refused = talk(&mut calls, &mut answers, |_, _| {});
    let theirs = |theirs| Some(Refusal::OtherVersion { theirs });
    assert_eq!(refused, [theirs(3), theirs(0x0104)]);
    assert!(calls.say().is_empty() && answers.say().is_empty());

    let mut answers = answerer(2);
    assert!(
        answers.take(b"MPMDTEST\x04\x01").is_err(),
        "before the rest of the hello"
    );
    assert_eq!(answers.say(), b"MPMDTEST\x01\0\x03\0\0\0\0\0");

    // An answer of another version need not have this one's length.
    let mut calls = caller(1);
    assert_eq!(
        calls.take(b"MPMDTEST\0\0\x02\0"),
        Err(Refusal::OtherVersion { theirs: 2 })
    );
    for nonsense in [
        b"MPMDTEST\x01\0\x03\0",
        b"MPMDTEST\x02\0\x04\0",
        b"SSH-2.0-Open",
    ] {
        assert_eq!(caller(1).take(nonsense), Err(Refusal::Stranger));
    }
}

#[test]
fn bytes_may_come_in_any_pieces() {
    let whole = messages(&mut caller(1), &mut answerer(2));
    for size in [1, 3, 11, 31] {
        let (mut calls, mut answers) = (caller(1), answerer(2));
        for (number, message) in whole.iter().enumerate() {
            let (from, to) = match number % 2 {
                0 => (&mut calls, &mut answers),
                _ => (&mut answers, &mut calls),
            };
            assert_eq!(&from.say(), message);
            for piece in message.chunks(size) {
                assert!(to.wants() > 0 && !to.is_done() && to.say().is_empty());
                to.take(piece).unwrap();
            }
        }
        assert!(calls.is_done() && answers.is_done());
        assert_eq!(
            answers.take(b"x"),
            Err(Refusal::Stranger),
            "more than the handshake has"
        );
    }
}

#[test]
fn packets_that_are_not_one_message_are_refused() {
    let hello = caller(1).say();
    assert!(
        answerer(2)
            .take_packet(&hello)
            .is_ok_and(|answer| answer.len() == 80)
    );
    for length in 0..hello.len() {
        assert_eq!(
            answerer(2).take_packet(&hello[..length]),
            Err(Refusal::Stranger),
            "{length}"
        );
    }
    let mut answers = answerer(2);
    assert_eq!(
        answers.take_packet(&[&hello[..], &[0]].concat()),
        Err(Refusal::Stranger)
    );
    assert!(answers.say().is_empty());
}

#[test]
fn every_flipped_bit_is_refused() {
    let whole = messages(&mut caller(1), &mut answerer(2));
    for (number, message) in whole.iter().enumerate() {
        for bit in 0..message.len() * 8 {
            let (mut calls, mut answers) = (caller(1), answerer(2));
            let refused = talk(&mut calls, &mut answers, |now, message| {
                if now == number {
                    message[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert!(!calls.is_done(), "bit {bit} of message {number}");
            // Only the welcome comes after the caller has proved itself.
            assert_eq!(
                answers.is_done(),
                number == 3,
                "bit {bit} of message {number}"
            );
            assert!(refused.iter().any(Option::is_some));
        }
    }
}

#[test]
fn fuzz_handshake() {
    let whole = messages(&mut caller(1), &mut answerer(2));
    let mut samples = whole.clone();
    samples.push([&whole[0][..], &whole[2]].concat());
    samples.push([&whole[1][..], &whole[3]].concat());
    mpmd_fuzz::bytes("handshake", &samples, |bytes| {
        // Both ends hear the bytes at once and in pieces, from their start and after the hello.
        for start in [caller(1), answerer(2)] {
            let (mut once, mut cut) = (start.clone(), start);
            let refused = once.take(bytes);
            let pieces = bytes.chunks(5).try_for_each(|piece| cut.take(piece));
            assert_eq!(refused, pieces);
            assert_eq!((once.say(), once.wants()), (cut.say(), cut.wants()));
            // Nobody proves itself without the token, except by the very bytes of the samples.
            let is_sample = samples.iter().any(|sample| bytes.starts_with(sample));
            assert!(is_sample || once.proved_facts().is_none());
        }
    });
}
