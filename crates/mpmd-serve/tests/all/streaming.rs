//! Replies that are sent as they come, and the texts that end them.

use std::io::BufReader;

use serde_json::{Value, json};

use crate::client::{connect, read_chunk, read_head, write};
use crate::server::{Act, Server};

fn texts(chunks: &[Value]) -> String {
    let text = |chunk: &Value| chunk["choices"][0]["text"].as_str().unwrap().to_owned();
    chunks.iter().map(text).collect()
}

#[test]
fn streamed_completion_has_the_form_of_openai() {
    let server = Server::echo();
    let options = json!({ "include_usage": true });
    let body = json!({ "prompt": "abc", "stream": true, "stream_options": options,
        "return_token_ids": true });
    let reply = server.post("/v1/completions", &body);
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("text/event-stream"))
    );
    let mut chunks = reply.chunks();
    let usage = chunks.pop().unwrap();
    assert_eq!(usage["choices"], json!([]));
    let count = usage["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(texts(&chunks), "abc");
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["id"] == usage["id"] && chunk["usage"].is_null())
    );
    let ids = |chunk: &Value| chunk["choices"][0]["token_ids"].as_array().unwrap().len();
    assert_eq!(chunks.iter().map(ids).sum::<usize>(), count);
    let prompt = |chunk: &Value| chunk["choices"][0]["prompt_token_ids"].is_array();
    assert!(prompt(&chunks[0]) && !chunks[1..].iter().any(prompt));
    let reasons: Vec<_> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["finish_reason"])
        .collect();
    let (last, before) = reasons.split_last().unwrap();
    assert!(**last == "stop" && before.iter().all(|reason| reason.is_null()));
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["weight_version"], "default");
    assert!(
        before
            .iter()
            .all(|chunk| chunk.get("weight_version").is_none())
    );
    assert!(usage.get("weight_version").is_none());
}

#[test]
fn streamed_chat_begins_with_the_role() {
    let server = Server::echo();
    let messages = json!([{ "role": "user", "content": "a 🙂" }]);
    let body = json!({ "messages": messages, "stream": true, "logprobs": true,
        "return_token_ids": true });
    let chunks = server.post("/v1/chat/completions", &body).chunks();
    let prompt = &server
        .post("/tokenize", &json!({ "messages": messages }))
        .json()["tokens"];
    assert_eq!(&chunks[0]["prompt_token_ids"], prompt);
    assert!(
        chunks[1..]
            .iter()
            .all(|chunk| chunk.get("prompt_token_ids").is_none())
    );
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({ "role": "assistant", "content": "" })
    );
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    let delta = |chunk: &Value| {
        chunk["choices"][0]["delta"]["content"]
            .as_str()
            .map(str::to_owned)
    };
    let text: String = chunks.iter().filter_map(delta).collect();
    assert_eq!(text, "<user>a 🙂<assistant>");
    let entries = |chunk: &Value| {
        chunk["choices"][0]["logprobs"]["content"]
            .as_array()
            .map_or(0, Vec::len)
    };
    let tokenized = server
        .post("/tokenize", &json!({ "messages": messages }))
        .json();
    assert_eq!(
        chunks.iter().map(entries).sum::<usize>() as u64,
        tokenized["count"]
    );
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!(
        (&last["delta"], &last["finish_reason"]),
        (&json!({}), &json!("stop"))
    );
}

#[test]
fn stop_text_is_cut_and_no_part_of_it_is_sent() {
    let server = Server::echo();
    for (prompt, stop, expected, reason) in [
        ("one two three", json!(["two t", "x"]), "one ", "stop"),
        ("one two three", json!("threefold"), "one two three", "stop"),
        ("ein 🙂🙁 Satz", json!("🙁 S"), "ein 🙂", "stop"),
        ("aaab", json!(["aab"]), "a", "stop"),
        ("日本語", json!("本"), "日", "stop"),
    ] {
        let mut body = json!({ "prompt": prompt, "stop": stop, "max_tokens": 99 });
        let whole = server.post("/v1/completions", &body).json();
        assert_eq!(whole["choices"][0]["text"], expected, "{prompt}");
        assert_eq!(whole["choices"][0]["finish_reason"], reason);
        assert_eq!(whole["weight_version"], "default");
        body["stream"] = true.into();
        let chunks = server.post("/v1/completions", &body).chunks();
        assert_eq!(texts(&chunks), expected, "{prompt}");
        assert!(
            chunks
                .iter()
                .all(|chunk| !chunk.to_string().contains('\u{fffd}'))
        );
        assert_eq!(
            chunks.last().unwrap()["choices"][0]["finish_reason"],
            reason
        );
    }
}

#[test]
fn stop_text_ends_a_request_that_would_go_on() {
    let server = Server::start(|request| Act::Stall(request.prompt.clone()));
    let body = json!({ "prompt": "one two", "stop": "tw" });
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(reply["choices"][0]["text"], "one ");
    let metrics = server.queue.metrics();
    assert!(
        metrics.contains("mpmd_requests_ended_total{end=\"stop\"} 1"),
        "{metrics}"
    );
}

#[test]
fn tokens_are_sent_before_the_reply_has_ended() {
    let server = Server::start(|request| Act::Stall(request.prompt.clone()));
    let mut stream = connect(server.address);
    let body = json!({ "prompt": "ab", "stream": true }).to_string();
    write(
        &mut stream,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        body.as_bytes(),
    );
    let mut from = BufReader::new(stream);
    assert!(read_head(&mut from).starts_with("HTTP/1.1 200"));
    let mut text = String::new();
    while !text.contains("\"b\"") {
        text += std::str::from_utf8(&read_chunk(&mut from).unwrap()).unwrap();
    }
    assert!(!text.contains("[DONE]"));
}

#[test]
fn failure_of_the_engine_is_told_in_both_forms() {
    for (act, why) in [
        ((|_| Act::Fail) as fn(&_) -> _, "process 1 has died"),
        (|_| Act::Forget, "the engine has ended"),
    ] {
        let server = Server::start(act);
        let whole = server.post("/v1/completions", &json!({ "prompt": "a" }));
        assert_eq!(
            (whole.status, &whole.json()["error"]["message"]),
            (500, &json!(why))
        );
        let reply = server.post("/v1/completions", &json!({ "prompt": "a", "stream": true }));
        let chunks = reply.chunks();
        let error = &chunks.last().unwrap()["error"];
        assert_eq!(
            (&error["message"], &error["type"]),
            (&json!(why), &json!("server_error"))
        );
    }
}
