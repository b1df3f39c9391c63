//! The formats by which two ends verify each other: addresses, and the hello, each side's first
//! message.

use std::fmt::Write as _;

use super::{settings, sys};
use crate::rendezvous::are_equal;
use crate::transport::TransportError;
use crate::wire::{ProcessId, VERSION};

/// A worker's address as a process publishes it: `wire version/UCX version/checksum/hex`. `/cuda`
/// follows if its UCX moves memory of CUDA devices. UCX reads addresses without checking their
/// length, so a damaged one must not reach it.
pub(super) struct Address {
    pub(super) worker: Vec<u8>,
    pub(super) moves_cuda: bool,
}

const CUDA: &str = "cuda";

impl Address {
    /// Returns the text for a worker's address.
    pub(super) fn format(worker: &[u8], ucx: &str, moves_cuda: bool) -> String {
        let mut text = format!("{VERSION}/{ucx}/{:016x}/", checksum(worker));
        for byte in worker {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        if moves_cuda {
            text.push('/');
            text.push_str(CUDA);
        }
        text
    }

    /// Returns this process's text about UCX that all processes must share.
    pub(super) fn common() -> String {
        let version = sys::library().map(sys::Library::version).unwrap_or_default();
        settings::common(&version, |variable| std::env::var(variable).ok())
    }

    /// Parses the address of `peer`, which must have the same wire version, UCX version and size of
    /// parts over TCP.
    ///
    /// UCX needs one version on both sides: addresses and protocols change between versions.
    pub(super) fn parse(text: &str, peer: ProcessId) -> Result<Self, TransportError> {
        let wrong = |why: String| TransportError::Protocol { peer, why };
        let parts: Vec<_> = text.split('/').collect();
        let (parts, moves_cuda) = match &parts[..] {
            [parts @ .., CUDA] => (parts, true),
            parts => (parts, false),
        };
        let [wire, ucx, sum, hex] = parts[..] else {
            return Err(wrong(format!("{text:?} is no address for UCX")));
        };
        if wire != VERSION.to_string() {
            return Err(wrong(format!(
                "it speaks wire version {wire}, this process {VERSION}; run the same build on \
                 every process"
            )));
        }
        let own = Self::common();
        if ucx != own {
            return Err(wrong(format!(
                "it runs UCX {ucx}, this process {own}; all processes need the same, so put one \
                 library's folder first in LD_LIBRARY_PATH on all hosts, and set \
                 UCX_TCP_RX_SEG_SIZE alike or nowhere"
            )));
        }
        let worker = bytes(hex).filter(|worker| format!("{:016x}", checksum(worker)) == sum);
        let worker = worker.ok_or_else(|| wrong("its address for UCX is garbled".to_owned()))?;
        Ok(Self { worker, moves_cuda })
    }
}

/// Returns the 64-bit FNV-1a hash (Fowler, Noll, Vo).
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn bytes(hex: &str) -> Option<Vec<u8>> {
    if hex.is_empty()
        || !hex.len().is_multiple_of(2)
        || !hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return None;
    }
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).ok()).collect()
}

/// Length of a [`Hello`] in bytes.
pub(super) const HELLO_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"MPMDUCX\0";

/// The first message on every connection. Little-endian:
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 8 | magic `MPMDUCX` and a zero |
/// | 8 | 2 | wire version |
/// | 10 | 2 | zero |
/// | 12 | 4 | the sender |
/// | 16 | 4 | the receiver |
/// | 20 | 4 | pass: the receiver repeats it in each of its messages |
/// | 24 | 8 | epoch |
/// | 32 | 32 | job token |
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Hello {
    pub(super) from: ProcessId,
    pub(super) to: ProcessId,
    pub(super) pass: u32,
    pub(super) epoch: u64,
    pub(super) token: [u8; 32],
}

/// The reason why a hello is refused.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    /// Not from this job; gets no answer.
    Stranger,
    /// From this job, but with another version, epoch or receiver.
    Misfit(TransportError),
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.to.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.pass.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[32..].copy_from_slice(&self.token);
        bytes
    }

    /// Decodes a hello to the process `me` and checks its sender, token, epoch and version.
    pub(super) fn decode(
        bytes: &[u8],
        me: ProcessId,
        processes: usize,
        token: &[u8; 32],
        epoch: u64,
    ) -> Result<Self, Refusal> {
        let Ok(bytes) = <&[u8; HELLO_BYTES]>::try_from(bytes) else {
            return Err(Refusal::Stranger);
        };
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let shown = bytes.last_chunk();
        if bytes[..8] != MAGIC || !shown.is_some_and(|shown| are_equal(shown, token)) {
            return Err(Refusal::Stranger);
        }
        let hello = Self {
            from: ProcessId(number(12)),
            to: ProcessId(number(16)),
            pass: number(20),
            epoch: u64::from(number(24)) | u64::from(number(28)) << 32,
            token: *token,
        };
        if hello.from.index() >= processes || hello.from == me {
            return Err(Refusal::Stranger);
        }
        let misfit =
            |why: String| Err(Refusal::Misfit(TransportError::Protocol { peer: hello.from, why }));
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return misfit(format!("it speaks wire version {version}, this process {VERSION}"));
        }
        if hello.epoch != epoch {
            return misfit(format!("it belongs to epoch {}, this process to {epoch}", hello.epoch));
        }
        if hello.to != me {
            return misfit(format!("it expects process {} here, where {me} is", hello.to));
        }
        Ok(hello)
    }
}

/// Returns a text such as "waiting for process 2 and process 5 of 8 to connect over UCX".
pub(super) fn name_missing(missing: &[ProcessId], processes: usize) -> String {
    let names: Vec<_> = missing.iter().map(|peer| format!("process {peer}")).collect();
    let names = match names.as_slice() {
        [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        names => names.concat(),
    };
    format!("waiting for {names} of {processes} to connect over UCX")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: [u8; 32] = [5; 32];

    fn hello() -> Hello {
        Hello { from: ProcessId(1), to: ProcessId(0), pass: 77, epoch: 1 << 40, token: TOKEN }
    }

    fn decode(bytes: &[u8]) -> Result<Hello, Refusal> {
        Hello::decode(bytes, ProcessId(0), 4, &TOKEN, 1 << 40)
    }

    #[test]
    fn hello_of_another_job_is_refused_as_stranger() {
        assert_eq!(decode(&hello().encode()), Ok(hello()));
        assert_eq!(decode(&hello().encode()[..63]), Err(Refusal::Stranger));
        let other = Hello { token: [6; 32], ..hello() };
        assert_eq!(decode(&other.encode()), Err(Refusal::Stranger));
        let beyond = Hello { from: ProcessId(4), ..hello() };
        assert_eq!(decode(&beyond.encode()), Err(Refusal::Stranger));
    }

    #[test]
    fn misfit_error_names_the_difference() {
        let says = |hello: Hello| match decode(&hello.encode()) {
            Err(Refusal::Misfit(error)) => error.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(says(Hello { epoch: 9, ..hello() }).contains("belongs to epoch 9"));
        assert!(says(Hello { to: ProcessId(2), ..hello() }).contains("expects process 2 here"));
        let mut version = hello().encode();
        version[8] = 99;
        assert!(matches!(decode(&version), Err(Refusal::Misfit(_))));
    }

    #[test]
    fn address_with_another_version_or_damage_is_refused() {
        let own = Address::common();
        let text = Address::format(&[0, 255, 16], &own, false);
        let with_cuda = Address::format(&[0, 255, 16], &own, true);
        assert_eq!(with_cuda, format!("{text}/cuda"));
        for (text, moves_cuda) in [(&text, false), (&with_cuda, true)] {
            let address = Address::parse(text, ProcessId(3)).unwrap();
            assert_eq!((address.worker, address.moves_cuda), (vec![0, 255, 16], moves_cuda));
        }
        assert!(
            text.starts_with(&format!("{VERSION}/{own}/")) && text.ends_with("/00ff10"),
            "{text}"
        );
        let parse = |text: &str| Address::parse(text, ProcessId(3)).map(|address| address.worker);
        assert_eq!(parse(&text), Ok(vec![0, 255, 16]));
        let says = |text: &str| parse(text).unwrap_err().to_string();
        assert!(
            says(&format!("{VERSION}/1.99.0/0/00")).contains("it runs UCX 1.99.0, this process 1.")
        );
        assert!(says("99/1.12.1/0/00").contains("wire version 99"));
        for garbled in ["", "0", "zz", "é0"] {
            assert!(
                says(&format!("{VERSION}/{own}/0/{garbled}")).contains("garbled"),
                "{garbled:?}"
            );
        }
        let signed = Address::format(&[7], &own, false).replace("/07", "/+7");
        assert!(says(&signed).contains("garbled"), "a sign is no digit");
        assert!(says(&text[..text.len() - 2]).contains("garbled"), "cut short");
        assert!(says("nonsense").contains("no address"));
    }

    #[test]
    fn fuzz_ucx_hello() {
        mpmd_fuzz::bytes("ucx-hello", &[hello().encode().to_vec()], |bytes| match decode(bytes) {
            Ok(hello) => {
                assert!((1..4).contains(&hello.from.0) && hello.to.0 == 0);
                let said = hello.encode();
                assert_eq!((&said[..10], &said[12..]), (&bytes[..10], &bytes[12..]));
            }
            Err(Refusal::Misfit(error)) => assert!(!error.to_string().is_empty()),
            Err(Refusal::Stranger) => {}
        });
    }

    #[test]
    fn fuzz_ucx_address() {
        let own = Address::common();
        let format = |moves_cuda| Address::format(&[0, 255, 16, 7], &own, moves_cuda).into_bytes();
        mpmd_fuzz::bytes("ucx-address", &[format(false), format(true)], |bytes| {
            let text = String::from_utf8_lossy(bytes);
            if let Ok(address) = Address::parse(&text, ProcessId(3)) {
                let again = Address::format(&address.worker, &own, address.moves_cuda);
                assert_eq!(again.to_lowercase(), text.to_lowercase());
            }
        });
    }

    #[test]
    fn name_missing_lists_silent_peers() {
        let ids = [ProcessId(1), ProcessId(2), ProcessId(5)];
        assert_eq!(
            name_missing(&ids, 8),
            "waiting for process 1, process 2 and process 5 of 8 to connect over UCX"
        );
        assert_eq!(name_missing(&ids[..1], 2), "waiting for process 1 of 2 to connect over UCX");
    }
}
