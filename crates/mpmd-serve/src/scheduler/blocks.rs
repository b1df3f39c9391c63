//! The blocks of keys and values: which are free, which are in use, and which have the tokens of a
//! known beginning.

use std::collections::{BTreeMap, BTreeSet};

use mpmd::candle::nn::BLOCK;

use super::{FilledBlocks, Scheduler};

/// The blocks of the key/value cache, of [`BLOCK`] tokens each. Sequences of one weight version
/// that begin with the same tokens share full blocks.
#[derive(Clone, Debug)]
pub(super) struct BlockPool {
    blocks: Vec<CacheBlock>,
    /// Blocks whose content is unknown or incomplete, and that nobody uses.
    empty: Vec<u32>,
    /// Blocks with known content that no sequence uses, as (time of last use, block).
    unused: BTreeSet<(u64, u32)>,
    /// The full block for each known content.
    known: BTreeMap<BlockKey, u32>,
    time: u64,
    /// Number of prefix ids that were given out.
    beginnings: u64,
    /// The id of the empty prefix of each weight version.
    starts: BTreeMap<u64, u64>,
}

/// The content of a full block: its tokens, and the id of the prefix before them. Each prefix, with
/// its weight version, has an id of its own.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct BlockKey {
    /// The id of the prefix before the block.
    beginning: u64,
    tokens: [u32; BLOCK],
}

#[derive(Clone, Copy, Debug)]
struct BlockContent {
    key: BlockKey,
    /// The id of the prefix that ends with the block.
    end: u64,
}

#[derive(Clone, Debug, Default)]
struct CacheBlock {
    users: usize,
    time: u64,
    content: Option<BlockContent>,
}

impl BlockPool {
    pub(super) fn new(count: usize) -> Self {
        Self {
            blocks: vec![CacheBlock::default(); count],
            empty: (0..count as u32).rev().collect(),
            unused: BTreeSet::new(),
            known: BTreeMap::new(),
            time: 0,
            beginnings: 0,
            starts: BTreeMap::new(),
        }
    }

    /// Returns the number of blocks that no sequence uses.
    pub(super) fn available(&self) -> usize {
        self.empty.len() + self.unused.len()
    }

    /// Returns the number of blocks that sequences use.
    pub(super) fn used(&self) -> usize {
        self.blocks.len() - self.available()
    }

    /// Takes a block for new content. If no block is empty, drops the content that was unused for
    /// the longest time. `None` if all blocks are in use.
    pub(super) fn take(&mut self) -> Option<u32> {
        let taken = match self.empty.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.unused.pop_first()?;
                if let Some(content) = self.blocks[block as usize].content.take() {
                    self.known.remove(&content.key);
                }
                block
            }
        };
        self.blocks[taken as usize].users = 1;
        Some(taken)
    }

    /// Returns the id of the empty prefix of a weight version. Versions have different ids, so they
    /// share no blocks.
    pub(super) fn start(&mut self, version: u64) -> u64 {
        *self.starts.entry(version).or_insert_with(|| {
            self.beginnings += 1;
            self.beginnings
        })
    }

    /// Forgets the empty prefix of a weight version, so that no later sequence shares its blocks.
    pub(super) fn forget(&mut self, version: u64) {
        self.starts.remove(&version);
    }

    /// Finds and uses the full block with `tokens` after the prefix `beginning`. Returns the block,
    /// and the id of the prefix that ends with it. `None` if no block has this content.
    pub(super) fn share(&mut self, beginning: u64, tokens: &[u32]) -> Option<(u32, u64)> {
        let tokens: [u32; BLOCK] = tokens.try_into().ok()?;
        let block = *self.known.get(&BlockKey { beginning, tokens })?;
        let found = &mut self.blocks[block as usize];
        self.unused.remove(&(found.time, block));
        found.users += 1;
        found.content.map(|content| (block, content.end))
    }

    /// Records that a block is full of `tokens` after the prefix `beginning`. Returns the id of the
    /// prefix that ends with the block.
    pub(super) fn fill(&mut self, block: u32, beginning: u64, tokens: &[u32]) -> u64 {
        let Ok(tokens) = <[u32; BLOCK]>::try_from(tokens) else {
            return beginning;
        };
        let key = BlockKey { beginning, tokens };
        if let Some(other) = self.known.get(&key)
            && let Some(content) = self.blocks[*other as usize].content
        {
            // Two sequences with this beginning were computed at once.
            return content.end;
        }

        self.beginnings += 1;
        self.known.insert(key, block);
        self.blocks[block as usize].content = Some(BlockContent {
            key,
            end: self.beginnings,
        });
        self.beginnings
    }

    /// Ends one sequence's use of a block. The content of a full block stays known until
    /// [`take`](Self::take) reuses the block.
    pub(super) fn release(&mut self, block: u32) {
        self.time += 1;
        let found = &mut self.blocks[block as usize];
        found.users -= 1;
        if found.users > 0 {
            return;
        }

        found.time = self.time;
        match found.content {
            Some(_) => _ = self.unused.insert((self.time, block)),
            None => self.empty.push(block),
        }
    }
}

impl Scheduler {
    /// Takes a block for the sequence `id`. If none is free, the sequence that arrived last gives
    /// up its slot and blocks. Returns `None` if that is the sequence `id` itself.
    pub(super) fn take_block(&mut self, id: u64) -> Option<u32> {
        loop {
            if let Some(block) = self.blocks.take() {
                return Some(block);
            }
            let running = self
                .sequences
                .iter()
                .filter(|(_, sequence)| sequence.place.is_some());
            let last = running.map(|(id, _)| *id).next_back()?;
            self.counts.preemptions += 1;
            self.give_up_place(last);
            self.waiting.push_front(last);
            if last == id {
                return None;
            }
        }
    }

    /// Records the content of a sequence's full blocks, as far as its tokens are known.
    pub(super) fn fill(&mut self, id: u64) {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return;
        };
        let Some(place) = &mut sequence.place else {
            return;
        };

        let full = place.computed.min(sequence.tokens.len()) / BLOCK;
        while place.filled.count < full {
            let FilledBlocks {
                count: at,
                beginning,
            } = place.filled;
            let tokens = &sequence.tokens[at * BLOCK..][..BLOCK];
            place.filled = FilledBlocks {
                count: at + 1,
                beginning: self.blocks.fill(place.blocks[at], beginning, tokens),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_beginnings_share_blocks_until_these_are_taken() {
        let mut blocks = BlockPool::new(3);
        let start = blocks.start(0);
        let [a, b] = [[1; BLOCK], [2; BLOCK]];
        let first = blocks.take().unwrap();
        let one = blocks.fill(first, start, &a);
        let second = blocks.take().unwrap();
        let two = blocks.fill(second, one, &b);
        assert_eq!(
            blocks.share(start, &b),
            None,
            "the tokens after another beginning"
        );
        assert_eq!(blocks.share(start, &a), Some((first, one)));
        assert_eq!((blocks.used(), blocks.available()), (2, 1));
        [first, second, first]
            .into_iter()
            .for_each(|block| blocks.release(block));
        assert_eq!(blocks.available(), 3);
        assert_eq!(
            blocks.share(one, &b),
            Some((second, two)),
            "known without users"
        );
        // The empty block goes first, then the unused one; the used one stays.
        let third = blocks.take().unwrap();
        assert!(third != first && third != second);
        assert_eq!(blocks.take(), Some(first));
        assert_eq!(blocks.take(), None);
        assert_eq!(blocks.share(start, &a), None, "forgotten");
    }

    #[test]
    fn content_of_two_blocks_is_known_once() {
        let mut blocks = BlockPool::new(2);
        let start = blocks.start(0);
        let tokens = [7; BLOCK];
        let [one, other] = [(); 2].map(|()| blocks.take().unwrap());
        let next = blocks.fill(one, start, &tokens);
        assert_eq!(blocks.fill(other, start, &tokens), next);
        blocks.release(other);
        assert_eq!(blocks.take(), Some(other), "it is empty");
        assert_eq!(blocks.share(start, &tokens), Some((one, next)));
    }
    #[test]
    fn versions_share_no_blocks() {
        let mut blocks = BlockPool::new(2);
        let tokens = [7; BLOCK];
        let (old, new) = (blocks.start(3), blocks.start(4));
        let block = blocks.take().unwrap();
        blocks.fill(block, old, &tokens);
        assert_eq!(blocks.share(new, &tokens), None);
        assert_eq!(blocks.start(3), old);
        assert!(blocks.share(old, &tokens).is_some());
        blocks.forget(3);
        let again = blocks.start(3);
        assert_eq!(blocks.share(again, &tokens), None, "forgotten");
    }
}
