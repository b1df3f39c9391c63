//! The scheduler with a toy model in simulated time.

use std::collections::{BTreeMap, VecDeque};

use mpmd_fuzz::Rng;
use mpmd_models::Sampling;

use super::*;

/// Number of tokens of the toy's vocabulary.
const VOCABULARY: u64 = 11;

/// Mixes a token into the hash of those before it.
fn mixed(hash: u64, token: u32) -> u64 {
    let x = (hash ^ (u64::from(token) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

fn next_token(hash: u64) -> u32 {
    (hash >> 7).checked_rem(VOCABULARY).unwrap_or(0) as u32
}

/// A model of which the next token depends on all before it. Its cache has the hash of the tokens
/// up to each position; what a pass needs is checked.
struct Toy {
    cache: Vec<[Option<u64>; BLOCK]>,
    /// The last chosen token of each place.
    last: Vec<u32>,
    /// The tokens of each place since its sequence began.
    begun: Vec<Option<Begin>>,
}

impl Toy {
    fn new(sizes: Sizes) -> Self {
        Self {
            cache: vec![[None; BLOCK]; sizes.blocks],
            last: vec![0; sizes.sequences],
            begun: vec![None; sizes.sequences],
        }
    }

    fn run(&mut self, pass: &Pass) -> Vec<Option<Choice>> {
        let mut choices = vec![None; self.last.len()];
        for chunk in &pass.chunks {
            let slot = chunk.slot as usize;
            if let Some(begin) = chunk.new {
                self.begun[slot] = Some(begin);
                let needed = match begin.sampling.repetition_penalty {
                    1.0 => begin.prompt,
                    _ => 0,
                };
                assert!(chunk.start <= needed, "tokens that the choice depends on are given");
            }
            assert!(self.begun[slot].is_some(), "a sequence that has begun");
            let place = |at: usize| (chunk.blocks[at / BLOCK] as usize, at % BLOCK);
            let start = chunk.start as usize;
            let given = match chunk.given.is_empty() {
                true => vec![self.last[slot]],
                false => chunk.given.clone(),
            };
            assert!(chunk.blocks.len() >= (start + given.len()).div_ceil(BLOCK), "blocks");
            let mut hash = match start.checked_sub(1).map(place) {
                Some((block, at)) => self.cache[block][at].expect("keys of the token before"),
                None => 0,
            };
            // All tokens before are of this sequence.
            for at in 1..start {
                let [before, after] = [at - 1, at]
                    .map(place)
                    .map(|(block, at)| self.cache[block][at].expect("keys of all tokens before"));
                let follows = (0..VOCABULARY as u32).any(|token| mixed(before, token) == after);
                assert!(follows, "position {at}: keys of another sequence");
            }
            for (at, token) in (start..).zip(given) {
                hash = mixed(hash, token);
                let (block, at) = place(at);
                self.cache[block][at] = Some(hash);
            }
            if chunk.samples {
                let token = next_token(hash);
                self.last[slot] = token;
                choices[slot] = Some(Choice { token: Some(token), logprob: None, top: Vec::new() });
            }
        }
        choices
    }
}

/// Returns the events that a request gets, computed alone.
fn alone(request: &Request, positions: usize) -> Vec<Event> {
    let mut tokens = request.prompt.clone();
    let mut events = Vec::new();
    loop {
        let hash = tokens.iter().fold(0, |hash, token| mixed(hash, *token));
        let id = next_token(hash);
        tokens.push(id);
        events.push(Event::Token(Token { id, logprobs: None }));
        let text = tokens.len() - request.prompt.len();
        if request.ends.contains(&id) {
            events.push(Event::End(Finish::Stop));
        } else if text == request.max_tokens || tokens.len() == positions {
            events.push(Event::End(Finish::Length));
        } else {
            continue;
        }
        return events;
    }
}

/// A job of random requests, in which clients leave and stages are lost.
struct World {
    random: Rng,
    sizes: Sizes,
    scheduler: Scheduler,
    toy: Toy,
    /// Decided passes whose results the scheduler does not have.
    passes: VecDeque<Pass>,
    requests: BTreeMap<u64, Request>,
    events: BTreeMap<u64, Vec<Event>>,
    left: Vec<u64>,
    /// The requests of passes that failed.
    failed: Vec<u64>,
}

impl World {
    fn new(mut random: Rng) -> Self {
        let mut draw = |end: u64| random.u64(..end);
        let lanes = 1 + draw(4) as usize;
        let positions = 2 + draw(100) as usize;
        let sizes = Sizes {
            lanes,
            sequences: lanes + draw(8) as usize,
            blocks: positions.div_ceil(BLOCK) + draw(12) as usize,
            chunk: 1 + draw(40) as usize,
            positions,
        };
        Self {
            random,
            sizes,
            scheduler: Scheduler::new(sizes),
            toy: Toy::new(sizes),
            passes: VecDeque::new(),
            requests: BTreeMap::new(),
            events: BTreeMap::new(),
            left: Vec::new(),
            failed: Vec::new(),
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
        let prompt = (0..len)
            .map(|at| if at < common { at as u32 % 3 } else { self.draw(VOCABULARY) as u32 })
            .collect();
        let repetition_penalty = [1.0, 1.2][self.draw(6) as usize / 5];
        let request = Request {
            prompt,
            max_tokens: 1 + self.draw(40) as usize,
            sampling: Sampling { repetition_penalty, ..Sampling::default() },
            ends: (0..self.draw(2)).map(|_| self.draw(VOCABULARY) as u32).collect(),
            logprobs: None,
        };
        self.scheduler.arrive(id, request.clone());
        self.requests.insert(id, request);
    }

    /// Takes the result of the oldest pass.
    fn end_pass(&mut self) {
        let Some(pass) = self.passes.pop_front() else { return };
        let choices = self.toy.run(&pass);
        for (id, event) in self.scheduler.end(&choices) {
            assert!(!self.left.contains(&id), "an event for one that has left");
            self.events.entry(id).or_default().push(event);
        }
    }

    fn decide(&mut self) -> bool {
        let Some(Decision { pass, lane }) = self.scheduler.decide() else { return false };
        assert!(pass.tokens() <= self.sizes.chunk, "at most a chunk");
        let on_lane = |chunk: &Chunk| chunk.slot as usize % self.sizes.lanes == lane as usize;
        assert!(pass.chunks.iter().all(on_lane));
        self.passes.push_back(pass);
        assert!(self.scheduler.counts().blocks_used <= self.sizes.blocks);
        true
    }

    fn step(&mut self) {
        match self.draw(20) {
            0..=3 if self.requests.len() < 30 => self.arrive(),
            4 => {
                let id = self.draw(self.requests.len() as u64 + 1);
                let has_ended = self
                    .events
                    .get(&id)
                    .is_some_and(|all| matches!(all.last(), Some(Event::End(_))));
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
                let failed = self.scheduler.fail();
                let of_pass = self.passes.pop_front().map_or(0, |pass| pass.chunks.len());
                assert!(failed.len() <= of_pass, "only its own");
                assert!(!failed.iter().any(|id| self.left.contains(id)), "one that has left");
                self.failed.extend(failed);
                self.passes.clear();
                self.toy = Toy::new(self.sizes);
            }
            6..=12 => _ = self.decide(),
            _ => self.end_pass(),
        }
    }

    fn run(random: Rng) -> (Counts, usize) {
        let mut world = Self::new(random);
        (0..400).for_each(|_| world.step());
        let mut rounds = 0;
        while !world.scheduler.is_idle() {
            rounds += 1;
            assert!(rounds < 100_000, "nothing ends");
            while world.decide() {}
            assert!(!world.passes.is_empty(), "nothing is decided");
            world.end_pass();
        }
        while !world.passes.is_empty() {
            world.end_pass();
        }
        let counts = world.scheduler.counts();
        assert_eq!((counts.running, counts.waiting, counts.blocks_used), (0, 0, 0));
        for (id, request) in &world.requests {
            let found = world.events.remove(id).unwrap_or_default();
            let expected = alone(request, world.sizes.positions);
            match world.left.contains(id) || world.failed.contains(id) {
                true => assert!(expected.starts_with(&found), "request {id}"),
                false => assert_eq!(found, expected, "request {id}"),
            }
        }
        (counts, world.failed.len())
    }
}

#[test]
fn fuzz_scheduler() {
    let (mut all, mut all_failed, mut runs) = (Counts::default(), 0, 0);
    mpmd_fuzz::cases("scheduler", |random| {
        let (counts, failed) = World::run(random.fork());
        runs += 1;
        all_failed += failed;
        all.preemptions += counts.preemptions;
        all.known_tokens += counts.known_tokens;
        all.surplus_tokens += counts.surplus_tokens;
    });
    let has_all = all.preemptions > 100 && all.known_tokens > 1000 && all.surplus_tokens > 100;
    assert!(runs < 500 || has_all && all_failed > 100, "{all:?}, {all_failed} failed");
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    let sampling = Sampling::default();
    Request { prompt, max_tokens, sampling, ends: Vec::new(), logprobs: None }
}

const SIZES: Sizes = Sizes { lanes: 1, sequences: 4, blocks: 100, chunk: 32, positions: 400 };

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
        assert!(events.iter().any(|(id, _)| *id == 0), "a token of the text in each pass");
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
    assert_eq!((counts.prompt_tokens, counts.known_tokens), (100 + 4 + 4, 96 + 96));
}
