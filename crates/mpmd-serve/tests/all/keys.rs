//! Keys with names and limits.

use std::io::BufReader;

use mpmd_serve::FrontSettings;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::client::{Answer, connect, read_chunk, read_head, send, write};
use crate::refusals::param;
use crate::server::{Act, Server, settings};

/// Starts a server whose file of keys has this text.
fn start(keys: &str) -> (Server, NamedTempFile) {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), keys).unwrap();
    let settings = FrontSettings {
        api_key_file: Some(file.path().to_owned()),
        ..settings()
    };
    // A prompt of the token 7 stays open until its client leaves.
    let act = |request: &mpmd_serve::TextRequest| match request.prompt[..] {
        [7, ..] => Act::Stall(vec![70]),
        _ => Act::Echo,
    };
    (Server::start_with(settings, act), file)
}

fn head(path: &str, key: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n")
}

fn ask(server: &Server, key: &str, body: &Value) -> Answer {
    let head = head("/v1/completions", key);
    send(server.address, &head, body.to_string().as_bytes())
}

/// Checks that an answer is 429, and returns its message.
fn refused(answer: &Answer) -> String {
    assert_eq!(param(answer, 429), None);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    let retry = answer.header("retry-after").expect("a time to wait");
    assert!(retry.parse::<u64>().unwrap() > 0, "{answer:?}");
    error["message"].as_str().unwrap().to_owned()
}

/// Opens a streamed request that stays open, and waits for its first event.
fn open(server: &Server, key: &str) -> BufReader<std::net::TcpStream> {
    let mut stream = connect(server.address);
    let body = json!({ "prompt": [7, 7], "stream": true }).to_string();
    write(&mut stream, &head("/v1/completions", key), body.as_bytes());
    let mut from = BufReader::new(stream);
    let head = read_head(&mut from);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    read_chunk(&mut from).expect("an event");
    from
}

/// Waits until the metrics have this line.
fn until(server: &Server, line: &str) {
    let start = std::time::Instant::now();
    while !server.queue.metrics().contains(line) {
        assert!(start.elapsed() < crate::client::LONG, "{line}");
    }
}

#[test]
fn requests_at_once_are_limited_for_each_key() {
    let (server, _file) = start("k1 name=alice requests=2\nk2 name=bob\nk3 requests=1\n");
    let short = json!({ "prompt": [5, 6], "max_tokens": 1 });
    let _first = open(&server, "k1");
    let second = open(&server, "k1");
    let why = refused(&ask(&server, "k1", &short));
    let expected = "requests=2: the key alice has 2 of at most 2 requests open";
    assert_eq!(why, expected);

    // Others are not concerned, and a request that has ended leaves its place.
    assert_eq!(ask(&server, "k2", &short).status, 200);
    assert_eq!(ask(&server, "k3", &short).status, 200);
    drop(second);
    until(&server, "mpmd_key_requests_open{key=\"alice\"} 1\n");
    for _ in 0..20 {
        assert_eq!(ask(&server, "k1", &short).status, 200);
        let mut streamed = short.clone();
        streamed["stream"] = true.into();
        assert_eq!(ask(&server, "k1", &streamed).status, 200);
    }

    let two = json!({ "prompt": [[5], [6]], "max_tokens": 1 });
    assert!(refused(&ask(&server, "k1", &two)).contains("requests=2"));
    let three = json!({ "prompt": [[5], [6], [8]], "max_tokens": 1 });
    // Never admitted, so it is no use to try again.
    assert_eq!(
        param(&ask(&server, "k1", &three), 400).as_deref(),
        Some("prompt")
    );
    let _third = open(&server, "k3");
    let why = refused(&ask(&server, "k3", &short));
    assert!(
        why.starts_with("requests=1: this key has 1 of at most 1 requests open"),
        "{why}"
    );
    assert!(!why.contains("k3"), "{why}");
}

#[test]
fn tokens_per_minute_are_limited_for_each_key() {
    let (server, _file) = start("k1 name=alice tokens-per-minute=10\nk2\n");
    // More than the key has: new tokens come in 17 minutes.
    let long = json!({ "prompt": vec![5; 90], "max_tokens": 90 });
    assert_eq!(
        ask(&server, "k1", &long).json()["usage"]["total_tokens"],
        180
    );
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let answer = send(server.address, &head(path, "k1"), b"{}");
        let why = refused(&answer);
        let expected =
            "tokens-per-minute=10: the key alice has used its tokens, and has new ones in ";
        assert!(why.starts_with(expected), "{why}");
    }
    assert_eq!(ask(&server, "k2", &long).status, 200);
    // These take no tokens of the model.
    let tokenize = send(
        server.address,
        &head("/tokenize", "k1"),
        b"{\"prompt\": \"a\"}",
    );
    assert_eq!(tokenize.status, 200);
}

#[test]
fn requests_per_minute_are_limited_for_each_key() {
    let (server, _file) = start("k1 name=alice requests-per-minute=2\nk2\n");
    let short = json!({ "prompt": [5, 6], "max_tokens": 1 });
    for _ in 0..2 {
        assert_eq!(ask(&server, "k1", &short).status, 200);
    }
    let why = refused(&ask(&server, "k1", &short));
    let expected = "requests-per-minute=2: the key alice has used its requests, and has new ones \
                    in 30 s";
    assert_eq!(why, expected);
    assert_eq!(ask(&server, "k2", &short).status, 200);
    let metrics = server.queue.metrics();
    let line = "mpmd_key_rejected_total{key=\"alice\",reason=\"key_request_rate\"} 1\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[test]
fn metrics_have_the_names_of_keys_and_never_the_keys() {
    let (server, _file) = start("secret-1 name=alice requests=1\nsecret-2\nsecret-3 name=bob\n");
    let body = json!({ "prompt": [[5, 6], [5]], "max_tokens": 1 });
    let held = open(&server, "secret-1");
    refused(&ask(&server, "secret-1", &json!({ "prompt": [5] })));
    for key in ["secret-2", "secret-3"] {
        assert_eq!(ask(&server, key, &body).status, 200);
    }

    let metrics = server.queue.metrics();
    for line in [
        "mpmd_key_requests_open{key=\"alice\"} 1",
        "mpmd_key_requests_open{key=\"bob\"} 0",
        "mpmd_key_requests_total{key=\"alice\"} 1",
        "mpmd_key_requests_total{key=\"bob\"} 2",
        "mpmd_key_prompt_tokens_total{key=\"bob\"} 3",
        "mpmd_key_generated_tokens_total{key=\"bob\"} 2",
        "mpmd_key_rejected_total{key=\"alice\",reason=\"key_requests\"} 1",
        "mpmd_key_rejected_total{key=\"alice\",reason=\"key_tokens\"} 0",
        "mpmd_key_rejected_total{key=\"bob\",reason=\"key_requests\"} 0",
        "mpmd_requests_rejected_total{reason=\"key_requests\"} 1",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "{line}: {metrics}");
    }
    assert!(!metrics.contains("secret"), "{metrics}");
    drop(held);
    until(&server, "mpmd_key_requests_open{key=\"alice\"} 0\n");
}

#[test]
fn request_that_is_refused_later_leaves_its_place() {
    let (server, _file) = start("k1 name=alice requests=1\n");
    for body in [
        json!({ "prompt": 5 }),
        json!({ "prompt": [5], "seed": "a" }),
    ] {
        for _ in 0..3 {
            assert_eq!(ask(&server, "k1", &body).status, 400);
        }
    }
    server.queue.drain();
    for _ in 0..3 {
        assert_eq!(ask(&server, "k1", &json!({ "prompt": [5] })).status, 503);
    }
    assert!(
        server
            .queue
            .metrics()
            .contains("mpmd_key_requests_open{key=\"alice\"} 0\n")
    );
}

#[test]
fn limits_of_a_control_key_are_refused() {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "k1 name=operator\nk2 requests=1\n").unwrap();
    let settings = FrontSettings {
        control_key_file: Some(file.path().to_owned()),
        ..settings()
    };
    let why = settings.check().unwrap_err().to_string();
    let expected = "expected keys without limits in the file for control";
    assert!(
        why.starts_with("control_key_file ") && why.contains(expected),
        "{why}"
    );
    std::fs::write(file.path(), "k1 name=operator\n").unwrap();
    assert!(settings.check().is_ok());
}
