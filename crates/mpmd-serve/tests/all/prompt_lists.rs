//! Requests with several prompts, which get a choice for each.

use mpmd_serve::{FrontSettings, QueueLimits};
use serde_json::{Value, json};

use crate::client::{LONG, connect, write};
use crate::server::{Act, Server, settings};

const COMPLETIONS: &str = "/v1/completions";

#[test]
fn each_prompt_has_a_choice_in_order() {
    let server = Server::echo();
    let body = json!({ "prompt": ["one", [5, 60], "three"], "max_tokens": 50, "logprobs": 1,
        "return_token_ids": true });
    let reply = server.post(COMPLETIONS, &body).json();
    let choices = reply["choices"].as_array().unwrap();
    let texts = |at: usize| choices[at]["text"].as_str().unwrap();
    assert_eq!(choices.len(), 3);
    assert_eq!((texts(0), texts(2)), ("one", "three"));
    let mut tokens = 0;
    for (at, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], at);
        // The engine sends the prompt back.
        assert_eq!(choice["prompt_token_ids"], choice["token_ids"]);
        let count = choice["token_ids"].as_array().unwrap().len();
        let logprobs = &choice["logprobs"]["token_logprobs"];
        assert_eq!(logprobs.as_array().unwrap().len(), count);
        tokens += count;
    }
    let usage = json!({ "prompt_tokens": tokens, "completion_tokens": tokens,
        "total_tokens": 2 * tokens });
    assert_eq!(reply["usage"], usage);
    assert_eq!(reply["weight_version"], "default");
}

#[test]
fn streamed_choices_carry_their_index() {
    let server = Server::echo();
    let body = json!({ "prompt": ["one two", "drei"], "max_tokens": 50, "stream": true,
        "stop": " t", "stream_options": { "include_usage": true } });
    let mut chunks = server.post(COMPLETIONS, &body).chunks();
    let usage = chunks.pop().unwrap();
    let mut texts = [String::new(), String::new()];
    let mut ends = [Value::Null, Value::Null];
    for chunk in &chunks {
        assert_eq!(chunk["id"], usage["id"]);
        let choice = &chunk["choices"][0];
        let at = choice["index"].as_u64().unwrap() as usize;
        texts[at] += choice["text"].as_str().unwrap();
        if !choice["finish_reason"].is_null() {
            ends[at] = choice["finish_reason"].clone();
            assert_eq!(chunk["weight_version"], "default");
        }
    }
    assert_eq!(texts, ["one", "drei"]);
    assert_eq!(ends, ["stop", "stop"]);
    let count = |body: &Value| server.post(COMPLETIONS, body).json()["usage"].clone();
    let whole = count(&json!({ "prompt": ["one two", "drei"], "max_tokens": 50, "stop": " t" }));
    assert_eq!(usage["usage"]["prompt_tokens"], whole["prompt_tokens"]);
}

#[test]
fn bad_prompt_among_good_ones_is_named() {
    let server = Server::echo();
    let long = vec![5; 200];
    for (prompt, param) in [
        (json!(["a", "b", "c", 7]), "prompt[3]"),
        (json!(["a", [5, 320]]), "prompt[1]"),
        (json!([[5], []]), "prompt[1]"),
        (json!([[5], long]), "prompt[1]"),
        (json!(["a", ["b"]]), "prompt[1]"),
        (json!(["a", null]), "prompt[1]"),
        (json!(vec!["a"; 129]), "prompt"),
        (json!([1, "a"]), "prompt"),
    ] {
        let answer = server.post(COMPLETIONS, &json!({ "prompt": prompt }));
        let found = answer.json()["error"]["param"].clone();
        assert_eq!((answer.status, found), (400, json!(param)));
    }
    let several = json!({ "prompt": ["a", "b"], "n": 2 });
    assert_eq!(
        server.post(COMPLETIONS, &several).json()["error"]["param"],
        "n"
    );
    assert!(server.end().is_empty());
}

#[test]
fn prompts_without_a_seed_have_one_each() {
    let server = Server::echo();
    for body in [
        json!({ "prompt": ["a", "a"] }),
        json!({ "prompt": ["a", "a"], "seed": 7 }),
    ] {
        assert_eq!(server.post(COMPLETIONS, &body).status, 200);
    }
    let seeds: Vec<u64> = server.end().iter().map(|ask| ask.sampling.seed).collect();
    assert_ne!(seeds[0], seeds[1]);
    assert_eq!(seeds[2..], [7, 7]);
}

#[test]
fn client_that_leaves_ends_all_its_prompts() {
    let server = Server::start(|request| Act::Stall(request.prompt.clone()));
    for streams in [false, true] {
        let mut stream = connect(server.address);
        let body = json!({ "prompt": ["a", "b", "c"], "stream": streams }).to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
        write(&mut stream, head, body.as_bytes());
        let start = std::time::Instant::now();
        while server.queue.open() < 3 && start.elapsed() < LONG {
            std::thread::yield_now();
        }
        assert_eq!(server.queue.open(), 3);
        drop(stream);
        while server.queue.open() > 0 && start.elapsed() < LONG {
            std::thread::yield_now();
        }
        assert_eq!(server.queue.open(), 0);
    }
}

#[test]
fn prompts_are_taken_together_or_not_at_all() {
    let waiting = QueueLimits {
        requests: 4,
        ..QueueLimits::default()
    };
    let settings = FrontSettings {
        waiting,
        ..settings()
    };
    let server = Server::start_with(settings, |_| Act::Ignore);
    let start = std::time::Instant::now();
    let mut first = connect(server.address);
    let body = json!({ "prompt": ["a", "b"] }).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
    write(&mut first, head, body.as_bytes());
    while server.queue.open() < 2 && start.elapsed() < LONG {
        std::thread::yield_now();
    }
    let refused = server.post(COMPLETIONS, &json!({ "prompt": ["a", "b", "c"] }));
    assert_eq!(refused.status, 429);
    assert_eq!(server.queue.open(), 2);
    // They would never have room.
    let refused = server.post(COMPLETIONS, &json!({ "prompt": ["a", "b", "c", "d", "e"] }));
    assert_eq!(refused.status, 400);
}

#[test]
fn failure_of_one_prompt_ends_the_reply() {
    let server = Server::start(|request| match request.prompt[..] {
        [5] => Act::Fail,
        _ => Act::Stall(Vec::new()),
    });
    let body = json!({ "prompt": [[6], [5]] });
    assert_eq!(server.post(COMPLETIONS, &body).status, 500);
    let body = json!({ "prompt": [[6], [5]], "stream": true });
    let chunks = server.post(COMPLETIONS, &body).chunks();
    let error = &chunks.last().unwrap()["error"]["message"];
    assert_eq!(error, "process 1 has died");
}
