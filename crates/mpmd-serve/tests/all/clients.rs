//! The requests that clients of OpenAI's interface send by default, apart from their messages.

use serde_json::{Value, json};

use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Returns the body of a chat with these fields beside the messages.
fn chat(fields: Value) -> Value {
    let mut body = json!({ "model": "toy", "messages": [{ "role": "user", "content": "a" }] });
    let Value::Object(fields) = fields else {
        unreachable!("an object")
    };
    body.as_object_mut().unwrap().extend(fields);
    body
}

#[test]
fn usual_requests_of_clients_are_answered() {
    let server = Server::echo();
    for (client, path, body) in [
        (
            "openai-python",
            CHAT,
            chat(
                json!({ "temperature": 1.0, "top_p": 1.0, "n": 1, "stream": false, "stop": null,
                "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "user": "u",
                "store": false, "parallel_tool_calls": true, "modalities": ["text"] }),
            ),
        ),
        (
            "openai-python, streamed",
            CHAT,
            chat(
                json!({ "stream": true, "stream_options": { "include_usage": true },
                "service_tier": "auto", "metadata": {}, "max_completion_tokens": 20 }),
            ),
        ),
        (
            "openai-python, completions",
            COMPLETIONS,
            json!({ "model": "toy", "prompt": ["a", "b"], "max_tokens": 16, "temperature": 1,
                "top_p": 1, "n": 1, "best_of": 1, "echo": false, "logprobs": null,
                "suffix": null, "stop": null, "stream": false }),
        ),
        (
            "LiteLLM",
            CHAT,
            chat(
                json!({ "temperature": 0.5, "max_tokens": 20, "stream": false, "tools": null,
                "tool_choice": null, "response_format": null, "extra_body": {}, "seed": null,
                "user": "u", "metadata": { "tags": [] } }),
            ),
        ),
        (
            "LangChain",
            CHAT,
            chat(
                json!({ "n": 1, "temperature": 0.7, "stream": true, "logprobs": null,
                "stop": [], "stream_options": { "include_usage": true } }),
            ),
        ),
        (
            "LangChain, completions",
            COMPLETIONS,
            json!({ "model": "toy", "prompt": ["a", "b", "c"], "temperature": 0.7, "top_p": 1,
                "max_tokens": 20.0, "frequency_penalty": 0, "presence_penalty": 0, "n": 1,
                "seed": null, "logit_bias": {} }),
        ),
        (
            "Open WebUI",
            CHAT,
            chat(
                json!({ "stream": true, "stream_options": { "include_usage": true },
                "max_completion_tokens": 50 }),
            ),
        ),
        (
            "Continue",
            CHAT,
            chat(json!({ "max_tokens": 50, "temperature": 0, "top_p": null,
                "frequency_penalty": null, "presence_penalty": null, "stop": ["</x>"],
                "stream": true, "tools": [], "parallel_tool_calls": false,
                "stream_options": { "include_usage": true } })),
        ),
        (
            "llama.cpp's page",
            CHAT,
            chat(
                json!({ "stream": true, "return_progress": true, "reasoning_format": "auto",
                "temperature": 0.8, "max_tokens": -1, "dynatemp_range": 0,
                "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
                "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": -1,
                "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
                "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
                "dry_penalty_last_n": -1, "backend_sampling": false,
                "timings_per_token": false }),
            ),
        ),
        (
            "vLLM's and SGLang's",
            CHAT,
            chat(
                json!({ "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "stop": [],
                "length_penalty": 1.0, "stop_token_ids": [], "ignore_eos": false,
                "include_stop_str_in_output": false, "min_tokens": 0, "use_beam_search": false,
                "skip_special_tokens": true, "spaces_between_special_tokens": true,
                "add_generation_prompt": true, "continue_final_message": false,
                "guided_json": null, "prompt_logprobs": null, "priority": 0,
                "return_token_ids": null, "separate_reasoning": true, "rid": "1" }),
            ),
        ),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{client}: {answer:?}");
    }
}

#[test]
fn wishes_of_clients_are_refused_by_name() {
    let server = Server::echo();
    for (client, field, value) in [
        ("Ollama's", "think", json!(true)),
        (
            "Continue",
            "prediction",
            json!({ "type": "content", "content": "a" }),
        ),
        (
            "LangChain",
            "response_format",
            json!({ "type": "json_object" }),
        ),
        (
            "llama.cpp's page",
            "samplers",
            json!(["top_k", "temperature"]),
        ),
        (
            "openai-python",
            "audio",
            json!({ "voice": "alloy", "format": "wav" }),
        ),
        ("text-generation-inference's", "do_sample", json!(true)),
        ("vLLM's", "allowed_token_ids", json!([5])),
    ] {
        let answer = server.post(CHAT, &chat(json!({ field: value })));
        let param = answer.json()["error"]["param"].clone();
        assert_eq!((answer.status, param), (400, json!(field)), "{client}");
    }
}
