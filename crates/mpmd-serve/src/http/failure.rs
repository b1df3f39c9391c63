//! Errors, in the form that clients of OpenAI expect.

use std::fmt::Display;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mpmd::launch::printable;
use serde_json::{Value, json};

use crate::queue::Refused;

/// An error reply to a request.
#[derive(Debug)]
pub(super) struct HttpFailure {
    status: StatusCode,
    message: String,
    /// The request field that is invalid. `None` if no single field is.
    param: Option<String>,
    code: Option<&'static str>,
    /// The time after which the client may try again. `None` if no time is known.
    retry: Option<Duration>,
}

impl HttpFailure {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry: None,
        }
    }

    /// Returns the error for a request that is invalid as a whole.
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Returns the error for a request with an invalid field.
    pub(super) fn field(param: impl Into<String>, why: impl Display) -> Self {
        let param = param.into();
        Self {
            param: Some(param.clone()),
            ..Self::invalid(format!("{param}: {why}"))
        }
    }

    /// Returns the error for a fault in the server, with the reason in the message.
    pub(super) fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// Returns the error for a fault in the server. The details are only written to the log.
    pub(super) fn internal(what: &str, details: impl Display) -> Self {
        tracing::error!("{what}: {details}");
        Self::server(format!("{what}: the server's log has the reason"))
    }

    /// Returns the error for a request that the server is too busy to take.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        let failure = Self::new(StatusCode::TOO_MANY_REQUESTS, message);
        failure
            .code("rate_limit_exceeded")
            .retry(Duration::from_secs(1))
    }

    /// Returns the error with the time after which the client may try again.
    pub(super) fn retry(self, retry: Duration) -> Self {
        Self {
            retry: Some(retry),
            ..self
        }
    }

    pub(super) fn status_code(&self) -> StatusCode {
        self.status
    }

    pub(super) fn status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(super) fn code(self, code: &'static str) -> Self {
        Self {
            code: Some(code),
            ..self
        }
    }

    /// Returns the JSON of the error as OpenAI's clients expect it. Escapes control characters,
    /// since clients print texts that may come from the request or the model's files.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let Self {
            message,
            param,
            code,
            ..
        } = self;
        let message = printable(message);
        let param = param.as_deref().map(printable);
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<Refused> for HttpFailure {
    fn from(refused: Refused) -> Self {
        let (status, code, retry) = match refused {
            Refused::Requests { retry, .. } | Refused::Tokens { retry, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", retry)
            }
            Refused::Starting | Refused::Draining | Refused::Failed => (
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                Duration::from_secs(5),
            ),
        };
        Self {
            retry: Some(retry),
            ..Self::new(status, refused.to_string()).code(code)
        }
    }
}

impl IntoResponse for HttpFailure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(retry) = self.retry {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(retry.as_secs()));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
