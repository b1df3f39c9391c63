//! The log of requests: a line for each, written when its reply has ended.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use mpmd::launch::printable;
use mpmd_base::block::{Instant, Mutex, now, since};

use crate::log_target::LOG_TARGET;

/// Largest number of characters of a path, and of a method, in a line.
const LONGEST_PATH: usize = 200;
const LONGEST_METHOD: usize = 20;
/// The paths that monitors read again and again. Their usual replies are logged at the level debug.
const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];

/// The log of a server's requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLog {
    /// True if requests are logged.
    pub(super) is_on: bool,
}

impl RequestLog {
    /// Begins the record of a request that has arrived now.
    pub(super) fn begin(self, method: &Method, path: &str) -> Arc<RequestRecord> {
        Arc::new(RequestRecord {
            log: self,
            begun: now(),
            line: Mutex::new(RequestLine {
                method: shortened(method.as_str(), LONGEST_METHOD),
                path: shortened(path, LONGEST_PATH),
                status: None,
                took: Duration::ZERO,
                key: None,
                reply: None,
            }),
        })
    }

    /// Writes the line of a request.
    fn write(self, line: &RequestLine) {
        if !self.is_on {
            return;
        }
        match line.is_probe() {
            true => tracing::debug!(target: LOG_TARGET, "{line}"),
            false => tracing::info!(target: LOG_TARGET, "{line}"),
        }
    }
}

/// A request while it is answered. Its line is logged when the last handle is dropped.
#[derive(Debug)]
pub(super) struct RequestRecord {
    log: RequestLog,
    begun: Instant,
    line: Mutex<RequestLine>,
}

impl RequestRecord {
    /// Records the status of the reply.
    pub(super) fn answer(&self, status: StatusCode) {
        self.line.lock().status = Some(status);
    }

    /// Records the name of the client's key.
    pub(super) fn set_key(&self, name: &str) {
        self.line.lock().key = Some(name.to_owned());
    }

    /// Records that tokens are computed for the request: a reply with this id and number of
    /// choices, to prompts of `prompt` tokens together.
    pub(super) fn begin_reply(&self, id: &str, prompt: usize, choices: usize) {
        self.line.lock().reply = Some(ReplyFigures {
            id: id.to_owned(),
            prompt,
            tokens: 0,
            first: None,
            ends: vec!["left"; choices],
        });
    }

    /// Records a token of the reply.
    pub(super) fn token(&self) {
        if let Some(reply) = &mut self.line.lock().reply {
            reply.tokens += 1;
            reply.first.get_or_insert_with(|| since(self.begun));
        }
    }

    /// Records the reason why a choice of the reply has ended. Without a reason, the client has
    /// left.
    pub(super) fn end_choice(&self, index: usize, end: &'static str) {
        let reply = &mut self.line.lock().reply;
        if let Some(choice) = reply.as_mut().and_then(|reply| reply.ends.get_mut(index)) {
            *choice = end;
        }
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let mut line = self.line.lock();
        line.took = since(self.begun);
        self.log.write(&line);
    }
}

/// The line of a request in the log. It has no text of the prompt or the reply, and not the query,
/// which may have secrets.
#[derive(Clone, Debug)]
struct RequestLine {
    method: String,
    path: String,
    /// The status of the reply. `None` if the client left before.
    status: Option<StatusCode>,
    took: Duration,
    /// The name of the client's key. `None` without a key, or if it has no name.
    key: Option<String>,
    /// The figures of a reply of tokens.
    reply: Option<ReplyFigures>,
}

/// The figures of a reply of tokens.
#[derive(Clone, Debug)]
struct ReplyFigures {
    id: String,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Number of tokens of the reply.
    tokens: usize,
    /// Time from the request to the first token.
    first: Option<Duration>,
    /// The reason why each choice has ended.
    ends: Vec<&'static str>,
}

impl ReplyFigures {
    /// Returns the reason why the reply has ended: a failure of a choice, the client's leaving, or
    /// the reason of the first choice.
    fn end(&self) -> &'static str {
        let is_rare = |end: &&str| ["failed", "left"].contains(end);
        let rare = self.ends.iter().filter(|end| is_rare(end)).min();
        rare.or(self.ends.first()).copied().unwrap_or("left")
    }
}

impl RequestLine {
    /// True for the usual reply to a monitor: 200, or 503 while the server takes no requests.
    fn is_probe(&self) -> bool {
        let is_usual = matches!(
            self.status,
            Some(StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE)
        );
        is_usual && PROBES.contains(&self.path.as_str())
    }
}

impl fmt::Display for RequestLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let Self { method, path, .. } = self;
        write!(f, "{method} {path} ")?;
        match self.status {
            Some(status) => write!(f, "{}", status.as_u16())?,
            None => f.write_str("no-reply")?,
        }
        write!(f, " took_ms={:.1}", millis(self.took))?;
        if let Some(key) = &self.key {
            write!(f, " key={key}")?;
        }

        let Some(reply) = &self.reply else {
            return Ok(());
        };
        let ReplyFigures {
            id,
            prompt,
            tokens,
            first,
            ..
        } = reply;
        write!(f, " id={id} prompt_tokens={prompt} new_tokens={tokens}")?;
        if let Some(first) = first {
            write!(f, " first_token_ms={:.1}", millis(*first))?;
        }
        write!(f, " end={}", reply.end())
    }
}

/// Returns the start of a client's text, on one line and with control characters escaped.
fn shortened(text: &str, most: usize) -> String {
    let start: String = text
        .chars()
        .take(most)
        .map(|c| if c.is_whitespace() { '_' } else { c })
        .collect();
    let more = if text.chars().nth(most).is_some() {
        "…"
    } else {
        ""
    };
    format!("{}{more}", printable(&start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: RequestLog = RequestLog { is_on: true };

    /// Returns the line of a record as it is now, without its times, which differ from run to run.
    fn without_times(record: &RequestRecord) -> String {
        let text = record.line.lock().to_string();
        let words = text.split(' ').filter(|word| !word.contains("_ms="));
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn line_has_the_figures_of_a_reply() {
        let record = LOG.begin(&Method::POST, "/v1/completions");
        record.begin_reply("cmpl-1", 7, 1);
        record.token();
        record.token();
        record.answer(StatusCode::OK);
        record.end_choice(0, "stop");
        assert_eq!(
            without_times(&record),
            "POST /v1/completions 200 id=cmpl-1 prompt_tokens=7 new_tokens=2 end=stop"
        );
        let text = record.line.lock().to_string();
        assert!(text.contains(" took_ms=") && text.contains(" first_token_ms="));
    }

    #[test]
    fn line_has_the_name_of_the_key() {
        let record = LOG.begin(&Method::POST, "/v1/completions");
        record.set_key("alice");
        record.answer(StatusCode::TOO_MANY_REQUESTS);
        let line = without_times(&record);
        assert_eq!(line, "POST /v1/completions 429 key=alice");
    }

    #[test]
    fn client_that_leaves_has_a_line() {
        let record = LOG.begin(&Method::POST, "/v1/completions");
        record.begin_reply("cmpl-1", 7, 1);
        assert_eq!(
            without_times(&record),
            "POST /v1/completions no-reply id=cmpl-1 prompt_tokens=7 new_tokens=0 end=left"
        );
    }

    #[test]
    fn reply_ends_by_its_rarest_choice() {
        for (ends, expected) in [
            ([Some("stop"), Some("length")], "stop"),
            ([Some("length"), None], "left"),
            ([None, Some("failed")], "failed"),
        ] {
            let record = LOG.begin(&Method::POST, "/v1/completions");
            record.begin_reply("cmpl-1", 7, 2);
            for (index, end) in ends.into_iter().enumerate() {
                if let Some(end) = end {
                    record.end_choice(index, end);
                }
            }
            let text = without_times(&record);
            assert!(text.ends_with(&format!(" end={expected}")), "{text}");
        }
    }

    #[test]
    fn texts_of_clients_are_short_and_on_one_line() {
        let path = format!("/\u{1b}[2J\n{}", "x".repeat(1000));
        let text = without_times(&LOG.begin(&Method::GET, &path));
        assert!(text.starts_with("GET /\\u001b[2J_xxx"), "{text}");
        assert!(text.contains("x… no-reply") && text.len() < 300, "{text}");
    }

    #[test]
    fn only_usual_replies_to_monitors_are_probes() {
        for (path, status, is_probe) in [
            ("/metrics", StatusCode::OK, true),
            ("/ready", StatusCode::SERVICE_UNAVAILABLE, true),
            ("/metrics", StatusCode::UNAUTHORIZED, false),
            ("/v1/models", StatusCode::OK, false),
        ] {
            let record = LOG.begin(&Method::GET, path);
            record.answer(status);
            assert_eq!(record.line.lock().is_probe(), is_probe, "{path}");
        }
    }
}
