//! Hashes of the host values that calls take. The processes compare them.

use super::Program;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{Rolling, Values};

/// Host values of up to this many bytes are compared between processes in every configuration.
const SMALL: usize = 64;

impl Program {
    /// Returns one hash of all host values among a call's arrays that are compared, or `None` if
    /// there are none. Values of more than 64 bytes are compared only if `check_uncommitted` is
    /// set.
    pub(crate) fn hash_values<'a>(
        &self,
        arrays: impl IntoIterator<Item = &'a MpmdArray>,
    ) -> Option<u64> {
        let any_size = self.runtime.config.check_uncommitted;
        let compared = |array: &'a MpmdArray| match &array.repr {
            Repr::Host(host) => Some(host.bytes()).filter(|bytes| any_size || bytes.len() <= SMALL),
            Repr::Placed(_) => None,
        };
        let mut hash: Option<Rolling> = None;
        for bytes in arrays.into_iter().filter_map(compared) {
            hash = Some(hash.unwrap_or_default().mix_bytes(bytes));
        }
        hash.map(Rolling::word)
    }
}

impl Rolling {
    /// Mixes `values`, the hash of a call's host values, into this hash of the call. Returns (the
    /// mixed hash, both hashes apart). The second is `None` without host values.
    pub(crate) fn mix_values(self, values: Option<u64>) -> (Self, Option<Values>) {
        match values {
            Some(hash) => (self.mix(hash), Some(Values { call: self.word(), hash })),
            None => (self, None),
        }
    }
}
