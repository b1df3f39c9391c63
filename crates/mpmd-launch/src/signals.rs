//! Signals to the launcher, as events of its job.

use std::future::poll_fn;
use std::sync::mpsc::Sender;
use std::task::Poll;
use std::thread::JoinHandle;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as SignalListener, SignalKind, signal};
use tokio::sync::oneshot;

use super::error::LaunchError;
use super::job_failure::signal_name;

/// An event that the launcher waits for: the end of a process, a signal, or a failure to write
/// output.
pub(super) enum JobEvent {
    /// A process has ended. The number is its position in the order of starts.
    Ended(usize),
    /// One of [`stop_signals`]: a request to end this process.
    Signal(Signal),
    /// SIGTSTP, which Ctrl-Z sends: a request to stop the job for a while.
    Stop,
    /// SIGCONT: the job continues after a stop.
    Continue,
    /// The processes' output cannot be written.
    NoOutput(std::io::Error),
}

/// Returns the name of a signal by which a user stops a job.
pub fn stop_name(signal: i32) -> &'static str {
    match signal_name(signal) {
        Some("SIGINT") => "Ctrl-C",
        Some(name) => name,
        None => "a signal",
    }
}

/// Signals that ask a program to end in order. Terminals, service managers and schedulers send
/// them.
const STOP_SIGNALS: [Signal; 5] = [
    Signal::INT,
    Signal::TERM,
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
];

/// Returns the numbers of the signals that ask this process to end in order: SIGINT, SIGTERM,
/// SIGHUP, SIGUSR1 and SIGUSR2. SIGHUP is left out if this process ignores it, as after a start by
/// `nohup`.
pub fn stop_signals() -> Vec<i32> {
    let heard = STOP_SIGNALS
        .into_iter()
        .filter(|signal| *signal != Signal::HUP || !is_ignored(signal.as_raw()));
    heard.map(Signal::as_raw).collect()
}

/// True if this process ignores the signal with this number. A handler would then go against the
/// user's wish.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.unwrap_or(0) >> (signal - 1) & 1 == 1
}

/// Converts the signals that would end or stop this process to [`JobEvent`]s, until it is dropped.
pub(super) struct SignalForwarder {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SignalForwarder {
    pub(super) fn forward_to(events: Sender<JobEvent>) -> Result<Self, LaunchError> {
        let failed = |e: std::io::Error| LaunchError::environment("listening for signals", e);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;

        let (stop, mut stopped) = oneshot::channel::<()>();
        let inside = runtime.enter();
        let listen = |kind| signal(kind).map_err(failed);
        let other = |signal: Signal| SignalKind::from_raw(signal.as_raw());
        let heard = stop_signals();
        let mut asked = Vec::new();
        for signal in STOP_SIGNALS {
            if heard.contains(&signal.as_raw()) {
                asked.push((signal, listen(other(signal))?));
            }
        }
        let mut stop_asked = listen(other(Signal::TSTP))?;
        let mut continued = listen(other(Signal::CONT))?;
        drop(inside);

        let forward = async move {
            loop {
                let event = tokio::select! {
                    // `biased` keeps the order: a stop comes before the SIGCONT that ended it.
                    biased;
                    _ = &mut stopped => break,
                    signal = received(&mut asked) => JobEvent::Signal(signal),
                    Some(()) = stop_asked.recv() => JobEvent::Stop,
                    Some(()) = continued.recv() => JobEvent::Continue,
                };
                if events.send(event).is_err() {
                    break;
                }
            }
        };

        let thread = std::thread::Builder::new()
            .name("mpmd-signals".into())
            .spawn(move || runtime.block_on(forward))
            .map_err(failed)?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// Waits for one of these signals. If there are several, returns the first of them in the list.
async fn received(listeners: &mut [(Signal, SignalListener)]) -> Signal {
    poll_fn(|cx| {
        let mut all = listeners.iter_mut();
        let found = all.find_map(|(signal, listener)| {
            matches!(listener.poll_recv(cx), Poll::Ready(Some(()))).then_some(*signal)
        });
        found.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Drop for SignalForwarder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread only forwards events; a panic of it has been printed.
            let _ = thread.join();
        }
    }
}
