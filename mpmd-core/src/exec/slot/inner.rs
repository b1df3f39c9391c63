//! What a slot and its promise share: the state, who waits for it, and who holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use mpmd_transport::SharedBuffer;
use mpmd_transport::router::Failure;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Outcome;

type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// Called with how work that fills a buffer ended.
type Verdict = Box<dyn FnOnce(Result<(), Arc<Failure>>) + Send>;

/// One who holds a slot, in [`Inner::counts`].
pub(super) const HOLDER: u64 = 1;
/// One of the uses that were issued and have not picked their input up.
pub(super) const USE: u64 = 1 << 32;
pub(super) const USES: u64 = ISSUED - USE;
/// The buffer is there, though it may not be filled yet.
pub(super) const ISSUED: u64 = 1 << 61;
/// The slot has ended.
pub(super) const ENDED: u64 = 1 << 62;
/// The buffer was given up.
pub(super) const GIVEN_UP: u64 = 1 << 63;

pub(super) struct Inner {
    /// Holders in the lower half; above them uses; above those two flags. In one word, so that to
    /// issue a use and to pick it up takes no lock.
    pub(super) counts: AtomicU64,
    pub(super) held: Mutex<Held>,
    pub(super) ended: Condvar,
}

pub(super) struct Held {
    pub(super) state: State,
    /// The buffer goes as soon as nothing issued before needs it; later readers get this.
    pub(super) given_up: Option<Arc<Failure>>,
    pub(super) filling: Filling,
    /// The work that fills the buffer was given nothing that may turn out to have failed: it ends
    /// as that does.
    pub(super) ends_with_its_work: bool,
}

/// What of the work that was issued to fill the buffer is known, whoever has the buffer by now.
#[derive(Default)]
pub(super) enum Filling {
    /// There is none, or it is over and has filled it.
    #[default]
    Done,
    /// It is not over, and these want to know.
    UnderWay(Vec<Verdict>),
    Failed(Arc<Failure>),
}

pub(super) enum State {
    /// With who is to hear of the end, if anybody.
    Pending(Option<Box<Waiting>>),
    /// Work was issued that will fill it.
    Issued(SharedBuffer, Option<Box<Waiting>>),
    Ended(Outcome),
}

#[derive(Default)]
pub(super) struct Waiting {
    /// To be called when it is issued, or ends before.
    pub(super) issued: Vec<Callback>,
    pub(super) callbacks: Vec<Callback>,
    pub(super) wakers: Vec<Waker>,
}

/// A use of a slot that was issued: it gets the buffer even where that is given up meanwhile.
impl Inner {
    pub(super) fn new(state: State, counts: u64) -> Self {
        let held = Mutex::new(Held {
            state,
            given_up: None,
            filling: Filling::Done,
            ends_with_its_work: false,
        });
        Self { counts: AtomicU64::new(counts), held, ended: Condvar::new() }
    }

    /// Drops a buffer that was given up and that nothing waits for any more.
    pub(super) fn release(&self) {
        let mut held = self.held.lock();
        if self.counts.load(Ordering::Acquire) & USES != 0 {
            return;
        }
        let Held { state: State::Ended(outcome), given_up, .. } = &mut *held else { return };
        if let Some(donated) = given_up.take()
            && outcome.is_ok()
        {
            let buffer = std::mem::replace(outcome, Err(donated));
            drop(held);
            drop(buffer);
        }
    }

    /// One holder less. Of slots that share an allocation the last takes the buffer along.
    pub(super) fn let_go(&self, shared: bool) {
        let last = (self.counts.fetch_sub(HOLDER, Ordering::AcqRel) & (USE - 1)) == HOLDER;
        if last && shared {
            let state = std::mem::replace(&mut self.held.lock().state, State::Pending(None));
            drop(state);
        }
    }

    pub(super) fn end(&self, outcome: Outcome) {
        let held = self.held.lock();
        self.end_as(held, outcome);
    }

    pub(super) fn end_as(&self, mut held: MutexGuard<'_, Held>, outcome: Outcome) {
        // A second holder, however short, would keep a kernel from taking the memory over.
        let shared = match &held.state {
            State::Pending(Some(waiting)) | State::Issued(_, Some(waiting))
                if !waiting.callbacks.is_empty() || !waiting.issued.is_empty() =>
            {
                Some(outcome.clone())
            }
            _ => None,
        };
        let before = std::mem::replace(&mut held.state, State::Ended(outcome));
        let counts = self.counts.fetch_or(ENDED | ISSUED, Ordering::AcqRel);
        drop(held);
        self.ended.notify_all();
        if let State::Pending(Some(waiting)) | State::Issued(_, Some(waiting)) = before {
            let Waiting { issued, callbacks, wakers } = *waiting;
            if let Some(outcome) = shared {
                issued.into_iter().chain(callbacks).for_each(|then| then(&outcome));
            }
            wakers.into_iter().for_each(Waker::wake);
        }
        // Whoever gives it up from here on finds that it has ended.
        if counts & GIVEN_UP != 0 {
            self.release();
        }
    }

    /// The buffer is there, and will be filled by what was issued.
    pub(super) fn issue(&self, buffer: SharedBuffer) {
        let mut held = self.held.lock();
        let State::Pending(waiting) = &mut held.state else { return };
        let mut waiting = waiting.take();
        let callbacks =
            waiting.as_mut().map(|waiting| std::mem::take(&mut waiting.issued)).unwrap_or_default();
        let shared = (!callbacks.is_empty()).then(|| Ok(buffer.clone()));
        // Those who wait for the end look again, and go on waiting.
        let wakers = waiting.as_ref().map(|waiting| waiting.wakers.clone()).unwrap_or_default();
        held.state = State::Issued(buffer, waiting);
        held.filling = Filling::UnderWay(Vec::new());
        self.counts.fetch_or(ISSUED, Ordering::AcqRel);
        drop(held);
        self.ended.notify_all();
        if let Some(outcome) = shared {
            callbacks.into_iter().for_each(|then| then(&outcome));
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// What was issued has filled the buffer, or has failed. Somebody may have taken the buffer
    /// before.
    pub(super) fn end_issued(&self, result: Result<(), Arc<Failure>>) {
        let mut held = self.held.lock();
        let known = result.clone().map_or_else(Filling::Failed, |()| Filling::Done);
        let verdicts = match std::mem::replace(&mut held.filling, known) {
            Filling::UnderWay(verdicts) => verdicts,
            Filling::Done | Filling::Failed(_) => Vec::new(),
        };
        match std::mem::replace(&mut held.state, State::Pending(None)) {
            State::Issued(buffer, waiting) => {
                held.state = State::Pending(waiting);
                let (outcome, buffer) = match &result {
                    Ok(()) => (Ok(buffer), None),
                    Err(failure) => (Err(failure.clone()), Some(buffer)),
                };
                self.end_as(held, outcome);
                drop(buffer);
            }
            // Its last holder is gone, or a kernel has taken it over.
            before => {
                held.state = before;
                drop(held);
            }
        }
        verdicts.into_iter().for_each(|then| then(result.clone()));
    }
}

impl Held {
    pub(super) fn issued(&self) -> Option<Outcome> {
        match &self.state {
            State::Ended(outcome) => Some(outcome.clone()),
            State::Issued(buffer, _) => Some(Ok(buffer.clone())),
            State::Pending(_) => None,
        }
    }
}
