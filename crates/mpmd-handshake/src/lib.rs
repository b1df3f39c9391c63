//! The handshake: the two ends of a connection prove to each other that they know the job's token.
//! Neither ever sends the token.
//!
//! Pure: bytes come in and go out. Does no I/O, reads no clock, and gets its random numbers from
//! outside. [`Handshake`] is either end. The *caller* has opened the connection; the other end is
//! the *answerer*. There are four messages, little-endian. First the caller's hello:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic of the protocol |
//! | 8 | 2 | the caller's version |
//! | 10 | 32 | nonce: random bytes of this connection |
//! | 42 | m | facts about the caller |
//!
//! Then the answer:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic of the protocol |
//! | 8 | 2 | 0; or 1: the caller has another version |
//! | 10 | 2 | the answerer's version |
//! | 12 | 32 | nonce |
//! | 44 | n | facts about the answerer |
//! | 44 + n | 32 | proof |
//!
//! Then the caller's proof and at last the answerer's welcome, 32 bytes each. A proof is the
//! HMAC-SHA-256 (RFC 2104) under the token of a label, the hello, and the answer without its proof.
//! The answer, the caller's proof and the welcome have different labels. So a proof is of no use
//! for the other direction, for another protocol, for other facts or for another connection.
//!
//! The caller sends nothing that depends on the token before the answerer has proved itself.
//! Every caller gets an answer, but no two answers are alike. A wrong proof gets no reply.
//!
//! Magic and versions have these places in every version. A caller of another version needs no
//! token to be told: it gets the first 12 bytes of an answer, with a 1, and 4 zeros.
//!
//! The handshake keeps out ends without the token. It encrypts nothing: a relay between two ends
//! can take over their connection after the handshake.
//!
//! The magic of the rendezvous is `MPMDMEET`. The facts about its answerer are 4 bytes, the
//! milliseconds between its pings. The transports over TCP, shared memory and UCX have `MPMDTCP`,
//! `MPMDSHM` and `MPMDUCX`, each with a zero, and facts of their own.

#![forbid(unsafe_code)]

pub mod strangers;
pub mod stream;
#[cfg(test)]
mod tests;
pub mod token;

use crate::token::{Token, are_equal};

/// Length in bytes of the start of a hello, up to the version. `ANSWER_HEAD` is that of an answer.
const HELLO_HEAD: usize = 10;
const ANSWER_HEAD: usize = 12;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;

/// Values of the second field of an answer: the caller has the same version, or another one.
const SAME_VERSION: u16 = 0;
const OTHER_VERSION: u16 = 1;

/// Labels that are part of the proofs, so that no proof can be used for another message.
const ANSWER: &[u8] = b"mpmd handshake: answer\0";
const CALL: &[u8] = b"mpmd handshake: call\0";
const WELCOME: &[u8] = b"mpmd handshake: welcome\0";
const SECRET: &[u8] = b"mpmd handshake: secret\0";

/// A protocol whose connections begin with a handshake: its magic, version and facts.
#[derive(Clone, Copy)]
pub struct Protocol {
    /// The magic: the first bytes of every connection of the protocol.
    pub magic: [u8; 8],
    /// The version of the protocol that this process speaks.
    pub version: u16,
    /// Length in bytes of the data about itself (facts) that the caller sends, and that the
    /// answerer sends.
    pub facts: [usize; 2],
}

impl Protocol {
    /// Returns the length of the hello, the caller's first message, in bytes.
    pub const fn hello_bytes(&self) -> usize {
        HELLO_HEAD + NONCE_BYTES + self.facts[0]
    }

    /// Returns the length in bytes of an answer without its proof.
    fn answer_bytes(&self) -> usize {
        ANSWER_HEAD + NONCE_BYTES + self.facts[1]
    }
}

/// The reason why this end refuses the other end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// The other end speaks another protocol, or sends invalid bytes.
    Stranger,
    /// The other end speaks version `theirs` of the protocol. An answerer then sends its own
    /// version, see [`Handshake::say`].
    OtherVersion {
        /// The version of the other end.
        theirs: u16,
    },
    /// The other end does not know the token.
    WrongProof,
}

/// The message of the other end that this end waits for.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Awaits {
    Hello,
    Answer,
    Call,
    Welcome,
    Nothing { done: bool },
}

/// One end of a handshake, without I/O.
#[derive(Clone)]
pub struct Handshake {
    protocol: Protocol,
    token: Token,
    is_caller: bool,
    awaits: Awaits,
    /// The hello and the answer without its proof, which the proofs cover. Only this end's own
    /// message until the other has arrived.
    said: Vec<u8>,
    /// The bytes of the awaited message that have arrived.
    heard: Vec<u8>,
    /// Bytes that must be sent to the other end.
    reply: Vec<u8>,
}

impl Handshake {
    /// Creates the end of a caller, which opened the connection. `nonce` is 32 random bytes that no
    /// other handshake has. `facts` is data about this process.
    ///
    /// # Panics
    ///
    /// If the length of `facts` is not that of the protocol; also in [`answer`](Self::answer).
    pub fn call(protocol: Protocol, token: Token, nonce: [u8; 32], facts: &[u8]) -> Self {
        assert_eq!(
            facts.len(),
            protocol.facts[0],
            "facts have the protocol's length"
        );

        let said = [
            &protocol.magic[..],
            &protocol.version.to_le_bytes(),
            &nonce,
            facts,
        ]
        .concat();

        Self {
            protocol,
            token,
            is_caller: true,
            awaits: Awaits::Answer,
            reply: said.clone(),
            said,
            heard: Vec::new(),
        }
    }

    /// Creates the end of an answerer. `nonce` and `facts` are as in [`call`](Self::call).
    pub fn answer(protocol: Protocol, token: Token, nonce: [u8; 32], facts: &[u8]) -> Self {
        assert_eq!(
            facts.len(),
            protocol.facts[1],
            "facts have the protocol's length"
        );

        let head = [SAME_VERSION, protocol.version]
            .map(u16::to_le_bytes)
            .concat();
        let said = [&protocol.magic[..], &head, &nonce, facts].concat();

        Self {
            protocol,
            token,
            is_caller: false,
            awaits: Awaits::Hello,
            said,
            heard: Vec::new(),
            reply: Vec::new(),
        }
    }

    /// Returns and removes the bytes that must be sent to the other end now.
    pub fn say(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.reply)
    }

    /// Returns the number of bytes to read next; 0 if the handshake is over. The caller must not
    /// read more, because later bytes may not belong to the handshake.
    pub fn wants(&self) -> usize {
        self.awaited_bytes() - self.heard.len()
    }

    /// Returns true once both ends have proved that they know the token, and the caller knows that.
    pub fn is_done(&self) -> bool {
        self.awaits == Awaits::Nothing { done: true }
    }

    /// Handles bytes from the other end, which may arrive in any pieces. After an error no more
    /// bytes are accepted.
    ///
    /// # Errors
    ///
    /// If this end refuses the other. An end that sends too many bytes is refused as a stranger.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.wants().min(rest.len()));
            self.heard.extend_from_slice(now);
            rest = later;
            let checked = match now {
                [] => Err(Refusal::Stranger),
                _ => self.check(),
            };
            checked.map_err(|refusal| self.refuse(refusal))?;
        }
        Ok(())
    }

    /// Ends the handshake with a refusal. Only an end of another version gets a last reply.
    fn refuse(&mut self, refusal: Refusal) -> Refusal {
        self.awaits = Awaits::Nothing { done: false };
        self.heard.clear();
        if !matches!(refusal, Refusal::OtherVersion { .. }) {
            self.reply.clear();
        }
        refusal
    }

    /// Handles a packet from the other end, which must be one message, and returns the reply.
    ///
    /// # Errors
    ///
    /// Same as [`take`](Self::take). A reply to an end of another version is left for
    /// [`say`](Self::say).
    pub fn take_packet(&mut self, packet: &[u8]) -> Result<Vec<u8>, Refusal> {
        self.take(packet)?;
        if packet.is_empty() || !self.heard.is_empty() {
            return Err(self.refuse(Refusal::Stranger));
        }
        Ok(self.say())
    }

    /// Returns the facts about the other end once it has proved that it knows the token.
    pub fn proved_facts(&self) -> Option<&[u8]> {
        let hello = self.protocol.hello_bytes();
        match self.awaits {
            Awaits::Welcome | Awaits::Nothing { done: true } if self.is_caller => {
                Some(&self.said[hello + ANSWER_HEAD + NONCE_BYTES..])
            }
            Awaits::Nothing { done: true } => Some(&self.said[HELLO_HEAD + NONCE_BYTES..hello]),
            _ => None,
        }
    }

    /// Returns the caller's hello. An answerer must not call this before the hello has arrived.
    pub fn hello(&self) -> &[u8] {
        &self.said[..self.protocol.hello_bytes()]
    }

    /// Returns a secret of this handshake that only its two ends know. Both nonces must be known.
    pub fn secret(&self) -> [u8; 32] {
        self.token.mac(&[SECRET, &self.said])
    }

    /// Returns the length of the awaited message in bytes, as far as it is known yet.
    fn awaited_bytes(&self) -> usize {
        match self.awaits {
            Awaits::Hello if self.heard.len() < HELLO_HEAD => HELLO_HEAD,
            Awaits::Hello => self.protocol.hello_bytes(),
            Awaits::Answer if self.heard.len() < ANSWER_HEAD => ANSWER_HEAD,
            Awaits::Answer => self.protocol.answer_bytes() + PROOF_BYTES,
            Awaits::Call | Awaits::Welcome => PROOF_BYTES,
            Awaits::Nothing { .. } => 0,
        }
    }

    /// Checks the bytes that have arrived. After a complete message, makes the reply and waits for
    /// the next message.
    fn check(&mut self) -> Result<(), Refusal> {
        match (self.awaits, self.heard.len()) {
            (Awaits::Hello, HELLO_HEAD) | (Awaits::Answer, ANSWER_HEAD) => self.check_head()?,
            _ => {}
        }

        if self.wants() > 0 {
            return Ok(());
        }

        let heard = std::mem::take(&mut self.heard);
        match self.awaits {
            Awaits::Hello => {
                self.reply = self.said.clone();
                self.said = [heard, std::mem::take(&mut self.said)].concat();
                self.reply.extend(self.proof(ANSWER));
                self.awaits = Awaits::Call;
            }
            Awaits::Answer => {
                let (answer, proof) = heard.split_at(self.protocol.answer_bytes());
                self.said.extend_from_slice(answer);
                self.verify(ANSWER, proof)?;
                self.reply = self.proof(CALL).to_vec();
                self.awaits = Awaits::Welcome;
            }
            Awaits::Call => {
                self.verify(CALL, &heard)?;
                self.reply = self.proof(WELCOME).to_vec();
                self.awaits = Awaits::Nothing { done: true };
            }
            Awaits::Welcome => {
                self.verify(WELCOME, &heard)?;
                self.awaits = Awaits::Nothing { done: true };
            }
            Awaits::Nothing { .. } => {}
        }
        Ok(())
    }

    /// Checks magic and version, the first bytes of a hello or an answer.
    fn check_head(&mut self) -> Result<(), Refusal> {
        let Protocol { magic, version, .. } = self.protocol;
        let (found, numbers) = self.heard.split_at(magic.len());
        let numbers = numbers
            .chunks_exact(2)
            .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        let numbers: Vec<u16> = numbers.collect();

        match numbers[..] {
            _ if found != magic => Err(Refusal::Stranger),
            [theirs] | [SAME_VERSION, theirs] if theirs == version => Ok(()),
            [theirs] => {
                let head = [OTHER_VERSION, version, 0, 0].map(u16::to_le_bytes);
                self.reply = [&magic[..], head.as_flattened()].concat();
                Err(Refusal::OtherVersion { theirs })
            }
            [SAME_VERSION | OTHER_VERSION, theirs] if theirs != version => {
                Err(Refusal::OtherVersion { theirs })
            }
            _ => Err(Refusal::Stranger),
        }
    }

    fn proof(&self, label: &[u8]) -> [u8; PROOF_BYTES] {
        self.token.mac(&[label, &self.said])
    }

    fn verify(&self, label: &[u8], shown: &[u8]) -> Result<(), Refusal> {
        let shown = shown.first_chunk().ok_or(Refusal::Stranger)?;
        are_equal(&self.proof(label), shown)
            .then_some(())
            .ok_or(Refusal::WrongProof)
    }
}
