//! The endpoints.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path as UrlPath, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt as _;
use mpmd_base::deadline::after;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::access::Access;
use super::client_key::{ClientKey, KeyPermit};
use super::control::{is_paused, load_weights, pause, resume, update_weight_version, weight_info};
use super::failure::HttpFailure;
use super::fields::Fields;
use super::parsed_request::{
    ParsedRequest, PromptSource, ReplyForm, RequestLimits, chat_source, check_model, other_model,
    tokens,
};
use super::peer_socket::PeerSocket;
use super::prompt_list::read_tokens;
use super::reply_list::ReplyList;
use super::request_log::RequestRecord;
use super::request_readers::{LONG_BODY, ReadingCost, RequestReaders};
use crate::model::Model;
use crate::queue::{RequestQueue, ServerPhase};
use crate::request::TextRequest;

/// The chat page. It loads no other files, and sends requests to this server only.
const PAGE: &str = include_str!("page.html");
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src \
                           'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; \
                           form-action 'none'; frame-ancestors 'none'";
/// Time limit for a client to send the body of a request.
const BODY: Duration = Duration::from_secs(30);

/// Largest total size of all bodies that are being read, in bytes.
const BODIES: usize = 64 << 20;

/// Number of bytes that the sender of a long body must send in each [`BODY_PERIOD`].
const LEAST_BYTES: usize = 64 << 10;
const BODY_PERIOD: Duration = Duration::from_secs(5);

/// The state that all endpoints share.
pub(super) struct EndpointState {
    pub(super) model: Arc<Model>,
    /// A sentence about the model for users.
    pub(super) description: Option<String>,
    pub(super) queue: RequestQueue,
    pub(super) access: Access,
    /// The clients that may control the server. `None` if nobody may.
    pub(super) control: Option<Access>,
    /// The folders from which weights may be loaded, as paths without symbolic links.
    pub(super) weights: Arc<[PathBuf]>,
    /// Largest size of a request's body, in bytes.
    pub(super) body: usize,
    /// One permit for each byte of memory that is free for bodies.
    pub(super) bodies: Arc<Semaphore>,
    pub(super) readers: RequestReaders,
    /// Largest number of new tokens of a request. `None` without a limit.
    pub(super) most: Option<usize>,
}

pub(super) type Answer = Result<Response, HttpFailure>;
pub(super) type Shares = State<Arc<EndpointState>>;

/// Returns the router of all endpoints. The page, `/health`, `/ready` and `/version` need no API
/// key. The endpoints that control the server have a key of their own, and exist only if it is set.
pub(super) fn routes(shared: EndpointState) -> Router {
    let shared = Arc::new(shared);
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/metrics", get(metrics))
        .route("/is_paused", get(is_paused))
        .route("/weight_info", get(weight_info))
        .route_layer(from_fn_with_state(shared.clone(), guard));
    let control = Router::new()
        .route("/pause", post(pause))
        .route("/resume", post(resume))
        .route("/update_weight_version", post(update_weight_version))
        .route("/load_weights", post(load_weights))
        .route_layer(from_fn_with_state(shared.clone(), guard_control));
    let guarded = if shared.control.is_some() {
        guarded.merge(control)
    } else {
        guarded
    };

    let page = [(header::CONTENT_SECURITY_POLICY, PAGE_POLICY)];
    let version = json!({ "version": env!("CARGO_PKG_VERSION") });
    guarded
        .route("/", get(move || async move { (page, Html(PAGE)) }))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/version", get(move || async move { Json(version) }))
        .fallback(async || HttpFailure::new(StatusCode::NOT_FOUND, "there is no such endpoint"))
        .method_not_allowed_fallback(async || {
            let why = "the endpoint has no such method";
            HttpFailure::new(StatusCode::METHOD_NOT_ALLOWED, why)
        })
        .with_state(shared)
}

async fn guard(State(shared): Shares, request: Request, next: Next) -> Response {
    checked(&shared.access, request, next).await
}

async fn guard_control(State(shared): Shares, request: Request, next: Next) -> Response {
    match &shared.control {
        Some(access) => checked(access, request, next).await,
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Answers a request if its client may come in. Tells the endpoint and the log the client's key.
async fn checked(access: &Access, mut request: Request, next: Next) -> Response {
    let key = match access.check(request.headers()) {
        Ok(key) => key,
        Err(failure) => return failure.into_response(),
    };
    let name = key.as_ref().and_then(|key| key.name.as_deref());
    if let (Some(record), Some(name)) = (request.extensions().get::<Arc<RequestRecord>>(), name) {
        record.set_key(name);
    }
    request.extensions_mut().insert(key);
    next.run(request).await
}

async fn health(State(shared): Shares) -> Response {
    match shared.queue.phase() {
        ServerPhase::Failed => ready(State(shared)).await.into_response(),
        ServerPhase::Starting | ServerPhase::Ready | ServerPhase::Draining => {
            StatusCode::OK.into_response()
        }
    }
}

async fn ready(State(shared): Shares) -> (StatusCode, Json<Value>) {
    let (status, word) = match shared.queue.phase() {
        ServerPhase::Ready if shared.queue.is_stalled() => {
            (StatusCode::SERVICE_UNAVAILABLE, "stalled")
        }
        ServerPhase::Ready if shared.readers.is_stuck() => {
            (StatusCode::SERVICE_UNAVAILABLE, "stuck")
        }
        ServerPhase::Ready => (StatusCode::OK, "ready"),
        ServerPhase::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
        ServerPhase::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        ServerPhase::Failed => (StatusCode::SERVICE_UNAVAILABLE, "failed"),
    };
    (status, Json(json!({ "status": word })))
}

async fn metrics(State(shared): Shares) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        shared.queue.metrics(),
    )
}

async fn models(State(shared): Shares) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_facts(&shared)] }))
}

/// Handles `/v1/models/NAME`. The name may have slashes.
async fn model(State(shared): Shares, name: Result<UrlPath<String>, PathRejection>) -> Answer {
    match name {
        Ok(UrlPath(name)) if name == shared.model.name => {
            Ok(Json(model_facts(&shared)).into_response())
        }
        _ => Err(other_model(&shared.model)),
    }
}

/// Returns the facts about the model that clients see.
fn model_facts(shared: &EndpointState) -> Value {
    let Model {
        name,
        created,
        positions,
        ..
    } = &*shared.model;
    let mut model = json!({ "id": name, "object": "model", "created": created,
        "owned_by": "mpmd", "max_model_len": positions });
    if let Some(description) = &shared.description {
        model["description"] = description.as_str().into();
    }
    model
}

type Client = Extension<Arc<PeerSocket>>;
type Record = Extension<Arc<RequestRecord>>;
/// The key of a request. `None` if the server has no keys.
type RequestKey = Extension<Option<Arc<ClientKey>>>;

/// The parts of a request beside its body.
type RequestParts = (Client, Record, RequestKey);

async fn completions(shared: Shares, parts: RequestParts, body: Body) -> Answer {
    reply(shared, parts, body, ReplyForm::Completion).await
}

async fn chat(shared: Shares, parts: RequestParts, body: Body) -> Answer {
    reply(shared, parts, body, ReplyForm::Chat).await
}

async fn reply(
    State(shared): Shares,
    (Extension(client), Extension(record), Extension(key)): RequestParts,
    body: Body,
    form: ReplyForm,
) -> Answer {
    let queue = &shared.queue;
    let most_at_once = key.as_ref().map_or(usize::MAX, |key| key.most_requests());
    let limits = RequestLimits {
        tokens: shared.most,
        waiting: queue.limits().requests.min(most_at_once),
    };
    // Before the body is read, since that is work, too.
    let permit = key.map(|key| key.admit(queue)).transpose()?;
    let cost = match form {
        ReplyForm::Completion => ReadingCost::Short,
        ReplyForm::Chat => ReadingCost::Template,
    };
    let asks = parse(&shared, body, cost, move |body, model| {
        ParsedRequest::of(body, form, model, limits)
    })
    .await?;

    let requests: Vec<TextRequest> = asks.iter().map(|ask| ask.request.clone()).collect();
    let prompt_tokens = requests.iter().map(|request| request.prompt.len()).sum();
    let begin = |permit: KeyPermit| permit.begin(asks.len(), prompt_tokens, queue);
    let permits = permit.map(begin).transpose()?;
    let streams = queue.submit_all(requests)?;
    let is_streamed = asks[0].streams;
    let mut reply = ReplyList::new(&shared.model, asks, streams, &record)?;
    reply.hold(permits.unwrap_or_default());
    if is_streamed {
        Ok(reply.events(client))
    } else {
        reply.whole().await
    }
}

async fn tokenize(State(shared): Shares, body: Body) -> Answer {
    let count = |body: &[u8], model: &Model| {
        let mut fields = Fields::of(body)?;
        check_model(&mut fields, model)?;
        let special = fields.flag("add_special_tokens", true)?;
        let source = match fields.text("prompt")? {
            Some(text) => PromptSource::Text { text, special },
            None => chat_source(&mut fields)?,
        };
        fields.end()?;

        let tokens = match &source {
            PromptSource::Text { text, .. } if text.is_empty() && !special => Vec::new(),
            source => tokens(source, "prompt", model, None)?,
        };
        let count = tokens.len();
        let most = model.positions;
        Ok(json!({ "count": count, "max_model_len": most, "tokens": tokens }))
    };
    Ok(Json(parse(&shared, body, ReadingCost::Template, count).await?).into_response())
}

async fn detokenize(State(shared): Shares, body: Body) -> Answer {
    let text = |body: &[u8], model: &Model| {
        let mut fields = Fields::of(body)?;
        check_model(&mut fields, model)?;
        let tokens = fields.take("tokens", "a list of tokens", read_tokens)?;
        let tokens =
            tokens.ok_or_else(|| HttpFailure::field("tokens", "expected a list of tokens"))?;
        fields.end()?;
        if let Some(token) = tokens.iter().find(|token| !model.decoder.knows(**token)) {
            let why = format!("expected tokens of the model's tokenizer, found {token}");
            return Err(HttpFailure::field("tokens", why));
        }
        let text = model
            .decoder
            .text(&tokens)
            .map_err(|why| HttpFailure::field("tokens", why))?;
        Ok(json!({ "prompt": text }))
    };
    Ok(Json(parse(&shared, body, ReadingCost::Short, text).await?).into_response())
}

/// Reads a body, and calls `read` with it on a thread that reads requests.
pub(super) async fn parse<T: Send + 'static>(
    shared: &EndpointState,
    body: Body,
    cost: ReadingCost,
    read: impl FnOnce(&[u8], &Model) -> Result<T, HttpFailure> + Send + 'static,
) -> Result<T, HttpFailure> {
    let late = |_| {
        let why = format!("the body did not come within {} seconds", BODY.as_secs());
        HttpFailure::new(StatusCode::REQUEST_TIMEOUT, why)
    };

    let limits = BodyLimits {
        most: shared.body,
        memory: &shared.bodies,
        queue: &shared.queue,
        period: BODY_PERIOD,
    };
    let (bytes, held) = timeout(BODY, bytes(body, limits)).await.map_err(late)??;
    let model = shared.model.clone();
    let length = bytes.len();
    let read = move || {
        let result = read(&bytes, &model);
        drop((bytes, held));
        result
    };
    shared.readers.read(cost, length, read).await
}

/// The limits on the body of a request.
struct BodyLimits<'a> {
    /// Largest size of the body, in bytes.
    most: usize,
    /// One permit for each byte of memory that is free for bodies.
    memory: &'a Arc<Semaphore>,
    /// Counts requests that are refused because no memory is free for their bodies.
    queue: &'a RequestQueue,
    /// The time in which a long body must bring [`LEAST_BYTES`] bytes.
    period: Duration,
}

/// Reads a body, and returns its bytes with the permits for their memory. Refuses a body whose
/// announced length is too large.
async fn bytes(
    body: Body,
    limits: BodyLimits<'_>,
) -> Result<(Vec<u8>, Vec<OwnedSemaphorePermit>), HttpFailure> {
    let BodyLimits {
        most,
        memory,
        queue,
        period,
    } = limits;
    let too_long = || {
        let why = format!("the body: expected at most {most} bytes");
        HttpFailure::new(StatusCode::PAYLOAD_TOO_LARGE, why)
    };
    let slow = || {
        let bytes = LEAST_BYTES >> 10;
        let seconds = period.as_secs();
        let why = format!("the body is slow: expected {bytes} KiB within {seconds} seconds");
        HttpFailure::new(StatusCode::REQUEST_TIMEOUT, why)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_long());
    }

    let mut parts = body.into_data_stream();
    let mut bytes = Vec::new();
    let mut held = Vec::new();
    let mut until = end_of(period);
    let mut due = LEAST_BYTES;
    loop {
        // Short bodies of all connections together leave memory for others.
        let part = match bytes.len() > LONG_BODY {
            true => timeout_at(until, parts.next()).await.map_err(|_| slow())?,
            false => parts.next().await,
        };
        let Some(part) = part else { break };
        let part = part.map_err(|why| HttpFailure::invalid(format!("the body: {why}")))?;
        if bytes.len() + part.len() > most {
            return Err(too_long());
        }

        let permits = u32::try_from(part.len()).unwrap_or(u32::MAX);
        let permit = memory.clone().try_acquire_many_owned(permits);
        let full = |_| {
            queue.refuse("bodies");
            HttpFailure::busy("the bodies of other requests take all memory for them")
        };
        held.push(permit.map_err(full)?);
        bytes.extend_from_slice(&part);
        if bytes.len() >= due {
            until = end_of(period);
            due = bytes.len() + LEAST_BYTES;
        }
    }
    Ok((bytes, held))
}

/// Returns the time at which a period that begins now will end.
fn end_of(period: Duration) -> Instant {
    Instant::from_std(after(Instant::now().into_std(), period))
}

/// Returns a semaphore with one permit for each byte of [`BODIES`].
pub(super) fn bodies() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(BODIES))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use tokio::time::sleep;

    use super::*;
    use crate::queue::{QueueLimits, queue};

    /// The time limit of a test.
    const LONG: Duration = Duration::from_secs(60);

    /// Returns a body that brings these numbers of bytes, and ends or stays open.
    fn body(parts: &[usize], ends: bool) -> Body {
        let parts: Vec<_> = parts
            .iter()
            .map(|bytes| Ok::<_, Infallible>(vec![b' '; *bytes]))
            .collect();
        match ends {
            true => Body::from_stream(stream::iter(parts)),
            false => Body::from_stream(stream::iter(parts).chain(stream::pending())),
        }
    }

    /// Reads a body with room for 256 KiB. Returns its length, or the status of its refusal.
    async fn read(
        body: Body,
        memory: &Arc<Semaphore>,
        queue: &RequestQueue,
    ) -> Result<usize, StatusCode> {
        let limits = BodyLimits {
            most: 256 << 10,
            memory,
            queue,
            period: Duration::from_millis(20),
        };
        let read = timeout(LONG, bytes(body, limits)).await;
        match read.expect("it ends") {
            Ok((bytes, _)) => Ok(bytes.len()),
            Err(failure) => Err(failure.into_response().status()),
        }
    }

    #[tokio::test]
    async fn slow_long_body_gives_up_its_memory() {
        let memory = Arc::new(Semaphore::new(256 << 10));
        let (queue, _arrivals) = queue(QueueLimits::default());
        let half = read(body(&[200 << 10], false), &memory, &queue).await;
        assert_eq!(half, Err(StatusCode::REQUEST_TIMEOUT));
        assert_eq!(memory.available_permits(), 256 << 10);
        let whole = read(body(&[60 << 10; 4], true), &memory, &queue).await;
        assert_eq!(whole, Ok(240 << 10));
    }

    #[tokio::test]
    async fn short_body_may_be_slow() {
        let memory = Arc::new(Semaphore::new(256 << 10));
        let (queue, _arrivals) = queue(QueueLimits::default());
        let parts = stream::unfold(0, async |sent| {
            sleep(Duration::from_millis(30)).await;
            (sent < 4).then(|| (Ok::<_, Infallible>(vec![b' '; 1000]), sent + 1))
        });
        let found = read(Body::from_stream(parts), &memory, &queue).await;
        assert_eq!(found, Ok(4000));
    }

    #[tokio::test]
    async fn bodies_without_memory_are_counted() {
        let memory = Arc::new(Semaphore::new(10));
        let (queue, _arrivals) = queue(QueueLimits::default());
        let found = read(body(&[20], true), &memory, &queue).await;
        assert_eq!(found, Err(StatusCode::TOO_MANY_REQUESTS));
        let counted = "mpmd_requests_rejected_total{reason=\"bodies\"} 1";
        assert!(queue.metrics().contains(counted), "{}", queue.metrics());
    }
}
