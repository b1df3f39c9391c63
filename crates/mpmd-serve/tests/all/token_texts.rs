//! The texts of tokens in replies: behind a prompt, as bytes, and up to stop tokens.

use mpmd_serve::Finish;
use serde_json::{Value, json};

use crate::folder::with_low_lines;
use crate::refusals::param;
use crate::server::{Act, Server, settings};

/// The token of a blank in the folder `plain`; `a` and `b` are tokens 66 and 67.
const BLANK: u32 = 222;
/// The tokens of the bytes of 🙂.
const SMILE: [u32; 4] = [174, 255, 249, 226];
/// The tokens of the bytes of 你.
const YOU: [u32; 3] = [162, 123, 256];

/// Returns the choice of a completion behind the prompt.
fn choice(server: &Server, prompt: &[u32], mut more: Value) -> Value {
    more["prompt"] = json!(prompt);
    let reply = server.post("/v1/completions", &more).json();
    assert!(reply["choices"][0].is_object(), "{reply}");
    reply["choices"][0].clone()
}

#[test]
fn reply_keeps_its_first_blank() {
    let folder = with_low_lines("plain");
    let act = |_: &_| Act::Send(vec![BLANK, 66, BLANK, 67], Finish::Stop);
    let server = Server::start_of(folder.path(), settings(), act);
    let reply = choice(&server, &[0, 66], json!({ "logprobs": 0 }));
    assert_eq!(reply["text"], " a b");
    assert_eq!(reply["logprobs"]["tokens"], json!([" ", "a", " ", "b"]));
    assert_eq!(reply["logprobs"]["text_offset"], json!([0, 1, 2, 3]));
    // Special tokens have no text, so here the reply begins it.
    let reply = choice(&server, &[0], json!({ "logprobs": 0 }));
    assert_eq!(reply["text"], "a b");
    assert_eq!(reply["logprobs"]["tokens"], json!(["", "a", " ", "b"]));
    assert_eq!(reply["logprobs"]["text_offset"], json!([0, 0, 1, 2]));
}

#[test]
fn reply_finishes_the_last_character_of_the_prompt() {
    let server = Server::start(|_| Act::Send(vec![YOU[1], YOU[2], 66], Finish::Stop));
    assert_eq!(choice(&server, &[66, YOU[0]], json!({}))["text"], "你a");
}

#[test]
fn parts_of_characters_are_told_as_bytes() {
    let server = Server::start(|_| Act::Send([&SMILE[..], &[66, 1]].concat(), Finish::Stop));
    let reply = choice(&server, &[66], json!({ "logprobs": 0 }));
    assert_eq!(reply["text"], "🙂a");
    assert_eq!(
        reply["logprobs"]["tokens"],
        json!([
            "bytes:\\xf0",
            "bytes:\\x9f",
            "bytes:\\x99",
            "bytes:\\x82",
            "a",
            "</s>"
        ])
    );
    assert_eq!(reply["logprobs"]["text_offset"], json!([0, 0, 0, 0, 1, 2]));
    let parts = &reply["logprobs"]["top_logprobs"];
    assert_eq!(parts[0], json!({ "bytes:\\xf0": -0.5 }));

    let body = json!({ "messages": [{ "role": "user", "content": "a" }], "logprobs": true });
    let reply = server.post("/v1/chat/completions", &body).json();
    let content = reply["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    let bytes: Vec<&Value> = content.iter().map(|token| &token["bytes"]).collect();
    assert_eq!(
        json!(bytes),
        json!([[0xf0], [0x9f], [0x99], [0x82], [0x61], b"</s>"])
    );
}

#[test]
fn stop_texts_may_be_special_tokens() {
    let server = Server::start(|_| Act::Send(vec![66, 0, 67, 1], Finish::Stop));
    for (stop, text) in [
        (json!("<s>"), "a"),
        (json!("<s>b"), "a"),
        (json!(["x", "a<s>b"]), ""),
    ] {
        let body = json!({ "stop": stop, "return_token_ids": true });
        let reply = choice(&server, &[66], body);
        assert_eq!(
            (&reply["text"], &reply["finish_reason"]),
            (&json!(text), &json!("stop"))
        );
        let seen = reply["token_ids"].as_array().unwrap().len();
        assert!(seen == 2 || seen == 3, "{reply}");
    }
    assert_eq!(
        choice(&server, &[66], json!({ "stop": "<s>x" }))["text"],
        "ab"
    );
}

#[test]
fn stop_tokens_reach_the_engine() {
    let server = Server::start(|_| Act::Send(vec![66, 67], Finish::Stop));
    let body = json!({ "stop_token_ids": [67, 9] });
    assert_eq!(choice(&server, &[66], body)["text"], "a");
    let body = json!({ "stop_token_ids": [67], "ignore_eos": true });
    choice(&server, &[66], body);
    for wrong in [json!([320]), json!(67), json!(["a"]), json!(vec![1; 257])] {
        let body = json!({ "prompt": "a", "stop_token_ids": wrong });
        let answer = server.post("/v1/completions", &body);
        assert_eq!(param(&answer, 400).as_deref(), Some("stop_token_ids"));
    }
    let seen = server.end();
    assert_eq!(seen[0].ends, [1, 67, 9]);
    assert_eq!(seen[1].ends, [67]);
}
