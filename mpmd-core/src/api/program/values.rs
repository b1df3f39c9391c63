//! Hashes of the host values that calls take. The processes compare them.

use std::panic::Location;

use super::Program;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{BLOCK, OriginMap, Rolling, Values};

/// Host values of up to this many bytes are compared whole at every call.
const WHOLE: usize = 4 << 10;
/// Number of blocks of larger values that are compared at every call: as many bytes.
const BLOCKS: usize = WHOLE / BLOCK;

/// By source line: the number of calls with host values of more than [`WHOLE`] bytes. Two lines
/// of one number in files with names of one length share a count, on every process alike.
#[derive(Default)]
pub(super) struct LargeValueCalls(OriginMap<u64>);

impl LargeValueCalls {
    /// Counts a call at this line. Returns true if the count is a power of two.
    fn is_whole(&mut self, at: &'static Location<'static>) -> bool {
        let place = u64::from(at.line()) << 32 | u64::from(at.column());
        let calls = self.0.entry((place, at.file().len() as u32)).or_default();
        *calls += 1;
        calls.is_power_of_two()
    }
}

impl Program {
    /// Returns one hash of all host values among the arrays of a call at line `at`, or `None` if
    /// there are none.
    ///
    /// Values of up to 4 KiB are hashed whole. Of larger ones, the hash has the length and 64
    /// blocks of 64 bytes at equal distances; at the calls 1, 2, 4, 8 and so on of a line, and at
    /// all calls if `check_uncommitted` is set, it has them whole. So a call costs less than a
    /// microsecond for each of its values in the long run.
    pub(crate) fn hash_values<'a>(
        &mut self,
        arrays: impl IntoIterator<Item = &'a MpmdArray>,
        at: &'static Location<'static>,
    ) -> Option<u64> {
        let mut hash: Option<Rolling> = None;
        let mut is_whole = None;
        for array in arrays {
            let Repr::Host(host) = &array.repr else { continue };
            let bytes = host.bytes();
            let mut compares_whole = || {
                *is_whole.get_or_insert_with(|| {
                    self.large_value_calls.is_whole(at) || self.runtime.config.check_uncommitted
                })
            };
            let so_far = hash.unwrap_or_default();
            hash = Some(match bytes.len() <= WHOLE || compares_whole() {
                true => so_far.mix_bytes(bytes),
                false => so_far.mix(bytes.len() as u64).mix_blocks(blocks(bytes)),
            });
        }
        hash.map(Rolling::word)
    }
}

/// Returns [`BLOCKS`] blocks of values of more than [`WHOLE`] bytes, at equal distances, with the
/// first and the last bytes. All but the last begin at a cache line.
fn blocks(bytes: &[u8]) -> impl Iterator<Item = &[u8; BLOCK]> {
    let last = bytes.len() - BLOCK;
    let places = (0..BLOCKS).map(move |block| match block + 1 == BLOCKS {
        true => last,
        false => last / (BLOCKS - 1) * block / BLOCK * BLOCK,
    });
    places.filter_map(|place| bytes[place..].first_chunk())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_spread_from_the_first_byte_to_the_last() {
        for bytes in [WHOLE + 1, WHOLE + 63, WHOLE + 64, 5000, 10_000, 1 << 20, (1 << 20) + 3] {
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
