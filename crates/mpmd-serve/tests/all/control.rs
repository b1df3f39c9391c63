//! The endpoints that control the server, on an engine that computes nothing: their keys and their
//! refusals.

use std::path::Path;
use std::time::Instant;

use mpmd_serve::FrontSettings;
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

use crate::client::{Answer, LONG, send};
use crate::server::{Act, Server, settings};

const ENDPOINTS: [&str; 4] = [
    "/pause",
    "/resume",
    "/update_weight_version",
    "/load_weights",
];

/// Creates a temporary file with a key.
pub(crate) fn key_file(key: &str) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), key).unwrap();
    file
}

fn start(settings: FrontSettings) -> (Server, NamedTempFile) {
    let key = key_file("control");
    let control_key_file = Some(key.path().to_owned());
    let settings = FrontSettings {
        control_key_file,
        ..settings
    };
    (Server::start_with(settings, |_| Act::Echo), key)
}

fn post(server: &Server, path: &str, key: &str, body: &str) -> Answer {
    let key = if key.is_empty() {
        ""
    } else {
        &format!("Authorization: Bearer {key}\r\n")
    };
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}");
    send(server.address, &head, body.as_bytes())
}

#[test]
fn without_a_control_key_no_endpoint_controls() {
    let server = Server::echo();
    for path in ENDPOINTS {
        for answer in [server.post(path, &json!({})), server.get(path)] {
            assert_eq!(answer.status, 404);
            assert_eq!(
                answer.json()["error"]["message"],
                "there is no such endpoint"
            );
        }
    }
    assert_eq!(
        server.get("/is_paused").json(),
        json!({ "is_paused": false })
    );
    let info = json!({ "version": 0, "weight_version": "default", "requests": 0, "old": null,
        "failure": null });
    assert_eq!(server.get("/weight_info").json(), info);
}

#[test]
fn control_has_a_key_of_its_own() {
    let api = key_file("api");
    let (server, _key) = start(FrontSettings {
        api_key_file: Some(api.path().to_owned()),
        ..settings()
    });
    for path in ENDPOINTS {
        for key in ["", "api", "contro", "control2"] {
            assert_eq!(
                post(&server, path, key, "{}").status,
                401,
                "{path} with {key:?}"
            );
        }
        assert_ne!(post(&server, path, "control", "[]").status, 401, "{path}");
    }
    for path in ["/is_paused", "/weight_info"] {
        let get = |key: &str| {
            let head = format!(
                "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            );
            send(server.address, &head, b"").status
        };
        assert_eq!((get("api"), get("control"), get("")), (200, 401, 401));
    }
    let body = json!({ "prompt": "a" }).to_string();
    assert_eq!(
        post(&server, "/v1/completions", "control", &body).status,
        401
    );
}

#[test]
fn wrong_fields_of_control_are_named() {
    let (server, _key) = start(settings());
    for (path, body, field) in [
        ("/pause?mode=stop", json!({}), "mode"),
        ("/pause?mode", json!({}), "mode"),
        ("/pause?mode=wait&mode=keep", json!({}), "mode"),
        ("/pause?clear=1", json!({}), "clear"),
        ("/pause", json!({ "mode": "stop" }), "mode"),
        ("/pause", json!({ "mode": 7 }), "mode"),
        ("/pause", json!({ "mod": "keep" }), "mod"),
        ("/update_weight_version", json!({}), "weight_version"),
        (
            "/update_weight_version",
            json!({ "weight_version": "" }),
            "weight_version",
        ),
        (
            "/update_weight_version",
            json!({ "weight_version": 42 }),
            "weight_version",
        ),
        (
            "/update_weight_version",
            json!({ "weight_version": "é".repeat(257) }),
            "weight_version",
        ),
        ("/load_weights", json!({}), "path"),
        ("/load_weights", json!({ "path": "/" }), "path"),
        (
            "/load_weights",
            json!({ "path": "/", "version": 7 }),
            "version",
        ),
    ] {
        let answer = post(&server, path, "control", &body.to_string());
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(field)),
            "{path}"
        );
    }
}

#[test]
fn labels_name_the_weights_of_later_answers() {
    let (server, _key) = start(settings());
    let version = || {
        let reply = server
            .post("/v1/completions", &json!({ "prompt": "a" }))
            .json();
        assert!(reply.get("weight_versions").is_none());
        reply["weight_version"].clone()
    };
    assert_eq!(version(), "default");
    let label = "é".repeat(256);
    for label in ["step-42", &label] {
        let body = json!({ "weight_version": label });
        let answer = post(
            &server,
            "/update_weight_version",
            "control",
            &body.to_string(),
        );
        assert_eq!(answer.json(), body);
        assert_eq!(version(), label);
        assert_eq!(server.get("/weight_info").json()["weight_version"], label);
    }
}

/// Returns the error message with which the server refuses to load the folder `path`.
fn refusal(server: &Server, path: &Path) -> Value {
    let body = json!({ "path": path }).to_string();
    let answer = post(server, "/load_weights", "control", &body);
    assert_eq!(answer.status, 400, "{path:?}");
    answer.json()["error"]["message"].clone()
}

#[test]
fn weights_outside_the_allowed_folders_are_refused() {
    let (allowed, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (allowed, other) = (allowed.path(), other.path());
    std::fs::create_dir(allowed.join("in")).unwrap();
    std::fs::write(allowed.join("file"), "").unwrap();
    std::os::unix::fs::symlink(other, allowed.join("link")).unwrap();
    std::os::unix::fs::symlink(allowed, other.join("back")).unwrap();
    let sibling = format!("{}2", allowed.display());
    let (server, _key) = start(FrontSettings {
        weight_folders: vec![allowed.to_owned()],
        ..settings()
    });
    let (name, of_other) = (allowed.file_name().unwrap(), other.file_name().unwrap());
    for path in [
        other,
        &allowed.join("link"),
        &allowed.join("link/../.."),
        &allowed.join("..").join(of_other),
        &allowed.join("in/../.."),
        &allowed.join("file"),
        &allowed.join("none"),
        sibling.as_ref(),
        name.as_ref(),
        Path::new("/nowhere"),
    ] {
        let why = "path: expected a folder, or a GGUF file, within those that the server allows";
        assert_eq!(refusal(&server, path), why, "{path:?}");
    }
    // The engine of this test takes none: one waits until the end.
    let bodies = [&other.join("back/in"), allowed].map(|path| json!({ "path": path }).to_string());
    std::thread::scope(|scope| {
        let post = |body: &str| post(&server, "/load_weights", "control", body);
        let both = [0, 1].map(|at| {
            let body = &bodies[at];
            scope.spawn(move || post(body))
        });
        let start = Instant::now();
        while !both.iter().any(|one| one.is_finished()) {
            assert!(start.elapsed() < LONG);
            std::thread::yield_now();
        }
        server.front().drain();
        let mut statuses = both.map(|one| one.join().unwrap().status);
        statuses.sort_unstable();
        assert_eq!(statuses, [409, 503]);
    });
}
