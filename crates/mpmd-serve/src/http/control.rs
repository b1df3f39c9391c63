//! The endpoints that control the server: pauses, and the versions of the weights.

use std::path::{Path, PathBuf};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse as _;
use mpmd_models::PublisherState;
use serde_json::{Value, json};

use super::failure::HttpFailure;
use super::fields::Fields;
use super::request_readers::ReadingCost;
use super::routes::{Answer, Shares, parse};
use crate::queue::{Denied, PauseMode, WeightInfo};

/// Largest number of characters in a version's label.
const LABEL: usize = 256;

impl From<Denied> for HttpFailure {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Refused(refused) => refused.into(),
            Denied::Weights(why) => Self::invalid(why),
            denied => Self::new(StatusCode::CONFLICT, denied.to_string()).code("conflict"),
        }
    }
}

/// Handles `/pause`: pauses the server, and answers once the pause is in force.
pub(super) async fn pause(State(shared): Shares, uri: Uri, body: Body) -> Answer {
    let mut mode = None;
    for pair in uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty())
    {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name != "mode" {
            let failure = HttpFailure::field(name, "not supported by this server");
            return Err(failure.code("unsupported_parameter"));
        }
        if mode.is_some() {
            return Err(HttpFailure::field("mode", "expected once, found twice"));
        }
        let wrong = || HttpFailure::field("mode", format!("expected {MODES}, found {value:?}"));
        mode = Some(mode_of(value).ok_or_else(wrong)?);
    }

    let in_body = |body: &[u8], _: &_| {
        let mut fields = Fields::of(if body.is_empty() { b"{}" } else { body })?;
        let mode = fields.take("mode", MODES, |value| mode_of(value.as_str()?))?;
        fields.end().map(|()| mode)
    };

    let mode = mode.or(parse(&shared, body, ReadingCost::Short, in_body).await?);
    shared.queue.pause(mode.unwrap_or(PauseMode::Abort)).await?;
    Ok(Json(json!({ "status": "paused" })).into_response())
}

const MODES: &str = "\"abort\", \"wait\" or \"keep\"";

fn mode_of(word: &str) -> Option<PauseMode> {
    match word {
        "abort" => Some(PauseMode::Abort),
        "wait" => Some(PauseMode::Wait),
        "keep" => Some(PauseMode::Keep),
        _ => None,
    }
}

pub(super) async fn resume(State(shared): Shares) -> Json<Value> {
    shared.queue.resume();
    Json(json!({ "status": "resumed" }))
}

pub(super) async fn is_paused(State(shared): Shares) -> Json<Value> {
    Json(json!({ "is_paused": shared.queue.is_paused() }))
}

pub(super) async fn weight_info(State(shared): Shares) -> Json<Value> {
    let WeightInfo {
        version,
        label,
        old,
        requests,
        failure,
        publisher,
    } = shared.queue.weights();

    let one = |version: u64, label: &str, requests: usize| {
        let mut one = json!({ "version": version, "requests": requests });
        one["weight_version"] = label.into();
        one
    };
    let mut info = one(version, &label, requests[0]);
    info["old"] = old.map_or(Value::Null, |(old, label)| one(old, &label, requests[1]));
    info["failure"] = failure.into();
    if let Some(publisher) = publisher {
        info["publisher"] = match publisher {
            PublisherState::Linked => "linked".into(),
            PublisherState::Unlinked { why } => why.into(),
        };
    }
    Json(info)
}

/// Handles `/update_weight_version`: sets the label of the newest version.
pub(super) async fn update_weight_version(State(shared): Shares, body: Body) -> Answer {
    let label = |body: &[u8], _: &_| {
        let mut fields = Fields::of(body)?;
        let label = fields.text("weight_version")?.unwrap_or_default();
        if !(1..=LABEL).contains(&label.chars().count()) {
            let why = format!("expected a text of 1 to {LABEL} characters");
            return Err(HttpFailure::field("weight_version", why));
        }
        fields.end().map(|()| label)
    };

    let label = parse(&shared, body, ReadingCost::Short, label).await?;
    shared.queue.set_label(&label);
    Ok(Json(json!({ "weight_version": label })).into_response())
}

/// Handles `/load_weights`: loads the weights of a folder or a GGUF file, and answers once they are
/// in use.
pub(super) async fn load_weights(State(shared): Shares, body: Body) -> Answer {
    let weights = shared.weights.clone();
    let path = move |body: &[u8], _: &_| {
        let mut fields = Fields::of(body)?;
        let path = fields.text("path")?.unwrap_or_default();
        fields.end()?;
        allowed(&path, &weights)
    };

    let path = parse(&shared, body, ReadingCost::Short, path).await?;
    let version = shared.queue.load(path).await?;
    let label = shared.queue.weights().label;
    Ok(Json(json!({ "version": version, "weight_version": &*label })).into_response())
}

/// Returns the path of a folder or a GGUF file without symbolic links, if it is one of `folders` or
/// inside one. The error is the same for missing ones and for those elsewhere.
fn allowed(path: &str, folders: &[PathBuf]) -> Result<String, HttpFailure> {
    let is_in = |path: &PathBuf| folders.iter().any(|folder| path.starts_with(folder));
    let is_model = |path: &PathBuf| {
        let is_gguf = path.extension().is_some_and(|end| end == "gguf");
        path.is_dir() || (is_gguf && path.is_file())
    };
    let found = Path::new(path).canonicalize().ok();
    let found = found.filter(|path| is_in(path) && is_model(path));
    let found = found.and_then(|path| path.into_os_string().into_string().ok());
    let wrong = || {
        HttpFailure::field(
            "path",
            "expected a folder, or a GGUF file, within those that the server allows",
        )
    };
    found.ok_or_else(wrong)
}
