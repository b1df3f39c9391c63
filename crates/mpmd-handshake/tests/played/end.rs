//! Either end of a handshake over a socket, written from the documentation of its bytes.

#![allow(
    dead_code,
    reason = "each test that includes this file plays some of the ends"
)]

use std::io::{self, Read, Write};
use std::net::TcpStream;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The constants of a protocol, and the token of the end that a test plays.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) magic: &'static [u8; 8],
    pub(crate) version: u16,
    pub(crate) token: [u8; 32],
}

/// Returns a squatter's reply to a hello.
pub(crate) type Reply<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;

impl End {
    /// Returns the caller's hello. Its nonce is always the same.
    pub(crate) fn hello(self, facts: &[u8]) -> Vec<u8> {
        [
            &self.magic[..],
            &self.version.to_le_bytes(),
            &[1; 32],
            facts,
        ]
        .concat()
    }

    /// Calls the other end, about which there are `bytes` bytes of facts. Returns them.
    pub(crate) fn call(
        self,
        stream: &mut TcpStream,
        facts: &[u8],
        bytes: usize,
    ) -> io::Result<Vec<u8>> {
        let hello = self.hello(facts);
        stream.write_all(&hello)?;
        let mut answer = vec![0; 44 + bytes];
        stream.read_exact(&mut answer)?;
        let said = [&hello[..], &answer].concat();
        expect(stream, &self.proof("answer", &said))?;
        stream.write_all(&self.proof("call", &said))?;
        expect(stream, &self.proof("welcome", &said))?;
        Ok(answer.split_off(44))
    }

    /// Answers a call without facts.
    pub(crate) fn answer(self, stream: &mut TcpStream, facts: &[u8]) -> io::Result<()> {
        let mut hello = [0; 42];
        stream.read_exact(&mut hello)?;
        let head = [0u16.to_le_bytes(), self.version.to_le_bytes()].concat();
        let answer = [&self.magic[..], &head, &[2; 32], facts].concat();
        let said = [&hello[..], &answer].concat();
        stream.write_all(&[&answer[..], &self.proof("answer", &said)].concat())?;
        expect(stream, &self.proof("call", &said))?;
        stream.write_all(&self.proof("welcome", &said))
    }

    fn proof(self, label: &str, said: &[u8]) -> [u8; 32] {
        let mac = Hmac::<Sha256>::new_from_slice(&self.token).unwrap();
        let mac = mac
            .chain_update(format!("mpmd handshake: {label}\0"))
            .chain_update(said);
        mac.finalize().into_bytes().into()
    }
}

fn expect(stream: &mut TcpStream, proof: &[u8; 32]) -> io::Result<()> {
    let mut shown = [0; 32];
    stream.read_exact(&mut shown)?;
    assert_eq!(&shown, proof);
    Ok(())
}
