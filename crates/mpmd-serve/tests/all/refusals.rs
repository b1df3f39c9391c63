//! Everything that is refused, with the field at fault.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use mpmd_models::{Folder, PromptEncoder};
use mpmd_serve::{Front, FrontSettings, Model, QueueLimits};
use serde_json::{Value, json};

use crate::client::{Answer, LONG, connect, read, send, write};
use crate::server::{Act, Server, plain, settings};

/// Checks the status and the form of an error reply. Returns the field at fault.
pub(crate) fn param(answer: &Answer, status: u16) -> Option<String> {
    let body = answer.json();
    assert_eq!(answer.status, status, "{body}");
    let error = body["error"].as_object().unwrap();
    let keys: Vec<&str> = error.keys().map(String::as_str).collect();
    assert_eq!(keys, ["code", "message", "param", "type"]);
    let message = error["message"].as_str().unwrap();
    let param = error["param"].as_str().map(str::to_owned);
    assert!(
        param.iter().all(|param| message.starts_with(param)),
        "{body}"
    );
    param
}

#[test]
fn bodies_that_are_no_object_are_refused() {
    let server = Server::echo();
    let nested = "[".repeat(100_000);
    for body in [
        "",
        "{",
        "[]",
        "7",
        "\"a\"",
        "{\"prompt\": \"a\"} x",
        "\u{0}",
        "{'a': 1}",
        &nested,
    ] {
        for path in [
            "/v1/completions",
            "/v1/chat/completions",
            "/tokenize",
            "/detokenize",
        ] {
            assert_eq!(
                param(&server.post_bytes(path, body.as_bytes()), 400),
                None,
                "{body:.9}"
            );
        }
    }
    let latin = server.post_bytes("/v1/completions", b"{\"prompt\": \"\xff\"}");
    assert_eq!(param(&latin, 400).as_deref(), Some("prompt"));
}

#[test]
fn repeated_keys_are_named() {
    let server = Server::echo();
    let chat = "/v1/chat/completions";
    for (path, body, key) in [
        (
            "/v1/completions",
            r#"{"prompt": "a", "max_tokens": 1, "max_tokens": 1}"#,
            "max_tokens",
        ),
        (
            chat,
            r#"{"messages": [{"role": "user", "content": "a", "role": "system"}]}"#,
            "role",
        ),
        (
            chat,
            r#"{"messages": [{"role": "user", "content": "a", "tool_calls":
                [{"function": {"arguments": {"city": 1, "city": 2}}}]}]}"#,
            "city",
        ),
        ("/tokenize", r#"{"prompt": "a", "prompt": "b"}"#, "prompt"),
        ("/detokenize", r#"{"tokens": [5], "tokens": [6]}"#, "tokens"),
    ] {
        let answer = server.post_bytes(path, body.as_bytes());
        assert_eq!(param(&answer, 400).as_deref(), Some(key), "{body}");
    }
    assert!(server.end().is_empty());
}

#[test]
fn fields_that_are_wrong_are_named() {
    let server = Server::echo();
    let many = vec!["x"; 17];
    for (field, value) in [
        ("prompt", json!(7)),
        ("prompt", json!([])),
        ("prompt", json!([[]])),
        ("prompt", json!([["a"]])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([-1])),
        ("prompt", json!([1.5])),
        ("prompt", json!([320])),
        ("prompt", json!([4294967296u64])),
        ("prompt", json!(vec![5; 200])),
        ("prompt", json!({ "text": "a" })),
        ("prompt", Value::Null),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-2)),
        ("max_tokens", json!(5.5)),
        ("max_tokens", json!("9")),
        ("max_tokens", json!(200)),
        ("max_tokens", json!(u64::MAX)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-2)),
        ("top_k", json!(0.5)),
        ("min_p", json!(2)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(1e-60)),
        ("presence_penalty", json!(2.5)),
        ("frequency_penalty", json!(1e300)),
        ("presence_penalty", json!([])),
        ("frequency_penalty", json!(true)),
        ("seed", json!(0.5)),
        ("seed", json!("s")),
        ("stop", json!("")),
        ("stop", json!([1])),
        ("stop", json!({})),
        ("stop", json!(many)),
        ("stop", json!("x".repeat(257))),
        ("stream", json!("yes")),
        ("stream_options", json!({ "include_usage": true })),
        ("logprobs", json!(21)),
        ("logprobs", json!(true)),
        ("ignore_eos", json!(1)),
        ("return_token_ids", json!("no")),
        ("model", json!(7)),
        ("n", json!(2)),
        ("best_of", json!(3)),
        ("echo", json!(true)),
        ("suffix", json!("end")),
        ("logit_bias", json!({ "5": 1 })),
        ("max_completion_tokens", json!(5)),
        ("messages", json!([])),
        ("temprature", json!(1)),
    ] {
        let mut body = json!({ "prompt": "a" });
        body[field] = value.clone();
        let answer = server.post("/v1/completions", &body);
        assert_eq!(param(&answer, 400).as_deref(), Some(field), "{value}");
    }
    assert!(server.end().is_empty());
}

#[test]
fn fields_of_chats_that_are_wrong_are_named() {
    let server = Server::start_with(
        FrontSettings {
            max_tokens: Some(9),
            ..settings()
        },
        |_| Act::Echo,
    );
    let message = |role: &str, content: Value| json!([{ "role": role, "content": content }]);
    for (field, name, value) in [
        ("messages", "messages", json!([])),
        ("messages", "messages", json!("Hi")),
        ("messages", "messages", Value::Null),
        ("messages", "messages[0]", json!(["Hi"])),
        ("messages", "messages[0].role", json!([{ "content": "Hi" }])),
        ("messages", "messages[0].role", message("king", json!("Hi"))),
        (
            "messages",
            "messages[0].content",
            message("user", json!(true)),
        ),
        ("messages", "messages[0].content", message("user", json!(7))),
        (
            "messages",
            "messages[0].content[0]",
            message("user", json!([{ "type": "image_url" }])),
        ),
        (
            "messages",
            "messages[0].content[0]",
            message("user", json!([{ "text": "Hi" }])),
        ),
        (
            "messages",
            "messages",
            message("tool", json!("the template raises an error")),
        ),
        (
            "messages",
            "messages",
            message("user", json!("long ".repeat(100))),
        ),
        (
            "messages",
            "messages[0].tool_calls[0]",
            json!([{ "role": "assistant", "content": "", "tool_calls": [1] }]),
        ),
        (
            "messages",
            "messages[0].audio",
            json!([{ "role": "user", "content": "", "audio": { "id": "1" } }]),
        ),
        ("date", "date", json!("2024-7-4")),
        (
            "chat_template_kwargs",
            "chat_template_kwargs.messages",
            json!({ "messages": [] }),
        ),
        ("chat_template_kwargs", "chat_template_kwargs", json!([1])),
        (
            "messages",
            "messages[0].name",
            json!([{ "role": "user", "content": "", "name": 1 }]),
        ),
        ("max_tokens", "max_tokens", json!(10)),
        ("max_completion_tokens", "max_completion_tokens", json!(10)),
        ("top_logprobs", "top_logprobs", json!(2)),
        ("logprobs", "logprobs", json!(2)),
        ("tools", "tools", json!([{ "type": "function" }])),
        ("tool_choice", "tool_choice", json!("required")),
        (
            "response_format",
            "response_format",
            json!({ "type": "json_object" }),
        ),
        ("prompt", "prompt", json!("a")),
        ("functions", "functions", json!([{ "name": "f" }])),
    ] {
        let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
        body[field] = value.clone();
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!(param(&answer, 400).as_deref(), Some(name), "{value}");
    }
}

#[test]
fn other_models_and_endpoints_are_not_found() {
    let server = Server::echo();
    let body = json!({ "model": "gpt", "prompt": "a" });
    for path in ["/v1/completions", "/tokenize"] {
        let answer = server.post(path, &body);
        assert_eq!(param(&answer, 404).as_deref(), Some("model"));
        assert_eq!(answer.json()["error"]["code"], "model_not_found");
    }
    assert_eq!(param(&server.get("/v2/models"), 404), None);
    assert_eq!(param(&server.get("/v1/completions"), 405), None);
    assert_eq!(param(&server.post("/v1/models", &body), 405), None);
}

#[test]
fn full_line_is_429_with_a_time() {
    let waiting = QueueLimits {
        requests: 2,
        tokens: 50,
    };
    let server = Server::start_with(
        FrontSettings {
            waiting,
            ..settings()
        },
        |_| Act::Ignore,
    );
    let body = |count: usize| json!({ "prompt": vec![5; count], "stream": true }).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
    let open = |count: usize| {
        let before = server.queue.open();
        let mut stream = connect(server.address);
        write(&mut stream, head, body(count).as_bytes());
        let start = std::time::Instant::now();
        while server.queue.open() == before && start.elapsed() < LONG {
            std::thread::yield_now();
        }
        stream
    };
    let _first = open(40);
    let refused = server.post_bytes("/v1/completions", body(11).as_bytes());
    assert_eq!(param(&refused, 429), None);
    assert!(
        refused
            .header("retry-after")
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= 1
    );
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    let _second = open(10);
    let refused = server.post_bytes("/v1/completions", body(1).as_bytes());
    let error = refused.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        refused.status == 429 && error.contains("2 requests are waiting"),
        "{error}"
    );
    let metrics = server.get("/metrics").body;
    for reason in ["requests", "tokens"] {
        let line = format!("mpmd_requests_rejected_total{{reason=\"{reason}\"}} 1");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

#[test]
fn refusals_have_no_control_characters_of_strangers() {
    let server = Server::echo();
    let messages = json!([{ "role": "tool", "content": "x" }]);
    for body in [
        // The template's own text.
        json!({ "messages": messages }),
        json!({ "messages": [{ "role": "user", "content": "a" }], "\u{9b}2J\u{202e}": 1 }),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        let error = &answer.json()["error"];
        let texts = [&error["message"], &error["param"]].map(|text| text.as_str().unwrap());
        assert!(
            answer.status == 400 && texts[0].contains("\\u009b"),
            "{texts:?}"
        );
        assert!(
            !texts
                .concat()
                .contains(|c: char| c.is_control() || c == '\u{202e}'),
            "{texts:?}"
        );
    }
}

#[test]
fn requests_without_exactly_one_host_are_refused() {
    let server = Server::echo();
    for (head, expected) in [
        ("GET /version HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /version HTTP/1.1\r\n", 400),
        (
            "GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n",
            400,
        ),
        ("GET /version HTTP/1.0\r\n", 200),
        ("GET /version HTTP/1.0\r\nHost: a\r\nHost: b\r\n", 400),
    ] {
        assert_eq!(send(server.address, head, b"").status, expected, "{head}");
    }
}

#[test]
fn body_that_is_announced_as_too_long_is_not_awaited() {
    let server = Server::start_with(
        FrontSettings {
            max_body: 1 << 10,
            ..settings()
        },
        |_| Act::Echo,
    );
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1025\r\n";
    for more in ["", "Expect: 100-continue\r\n"] {
        let mut stream = connect(server.address);
        stream
            .write_all(format!("{head}{more}\r\n").as_bytes())
            .unwrap();
        assert_eq!(param(&read(stream), 413), None, "{more}");
    }
    // One that is sent in any case is read for a while, so that its client gets the answer.
    let long = server.post_bytes("/tokenize", &vec![b' '; 300_000]);
    assert_eq!(param(&long, 413), None);
}

#[test]
fn tokens_that_the_tokenizer_lacks_are_named() {
    let server = Server::echo();
    let answer = server.post("/detokenize", &json!({ "tokens": [5, 123_456, 6] }));
    assert_eq!(param(&answer, 400).as_deref(), Some("tokens"));
    assert!(answer.body.contains("found 123456"), "{answer:?}");
}

#[test]
fn large_bodies_and_heads_are_refused() {
    let server = Server::start_with(
        FrontSettings {
            max_body: 1 << 10,
            ..settings()
        },
        |_| Act::Echo,
    );
    let body = json!({ "prompt": "a".repeat(1024) });
    assert_eq!(server.post("/v1/completions", &body).status, 413);
    let head = "GET /version HTTP/1.1\r\nHost: localhost\r\n";
    let long = format!("{head}X: {}\r\n", "x".repeat(100_000));
    assert_eq!(send(server.address, &long, b"").status, 431);
    let several: String = (0..4)
        .map(|at| format!("X-{at}: {}\r\n", "x".repeat(9_000)))
        .collect();
    assert_eq!(
        send(server.address, &format!("{head}{several}"), b"").status,
        431
    );
    let less: String = (0..3)
        .map(|at| format!("X-{at}: {}\r\n", "x".repeat(9_000)))
        .collect();
    assert_eq!(
        send(server.address, &format!("{head}{less}"), b"").status,
        200
    );
    let many: String = (0..100).map(|at| format!("X-{at}: x\r\n")).collect();
    assert_eq!(
        send(server.address, &format!("{head}{many}"), b"").status,
        431
    );
}

#[test]
fn heads_that_are_no_http_get_json() {
    let server = Server::echo();
    let head = "GET /version HTTP/1.1\r\nHost: localhost\r\n";
    let many: String = (0..100).map(|at| format!("X-{at}: x\r\n")).collect();
    let cases = [
        ("no HTTP\r\n\r\n".to_owned(), 400),
        ("GET /version HTTP/9.9\r\n\r\n".to_owned(), 400),
        (format!("{head}Content-Length: one\r\n\r\n"), 400),
        (format!("{head}{many}\r\n"), 431),
        (format!("{head}X: {}\r\n\r\n", "x".repeat(300_000)), 431),
    ];
    for (bytes, status) in &cases {
        let mut stream = connect(server.address);
        // The server need not read all of it.
        _ = stream.write_all(bytes.as_bytes());
        let answer = read(stream);
        assert_eq!(param(&answer, *status), None, "{bytes:.60}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("connection"), Some("close"));
    }

    // Answers of endpoints before it on the same connection stay as they are.
    let mut stream = connect(server.address);
    let bytes = format!("{head}\r\n{head}\r\nno HTTP\r\n\r\n");
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    let found: Vec<&str> = answers
        .match_indices("HTTP/1.1 ")
        .map(|(at, _)| &answers[at + 9..at + 12])
        .collect();
    assert_eq!(found, ["200", "200", "400"], "{answers}");
    assert!(
        answers.ends_with("\"type\":\"invalid_request_error\"}}"),
        "{answers}"
    );

    let metrics = server.get("/metrics").body;
    for (status, count) in [(200, 2), (400, 4), (431, 2)] {
        let line = format!("mpmd_answers_total{{status=\"{status}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

#[test]
fn body_that_is_too_slow_is_counted_as_408() {
    let server = Server::echo();
    let mut stream = connect(server.address);
    let head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&[b' '; 70_000]).unwrap();
    let answer = read(stream);
    assert_eq!(param(&answer, 408), None);
    assert!(answer.body.contains("the body is slow"), "{answer:?}");
    let metrics = server.get("/metrics").body;
    let line = "mpmd_answers_total{status=\"408\"} 1\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[test]
fn long_text_is_refused_by_its_first_tokens() {
    let server = Server::echo();
    let text = "ab ".repeat(100_000);
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": text })),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": text }] }),
        ),
    ] {
        let answer = server.post(path, &body);
        assert!(param(&answer, 400).is_some());
        assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
        assert!(answer.body.contains("more than 200 tokens"), "{answer:?}");
    }
    // A text without a blank is refused by its length.
    let word = json!({ "prompt": "a".repeat(2_000_000) });
    let start = std::time::Instant::now();
    let answer = server.post("/v1/completions", &word);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    assert!(start.elapsed() < LONG / 20, "{:?}", start.elapsed());
    // Here the number of tokens is the answer.
    let count = server.post("/tokenize", &json!({ "prompt": text })).json();
    assert!(count["count"].as_u64().unwrap() > 100_000);
}

#[test]
fn keys_are_demanded_where_a_file_has_some() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "key-one\n\n  key-two \n").unwrap();
    let api_key_file = Some(file.path().to_owned());
    let server = Server::start_with(
        FrontSettings {
            api_key_file,
            ..settings()
        },
        |_| Act::Echo,
    );
    let get = |path: &str, header: &str| {
        send(
            server.address,
            &format!("GET {path} HTTP/1.1\r\nHost: x\r\n{header}"),
            b"",
        )
    };
    for header in [
        "",
        "Authorization: key-one\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer key-on\r\n",
        "Authorization: Bearer key-one2\r\n",
        "Authorization: Basic key-one\r\n",
    ] {
        for path in ["/v1/models", "/metrics"] {
            let answer = get(path, header);
            assert_eq!(param(&answer, 401), None, "{header}");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    for header in [
        "Authorization: Bearer key-one\r\n",
        "Authorization: bearer key-two\r\n",
    ] {
        assert_eq!(get("/v1/models", header).status, 200);
    }
    for path in ["/", "/health", "/ready", "/version"] {
        assert_eq!(get(path, "").status, 200);
    }
}

#[test]
fn pages_of_other_servers_are_refused_without_keys() {
    let server = Server::echo();
    let status = |headers: &str| {
        send(
            server.address,
            &format!("GET /v1/models HTTP/1.1\r\n{headers}"),
            b"",
        )
        .status
    };
    for (headers, expected) in [
        ("Host: localhost:8000\r\n", 200),
        (
            "Host: 127.0.0.1:8000\r\nOrigin: http://127.0.0.1:8000\r\n",
            200,
        ),
        ("Host: [::1]:8000\r\n", 200),
        ("Host: evil.example:8000\r\n", 403),
        ("Host: 192.0.2.7\r\n", 403),
        (
            "Host: localhost:8000\r\nOrigin: http://evil.example\r\n",
            403,
        ),
        (
            "Host: localhost:8000\r\nOrigin: http://localhost:9000\r\n",
            403,
        ),
        ("Host: localhost:8000\r\nOrigin: null\r\n", 403),
    ] {
        assert_eq!(status(headers), expected, "{headers}");
    }
}

#[test]
fn all_clients_are_let_in_where_the_settings_say_so() {
    let settings = FrontSettings {
        allow_all: true,
        ..settings()
    };
    let server = Server::start_with(settings, |_| Act::Echo);
    for headers in [
        "Host: chat.example.org\r\n",
        "Host: localhost\r\nOrigin: http://evil.example\r\n",
    ] {
        let head = format!("GET /v1/models HTTP/1.1\r\n{headers}");
        assert_eq!(send(server.address, &head, b"").status, 200, "{headers}");
    }
}

#[test]
fn settings_that_let_strangers_in_are_refused() {
    let start = |settings: FrontSettings| {
        let folder = Folder::open(plain()).unwrap();
        let prompts = PromptEncoder::of(&folder).unwrap();
        let model = Model::of(&folder, prompts, None, 99).unwrap();
        let (queue, _) = mpmd_serve::queue(settings.waiting);
        Front::start(&settings, model, queue).map_err(|why| why.to_string())
    };
    let file = |text: &str, mode: u32| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).unwrap();
        file
    };
    let empty = file("", 0o600);
    let one = file("key-one\n", 0o600);
    let commented = file("key-one\n # of the front\n", 0o600);
    let readable = file("key-two\n", 0o644);
    let all_hosts = || FrontSettings {
        host: "0.0.0.0".to_owned(),
        ..settings()
    };
    let with_keys = |path: &Path| FrontSettings {
        api_key_file: Some(path.into()),
        ..settings()
    };
    let controlled = |path: &Path| FrontSettings {
        control_key_file: Some(path.into()),
        ..settings()
    };
    for (settings, expected) in [
        (all_hosts(), "host 0.0.0.0: other hosts can connect"),
        (
            FrontSettings {
                api_key_file: Some(empty.path().into()),
                ..all_hosts()
            },
            "expected a key on a line, found none",
        ),
        (
            with_keys(commented.path()),
            "expected a key on each line and no comments, found one on line 2",
        ),
        (
            with_keys(Path::new("/nowhere")),
            "api_key_file=/nowhere: No such file",
        ),
        (
            with_keys(Path::new("/dev/null")),
            "api_key_file=/dev/null: it is no regular file",
        ),
        (
            with_keys(readable.path()),
            "others can use it, its mode is 0644; make that 0600",
        ),
        (
            controlled(readable.path()),
            "others can use it, its mode is 0644; make that 0600",
        ),
        (
            FrontSettings {
                api_key_file: Some(one.path().into()),
                ..controlled(one.path())
            },
            "found one in both",
        ),
        (
            FrontSettings {
                allow_all: true,
                ..with_keys(one.path())
            },
            "api_key_file and allow_all: expected one of them, found both",
        ),
        (
            FrontSettings {
                max_connections: 1 << 30,
                ..settings()
            },
            "raise it (`ulimit -n`), or give fewer connections",
        ),
        (
            FrontSettings {
                weight_folders: vec!["/nowhere".into()],
                ..settings()
            },
            "weight_folders /nowhere: No such file",
        ),
        (
            FrontSettings {
                host: "no such host".to_owned(),
                ..settings()
            },
            "host no such host",
        ),
    ] {
        let error = start(settings).err().unwrap();
        assert!(error.contains(expected), "{error}");
    }
    let front = start(FrontSettings {
        allow_all: true,
        ..all_hosts()
    })
    .unwrap();
    front.drain();
    front.join();
}
