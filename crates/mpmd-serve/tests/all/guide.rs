//! The guide's tables say what the server has.

use std::collections::BTreeSet;

use mpmd_serve::{EngineFigures, FrontSettings, StageFigures};
use serde_json::json;

use crate::client::send;
use crate::server::{Act, Server, settings};

const GUIDE: &str = include_str!("../../../../docs/guide/serve.md");

/// Returns the words in code style in the first column of the table in a section of the guide.
fn first_column(section: &str) -> BTreeSet<&'static str> {
    let text = GUIDE.split(&format!("\n## {section}\n")).nth(1).unwrap();
    let text = text.split("\n## ").next().unwrap();
    let cells = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    cells
        .flat_map(|cell| cell.split(['`', ',', ' ']))
        .filter(|word| !word.is_empty())
        .collect()
}

#[test]
fn fields_of_the_guide_are_known() {
    let server = Server::echo();
    let fields = first_column("Fields of a request");
    assert_eq!(fields.len(), 24);
    for field in fields {
        let answers = [
            ("/v1/completions", json!({ "prompt": "a" })),
            (
                "/v1/chat/completions",
                json!({ "messages": [{ "role": "user", "content": "a" }] }),
            ),
        ]
        .map(|(path, mut body)| {
            body[field] = match field {
                "chat_template_kwargs" => json!(["no object"]),
                _ => json!({ "no": "value" }),
            };
            server.post(path, &body).json()["error"].clone()
        });
        assert!(
            answers.iter().all(|error| error["param"] == field),
            "{answers:?}"
        );
        let is_known = answers
            .iter()
            .any(|error| error["code"] != "unsupported_parameter");
        assert!(is_known, "{answers:?}");
    }
}

#[test]
fn metrics_of_the_guide_are_those_of_the_server() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "key name=alice").unwrap();
    let settings = FrontSettings {
        api_key_file: Some(key.path().to_owned()),
        ..settings()
    };
    let server = Server::start_with(settings, |_| Act::Echo);
    server.report(EngineFigures {
        stages: vec![StageFigures::default()],
        ..EngineFigures::default()
    });
    let text = server.queue.metrics();
    let types = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    assert_eq!(types.collect::<BTreeSet<&str>>(), first_column("Metrics"));
}

#[test]
fn endpoints_of_the_guide_are_those_of_the_server() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "key").unwrap();
    let control_key_file = Some(key.path().to_owned());
    let settings = FrontSettings {
        control_key_file,
        ..settings()
    };
    let server = Server::start_with(settings, |_| Act::Echo);
    let text = GUIDE
        .split("\n## Endpoints\n")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let rows = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut count = 0;
    for (method, endpoint) in rows.filter_map(|row| row.split_once(' ')) {
        let head = format!("{method} {endpoint} HTTP/1.1\r\nHost: localhost\r\n");
        let answer = send(server.address, &head, b"{}");
        assert!(
            ![404, 405].contains(&answer.status),
            "{method} {endpoint}: {answer:?}"
        );
        count += 1;
    }
    assert_eq!(count, 16);
}
