//! The arguments for chat templates.

use anyhow::anyhow;
use mpmd_models::{Day, Folder, PromptEncoder};
use serde_json::Value;

/// Arguments for conversations, which a chat template turns into a text.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ChatArgs {
    /// Variable of the chat template, for instance enable_thinking=false; the value is JSON, or
    /// else a text; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub template_arg: Vec<(String, Value)>,
    /// Day that the chat template may tell the model; default: the current one in UTC
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub date: Option<Day>,
    /// Take the texts of special tokens in messages for these tokens. By default they are texts, so
    /// that a message cannot begin another turn
    #[arg(long)]
    pub parse_special: bool,
}

impl ChatArgs {
    /// Reads the tokenizer and the chat templates of a folder.
    ///
    /// # Errors
    ///
    /// If the tokenizer is missing or damaged, or a variable has a name that it cannot have.
    pub(crate) fn prompts(&self, folder: &Folder) -> anyhow::Result<PromptEncoder> {
        let prompts = PromptEncoder::of(folder)?
            .parse_special(self.parse_special)
            .day(self.date);
        let mut variables = self.template_arg.iter();
        variables.try_fold(prompts, |prompts, (name, value)| {
            let prompts = prompts.variable(name, value);
            prompts.map_err(|why| anyhow!("--template-arg {why}"))
        })
    }
}

/// Reads an argument of `--template-arg`.
fn variable(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| "expected NAME=VALUE".to_owned())?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_json_or_texts() {
        for (text, expected) in [
            ("a=false", json!(false)),
            ("a=3", json!(3)),
            ("a=high", json!("high")),
            ("a=\"3\"", json!("3")),
            ("a=", json!("")),
            ("a=b=c", json!("b=c")),
            ("a={\"b\": [1]}", json!({ "b": [1] })),
        ] {
            assert_eq!(variable(text), Ok(("a".to_owned(), expected)), "{text}");
        }
        assert!(variable("a").is_err() && variable("=3").is_err());
    }
}
