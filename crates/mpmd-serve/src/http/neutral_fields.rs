//! Fields that the server does not support, and their values that ask for nothing.
//!
//! Clients send the fields of other servers with the values that are the default there. Such a
//! request is answered. One that asks for more is refused, with the field's name.

use mpmd_models::asks_for_nothing;
use serde_json::{Value, json};

/// Fields that change no reply: marks for a provider's accounts, records and caches, and figures
/// beside the reply.
const HARMLESS: [&str; 16] = [
    "backend_sampling",
    "cache_prompt",
    "id_slot",
    "keep_alive",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "return_progress",
    "rid",
    "safety_identifier",
    "service_tier",
    "store",
    "timings_per_token",
    "user",
];

/// Fields of a feature that another field turns on, and that is refused there.
const IDLE: [&str; 8] = [
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "mirostat_eta",
    "mirostat_tau",
    "xtc_threshold",
];

/// Numbers that turn their feature off at 0.
const OFF_AT_ZERO: [&str; 20] = [
    "dry_multiplier",
    "dynatemp_range",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "min_length",
    "min_tokens",
    "mirostat",
    "n_cache_reuse",
    "n_discard",
    "n_indent",
    "n_keep",
    "n_probs",
    "no_repeat_ngram_size",
    "penalty_alpha",
    "priority",
    "smoothing_factor",
    "top_a",
    "top_n_tokens",
    "xtc_probability",
];

/// True if a reply without the field `name` is the reply that `value` asks for.
pub(super) fn is_neutral(name: &str, value: &Value) -> bool {
    if value.is_null() || HARMLESS.contains(&name) || IDLE.contains(&name) {
        return true;
    }
    match name {
        "best_of" | "guidance_scale" | "length_penalty" | "n" | "repeat_penalty" | "tfs"
        | "tfs_z" | "typ_p" | "typical" | "typical_p" => value.as_f64() == Some(1.0),
        "repeat_last_n" => value.as_f64() == Some(-1.0),
        "top_n_sigma" => value.as_f64().is_some_and(|sigma| sigma <= 0.0),

        // Their default is true: false asks for something.
        "add_generation_prompt"
        | "detokenize"
        | "include_reasoning"
        | "skip_special_tokens"
        | "spaces_between_special_tokens" => *value == true,
        // The server has neither feature, but models may: false asks them for something.
        "do_sample" | "enable_thinking" | "think" => false,
        // An empty object asks for a search.
        "web_search_options" => false,
        // They belong to the other endpoint.
        "max_completion_tokens" | "messages" | "prompt" => false,

        // Thoughts are part of a reply's text in any case.
        "separate_reasoning" | "stream_reasoning" => value.is_boolean(),
        "reasoning_format" => *value == "auto" || *value == "none",
        "reasoning_effort" => *value == "none" || *value == "",
        "function_call" | "tool_choice" => {
            ["auto", "none", ""].iter().any(|neutral| value == neutral)
        }
        "modalities" => *value == json!(["text"]) || *value == json!([]),
        "response_format" => *value == json!({ "type": "text" }) || asks_for_nothing(value),
        "truncation" => *value == "disabled",
        "verbosity" => *value == "medium",

        _ if OFF_AT_ZERO.contains(&name) => asks_for_nothing(value),
        // It may be a misspelled field at which 0 is a wish, such as `temperature`.
        _ => asks_for_nothing(value) && !value.is_number(),
    }
}

/// True if the field `name` is known as a number of other servers.
pub(super) fn is_of_other_servers(name: &str) -> bool {
    [0, 1].iter().any(|number| is_neutral(name, &json!(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neutral_values_pass_and_wishes_do_not() {
        for (name, neutral, wish) in [
            ("add_generation_prompt", json!(true), json!(false)),
            ("echo", json!(false), json!(true)),
            ("function_call", json!("none"), json!({ "name": "f" })),
            ("functions", json!([]), json!([{ "name": "f" }])),
            ("guided_json", json!(null), json!({ "type": "object" })),
            ("include_stop_str_in_output", json!(false), json!(true)),
            ("length_penalty", json!(1.0), json!(0)),
            ("logit_bias", json!({}), json!({ "5": 1 })),
            ("min_tokens", json!(0), json!(3)),
            ("mirostat", json!(0), json!(2)),
            ("modalities", json!(["text"]), json!(["text", "audio"])),
            ("n", json!(1.0), json!(2)),
            ("priority", json!(0), json!(-1)),
            ("prompt_logprobs", json!(null), json!(0)),
            ("reasoning_effort", json!("none"), json!("low")),
            ("repeat_penalty", json!(1), json!(1.1)),
            (
                "response_format",
                json!({ "type": "text" }),
                json!({ "type": "json_object" }),
            ),
            ("skip_special_tokens", json!(true), json!(false)),
            ("allowed_token_ids", json!([]), json!([1])),
            ("suffix", json!(""), json!("end")),
            ("temprature", json!(null), json!(0)),
            ("think", json!(null), json!(false)),
            ("tool_choice", json!("auto"), json!("required")),
            ("use_beam_search", json!(false), json!(true)),
            ("web_search_options", json!(null), json!({})),
        ] {
            assert!(is_neutral(name, &neutral), "{name}: {neutral}");
            assert!(!is_neutral(name, &wish), "{name}: {wish}");
        }
        assert!(is_of_other_servers("top_a") && is_of_other_servers("typ_p"));
        assert!(!is_of_other_servers("max_token"));
        assert!(is_neutral("store", &json!(true)));
        assert!(is_neutral("user", &json!("me")));
    }
}
