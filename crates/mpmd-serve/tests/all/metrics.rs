//! The text of `/metrics`, read as Prometheus reads it.

use std::collections::{BTreeMap, BTreeSet};

use mpmd_serve::{Engine, QueueLimits, SchedulerSizes, queue};

use crate::server::Server;

const GUIDE: &str = include_str!("../../../../docs/guide/serve.md");

/// The metrics of a text, checked by the rules of the format and by those of `promtool check
/// metrics`.
#[derive(Debug, Default)]
struct Exposition {
    /// The type of each metric.
    kinds: BTreeMap<String, String>,
    /// The value of each series, by its name with labels.
    series: BTreeMap<String, f64>,
}

impl Exposition {
    fn of(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line ends");
        let mut read = Self::default();
        let mut helped = BTreeSet::new();
        let mut metric = String::new();

        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, words) = help.split_once(' ').expect(line);
                assert!(!words.trim().is_empty(), "{line}");
                assert!(helped.insert(name.to_owned()), "a second {line}");
                metric = name.to_owned();
            } else if let Some(declared) = line.strip_prefix("# TYPE ") {
                let (name, kind) = declared.split_once(' ').expect(line);
                assert_eq!(name, metric, "the help and the samples are next to it");
                check_name(name, kind);
                let before = read.kinds.insert(name.to_owned(), kind.to_owned());
                assert_eq!(before, None, "a second {line}");
            } else {
                read.add_sample(&metric, line);
            }
        }
        read.check_histograms();
        read
    }

    /// Adds the line of a sample of `metric`, whose type is known.
    fn add_sample(&mut self, metric: &str, line: &str) {
        let (series, value) = line.rsplit_once(' ').expect(line);
        let name = series.split('{').next().unwrap();
        let kind = self.kinds.get(metric).expect(line);
        let suffixes: &[&str] = match kind.as_str() {
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        let suffix = name.strip_prefix(metric).expect(line);
        assert!(suffixes.contains(&suffix), "{line}");

        if let Some(labels) = series
            .strip_prefix(name)
            .filter(|labels| !labels.is_empty())
        {
            let labels = labels
                .strip_prefix('{')
                .and_then(|rest| rest.strip_suffix('}'));
            for label in labels.expect(line).split(',') {
                let (key, value) = label.split_once('=').expect(line);
                assert!(key.bytes().all(|byte| byte.is_ascii_lowercase()), "{line}");
                assert!(value.starts_with('"') && value.ends_with('"'), "{line}");
            }
        }
        let value: f64 = value.parse().expect(line);
        assert!(kind == "gauge" || value >= 0.0, "{line}");
        let before = self.series.insert(series.to_owned(), value);
        assert_eq!(before, None, "a second {line}");
    }

    /// Checks that buckets grow up to the count of all observations.
    fn check_histograms(&self) {
        let histograms = self.kinds.iter().filter(|(_, kind)| *kind == "histogram");
        for (name, _) in histograms {
            let start = format!("{name}_bucket{{le=\"");
            let mut buckets: Vec<(f64, f64)> = self
                .series
                .iter()
                .filter_map(|(series, count)| {
                    let bound = series.strip_prefix(&start)?.strip_suffix("\"}")?;
                    Some((bound.parse().unwrap(), *count))
                })
                .collect();
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(buckets.is_sorted_by_key(|bucket| bucket.1), "{name}");
            let all = (f64::INFINITY, self.series[&format!("{name}_count")]);
            assert_eq!(buckets.last(), Some(&all), "{name}");
            assert!(self.series.contains_key(&format!("{name}_sum")), "{name}");
        }
    }
}

/// Checks the name of a metric by the rules of `promtool check metrics`.
fn check_name(name: &str, kind: &str) {
    assert!(
        ["counter", "gauge", "histogram"].contains(&kind),
        "{name} {kind}"
    );
    let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    assert!(
        name.bytes().all(is_valid) && name.starts_with("mpmd_"),
        "{name}"
    );
    assert_eq!(name.ends_with("_total"), kind == "counter", "{name} {kind}");

    let words: Vec<&str> = name.split('_').collect();
    for word in [
        "counter",
        "gauge",
        "histogram",
        "bucket",
        "count",
        "sum",
        "info",
    ] {
        assert!(!words.contains(&word), "{name} has the word {word}");
    }
    for unit in [
        "ms",
        "milliseconds",
        "minutes",
        "kilobytes",
        "mib",
        "kib",
        "percent",
    ] {
        assert!(!words.contains(&unit), "{name} has the unit {unit}");
    }
}

/// Returns the metrics of a server of two stages that has begun, and has counted nothing.
fn new_server() -> String {
    let (clients, arrivals) = queue(QueueLimits::default());
    let sizes = SchedulerSizes {
        lanes: 2,
        sequences: 4,
        blocks: 16,
        chunk: 8,
        positions: 64,
    };
    let _engine = Engine::new(sizes, arrivals);
    clients.metrics()
}

#[test]
fn metrics_of_a_new_server_follow_the_format() {
    let read = Exposition::of(&new_server());
    assert!(read.kinds.len() > 20, "{read:?}");
}

#[test]
fn metrics_after_requests_follow_the_format() {
    let server = Server::echo();
    for path in ["/v1/completions", "/nothing"] {
        server.post(path, &serde_json::json!({ "prompt": "a" }));
    }
    let answer = server.get("/metrics");
    assert_eq!(
        answer.header("content-type"),
        Some("text/plain; version=0.0.4")
    );
    let read = Exposition::of(&answer.body);
    assert_eq!(read.series["mpmd_requests_ended_total{end=\"stop\"}"], 1.0);
    assert_eq!(read.series["mpmd_answers_total{status=\"404\"}"], 1.0);
}

/// Returns the words in code style of `text`.
fn code_words(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn labelled_counters_begin_at_zero() {
    let read = Exposition::of(&new_server());
    let is_zero = |series: String| assert_eq!(read.series.get(&series), Some(&0.0), "{series}");

    for (name, label) in [("requests_ended", "end"), ("requests_rejected", "reason")] {
        let row = format!("| `mpmd_{name}_total` | ");
        let row = GUIDE.lines().find_map(|line| line.strip_prefix(&row));
        let values = code_words(row.expect("a row of the guide")).filter(|word| *word != label);
        let values: Vec<&str> = values.collect();
        assert!(values.len() >= 5, "{values:?}");
        for value in values {
            is_zero(format!("mpmd_{name}_total{{{label}=\"{value}\"}}"));
        }
    }

    let errors = GUIDE.split("\n## Errors\n").nth(1).unwrap();
    let rows = errors.split("\n## ").next().unwrap().lines();
    let cells = rows.filter_map(|row| row.strip_prefix("| ")?.split(" |").next());
    let statuses = cells
        .flat_map(|cell| cell.split(", "))
        .filter_map(|status| status.parse().ok());
    let statuses: Vec<u16> = statuses.chain([200, 204]).collect();
    assert!(statuses.len() > 10, "{statuses:?}");
    for status in statuses {
        is_zero(format!("mpmd_answers_total{{status=\"{status}\"}}"));
    }

    for name in ["stage_busy_seconds", "handover_bytes", "handover_seconds"] {
        for stage in 0..2 {
            is_zero(format!("mpmd_{name}_total{{stage=\"{stage}\"}}"));
        }
    }
}
