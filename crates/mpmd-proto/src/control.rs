//! The encoding of control payloads: the data that rendezvous and router send beyond a header.
//!
//! This is the only module that uses `bincode`. Tensor bytes never pass through it.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::wire::MAX_CONTROL_BYTES;

/// The error of a control payload that could not be encoded or decoded.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a control message cannot be {doing}: {why}")]
pub struct ControlError {
    doing: &'static str,
    why: String,
}

const LIMIT: usize = MAX_CONTROL_BYTES as usize;

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<LIMIT>()
}

/// Encodes `value` as a control payload.
///
/// # Errors
///
/// If the encoded value is larger than [`MAX_CONTROL_BYTES`].
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, ControlError> {
    let wrong = |why| ControlError {
        doing: "written",
        why,
    };
    let bytes = bincode::serde::encode_to_vec(value, config()).map_err(|e| wrong(e.to_string()))?;
    // bincode checks its limit only when it decodes.
    if bytes.len() > LIMIT {
        return Err(wrong(format!(
            "it has {} bytes, and {LIMIT} are allowed",
            bytes.len()
        )));
    }
    Ok(bytes)
}

/// Decodes a control payload. All of `bytes` must belong to it.
///
/// # Errors
///
/// If the bytes do not encode a `T`, or if more bytes follow the value.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ControlError> {
    let (value, read) =
        bincode::serde::decode_from_slice(bytes, config()).map_err(|e| ControlError {
            doing: "read",
            why: e.to_string(),
        })?;
    if read == bytes.len() {
        Ok(value)
    } else {
        Err(ControlError {
            doing: "read",
            why: format!("{} bytes follow its end", bytes.len() - read),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::ProbeAnswer;
    use crate::{Failure, FailureKind, ProcessId};

    /// Decodes `bytes` and asserts that the value, if there is one, survives another round trip.
    fn read<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
        if let Ok(value) = decode::<T>(bytes) {
            assert_eq!(decode::<T>(&encode(&value).unwrap()).unwrap(), value);
        }
    }

    #[test]
    fn fuzz_control() {
        let answer = ProbeAnswer {
            count: 300,
            doing: "computes".to_owned(),
            chain: vec!["waits".to_owned(); 3],
        };
        let failure = Failure::new(FailureKind::Memory, ProcessId(70_000), 1 << 40, "no memory");
        let values = vec![(u128::MAX, vec!["text".to_owned()], Some(7u64)); 2];
        let samples = [encode(&answer), encode(&failure), encode(&values)].map(Result::unwrap);
        mpmd_fuzz::bytes("control", &samples, |input| {
            read::<ProbeAnswer>(input);
            read::<Failure>(input);
            read::<Vec<(u128, Vec<String>, Option<u64>)>>(input);
        });
    }

    #[test]
    fn control_round_trips_and_refuses_garbage() {
        let value = (7u32, "seven".to_owned(), vec![1u64, 2]);
        let bytes = encode(&value).unwrap();
        assert_eq!(decode::<(u32, String, Vec<u64>)>(&bytes).unwrap(), value);
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode::<(u32, String, Vec<u64>)>(&longer).is_err());
        assert!(
            encode(&"x".repeat(LIMIT - 5)).is_ok(),
            "an encoded payload can be decoded"
        );
        assert!(encode(&"x".repeat(LIMIT)).is_err());
        // A length prefix far beyond the bytes present must not allocate them.
        assert!(decode::<Vec<u64>>(&[253, 255, 255, 255, 255, 255, 255, 255, 127]).is_err());
    }
}
