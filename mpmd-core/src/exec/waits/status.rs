//! The current activity of this process, and hang reports.

use std::collections::VecDeque;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mpmd_base::block::{Instant, Mutex, now, since};
use mpmd_device::cpu;
use mpmd_record::activity::{Activity, DeviceActivity, MemoryActivity};
use mpmd_record::trace::TraceEventKind;

use crate::exec::Runtime;

/// The current activity of the program thread and of the devices.
pub(crate) struct ActivityStatus {
    program: Mutex<Doing>,
    steps: Mutex<StepCount>,
    reports: Mutex<Reports>,
    devices: Vec<DeviceStatus>,
    /// Number of calls of [`tick`](Self::tick).
    samples: AtomicU64,
}

/// The steps of the program. A step is complete when its operations have ended on this process.
#[derive(Default)]
struct StepCount {
    /// Steps that are not known to be complete, ascending.
    open: VecDeque<OpenStep>,
    /// Number of the last complete step.
    complete: u64,
    /// The time at which the last complete step was counted.
    counted: Option<Instant>,
    /// Mean time of the steps that were counted last.
    duration: Option<Duration>,
}

/// A step that is not known to be complete.
struct OpenStep {
    step: u64,
    /// Number of the last operation that was issued before the end of the step.
    last_op: u64,
}

impl StepCount {
    /// Counts the steps whose operations all come before `first_open`, the first operation that has
    /// not ended. `None` if all have ended.
    fn count(&mut self, first_open: Option<u64>, now: Instant) {
        let before = self.complete;
        let has_ended = |step: &&OpenStep| first_open.is_none_or(|op| step.last_op < op);
        let ended = self.open.iter().take_while(has_ended).count();
        if let Some(last) = self.open.drain(..ended).next_back() {
            self.complete = last.step;
        }

        let steps = u32::try_from(self.complete - before).unwrap_or(u32::MAX);
        if steps > 0 {
            let counted = self.counted.replace(now);
            self.duration = counted.map(|counted| now.saturating_duration_since(counted) / steps);
        }
    }
}

/// The current activity of a device.
struct DeviceStatus {
    name: String,
    queue: Mutex<DeviceQueue>,
    /// True while the device's kernel waits for other devices in a collective.
    waits: AtomicBool,
    /// Number of samples in which the device had an operation that did not wait.
    busy_samples: AtomicU64,
}

/// The operations of a device.
#[derive(Default)]
struct DeviceQueue {
    /// The operations that have not ended, in order. The device works on the first. Only a device
    /// that runs asynchronously can have more than one.
    running: VecDeque<RunningOperation>,
    /// The stages of pipelines that the device has computed, ascending.
    stages: Vec<u32>,
}

/// The times of hang reports since this process last issued or ended an operation.
#[derive(Default)]
struct Reports {
    /// Number of operations issued, and number of operations ended, at the first report.
    progress: (u64, u64),
    /// The times of the first report since that progress, and of the first report in the last
    /// round.
    times: Option<(Duration, Duration)>,
}

impl Reports {
    /// Returns the time since the first report, if a report is due now. Rounds of reports come
    /// after 1, 2, 4, 8, … times the peer timeout. All waits of a process report in the same round.
    fn next(&mut self, progress: (u64, u64), now: Duration, timeout: Duration) -> Option<Duration> {
        let Some((first, last)) = self.times.filter(|_| self.progress == progress) else {
            self.progress = progress;
            self.times = Some((now, now));
            return Some(Duration::ZERO);
        };
        let since_last = now.saturating_sub(last);
        if since_last > timeout / 4 {
            // Clocks and ticks vary a little.
            let interval = (last - first).saturating_add(timeout);
            if since_last < interval - timeout / 4 {
                return None;
            }
            self.times = Some((first, now));
            return Some(now - first);
        }
        Some(last - first)
    }
}

/// The activity of the program thread.
#[derive(Clone, Copy)]
pub(crate) enum Doing {
    /// Running the user's code.
    Program,
    /// Blocked in this call, or for this reason, at this line of the user's program.
    Waiting(&'static str, &'static Location<'static>),
    /// In [`Program::finish`](crate::Program::finish).
    Finishing,
}

/// An operation that a device has started or queued.
#[derive(Clone)]
struct RunningOperation {
    op: u64,
    call: std::sync::Arc<dyn std::fmt::Display + Send + Sync>,
    /// The time at which the ticker first saw the operation as its device's current one. Devices
    /// themselves read no clock.
    seen: Option<Instant>,
}

impl ActivityStatus {
    pub(crate) fn new(devices: impl IntoIterator<Item = String>) -> Self {
        Self {
            program: Mutex::new(Doing::Program),
            steps: Mutex::default(),
            reports: Mutex::default(),
            devices: devices
                .into_iter()
                .map(|name| DeviceStatus {
                    name,
                    queue: Mutex::default(),
                    waits: AtomicBool::new(false),
                    busy_samples: AtomicU64::new(0),
                })
                .collect(),
            samples: AtomicU64::new(0),
        }
    }

    /// Sets the activity of the program thread until the guard is dropped.
    pub(crate) fn enter(&self, doing: Doing) -> ProgramGuard<'_> {
        let before = std::mem::replace(&mut *self.program.lock(), doing);
        ProgramGuard {
            status: self,
            before,
        }
    }

    /// Adds an operation to the device with this local index. The operation starts, or waits behind
    /// others. `stage` is that of its label.
    pub(crate) fn device_starts(
        &self,
        device: usize,
        op: u64,
        call: std::sync::Arc<dyn std::fmt::Display + Send + Sync>,
        stage: Option<u32>,
    ) {
        let mut queue = self.devices[device].queue.lock();
        queue.running.push_back(RunningOperation {
            op,
            call,
            seen: None,
        });
        if let Some(stage) = stage
            && let Err(place) = queue.stages.binary_search(&stage)
        {
            queue.stages.insert(place, stage);
        }
    }

    /// Removes an operation that the device with this local index has ended. Does nothing if it is
    /// not in the list.
    pub(crate) fn device_ends(&self, device: usize, op: u64) {
        let mut queue = self.devices[device].queue.lock();
        if let Some(at) = queue.running.iter().position(|running| running.op == op) {
            queue.running.remove(at);
        }
    }

    /// Takes a sample of the devices: counts those with an operation as busy, unless it waits in a
    /// collective. Sets the start time of each device's current operation to now, unless it has
    /// one.
    pub(crate) fn tick(&self) {
        for device in &self.devices {
            let mut queue = device.queue.lock();
            let Some(current) = queue.running.front_mut() else {
                continue;
            };
            if !device.waits.load(Ordering::Relaxed) {
                device.busy_samples.fetch_add(1, Ordering::Relaxed);
            }
            current.seen.get_or_insert_with(now);
        }
        self.samples.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the lowest number of the devices' current operations. `None` if all devices are
    /// idle.
    pub(crate) fn lowest(&self) -> Option<u64> {
        self.devices
            .iter()
            .filter_map(|device| device.queue.lock().running.front().map(|first| first.op))
            .min()
    }

    // invariant: no-silent-wait
    /// Describes the current activity in one line for a hang report. `name` returns the description
    /// of an operation with its label and line, if known.
    fn describe(&self, name: impl Fn(u64) -> Option<String>) -> String {
        let program = format!("its program {}", self.program.lock().describe());
        self.devices(name)
            .iter()
            .fold(program, |text, device| format!("{text}; {device}"))
    }

    /// Returns the current activity of each device. `name` is as in [`describe`](Self::describe).
    fn devices(&self, name: impl Fn(u64) -> Option<String>) -> Vec<DeviceActivity> {
        let activity = |device: &DeviceStatus| {
            let (first, behind, stages) = {
                let queue = device.queue.lock();
                let running = &queue.running;
                let behind = running.len().saturating_sub(1);
                (running.front().cloned(), behind, queue.stages.clone())
            };

            let seen = first.as_ref().and_then(|first| first.seen);
            DeviceActivity {
                device: device.name.clone(),
                operation: first.map(|RunningOperation { op, call, .. }| {
                    name(op).unwrap_or_else(|| format!("operation {op} ({call})"))
                }),
                seconds: seen.map(|seen| since(seen).as_secs_f32()),
                behind,
                busy_samples: device.busy_samples.load(Ordering::Relaxed),
                stages,
            }
        };
        self.devices.iter().map(activity).collect()
    }
}

impl Doing {
    /// Describes the activity as the predicate of a sentence about "its program".
    fn describe(self) -> String {
        match self {
            Self::Program => "runs code of its own".to_owned(),
            Self::Waiting(call, at) => format!("waits in {call} at {at}"),
            Self::Finishing => "has ended".to_owned(),
        }
    }
}

impl Runtime {
    /// Notes that the program has issued all operations of a step. The last one is `last_op`.
    pub(crate) fn step_ends(&self, step: u64, last_op: u64) {
        let mut steps = self.status.steps.lock();
        steps.open.push_back(OpenStep { step, last_op });
        steps.count(self.in_flight.first_open(), now());
    }

    /// Counts the steps that are complete by now.
    pub(crate) fn count_steps(&self) {
        let mut steps = self.status.steps.lock();
        // Under the lock: a later answer could include the operations of a step that is missing.
        steps.count(self.in_flight.first_open(), now());
    }

    /// Notes that the kernel of operation `op`, on the device with this local index, waits for
    /// other devices in a collective, until the returned guard is dropped.
    pub(crate) fn wait_in_collective(&self, device: usize, op: u64) -> CollectiveGuard<'_> {
        let status = &self.status.devices[device];
        status.waits.store(true, Ordering::Relaxed);
        CollectiveGuard {
            runtime: self,
            device,
            op,
            since: self.trace.now(),
        }
    }

    /// Describes in one line the current activity of this process's program and devices.
    pub(crate) fn doing(&self) -> String {
        self.status.describe(|op| self.router.lock().describe(op))
    }

    /// Describes the current activity of this process. Adds the chain of processes for which it
    /// waits, one line per link.
    pub(crate) fn doing_and_why(&self) -> String {
        let doing = self.doing();
        let running = self.status.lowest();
        let mut chain = self.router.lock().chain(running);
        if chain.is_empty() && running.is_none() {
            // This process waits for others to take its pieces.
            chain = self.router.lock().last_words();
        }
        chain
            .into_iter()
            .fold(doing, |text, line| format!("{text}\n  {line}"))
    }

    /// Returns the current activity of this process on `host`. Does not block.
    pub(crate) fn activity(&self, host: &str) -> Activity {
        let values = |counters: &[AtomicU64]| {
            counters
                .iter()
                .map(|counter| counter.load(Ordering::Relaxed))
                .collect()
        };

        self.count_steps();
        let (steps, step_duration) = {
            let steps = self.status.steps.lock();
            (steps.complete, steps.duration)
        };

        let counts = self.in_flight.counts();
        let devices = self.status.devices(|op| self.router.lock().describe(op));
        let running = self.status.lowest();
        let (issued, wait) = {
            let router = self.router.lock();
            // The other links are older answers of other processes.
            (router.count(), router.chain(running).into_iter().next())
        };

        let pools = self.devices.iter().map(|device| device.pool.stats());
        let memory = MemoryActivity {
            limit: self
                .config
                .device_memory
                .map(|bytes| bytes * self.devices.len() as u64),
            host: self.host_memory.stats().live,
            lent: counts.lent,
            ..MemoryActivity::default()
        };

        Activity {
            pid: std::process::id(),
            host: host.to_owned(),
            vectors: Some(cpu::width()),
            steps,
            step_seconds: step_duration.map(|duration| duration.as_secs_f64()),
            samples: self.status.samples.load(Ordering::Relaxed),
            issued,
            in_flight: counts.ops,
            in_flight_bytes: counts.bytes,
            program: self.status.program.lock().describe(),
            devices,
            wait,
            memory: pools.fold(memory, |sum, stats| MemoryActivity {
                live: sum.live + stats.live,
                peak: sum.peak + stats.peak_live,
                ..sum
            }),
            bytes_sent: values(&self.bytes_sent),
            messages_sent: values(&self.messages_sent),
        }
    }

    /// Writes to the log and to stderr that a wait takes longer than the peer timeout. While this
    /// process issues and ends no operation, reports come at growing intervals, since a job may be
    /// idle for days.
    pub(crate) fn report_hang(&self, text: &str) {
        let progress = (self.router.lock().count(), self.in_flight.counts().ended);
        let timeout = self.config.peer_timeout;
        let Some(idle) = self
            .status
            .reports
            .lock()
            .next(progress, self.now(), timeout)
        else {
            return;
        };
        tracing::warn!(target: "mpmd::hang", "{text}");
        // Other processes have described their operations.
        let text = mpmd_launch::printable(text);
        let waited = waited_text(timeout, idle);
        let message = format!("mpmd: still waiting after {waited}\n  {text}\n");
        // In one write: other processes of the job may write to the same terminal.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), message.as_bytes());
    }
}

/// Describes the time waited until a report that comes `idle` after the first one. The peer timeout
/// appears as it was given, other times in whole seconds, or in milliseconds below one second.
fn waited_text(timeout: Duration, idle: Duration) -> String {
    match idle.is_zero() {
        true => format!("{timeout:?}"),
        false => format!("{:.0?}", timeout.saturating_add(idle)),
    }
}

/// Guard that restores the previous activity of the program thread when dropped.
pub(crate) struct ProgramGuard<'a> {
    status: &'a ActivityStatus,
    before: Doing,
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        *self.status.program.lock() = self.before;
    }
}

/// Guard that ends the wait of a device in a collective when dropped.
pub(crate) struct CollectiveGuard<'a> {
    runtime: &'a Runtime,
    device: usize,
    op: u64,
    /// Start of the wait, as a trace time.
    since: u64,
}

impl Drop for CollectiveGuard<'_> {
    fn drop(&mut self) {
        let status = &self.runtime.status.devices[self.device];
        status.waits.store(false, Ordering::Relaxed);
        self.runtime
            .trace
            .note(|| TraceEventKind::CollectiveWaited {
                op: self.op,
                device: self.device as u32,
                since: self.since,
            });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn idle_process_reports_at_growing_intervals() {
        let (mut reports, timeout) = (Reports::default(), Duration::from_secs(60));
        // Two waits are reported in each minute of a day, the second a little later.
        let mut minutes = Vec::new();
        for minute in 0..24 * 60 {
            let now = Duration::from_secs(60 * minute);
            let due = reports.next((7, 2), now, timeout);
            let second = reports.next((7, 2), now + Duration::from_millis(300), timeout);
            assert_eq!(due.is_some(), second.is_some(), "{minute}");
            minutes.extend(due.map(|idle| idle.as_secs() / 60));
        }
        assert_eq!(minutes, [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023]);
        let later = Duration::from_secs(100_000);
        assert_eq!(reports.next((8, 2), later, timeout), Some(Duration::ZERO));
    }

    #[test]
    fn short_waits_are_reported_in_milliseconds() {
        let text = |timeout, idle| {
            waited_text(Duration::from_micros(timeout), Duration::from_micros(idle))
        };
        assert_eq!(text(200_000, 0), "200ms");
        assert_eq!(text(200_000, 203_123), "403ms");
        assert_eq!(text(1_500_000, 0), "1.5s");
        assert_eq!(text(60_000_000, 60_100_321), "120s");
    }

    #[test]
    fn describe_names_current_operations_and_their_age() {
        let status = ActivityStatus::new(["device 0".to_owned(), "device 1".to_owned()]);
        status.device_starts(0, 7, Arc::new("jit Slow"), Some(1));
        assert_eq!(status.lowest(), Some(7));
        let plain = status.describe(|_| None);
        assert_eq!(
            plain,
            "its program runs code of its own; device 0 is at operation 7 (jit Slow); device 1 is \
             idle"
        );
        status.tick();
        let named =
            status.describe(|op| Some(format!("operation {op} (jit Slow; stage 1) at here")));
        assert!(
            named.contains("device 0 is at operation 7 (jit Slow; stage 1) at here, for 0."),
            "{named}"
        );
        status.device_starts(0, 9, Arc::new("jit Next"), None);
        assert!(
            status
                .describe(|_| None)
                .contains("(jit Slow), for 0.0 s (1 more issued to it); device 1")
        );
        status.device_ends(0, 7);
        assert!(
            status
                .describe(|_| None)
                .contains("device 0 is at operation 9 (jit Next); device 1")
        );
        status.device_ends(0, 9);
        status.device_ends(0, 9);
        assert_eq!(status.lowest(), None);
    }

    #[test]
    fn steps_count_when_their_operations_have_ended() {
        let (mut steps, begin) = (StepCount::default(), now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        for (step, last_op) in [(1, 10), (2, 20), (3, 30)] {
            steps.open.push_back(OpenStep { step, last_op });
        }
        steps.count(Some(10), at(0));
        assert_eq!((steps.complete, steps.duration), (0, None));
        steps.count(Some(11), at(1));
        assert_eq!((steps.complete, steps.duration), (1, None));
        steps.count(Some(20), at(2));
        assert_eq!(steps.complete, 1);
        steps.count(None, at(5));
        assert_eq!(steps.complete, 3);
        assert_eq!(steps.duration, Some(Duration::from_secs(2)), "for each");
    }

    #[test]
    fn samples_count_busy_devices_and_their_stages() {
        let status = ActivityStatus::new(["device 0".to_owned(), "device 1".to_owned()]);
        for (op, stage) in [(1, Some(2)), (2, Some(0)), (3, None), (4, Some(2))] {
            status.device_starts(0, op, Arc::new("jit"), stage);
            status.tick();
            status.device_ends(0, op);
        }
        status.device_starts(1, 5, Arc::new("jit"), None);
        status.devices[1].waits.store(true, Ordering::Relaxed);
        status.tick();
        status.device_ends(1, 5);
        assert_eq!(status.samples.load(Ordering::Relaxed), 5);
        let devices = status.devices(|_| None);
        let found = devices
            .iter()
            .map(|device| (device.busy_samples, device.stages.clone()));
        assert_eq!(found.collect::<Vec<_>>(), [(4, vec![0, 2]), (0, vec![])]);
    }
}
