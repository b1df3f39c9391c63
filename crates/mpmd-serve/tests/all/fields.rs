//! The fields of requests: values that ask for nothing, and numbers in other spellings.

use serde_json::{Value, json};

use crate::client::Answer;
use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";

/// Sends a chat with a further field.
fn chat_with(server: &Server, field: &str, value: &Value) -> Answer {
    let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    body[field] = value.clone();
    server.post(CHAT, &body)
}

#[test]
fn fields_that_ask_for_nothing_pass() {
    let server = Server::echo();
    for (field, value) in [
        ("add_generation_prompt", json!(true)),
        ("echo", json!(false)),
        ("function_call", json!("none")),
        ("functions", json!([])),
        ("include_stop_str_in_output", json!(false)),
        ("length_penalty", json!(1.0)),
        ("logit_bias", json!({})),
        ("metadata", json!({ "trace": "a" })),
        ("min_tokens", json!(0)),
        ("modalities", json!(["text"])),
        ("model", json!("")),
        ("n", json!(1.0)),
        ("priority", json!(0)),
        ("reasoning_effort", json!("none")),
        ("seed", Value::Null),
        ("skip_special_tokens", json!(true)),
        ("stop_token_ids", json!([])),
        ("store", json!(true)),
        ("stream_options", json!({})),
        ("stream_options", json!({ "include_usage": null })),
        ("stream_options", Value::Null),
        ("unheard_of", json!({})),
        ("use_beam_search", json!(false)),
    ] {
        let answer = chat_with(&server, field, &value);
        assert_eq!(answer.status, 200, "{field}: {value}: {answer:?}");
    }
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let mut body = json!({ "messages": [{ "role": "user", "content": "a" }], "tools": tools });
    assert_eq!(server.post(CHAT, &body).status, 400);
    body["tool_choice"] = json!("none");
    assert_eq!(server.post(CHAT, &body).status, 200);
}

#[test]
fn misspelled_field_is_told_the_right_one() {
    let server = Server::echo();
    for (field, hint) in [
        ("max_token", Some("did you mean max_tokens?")),
        ("temprature", Some("did you mean temperature?")),
        ("top_a", None),
        ("unheard_of", None),
    ] {
        let answer = chat_with(&server, field, &json!(7));
        assert_eq!(answer.status, 400, "{field}: {answer:?}");
        let text = format!("{answer:?}");
        match hint {
            Some(hint) => assert!(text.contains(hint), "{text}"),
            None => assert!(!text.contains("did you mean"), "{text}"),
        }
    }
}

#[test]
fn wishes_that_the_server_cannot_meet_are_named() {
    let server = Server::echo();
    for (field, value) in [
        ("add_generation_prompt", json!(false)),
        ("enable_thinking", json!(false)),
        ("length_penalty", json!(0)),
        ("modalities", json!(["audio"])),
        ("n", json!(2)),
        ("prompt_logprobs", json!(0)),
        ("skip_special_tokens", json!(false)),
        ("temprature", json!(0)),
        ("tool_choice", json!("required")),
        ("web_search_options", json!({})),
    ] {
        let error = chat_with(&server, field, &value).json()["error"].clone();
        assert_eq!(error["param"], field, "{value}: {error}");
        assert_eq!(error["code"], "unsupported_parameter");
    }
}

#[test]
fn options_of_a_stream_may_ask_for_nothing() {
    let server = Server::echo();
    let options = |value: Value| {
        let body = json!({ "prompt": "a", "stream": true, "stream_options": value });
        server.post("/v1/completions", &body)
    };
    for (value, has_usage) in [
        (
            json!({ "include_usage": true, "include_obfuscation": false }),
            true,
        ),
        (
            json!({ "include_usage": true, "include_obfuscation": true }),
            true,
        ),
        (
            json!({ "include_usage": null, "continuous_usage_stats": false }),
            false,
        ),
    ] {
        let last = options(value).chunks().pop().unwrap();
        assert_eq!(last.get("usage").is_some(), has_usage, "{last}");
    }
    for (value, expected) in [
        (json!({ "include_usage": "yes" }), "include_usage: expected"),
        (
            json!({ "continuous_usage_stats": true }),
            "continuous_usage_stats: not supported",
        ),
        (json!([]), "expected an object"),
    ] {
        let error = options(value).json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!(error["param"], "stream_options");
        assert!(
            message.starts_with(&format!("stream_options: {expected}")),
            "{message}"
        );
    }
}

#[test]
fn whole_numbers_may_have_a_fraction_of_zero() {
    let server = Server::echo();
    let body = json!({ "prompt": [5.0, 60.0], "max_tokens": 7.0, "seed": -3.0, "top_k": -1.0,
        "logprobs": 2.0, "n": 1.0 });
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    let tokens = json!({ "tokens": [70.0] });
    assert_eq!(server.post("/detokenize", &tokens).status, 200);
    for (field, value) in [
        ("max_tokens", json!(5.5)),
        ("seed", json!(1e300)),
        ("top_k", json!(0.5)),
        ("prompt", json!([5.5])),
    ] {
        let mut body = json!({ "prompt": [5] });
        body[field] = value;
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.json()["error"]["param"], field);
    }
    let seen = server.end();
    assert_eq!(seen[0].prompt, [5, 60]);
    assert_eq!((seen[0].max_tokens, seen[0].logprobs), (7, Some(2)));
    assert_eq!(seen[0].sampling.seed, (-3i64).cast_unsigned());
}

#[test]
fn all_tokens_that_have_room_are_written_as_minus_one() {
    let server = Server::echo();
    for body in [
        json!({ "prompt": [5, 6], "max_tokens": -1 }),
        json!({ "prompt": [5, 6] }),
    ] {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    let seen = server.end();
    assert_eq!((seen[0].max_tokens, seen[1].max_tokens), (198, 16));
}

#[test]
fn text_that_was_cut_within_a_character_is_answered() {
    let server = Server::echo();
    let body = br#"{"prompt": "cut \ud83d", "max_tokens": 99}"#;
    let reply = server.post_bytes("/v1/completions", body).json();
    assert_eq!(reply["choices"][0]["text"], "cut \u{fffd}");
}

#[test]
fn words_that_are_no_numbers_are_shown_with_their_place() {
    let server = Server::echo();
    let body = br#"{"temperature": NaN, "prompt": "a"}"#;
    let error = server.post_bytes("/v1/completions", body).json()["error"].clone();
    let expected = "temperature: expected JSON: NaN, a number that JSON lacks at line 1 column 17";
    assert_eq!(error["message"], expected);
    assert_eq!(error["param"], "temperature");
}

#[test]
fn model_is_found_by_its_name_alone() {
    let server = Server::echo();
    let model = server.get("/v1/models/toy").json();
    assert_eq!(model, server.get("/v1/models").json()["data"][0]);
    for path in ["/v1/models/toys", "/v1/models/org/toy", "/v1/models/%ff"] {
        let answer = server.get(path);
        let code = answer.json()["error"]["code"].clone();
        assert_eq!(
            (answer.status, code),
            (404, json!("model_not_found")),
            "{path}"
        );
    }
}
