//! Host values that calls take: processes compare them by their hashes.

use super::Program;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{Rolling, Values};

/// The most bytes of host values that are compared also where the program does not ask for it.
const SMALL: usize = 64;

impl Program {
    /// Returns the hash of the host values among the arrays that a call takes; `None` where there
    /// are none to compare. Large ones are compared in debug builds, and where the job was told to.
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
    /// Returns the hash of a call with the hash of its host values mixed in, and both of them
    /// apart.
    pub(crate) fn mix_values(self, values: Option<u64>) -> (Self, Option<Values>) {
        match values {
            Some(hash) => (self.mix(hash), Some(Values { call: self.word(), hash })),
            None => (self, None),
        }
    }
}
