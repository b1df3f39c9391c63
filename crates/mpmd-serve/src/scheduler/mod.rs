//! The scheduler: requests in, passes out. A pure state machine: it knows no clock and no I/O.
//!
//! Sequences are spread over *lanes*, one for each stage. The passes of a lane follow each other:
//! each needs the tokens that the one before chose. Those of different lanes are on different
//! stages at the same time. Passes are decided before the results of earlier ones are known. Where
//! these end a text, the tokens of later passes are dropped.
//!
//! Every stage computes passes in the order of their decisions. So a block that is given back may
//! be used by the next pass, while earlier ones are still to be computed.
//!
//! A sequence is computed by the version of the weights with which it began, and so is each pass.
//! While two versions are in use, a lane alternates between them.
//!
//! If a pass of several sequences fails, nothing says which of them is at fault. All are *suspects*
//! then: each is computed again in passes of its own, until one of these has chosen a token. A pass
//! of one sequence that fails ends this sequence. So none ends by the fault of another.

mod blocks;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use mpmd::candle::nn::BLOCK;
use mpmd_models::{
    Choice, InferencePass, MOST_TOKENS, NewSequence, PassChunk, Unchosen, most_words,
};
use serde::{Deserialize, Serialize};

use crate::request::{Finish, Logprobs, ReplyEvent, ReplyToken, TextRequest};
use blocks::BlockPool;
use versions::ActiveVersions;

/// Largest number of open passes in a lane. With two, the stages have the next pass before the
/// first one ends.
const AHEAD: usize = 2;

/// The sizes of a scheduler.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SchedulerSizes {
    /// Number of lanes, usually the number of stages.
    pub lanes: usize,
    /// Number of sequences that have slots at the same time. At least one for each lane.
    pub sequences: usize,
    /// Number of blocks in the key/value cache.
    pub blocks: usize,
    /// Maximum number of tokens in a pass.
    pub chunk: usize,
    /// Maximum number of tokens in a sequence. There must be blocks for one such sequence.
    pub positions: usize,
}

/// A pass to compute, and its lane.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Decision {
    /// The lane of the pass. Its sequences continue after the last tokens chosen in this lane.
    pub lane: u32,
    /// The tokens to compute.
    pub pass: InferencePass,
}

/// Counts since the start of the scheduler, and its present state.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SchedulerCounts {
    /// Number of sequences that have slots.
    pub running: usize,
    /// Number of requests that wait for a slot.
    pub waiting: usize,
    /// Number of blocks that sequences use.
    pub blocks_used: usize,
    /// Total number of prompt tokens that were computed.
    pub prompt_tokens: u64,
    /// Total number of prompt tokens whose keys and values were found in shared blocks.
    pub known_tokens: u64,
    /// Total number of tokens that were sent to clients.
    pub generated_tokens: u64,
    /// Total number of chosen tokens that were dropped: after the end of a reply, or for a sequence
    /// that lost its slot.
    pub surplus_tokens: u64,
    /// Total number of times that a sequence lost its slot for lack of blocks.
    pub preemptions: u64,
}

/// Decides which tokens of which sequences each pass computes.
#[derive(Clone, Debug)]
pub struct Scheduler {
    sizes: SchedulerSizes,
    sequences: BTreeMap<u64, Sequence>,
    /// The ids of the sequences without a slot, the next one first.
    waiting: VecDeque<u64>,
    lanes: Vec<Lane>,
    /// The lane that is tried first at the next decision.
    next: usize,
    /// The passes that have been decided and have not ended, the oldest first.
    open: VecDeque<OpenPass>,
    blocks: BlockPool,
    counts: SchedulerCounts,
    versions: ActiveVersions,
    /// True if no new sequence gets a slot, only one that has already begun.
    is_closed: bool,
    /// Largest number of words of all chunks in a pass.
    words: usize,
}

/// A pass that has been decided and has not ended.
#[derive(Clone, Debug)]
struct OpenPass {
    lane: usize,
    version: u64,
    members: Vec<PassMember>,
}

/// A sequence in an open pass.
#[derive(Clone, Copy, Debug)]
struct PassMember {
    id: u64,
    /// Value of [`Sequence::starts`] when the pass was decided.
    starts: u64,
    slot: usize,
    /// True if the pass chooses a token for the sequence.
    samples: bool,
}

/// The places of a lane. Place `k` of lane `i` of `n` is slot `i + k n`. Memory and time are
/// proportional to the most sequences that had places at a time, not to the number of places.
#[derive(Clone, Debug)]
struct LanePlaces {
    /// Number of places.
    count: usize,
    /// The id of the sequence in each place that is taken.
    taken: BTreeMap<usize, u64>,
    /// The free places among those below `fresh`.
    free: BTreeSet<usize>,
    /// The first place that was never taken.
    fresh: usize,
}

impl LanePlaces {
    fn new(count: usize) -> Self {
        Self {
            count,
            taken: BTreeMap::new(),
            free: BTreeSet::new(),
            fresh: 0,
        }
    }

    /// Returns the number of sequences that have a place.
    fn len(&self) -> usize {
        self.taken.len()
    }

    /// Returns the ids of the sequences that have a place, in the order of the places.
    fn ids(&self) -> impl Iterator<Item = u64> {
        self.taken.values().copied()
    }

    fn is_taken(&self, place: usize) -> bool {
        self.taken.contains_key(&place)
    }

    fn has_free(&self) -> bool {
        !self.free.is_empty() || self.fresh < self.count
    }

    /// Gives the first free place to a sequence. `None` if all places are taken.
    fn take(&mut self, id: u64) -> Option<usize> {
        if !self.has_free() {
            return None;
        }
        let place = self.free.pop_first().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        self.taken.insert(place, id);
        Some(place)
    }

    fn give_back(&mut self, place: usize) {
        if self.taken.remove(&place).is_some() {
            self.free.insert(place);
        }
    }
}

#[derive(Clone, Debug)]
struct Lane {
    places: LanePlaces,
    open: usize,
    /// The weight version of the lane's last pass.
    version: u64,
    /// Number of times that sequences were ordered for a pass: of the newest version, and of the
    /// older one.
    turns: [usize; 2],
}

#[derive(Clone, Debug)]
struct Sequence {
    request: TextRequest,
    /// The tokens that are known so far: the prompt and the chosen tokens.
    tokens: Vec<u32>,
    /// Number of times that the sequence got a slot.
    starts: u64,
    /// The weight version that computes the sequence. `None` before it has begun.
    version: Option<u64>,
    place: Option<SequencePlace>,
    /// True if a pass with this and other sequences has failed, and no token has been chosen for
    /// this sequence since.
    is_suspect: bool,
}

/// The next tokens to compute of a sequence.
enum NextChunk {
    Chunk(PassChunk),
    /// No token can be computed until an open pass ends.
    Nothing,
    /// The pass has no room for a token, or the cache has no block for it.
    NoRoom,
}

/// The tokens and words that still fit into a pass.
#[derive(Clone, Copy, Debug)]
struct PassRoom {
    tokens: usize,
    words: usize,
}

/// The state of a sequence that has a slot.
#[derive(Clone, Debug)]
struct SequencePlace {
    lane: usize,
    slot: usize,
    /// Number of tokens that were known when the sequence got its slot. Passes are given these
    /// tokens; later ones are known to the stages that chose them.
    given: usize,
    /// Number of tokens in passes that have been decided.
    computed: usize,
    /// Number of tokens that open passes will choose.
    open: usize,
    blocks: Vec<u32>,
    /// True if a decided pass contains the sequence, so that the stages know it.
    has_begun: bool,
    filled: FilledBlocks,
}

/// The full blocks of a sequence whose content other sequences can share.
#[derive(Clone, Copy, Debug)]
struct FilledBlocks {
    count: usize,
    /// The id of the prefix in these blocks.
    beginning: u64,
}

impl Sequence {
    /// Returns the number of tokens, including those that open passes will choose.
    fn len(&self) -> usize {
        self.tokens.len() + self.place.as_ref().map_or(0, |place| place.open)
    }

    fn text_len(&self) -> usize {
        self.len() - self.request.prompt.len()
    }

    /// Returns the next chunk of the sequence, which has the place `place`. The caller fills in the
    /// chunk's `given`, `samples` and `blocks`.
    fn head(&self, place: &SequencePlace) -> PassChunk {
        let begin = NewSequence {
            sampling: self.request.sampling,
            prompt: self.request.prompt.len() as u32,
            top: self.request.logprobs.map(|top| top as u32),
        };
        PassChunk {
            slot: place.slot as u32,
            start: place.computed as u32,
            given: Vec::new(),
            samples: false,
            blocks: Vec::new(),
            new: Some(begin).filter(|_| !place.has_begun),
        }
    }
}

impl Scheduler {
    /// Creates a scheduler without requests.
    ///
    /// # Panics
    ///
    /// If there is no lane, or fewer sequences than lanes. If `chunk` is 0, or `positions` is less
    /// than 2. If one sequence can need more blocks than there are.
    pub fn new(sizes: SchedulerSizes) -> Self {
        let SchedulerSizes {
            lanes,
            sequences,
            blocks,
            chunk,
            positions,
        } = sizes;
        assert!(lanes > 0 && sequences >= lanes && chunk > 0, "{sizes:?}");
        assert!(
            positions.div_ceil(BLOCK) <= blocks && positions > 1,
            "{sizes:?}"
        );

        let places = |lane: usize| LanePlaces::new((sequences - lane).div_ceil(lanes));
        Self {
            sizes: SchedulerSizes {
                chunk: chunk.min(MOST_TOKENS),
                ..sizes
            },
            sequences: BTreeMap::new(),
            waiting: VecDeque::new(),
            lanes: (0..lanes)
                .map(|lane| Lane {
                    places: places(lane),
                    open: 0,
                    version: 0,
                    turns: [0; 2],
                })
                .collect(),
            next: 0,
            open: VecDeque::new(),
            blocks: BlockPool::new(blocks),
            counts: SchedulerCounts::default(),
            versions: ActiveVersions::default(),
            is_closed: false,
            words: most_words(positions),
        }
    }

    /// Sets the maximum number of tokens in a pass.
    ///
    /// # Panics
    ///
    /// If `tokens` is zero.
    pub fn set_chunk(&mut self, tokens: usize) {
        assert!(tokens > 0, "a pass without tokens");
        self.sizes.chunk = tokens.min(MOST_TOKENS);
    }

    /// Returns the counts since the start, and the present numbers.
    pub fn counts(&self) -> SchedulerCounts {
        let running = self.sequences.len() - self.waiting.len();
        SchedulerCounts {
            running,
            waiting: self.waiting.len(),
            blocks_used: self.blocks.used(),
            ..self.counts
        }
    }

    /// Returns the number of passes that have not ended.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// True if there are no sequences.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Adds a request. Its `id` must differ from all others. The prompt must have at least one
    /// token, and fewer than the maximum of a sequence.
    pub fn arrive(&mut self, id: u64, request: TextRequest) {
        let tokens = request.prompt.clone();
        let sequence = Sequence {
            request,
            tokens,
            starts: 0,
            version: None,
            place: None,
            is_suspect: false,
        };
        self.sequences.insert(id, sequence);
        self.waiting.push_back(id);
    }

    /// Removes the sequence `id`, which has ended or has lost its client. Does nothing if there is
    /// no such sequence.
    pub fn leave(&mut self, id: u64) {
        self.give_up_place(id);
        self.sequences.remove(&id);
        self.waiting.retain(|other| *other != id);
    }

    /// Forgets all slots, blocks and open passes, since the stages have lost their state. All
    /// sequences are computed again.
    pub fn restart(&mut self) {
        let mut running: Vec<u64> = self.sequences.keys().copied().collect();
        running.retain(|id| self.sequences[id].place.is_some());
        for id in running.into_iter().rev() {
            self.give_up_place(id);
            self.waiting.push_front(id);
        }

        self.open.clear();
        for lane in &mut self.lanes {
            lane.open = 0;
        }
        self.blocks = BlockPool::new(self.sizes.blocks);
    }

    /// Decides on the next pass. `None` if nothing can be computed until an open pass ends or a
    /// request arrives.
    pub fn decide(&mut self) -> Option<Decision> {
        for _ in 0..self.sizes.lanes {
            let lane = self.next;
            self.next = (lane + 1) % self.sizes.lanes;
            if self.lanes[lane].open >= AHEAD {
                continue;
            }

            self.admit(lane);
            for version in self.versions.after(self.lanes[lane].version) {
                let (pass, members) = self.pass_of(lane, version);
                if !pass.chunks.is_empty() {
                    self.lanes[lane].open += 1;
                    self.lanes[lane].version = version;
                    self.open.push_back(OpenPass {
                        lane,
                        version,
                        members,
                    });
                    return Some(Decision {
                        lane: lane as u32,
                        pass,
                    });
                }
            }
        }
        None
    }

    /// Ends the oldest open pass. `choices` has its choices by slot. Returns pairs of a sequence's
    /// id and an event for its client.
    pub fn end(&mut self, choices: &BTreeMap<u32, Choice>) -> Vec<(u64, ReplyEvent)> {
        let Some(OpenPass { lane, members, .. }) = self.open.pop_front() else {
            return Vec::new();
        };
        self.lanes[lane].open -= 1;
        let mut events = Vec::new();
        for member in members.into_iter().filter(|member| member.samples) {
            let choice = choices.get(&(member.slot as u32)).cloned();
            match self.is_current(member) {
                true => events.extend(self.choose(member.id, choice)),
                false => self.counts.surplus_tokens += 1,
            }
        }
        events
    }

    /// Handles the failure of the oldest open pass. If it had a single sequence, removes the
    /// sequence and returns its id. Otherwise each of its sequences is later computed in a pass of
    /// its own.
    ///
    /// The stages have lost their state, so all sequences are computed again, as after
    /// [`restart`](Self::restart).
    pub fn fail(&mut self) -> Option<u64> {
        let members = self
            .open
            .pop_front()
            .map_or(Vec::new(), |pass| pass.members);
        // Also one that had to give up its place since: it would fail at the same token again.
        let ended = match members[..] {
            [PassMember { id, .. }] => Some(id).filter(|id| self.sequences.contains_key(id)),
            _ => None,
        };

        match ended {
            Some(id) => self.leave(id),
            None => members.iter().for_each(|member| self.suspect(member.id)),
        }
        self.restart();
        ended
    }

    fn suspect(&mut self, id: u64) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.is_suspect = true;
        }
    }

    /// True if a sequence has not ended or lost its slot since the pass of this member was decided.
    fn is_current(&self, PassMember { id, starts, .. }: PassMember) -> bool {
        let sequence = self.sequences.get(&id);
        sequence.is_some_and(|one| one.starts == starts && one.place.is_some())
    }

    /// Appends a chosen token to a sequence. Returns the events for its client.
    fn choose(&mut self, id: u64, choice: Option<Choice>) -> Vec<(u64, ReplyEvent)> {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return Vec::new();
        };
        let Some(place) = &mut sequence.place else {
            return Vec::new();
        };
        place.open -= 1;
        sequence.is_suspect = false;

        let Choice {
            token,
            logprob,
            top,
        } = choice.unwrap_or_else(|| Unchosen::OutOfOrder.into());
        let token = match token {
            Ok(token) => token,
            Err(why) => {
                self.leave(id);
                return vec![(id, ReplyEvent::Failed(why.to_string().into()))];
            }
        };

        sequence.tokens.push(token);
        self.counts.generated_tokens += 1;
        let logprobs = logprob.map(|chosen| Logprobs { chosen, top });
        let chosen = ReplyToken {
            id: token,
            logprobs,
        };
        let mut events = vec![(id, ReplyEvent::Token(chosen))];

        let known = sequence.tokens.len();
        let request = &sequence.request;
        let text = known - request.prompt.len();
        let finish = match request.ends.contains(&token) {
            true => Some(Finish::Stop),
            false if text >= request.max_tokens || known >= self.sizes.positions => {
                Some(Finish::Length)
            }
            false => None,
        };

        self.fill(id);
        if let Some(finish) = finish {
            self.leave(id);
            events.push((id, ReplyEvent::End(finish)));
        }
        events
    }

    fn give_up_place(&mut self, id: u64) {
        let sequence = self.sequences.get_mut(&id);
        let Some(place) = sequence.and_then(|sequence| sequence.place.take()) else {
            return;
        };
        let lanes = self.sizes.lanes;
        self.lanes[place.lane].places.give_back(place.slot / lanes);
        // The later blocks are forgotten first.
        for block in place.blocks.into_iter().rev() {
            self.blocks.release(block);
        }
    }

    /// Gives free slots of a lane to waiting sequences.
    fn admit(&mut self, lane: usize) {
        while let Some(id) = self.waiting.front().copied() {
            let own = &self.lanes[lane].places;
            let is_shortest = self
                .lanes
                .iter()
                .all(|other| own.len() <= other.places.len());
            if !is_shortest || !own.has_free() {
                return;
            }

            let Some(sequence) = self.sequences.get(&id) else {
                return;
            };
            if self.is_closed && sequence.version.is_none() {
                return;
            }
            // Room for the tokens so far and the next one.
            let needed = (sequence.tokens.len() + 1).div_ceil(BLOCK);
            if needed > self.blocks.available() {
                return;
            }

            let Some(place) = self.lanes[lane].places.take(id) else {
                return;
            };
            self.waiting.pop_front();
            self.start(id, lane, place * self.sizes.lanes + lane);
        }
    }

    /// Gives a slot to a sequence, and shares the blocks that already contain the start of its
    /// prompt.
    fn start(&mut self, id: u64, lane: usize, slot: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return;
        };
        let version = *sequence.version.get_or_insert(self.versions.newest);
        let start = self.blocks.start(version);
        let given = sequence.tokens.len();
        let mut blocks = Vec::new();
        let mut filled = FilledBlocks {
            count: 0,
            beginning: start,
        };
        // The last stage needs the tokens of the text, and those of the prompt for this penalty.
        if sequence.request.sampling.repetition_penalty == 1.0 {
            // One token is left to compute.
            let most = sequence.request.prompt.len().min(given - 1);
            for tokens in sequence.tokens[..most].chunks_exact(BLOCK) {
                let Some((block, beginning)) = self.blocks.share(filled.beginning, tokens) else {
                    break;
                };
                blocks.push(block);
                filled = FilledBlocks {
                    count: filled.count + 1,
                    beginning,
                };
            }
        }

        let computed = blocks.len() * BLOCK;
        self.counts.known_tokens += computed as u64;
        sequence.starts += 1;
        sequence.place = Some(SequencePlace {
            lane,
            slot,
            given,
            computed,
            open: 0,
            blocks,
            has_begun: false,
            filled,
        });
    }

    /// Decides on a pass of a lane with one weight version. Returns the pass and its sequences: one
    /// token for each reply, then tokens of prompts while they fit.
    fn pass_of(&mut self, lane: usize, version: u64) -> (InferencePass, Vec<PassMember>) {
        let ids = self.in_turn(lane, version);
        let mut room = PassRoom {
            tokens: self.sizes.chunk,
            words: self.words,
        };
        let mut pass = InferencePass {
            version,
            chunks: Vec::new(),
        };
        let mut members = Vec::new();
        for id in ids {
            let is_suspect = self
                .sequences
                .get(&id)
                .is_some_and(|sequence| sequence.is_suspect);
            let chunk = match self.next(id, room) {
                NextChunk::Chunk(chunk) => chunk,
                NextChunk::Nothing => continue,
                NextChunk::NoRoom => {
                    let has_place = self
                        .sequences
                        .get(&id)
                        .is_some_and(|one| one.place.is_some());
                    let is_alone = pass.chunks.is_empty();
                    debug_assert!(!(has_place && is_alone), "a sequence that will never fit");
                    continue;
                }
            };

            room.tokens -= chunk.tokens();
            room.words -= chunk.words();
            members.push(PassMember {
                id,
                starts: self.sequences[&id].starts,
                slot: chunk.slot as usize,
                samples: chunk.samples,
            });
            pass.chunks.push(chunk);
            if is_suspect {
                break;
            }
        }

        // Removes the chunks of sequences that had to give up their places.
        let places = &self.lanes[lane].places;
        let is_there = |slot: usize| places.is_taken(slot / self.sizes.lanes);
        pass.chunks.retain(|chunk| is_there(chunk.slot as usize));
        members.retain(|member| is_there(member.slot));
        let ids: Vec<u64> = places.ids().collect();
        // Only after this pass will the blocks have their content.
        for id in ids {
            self.fill(id);
        }
        (pass, members)
    }

    /// Returns a lane's sequences of one weight version in the order of its next pass. Suspects
    /// come first, then sequences that generate, then those with prompts to compute. Rotates the
    /// order at each call.
    fn in_turn(&mut self, lane: usize, version: u64) -> Vec<u64> {
        let ids = self.lanes[lane].places.ids();
        let mut ids: Vec<u64> = ids
            .filter(|id| self.version(*id) == Some(version))
            .collect();
        // Each sequence comes first in turn, since a pass may not have room for all.
        let turn = &mut self.lanes[lane].turns[usize::from(version != self.versions.newest)];
        *turn = turn.wrapping_add(1);
        let first = turn.checked_rem(ids.len()).unwrap_or(0);
        ids.rotate_left(first);

        let is_text = |id: &u64| {
            let sequence = &self.sequences[id];
            sequence
                .place
                .as_ref()
                .is_some_and(|place| place.computed + 1 >= place.given)
        };
        let (texts, prompts) = ids.into_iter().partition::<Vec<u64>, _>(is_text);
        let (mut suspects, others) = texts
            .into_iter()
            .chain(prompts)
            .partition::<Vec<u64>, _>(|id| self.sequences[id].is_suspect);
        suspects.extend(others);
        suspects
    }

    /// Decides on the next tokens of a sequence, within the `room` left in a pass.
    fn next(&mut self, id: u64, room: PassRoom) -> NextChunk {
        let Some(sequence) = self.sequences.get(&id) else {
            return NextChunk::Nothing;
        };
        let Some(place) = &sequence.place else {
            return NextChunk::Nothing;
        };
        let start = place.computed;
        let len = sequence.len();
        let is_done = sequence.text_len() >= sequence.request.max_tokens;
        if is_done || len >= self.sizes.positions || start == len {
            return NextChunk::Nothing;
        }

        let head = sequence.head(place);
        let Some(words) = room.words.checked_sub(head.words() + len.div_ceil(BLOCK)) else {
            return NextChunk::NoRoom;
        };
        let end = len.min(start + room.tokens.min(words));
        if end == start {
            return NextChunk::NoRoom;
        }
        let given = sequence
            .tokens
            .get(start..end.min(place.given))
            .unwrap_or_default()
            .to_vec();
        let has_room = self.grow(id, end.div_ceil(BLOCK));

        let Some(sequence) = self.sequences.get_mut(&id).filter(|_| has_room) else {
            return NextChunk::NoRoom;
        };
        let prompt = sequence.request.prompt.len();
        let Some(place) = &mut sequence.place else {
            return NextChunk::NoRoom;
        };
        self.counts.prompt_tokens += end.min(prompt).saturating_sub(start) as u64;
        let samples = end == len;
        place.computed = end;
        place.has_begun = true;
        place.open += usize::from(samples);
        let blocks = place.blocks[..end.div_ceil(BLOCK)].to_vec();
        NextChunk::Chunk(PassChunk {
            given,
            samples,
            blocks,
            ..head
        })
    }

    /// Takes blocks for a sequence until it has `blocks` of them. Returns false if there are not
    /// enough: then the sequence has lost its slot.
    fn grow(&mut self, id: u64, blocks: usize) -> bool {
        loop {
            let Some(sequence) = self.sequences.get(&id) else {
                return false;
            };
            let Some(place) = &sequence.place else {
                return false;
            };
            if place.blocks.len() >= blocks {
                return true;
            }

            let Some(block) = self.take_block(id) else {
                return false;
            };
            let place = self
                .sequences
                .get_mut(&id)
                .and_then(|sequence| sequence.place.as_mut());
            let Some(place) = place else { return false };
            place.blocks.push(block);
        }
    }
}
