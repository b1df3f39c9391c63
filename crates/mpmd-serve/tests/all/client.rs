//! A client of HTTP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// A time limit that no test reaches.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// An HTTP reply.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// Returns the data of each server-sent event.
    pub(crate) fn events(&self) -> Vec<String> {
        let data = |event: &str| event.strip_prefix("data: ").map(str::to_owned);
        self.body.split("\n\n").filter_map(data).collect()
    }

    /// Returns the JSON of each event except the last one, which is `[DONE]`.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines();
        lines.find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }
}

/// Connects, with a time limit for all reads and writes.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream
}

/// Writes a request: its head and its body.
pub(crate) fn write(stream: &mut TcpStream, head: &str, body: &[u8]) {
    let length = body.len();
    let head = format!("{head}Content-Length: {length}\r\nConnection: close\r\n\r\n");
    // A server that refuses a request need not read it.
    _ = stream.write_all(&[head.as_bytes(), body].concat());
}

/// Sends a request, and waits for the whole reply.
pub(crate) fn send(address: SocketAddr, head: &str, body: &[u8]) -> Answer {
    let mut stream = connect(address);
    write(&mut stream, head, body);
    read(stream)
}

/// Reads a reply to its end.
pub(crate) fn read(stream: TcpStream) -> Answer {
    let mut from = BufReader::new(stream);
    let head = read_head(&mut from);
    let mut rest = Vec::new();
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        while let Some(chunk) = read_chunk(&mut from) {
            rest.extend(chunk);
        }
    } else {
        // The connection may be reset behind a refusal.
        _ = from.read_to_end(&mut rest);
    }
    let status = head
        .split(' ')
        .nth(1)
        .unwrap_or_default()
        .parse()
        .unwrap_or(0);
    Answer {
        status,
        head,
        body: String::from_utf8(rest).unwrap(),
    }
}

/// Reads the head of a reply.
pub(crate) fn read_head(from: &mut BufReader<TcpStream>) -> String {
    let mut head = String::new();
    while from.read_line(&mut head).unwrap_or(0) > 2 {}
    head.replace("\r\n", "\n")
}

/// Reads one chunk of the body. `None` after the last one.
pub(crate) fn read_chunk(from: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    let length = usize::from_str_radix(line.trim(), 16).unwrap();
    let mut chunk = vec![0; length + 2];
    from.read_exact(&mut chunk).unwrap();
    chunk.truncate(length);
    (length > 0).then_some(chunk)
}
