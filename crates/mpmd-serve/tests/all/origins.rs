//! Pages of other servers that use this one from a browser.

use std::io::Write as _;

use mpmd_serve::FrontSettings;
use serde_json::json;
use tempfile::NamedTempFile;

use crate::client::{Answer, connect, read, send};
use crate::server::{Act, Server, settings};

const ORIGIN: &str = "access-control-allow-origin";
const PAGE: &str = "https://chat.example.org";

/// Starts a server with API keys. Returns it with their file.
fn with_keys(settings: FrontSettings) -> (Server, NamedTempFile) {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "key-one").unwrap();
    let settings = FrontSettings {
        api_key_file: Some(file.path().to_owned()),
        ..settings
    };
    (Server::start_with(settings, |_| Act::Echo), file)
}

fn allowing(origins: &[&str]) -> FrontSettings {
    FrontSettings {
        allow_origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
        ..settings()
    }
}

/// Sends the preflight of a chat for a page of `origin`.
fn preflight(server: &Server, origin: &str) -> Answer {
    let head = format!(
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\
         Access-Control-Request-Method: POST\r\n\
         Access-Control-Request-Headers: authorization,content-type\r\n"
    );
    send(server.address, &head, b"")
}

/// Sends a request for a page of `origin`, with further headers.
fn ask(server: &Server, line: &str, origin: &str, more: &str, body: &str) -> Answer {
    let head = format!("{line} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n{more}");
    send(server.address, &head, body.as_bytes())
}

#[test]
fn keys_let_pages_of_all_origins_in() {
    let (server, _file) = with_keys(settings());
    let answer = preflight(&server, "tauri://localhost");
    assert_eq!((answer.status, answer.body.as_str()), (204, ""));
    assert_eq!(answer.header(ORIGIN), Some("tauri://localhost"));
    let header = |name| answer.header(name).unwrap().to_lowercase();
    assert_eq!(
        header("access-control-allow-headers"),
        "authorization,content-type"
    );
    assert!(header("access-control-allow-methods").contains("post"));
    assert!(header("access-control-max-age").parse::<u32>().unwrap() > 0);
    assert!(answer.head.contains("vary: origin\n"));

    // Answers, errors and streams name it, too.
    let key = "Authorization: Bearer key-one\r\n";
    let stream = json!({ "prompt": "a", "stream": true }).to_string();
    for (line, more, body, status) in [
        ("GET /v1/models", key, "", 200),
        ("GET /v1/models", "", "", 401),
        ("GET /v1/nothing", key, "", 404),
        ("PUT /v1/models", key, "", 405),
        ("POST /v1/completions", key, "{}", 400),
        ("POST /v1/completions", key, &stream, 200),
        ("GET /health", "Host: twice\r\n", "", 400),
    ] {
        let answer = ask(&server, line, PAGE, more, body);
        assert_eq!(answer.status, status, "{line}");
        assert_eq!(answer.header(ORIGIN), Some(PAGE), "{line}");
    }

    // The head cannot be read, so the answer is for all.
    let mut stream = connect(server.address);
    stream.write_all(b"no HTTP\r\n\r\n").unwrap();
    assert_eq!(read(stream).header(ORIGIN), Some("*"));
}

#[test]
fn only_listed_origins_are_let_in() {
    let (with_key, _file) = with_keys(allowing(&[PAGE]));
    let without_key = Server::start_with(allowing(&[PAGE, "null"]), |_| Act::Echo);
    for server in [&with_key, &without_key] {
        assert_eq!(preflight(server, PAGE).status, 204);
        let refused = preflight(server, "https://evil.example");
        assert_eq!((refused.status, refused.header(ORIGIN)), (405, None));
        // The answer depends on the origin, also for caches.
        assert_eq!(refused.header("vary"), Some("origin"));
    }
    assert_eq!(preflight(&without_key, "null").status, 204);

    let status = |origin| ask(&without_key, "GET /v1/models", origin, "", "").status;
    assert_eq!(status(PAGE), 200);
    assert_eq!(status("https://evil.example"), 403);
    let rebound = format!("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nOrigin: {PAGE}\r\n");
    assert_eq!(send(without_key.address, &rebound, b"").status, 403);
}

#[test]
fn all_origins_are_let_in_without_keys_by_a_star() {
    let server = Server::start_with(allowing(&["*"]), |_| Act::Echo);
    assert_eq!(preflight(&server, PAGE).status, 204);
    let answer = ask(&server, "GET /v1/models", PAGE, "", "");
    assert_eq!((answer.status, answer.header(ORIGIN)), (200, Some(PAGE)));
}

#[test]
fn server_without_keys_names_no_origin() {
    let server = Server::echo();
    assert_eq!(preflight(&server, PAGE).status, 405);
    let answer = ask(&server, "GET /health", PAGE, "", "");
    assert_eq!((answer.status, answer.header(ORIGIN)), (200, None));
    assert_eq!(answer.header("vary"), None);
}

#[test]
fn text_that_is_no_origin_is_refused() {
    let error = allowing(&["https://chat.example.org/page"])
        .check()
        .unwrap_err();
    let said = error.to_string();
    assert!(said.starts_with("allow_origins \"https://chat.example.org/page\": expected"));
}
