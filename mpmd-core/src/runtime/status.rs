//! What this process is doing, for whoever waits for it.

use std::fmt::Write;
use std::panic::Location;

use parking_lot::Mutex;

/// What the program thread and the devices are doing at this moment.
pub(crate) struct Status {
    program: Mutex<Doing>,
    devices: Vec<(String, Mutex<Option<Running>>)>,
}

/// What the program thread is doing.
#[derive(Clone, Copy)]
pub(crate) enum Doing {
    /// Running the user's code.
    Program,
    /// Blocked in a call that the user wrote at this line.
    Waiting(&'static str, &'static Location<'static>),
    /// In `finish`.
    Finishing,
}

#[derive(Clone)]
struct Running {
    op: u64,
    what: std::sync::Arc<dyn std::fmt::Display + Send + Sync>,
}

impl Status {
    pub(crate) fn new(devices: impl IntoIterator<Item = String>) -> Self {
        Self {
            program: Mutex::new(Doing::Program),
            devices: devices.into_iter().map(|name| (name, Mutex::new(None))).collect(),
        }
    }

    /// Says what the program thread does until the guard is dropped.
    pub(crate) fn enter(&self, doing: Doing) -> ProgramGuard<'_> {
        let before = std::mem::replace(&mut *self.program.lock(), doing);
        ProgramGuard { status: self, before }
    }

    /// The device with this local index starts an operation.
    pub(crate) fn device_starts(
        &self,
        device: usize,
        op: u64,
        what: std::sync::Arc<dyn std::fmt::Display + Send + Sync>,
    ) {
        *self.devices[device].1.lock() = Some(Running { op, what });
    }

    /// The device with this local index has ended it.
    pub(crate) fn device_idle(&self, device: usize) {
        *self.devices[device].1.lock() = None;
    }

    /// One line for a hang report.
    pub(crate) fn describe(&self) -> String {
        let mut text = match *self.program.lock() {
            Doing::Program => "its program runs code of its own".to_owned(),
            Doing::Waiting(what, at) => format!("its program waits in {what} at {at}"),
            Doing::Finishing => "its program has ended".to_owned(),
        };
        for (name, running) in &self.devices {
            let running = running.lock().clone();
            let _ = match running {
                Some(Running { op, what }) => write!(text, "; {name} is at operation {op} ({what})"),
                None => write!(text, "; {name} is idle"),
            };
        }
        text
    }
}

/// Restores what the program thread was doing before.
pub(crate) struct ProgramGuard<'a> {
    status: &'a Status,
    before: Doing,
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        *self.status.program.lock() = self.before;
    }
}
