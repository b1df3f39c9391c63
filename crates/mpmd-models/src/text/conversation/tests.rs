//! Tests of the reader of conversations.

use super::*;

fn read(messages: &str) -> Result<Vec<Message>, ConversationFault> {
    let object = format!("{{\"messages\": {messages}}}");
    match Conversation::of_json(object.as_bytes()) {
        Ok(conversation) => Ok(conversation.messages),
        Err(ConversationError::Fault(fault)) => Err(fault),
        Err(ConversationError::Json(why)) => panic!("{why}"),
    }
}

/// Returns a message as the template gets it, as JSON in the order of its keys.
fn message(text: &str) -> String {
    let message = read(&format!("[{text}]")).unwrap().remove(0);
    let pairs = message.values.iter();
    let pairs = pairs.map(|(key, value)| format!("{key}={}", json(value)));
    pairs.collect::<Vec<_>>().join(" ")
}

#[test]
fn contents_that_say_the_same_are_alike() {
    let plain = message(r#"{"role": "user", "content": "ab"}"#);
    assert_eq!(plain, r#"role="user" content="ab""#);
    for content in [
        r#"[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]"#,
        r#"["a", "b"]"#,
        r#"[{"type": "input_text", "text": "ab", "cache_control": {"type": "ephemeral"}}]"#,
        r#"[{"type": "text", "text": "ab", "image_url": null}]"#,
    ] {
        let text = format!(r#"{{"role": "user", "content": {content}}}"#);
        assert_eq!(message(&text), plain, "{content}");
    }
    let empty = message(r#"{"role": "user", "content": ""}"#);
    for content in [r#", "content": null"#, r#", "content": []"#, ""] {
        let text = format!(r#"{{"role": "user"{content}}}"#);
        assert_eq!(message(&text), empty, "{content}");
    }
}

#[test]
fn keys_that_say_nothing_are_absent() {
    let reply = r#"{"role": "assistant", "content": "b""#;
    for more in [
        r#""tool_calls": []"#,
        r#""annotations": []"#,
        r#""refusal": """#,
        r#""reasoning_content": """#,
        r#""function_call": null, "audio": null, "id": 0, "meta": {}"#,
    ] {
        let found = message(&format!("{reply}, {more}}}"));
        assert_eq!(found, r#"role="assistant" content="b""#, "{more}");
    }
}

#[test]
fn thoughts_are_found_under_each_key() {
    for more in [
        r#", "content": "b", "reasoning": "hm"}"#,
        r#", "content": "b", "thinking": "hm", "reasoning": ""}"#,
        r#", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]}"#,
        r#", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            "b"]}"#,
    ] {
        let found = read(&format!(r#"[{{"role": "assistant"{more}]"#)).unwrap();
        assert_eq!(found[0].thoughts.as_deref(), Some("hm"), "{more}");
        assert_eq!(found[0].content(), "b", "{more}");
    }
}

#[test]
fn weights_of_replies_are_flags() {
    for (weight, expected) in [
        ("\"weight\": 0", false),
        ("\"weight\": 0.0", false),
        ("\"weight\": 1", true),
        ("\"weight\": null", true),
        ("\"train\": false", false),
        ("\"train\": true", true),
        ("\"train\": true, \"weight\": 0", false),
    ] {
        let text = format!("[{{\"role\": \"assistant\", \"content\": \"b\", {weight}}}]");
        assert_eq!(read(&text).unwrap()[0].has_loss, expected, "{weight}");
    }
    let text = r#"[{"role": "assistant", "content": "b", "weight": 0.5}]"#;
    let said = read(text).unwrap_err().to_string();
    assert_eq!(
        said,
        "messages[0].weight: expected 0 or 1, or true or false, found 0.5"
    );
}

#[test]
fn wrong_values_are_named() {
    for (messages, expected) in [
        ("[]", "messages: expected a list of messages, found []"),
        (
            "[3]",
            "messages[0]: expected an object with role and content, found 3",
        ),
        (r#"[{"content": "a"}]"#, "messages[0].role: expected a text"),
        (
            r#"[{"role": 3}]"#,
            "messages[0].role: expected a text, found 3",
        ),
        (
            r#"[{"role": "user", "content": {"a": 1}}]"#,
            "messages[0].content: expected a text, or a list of objects",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]"#,
            "messages[0].content[0]: expected an object with type \"text\" and text",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "text", "text": "a", "lang": "x"}]}]"#,
            "messages[0].content[0].lang: expected no such key, found \"x\"",
        ),
        (
            r#"[{"role": "user", "content": "a", "name": 5}]"#,
            "messages[0].name: expected a text, found 5",
        ),
        (
            r#"[{"role": "assistant", "thinking": "a", "reasoning": "b"}]"#,
            "messages[0].reasoning: expected the same thoughts",
        ),
        (
            r#"[{"role": "assistant", "tool_calls":
                [{"function": {"name": "f", "arguments": "{\"a\": 1, \"a\": 2}"}}]}]"#,
            "messages[0].tool_calls[0].arguments: expected JSON, found",
        ),
        (
            r#"[{"role": "assistant", "tool_calls": {"a": 1}}]"#,
            "messages[0].tool_calls: expected a list",
        ),
        (
            r#"[{"role": "assistant", "tool_calls": [{"function": {}}]}]"#,
            "messages[0].tool_calls[0]: expected an object with a function",
        ),
    ] {
        let said = read(messages).unwrap_err().to_string();
        assert!(said.starts_with(expected), "{messages}: {said}");
    }
}

#[test]
fn fuzz_conversations() {
    let samples = [
        r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "name": "me",
            "content": [{"type": "text", "text": "Hi", "cache_control": null}, "b"]}],
            "chat_template_kwargs": {"enable_thinking": false}}"#,
        r#"{"messages": [{"role": "assistant", "content": null, "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            "weight": 0, "refusal": ""}, {"role": "tool", "tool_call_id": "1",
            "content": "3"}]}"#,
        r#"{"messages": [{"role": "assistant", "content": [{"type": "thinking",
            "thinking": [{"type": "text", "text": "hm"}]}], "train": true, "x": {"y": []}}]}"#,
    ];
    let samples = samples.map(|sample| sample.as_bytes().to_vec());
    assert!(
        samples
            .iter()
            .all(|sample| Conversation::of_json(sample).is_ok())
    );
    mpmd_fuzz::bytes("conversations", &samples, |object| {
        let Ok(conversation) = Conversation::of_json(object) else {
            return;
        };
        assert!(!conversation.messages.is_empty());
        for message in &conversation.messages {
            assert!(!message.role.is_empty() && message.get("role").is_some());
            assert!(
                message
                    .get("content")
                    .is_some_and(|text| text.as_str().is_some())
            );
            let known = |key: &String| {
                message
                    .get(key)
                    .is_some_and(|value| !asks_for_nothing(&json(value)))
            };
            assert!(message.unknown.iter().all(known), "{message:?}");
        }
    });
}
