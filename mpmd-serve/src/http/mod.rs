//! The front of a server: HTTP with the interface of OpenAI, on threads of its own.

mod access;
mod ask;
mod connection;
mod control;
mod failure;
mod fields;
mod paced;
mod peer;
mod reply;
mod routes;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Context;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use mpmd_base::{StopRequest, StopRequests, parse_bytes};
use mpmd_job::at_least;
use tokio::net::TcpSocket;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::model::Model;
use crate::queue::{Limits, Queue};
use access::Access;
use connection::{accept, reserve_descriptors};
use routes::{Shared, bodies, routes};

/// Number of threads for connections, and for the reading of requests.
const THREADS: usize = 2;
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
    /// File with an API key on each line, which only its user may read; every request needs one of
    /// them
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Serve every client that can connect, without a key
    #[arg(long, conflicts_with = "api_key_file")]
    pub no_auth: bool,
    /// File with a key on each line for the endpoints that control the server: /pause, /resume,
    /// /update_weight_version and /load_weights; without it there are none. Only its user may read
    /// it, and it has other keys than --api-key-file
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
    /// Largest number of connections; more of them wait. The limit of open files (`ulimit -n`) must
    /// have room for them
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
        let (control, _) = self.control()?;
        let (_, access) = self.access()?;
        ensure!(
            !control.is_some_and(|control| control.shares_a_key_with(&access)),
            "--control-key-file and --api-key-file: expected other keys in each, found one that \
             is in both"
        );
        Ok(())
    }

    /// Checks that the address is free, and that the process may have descriptors for all
    /// connections.
    ///
    /// # Errors
    ///
    /// If it is not so.
    pub fn check_resources(&self) -> anyhow::Result<()> {
        let (address, _) = self.access()?;
        reserve_descriptors(self.max_connections)?;
        bind(address).map(drop)
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
    /// The threads, until signals are caught there.
    uncaught: Option<Handle>,
    thread: JoinHandle<()>,
}

impl Front {
    /// Listens and answers requests. SIGTERM and SIGINT drain the server from now on; a second one,
    /// at least two seconds later, also ends the open requests.
    ///
    /// # Errors
    ///
    /// As for [`listen`](Self::listen).
    pub fn start(args: &HttpArgs, model: Model, queue: Queue) -> anyhow::Result<Self> {
        let mut front = Self::listen(args, model, queue)?;
        front.catch_signals()?;
        Ok(front)
    }

    /// Listens and answers requests: until the queue is open, that the server is starting. Leaves
    /// signals alone until [`catch_signals`](Self::catch_signals).
    ///
    /// # Errors
    ///
    /// If the keys cannot be read, other hosts could connect although the arguments do not say that
    /// they may, or the address cannot be listened on. If the process may not have descriptors for
    /// all connections.
    pub fn listen(args: &HttpArgs, model: Model, queue: Queue) -> anyhow::Result<Self> {
        args.check()?;
        reserve_descriptors(args.max_connections)?;
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
            bind(address)?.listen(1024).with_context(|| format!("cannot listen on {address}"))?
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
        let uncaught = Some(runtime.handle().clone());
        let thread = std::thread::Builder::new().name("front".to_owned()).spawn(move || {
            let (end, ended) = watch::channel(());
            let next = move |cx: &mut Context<'_>| {
                let accepted = listener.poll_accept(cx);
                accepted.map_ok(|(stream, _)| stream)
            };
            let accept = runtime.spawn(accept(next, routes, connections, ended));
            runtime.block_on(drained(&queue, asked, drain));
            drop(end);
            // Has no error but a panic.
            _ = runtime.block_on(accept);
            runtime.shutdown_timeout(LAST);
        })?;
        Ok(Self { address, signals, uncaught, thread })
    }

    /// Has SIGTERM and SIGINT drain the server from now on; a second one also ends the open
    /// requests. A second call does nothing.
    ///
    /// # Errors
    ///
    /// If the system refuses it.
    pub fn catch_signals(&mut self) -> io::Result<()> {
        let Some(threads) = self.uncaught.take() else { return Ok(()) };
        catch_signals(&threads, &self.signals)
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

/// Returns a socket with this address.
fn bind(address: SocketAddr) -> anyhow::Result<TcpSocket> {
    let bind = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        // Connections inherit it.
        socket.set_send_buffer_size(BUFFER)?;
        socket.bind(address)?;
        Ok(socket)
    };
    bind().map_err(|why: io::Error| {
        anyhow!("cannot listen on {address}: {why}; give another --port, or --port 0 for any")
    })
}

/// Counts the requests to end that come by signals.
fn catch_signals(runtime: &Handle, count: &watch::Sender<u32>) -> io::Result<()> {
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
