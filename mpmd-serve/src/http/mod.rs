//! The front of a server: HTTP with the interface of OpenAI, on threads of its own.

mod access;
mod ask;
mod control;
mod failure;
mod fields;
mod paced;
mod reply;
mod routes;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use axum::Router;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use mpmd_base::{StopRequest, StopRequests, parse_bytes};
use mpmd_job::at_least;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::model::Model;
use crate::queue::{Limits, Queue};
use access::Access;
use paced::Paced;
use routes::{Shared, bodies, routes};

/// Number of threads for connections, and for the reading of requests.
const THREADS: usize = 2;
/// Time limit for the head of a request, also on a connection that had one before.
const HEAD: Duration = Duration::from_secs(30);
/// Limits on the head of a request: number of headers, and bytes.
const HEADERS: (usize, usize) = (64, 32 << 10);
/// Time limit for a client to take the next byte of a reply.
const SLOWEST: Duration = Duration::from_secs(30);
/// Size of a connection's send buffer in the system, in bytes.
const BUFFER: u32 = 64 << 10;
/// Time for connections to end after their last reply.
const LAST: Duration = Duration::from_secs(2);

/// Arguments of the front.
#[derive(Clone, Debug, clap::Args)]
pub struct HttpArgs {
    /// Address to listen on. Any other than one of this host alone needs --api-key-file or
    /// --no-auth
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0: any that is free
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// File with an API key on each line; every request needs one of them
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve every client that can connect, without a key
    #[arg(long, conflicts_with = "api_key_file")]
    pub no_auth: bool,
    /// File with a key on each line for the endpoints that control the server: /pause, /resume,
    /// /update_weight_version and /load_weights; without it there are none
    #[arg(long, value_name = "FILE")]
    pub control_key_file: Option<PathBuf>,
    /// Folder from which /load_weights may load weights, also from folders in it; may be given
    /// several times
    #[arg(long, value_name = "DIR", requires = "control_key_file")]
    pub allow_weights: Vec<PathBuf>,
    /// Name of the model for clients; default: that of its folder
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// A sentence about the model that everyone is to see: at the start, in `/v1/models` and on the
    /// page. Set by the program alone.
    #[arg(skip)]
    pub description: Option<&'static str>,
    /// Seconds for open requests to end after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u32,
    /// Largest number of waiting requests
    #[arg(long, value_name = "N", default_value_t = Limits::default().requests,
        value_parser = at_least(1))]
    pub max_waiting: usize,
    /// Largest number of tokens in waiting prompts
    #[arg(long, value_name = "N", default_value_t = Limits::default().tokens,
        value_parser = at_least(1))]
    pub max_waiting_tokens: usize,
    /// Largest number of new tokens of a request; default: as many as the model has positions
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    pub max_tokens: Option<usize>,
    /// Largest number of connections; more of them wait
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least(1))]
    pub max_connections: usize,
    /// Largest body of a request
    #[arg(long, value_name = "BYTES", default_value = "2MiB", value_parser = parse_bytes)]
    pub max_body: u64,
}

impl HttpArgs {
    /// Returns the limits on the waiting line.
    pub fn limits(&self) -> Limits {
        Limits { requests: self.max_waiting, tokens: self.max_waiting_tokens }
    }

    /// Checks the address, the keys and the folders, before processes are started.
    ///
    /// # Errors
    ///
    /// As for [`Front::start`], except that the address may be in use.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.control()?;
        self.access().map(drop)
    }

    /// Returns the clients that may control the server, and the folders of weights that may be
    /// loaded, without symbolic links.
    fn control(&self) -> anyhow::Result<(Option<Access>, Vec<PathBuf>)> {
        let file = self.control_key_file.as_deref();
        let control = file.map(|file| Access::keys("--control-key-file", file)).transpose()?;
        let folder = |folder: &PathBuf| {
            let found = folder.canonicalize();
            found.with_context(|| format!("--allow-weights {}", folder.display()))
        };
        Ok((control, self.allow_weights.iter().map(folder).collect::<anyhow::Result<_>>()?))
    }

    /// Returns the address to listen on, and who may come in.
    fn access(&self) -> anyhow::Result<(SocketAddr, Access)> {
        let Self { host, port, .. } = self;
        let found = (host.as_str(), *port).to_socket_addrs();
        let address = found.with_context(|| format!("--host {host}"))?.next();
        let address = address.with_context(|| format!("--host {host}: no address"))?;
        let access = match &self.api_key_file {
            Some(file) => Access::keys("--api-key-file", file)?,
            None if address.ip().is_loopback() => Access::ThisHost,
            None => {
                ensure!(
                    self.no_auth,
                    "--host {host}: other hosts can connect, so give --api-key-file FILE, or \
                     --no-auth to let everyone in"
                );
                Access::All
            }
        };
        Ok((address, access))
    }
}

/// The front of a server, which runs on threads of its own until it is drained.
pub struct Front {
    address: SocketAddr,
    signals: watch::Sender<u32>,
    thread: JoinHandle<()>,
}

impl Front {
    /// Listens and answers requests. SIGTERM and SIGINT drain the server from now on; a second one,
    /// at least two seconds later, also ends the open requests.
    ///
    /// # Errors
    ///
    /// If the keys cannot be read, other hosts could connect although the arguments do not say that
    /// they may, or the address cannot be listened on.
    pub fn start(args: &HttpArgs, model: Model, queue: Queue) -> anyhow::Result<Self> {
        let (address, access) = args.access()?;
        let (control, weights) = args.control()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(THREADS)
            .thread_name("http")
            .enable_all()
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            listen(address).with_context(|| format!("cannot listen on {address}"))?
        };
        let address = listener.local_addr()?;
        let body = usize::try_from(args.max_body).unwrap_or(usize::MAX);
        let (most, model) = (args.max_tokens, Arc::new(model));
        let (bodies, description) = (bodies(), args.description);
        let shared = Shared {
            model,
            description,
            queue: queue.clone(),
            access,
            control,
            weights: weights.into(),
            body,
            bodies,
            most,
        };
        let routes = routes(shared);
        let (connections, drain) = (args.max_connections, Duration::from_secs(args.drain.into()));
        let signals = watch::Sender::new(0);
        let asked = signals.subscribe();
        catch_signals(&runtime, &signals)?;
        let thread = std::thread::Builder::new().name("front".to_owned()).spawn(move || {
            let (end, ended) = watch::channel(());
            let accept = runtime.spawn(accept(listener, routes, connections, ended));
            runtime.block_on(drained(&queue, asked, drain));
            drop(end);
            // Has no error but a panic.
            _ = runtime.block_on(accept);
            runtime.shutdown_timeout(LAST);
        })?;
        Ok(Self { address, signals, thread })
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses new requests, and ends once the open ones have ended or failed. A second call fails
    /// them at once.
    pub fn drain(&self) {
        self.signals.send_modify(|count| *count += 1);
    }

    /// Waits until the server is drained.
    pub fn join(self) {
        // A panic was printed.
        _ = self.thread.join();
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Connections inherit it.
    socket.set_send_buffer_size(BUFFER)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Counts the requests to end that come by signals.
fn catch_signals(runtime: &Runtime, count: &watch::Sender<u32>) -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let _entered = runtime.enter();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let count = count.clone();
    runtime.spawn(async move {
        let mut requests = StopRequests::default();
        while let Some(()) = tokio::select! {
            signal = terminate.recv() => signal,
            signal = interrupt.recv() => signal,
        } {
            if requests.take(Instant::now()) != StopRequest::Same {
                count.send_modify(|count| *count += 1);
            }
        }
    });
    Ok(())
}

/// Waits for the first request to end, then until no client is left, for `longest` at most.
async fn drained(queue: &Queue, mut asked: watch::Receiver<u32>, longest: Duration) {
    // The sender is never dropped before.
    _ = asked.wait_for(|count| *count > 0).await;
    queue.drain();
    let empty = async || {
        while queue.open() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = empty() => return,
        () = sleep(longest) => {}
        _ = asked.wait_for(|count| *count > 1) => {}
    }
    queue.fail("the server is shutting down");
    _ = timeout(LAST, empty()).await;
}

/// Accepts connections until the sender of `ended` is dropped. Then waits for their last bytes.
async fn accept(
    listener: TcpListener,
    routes: Router,
    most: usize,
    mut ended: watch::Receiver<()>,
) {
    let permits = Arc::new(Semaphore::new(most));
    loop {
        let accepted = async {
            let permit = permits.clone().acquire_owned().await.ok()?;
            Some((listener.accept().await, permit))
        };
        let (stream, permit) = tokio::select! {
            _ = ended.changed() => break,
            Some((Ok((stream, _)), permit)) = accepted => (stream, permit),
            // The process has no descriptor left, or the client has gone.
            else => {
                sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let (routes, ended) = (routes.clone(), ended.clone());
        tokio::spawn(async move {
            connection(stream, routes, ended).await;
            drop(permit);
        });
    }
    drop(listener);
    _ = timeout(LAST, permits.acquire_many(u32::try_from(most).unwrap_or(u32::MAX))).await;
}

async fn connection(stream: TcpStream, routes: Router, mut ended: watch::Receiver<()>) {
    // Else each event would wait for the acknowledgement of the one before.
    _ = stream.set_nodelay(true);
    let (headers, bytes) = HEADERS;
    let connection = Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_headers(headers)
        .max_buf_size(bytes)
        .serve_connection(
            TokioIo::new(Paced::new(stream, SLOWEST)),
            TowerToHyperService::new(routes),
        );
    let mut connection = pin!(connection);
    // An error is the client's: it has left, or sent no HTTP, which has been answered.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = ended.changed() => connection.as_mut().graceful_shutdown(),
    }
    _ = connection.await;
}
