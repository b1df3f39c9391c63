//! Prompts and replies, computed by the server's engine without HTTP.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures::executor::block_on;
use futures::future::try_join_all;
use mpmd_base::ProcessId;
use mpmd_core::prelude::Program;
use mpmd_device::cpu::paged::BLOCK;
use mpmd_models::{Folder, MOST_TOKENS, Room, Sampling, Stages};
use mpmd_serve::{
    Engine, QueueLimits, ReplyEvent, ReplyStream, RequestQueue, SchedulerSizes, Serving,
    ServingTurn, TextRequest, queue,
};

use super::ModelArgs;
use crate::case::Case;

/// Number of tokens in the prompts of replies.
const SHORT: usize = 16;

/// Serves the measured requests. Returns the cases on process 0, and none on others.
pub(super) fn run(p: &mut Program, folder: &Folder, args: &ModelArgs) -> Result<Vec<Case>> {
    let sizes = sizes(args);
    let stages = Stages::new(folder, args.stages, sizes.positions)?;
    let meshes = stages.meshes(|stage| stage)?;
    let room = Room {
        blocks: sizes.blocks,
        sequences: sizes.sequences,
    };
    let mut inference = stages.inference(p, &meshes, room, args.half)?;

    if p.process() != ProcessId(0) {
        mpmd_serve::run(p, &mut inference, args.stages, None)?;
        return Ok(Vec::new());
    }
    let (queue, arrivals) = queue(QueueLimits::default());
    let mut engine = Engine::new(sizes, arrivals).measure_chunk();
    let mut serving = Serving::start(p, &mut inference, args.stages, Some(&mut engine))?;

    // The client leaves when the engine ends, since its replies then fail.
    let client = BenchClient {
        queue: queue.clone(),
        vocabulary: folder.config().vocab_size,
        args: args.clone(),
    };
    let client = thread::spawn(move || {
        let measured = client.measure();
        queue.drain();
        measured
    });
    let served = loop {
        match serving.turn(p, || None::<()>) {
            Ok(ServingTurn::Ended) => break Ok(()),
            Ok(_) => {}
            Err(why) => break Err(why),
        }
    };
    engine.end();
    let cases = client.join();
    served?;
    cases.ok().context("the client has panicked")?
}

/// Returns the sizes of the server: room for the longest prompt, and for the replies to all
/// clients.
fn sizes(args: &ModelArgs) -> SchedulerSizes {
    let sequences = args.clients.iter().copied().max().unwrap_or(1);
    let positions = (args.prompt + 1).max(SHORT + args.reply);
    let long = positions.div_ceil(BLOCK);
    // With a block more for a pass that is decided ahead.
    let short = (SHORT + args.reply).div_ceil(BLOCK) + 1;
    SchedulerSizes {
        lanes: args.stages,
        sequences: sequences.max(args.stages),
        blocks: long + sequences * short,
        chunk: MOST_TOKENS,
        positions,
    }
}

/// The client that sends the measured requests.
struct BenchClient {
    queue: RequestQueue,
    /// Number of tokens that the model knows.
    vocabulary: usize,
    args: ModelArgs,
}

impl BenchClient {
    /// Sends the requests, and returns the measured cases.
    fn measure(&self) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        let prompt = self.args.prompt;
        let samples = self.samples(|round| self.prompt_rate(round))?;
        cases.push(rate_of("prompt", format!("{prompt} tokens"), samples));
        for &clients in &self.args.clients {
            let samples = self.samples(|round| self.reply_rate(clients, round))?;
            cases.push(rate_of("replies", format!("{clients} clients"), samples));
        }
        Ok(cases)
    }

    /// Measures as often as asked, after one measurement that finds new memory.
    fn samples(&self, mut one: impl FnMut(usize) -> Result<f64>) -> Result<Vec<f64>> {
        one(0)?;
        (1..=self.args.options.repeats).map(one).collect()
    }

    /// Returns the rate of a prompt in tokens per second, up to the first token of its reply.
    fn prompt_rate(&self, round: usize) -> Result<f64> {
        let tokens = self.args.prompt;
        let start = Instant::now();
        let stream = self.queue.submit(self.request(tokens, 1, round))?;
        let times = block_on(token_times(stream, start))?;
        Ok(tokens as f64 / times[0].as_secs_f64())
    }

    /// Returns the rate of the replies to `clients` in tokens per second, from the time when all
    /// have their first token.
    fn reply_rate(&self, clients: usize, round: usize) -> Result<f64> {
        let start = Instant::now();
        let request = |client| self.request(SHORT, self.args.reply, round * clients + client);
        let streams = self.queue.submit_all((0..clients).map(request).collect())?;
        let replies = streams
            .into_iter()
            .map(|stream| token_times(stream, start))
            .collect::<Vec<_>>();
        let replies = block_on(try_join_all(replies))?;

        let begin = replies.iter().map(|times| times[0]).max();
        let begin = begin.context("no reply")?;
        let all = replies.iter().flatten();
        let counted: Vec<&Duration> = all.filter(|time| **time > begin).collect();
        let end = counted.iter().max().context("no token after the first")?;
        Ok(counted.len() as f64 / (**end - begin).as_secs_f64())
    }

    /// Returns a request with a prompt that begins with `number`, so that no block of it is known
    /// from another one.
    fn request(&self, prompt: usize, max_tokens: usize, number: usize) -> TextRequest {
        let token = |at: usize| {
            let value = match at {
                0 => number,
                1 => number / self.vocabulary,
                at => at * 104_729 + prompt,
            };
            (value % self.vocabulary) as u32
        };
        TextRequest {
            prompt: (0..prompt).map(token).collect(),
            max_tokens,
            sampling: Sampling::default(),
            ends: Vec::new(),
            logprobs: None,
        }
    }
}

/// Returns a case of rates in tokens per second.
fn rate_of(name: &'static str, parameters: String, samples: Vec<f64>) -> Case {
    Case {
        name,
        parameters,
        unit: "tokens/s",
        samples,
        beside: None,
    }
}

/// Returns the times from `start` to each token of a reply.
async fn token_times(mut stream: ReplyStream, start: Instant) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            ReplyEvent::Token(_) => times.push(start.elapsed()),
            ReplyEvent::End(_) => {}
            ReplyEvent::Failed(why) => bail!("a request has failed: {why}"),
        }
    }
    ensure!(!times.is_empty(), "a reply without tokens");
    Ok(times)
}
