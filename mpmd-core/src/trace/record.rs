//! Recording of a trace: threads add events to lists, and a writer thread appends them to the file.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::panic::Location;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mpmd_base::block::{Condvar, Instant, Mutex, now, since, thread};
use mpmd_record::trace::Label;
use mpmd_record::trace::file::{self, TraceChunk};
use mpmd_record::trace::{ClockSample, TraceEvent, TraceEventKind, TraceHeader};
use mpmd_schedule::Schedule;
use tracing::span::EnteredSpan;

use super::spans;

/// The number of event lists. With this many, threads rarely contend for one.
const LISTS: usize = 16;

/// Maximum number of events in one list that are not written yet. Further events are dropped and
/// counted.
const MOST_EVENTS: usize = 1 << 15;

/// The number of events in a list at which the writer is woken up.
const MANY_EVENTS: usize = MOST_EVENTS / 4;

/// Interval between writes. If the process is killed, the events of at most this time are lost.
const WRITE_EVERY: Duration = Duration::from_millis(100);

/// Maximum number of operation descriptions remembered by address. At the limit the table is
/// cleared, and descriptions are looked up by text.
const MOST_KNOWN: usize = 4096;

/// Maximum number of texts in one file. All further texts share one number.
const MOST_TEXTS: usize = 1 << 16;

/// Maximum length of a text, in characters. Longer texts are cut.
const LONGEST_TEXT: usize = 2048;

/// The trace of this process; clones share it. While tracing is off, each call costs one atomic
/// load. Times in arguments and results are nanoseconds since the process's recorder was created.
#[derive(Clone, Default)]
pub(crate) struct Trace(Arc<TraceRecorder>);

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_on() {
            "Trace(on)"
        } else {
            "Trace(off)"
        })
    }
}

/// The state of a process's trace, shared by its threads and the writer.
struct TraceRecorder {
    origin: Instant,
    /// The time at which the trace began; 0 while tracing is off.
    began: AtomicU64,
    lists: [EventList; LISTS],
    texts: Mutex<TraceTexts>,
    extra: Mutex<ExtraChunks>,
    dropped: AtomicU64,
    wanted: Mutex<WriterRequests>,
    changed: Condvar,
    /// The thread that writes the file.
    writer: Mutex<Option<thread::JoinHandle<()>>>,
}

/// Events that are not written yet. Aligned to its own cache lines, since each list is mostly used
/// by one thread.
#[derive(Default)]
#[repr(align(128))]
struct EventList(Mutex<Vec<TraceEvent>>);

/// Contents of the file other than events and texts: chunks to be written, and the schedules
/// recorded so far.
#[derive(Default)]
struct ExtraChunks {
    chunks: Vec<TraceChunk<'static>>,
    schedules: Vec<Schedule>,
}

/// The requests to the thread that writes the file.
#[derive(Default)]
struct WriterRequests {
    write: bool,
    end: bool,
}

/// The texts of the trace, each with a number.
#[derive(Default)]
struct TraceTexts {
    /// The descriptions by address. The table keeps each description alive, so that its address is
    /// not reused.
    known: HashMap<usize, KnownText>,
    lines: HashMap<usize, u32>,
    by_text: HashMap<String, u32>,
    /// The texts that are not in the file yet.
    new: Vec<NewText>,
}

/// A description of an operation, with the number of its text.
struct KnownText {
    number: u32,
    #[expect(dead_code, reason = "it keeps the description's address in use")]
    what: Arc<dyn fmt::Display + Send + Sync>,
}

/// A text that is not in the trace's file yet.
struct NewText {
    number: u32,
    text: String,
}

thread_local! {
    /// A byte of each thread. Its address tells threads apart; its value is unused.
    static HERE: u8 = const { 0 };
}

impl Trace {
    /// Begins the trace: creates its file in `folder`, and starts the thread that writes it.
    /// Creates the folder if necessary, and replaces an older file. Must be called at most once.
    pub(crate) fn begin(&self, folder: &Path, about: TraceHeader) -> io::Result<()> {
        let recorder = &self.0;
        std::fs::create_dir_all(folder)?;
        let path = folder.join(file::name(about.process));
        // A process that still writes an old trace keeps its file, which no longer has a name.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }

        let mut out = File::create_new(path)?;
        let (start, about) = about.begin();
        out.write_all(&file::beginning(&about)?)?;
        let began = start.saturating_duration_since(recorder.origin).as_nanos() as u64;

        let writing = recorder.clone();
        let thread = thread::Builder::new().name("mpmd-trace".to_owned());
        *recorder.writer.lock() = Some(thread.spawn(move || writing.write_until_closed(out))?);
        recorder.began.store(began.max(1), Ordering::Relaxed);
        Ok(())
    }

    /// Returns true if tracing is on.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.began.load(Ordering::Relaxed) != 0
    }

    /// Returns the current time; 0 if tracing is off. An event that began at 0 counts from the
    /// beginning of the trace.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        if self.is_on() { self.0.now() } else { 0 }
    }

    /// Returns the recorder and the time at which the trace began; `None` if tracing is off.
    #[inline]
    fn on(&self) -> Option<(&TraceRecorder, u64)> {
        let began = self.0.began.load(Ordering::Relaxed);
        (began != 0).then(|| (&*self.0, began))
    }

    /// Records an event at the current time. If tracing is off, does nothing and does not call the
    /// closure.
    #[inline]
    pub(crate) fn note(&self, what: impl FnOnce() -> TraceEventKind) {
        if let Some((recorder, began)) = self.on() {
            recorder.push(began, recorder.now(), what());
        }
    }

    /// Records an event at the time `at`, a result of [`now`](Self::now). Does nothing if tracing
    /// is off.
    #[inline]
    pub(crate) fn note_at(&self, at: u64, what: impl FnOnce() -> TraceEventKind) {
        if let Some((recorder, began)) = self.on() {
            recorder.push(began, at, what());
        }
    }

    /// Records that the program issued operation `op` at line `at`. The closure returns the
    /// description of the operation. For a move, `source` is the operation that made the array.
    /// Does nothing if tracing is off.
    #[inline]
    pub(crate) fn issued(
        &self,
        op: u64,
        label: Option<Label>,
        at: &'static Location<'static>,
        source: Option<u64>,
        what: impl FnOnce() -> Arc<dyn fmt::Display + Send + Sync>,
    ) {
        if let Some((recorder, began)) = self.on() {
            let (text, line) = {
                let mut texts = recorder.texts.lock();
                (texts.description(what()), texts.line(at))
            };

            let what = TraceEventKind::Issued {
                op,
                label,
                text,
                line,
                source: source.unwrap_or(0),
            };
            recorder.push(began, recorder.now(), what);
        }
    }

    /// Returns a guard that records a wait of the program's thread at line `at`, from now until the
    /// guard is dropped. The text names the waiting call.
    pub(crate) fn wait(
        &self,
        what: &'static str,
        at: &'static Location<'static>,
    ) -> WaitRecording<'_> {
        WaitRecording {
            trace: self,
            what,
            at,
            since: self.now(),
        }
    }

    /// Records a wait of the program's thread, from the trace time `since` until now. `what`
    /// describes the awaited thing. Does nothing if tracing is off.
    pub(crate) fn waited(&self, since: u64, what: &str, at: &'static Location<'static>) {
        self.note_text(what, at, |text, line| TraceEventKind::Waited {
            since,
            text,
            line,
        });
    }

    /// Returns a guard that records a named range of the program's thread, from now until the guard
    /// is dropped. `at` is the line where the range begins.
    pub(crate) fn annotate<'a>(
        &self,
        name: &'a str,
        at: &'static Location<'static>,
    ) -> AnnotatedRange<'a> {
        let span = spans::annotation(name, at);
        AnnotatedRange {
            trace: self.clone(),
            name,
            at,
            since: self.now(),
            span,
        }
    }

    /// Records an event with a text and a line, at the current time. Does nothing if tracing is
    /// off.
    fn note_text(
        &self,
        text: &str,
        at: &'static Location<'static>,
        what: impl FnOnce(u32, u32) -> TraceEventKind,
    ) {
        if let Some((recorder, began)) = self.on() {
            let (text, line) = {
                let mut texts = recorder.texts.lock();
                (texts.of(text), texts.line(at))
            };
            recorder.push(began, recorder.now(), what(text, line));
        }
    }

    /// Records a comparison of this process's clock with the common clock. At time `at`, the common
    /// clock is at `server` nanoseconds since 1970, within `bound` nanoseconds.
    pub(crate) fn clock(&self, at: u64, server: i64, bound: u64) {
        if let Some((recorder, began)) = self.on() {
            let at = at.saturating_sub(began);
            recorder
                .extra
                .lock()
                .chunks
                .push(TraceChunk::Clock(ClockSample { at, server, bound }));
        }
    }

    /// Records the order in which a pipeline's ranks compute. Equal schedules are written once.
    pub(crate) fn schedule(&self, schedule: &Schedule) {
        let Some((recorder, _)) = self.on() else {
            return;
        };
        let mut extra = recorder.extra.lock();
        if !extra.schedules.contains(schedule) {
            let rows: Vec<String> = (0..schedule.ranks())
                .map(|rank| schedule.cells(rank).join(","))
                .collect();
            let rows = rows.join("\n");
            extra.schedules.push(schedule.clone());
            extra.chunks.push(TraceChunk::Schedule {
                name: schedule.name().to_owned(),
                rows,
            });
        }
    }

    /// Writes the remaining events and ends the file. Later events are discarded. Blocks until the
    /// file is written; the writer logs an error. Does nothing if tracing is off.
    pub(crate) fn close(&self) {
        let recorder = &self.0;
        let mut writer = recorder.writer.lock();
        recorder.began.store(0, Ordering::Relaxed);
        let Some(thread) = writer.take() else { return };
        recorder.wanted.lock().end = true;
        recorder.changed.notify_all();
        // A panic of the thread has already printed its message.
        let _ = thread.join();
    }
}

/// A running wait of the program's thread. It is recorded when the value is dropped.
pub(crate) struct WaitRecording<'a> {
    trace: &'a Trace,
    what: &'static str,
    at: &'static Location<'static>,
    since: u64,
}

impl Drop for WaitRecording<'_> {
    fn drop(&mut self) {
        self.trace.waited(self.since, self.what, self.at);
    }
}

/// A range of the program's thread that the program named. It is recorded when the value is
/// dropped, also by a panic. Holds the trace itself, so that the program stays free for other use.
pub(crate) struct AnnotatedRange<'a> {
    trace: Trace,
    name: &'a str,
    at: &'static Location<'static>,
    since: u64,
    /// The span of the range in the program's log.
    #[expect(dead_code, reason = "it ends when it is dropped")]
    span: EnteredSpan,
}

impl Drop for AnnotatedRange<'_> {
    fn drop(&mut self) {
        let since = self.since;
        let what = |text, line| TraceEventKind::Annotated { since, text, line };
        self.trace.note_text(self.name, self.at, what);
    }
}

impl Default for TraceRecorder {
    fn default() -> Self {
        Self {
            origin: now(),
            began: AtomicU64::new(0),
            lists: Default::default(),
            texts: Mutex::default(),
            extra: Mutex::default(),
            dropped: AtomicU64::new(0),
            wanted: Mutex::default(),
            changed: Condvar::new(),
            writer: Mutex::default(),
        }
    }
}

impl TraceRecorder {
    fn now(&self) -> u64 {
        since(self.origin).as_nanos() as u64
    }

    /// Adds an event of the trace that began at time `began`, unless that trace has ended. In the
    /// file, times count from `began`; earlier times become 0.
    fn push(&self, began: u64, at: u64, mut what: TraceEventKind) {
        if let TraceEventKind::Started { since, .. }
        | TraceEventKind::Waited { since, .. }
        | TraceEventKind::Annotated { since, .. }
        | TraceEventKind::CollectiveWaited { since, .. } = &mut what
        {
            *since = since.saturating_sub(began);
        }
        let event = TraceEvent {
            at: at.saturating_sub(began),
            what,
        };

        let here = HERE.with(|here| std::ptr::from_ref(here).addr() as u64);
        // Addresses of threads' stacks differ by at least a page.
        let list = (here >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        let mut list = self.lists[list as usize % LISTS].0.lock();
        // Under the lock: the writer takes the list for the last time after the trace has ended.
        if self.began.load(Ordering::Relaxed) != began {
            return;
        }

        if list.len() >= MOST_EVENTS {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        list.push(event);
        let many = list.len() == MANY_EVENTS;
        drop(list);
        if many {
            self.wanted.lock().write = true;
            self.changed.notify_all();
        }
    }

    fn write_until_closed(&self, mut out: File) {
        let mut told = 0;
        let mut spare = Vec::new();
        loop {
            let end = {
                let mut wanted = self.wanted.lock();
                if !wanted.write && !wanted.end {
                    self.changed.wait_for(&mut wanted, WRITE_EVERY);
                }
                wanted.write = false;
                wanted.end
            };

            let mut bytes = self.take(&mut spare);
            let dropped = self.dropped.load(Ordering::Relaxed);
            if dropped > told {
                told = dropped;
                TraceChunk::Dropped { events: dropped }.write(&mut bytes);
            }
            if end {
                TraceChunk::End.write(&mut bytes);
            }

            let written = out.write_all(&bytes);
            if end || written.is_err() {
                if let Err(error) = &written {
                    tracing::warn!(%error, "the trace of this process ends early: it \
                        cannot be written");
                    self.began.store(0, Ordering::Relaxed);
                }
                return;
            }
        }
    }

    /// Returns, as bytes for the file, everything recorded since the last call. `spare` is an empty
    /// list that is reused.
    fn take(&self, spare: &mut Vec<TraceEvent>) -> Vec<u8> {
        let mut events = Vec::new();
        for list in &self.lists {
            std::mem::swap(&mut *list.0.lock(), spare);
            events.append(spare);
        }

        // Taken after the events, so that all texts that they name are included. They come first in
        // the file.
        let texts = std::mem::take(&mut self.texts.lock().new);
        let extra = std::mem::take(&mut self.extra.lock().chunks);
        let mut bytes = Vec::new();
        for NewText { number, text } in texts {
            TraceChunk::Text { number, text }.write(&mut bytes);
        }
        extra.into_iter().for_each(|chunk| chunk.write(&mut bytes));
        file::write_events(&events, &mut bytes);
        bytes
    }
}

impl TraceTexts {
    fn description(&mut self, what: Arc<dyn fmt::Display + Send + Sync>) -> u32 {
        let address = Arc::as_ptr(&what).addr();
        if let Some(known) = self.known.get(&address) {
            return known.number;
        }

        let number = self.of(&what.to_string());
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        self.known.insert(address, KnownText { number, what });
        number
    }

    fn line(&mut self, at: &'static Location<'static>) -> u32 {
        let address = std::ptr::from_ref(at).addr();
        if let Some(number) = self.lines.get(&address) {
            return *number;
        }
        let number = self.of(&at.to_string());
        self.lines.insert(address, number);
        number
    }

    fn of(&mut self, text: &str) -> u32 {
        if let Some(number) = self.by_text.get(text) {
            return *number;
        }

        let number = self.by_text.len() as u32;
        if number as usize > MOST_TEXTS {
            return MOST_TEXTS as u32;
        }
        let text = match number as usize {
            MOST_TEXTS => "one of too many",
            _ => text,
        };
        self.new.push(NewText {
            number,
            text: text.chars().take(LONGEST_TEXT).collect(),
        });
        self.by_text.insert(text.to_owned(), number);
        number
    }
}

#[cfg(test)]
mod tests;
