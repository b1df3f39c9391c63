//! The files of a folder that have its chat templates and special tokens.

use std::collections::BTreeMap;

use mpmd::Result;
use mpmd::train::tensors::read_json;
use serde_json::Value as Json;

use crate::error::unexpected;
use crate::hub::folder::Folder;

/// The names of a folder's two templates: for conversations with tools, and for all others.
pub(super) const NAMES: [&str; 2] = ["tool_use", "default"];
/// The files of the templates [`NAMES`], in newer folders.
pub(crate) const FILES: [&str; 2] = [
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
];
/// The files that may have special tokens. The first and the last may also have templates.
pub(super) const SETTINGS: [&str; 3] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
];
/// The key of the templates in these files.
pub(super) const KEY: &str = "chat_template";

/// Returns the special tokens of a folder by name, such as `eos_token`.
///
/// # Errors
///
/// If a file is damaged.
pub(crate) fn special_tokens(folder: &Folder) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for settings in SETTINGS
        .iter()
        .filter_map(|name| settings(folder, name).transpose())
    {
        for (name, value) in settings?.as_object().into_iter().flatten() {
            let content = value.get("content").unwrap_or(value);
            if let Some(content) = content.as_str().filter(|_| name.ends_with("_token")) {
                all.entry(name.clone())
                    .or_insert_with(|| content.to_owned());
            }
        }
    }
    Ok(all)
}

/// Reads a JSON file of settings. `None` if the folder lacks the file.
fn settings(folder: &Folder, name: &str) -> Result<Option<Json>> {
    if !folder.companions().contains(&name) {
        return Ok(None);
    }
    let failed = |why: &dyn std::fmt::Display| {
        unexpected(&folder.file(name), "", "settings of a tokenizer", why)
    };
    let bytes = folder.small(name).map_err(|why| failed(&why))?;
    read_json(&bytes).map(Some).map_err(|why| failed(&why))
}

/// Returns the source of the template `NAMES[name]`. `None` if the folder has none.
///
/// # Errors
///
/// If a file is damaged.
pub(crate) fn source(folder: &Folder, name: usize) -> Result<Option<String>> {
    if folder.companions().contains(&FILES[name]) {
        let failed = |why: &dyn std::fmt::Display| {
            unexpected(&folder.file(FILES[name]), "", "a chat template", why)
        };
        let bytes = folder.small(FILES[name]).map_err(|why| failed(&why))?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|why| failed(&why));
    }
    for file in SETTINGS {
        let settings = settings(folder, file)?.unwrap_or_default();
        let is_named = |one: &&Json| one["name"] == NAMES[name];
        let found = match &settings[KEY] {
            Json::Array(several) => several.iter().find(is_named).map(|one| &one["template"]),
            one => Some(one).filter(|_| NAMES[name] == "default"),
        };
        if let Some(found) = found.and_then(Json::as_str) {
            return Ok(Some(found.to_owned()));
        }
    }
    Ok(None)
}

/// Returns a template in the form that the engine takes: the tags `generation` and
/// `endgeneration`, an extension of the library `transformers`, become tags of a filter. The flag
/// is true if there were such tags.
pub(super) fn with_filters(source: &str) -> (String, bool) {
    let source = source.replace("\r\n", "\n");
    let mut text = String::new();
    let mut found = false;
    let mut rest = &*source;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        let end = if rest[at..].starts_with("{#") {
            "#}"
        } else {
            "%}"
        };
        let Some(len) = rest[at..].find(end) else {
            break;
        };
        let before = &rest[..at];
        let (tag, after) = rest[at..].split_at(len);

        let name = tag
            .trim_start_matches(['{', '%', '-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        let new = match name {
            "generation" => "filter generation",
            "endgeneration" => "endfilter",
            other => other,
        };

        found |= new != name;
        text += before;
        text += &tag.replacen(name, new, 1);
        rest = after;
    }
    (text + rest, found)
}
