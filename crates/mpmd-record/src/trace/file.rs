//! Trace files: one for each process. If a process dies, its file is readable up to the last
//! complete write.
//!
//! A file begins with eight magic bytes, the version, the length of the process's [`TraceHeader`],
//! and the `TraceHeader` as JSON. Then come *chunks*: the length in four bytes, and the content as
//! in control messages. Numbers are little-endian.

use std::borrow::Cow;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use mpmd_base::block::{Instant, SystemTime, UNIX_EPOCH};
use mpmd_proto::control;
use serde::{Deserialize, Serialize};

use super::event::TraceEvent;

const MAGIC: &[u8; 8] = b"mpmdtrc\n";

/// Version of the file format. Readers refuse other versions.
const VERSION: u32 = 4;

/// Number of events in a chunk of the file. If the file is cut off, the last incomplete chunk is
/// lost.
const EVENTS_TOGETHER: usize = 1024;

/// The description of a process in the header of its trace file.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct TraceHeader {
    /// The number of the process in the job.
    pub process: u32,
    /// Number of processes in the job.
    pub processes: u32,
    /// Job-wide number of each device that the process owns, indexed by the device's number in the
    /// process.
    pub devices: Vec<u32>,
    /// Kind of each device of the process, such as `cuda`. Empty in older files, where all devices
    /// are CPU devices.
    #[serde(default)]
    pub kinds: Vec<String>,
    /// The name of the process's transport.
    pub transport: String,
    /// The process id in the operating system.
    pub pid: u32,
    /// The file name of the program.
    pub program: String,
    /// Identifier of the process's monotonic clock. Processes with the same identifier read the
    /// same clock. Two empty identifiers do not count as the same.
    pub clock: String,
    /// Time of the monotonic clock when the trace began, in nanoseconds since the clock's zero.
    pub monotonic: u64,
    /// Error bound of `monotonic`, in nanoseconds.
    pub monotonic_bound: u64,
    /// Time of the process's wall clock when the trace began, in nanoseconds since 1970.
    pub unix: i64,
}

/// The trace of one process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessTrace {
    /// The description of the process.
    pub about: TraceHeader,
    /// Events, sorted by time.
    pub events: Vec<TraceEvent>,
    /// Texts of the trace, indexed by the numbers in its events.
    pub texts: Vec<String>,
    /// Comparisons of the process's clock with the common clock of the job.
    pub clocks: Vec<ClockSample>,
    /// (name, rows in torch's text format) of each schedule that the program used.
    pub schedules: Vec<(String, String)>,
    /// Number of events that were dropped because they came faster than the file could be written.
    pub dropped: u64,
    /// Description of the damage at which reading the file stopped; `None` if the file is not
    /// damaged.
    pub truncated: Option<String>,
    /// True if the process ended its trace itself. False if the trace breaks off.
    pub ended: bool,
}

/// One comparison of a process's time with the job's common clock, which is that of the rendezvous
/// service.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ClockSample {
    /// Time in nanoseconds since the process's trace began.
    pub at: u64,
    /// Time of the common clock at the moment `at`, in nanoseconds since 1970.
    pub server: i64,
    /// Error bound of `server`, in nanoseconds.
    pub bound: u64,
}

/// The error that a trace cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file or the folder cannot be read.
    #[error("{}: {why}", .path.display())]
    Unreadable {
        /// Path of the file or folder.
        path: PathBuf,
        /// The system's error message.
        why: String,
    },
    /// The file is not a trace.
    #[error("{} is not the trace of a process: {why}", .path.display())]
    NotATrace {
        /// Path of the file.
        path: PathBuf,
        /// The reason that the file is not a trace.
        why: TraceFault,
    },
    /// The folder contains no traces.
    #[error("{} has no file process-<n>.trace: run a program with `mpmd run --trace \
        {0}`", .path.display())]
    Empty {
        /// Path of the folder.
        path: PathBuf,
    },
}

/// The reason that a file or a folder is not a trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFault {
    /// The file does not begin as a trace.
    #[error("it begins otherwise")]
    Magic,
    /// The file ends after its magic bytes.
    #[error("it is empty")]
    Empty,
    /// The trace has another format version.
    #[error("it is of version {found}, and this program reads {VERSION}")]
    Version {
        /// The version of the trace.
        found: u32,
    },
    /// The file ends within its header.
    #[error("it breaks off in its beginning")]
    CutHeader,
    /// The header is invalid.
    #[error(transparent)]
    Header(#[from] serde_json::Error),
    /// The folder has trace files, but none of them can be read.
    #[error("{first}")]
    NoneReadable {
        /// The error message for the first file, which includes the file's name.
        first: String,
    },
}

/// The reason that a chunk of a trace file is damaged.
#[derive(Debug, thiserror::Error)]
enum ChunkFault {
    #[error("a part of the trace is not whole")]
    Cut,
    #[error(transparent)]
    Encoding(#[from] control::ControlError),
    #[error("a text comes before its turn")]
    TextOrder,
}

/// Returns the file name of the trace of a process, without the folder.
pub fn name(process: u32) -> String {
    format!("process-{process}.trace")
}

impl TraceHeader {
    /// Sets the times of the clocks in the header to now, when the trace begins. Returns (now,
    /// header).
    pub fn begin(self) -> (Instant, Self) {
        let monotonic = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
        };

        // Uses the quickest of 8 reads: the thread may have slept in a slower one.
        let look = |_| {
            let before = monotonic();
            let now = (Instant::now(), unix_now());
            let trip = monotonic() - before;
            (trip, before + trip / 2, now)
        };

        let best = (0..8).map(look).min_by_key(|(trip, ..)| *trip);
        let (trip, monotonic, (start, unix)) = best.unwrap_or_else(|| look(0));
        (
            start,
            Self {
                monotonic,
                monotonic_bound: trip / 2,
                unix,
                clock: own_clock(),
                ..self
            },
        )
    }
}

/// Returns the time of this process's wall clock, in nanoseconds since 1970.
pub fn unix_now() -> i64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns an identifier of the system's monotonic clock; empty if the system has none. It is the
/// same for all processes since a boot, except in other time namespaces.
fn own_clock() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
    if boot.is_empty() {
        boot
    } else {
        format!("{} {}", boot.trim(), space.display())
    }
}

/// The chunks that a trace file consists of.
#[derive(Deserialize, Serialize)]
pub enum TraceChunk<'a> {
    Events(Cow<'a, [TraceEvent]>),
    Text { number: u32, text: String },
    Clock(ClockSample),
    Schedule { name: String, rows: String },
    Dropped { events: u64 },
    End,
}

impl TraceChunk<'_> {
    /// Appends the chunk to the bytes of a file. Omits a chunk that is too long for a control
    /// message.
    pub fn write(&self, out: &mut Vec<u8>) {
        if let Ok(content) = control::encode(self) {
            out.extend((content.len() as u32).to_le_bytes());
            out.extend(content);
        }
    }
}

pub fn write_events(events: &[TraceEvent], out: &mut Vec<u8>) {
    let chunks = events.chunks(EVENTS_TOGETHER);
    chunks.for_each(|events| TraceChunk::Events(events.into()).write(out));
}

/// Returns the first bytes of a trace file: magic bytes, version and header.
pub fn beginning(about: &TraceHeader) -> std::io::Result<Vec<u8>> {
    let about = serde_json::to_vec(about)?;
    let mut bytes = Vec::new();
    bytes.write_all(MAGIC)?;
    bytes.write_all(&VERSION.to_le_bytes())?;
    bytes.write_all(&(about.len() as u32).to_le_bytes())?;
    bytes.write_all(&about)?;
    Ok(bytes)
}

impl ProcessTrace {
    /// Reads a trace file. If the file is cut off or damaged, reads up to that point and sets
    /// [`truncated`](Self::truncated).
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not begin like a trace of this format version.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
        Self::of_bytes(&bytes).map_err(|why| TraceError::NotATrace {
            path: path.to_owned(),
            why,
        })
    }

    /// Reads all traces in a folder. Of several jobs, takes the one that began last. Returns
    /// (traces sorted by process, problems). Problems are files that are missing, of another job,
    /// or not traces.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read, or has no trace.
    pub fn read_all(folder: &Path) -> Result<(Vec<Self>, Vec<String>), TraceError> {
        let mut traces = Vec::new();
        let mut wrong = Vec::new();
        let mut found = Vec::new();

        for entry in std::fs::read_dir(folder).map_err(|error| unreadable(folder, &error))? {
            let path = entry.map_err(|error| unreadable(folder, &error))?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            let number = name
                .strip_prefix("process-")
                .and_then(|name| name.strip_suffix(".trace"));
            if let Some(number) = number.and_then(|number| number.parse::<u32>().ok()) {
                found.push((number, path));
            }
        }

        found.sort();
        for (_, path) in &found {
            // A pipe would have to wait for a writer.
            if !path.is_file() {
                wrong.push(format!(
                    "{} is no regular file: it is left out",
                    path.display()
                ));
                continue;
            }
            match Self::read(path) {
                Ok(trace) => traces.push(trace),
                Err(error) => wrong.push(error.to_string()),
            }
        }

        if traces.is_empty() {
            return match wrong.into_iter().next() {
                Some(first) => Err(TraceError::NotATrace {
                    path: folder.to_owned(),
                    why: TraceFault::NoneReadable { first },
                }),
                None => Err(TraceError::Empty {
                    path: folder.to_owned(),
                }),
            };
        }

        traces.sort_by_key(|trace: &Self| trace.about.process);
        // An earlier job with more processes may have left files.
        let newest = traces.iter().max_by_key(|trace| trace.about.unix);
        let processes = newest.map_or(0, |trace| trace.about.processes);

        traces.retain(|trace| {
            let TraceHeader {
                process,
                processes: of,
                ..
            } = &trace.about;
            if *of != processes {
                wrong.push(format!(
                    "the trace of process {process} is of another job, of {of}: it is left out"
                ));
            }
            *of == processes
        });

        // Walks over the gaps between files: the number of processes comes from a file and may be
        // huge.
        let mut next = 0;
        for number in found
            .iter()
            .map(|(number, _)| *number)
            .filter(|number| *number < processes)
        {
            wrong.extend(missing(next..number));
            next = number + 1;
        }

        wrong.extend(missing(next..processes));
        Ok((traces, wrong))
    }

    /// Returns the text with index `number`; empty if the trace has no such text.
    pub fn text(&self, number: u32) -> &str {
        self.texts.get(number as usize).map_or("", String::as_str)
    }

    /// Parses the bytes of a trace file. If a chunk is damaged, stops before it and sets
    /// `truncated`. Fails if the beginning of the file is invalid.
    pub(super) fn of_bytes(bytes: &[u8]) -> Result<Self, TraceFault> {
        let mut rest = Rest(bytes);
        if rest.take(MAGIC.len()) != Some(MAGIC) {
            return Err(TraceFault::Magic);
        }

        let found = rest.number().ok_or(TraceFault::Empty)?;
        if found != VERSION {
            return Err(TraceFault::Version { found });
        }

        let length = rest.number().ok_or(TraceFault::CutHeader)?;
        let about = rest.take(length as usize).ok_or(TraceFault::CutHeader)?;
        let about = serde_json::from_slice(about)?;

        let mut trace = Self {
            about,
            ..Self::default()
        };

        while !rest.0.is_empty() {
            let at = bytes.len() - rest.0.len();
            let content = rest.number().and_then(|length| rest.take(length as usize));
            if let Err(why) = content
                .ok_or(ChunkFault::Cut)
                .and_then(|content| trace.chunk(content))
            {
                trace.truncated = Some(format!(
                    "it breaks off at byte {at} of {}: {why}",
                    bytes.len()
                ));
                break;
            }
        }

        trace.events.sort_by_key(|event| event.at);
        Ok(trace)
    }

    fn chunk(&mut self, content: &[u8]) -> Result<(), ChunkFault> {
        match control::decode(content)? {
            TraceChunk::Events(events) => self.events.extend(&*events),
            TraceChunk::Text { number, text } => {
                if number as usize > self.texts.len() {
                    return Err(ChunkFault::TextOrder);
                }
                self.texts.truncate(number as usize);
                self.texts.push(text);
            }
            TraceChunk::Clock(clock) => self.clocks.push(clock),
            TraceChunk::Schedule { name, rows } => self.schedules.push((name, rows)),
            TraceChunk::Dropped { events } => self.dropped = events,
            TraceChunk::End => self.ended = true,
        }
        Ok(())
    }
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
}

/// Returns the message that the traces of these processes are missing; `None` if the range is
/// empty.
fn missing(processes: Range<u32>) -> Option<String> {
    match processes.len() {
        0 => None,
        1 => Some(format!(
            "the trace of process {} is missing",
            processes.start
        )),
        _ => Some(format!(
            "the traces of processes {} to {} are missing",
            processes.start,
            processes.end - 1
        )),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> TraceError {
    TraceError::Unreadable {
        path: path.to_owned(),
        why: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::TraceEventKind;
    use super::*;

    fn whole() -> Vec<u8> {
        let mut bytes = beginning(&TraceHeader {
            process: 1,
            processes: 2,
            ..TraceHeader::default()
        })
        .unwrap();
        TraceChunk::Text {
            number: 0,
            text: "one".to_owned(),
        }
        .write(&mut bytes);
        let events: Vec<_> = (0..3)
            .map(|op| TraceEvent {
                at: op,
                what: TraceEventKind::Over { op },
            })
            .collect();
        write_events(&events, &mut bytes);
        TraceChunk::Clock(ClockSample {
            at: 1,
            server: -2,
            bound: 3,
        })
        .write(&mut bytes);
        TraceChunk::Schedule {
            name: "a".to_owned(),
            rows: "0F0\n1F0".to_owned(),
        }
        .write(&mut bytes);
        TraceChunk::Dropped { events: 4 }.write(&mut bytes);
        TraceChunk::End.write(&mut bytes);
        bytes
    }

    #[test]
    fn truncated_file_is_read_up_to_the_cut() {
        let bytes = whole();
        let all = ProcessTrace::of_bytes(&bytes).unwrap();
        assert_eq!(
            (all.events.len(), all.text(0), all.text(7), all.dropped),
            (3, "one", "", 4)
        );
        assert_eq!(
            all.clocks,
            [ClockSample {
                at: 1,
                server: -2,
                bound: 3
            }]
        );
        assert_eq!(all.schedules, [("a".to_owned(), "0F0\n1F0".to_owned())]);
        assert!(all.ended && all.truncated.is_none());
        let start = beginning(&all.about).unwrap().len();
        for cut in 0..bytes.len() {
            match ProcessTrace::of_bytes(&bytes[..cut]) {
                Err(_) => assert!(cut < start, "{cut}"),
                Ok(part) => {
                    assert!(
                        cut >= start && !part.ended && part.events.len() <= 3,
                        "{cut}"
                    );
                    assert!(part.events.iter().eq(&all.events[..part.events.len()]));
                }
            }
        }
        let part = ProcessTrace::of_bytes(&bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(part.events.len(), 3);
        assert!(part.truncated.unwrap().contains("breaks off at byte"));
    }

    #[test]
    fn files_of_an_earlier_job_are_ignored() {
        let folder = std::env::temp_dir().join(format!("mpmd-traces-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (process, processes, unix) in [(0, 3, 9), (1, 4, 5), (3, 4, 6)] {
            let about = TraceHeader {
                process,
                processes,
                unix,
                ..TraceHeader::default()
            };
            std::fs::write(folder.join(name(process)), beginning(&about).unwrap()).unwrap();
        }
        std::fs::write(folder.join("process-x.trace"), "nothing of ours").unwrap();
        let (traces, wrong) = ProcessTrace::read_all(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            traces
                .iter()
                .map(|trace| trace.about.process)
                .collect::<Vec<_>>(),
            [0]
        );
        let left_out = "the trace of process 1 is of another job, of 4: it is left out";
        let missing = "the trace of process 2 is missing";
        assert!(
            wrong.len() == 3 && wrong[0] == left_out && wrong[2] == missing,
            "{wrong:?}"
        );
    }

    #[test]
    fn pipe_with_a_name_of_a_trace_is_left_out() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let folder = std::env::temp_dir().join(format!("mpmd-pipe-traces-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let about = TraceHeader {
            process: 0,
            processes: 1,
            ..TraceHeader::default()
        };
        std::fs::write(folder.join(name(0)), beginning(&about).unwrap()).unwrap();
        mknodat(
            CWD,
            folder.join(name(1)),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let (traces, wrong) = ProcessTrace::read_all(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(traces.len(), 1);
        assert!(wrong[0].ends_with("process-1.trace is no regular file: it is left out"));
    }

    #[test]
    fn huge_process_count_gives_one_message() {
        let folder = std::env::temp_dir().join(format!("mpmd-wild-traces-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for process in [1, 2, 4] {
            let about = TraceHeader {
                process,
                processes: u32::MAX,
                ..TraceHeader::default()
            };
            std::fs::write(folder.join(name(process)), beginning(&about).unwrap()).unwrap();
        }
        let (traces, wrong) = ProcessTrace::read_all(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(traces.len(), 3);
        let missing = [
            "the trace of process 0 is missing",
            "the trace of process 3 is missing",
            "the traces of processes 5 to 4294967294 are missing",
        ];
        assert_eq!(wrong, missing);
    }

    #[test]
    fn invalid_traces_are_refused() {
        assert!(
            ProcessTrace::of_bytes(b"{}")
                .unwrap_err()
                .to_string()
                .contains("begins otherwise")
        );
        let mut bytes = whole();
        bytes[8] = 7;
        let why = ProcessTrace::of_bytes(&bytes).unwrap_err();
        assert_eq!(
            why.to_string(),
            "it is of version 7, and this program reads 4"
        );
        let nowhere = ProcessTrace::read_all(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(
            matches!(nowhere, TraceError::Unreadable { .. }),
            "{nowhere}"
        );
    }
}
