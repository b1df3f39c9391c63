//! JSON values that ask for nothing.

use serde_json::Value;

/// True for `null`, `false`, 0, an empty text, an empty list and an empty object.
///
/// Clients write them for keys that they do not use. A reader that does not support a key may
/// skip such a value, unless the key's default is another: there `false` is a wish.
pub fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(keys) => keys.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_empty_values_ask_for_nothing() {
        for value in [
            json!(null),
            json!(false),
            json!(0),
            json!(0.0),
            json!(-0.0),
            json!(""),
            json!([]),
            json!({}),
        ] {
            assert!(asks_for_nothing(&value), "{value}");
        }
        for value in [
            json!(true),
            json!(1),
            json!(1e-300),
            json!(" "),
            json!("0"),
            json!([null]),
            json!({ "a": null }),
        ] {
            assert!(!asks_for_nothing(&value), "{value}");
        }
    }
}
