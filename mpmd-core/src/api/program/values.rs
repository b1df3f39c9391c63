//! Hashes of the host values that calls take. The processes compare them.

use std::collections::BTreeMap;

use mpmd_memory::Pool;

use super::Program;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{BLOCK, Rolling, ValueHashes};

/// Maximum size in bytes of a host value that is compared whole at every call.
const WHOLE: usize = 4 << 10;
/// Number of blocks of a larger value that every call compares: [`WHOLE`] bytes in total.
const BLOCKS: usize = WHOLE / BLOCK;

/// Decides which calls compare host values of more than [`WHOLE`] bytes whole. The decision is the
/// same on all processes, so it does not use source lines, which may differ.
#[derive(Default)]
pub(super) struct LargeValueCalls {
    /// Number of calls so far, by the total bytes of their large values, rounded as pools round
    /// sizes.
    counts: BTreeMap<u64, u64>,
    /// The decision for a call that issues several operations; set only while it issues them.
    of_call: Option<bool>,
}

impl LargeValueCalls {
    /// Counts a call with large values of `bytes` bytes in total. Returns true for the calls 1, 2,
    /// 4, 8 and so on with this number of bytes.
    ///
    /// Also returns true for some calls between, chosen by `hash`. So if a loop puts several arrays
    /// of one size, each of them is compared whole at some time.
    fn count(&mut self, bytes: u64, hash: u64) -> bool {
        let calls = self
            .counts
            .entry(Pool::rounded(bytes as usize))
            .or_default();
        *calls += 1;
        calls.is_power_of_two() || hash.is_multiple_of(*calls)
    }
}

impl Program {
    /// Calls `issue`, which issues the operations of one call on `arrays`. The large host values of
    /// all these operations are compared whole, or those of none.
    pub(crate) fn as_one_call<T>(
        &mut self,
        arrays: &[&MpmdArray],
        issue: impl FnOnce(&mut Self) -> T,
    ) -> T {
        self.large_value_calls.of_call = Some(self.compares_whole(arrays));
        let issued = issue(self);
        self.large_value_calls.of_call = None;
        issued
    }

    /// Returns one hash of all host values among the arrays that an operation takes, or `None` if
    /// there are none.
    ///
    /// Values of up to 4 KiB are hashed whole. Of larger values, the hash covers the length and 64
    /// blocks of 64 bytes at equal distances. They are hashed whole at the calls 1, 2, 4, 8 and so
    /// on with the same number of bytes, and at a few others. With `check_uncommitted` they are
    /// always hashed whole. On average, a call takes less than a microsecond for each value.
    pub(crate) fn hash_values(&mut self, arrays: &[&MpmdArray]) -> Option<u64> {
        let mut hash: Option<Rolling> = None;
        let mut of_large = None;
        for bytes in arrays.iter().filter_map(|array| host_bytes(array)) {
            let is_whole = bytes.len() <= WHOLE
                || *of_large.get_or_insert_with(|| self.compares_whole(arrays));
            let so_far = hash.unwrap_or_default();
            hash = Some(match is_whole {
                true => so_far.mix_bytes(bytes),
                false => so_far.mix(bytes.len() as u64).mix_blocks(blocks(bytes)),
            });
        }

        hash.map(Rolling::word)
    }

    /// Counts a call that takes `arrays`, unless it is part of a [counted call](Self::as_one_call).
    /// Returns true if its large host values must be compared whole.
    fn compares_whole(&mut self, arrays: &[&MpmdArray]) -> bool {
        if let Some(decided) = self.large_value_calls.of_call {
            return decided;
        }

        let bytes = arrays
            .iter()
            .filter_map(|array| host_bytes(array))
            .map(<[u8]>::len);
        let large: usize = bytes.filter(|bytes| *bytes > WHOLE).sum();
        let counted = large > 0 && self.large_value_calls.count(large as u64, self.hash.word());
        counted || self.runtime.config.check_uncommitted
    }
}

/// Returns the bytes of host values; `None` for an array on devices.
fn host_bytes(array: &MpmdArray) -> Option<&[u8]> {
    match &array.repr {
        Repr::Host(host) => Some(host.bytes()),
        Repr::Placed(_) => None,
    }
}

/// Returns [`BLOCKS`] blocks, at equal distances, of a value of more than [`WHOLE`] bytes. The
/// first and the last bytes are included. All blocks but the last begin at a cache line.
fn blocks(bytes: &[u8]) -> impl Iterator<Item = &[u8; BLOCK]> {
    let last = bytes.len() - BLOCK;
    let places = (0..BLOCKS).map(move |block| match block + 1 == BLOCKS {
        true => last,
        false => last / (BLOCKS - 1) * block / BLOCK * BLOCK,
    });
    places.filter_map(|place| bytes[place..].first_chunk())
}

impl Rolling {
    /// Mixes `values`, the hash of a call's host values, into this hash of the call. Returns the
    /// mixed hash, and both hashes separately. The second result is `None` without host values.
    pub(crate) fn mix_values(self, values: Option<u64>) -> (Self, Option<ValueHashes>) {
        match values {
            Some(hash) => (
                self.mix(hash),
                Some(ValueHashes {
                    call: self.word(),
                    hash,
                }),
            ),
            None => (self, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_three_arrays_of_one_size_has_its_turn() {
        let (mut calls, mut hash) = (LargeValueCalls::default(), Rolling::default());
        let mut whole = [0; 3];
        for array in (0..3).cycle().take(30_000) {
            hash = hash.mix(array as u64);
            whole[array] += u64::from(calls.count(1 << 20, hash.word()));
        }
        assert!(whole.iter().all(|times| *times > 1), "{whole:?}");
        assert!(whole.iter().sum::<u64>() < 60, "{whole:?}");
    }

    #[test]
    fn blocks_are_spread_from_the_first_byte_to_the_last() {
        for bytes in [
            WHOLE + 1,
            WHOLE + 63,
            WHOLE + 64,
            5000,
            10_000,
            1 << 20,
            (1 << 20) + 3,
        ] {
            let values = vec![0u8; bytes];
            let place = |block: &[u8; BLOCK]| block.as_ptr().addr() - values.as_ptr().addr();
            let places: Vec<usize> = blocks(&values).map(place).collect();
            assert_eq!((places.len(), places[0]), (BLOCKS, 0), "{bytes}");
            assert_eq!(places[BLOCKS - 1] + BLOCK, bytes);
            let most = bytes / (BLOCKS - 1) + BLOCK;
            let is_next = |pair: &[usize]| pair[0] < pair[1] && pair[1] - pair[0] <= most;
            assert!(places.windows(2).all(is_next), "{bytes}: {places:?}");
        }
    }
}
