//! Traces that `mpmd top --trace` requests from a process while its program runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::block::{Condvar, Instant, Mutex, now, thread};
use mpmd_record::activity::{TraceAction, TraceRequest, TraceState};
use mpmd_record::trace::About;
use mpmd_transport::deadline::after;
use mpmd_transport::rendezvous::Rendezvous;

use super::membership::compare_clocks;
use crate::trace::Trace;

/// Interval at which a requested trace is looked at: the program may end before it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The requested traces of a process, one at a time.
pub(super) struct Profile {
    trace: Trace,
    about: About,
    rendezvous: Weak<Rendezvous>,
    last: Mutex<Option<Requested>>,
    /// Notified when the requested trace is to end.
    changed: Condvar,
}

/// The trace that was requested last.
struct Requested {
    folder: PathBuf,
    until: Instant,
    state: TraceState,
}

impl Profile {
    /// Creates the profile of a process that writes its requests into `trace`. `about` describes
    /// the process.
    pub(super) fn new(trace: Trace, about: About, rendezvous: &Arc<Rendezvous>) -> Arc<Self> {
        let about = About { is_part: true, ..about };
        let (rendezvous, last) = (Arc::downgrade(rendezvous), Mutex::default());
        Arc::new(Self { trace, about, rendezvous, last, changed: Condvar::new() })
    }

    /// Returns the encoded answer to an encoded [`TraceRequest`]. Does not block.
    pub(super) fn answer(self: &Arc<Self>, request: &[u8]) -> Vec<u8> {
        let answer = match serde_json::from_slice(request) {
            Ok(TraceRequest { folder, action: TraceAction::Begin(time) }) => {
                self.begin(folder, time)
            }
            Ok(TraceRequest { folder, action }) => {
                Ok(self.look(&folder, action == TraceAction::End))
            }
            Err(error) => Err(format!(
                "it runs another version of mpmd: the request cannot be read ({error})"
            )),
        };
        serde_json::to_vec(&answer).unwrap_or_default()
    }

    /// Returns the state of the trace in a folder. With `ends`, ends it soon. Without such a trace
    /// the program has begun anew since, in another epoch, and the trace has ended.
    fn look(&self, folder: &Path, ends: bool) -> TraceState {
        let mut last = self.last.lock();
        let Some(last) = last.as_mut().filter(|last| last.folder == folder) else {
            return TraceState::Ended;
        };
        if ends {
            last.until = now();
            self.changed.notify_all();
        }
        last.state.clone()
    }

    /// Begins a trace on a thread of its own, since files and clocks may block.
    fn begin(self: &Arc<Self>, folder: PathBuf, time: Duration) -> Result<TraceState, String> {
        let mut last = self.last.lock();
        if let Some(Requested { folder, state: TraceState::Runs, .. }) = &*last {
            return Err(format!(
                "another `mpmd top --trace` traces it into {}: try again when that has ended",
                folder.display()
            ));
        }
        if self.trace.is_on() {
            return Err("it is traced from its start on (`--trace`, MPMD_TRACE or \
                `Builder::trace`): `mpmd trace` shows that trace, also while the job runs"
                .to_owned());
        }
        let (profile, into) = (self.clone(), folder.clone());
        thread::Builder::new()
            .name("mpmd-profile".to_owned())
            .spawn(move || profile.record(&into))
            .map_err(|error| format!("no thread for a trace: {error}"))?;
        *last = Some(Requested { folder, until: after(now(), time), state: TraceState::Runs });
        Ok(TraceState::Runs)
    }

    /// Records the trace that was requested, until its time is over, it is to end, or the program
    /// has ended.
    fn record(&self, folder: &Path) {
        let recorded = self.trace.begin(folder, self.about.clone()).and_then(|()| {
            self.compare_clocks();
            let mut last = self.last.lock();
            while let Some(until) = last.as_ref().map(|last| last.until)
                && now() < until
                && self.trace.is_on()
            {
                self.changed.wait_until(&mut last, until.min(after(now(), LOOK_EVERY)));
            }
            drop(last);
            self.compare_clocks();
            self.trace.end()
        });
        let state = match recorded {
            Ok(()) => TraceState::Ended,
            Err(error) => TraceState::Failed(format!(
                "its trace cannot be written in {}: {error}",
                folder.display()
            )),
        };
        if let Some(last) = &mut *self.last.lock() {
            last.state = state;
        }
    }

    /// See [`compare_clocks`]. The drift between two comparisons is that of the clocks.
    fn compare_clocks(&self) {
        if let Some(rendezvous) = self.rendezvous.upgrade() {
            compare_clocks(&rendezvous, &self.trace);
        }
    }
}
