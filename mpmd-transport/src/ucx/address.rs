//! The address that a process publishes, and by which it is checked for the same UCX.

use std::fmt::Write as _;

use super::{settings, sys};
use crate::transport::TransportError;
use mpmd_proto::wire::{ProcessId, VERSION};

/// The published address of a process's UCX worker, as text: `wire version/UCX
/// version/checksum/hex`. `/cuda` follows if the process's UCX can move memory of CUDA devices. The
/// checksum is needed because UCX reads addresses without checking their length.
pub(super) struct UcxAddress {
    pub(super) worker: Vec<u8>,
    pub(super) moves_cuda: bool,
}

const CUDA: &str = "cuda";

impl UcxAddress {
    /// Returns the text that publishes a worker's address.
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

    /// Returns a text about this process's UCX library that must be equal on all processes.
    pub(super) fn common() -> String {
        let version = sys::library()
            .map(sys::UcxLibrary::version)
            .unwrap_or_default();
        settings::common(&version, |variable| std::env::var(variable).ok())
    }

    /// Parses the address of `peer`. It must have this process's wire version, UCX version and size
    /// of parts over TCP.
    ///
    /// UCX needs the same version on both sides, because addresses and protocols change between
    /// versions.
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

/// Returns the 64-bit FNV-1a hash (Fowler, Noll, Vo) of `bytes`.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Decodes pairs of hexadecimal digits into bytes. Returns `None` for an empty or invalid text.
fn bytes(hex: &str) -> Option<Vec<u8>> {
    if hex.is_empty()
        || !hex.len().is_multiple_of(2)
        || !hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return None;
    }
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_with_another_version_or_damage_is_refused() {
        let own = UcxAddress::common();
        let text = UcxAddress::format(&[0, 255, 16], &own, false);
        let with_cuda = UcxAddress::format(&[0, 255, 16], &own, true);
        assert_eq!(with_cuda, format!("{text}/cuda"));
        for (text, moves_cuda) in [(&text, false), (&with_cuda, true)] {
            let address = UcxAddress::parse(text, ProcessId(3)).unwrap();
            assert_eq!(
                (address.worker, address.moves_cuda),
                (vec![0, 255, 16], moves_cuda)
            );
        }
        assert!(
            text.starts_with(&format!("{VERSION}/{own}/")) && text.ends_with("/00ff10"),
            "{text}"
        );
        let parse =
            |text: &str| UcxAddress::parse(text, ProcessId(3)).map(|address| address.worker);
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
        let signed = UcxAddress::format(&[7], &own, false).replace("/07", "/+7");
        assert!(says(&signed).contains("garbled"), "a sign is no digit");
        assert!(
            says(&text[..text.len() - 2]).contains("garbled"),
            "cut short"
        );
        assert!(says("nonsense").contains("no address"));
    }

    #[test]
    fn fuzz_ucx_address() {
        let own = UcxAddress::common();
        let format =
            |moves_cuda| UcxAddress::format(&[0, 255, 16, 7], &own, moves_cuda).into_bytes();
        mpmd_fuzz::bytes("ucx-address", &[format(false), format(true)], |bytes| {
            let text = String::from_utf8_lossy(bytes);
            if let Ok(address) = UcxAddress::parse(&text, ProcessId(3)) {
                let again = UcxAddress::format(&address.worker, &own, address.moves_cuda);
                assert_eq!(again.to_lowercase(), text.to_lowercase());
            }
        });
    }
}
