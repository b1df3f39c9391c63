//! The scheduler with a toy model in simulated time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use mpmd_fuzz::Rng;
use mpmd_models::Sampling;

use super::*;

/// Number of tokens in the toy model's vocabulary.
const VOCABULARY: u64 = 11;
/// A token with which every pass of the toy model fails.
const POISON: u32 = 77;
/// A token after which the toy model has no finite logits.
const NOT_FINITE: u32 = 78;

/// Returns the hash of a sequence continued by a token. `hash` is the hash of the tokens before.
fn mixed(hash: u64, token: u32) -> u64 {
    let x = (hash ^ (u64::from(token) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

/// Returns the token that a weight version chooses after tokens with this hash.
fn next_token(hash: u64, version: u64) -> u32 {
    (mixed(hash, version as u32) >> 7)
        .checked_rem(VOCABULARY)
        .unwrap_or(0) as u32
}

/// A toy model: the next token depends on all earlier tokens. For each position its cache has a
/// hash of the tokens up to that position, and the version of the weights that computed it. The
/// model checks the cache entries that a pass reads.
struct Toy {
    cache: Vec<[Option<(u64, u64)>; BLOCK]>,
    /// The last chosen token of each slot.
    last: Vec<u32>,
    /// The settings of the sequence in each slot.
    begun: Vec<Option<NewSequence>>,
    /// The slots of sequences for which no token can be chosen any more.
    unchosen: BTreeSet<usize>,
}

/// Error: a pass of the toy model has failed, without saying because of which sequence.
#[derive(Debug)]
struct PassFailed;

impl Toy {
    fn new(sizes: SchedulerSizes) -> Self {
        Self {
            cache: vec![[None; BLOCK]; sizes.blocks],
            last: vec![0; sizes.sequences],
            begun: vec![None; sizes.sequences],
            unchosen: BTreeSet::new(),
        }
    }

    /// Computes a pass that must not fail.
    fn run(&mut self, pass: &InferencePass) -> BTreeMap<u32, Choice> {
        self.try_run(pass).expect("a pass without poison")
    }

    fn try_run(&mut self, pass: &InferencePass) -> Result<BTreeMap<u32, Choice>, PassFailed> {
        if pass
            .chunks
            .iter()
            .any(|chunk| chunk.given.contains(&POISON))
        {
            return Err(PassFailed);
        }
        let mut choices = BTreeMap::new();
        for chunk in &pass.chunks {
            let slot = chunk.slot as usize;
            if let Some(begin) = chunk.new {
                self.begun[slot] = Some(begin);
                self.unchosen.remove(&slot);
                let needed = match begin.sampling.repetition_penalty {
                    1.0 => begin.prompt,
                    _ => 0,
                };
                assert!(
                    chunk.start <= needed,
                    "tokens that the choice depends on are given"
                );
            }
            assert!(self.begun[slot].is_some(), "a sequence that has begun");
            let place = |at: usize| (chunk.blocks[at / BLOCK] as usize, at % BLOCK);
            let start = chunk.start as usize;
            let given = match chunk.given.is_empty() {
                true => vec![self.last[slot]],
                false => chunk.given.clone(),
            };
            assert!(
                chunk.blocks.len() >= (start + given.len()).div_ceil(BLOCK),
                "blocks"
            );
            let key = |at: usize| {
                let (block, of_block) = place(at);
                let key = self.cache[block][of_block].expect("keys of all tokens before");
                let (hash, version) = key;
                assert_eq!(
                    version, pass.version,
                    "position {at}: keys of another version"
                );
                hash
            };
            let mut hash = start.checked_sub(1).map_or(0, key);
            // All tokens before are of this sequence.
            for at in 0..start {
                let before = at.checked_sub(1).map_or(0, key);
                let after = key(at);
                let mut tokens = (0..VOCABULARY as u32).chain([NOT_FINITE]);
                let token = tokens.find(|token| mixed(before, *token) == after);
                let token = token.unwrap_or_else(|| panic!("position {at}: another sequence's"));
                // Its keys may have been computed for another sequence with this beginning.
                if token == NOT_FINITE {
                    self.unchosen.insert(slot);
                }
            }
            if given.contains(&NOT_FINITE) {
                self.unchosen.insert(slot);
            }
            for (at, token) in (start..).zip(given) {
                hash = mixed(hash, token);
                let (block, at) = place(at);
                self.cache[block][at] = Some((hash, pass.version));
            }
            if chunk.samples && self.unchosen.contains(&slot) {
                choices.insert(chunk.slot, Unchosen::NotFinite.into());
            } else if chunk.samples {
                let token = next_token(hash, pass.version);
                self.last[slot] = token;
                let choice = Choice {
                    token: Ok(token),
                    logprob: None,
                    top: Vec::new(),
                };
                choices.insert(chunk.slot, choice);
            }
        }
        Ok(choices)
    }
}

/// Returns the events of a request that is computed alone. `versions` has pairs: a number of new
/// tokens, and the version that computes from then on.
fn alone(request: &TextRequest, positions: usize, versions: &[(usize, u64)]) -> Vec<ReplyEvent> {
    let mut tokens = request.prompt.clone();
    let mut events = Vec::new();
    if tokens.contains(&POISON) {
        return events;
    }
    if tokens.contains(&NOT_FINITE) {
        return vec![ReplyEvent::Failed(Unchosen::NotFinite.to_string().into())];
    }
    loop {
        let hash = tokens.iter().fold(0, |hash, token| mixed(hash, *token));
        let text = tokens.len() - request.prompt.len();
        let version = versions
            .iter()
            .rfind(|(from, _)| *from <= text)
            .map_or(0, |of| of.1);
        let id = next_token(hash, version);
        tokens.push(id);
        events.push(ReplyEvent::Token(ReplyToken { id, logprobs: None }));
        let text = tokens.len() - request.prompt.len();
        if request.ends.contains(&id) {
            events.push(ReplyEvent::End(Finish::Stop));
        } else if text == request.max_tokens || tokens.len() == positions {
            events.push(ReplyEvent::End(Finish::Length));
        } else {
            continue;
        }
        return events;
    }
}

/// A simulated job with random requests, in which clients leave, stages are lost and versions
/// begin.
struct World {
    random: Rng,
    sizes: SchedulerSizes,
    scheduler: Scheduler,
    toy: Toy,
    /// Decided passes that have not been computed.
    passes: VecDeque<InferencePass>,
    requests: BTreeMap<u64, TextRequest>,
    events: BTreeMap<u64, Vec<ReplyEvent>>,
    left: Vec<u64>,
    /// The requests that ended by the failure of their pass.
    failed: Vec<u64>,
    /// Number of failed passes that had several sequences.
    shared_failures: usize,
    /// Number of passes of one sequence that failed by chance, not by the sequence.
    by_chance: usize,
    /// For each request that has begun, pairs: a number of new tokens, and the version that
    /// computes from then on.
    versions: BTreeMap<u64, Vec<(usize, u64)>>,
    /// The versions that the stages hold, the newest last.
    known: Vec<u64>,
    upgraded: usize,
    /// True if no new request may begin.
    is_closed: bool,
}

impl World {
    fn new(mut random: Rng) -> Self {
        let mut draw = |end: u64| random.u64(..end);
        let lanes = 1 + draw(4) as usize;
        let positions = 2 + draw(100) as usize;
        let sizes = SchedulerSizes {
            lanes,
            sequences: lanes + draw(8) as usize,
            blocks: positions.div_ceil(BLOCK) + draw(12) as usize,
            chunk: 1 + draw(40) as usize,
            positions,
        };
        let mut scheduler = Scheduler::new(sizes);
        // As few as one sequence needs, or some more.
        let blocks = vec![0; positions.div_ceil(BLOCK)];
        let begin = NewSequence {
            sampling: Sampling::default(),
            prompt: 1,
            top: None,
        };
        let (given, new) = (vec![0], Some(begin));
        let chunk = PassChunk {
            slot: 0,
            start: 0,
            given,
            samples: true,
            blocks,
            new,
        };
        scheduler.words = chunk.words() + draw(200) as usize;
        Self {
            random,
            sizes,
            scheduler,
            toy: Toy::new(sizes),
            passes: VecDeque::new(),
            requests: BTreeMap::new(),
            events: BTreeMap::new(),
            left: Vec::new(),
            failed: Vec::new(),
            shared_failures: 0,
            by_chance: 0,
            versions: BTreeMap::new(),
            known: vec![0],
            upgraded: 0,
            is_closed: false,
        }
    }

    fn draw(&mut self, end: u64) -> u64 {
        self.random.u64(..end)
    }

    fn arrive(&mut self) {
        let id = self.requests.len() as u64;
        let len = 1 + self.draw(self.sizes.positions as u64 - 1);
        // Many have a common beginning.
        let common = self.draw(2) * self.draw(len + 1);
        let mut prompt: Vec<u32> = (0..len)
            .map(|at| {
                if at < common {
                    at as u32 % 3
                } else {
                    self.draw(VOCABULARY) as u32
                }
            })
            .collect();
        if let bad @ (POISON | NOT_FINITE) = POISON + self.draw(16) as u32 {
            let at = self.draw(len) as usize;
            prompt[at] = bad;
        }
        let repetition_penalty = [1.0, 1.2][self.draw(6) as usize / 5];
        let request = TextRequest {
            prompt,
            max_tokens: 1 + self.draw(40) as usize,
            sampling: Sampling {
                repetition_penalty,
                ..Sampling::default()
            },
            ends: (0..self.draw(2))
                .map(|_| self.draw(VOCABULARY) as u32)
                .collect(),
            logprobs: None,
        };
        self.scheduler.arrive(id, request.clone());
        self.requests.insert(id, request);
    }

    /// Computes the oldest pass, and gives its choices to the scheduler.
    fn end_pass(&mut self) {
        let Some(pass) = self.passes.pop_front() else {
            return;
        };
        assert!(
            self.known.contains(&pass.version),
            "the stages have the version"
        );
        let Ok(choices) = self.toy.try_run(&pass) else {
            return self.fail(&pass);
        };
        for (id, event) in self.scheduler.end(&choices) {
            assert!(!self.left.contains(&id), "an event for one that has left");
            self.events.entry(id).or_default().push(event);
        }
    }

    /// Tells the scheduler that the oldest pass failed. `pass` is that pass.
    fn fail(&mut self, pass: &InferencePass) {
        let ended = self.scheduler.fail();
        if let Some(id) = ended {
            assert_eq!(pass.chunks.len(), 1, "only one that was alone has ended");
            assert!(!self.left.contains(&id), "one that has left");
        }
        self.failed.extend(ended);
        self.shared_failures += usize::from(pass.chunks.len() > 1);
        self.passes.clear();
        self.toy = Toy::new(self.sizes);
    }

    fn decide(&mut self) -> bool {
        let decision = self.scheduler.decide();
        for id in self.requests.keys() {
            let version = self.scheduler.version(*id);
            if let (Some(version), false) = (version, self.versions.contains_key(id)) {
                assert_eq!(
                    Some(&version),
                    self.known.last(),
                    "the newest when it begins"
                );
                assert!(!self.is_closed, "one that has not begun waits");
                self.versions.insert(*id, vec![(0, version)]);
            }
        }
        let Some(Decision { pass, lane }) = decision else {
            let can_go_on = self.scheduler.counts().running > 0
                || self.scheduler.counts().waiting > 0 && !self.is_closed;
            assert!(
                !self.passes.is_empty() || !can_go_on,
                "some open sequence can always go on"
            );
            return false;
        };
        let words: usize = pass.chunks.iter().map(PassChunk::words).sum();
        assert!(words <= self.scheduler.words, "the pass has a form");
        assert!(pass.tokens() <= self.sizes.chunk, "at most a chunk");
        let on_lane = |chunk: &PassChunk| chunk.slot as usize % self.sizes.lanes == lane as usize;
        assert!(pass.chunks.iter().all(on_lane));
        self.passes.push_back(pass);
        assert!(self.scheduler.counts().blocks_used <= self.sizes.blocks);
        true
    }

    /// Changes versions or the scheduler at random: begins, upgrades or retires a version, or
    /// closes or opens the scheduler.
    fn change_version(&mut self) {
        match self.draw(8) {
            0..=1 if self.known.len() == 1 => {
                // The number of a retired version may come again.
                let version = (1 + self.known[0]) % 3;
                self.known.push(version);
                self.scheduler.begin(version);
            }
            2 => {
                let newest = *self.known.last().unwrap();
                let began: BTreeSet<u64> = self.versions.keys().copied().collect();
                for id in self.scheduler.upgrade() {
                    assert!(began.contains(&id) && !self.left.contains(&id));
                    let events = self.events.get(&id).map_or(0, Vec::len);
                    self.versions.get_mut(&id).unwrap().push((events, newest));
                    self.upgraded += 1;
                }
                let old = self.scheduler.old().map(|old| self.scheduler.count(old));
                assert!(old.is_none_or(|count| count == 0), "all are upgraded");
            }
            3 => {
                self.is_closed = !self.is_closed;
                self.scheduler.close(self.is_closed);
            }
            _ => self.retire(),
        }
    }

    fn retire(&mut self) {
        let Some(version) = self.scheduler.retired() else {
            return;
        };
        assert_eq!(
            (self.known.len(), self.known[0]),
            (2, version),
            "the older one"
        );
        self.known.remove(0);
        let is_open = |pass: &InferencePass| pass.version == version;
        assert!(!self.passes.iter().any(is_open), "an open pass needs it");
        assert_eq!(self.scheduler.retired(), None, "it is told once");
        let keys = self.toy.cache.iter_mut().flatten();
        keys.filter(|key| key.is_some_and(|(_, of)| of == version))
            .for_each(|key| *key = None);
    }

    fn step(&mut self) {
        match self.draw(24) {
            20..=23 => self.change_version(),
            0..=3 if self.requests.len() < 30 => self.arrive(),
            4 => {
                let id = self.draw(self.requests.len() as u64 + 1);
                let is_last = |event: &ReplyEvent| !matches!(event, ReplyEvent::Token(_));
                let has_ended = self
                    .events
                    .get(&id)
                    .is_some_and(|all| all.last().is_some_and(is_last));
                let has_ended = has_ended || self.failed.contains(&id);
                if !has_ended && self.requests.contains_key(&id) {
                    self.scheduler.leave(id);
                    self.left.push(id);
                }
            }
            5 if self.draw(10) == 0 => {
                // A stage was replaced. Nothing of its caches is left.
                self.passes.clear();
                self.toy = Toy::new(self.sizes);
                self.scheduler.restart();
            }
            13 if self.draw(10) == 0 => {
                // By no fault of a sequence.
                let pass = self.passes.pop_front().unwrap_or_default();
                self.by_chance += usize::from(pass.chunks.len() == 1);
                self.fail(&pass);
            }
            6..=12 => _ = self.decide(),
            _ => self.end_pass(),
        }
    }

    /// Runs a random job to its end. Returns the scheduler's counts, the number of upgraded
    /// requests, and the number of failed passes with several sequences.
    fn run(random: Rng) -> (SchedulerCounts, [usize; 2]) {
        let mut world = Self::new(random);
        (0..400).for_each(|_| world.step());
        world.is_closed = false;
        world.scheduler.close(false);
        let mut rounds = 0;
        while !world.scheduler.is_idle() {
            rounds += 1;
            assert!(rounds < 100_000, "nothing ends");
            while world.decide() {}
            world.retire();
            assert!(!world.passes.is_empty(), "nothing is decided");
            world.end_pass();
        }
        while !world.passes.is_empty() {
            world.end_pass();
        }
        world.retire();
        assert_eq!(world.known.len(), 1, "nothing uses an older version");
        let counts = world.scheduler.counts();
        assert_eq!(
            (counts.running, counts.waiting, counts.blocks_used),
            (0, 0, 0)
        );
        let poisoned = |id: &u64| world.requests[id].prompt.contains(&POISON);
        let ended_well = world.failed.iter().filter(|id| !poisoned(id)).count();
        assert!(
            ended_well <= world.by_chance,
            "a request has ended by the fault of another"
        );
        for (id, request) in &world.requests {
            let found = world.events.remove(id).unwrap_or_default();
            let versions = world.versions.remove(id).unwrap_or_default();
            let expected = alone(request, world.sizes.positions, &versions);
            match world.left.contains(id) || world.failed.contains(id) {
                true => assert!(expected.starts_with(&found), "request {id}"),
                false => assert_eq!(found, expected, "request {id}"),
            }
        }
        (counts, [world.upgraded, world.shared_failures])
    }
}

#[test]
fn fuzz_scheduler() {
    let mut all = SchedulerCounts::default();
    let mut all_upgraded = 0;
    let mut all_shared_failures = 0;
    let mut runs = 0;
    mpmd_fuzz::cases("scheduler", |random| {
        let (counts, [upgraded, shared_failures]) = World::run(random.fork());
        runs += 1;
        all_upgraded += upgraded;
        all_shared_failures += shared_failures;
        all.preemptions += counts.preemptions;
        all.known_tokens += counts.known_tokens;
        all.surplus_tokens += counts.surplus_tokens;
    });
    let has_all = all.preemptions > 100 && all.known_tokens > 1000 && all.surplus_tokens > 100;
    let has_all = has_all && all_shared_failures > 100 && all_upgraded > 100;
    assert!(
        runs < 500 || has_all,
        "{all:?}, {all_shared_failures} failed together, {all_upgraded} were upgraded"
    );
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> TextRequest {
    let sampling = Sampling::default();
    TextRequest {
        prompt,
        max_tokens,
        sampling,
        ends: Vec::new(),
        logprobs: None,
    }
}

const SIZES: SchedulerSizes = SchedulerSizes {
    lanes: 1,
    sequences: 4,
    blocks: 100,
    chunk: 32,
    positions: 400,
};

#[test]
fn places_that_are_given_back_are_taken_first() {
    let mut places = LanePlaces::new(3);
    assert_eq!([10, 11].map(|id| places.take(id)), [Some(0), Some(1)]);
    places.give_back(0);
    assert!(places.is_taken(1) && !places.is_taken(0));
    assert_eq!(
        [12, 13, 14].map(|id| places.take(id)),
        [Some(0), Some(2), None]
    );
    assert!(!places.has_free());
    assert_eq!(places.ids().collect::<Vec<_>>(), [12, 11, 13]);
}

/// Returns the time of `passes` passes of two texts, in a scheduler with `sequences` slots.
fn pass_time(sequences: usize, passes: usize) -> Duration {
    let sizes = SchedulerSizes {
        lanes: 2,
        sequences,
        ..SIZES
    };
    let mut scheduler = Scheduler::new(sizes);
    let mut toy = Toy::new(SIZES);
    scheduler.arrive(0, request(vec![1], 390));
    scheduler.arrive(1, request(vec![2], 390));
    let start = Instant::now();
    for _ in 0..passes {
        let Decision { pass, .. } = scheduler.decide().expect("something to compute");
        scheduler.end(&toy.run(&pass));
    }
    start.elapsed()
}

#[test]
fn free_slots_cost_passes_no_time() {
    let fastest = |sequences| (0..5).map(|_| pass_time(sequences, 300)).min();
    let few = fastest(4).unwrap();
    let many = fastest(1_000_000).unwrap();
    assert!(
        many < 3 * few,
        "{few:?} with 4 slots, {many:?} with a million"
    );
}

#[test]
fn long_prompt_delays_texts_by_one_chunk() {
    let (mut scheduler, mut toy) = (Scheduler::new(SIZES), Toy::new(SIZES));
    scheduler.arrive(0, request(vec![1, 2], 300));
    let mut run = |scheduler: &mut Scheduler| {
        let Decision { pass, .. } = scheduler.decide().expect("something to compute");
        let choices = toy.run(&pass);
        (pass, scheduler.end(&choices))
    };
    run(&mut scheduler);
    scheduler.arrive(1, request(vec![3; 300], 2));
    let mut chunks = 0;
    loop {
        let (pass, events) = run(&mut scheduler);
        assert!(
            events.iter().any(|(id, _)| *id == 0),
            "a token of the text in each pass"
        );
        assert!(pass.tokens() <= 32);
        chunks += 1;
        if events.iter().any(|(id, _)| *id == 1) {
            break;
        }
    }
    assert_eq!(chunks, 300usize.div_ceil(31));
}

#[test]
fn texts_that_end_by_their_length_cost_no_surplus() {
    let (mut scheduler, mut toy) = (Scheduler::new(SIZES), Toy::new(SIZES));
    scheduler.arrive(0, request(vec![1, 2, 3], 5));
    let mut passes = VecDeque::new();
    let mut tokens = 0;
    while !scheduler.is_idle() {
        while let Some(Decision { pass, .. }) = scheduler.decide() {
            tokens += pass.tokens();
            passes.push_back(pass);
        }
        let choices = toy.run(&passes.pop_front().unwrap());
        scheduler.end(&choices);
    }
    assert_eq!((tokens, passes.len()), (3 + 4, 0));
    assert_eq!(scheduler.counts().surplus_tokens, 0);
}

#[test]
fn equal_prompts_are_computed_once() {
    let (mut scheduler, mut toy) = (Scheduler::new(SIZES), Toy::new(SIZES));
    let prompt: Vec<u32> = (0..100).map(|at| at % 7).collect();
    for id in 0..3 {
        scheduler.arrive(id, request(prompt.clone(), 1));
        while let Some(Decision { pass, .. }) = scheduler.decide() {
            let choices = toy.run(&pass);
            scheduler.end(&choices);
        }
    }
    // Six full blocks; the last token is computed in any case.
    let counts = scheduler.counts();
    assert_eq!(
        (counts.prompt_tokens, counts.known_tokens),
        (100 + 4 + 4, 96 + 96)
    );
}

#[test]
fn versions_of_a_lane_alternate() {
    let sizes = SchedulerSizes { chunk: 1, ..SIZES };
    let (mut scheduler, mut toy) = (Scheduler::new(sizes), Toy::new(sizes));
    let mut run = |scheduler: &mut Scheduler, passes: usize| {
        let mut computed = Vec::new();
        for _ in 0..passes {
            let Decision { pass, .. } = scheduler.decide().expect("something to compute");
            let events = scheduler.end(&toy.run(&pass));
            computed.push((pass.version, events[0].0));
        }
        computed
    };
    (0..2).for_each(|id| scheduler.arrive(id, request(vec![1], 100)));
    run(&mut scheduler, 1);
    scheduler.begin(7);
    (2..4).for_each(|id| scheduler.arrive(id, request(vec![1], 100)));
    let computed = run(&mut scheduler, 8);
    let [mut old, mut new] = [0, 7].map(|version| {
        let of_version = computed.iter().filter(|(own, _)| *own == version);
        of_version.map(|(_, id)| *id).collect::<Vec<u64>>()
    });
    assert!(
        computed.windows(2).all(|two| two[0].0 != two[1].0),
        "{computed:?}"
    );
    old.sort_unstable();
    new.sort_unstable();
    assert_eq!(
        (old, new),
        (vec![0, 0, 1, 1], vec![2, 2, 3, 3]),
        "each comes first in turn"
    );
    assert_eq!(scheduler.retired(), None);
    assert_eq!(scheduler.upgrade(), [0, 1]);
    assert_eq!(scheduler.retired(), Some(0));
    assert_eq!((scheduler.count(7), scheduler.old()), (4, None));
    assert!(
        run(&mut scheduler, 20)
            .iter()
            .all(|(version, _)| *version == 7)
    );
}

#[test]
fn closed_scheduler_computes_only_what_has_begun() {
    // Both sequences do not fit at once: the second gives its place up.
    let sizes = SchedulerSizes {
        blocks: 3,
        positions: 48,
        ..SIZES
    };
    let (mut scheduler, mut toy) = (Scheduler::new(sizes), Toy::new(sizes));
    (0..2).for_each(|id| scheduler.arrive(id, request(vec![1; 10], 30)));
    let mut run = |scheduler: &mut Scheduler| {
        let mut ended = Vec::new();
        while let Some(Decision { pass, .. }) = scheduler.decide() {
            let events = scheduler.end(&toy.run(&pass));
            let ends = events
                .iter()
                .filter(|(_, event)| matches!(event, ReplyEvent::End(_)));
            ended.extend(ends.map(|(id, _)| *id));
            if scheduler.count(0) == 2 && scheduler.counts().waiting == 0 {
                scheduler.close(true);
                scheduler.arrive(2, request(vec![2], 1));
            }
        }
        ended
    };
    assert_eq!(run(&mut scheduler), [0, 1]);
    assert!(
        scheduler.counts().preemptions > 0,
        "{:?}",
        scheduler.counts()
    );
    assert_eq!((scheduler.count(0), scheduler.counts().waiting), (0, 1));
    scheduler.close(false);
    assert_eq!(run(&mut scheduler), [2]);
}
