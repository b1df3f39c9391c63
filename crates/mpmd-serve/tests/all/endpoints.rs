//! Every endpoint, and every form of a request.

use mpmd_models::Sampling;
use mpmd_serve::{Finish, TextRequest};
use serde_json::{Value, json};

use crate::server::{Act, POSITIONS, Server, greedy};

/// Removes the fields that differ between equal replies, such as the id.
fn comparable(mut reply: Value) -> Value {
    for (key, prefix) in [("id", "c"), ("created", "")] {
        let removed = reply.as_object_mut().unwrap().remove(key).unwrap();
        assert!(
            removed.is_u64() || removed.as_str().unwrap().starts_with(prefix),
            "{removed}"
        );
    }
    reply
}

#[test]
fn endpoints_without_a_model_answer() {
    let server = Server::echo();
    assert_eq!(server.get("/health").status, 200);
    let version = server.get("/version");
    assert_eq!(
        version.json(),
        json!({ "version": env!("CARGO_PKG_VERSION") })
    );
    assert_eq!(server.get("/ready").status, 200);
    let models = server.get("/v1/models").json();
    assert_eq!(
        (&models["object"], &models["data"][0]["id"]),
        (&json!("list"), &json!("toy"))
    );
    assert_eq!(models["data"][0]["max_model_len"], POSITIONS);
    let page = server.get("/");
    assert!(
        page.header("content-security-policy")
            .unwrap()
            .contains("default-src 'none'")
    );
    assert!(page.body.contains("</html>") && !page.body.contains("https://"));
    let metrics = server.get("/metrics");
    assert!(
        metrics
            .header("content-type")
            .unwrap()
            .starts_with("text/plain; version=0.0.4")
    );
    assert!(
        metrics.body.contains("mpmd_requests_running 0"),
        "{}",
        metrics.body
    );
}

#[test]
fn texts_become_tokens_and_texts_again() {
    let server = Server::echo();
    let tokens = server
        .post("/tokenize", &json!({ "prompt": "one two" }))
        .json();
    let plain = json!({ "model": "toy", "prompt": "one two", "add_special_tokens": false });
    let plain = server.post("/tokenize", &plain).json();
    let list = plain["tokens"].as_array().unwrap();
    assert_eq!(tokens["tokens"].as_array().unwrap()[1..], list[..]);
    assert_eq!(
        (&plain["count"], &plain["max_model_len"]),
        (&json!(list.len()), &json!(POSITIONS))
    );
    let text = server
        .post("/detokenize", &json!({ "tokens": tokens["tokens"] }))
        .json();
    assert_eq!(text, json!({ "prompt": "<s>one two" }));
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
    let chat = server.post("/tokenize", &chat).json();
    let text = server
        .post("/detokenize", &json!({ "tokens": chat["tokens"] }))
        .json();
    assert_eq!(text["prompt"], "<user>Hi<assistant>");
}

#[test]
fn completion_has_the_form_of_openai() {
    let server = Server::echo();
    let body = json!({ "model": "toy", "prompt": "hello", "max_tokens": 50 });
    let reply = server.post("/v1/completions", &body).json();
    assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"));
    let count = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        comparable(reply),
        json!({
            "object": "text_completion",
            "model": "toy",
            "choices": [
                { "index": 0, "text": "hello", "logprobs": null, "finish_reason": "stop" },
            ],
            "weight_version": "default",
            "usage": {
                "prompt_tokens": count,
                "completion_tokens": count,
                "total_tokens": 2 * count,
            },
        })
    );
}

#[test]
fn prompts_may_be_texts_or_tokens_or_lists_of_one() {
    let server = Server::echo();
    let ids = server.post("/tokenize", &json!({ "prompt": "ab" })).json()["tokens"].clone();
    for prompt in [json!("ab"), json!(["ab"]), ids.clone(), json!([ids])] {
        let body = json!({ "prompt": prompt, "return_token_ids": true });
        let reply = server.post("/v1/completions", &body).json();
        assert_eq!(reply["choices"][0]["text"], "ab", "{prompt}");
        assert_eq!(reply["choices"][0]["token_ids"], ids);
        assert_eq!(reply["choices"][0]["prompt_token_ids"], ids);
    }
}

#[test]
fn chat_has_the_form_of_openai() {
    let server = Server::echo();
    let content = json!([{ "type": "text", "text": "H" }, { "type": "text", "text": "i" }]);
    let body = json!({
        "model": "toy",
        "messages": [{ "role": "system", "content": "S" }, { "role": "user", "content": content }],
    });
    let reply = server.post("/v1/chat/completions", &body).json();
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let count = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        comparable(reply),
        json!({
            "object": "chat.completion",
            "model": "toy",
            "choices": [{
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "<system>S<user>Hi<assistant>",
                    "refusal": null,
                },
                "logprobs": null,
                "finish_reason": "stop",
            }],
            "weight_version": "default",
            "usage": {
                "prompt_tokens": count,
                "completion_tokens": count,
                "total_tokens": 2 * count,
            },
        })
    );
}

#[test]
fn logprobs_have_the_two_forms_of_openai() {
    let server = Server::start(|_| Act::Send(vec![69, 71], Finish::Length));
    let text = |id: u32| {
        server
            .post("/detokenize", &json!({ "tokens": [id] }))
            .json()
    };
    let text = |id: u32| text(id)["prompt"].as_str().unwrap().to_owned();
    let (first, second, top) = (text(69), text(71), text(70));
    let body = json!({ "prompt": "a", "logprobs": 1 });
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(
        reply["choices"][0]["logprobs"],
        json!({
            "tokens": [first, second],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{ &first: -0.5, &top: -1.0 }, { &second: -0.5, &top: -1.0 }],
            "text_offset": [0, 1],
        })
    );
    let messages = json!([{ "role": "user", "content": "a" }]);
    let body = json!({ "messages": messages, "logprobs": true, "top_logprobs": 2 });
    let reply = server.post("/v1/chat/completions", &body).json();
    let content = &reply["choices"][0]["logprobs"]["content"];
    assert_eq!(
        content[0],
        json!({
            "token": first,
            "logprob": -0.5,
            "bytes": first.as_bytes(),
            "top_logprobs": [
                { "token": top, "logprob": -1.0, "bytes": top.as_bytes() },
                { "token": second, "logprob": -2.0, "bytes": second.as_bytes() },
            ],
        })
    );
    assert_eq!(content.as_array().unwrap().len(), 2);
}

#[test]
fn settings_reach_the_engine() {
    let server = Server::echo();
    server.post("/v1/completions", &json!({ "prompt": [5], "seed": 3 }));
    server.post(
        "/v1/completions",
        &json!({ "prompt": [5], "seed": -1, "ignore_eos": true }),
    );
    server.post("/v1/completions", &json!({ "prompt": [5] }));
    server.post("/v1/completions", &json!({ "prompt": [5] }));
    let all = json!({
        "messages": [{ "role": "user", "content": "a", "name": null }],
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "seed": u64::MAX,
        "max_tokens": 4,
        "max_completion_tokens": 3,
        "logprobs": true,
        "top_logprobs": 20,
        "n": 1,
        "user": "me",
        "tools": [],
        "stop": null,
    });
    assert_eq!(server.post("/v1/chat/completions", &all).status, 200);
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }] });
    server.post("/v1/chat/completions", &chat);
    let seen = server.end();
    let first = TextRequest {
        prompt: vec![5],
        max_tokens: 16,
        sampling: greedy(3),
        ends: vec![1],
        logprobs: None,
    };
    assert_eq!(seen[0], first);
    assert_eq!(
        seen[1],
        TextRequest {
            sampling: greedy(u64::MAX),
            ends: Vec::new(),
            ..first
        }
    );
    assert_ne!(seen[2].sampling.seed, seen[3].sampling.seed);
    assert_eq!((seen[4].max_tokens, seen[4].logprobs), (3, Some(20)));
    assert_eq!(
        seen[4].sampling,
        Sampling {
            temperature: 0.5,
            top_k: 0,
            top_p: 0.25,
            min_p: 0.125,
            repetition_penalty: 1.5,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            seed: u64::MAX,
        }
    );
    assert_eq!(seen[5].max_tokens, POSITIONS - seen[5].prompt.len());
}

#[test]
fn end_token_is_counted_and_has_no_text() {
    let server = Server::start(|_| Act::Send(vec![70, 1], Finish::Stop));
    let body = json!({ "prompt": "a", "return_token_ids": true });
    let reply = server.post("/v1/completions", &body).json();
    assert_eq!(reply["choices"][0]["token_ids"], json!([70, 1]));
    assert_eq!(reply["usage"]["completion_tokens"], 2);
    assert_eq!(reply["choices"][0]["text"].as_str().unwrap().len(), 1);
}
