//! Clients that leave or do not read, and the end of the server.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use mpmd_serve::{Finish, Front, FrontSettings, ServerPhase};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::client::{LONG, connect, read, read_chunk, read_head, write};
use crate::server::{Act, Server, settings};

/// Waits until `holds` returns true. Panics with `what` after a time limit.
fn until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

const COMPLETIONS: &str = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";

#[test]
fn client_that_leaves_ends_its_request() {
    let server = Server::start(|request| Act::Stall(request.prompt.clone()));
    for body in [
        json!({ "prompt": "ab", "stream": true }),
        json!({ "prompt": "ab" }),
    ] {
        let mut stream = connect(server.address);
        write(&mut stream, COMPLETIONS, body.to_string().as_bytes());
        until("the request is taken", || server.queue.open() == 1);
        drop(stream);
        until("the client is noticed", || server.queue.open() == 0);
    }
    until("the engine has dropped both", || {
        server.queue.metrics().contains("mpmd_requests_running 0")
    });
    assert!(
        server
            .queue
            .metrics()
            .contains("mpmd_requests_ended_total{end=\"left\"} 2")
    );
}

#[test]
fn client_that_leaves_unread_bytes_is_noticed() {
    let server = Server::start(|request| Act::Stall(request.prompt.clone()));
    for (body, more) in [
        (json!({ "prompt": "ab" }), "\r\n"),
        (json!({ "prompt": "ab", "stream": true }), "\r\n"),
        (
            json!({ "prompt": "ab" }),
            "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ),
    ] {
        let mut stream = connect(server.address);
        write_on(&mut stream, &body, more);
        until("the request is taken", || server.queue.open() == 1);
        drop(stream);
        until("the client is noticed", || server.queue.open() == 0);
    }
    assert!(
        server
            .queue
            .metrics()
            .contains("mpmd_requests_ended_total{end=\"left\"} 3")
    );
}

/// Writes a request on a connection that stays open, followed by the bytes `more`.
fn write_on(stream: &mut TcpStream, body: &serde_json::Value, more: &str) {
    let body = body.to_string();
    let head = format!("{COMPLETIONS}Content-Length: {}\r\n\r\n", body.len());
    stream
        .write_all(format!("{head}{body}{more}").as_bytes())
        .unwrap();
}

#[test]
fn half_closed_client_gets_its_answer() {
    // The engine ends the requests once the clients were asked.
    let server = Server::start(|_| Act::Ignore);
    let mut clients = Vec::new();
    for body in [
        json!({ "prompt": "ab" }),
        json!({ "prompt": "ab", "stream": true }),
    ] {
        let mut stream = connect(server.address);
        write_on(&mut stream, &body, "");
        stream.shutdown(Shutdown::Write).unwrap();
        let mut from = BufReader::new(stream);
        let asked = read_head(&mut from);
        match body.get("stream") {
            None => assert!(asked.starts_with("HTTP/1.1 100 Continue\n"), "{asked}"),
            Some(_) => assert_eq!(read_chunk(&mut from).unwrap(), b": \n\n"),
        }
        clients.push(from);
    }
    assert_eq!(server.queue.open(), 2, "both are open");
    server.queue.fail("the end");
    let mut whole = String::new();
    clients[0].read_to_string(&mut whole).unwrap();
    assert!(
        whole.starts_with("HTTP/1.1 500") && whole.contains("the end"),
        "{whole}"
    );
    let event = read_chunk(&mut clients[1]).unwrap();
    assert!(
        String::from_utf8_lossy(&event).contains("the end"),
        "{event:?}"
    );
    // A quick answer comes alone.
    let echo = Server::echo();
    let mut stream = connect(echo.address);
    write_on(&mut stream, &json!({ "prompt": "ab" }), "");
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read(stream).json()["choices"][0]["text"], "ab");
}

#[test]
fn clients_that_do_not_read_hold_up_nobody() {
    let server = Server::start(|_| Act::Send(vec![70; 500], Finish::Length));
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    // Far more bytes than the system keeps for a client.
    let long = json!({ "messages": messages, "stream": true, "logprobs": true,
        "top_logprobs": 20, "max_tokens": 100 });
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n";
    let slow: Vec<_> = (0..50)
        .map(|_| {
            let mut stream = connect(server.address);
            set_socket_recv_buffer_size(&stream, 4 << 10).unwrap();
            write(&mut stream, head, long.to_string().as_bytes());
            stream
        })
        .collect();
    until("the engine has answered all", || {
        let metrics = server.queue.metrics();
        metrics.contains("mpmd_generated_tokens_total 25000")
    });
    let reply = server.post("/v1/completions", &json!({ "prompt": "ab" }));
    assert_eq!(reply.json()["usage"]["completion_tokens"], 500);
    assert_eq!(server.queue.open(), 50);
    drop(slow);
    until("the clients are noticed", || server.queue.open() == 0);
}

#[test]
fn connection_serves_several_requests() {
    let server = Server::echo();
    let mut stream = connect(server.address);
    for _ in 0..3 {
        stream
            .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        let mut bytes = [0; 1024];
        let count = stream.read(&mut bytes).unwrap();
        assert!(bytes[..count].starts_with(b"HTTP/1.1 200"));
    }
}

#[test]
fn connections_beyond_the_limit_wait_for_others() {
    let server = Server::start_with(
        FrontSettings {
            max_connections: 2,
            ..settings()
        },
        |_| Act::Echo,
    );
    let held = [connect(server.address), connect(server.address)];
    let mut third = connect(server.address);
    write(
        &mut third,
        "GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"",
    );
    drop(held);
    assert_eq!(read(third).status, 200);
}

#[test]
fn silent_connections_hold_up_no_new_one() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let server = Server::echo();
    let mut used = connect(server.address);
    let version = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut bytes = [0; 1024];
    used.write_all(version).unwrap();
    assert!(used.read(&mut bytes).unwrap() > 0);

    // More than the server lets in at a time.
    let silent: Vec<_> = (0..600).map(|_| connect(server.address)).collect();
    let start = Instant::now();
    assert_eq!(server.get("/health").status, 200);
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );

    // A connection that has been used ends after those without a request.
    used.write_all(version).unwrap();
    assert!(used.read(&mut bytes).unwrap() > 0);
    drop(silent);
}

#[test]
fn draining_server_answers_open_requests_and_no_new_ones() {
    let server = Server::start(|request| match request.max_tokens {
        1 => Act::Stall(Vec::new()),
        _ => Act::Echo,
    });
    let mut open = connect(server.address);
    let body = json!({ "prompt": "a", "max_tokens": 1, "stream": true });
    write(&mut open, COMPLETIONS, body.to_string().as_bytes());
    until("the request is taken", || server.queue.open() == 1);
    server.front().drain();
    until("the server drains", || {
        server.queue.phase() == ServerPhase::Draining
    });
    let ready = server.get("/ready");
    assert_eq!(
        (ready.status, &ready.json()["status"]),
        (503, &json!("draining"))
    );
    let refused = server.post("/v1/completions", &json!({ "prompt": "a" }));
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("5"))
    );
    assert_eq!(
        refused.json()["error"]["message"],
        "the server is shutting down"
    );
    // A second request to end fails the open one.
    server.front().drain();
    let error = &read(open).chunks()[0]["error"]["message"];
    assert_eq!(error, "the server is shutting down");
    assert_eq!(server.end().len(), 1);
}

#[test]
fn drain_fails_open_requests_after_its_time() {
    let server = Server::start_with(
        FrontSettings {
            drain: Duration::ZERO,
            ..settings()
        },
        |_| Act::Stall(Vec::new()),
    );
    let mut open = connect(server.address);
    write(
        &mut open,
        COMPLETIONS,
        json!({ "prompt": "a" }).to_string().as_bytes(),
    );
    until("the request is taken", || server.queue.open() == 1);
    Front::drain(server.front());
    let reply = read(open);
    assert_eq!(reply.status, 500);
    assert_eq!(
        reply.json()["error"]["message"],
        "the server is shutting down"
    );
}
