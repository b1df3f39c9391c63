//! The front of a server: HTTP with the interface of OpenAI, on threads of its own.

mod access;
mod client_key;
mod connection;
mod control;
mod failure;
mod fields;
mod idle_connections;
mod key_file;
mod library_answer;
mod neutral_fields;
mod origins;
mod paced_connection;
mod parsed_request;
mod peer_socket;
mod prompt_list;
mod reply;
mod reply_list;
mod request_log;
mod request_readers;
mod request_settings;
mod routes;
mod settings;
mod token_logprobs;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Context;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mpmd::launch::stop_signals;
use mpmd_base::block::Mutex;
use mpmd_base::{StopRequest, StopRequests};
use tokio::net::TcpSocket;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::log_target::LOG_TARGET;
use crate::model::Model;
use crate::queue::{RequestQueue, ServerPhase};
use connection::{ConnectionShares, accept, reserve_descriptors};
use request_log::RequestLog;
use request_readers::{READER_THREADS, RequestReaders};
use routes::{EndpointState, bodies, routes};
pub use settings::{FrontError, FrontSettings, KeyFile};

/// Number of threads for connections.
const THREADS: usize = 2;
/// Largest number of connections that the system holds before they are accepted.
const BACKLOG: u32 = 1024;
/// Size of the system's send buffer for each connection, in bytes.
const BUFFER: u32 = 64 << 10;
/// Time limit for connections to close after their last reply.
const LAST: Duration = Duration::from_secs(2);

/// The HTTP front of a server, on threads of its own. It runs until the server is drained.
pub struct Front {
    address: SocketAddr,
    signals: watch::Sender<u32>,
    /// The runtime of the threads. `None` once signals are caught.
    uncaught: Option<Handle>,
    thread: JoinHandle<()>,
}

impl Front {
    /// Listens and answers requests. From now on [signals](mpmd::launch::stop_signals) drain the
    /// server. A second SIGTERM or SIGINT, at least two seconds later, also ends the open requests.
    ///
    /// # Errors
    ///
    /// As for [`listen`](Self::listen).
    pub fn start(
        settings: &FrontSettings,
        model: Model,
        queue: RequestQueue,
    ) -> Result<Self, FrontError> {
        let mut front = Self::listen(settings, model, queue)?;
        front.catch_signals().map_err(FrontError::Start)?;
        Ok(front)
    }

    /// Listens and answers requests. Until the queue is open, replies say that the server is
    /// starting. Does not catch signals: see [`catch_signals`](Self::catch_signals).
    ///
    /// # Errors
    ///
    /// If the keys cannot be read, or the address cannot be listened on. If other hosts could
    /// connect although the settings do not allow it. If the process may not open enough
    /// descriptors for all connections.
    pub fn listen(
        settings: &FrontSettings,
        model: Model,
        queue: RequestQueue,
    ) -> Result<Self, FrontError> {
        let doors = settings.doors()?;
        reserve_descriptors(settings.max_connections)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(READER_THREADS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(FrontError::Start)?;

        let address = doors.address;
        let listen_failed = |why| FrontError::Listen { address, why };
        let listener = {
            let _entered = runtime.enter();
            bind(address)?.listen(BACKLOG).map_err(listen_failed)?
        };
        let address = listener.local_addr().map_err(listen_failed)?;

        doors.access.count_in(&queue);
        let origins = Arc::new(doors.origins);
        let routes = routes(EndpointState {
            model: Arc::new(model),
            description: settings.description.clone(),
            queue: queue.clone(),
            access: doors.access,
            control: doors.control,
            weights: doors.weights.into(),
            body: usize::try_from(settings.max_body).unwrap_or(usize::MAX),
            bodies: bodies(),
            readers: RequestReaders::default(),
            most: settings.max_tokens,
        });

        let log = RequestLog {
            is_on: settings.request_log,
        };
        let connections = settings.max_connections;
        let drain = settings.drain;
        let signals = watch::Sender::new(0);
        let asked = signals.subscribe();
        let uncaught = Some(runtime.handle().clone());

        let serve = move || {
            let (end, ended) = watch::channel(());
            let next = move |cx: &mut Context<'_>| {
                let accepted = listener.poll_accept(cx);
                accepted.map_ok(|(stream, _)| stream)
            };
            let shares = ConnectionShares {
                routes,
                origins,
                log,
                queue: queue.clone(),
            };
            let accept = accept(next, connections, shares, ended);
            let accept = runtime.spawn(accept);
            runtime.block_on(drained(&queue, asked, drain));
            drop(end);
            // Has no error but a panic.
            _ = runtime.block_on(accept);
            runtime.shutdown_timeout(LAST);
            if queue.phase() != ServerPhase::Failed {
                tracing::info!(target: LOG_TARGET, "drained: the server ends");
            }
        };

        let thread = std::thread::Builder::new()
            .name("front".to_owned())
            .spawn(serve);
        let thread = thread.map_err(FrontError::Start)?;
        Ok(Self {
            address,
            signals,
            uncaught,
            thread,
        })
    }

    /// Drains the server at SIGTERM, SIGINT, SIGHUP (unless it is ignored), SIGUSR1 and SIGUSR2
    /// from now on. A second SIGTERM or SIGINT, at least two seconds later, also ends the open
    /// requests. Calling this again does nothing.
    ///
    /// # Errors
    ///
    /// If the system does not let the process catch these signals.
    pub fn catch_signals(&mut self) -> io::Result<()> {
        let Some(threads) = self.uncaught.take() else {
            return Ok(());
        };
        catch_signals(&threads, &self.signals)
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses new requests, and ends the server once the open ones have ended or failed. A second
    /// call fails the open requests at once.
    pub fn drain(&self) {
        self.signals.send_modify(|count| *count += 1);
    }

    /// Blocks until the server is drained.
    pub fn join(self) {
        // A panic was printed.
        _ = self.thread.join();
    }
}

/// Returns a TCP socket bound to `address`.
fn bind(address: SocketAddr) -> Result<TcpSocket, FrontError> {
    let bind = || -> io::Result<TcpSocket> {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_reuseaddr(true)?;
        // Connections inherit it.
        socket.set_send_buffer_size(BUFFER)?;
        socket.bind(address)?;
        Ok(socket)
    };
    bind().map_err(|why| FrontError::Listen { address, why })
}

/// Counts the requests to end the server in `count`, at each [signal](stop_signals) that asks for
/// it: the first is 1, each further one by SIGTERM or SIGINT 2.
fn catch_signals(runtime: &Handle, count: &watch::Sender<u32>) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let _entered = runtime.enter();
    let requests = Arc::new(Mutex::new(StopRequests::default()));
    let ending = [SignalKind::terminate(), SignalKind::interrupt()];

    for kind in stop_signals().into_iter().map(SignalKind::from_raw) {
        let mut signal = signal(kind)?;
        let count = count.clone();
        let requests = requests.clone();
        runtime.spawn(async move {
            while signal.recv().await.is_some() {
                // The others come several times for one reason, such as a closed terminal.
                let again = ending.contains(&kind)
                    && requests.lock().take(Instant::now()) == StopRequest::Again;
                let asked = if again { 2 } else { 1 };
                count.send_modify(|count| *count = asked.max(*count));
            }
        });
    }
    Ok(())
}

/// Waits for the first request to drain the server, then until no client is left. Waits for the
/// clients for `longest` at most.
async fn drained(queue: &RequestQueue, mut asked: watch::Receiver<u32>, longest: Duration) {
    // The sender is never dropped before.
    _ = asked.wait_for(|count| *count > 0).await;
    let empty = async || {
        while queue.open() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    if queue.phase() == ServerPhase::Failed {
        // The clients read the errors.
        _ = timeout(LAST, empty()).await;
        return;
    }

    queue.drain();
    let open = queue.open();
    tracing::info!(
        target: LOG_TARGET,
        "draining: no new request is taken, and {open} are answered to their end"
    );
    tokio::select! {
        () = empty() => return,
        () = sleep(longest) => {}
        _ = asked.wait_for(|count| *count > 1) => {}
    }

    queue.fail("the server is shutting down");
    _ = timeout(LAST, empty()).await;
}
