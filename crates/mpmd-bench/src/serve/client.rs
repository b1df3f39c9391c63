//! A client of a server with the interface of OpenAI.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Maximum bytes of a reply that is not a stream.
const LONGEST: u64 = 1 << 20;

/// The address, API key and time limit of the measured server.
#[derive(Debug)]
pub(super) struct ServerTarget {
    /// Host name or address, and port.
    host: String,
    key: Option<String>,
    /// Maximum time without a byte of a reply.
    longest: Duration,
}

/// The times and token counts of a streamed reply.
#[derive(Debug)]
pub(super) struct StreamedReply {
    pub(super) sent: Instant,
    /// Each event with new tokens, as (time, number of tokens).
    pub(super) events: Vec<(Instant, usize)>,
    /// Number of new tokens, by the server's own count if it reports one.
    pub(super) tokens: usize,
    /// Number of the prompt's tokens, if the server reports it.
    pub(super) prompt: Option<usize>,
}

impl ServerTarget {
    /// Creates the target for an address such as `http://127.0.0.1:8000`.
    pub(super) fn new(url: &str, key: Option<String>, longest: Duration) -> Result<Self> {
        let rest = url.strip_prefix("http://");
        let rest = rest.with_context(|| format!("{url:?}: expected http://HOST:PORT"))?;
        let host = rest
            .trim_end_matches('/')
            .trim_end_matches("/v1")
            .to_owned();
        ensure!(
            !host.contains('/'),
            "{url:?}: expected http://HOST:PORT without a path"
        );

        let host = if host.contains(':') {
            host
        } else {
            host + ":80"
        };
        Ok(Self { host, key, longest })
    }

    /// Sends a `GET` request for `path`, and returns the body of the reply.
    pub(super) fn get(&self, path: &str) -> Result<String> {
        let mut body = self.send("GET", path, "")?;
        let mut text = String::new();
        body.by_ref().take(LONGEST).read_to_string(&mut text)?;
        Ok(text)
    }

    /// Requests a completion as a stream, and reads the stream to its end.
    pub(super) fn complete(&self, body: &Value) -> Result<StreamedReply> {
        let sent = Instant::now();
        let from = self.send("POST", "/v1/completions", &body.to_string())?;
        let mut reply = StreamedReply {
            sent,
            events: Vec::new(),
            tokens: 0,
            prompt: None,
        };

        let mut counted = None;
        for line in BufReader::new(from).lines() {
            let line = line.context("the reply broke off")?;
            let Some(data) = line.strip_prefix("data:").map(str::trim) else {
                continue;
            };
            if data == "[DONE]" {
                let own = reply.events.iter().map(|(_, count)| count).sum();
                reply.tokens = counted.unwrap_or(own);
                return Ok(reply);
            }

            let chunk: Value = serde_json::from_str(data).context("an event of the reply")?;
            if let Some(error) = chunk.get("error") {
                bail!("the reply failed: {error}");
            }

            let count = |name: &str| chunk["usage"][name].as_u64().map(|count| count as usize);
            counted = count("completion_tokens").or(counted);
            reply.prompt = count("prompt_tokens").or(reply.prompt);

            let choice = &chunk["choices"][0];
            let has_text = choice["text"].as_str().is_some_and(|text| !text.is_empty());
            let ids = choice["token_ids"].as_array().map(Vec::len);
            match ids.unwrap_or(usize::from(has_text)) {
                0 => {}
                count => reply.events.push((Instant::now(), count)),
            }
        }
        bail!("the reply ended without [DONE]")
    }

    /// Sends a request, and returns the body of the reply.
    fn send(&self, method: &str, path: &str, body: &str) -> Result<Box<dyn Read>> {
        let host = &self.host;
        let mut stream =
            TcpStream::connect(host).with_context(|| format!("cannot connect to {host}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.longest))?;
        stream.set_write_timeout(Some(self.longest))?;
        let key = self
            .key
            .as_ref()
            .map(|key| format!("Authorization: Bearer {key}\r\n"));
        let key = key.unwrap_or_default();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{key}Content-Type: application/json\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes())?;

        let mut from = BufReader::new(stream);
        let mut head = String::new();
        let mut line = String::new();
        while from.by_ref().take(LONGEST).read_line(&mut line)? > 2 {
            head += &std::mem::take(&mut line).to_ascii_lowercase();
        }

        let is_chunked = head
            .lines()
            .any(|line| line == "transfer-encoding: chunked");
        let mut body: Box<dyn Read> = match is_chunked {
            true => Box::new(ChunkedBody {
                from,
                left: 0,
                is_end: false,
            }),
            false => Box::new(from),
        };

        let status = head
            .split_whitespace()
            .nth(1)
            .unwrap_or("no status")
            .to_owned();
        if status != "200" {
            let mut why = String::new();
            // The status alone must do if it cannot be read.
            _ = body.by_ref().take(LONGEST).read_to_string(&mut why);
            bail!("{path}: status {status}: {}", why.trim());
        }
        Ok(body)
    }
}

/// The body of a reply in chunked transfer encoding.
struct ChunkedBody {
    from: BufReader<TcpStream>,
    /// Number of unread bytes of the current chunk.
    left: usize,
    is_end: bool,
}

impl Read for ChunkedBody {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let mut line = String::new();
        while self.left == 0 && !self.is_end {
            line.clear();
            self.from.by_ref().take(LONGEST).read_line(&mut line)?;
            // The line before is the end of the chunk before.
            if line == "\r\n" {
                continue;
            }
            let digits = line.trim().split(';').next().unwrap_or_default();
            self.left = usize::from_str_radix(digits, 16).map_err(std::io::Error::other)?;
            self.is_end = self.left == 0;
        }

        let most = to.len().min(self.left);
        let count = self.from.read(&mut to[..most])?;
        if count == 0 && most > 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    /// Returns the parsed reply of a server that sends `bytes`.
    fn replied(bytes: &'static str) -> Result<StreamedReply> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let count = stream.read(&mut asked).unwrap();
            stream.write_all(bytes.as_bytes()).unwrap();
            String::from_utf8_lossy(&asked[..count]).into_owned()
        });
        let target = ServerTarget::new(&url, Some("secret".to_owned()), Duration::from_secs(60));
        let reply = target.unwrap().complete(&json!({ "prompt": [1] }));
        let asked = server.join().unwrap();
        assert!(
            asked.starts_with("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:"),
            "{asked}"
        );
        assert!(
            asked.contains("Authorization: Bearer secret\r\n"),
            "{asked}"
        );
        reply
    }

    const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

    #[test]
    fn tokens_are_counted_by_ids_or_texts_or_usage() {
        let ids = "HTTP/1.1 200 OK\r\n\r\n\
                   data: {\"choices\": [{\"text\": \"\", \"token_ids\": [1, 2]}]}\n\n\
                   : a comment\n\ndata: {\"choices\": [{\"text\": \"\", \"token_ids\": []}]}\n\n\
                   data: [DONE]\n\n";
        let reply = replied(ids).unwrap();
        assert_eq!(
            (reply.tokens, reply.events[0].1, reply.prompt),
            (2, 2, None)
        );
        let usage = "HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\": [{\"text\": \"a\"}]}\n\n\
                     data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 5, \
                     \"completion_tokens\": 3}}\n\ndata: [DONE]\n\n";
        let reply = replied(usage).unwrap();
        assert_eq!(
            (reply.tokens, reply.events.len(), reply.prompt),
            (3, 1, Some(5))
        );
    }

    #[test]
    fn events_may_be_cut_anywhere_by_chunks() {
        let body = "a\r\ndata: {\"ch\r\n1b\r\noices\": [{\"text\": \"a\"}]}\n\nd\r\n\
                    c\r\nata: [DONE]\n\r\n0\r\n\r\n";
        let bytes: &str = Box::leak(format!("{CHUNKED}{body}").into());
        assert_eq!(replied(bytes).unwrap().tokens, 1);
    }

    #[test]
    fn failures_say_why() {
        for (bytes, expected) in [
            (
                "HTTP/1.1 429 Too Many\r\n\r\n{\"error\": 1}",
                "status 429: {\"error\": 1}",
            ),
            (
                "HTTP/1.1 200 OK\r\n\r\ndata: {\"error\": \"no\"}\n\n",
                "the reply failed: \"no\"",
            ),
            (
                "HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\": []}\n\n",
                "without [DONE]",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nda",
                "broke off",
            ),
            ("", "no status"),
        ] {
            let error = format!("{:#}", replied(bytes).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        for url in ["https://a", "localhost:8000", "http://a:1/v2"] {
            assert!(
                ServerTarget::new(url, None, Duration::ZERO).is_err(),
                "{url}"
            );
        }
    }
}
