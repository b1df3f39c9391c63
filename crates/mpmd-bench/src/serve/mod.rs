//! Measures a server of a language model with the interface of OpenAI.

mod client;
mod lengths;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use mpmd::random::Key;
use mpmd_launch::printable;
use mpmd_layout::random::bits;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::case::quantile;
use client::{ServerTarget, StreamedReply};
use lengths::{Lengths, arrivals};

/// Words for prompts that are sent as texts. Most tokenizers have one token for each.
const WORDS: [&str; 8] = [" the", " of", " and", " to", " in", " is", " that", " for"];
/// The percentiles of times that are shown, as (name, share).
const SHARES: [(&str, f64); 3] = [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)];

/// Options of `mpmd bench serve`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchServeArgs {
    /// Address of the server, such as http://127.0.0.1:8000
    url: String,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 100)]
    requests: usize,
    /// Requests per second, at random times (a Poisson process). Without it, each client sends its
    /// next request once it has the reply to the one before
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// Most requests at a time. With --rate, further ones wait, and their waiting counts
    #[arg(long, value_name = "N", default_value_t = 16)]
    clients: usize,
    /// Tokens of the prompts: N, uniform:LOW..HIGH, exponential:MEAN or lognormal:MEDIAN,SIGMA
    #[arg(long, value_name = "LENGTHS", default_value = "uniform:16..128")]
    prompt: Lengths,
    /// Tokens of the replies, in the same form
    #[arg(long, value_name = "LENGTHS", default_value = "64")]
    reply: Lengths,
    /// The prompts' tokens are random ones below this number
    #[arg(long, value_name = "N", default_value_t = 300)]
    vocab: u32,
    /// Send texts with a word for each token, for servers that take no tokens
    #[arg(long)]
    words: bool,
    /// Send only fields that OpenAI knows, for servers that refuse others. Replies may then end
    /// early, and tokens are counted by the server's own numbers
    #[arg(long)]
    plain: bool,
    /// Name of the model; default: the first that the server has
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// File with an API key in its first line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Seed of lengths, tokens and times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds without a byte of a reply after which a request has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Print one line of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// The results of all requests of a run.
#[derive(Debug, Default)]
struct ServeResults {
    /// Milliseconds from each request to its first token.
    first: Vec<f64>,
    /// Milliseconds from each token to the next.
    between: Vec<f64>,
    /// Number of new tokens of all replies.
    tokens: usize,
    /// Number of tokens of all prompts.
    prompt_tokens: usize,
    /// The reasons of the first failures.
    failures: Vec<String>,
    failed: usize,
}

impl ServeResults {
    /// Adds the reply to a request. `due` is the time at which the request should have been sent,
    /// `prompt` the number of its prompt's tokens.
    fn add(&mut self, due: Instant, prompt: usize, reply: &StreamedReply) {
        let milliseconds =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        self.tokens += reply.tokens;
        self.prompt_tokens += reply.prompt.unwrap_or(prompt);
        self.first.extend(
            reply
                .events
                .first()
                .map(|(time, _)| milliseconds(due, *time)),
        );
        for pair in reply.events.windows(2) {
            let (before, _) = pair[0];
            let (time, count) = pair[1];
            let each = milliseconds(before, time) / count as f64;
            self.between.extend(std::iter::repeat_n(each, count));
        }
    }
}

/// Sends requests to a server and prints the times of its replies.
pub(crate) fn serve(args: &BenchServeArgs) -> Result<()> {
    let key = args.api_key_file.as_ref().map(|file| {
        let text = std::fs::read_to_string(file);
        let text = text.with_context(|| format!("--api-key-file {}", file.display()))?;
        anyhow::Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    });

    ensure!(
        args.rate.is_none_or(|rate| rate > 0.0),
        "--rate: expected more than 0"
    );
    ensure!(
        args.requests > 0 && args.clients > 0,
        "--requests, --clients: expected at least 1"
    );
    ensure!(args.vocab > 0, "--vocab: expected at least 1");

    let timeout = Duration::from_secs(args.timeout.max(1));
    let target = ServerTarget::new(&args.url, key.transpose()?, timeout)?;

    let model = match &args.model {
        Some(model) => model.clone(),
        None => {
            let models: Value = serde_json::from_str(&target.get("/v1/models")?)?;
            let name = models["data"][0]["id"].as_str();
            name.context("/v1/models: the server names no model: give --model")?
                .to_owned()
        }
    };

    let busy = busy_seconds(&target);
    let own_before = own_seconds();
    let start = Instant::now();
    let results = run(args, &target, &model, start);
    let seconds = start.elapsed().as_secs_f64();
    let own = own_seconds() - own_before;

    let idle: BTreeMap<String, f64> = busy_seconds(&target)
        .into_iter()
        .filter_map(|(stage, after)| Some((stage.clone(), after - busy.get(&stage)?)))
        .map(|(stage, busy)| (stage, (1.0 - busy / seconds).clamp(0.0, 1.0)))
        .collect();
    show(args, &results, seconds, own, &idle);
    if results.failed > 0 {
        bail!("{} of {} requests failed", results.failed, args.requests);
    }
    Ok(())
}

/// Sends all requests, and waits for the replies.
fn run(args: &BenchServeArgs, target: &ServerTarget, model: &str, start: Instant) -> ServeResults {
    let key = Key(args.seed);
    let times = args
        .rate
        .map(|rate| arrivals(key.fold_in(0), rate, args.requests));
    let next = AtomicUsize::new(0);
    let results = Mutex::new(ServeResults::default());
    let client = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= args.requests {
                return;
            }

            let (prompt, body) = request(args, model, index);
            let due = times.as_ref().map(|times| start + times[index]);
            if let Some(due) = due {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }

            let reply = target.complete(&body);
            // Another client's panic is no reason to lose the figures.
            let mut results = results
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            match reply {
                Ok(reply) => results.add(due.unwrap_or(reply.sent), prompt, &reply),
                Err(why) => {
                    results.failed += 1;
                    if results.failures.len() < 3 {
                        results.failures.push(format!("{why:#}"));
                    }
                }
            }
        }
    };

    std::thread::scope(|scope| {
        (0..args.clients.min(args.requests)).for_each(|_| _ = scope.spawn(client));
    });
    results
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the number of the prompt's tokens, and the body, of request `index`.
fn request(args: &BenchServeArgs, model: &str, index: usize) -> (usize, Value) {
    let key = Key(args.seed);
    let element = index as u64;
    let count = args.prompt.of(key.fold_in(1), element);
    let number = |place: usize| bits(key.fold_in(3).fold_in(element), place as u64);

    let prompt: Value = match args.words {
        true => (0..count)
            .map(|place| WORDS[number(place) as usize % 8])
            .collect::<String>()
            .into(),
        false => (0..count)
            .map(|place| number(place) % u64::from(args.vocab))
            .collect(),
    };

    let mut body = json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": args.reply.of(key.fold_in(2), element),
        "temperature": 0,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    if !args.plain {
        body["ignore_eos"] = true.into();
        body["return_token_ids"] = true.into();
    }
    (count, body)
}

/// Returns the seconds that each stage of the server has computed. Empty if the server does not
/// report them.
fn busy_seconds(target: &ServerTarget) -> BTreeMap<String, f64> {
    let text = target.get("/metrics").unwrap_or_default();
    let stages = text.lines().filter_map(|line| {
        let (stage, seconds) = line
            .strip_prefix("mpmd_stage_busy_seconds_total{stage=\"")?
            .split_once("\"} ")?;
        Some((stage.to_owned(), seconds.parse().ok()?))
    });
    stages.collect()
}

/// Returns the seconds of CPU time that this process has used.
fn own_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn show(
    args: &BenchServeArgs,
    results: &ServeResults,
    seconds: f64,
    own: f64,
    idle: &BTreeMap<String, f64>,
) {
    let tokens = results.tokens;
    let prompts = results.prompt_tokens;
    let times = |samples: &[f64]| SHARES.map(|(name, share)| (name, quantile(samples, share)));
    let first = times(&results.first);
    let between = times(&results.between);
    let done = args.requests - results.failed;

    if args.json {
        let times = |times: [(&'static str, f64); 3]| BTreeMap::from(times);
        let line = json!({
            "requests": done,
            "failed": results.failed,
            "failures": results.failures,
            "seconds": seconds,
            "client_seconds": own,
            "tokens_per_second": tokens as f64 / seconds,
            "prompt_tokens_per_second": prompts as f64 / seconds,
            "requests_per_second": done as f64 / seconds,
            "first_token_ms": times(first),
            "between_tokens_ms": times(between),
            "idle_share": idle,
        });
        println!("{line}");
        return;
    }

    let prompt = args.prompt;
    let reply = args.reply;
    let clients = args.clients;
    let rate = args.rate.map_or("one after the other".to_owned(), |rate| {
        format!("{rate} per s")
    });

    println!("{clients} clients, {rate}; prompts of {prompt} tokens, replies of {reply}");
    println!(
        "requests             {done} in {seconds:.2} s, {} failed",
        results.failed
    );
    println!("new tokens           {:.1} per s", tokens as f64 / seconds);
    println!("tokens of prompts    {:.1} per s", prompts as f64 / seconds);

    let times = [("first token", first), ("between tokens", between)];
    for (name, times) in times.into_iter().filter(|(_, times)| !times[0].1.is_nan()) {
        let times = times.map(|(name, time)| format!("{name} {time:.2} ms"));
        println!("{name:<20} {}", times.join(", "));
    }
    for (stage, share) in idle {
        println!("stage {stage:<14} idle {:.1} % of the time", share * 100.0);
    }

    println!("this client          {own:.2} s of a core");
    for why in &results.failures {
        eprintln!("a request failed: {}", printable(why));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        serve: BenchServeArgs,
    }

    fn args(more: &[&str]) -> BenchServeArgs {
        let all = [&["bench", "http://localhost:1"], more].concat();
        <Program as clap::Parser>::parse_from(all).serve
    }

    #[test]
    fn tokens_of_one_event_share_the_time_since_the_last() {
        let due = Instant::now();
        let at = |milliseconds| due + Duration::from_millis(milliseconds);
        let events = vec![(at(5), 1), (at(7), 1), (at(13), 2)];
        let reply = StreamedReply {
            sent: at(1),
            events,
            tokens: 4,
            prompt: None,
        };
        let mut results = ServeResults::default();
        results.add(due, 9, &reply);
        assert_eq!(
            (results.first, results.between),
            (vec![5.0], vec![2.0, 3.0, 3.0])
        );
        assert_eq!((results.tokens, results.prompt_tokens), (4, 9));
    }

    #[test]
    fn requests_depend_on_the_seed_alone() {
        let of = |more: &[&str]| request(&args(more), "toy", 3).1;
        assert_eq!(of(&[]), of(&["--clients", "2"]));
        assert_ne!(of(&[]), of(&["--seed", "1"]));
        let (count, body) = request(&args(&["--vocab", "5", "--reply", "7"]), "toy", 0);
        let tokens = body["prompt"].as_array().unwrap();
        assert!(tokens.len() == count && tokens.iter().all(|token| token.as_u64().unwrap() < 5));
        assert_eq!(
            (&body["max_tokens"], &body["ignore_eos"]),
            (&json!(7), &json!(true))
        );
        let plain = of(&["--plain", "--words"]);
        assert!(plain["prompt"].is_string() && plain.get("ignore_eos").is_none());
    }

    #[test]
    fn all_requests_are_sent_and_failures_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        // Fails the third of six requests.
        let server = std::thread::spawn(move || {
            for index in 0..6 {
                let (stream, _) = listener.accept().unwrap();
                let mut stream = BufReader::new(stream);
                let (mut line, mut length) = (String::new(), 0);
                while stream.read_line(&mut line).unwrap() > 2 {
                    length = line
                        .strip_prefix("Content-Length: ")
                        .map_or(length, |length| length.trim().parse().unwrap());
                    line.clear();
                }
                stream.read_exact(&mut vec![0; length]).unwrap();
                let reply = match index {
                    2 => "HTTP/1.1 503 No\r\n\r\nlater",
                    _ => {
                        "HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\": [{\"text\": \"a\"}]}\n\n\
                         data: {\"choices\": [{\"text\": \"b\"}]}\n\ndata: [DONE]\n\n"
                    }
                };
                stream.get_mut().write_all(reply.as_bytes()).unwrap();
            }
        });
        let args = args(&["--requests", "6", "--clients", "2", "--rate", "1000"]);
        let target = ServerTarget::new(&url, None, Duration::from_secs(60)).unwrap();
        let results = run(&args, &target, "toy", Instant::now());
        server.join().unwrap();
        assert_eq!(
            (results.failed, results.tokens, results.first.len()),
            (1, 10, 5)
        );
        assert_eq!(results.between.len(), 5);
        assert!(
            results.failures[0].ends_with("status 503: later"),
            "{:?}",
            results.failures
        );
    }
}
