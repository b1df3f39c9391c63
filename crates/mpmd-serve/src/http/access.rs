//! Access to the server: keys, and requests that a browser sends for pages of other servers.

use std::path::Path;

use axum::http::{HeaderMap, StatusCode, header};
use mpmd::launch::read_private;
use subtle::{Choice, ConstantTimeEq as _};

use super::failure::HttpFailure;
use super::origins::AllowedOrigins;
use super::settings::{FrontError, KeyFile};

/// Limit on the size of a file of keys, in bytes.
const LARGEST_FILE: usize = 64 << 10;

/// The clients that are allowed to use the server.
pub(super) enum Access {
    /// Clients with one of these keys.
    Keys(Vec<String>),
    /// Programs on this host, without a key. In a browser on this host, web pages of other servers
    /// are refused unless their origin is allowed.
    ThisHost(AllowedOrigins),
    /// Every client that can connect.
    All,
}

impl Access {
    /// Reads the keys of a file, one on each line. The file must be readable by its owner only.
    pub(super) fn keys(file: KeyFile, path: &Path) -> Result<Self, FrontError> {
        let invalid = |expected: &str| FrontError::InvalidKeys {
            file,
            path: path.to_owned(),
            expected: expected.to_owned(),
        };

        let name = path.to_str().ok_or_else(|| invalid("a path in UTF-8"))?;
        let text = read_private(name, file.setting(), LARGEST_FILE)
            .map_err(|why| FrontError::UnreadableKeys { file, why })?;
        let text = String::from_utf8_lossy(&text);

        let mut numbered = (1..).zip(text.lines().map(str::trim));
        if let Some((number, _)) = numbered.find(|(_, line)| line.starts_with('#')) {
            let expected =
                format!("a key on each line and no comments, found one on line {number}");
            return Err(invalid(&expected));
        }

        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let keys: Vec<String> = lines.map(str::to_owned).collect();
        if keys.is_empty() {
            return Err(invalid("a key on a line, found none"));
        }
        let is_sendable = |key: &String| key.bytes().all(|byte| byte.is_ascii_graphic());
        if !keys.iter().all(is_sendable) {
            return Err(invalid("keys of ASCII characters without blanks"));
        }
        Ok(Self::Keys(keys))
    }

    /// True if a key is in both sets of keys.
    pub(super) fn shares_a_key_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Keys(own), Self::Keys(others)) => own.iter().any(|key| others.contains(key)),
            _ => false,
        }
    }

    /// Returns an error if the client with these request headers may not use the server.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), HttpFailure> {
        match self {
            Self::Keys(keys) => check_key(keys, headers),
            Self::ThisHost(origins) => check_host(headers, origins),
            Self::All => Ok(()),
        }
    }
}

/// Checks the key of a request. The comparison takes the same time for all keys of equal length.
fn check_key(keys: &[String], headers: &HeaderMap) -> Result<(), HttpFailure> {
    let given = headers
        .get(header::AUTHORIZATION)
        .map_or(&[][..], |value| value.as_bytes());
    let (scheme, key) = given.split_at(given.len().min("Bearer ".len()));
    let key = if scheme.eq_ignore_ascii_case(b"Bearer ") {
        key
    } else {
        &[]
    };

    let equal = keys.iter().map(|own| own.as_bytes().ct_eq(key));
    match equal
        .fold(Choice::from(0), |any, is_equal| any | is_equal)
        .into()
    {
        true => Ok(()),
        false => {
            let why = "expected a key of this server for the endpoint in the header \
                       `Authorization: Bearer`";
            Err(HttpFailure::new(StatusCode::UNAUTHORIZED, why).code("invalid_api_key"))
        }
    }
}

/// Refuses requests that a browser on this host sends for a web page of another server. They have
/// the page's `Origin`, or a `Host` name that the page has pointed at this host.
fn check_host(headers: &HeaderMap, allowed: &AllowedOrigins) -> Result<(), HttpFailure> {
    let text = |name| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap_or_default())
    };

    let Some(host) = text(header::HOST) else {
        return Ok(());
    };
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.parse::<u16>().is_ok());
    let name = name.map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');

    let is_own = name.eq_ignore_ascii_case("localhost")
        || address
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    let is_own_page = |origin: &str| {
        let server = origin.split_once("://").unwrap_or_default().1;
        server.eq_ignore_ascii_case(host)
    };
    let is_allowed = |origin: &str| is_own_page(origin) || allowed.allows(origin);

    match is_own && text(header::ORIGIN).is_none_or(is_allowed) {
        true => Ok(()),
        false => {
            let why = "a page of another server sent this: without API keys only this server's \
                       own page and programs on this host may";
            Err(HttpFailure::new(StatusCode::FORBIDDEN, why).code("other_origin"))
        }
    }
}
