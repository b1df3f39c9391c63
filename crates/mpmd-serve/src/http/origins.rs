//! The pages of other servers that may use this one from a browser.
//!
//! A browser asks before it sends a request for a page of another origin (a preflight), and gives
//! the page an answer only if the answer names the page's origin.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse as _, Response};

/// The methods of all endpoints.
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST");
/// Headers of answers that a page may read, beside the usual ones.
const SHOWN: HeaderValue = HeaderValue::from_static("retry-after, www-authenticate");
/// Time for which a browser need not ask again, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");
/// The headers of a request on which every answer depends, and the answer to a preflight.
const VARY: [HeaderValue; 2] = [
    HeaderValue::from_static("origin"),
    HeaderValue::from_static("access-control-request-headers"),
];

/// The origins whose pages may use the server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum AllowedOrigins {
    Any,
    /// These alone. Empty if only the server's own page may.
    Listed(Vec<String>),
}

impl AllowedOrigins {
    /// Reads a list of origins, in which `*` stands for all. Returns the invalid one as an error.
    pub(super) fn of(list: &[String]) -> Result<Self, String> {
        if let Some(wrong) = list.iter().find(|origin| !is_origin(origin)) {
            return Err(wrong.clone());
        }
        match list.iter().any(|origin| origin == "*") {
            true => Ok(Self::Any),
            false => Ok(Self::Listed(list.to_vec())),
        }
    }

    /// True if pages of this origin may use the server.
    pub(super) fn allows(&self, origin: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Listed(list) => list.iter().any(|own| own.eq_ignore_ascii_case(origin)),
        }
    }

    /// Returns the origin of a request, if its pages may use the server.
    pub(super) fn of_request(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let is_allowed = origin.to_str().is_ok_and(|origin| self.allows(origin));
        is_allowed.then(|| origin.clone())
    }

    /// Returns the answer to a preflight, which needs no key. `None` for other requests, and for
    /// pages that may not use the server.
    pub(super) fn preflight<B>(&self, request: &Request<B>) -> Option<Response> {
        let headers = request.headers();
        let is_preflight = request.method() == Method::OPTIONS
            && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        if !is_preflight {
            return None;
        }
        self.of_request(headers)?;

        let mut answer = StatusCode::NO_CONTENT.into_response();
        let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
        let allowed = asked.map(|asked| (header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone()));
        let always = [
            (header::ACCESS_CONTROL_ALLOW_METHODS, METHODS),
            (header::ACCESS_CONTROL_MAX_AGE, MAX_AGE),
            (header::VARY, VARY[1].clone()),
        ];
        answer
            .headers_mut()
            .extend(always.into_iter().chain(allowed));
        Some(answer)
    }

    /// Names the origin of a request in its answer, if its pages may read it. Changes no answer of
    /// a server that only its own page may use.
    pub(super) fn name_in(&self, answer: &mut Response, origin: Option<HeaderValue>) {
        if *self == Self::Listed(Vec::new()) {
            return;
        }
        let headers = answer.headers_mut();
        headers.append(header::VARY, VARY[0].clone());
        if let Some(origin) = origin {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, SHOWN);
        }
    }

    /// Returns the header by which an answer to an unreadable request names an origin. `None` if
    /// the origin could be one of several.
    pub(super) fn of_unreadable(&self) -> Option<(HeaderName, &str)> {
        let origin = match self {
            Self::Any => "*",
            Self::Listed(list) => match &list[..] {
                [one] => one,
                _ => return None,
            },
        };
        Some((header::ACCESS_CONTROL_ALLOW_ORIGIN, origin))
    }
}

/// True for `*`, `null` and a scheme with a host, such as `https://chat.example.org:8080`.
fn is_origin(text: &str) -> bool {
    let is_scheme = |scheme: &str| {
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    let is_host = |host: &str| {
        !host.is_empty()
            && host
                .chars()
                .all(|c| c.is_ascii_graphic() && !"/\\?#@*,".contains(c))
    };
    let parts = text.split_once("://");
    text == "*"
        || text == "null"
        || parts.is_some_and(|(scheme, host)| is_scheme(scheme) && is_host(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_a_host_alone() {
        for origin in [
            "*",
            "null",
            "http://localhost:3000",
            "https://chat.example.org",
            "tauri://localhost",
            "chrome-extension://abcdefgh",
            "http://[::1]:8080",
        ] {
            assert!(AllowedOrigins::of(&[origin.to_owned()]).is_ok(), "{origin}");
        }
        for origin in [
            "",
            "localhost",
            "http://",
            "http://localhost/",
            "http://*.example.org",
            "http://a b",
            "://x",
            "http://a\r\nx: y",
        ] {
            let found = AllowedOrigins::of(&[origin.to_owned()]);
            assert_eq!(found, Err(origin.to_owned()));
        }
    }
}
