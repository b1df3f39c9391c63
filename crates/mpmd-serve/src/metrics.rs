//! The figures of a server, as `/metrics` shows them.

use std::fmt;
use std::hash::Hash;
use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Instant, Mutex, now, since};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Shortest time over which the idle share of a stage is measured.
const WINDOW: Duration = Duration::from_secs(2);

/// Figures that the engine reports. Totals count from the start of the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineFigures {
    /// Largest number of tokens of a pass.
    pub chunk: usize,
    /// Number of blocks in the cache of each stage.
    pub blocks: usize,
    /// Number of blocks that requests use.
    pub blocks_used: usize,
    /// Total number of prompt tokens whose keys and values were found in the prefix cache.
    pub prefix_tokens: u64,
    /// Total number of times that a request lost its blocks and had to be computed again.
    pub preemptions: u64,
    /// Total number of passes issued.
    pub passes: u64,
    /// Total number of passes that failed.
    pub failed_passes: u64,
    /// Total number of chosen tokens that were dropped instead of sent to a client.
    pub surplus_rows: u64,
    /// Total number of lost processes that were replaced.
    pub recoveries: u64,
    /// Number of passes that were issued and have not ended.
    pub in_flight: usize,
    /// The version number of the weights that new requests use.
    pub version: u64,
    /// Total number of versions that have begun to compute requests.
    pub versions: u64,
    /// Total number of requests that were moved to a newer version and computed again.
    pub upgrades: u64,
    /// Number of requests that use [`EngineFigures::version`], and number that use an older
    /// version.
    pub version_requests: [usize; 2],
    /// The figures of each stage.
    pub stages: Vec<StageFigures>,
}

/// Totals over the passes of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageFigures {
    /// Time in which the stage has computed.
    pub busy: Duration,
    /// Number of bytes that the stage has handed to the next one.
    pub handed_bytes: u64,
    /// Total time from the end of a pass on this stage to its start on the next stage. Contains the
    /// transfer, and the wait until the next stage is free.
    pub handed: Duration,
}

impl Add for StageFigures {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            busy: self.busy + other.busy,
            handed_bytes: self.handed_bytes + other.handed_bytes,
            handed: self.handed + other.handed,
        }
    }
}

/// The metrics of a server, which `/metrics` shows.
pub(crate) struct ServerMetrics {
    registry: Registry,
    engine: Arc<EngineMetrics>,
    prompt_tokens: Counter,
    new_tokens: Counter,
    rejected: Family<Label, Counter>,
    answers: Family<[(&'static str, u16); 1], Counter>,
    ended: Family<Label, Counter>,
    keys: KeyFamilies,
    first: Histogram,
    between: Histogram,
    queued: Histogram,
}

type Label = [(&'static str, &'static str); 1];

/// The values of the label `reason` of refused requests.
const REASONS: [&str; 9] = [
    "requests",
    "tokens",
    "bodies",
    "starting",
    "draining",
    "failed",
    KEY_REASONS[0],
    KEY_REASONS[1],
    KEY_REASONS[2],
];
/// The reasons among [`REASONS`] that are limits of a key.
const KEY_REASONS: [&str; 3] = ["key_requests", "key_request_rate", "key_tokens"];
/// The values of the label `end` of requests.
const ENDS: [&str; 5] = ["stop", "length", "abort", "left", "failed"];
/// The HTTP statuses of the server's answers.
const STATUSES: [u16; 15] = [
    200, 204, 400, 401, 403, 404, 405, 408, 409, 413, 414, 429, 431, 500, 503,
];

/// The figures of the engine and the queue, as a collector of metrics.
#[derive(Debug)]
struct EngineMetrics(Mutex<KnownFigures>);

#[derive(Debug)]
struct KnownFigures {
    figures: EngineFigures,
    /// Number of waiting requests, of requests being answered, and of pauses in force.
    line: [usize; 3],
    /// Two earlier states of the busy times. Idle shares are measured from the first one to now.
    marks: [BusyMark; 2],
}

/// The total busy time of each stage at one moment.
#[derive(Clone, Debug)]
struct BusyMark {
    time: Instant,
    busy: Vec<Duration>,
}

impl ServerMetrics {
    pub(crate) fn new() -> Self {
        let mark = BusyMark {
            time: now(),
            busy: Vec::new(),
        };
        let known = KnownFigures {
            figures: EngineFigures::default(),
            line: [0; 3],
            marks: [mark.clone(), mark],
        };
        let engine = Arc::new(EngineMetrics(Mutex::new(known)));
        let mut registry = Registry::with_prefix("mpmd");
        registry.register_collector(Box::new(engine.clone()));

        let prompt_tokens = Counter::default();
        let new_tokens = Counter::default();
        registry.register("prompt_tokens", "Tokens of prompts", prompt_tokens.clone());
        registry.register("generated_tokens", "Tokens of replies", new_tokens.clone());

        // A series that began at its first event would hide this event from `rate()`.
        let rejected = counters_from_zero(REASONS.map(|reason| [("reason", reason)]));
        let ended = counters_from_zero(ENDS.map(|end| [("end", end)]));
        let answers = counters_from_zero(STATUSES.map(|status| [("status", status)]));
        registry.register(
            "requests_rejected",
            "Requests that were refused",
            rejected.clone(),
        );
        registry.register(
            "requests_ended",
            "Requests by the way they ended",
            ended.clone(),
        );
        registry.register("answers", "Answers by their HTTP status", answers.clone());
        let keys = KeyFamilies::default();
        keys.register(&mut registry);

        let times = [
            (
                "time_to_first_token_seconds",
                "Time from a request to its first token",
            ),
            (
                "time_between_tokens_seconds",
                "Time from a token to the next",
            ),
            ("queue_time_seconds", "Time in the waiting line"),
        ];
        // From 0.1 milliseconds to 105 seconds.
        let [first, between, queued] = times.map(|(name, help)| {
            let histogram = Histogram::new(exponential_buckets(1e-4, 2.0, 21));
            registry.register(name, help, histogram.clone());
            histogram
        });

        Self {
            registry,
            engine,
            prompt_tokens,
            new_tokens,
            rejected,
            answers,
            ended,
            keys,
            first,
            between,
            queued,
        }
    }

    pub(crate) fn set(&self, figures: EngineFigures) {
        self.engine.0.lock().figures = figures;
    }

    pub(crate) fn refuse(&self, reason: &'static str) {
        debug_assert!(REASONS.contains(&reason), "{reason} begins at 0");
        self.rejected.get_or_create(&[("reason", reason)]).inc();
    }

    pub(crate) fn count_answer(&self, status: u16) {
        self.answers.get_or_create(&[("status", status)]).inc();
    }

    pub(crate) fn start(&self, tokens: usize, queued: Duration) {
        self.prompt_tokens.inc_by(tokens as u64);
        self.queued.observe(queued.as_secs_f64());
    }

    /// Counts a new token. `since` is the time from the previous token, or from the request if
    /// `is_first`.
    pub(crate) fn token(&self, is_first: bool, since: Duration) {
        self.new_tokens.inc();
        let times = if is_first { &self.first } else { &self.between };
        times.observe(since.as_secs_f64());
    }

    pub(crate) fn end(&self, way: &'static str) {
        debug_assert!(ENDS.contains(&way), "{way} begins at 0");
        self.ended.get_or_create(&[("end", way)]).inc();
    }

    /// Returns the counters of the client key with this name, which begin at 0.
    pub(crate) fn key(&self, name: &str) -> KeyCounters {
        self.keys.of(name)
    }

    /// Returns the number of requests that use the newest version of the weights, and of those that
    /// use an older one.
    pub(crate) fn requests_by_version(&self) -> [usize; 2] {
        self.engine.0.lock().figures.version_requests
    }

    /// Returns all metrics in Prometheus' text format. `line` has the numbers of waiting requests,
    /// of requests being answered, and of pauses in force.
    pub(crate) fn text(&self, line: [usize; 3]) -> String {
        let mut known = self.engine.0.lock();
        known.line = line;
        known.move_marks();
        drop(known);

        let mut text = String::new();
        // A string takes everything.
        _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }
}

type KeyLabel = [(&'static str, String); 1];

/// The metrics of client keys, by the key's name.
#[derive(Default)]
struct KeyFamilies {
    open: Family<KeyLabel, Gauge>,
    requests: Family<KeyLabel, Counter>,
    prompt_tokens: Family<KeyLabel, Counter>,
    new_tokens: Family<KeyLabel, Counter>,
    rejected: Family<[(&'static str, String); 2], Counter>,
}

/// The metrics of one client key.
pub(crate) struct KeyCounters {
    /// Number of open requests.
    pub(crate) open: Gauge,
    /// Total number of requests that were admitted.
    pub(crate) requests: Counter,
    /// Total number of tokens of their prompts.
    pub(crate) prompt_tokens: Counter,
    /// Total number of tokens of their replies.
    pub(crate) new_tokens: Counter,
    /// Total number of refused requests, for each of [`KEY_REASONS`].
    rejected: [Counter; 3],
}

impl KeyFamilies {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "key_requests_open",
            "Requests of a key that are waiting or answered",
            self.open.clone(),
        );
        registry.register("key_requests", "Requests of a key", self.requests.clone());
        registry.register(
            "key_prompt_tokens",
            "Tokens of a key's prompts",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "key_generated_tokens",
            "Tokens of the replies to a key",
            self.new_tokens.clone(),
        );
        registry.register(
            "key_rejected",
            "Requests that a key's limits have refused",
            self.rejected.clone(),
        );
    }

    fn of(&self, name: &str) -> KeyCounters {
        let label = [("key", name.to_owned())];
        let rejected = |reason: &str| {
            let labels = [("key", name.to_owned()), ("reason", reason.to_owned())];
            self.rejected.get_or_create_owned(&labels)
        };
        KeyCounters {
            open: self.open.get_or_create_owned(&label),
            requests: self.requests.get_or_create_owned(&label),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&label),
            new_tokens: self.new_tokens.get_or_create_owned(&label),
            rejected: KEY_REASONS.map(rejected),
        }
    }
}

impl KeyCounters {
    /// Counts a request that a limit of the key has refused. `reason` is one of [`KEY_REASONS`].
    pub(crate) fn refuse(&self, reason: &str) {
        let at = KEY_REASONS.iter().position(|known| *known == reason);
        debug_assert!(at.is_some(), "{reason} is no limit of a key");
        if let Some(at) = at {
            self.rejected[at].inc();
        }
    }
}

/// Returns a family with a counter at 0 for each of `labels`.
fn counters_from_zero<L, const N: usize>(labels: [L; N]) -> Family<L, Counter>
where
    L: Clone + Eq + Hash,
{
    let family = Family::default();
    for label in labels {
        drop(family.get_or_create(&label));
    }
    family
}

impl KnownFigures {
    /// Drops the older mark and takes a new one, if the newer mark is older than [`WINDOW`].
    fn move_marks(&mut self) {
        if since(self.marks[1].time) >= WINDOW {
            let busy = self.figures.stages.iter().map(|stage| stage.busy).collect();
            self.marks.swap(0, 1);
            self.marks[1] = BusyMark { time: now(), busy };
        }
    }

    /// Returns the recent share of time in which a stage had nothing to compute, from 0 to 1.
    fn idle(&self, stage: usize) -> f64 {
        let mark = &self.marks[0];
        let before = mark.busy.get(stage).copied().unwrap_or_default();
        let busy = self.figures.stages[stage].busy.saturating_sub(before);
        (1.0 - busy.as_secs_f64() / since(mark.time).as_secs_f64().max(1e-3)).clamp(0.0, 1.0)
    }
}

impl Collector for EngineMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let known = self.0.lock();
        let figures = &known.figures;
        let [waiting, running, paused] = known.line;
        let gauges = [
            (
                "requests_running",
                "Requests that are being answered",
                running,
            ),
            ("requests_waiting", "Requests in the waiting line", waiting),
            ("paused", "1 while a pause is in force", paused),
            (
                "weight_version",
                "Version of the weights",
                figures.version as usize,
            ),
            (
                "cache_blocks",
                "Blocks of the cache on each stage",
                figures.blocks,
            ),
            (
                "cache_blocks_used",
                "Blocks that requests use",
                figures.blocks_used,
            ),
            (
                "chunk_tokens",
                "Largest number of tokens of a pass",
                figures.chunk,
            ),
            (
                "microbatches_in_flight",
                "Passes under way",
                figures.in_flight,
            ),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value as i64);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }

        let counters = [
            (
                "prefix_hit_tokens",
                "Tokens of prompts in the prefix cache",
                figures.prefix_tokens,
            ),
            (
                "preemptions",
                "Requests that lost their blocks",
                figures.preemptions,
            ),
            ("passes", "Passes of the pipeline", figures.passes),
            (
                "failed_passes",
                "Passes that failed as a whole",
                figures.failed_passes,
            ),
            (
                "surplus_rows",
                "Rows whose tokens were dropped",
                figures.surplus_rows,
            ),
            (
                "weight_versions",
                "Versions of the weights that have begun",
                figures.versions,
            ),
            (
                "upgraded_requests",
                "Requests computed again on a newer version",
                figures.upgrades,
            ),
            (
                "recoveries",
                "Lost processes that were replaced",
                figures.recoveries,
            ),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }

        known.encode_stages(&mut encoder)
    }
}

impl KnownFigures {
    /// Encodes the metrics that have a value for each stage.
    fn encode_stages(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let stages = &self.figures.stages;
        let idle = (0..stages.len()).map(|stage| ConstGauge::new(self.idle(stage)));
        let name = "stage_idle_share";
        encode_by_stage(encoder, name, "Share of time without work", idle)?;

        let busy = stages
            .iter()
            .map(|stage| ConstCounter::new(stage.busy.as_secs_f64()));
        encode_by_stage(encoder, "stage_busy_seconds", "Time with work", busy)?;

        let bytes = stages
            .iter()
            .map(|stage| ConstCounter::new(stage.handed_bytes));
        encode_by_stage(
            encoder,
            "handover_bytes",
            "Bytes handed to the next stage",
            bytes,
        )?;

        let times = stages
            .iter()
            .map(|stage| ConstCounter::new(stage.handed.as_secs_f64()));
        encode_by_stage(
            encoder,
            "handover_seconds",
            "Time until the next stage starts",
            times,
        )
    }
}

/// Encodes a metric with one value for each stage.
fn encode_by_stage<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = M>,
) -> fmt::Result {
    let values: Vec<M> = values.collect();
    let Some(first) = values.first() else {
        return Ok(());
    };
    let mut family = encoder.encode_descriptor(name, help, None, first.metric_type())?;
    values
        .iter()
        .zip(0u64..)
        .try_for_each(|(value, stage)| value.encode(family.encode_family(&[("stage", stage)])?))
}
