//! The connections of clients.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, Request, StatusCode, Version, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::Builder;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::LAST;
use super::failure::HttpFailure;
use super::idle_connections::{ConnectionUse, IdleConnections, LAST_BYTES};
use super::library_answer::{HEAD_BYTES, LibraryAnswers, MOST_HEADERS};
use super::origins::AllowedOrigins;
use super::paced_connection::PacedConnection;
use super::peer_socket::PeerSocket;
use super::request_log::{RequestLog, RequestRecord};
use super::settings::FrontError;
use crate::queue::RequestQueue;

/// Time limit for a client to send the head of a request, including the wait before it.
const HEAD: Duration = Duration::from_secs(30);
/// Longest time for which a client may take no byte of a reply.
const SLOWEST: Duration = Duration::from_secs(30);
/// Time after a failed `accept` until the next attempt.
const AGAIN: Duration = Duration::from_millis(20);
/// Number of descriptors for other uses than connections that may be opened later: files of the
/// model, and links to other processes.
const OTHERS: u64 = 64;

/// Raises the process's limit of open descriptors, if needed, so that `connections` connections fit
/// beside all others.
pub(super) fn reserve_descriptors(connections: usize) -> Result<(), FrontError> {
    let open = std::fs::read_dir("/proc/self/fd")
        .map_err(FrontError::Start)?
        .count() as u64;
    let others = open + OTHERS;
    let needed = others + connections as u64;
    // A limit is absent where there is none.
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }

    if let Some(limit) = maximum.filter(|maximum| *maximum < needed) {
        return Err(FrontError::Descriptors {
            connections,
            needed,
            others,
            limit,
        });
    }
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(needed),
            maximum,
        },
    )
    .map_err(|why| FrontError::Start(why.into()))
}

/// Accepts the connections that `next` returns, until the sender of `ended` is dropped. Then waits
/// for their last bytes.
///
/// If there are more than `most` connections, closes one that is idle.
pub(super) async fn accept(
    mut next: impl FnMut(&mut Context<'_>) -> Poll<io::Result<TcpStream>> + Send,
    most: usize,
    shares: ConnectionShares,
    mut ended: watch::Receiver<()>,
) {
    let permits = Arc::new(Semaphore::new(most));
    let idle = Arc::new(IdleConnections::default());
    let mut has_failed = false;
    loop {
        let accepted = async {
            let stream = poll_fn(&mut next).await?;
            Ok::<_, io::Error>((stream, idle.make_room(&permits).await))
        };
        let accepted = tokio::select! {
            _ = ended.changed() => break,
            accepted = accepted => accepted,
        };

        match accepted {
            Ok((stream, permit)) => {
                has_failed = false;
                let connection_use = ConnectionUse::new(idle.clone());
                let client = ClientConnection {
                    stream,
                    connection_use,
                    shares: shares.clone(),
                };
                let connection = connection(client, ended.clone());
                tokio::spawn(async move {
                    connection.await;
                    drop(permit);
                });
            }
            // The process has no descriptor or memory left, or the client has gone.
            Err(why) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!("a connection cannot be accepted, and is tried again: {why}");
                }
                sleep(AGAIN).await;
            }
        }
    }

    drop(next);
    _ = timeout(
        LAST,
        permits.acquire_many(u32::try_from(most).unwrap_or(u32::MAX)),
    )
    .await;
}

/// The parts of a server that its connections share.
#[derive(Clone)]
pub(super) struct ConnectionShares {
    pub(super) routes: Router,
    pub(super) origins: Arc<AllowedOrigins>,
    /// Has a line for each request.
    pub(super) log: RequestLog,
    /// Counts the answers.
    pub(super) queue: RequestQueue,
}

/// A newly accepted connection.
struct ClientConnection {
    stream: TcpStream,
    connection_use: Arc<ConnectionUse>,
    shares: ConnectionShares,
}

/// Answers the requests of a connection until its end.
async fn connection(client: ClientConnection, mut ended: watch::Receiver<()>) {
    let ClientConnection {
        stream,
        connection_use,
        shares,
    } = client;
    let ConnectionShares {
        routes,
        origins,
        log,
        queue,
    } = shares;
    // Else each event would wait for the acknowledgement of the one before.
    _ = stream.set_nodelay(true);

    let peer = Arc::new(PeerSocket::new(stream));
    let routes = TowerToHyperService::new(routes);
    let asked = peer.clone();
    let used = connection_use.clone();
    let counting = queue.clone();
    let allowed = origins.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let guard = used.begin();
        let record = log.begin(request.method(), request.uri().path());
        let origin = allowed.of_request(request.headers());
        let preflight = allowed.preflight(&request);
        let answer = answer(routes.clone(), asked.clone(), record.clone(), request);
        let counting = counting.clone();
        let allowed = allowed.clone();
        async move {
            let mut reply = match preflight {
                Some(reply) => reply,
                None => answer.await?,
            };
            allowed.name_in(&mut reply, origin);
            counting.count_answer(reply.status());
            record.answer(reply.status());
            Ok::<_, io::Error>(guard.until_end_of(reply, record))
        }
    });
    let paced = PacedConnection::new(peer.clone(), SLOWEST);
    let stream = LibraryAnswers::new(paced, peer.clone(), connection_use.clone(), queue, origins);
    let connection = Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_headers(MOST_HEADERS)
        .max_buf_size(HEAD_BYTES)
        // It is noticed here that a client has left.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);

    // An error is the client's: it has left, or sent no HTTP, which has been answered.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = peer.failure() => return,
        _ = ended.changed() => connection.as_mut().graceful_shutdown(),
        () = connection_use.end() => {
            connection.as_mut().graceful_shutdown();
            // A connection that owes no bytes ends at once, unless its next request is here.
            let last = match connection_use.has_unflushed() {
                true => LAST_BYTES,
                false => Duration::ZERO,
            };
            tokio::select! {
                biased;
                _ = connection.as_mut() => return,
                () = peer.failure() => return,
                () = sleep(last) => {}
            }
            // A request may have come meanwhile.
            if !connection_use.has_request() {
                return;
            }
        }
    }
    tokio::select! {
        _ = connection => {}
        () = peer.failure() => {}
    }
}

/// Answers a request, unless the client leaves before the answer.
async fn answer(
    routes: TowerToHyperService<Router>,
    peer: Arc<PeerSocket>,
    record: Arc<RequestRecord>,
    mut request: Request<Incoming>,
) -> io::Result<Response> {
    let version = request.version();
    let has_body = !request.body().is_end_stream();
    request.extensions_mut().insert(peer.clone());
    request.extensions_mut().insert(record);

    let answer = async {
        match check_head(&request) {
            Ok(()) => routes
                .call(request)
                .await
                .unwrap_or_else(|never: Infallible| match never {}),
            Err(failure) => failure.into_response(),
        }
    };

    tokio::select! {
        biased;
        answer = answer => {
            if has_body && !answer.status().is_success() {
                peer.leave_unread();
            }
            Ok(answer)
        }
        () = peer.leaving(version) => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

/// Returns an error for a wrong number of `Host` headers, or a head that is too large.
fn check_head(request: &Request<Incoming>) -> Result<(), HttpFailure> {
    let headers = request.headers();
    let hosts = headers.get_all(header::HOST).iter().count();
    if hosts > 1 || hosts == 0 && request.version() >= Version::HTTP_11 {
        return Err(HttpFailure::invalid(format!(
            "expected one header `Host`, found {hosts}"
        )));
    }

    let path = request
        .uri()
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    if path + head_bytes(headers) > HEAD_BYTES {
        let why = format!("expected a path and headers of at most {HEAD_BYTES} bytes");
        return Err(HttpFailure::new(
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            why,
        ));
    }
    Ok(())
}

/// Returns the size of headers in bytes. Each has a colon, a blank and a line end.
fn head_bytes(headers: &HeaderMap) -> usize {
    headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::queue::{QueueLimits, queue};

    /// Sends a request, and returns the first line of the answer.
    async fn status(mut client: TcpStream) -> String {
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        client.write_all(request).await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer.lines().next().unwrap_or_default().to_owned()
    }

    fn shares(routes: Router) -> ConnectionShares {
        ConnectionShares {
            routes,
            origins: Arc::new(AllowedOrigins::Any),
            log: RequestLog { is_on: false },
            queue: queue(QueueLimits::default()).0,
        }
    }

    #[tokio::test]
    async fn failed_accepts_are_followed_by_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut failures: VecDeque<io::Error> = [
            io::Error::from_raw_os_error(24),
            io::ErrorKind::ConnectionAborted.into(),
        ]
        .into();
        let next = move |cx: &mut Context<'_>| match failures.pop_front() {
            Some(why) => Poll::Ready(Err(why)),
            None => listener.poll_accept(cx).map_ok(|(stream, _)| stream),
        };
        let routes = Router::new().route("/", get(async || "here"));
        let (end, ended) = watch::channel(());
        let accept = tokio::spawn(accept(next, 1, shares(routes), ended));
        for _ in 0..2 {
            let client = TcpStream::connect(address).await.unwrap();
            let found = timeout(Duration::from_secs(60), status(client)).await;
            assert_eq!(found.expect("an answer"), "HTTP/1.1 200 OK");
        }
        drop(end);
        timeout(Duration::from_secs(60), accept)
            .await
            .expect("it ends")
            .unwrap();
    }

    #[test]
    fn connections_beyond_the_limit_of_files_are_refused() {
        assert!(reserve_descriptors(1).is_ok());
        let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 40);
        let error = reserve_descriptors(limit as usize).unwrap_err().to_string();
        assert!(
            error.contains("raise it (`ulimit -n`), or give fewer connections"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn idle_connections_give_their_places_to_new_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let next =
            move |cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
        let gate = Arc::new(Semaphore::new(0));
        let opened = gate.clone();
        let held = move || {
            let opened = opened.clone();
            async move {
                _ = opened.acquire().await;
                "held"
            }
        };
        let routes = Router::new()
            .route("/", get(async || "here"))
            .route("/held", get(held));
        let (_end, ended) = watch::channel(());
        tokio::spawn(accept(next, 3, shares(routes), ended));

        // One has a request, one has nothing, and one half a head.
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .await
            .unwrap();
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HT").await.unwrap();

        // The time limit for a head is longer.
        let limit = HEAD / 2;
        for _ in 0..2 {
            let client = TcpStream::connect(address).await.unwrap();
            let found = timeout(limit, status(client)).await;
            assert_eq!(found.expect("an answer"), "HTTP/1.1 200 OK");
            // This one keeps a place and has no request any more.
            let mut kept = TcpStream::connect(address).await.unwrap();
            kept.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .await
                .unwrap();
            let mut first = [0; 15];
            let read = timeout(limit, kept.read_exact(&mut first)).await;
            read.expect("an answer").unwrap();
        }

        let ends = timeout(limit, silent.read(&mut [0; 1])).await;
        assert_eq!(ends.expect("it ends").unwrap_or(0), 0);
        gate.add_permits(1);
        let mut first = [0; 15];
        let read = timeout(limit, busy.read_exact(&mut first)).await;
        read.expect("an answer").unwrap();
        assert_eq!(&first, b"HTTP/1.1 200 OK");
    }
}
