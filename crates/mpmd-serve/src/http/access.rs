//! Access to the server: keys, and requests that a browser sends for pages of other servers.

use std::path::Path;
use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use subtle::ConstantTimeEq as _;

use super::client_key::ClientKey;
use super::failure::HttpFailure;
use super::fields::SHOWN;
use super::key_file::{KeyEntry, KeyFileFault, KeyLimits, read_keys};
use super::origins::AllowedOrigins;
use super::settings::{FrontError, KeyFile};
use crate::queue::RequestQueue;

/// The clients that are allowed to use the server.
pub(super) enum Access {
    /// Clients with one of these keys.
    Keys(Vec<Arc<ClientKey>>),
    /// Programs on this host, without a key. In a browser on this host, web pages of other servers
    /// are refused unless their origin is allowed.
    ThisHost(AllowedOrigins),
    /// Every client that can connect.
    All,
}

impl Access {
    /// Reads the keys of a file. The file must be readable by its owner only.
    pub(super) fn keys(file: KeyFile, path: &Path) -> Result<Self, FrontError> {
        let invalid = |expected: String| FrontError::InvalidKeys {
            file,
            path: path.to_owned(),
            expected,
        };
        let keys = read_keys(file.setting(), path).map_err(|fault| match fault {
            KeyFileFault::Unreadable(why) => FrontError::UnreadableKeys { file, why },
            KeyFileFault::Invalid(expected) => invalid(expected),
        })?;

        let is_limited = |entry: &KeyEntry| entry.limits != KeyLimits::default();
        if file == KeyFile::Control && keys.iter().any(is_limited) {
            return Err(invalid(
                "keys without limits in the file for control".to_owned(),
            ));
        }
        let keys = keys.into_iter().map(ClientKey::new).map(Arc::new);
        Ok(Self::Keys(keys.collect()))
    }

    /// Counts the use of keys with names in the metrics of `queue`.
    pub(super) fn count_in(&self, queue: &RequestQueue) {
        if let Self::Keys(keys) = self {
            keys.iter().for_each(|key| key.count_in(queue));
        }
    }

    /// True if a key is in both sets of keys.
    pub(super) fn shares_a_key_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Keys(own), Self::Keys(others)) => own
                .iter()
                .any(|key| others.iter().any(|other| other.key == key.key)),
            _ => false,
        }
    }

    /// Returns the key of the client with these request headers, if the server has keys.
    ///
    /// # Errors
    ///
    /// If the client may not use the server.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<Option<Arc<ClientKey>>, HttpFailure> {
        match self {
            Self::Keys(keys) => find_key(keys, headers).map(Some),
            Self::ThisHost(origins) => check_host(headers, origins).map(|()| None),
            Self::All => Ok(None),
        }
    }
}

/// Returns the key of a request. The comparison takes the same time for all wrong keys of equal
/// length.
fn find_key(keys: &[Arc<ClientKey>], headers: &HeaderMap) -> Result<Arc<ClientKey>, HttpFailure> {
    let given = headers
        .get(header::AUTHORIZATION)
        .map_or(&[][..], |value| value.as_bytes());
    let (scheme, key) = given.split_at(given.len().min("Bearer ".len()));
    let key = if scheme.eq_ignore_ascii_case(b"Bearer ") {
        key
    } else {
        &[]
    };

    // All keys are compared, also behind the right one.
    let mut found = None;
    for own in keys {
        if own.key.as_bytes().ct_eq(key).into() {
            found = Some(own);
        }
    }
    found.cloned().ok_or_else(|| {
        let given = if key.is_empty() { "none" } else { "another" };
        let why = format!(
            "expected a key of this server for the endpoint in the header `Authorization: \
             Bearer`, found {given}"
        );
        HttpFailure::new(StatusCode::UNAUTHORIZED, why).code("invalid_api_key")
    })
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

    let refused = |why| Err(HttpFailure::new(StatusCode::FORBIDDEN, why).code("other_origin"));
    if !is_own {
        let found: String = host.chars().take(SHOWN).collect();
        return refused(format!(
            "expected localhost or an address of this host in the header `Host`, found {found}: a \
             page of another server could use such a name, unless the server has API keys"
        ));
    }
    match text(header::ORIGIN).is_none_or(is_allowed) {
        true => Ok(()),
        false => refused(
            "a page of another server sent this: without API keys only this server's own page and \
             programs on this host may"
                .to_owned(),
        ),
    }
}
