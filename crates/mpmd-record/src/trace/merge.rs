//! The merged run: operations, kernels, pieces, waits and annotations from the traces of all
//! processes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::align::Aligned;
use super::event::{PieceStep, TraceEvent, TraceEventKind};
use super::file::ProcessTrace;
use crate::trace::Label;

/// The merged traces of a job. Times are in seconds since the first event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedRun {
    /// The file name of the program.
    pub title: String,
    /// Error bound between times of different processes, in seconds.
    pub bound: f64,
    /// Messages about missing or uncertain parts of the traces.
    pub problems: Vec<String>,
    /// The processes that have a trace, in ascending order of their numbers.
    pub processes: Vec<TracedProcess>,
    /// Each process's part of each operation, by (process, number of the operation).
    pub operations: BTreeMap<(u32, u64), TracedOperation>,
    /// Runs of kernels, sorted by process, device and start.
    pub kernels: Vec<KernelRun>,
    /// Waits of kernels in collectives, sorted by process, device and start.
    pub collective_waits: Vec<CollectiveWait>,
    /// Pieces of arrays sent between processes, sorted by operation, piece, sender and receiver.
    pub pieces: Vec<TracedPiece>,
    /// Waits of program threads, sorted by process and time.
    pub waits: Vec<ProgramWait>,
    /// Ranges that the programs gave a name, sorted by process and start. An outer range comes
    /// before the ranges inside it.
    pub annotations: Vec<Annotation>,
    /// Steps of the program, in order.
    pub steps: Vec<RunStep>,
    /// (name, rows in torch's text format) of each schedule that the program used.
    pub schedules: Vec<(String, String)>,
    /// Time at which the last kernel ended or the last piece arrived, in seconds.
    pub end: f64,
}

/// A process of a traced run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedProcess {
    /// The number of the process in the job.
    pub process: u32,
    /// Job-wide numbers of the devices that the process owns.
    pub devices: Vec<u32>,
    /// Kind of each device of the process, such as `cuda`. Empty in older files, where all devices
    /// are CPU devices.
    pub kinds: Vec<String>,
    /// Time of the last event of the process, in seconds.
    pub last: f64,
}

/// One process's part of an operation. Times are in seconds since the beginning of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedOperation {
    /// The operation's stage, microbatch and role in a pipeline; `None` outside of pipelines.
    pub label: Option<Label>,
    /// The description of the operation.
    pub description: Arc<str>,
    /// The source line that issued the operation, as `file:line:column`.
    pub at: Arc<str>,
    /// Time at which the program issued the operation.
    pub issued: f64,
    /// Time at which the first kernel began or the first piece was ready. If there is neither, the
    /// time of issue.
    pub started: f64,
    /// Time at which all parts of the operation on this process had ended. `None` if the trace ends
    /// earlier.
    pub ended: Option<f64>,
    /// For a move, the number of the operation that made the array.
    pub source: Option<u64>,
}

/// The work of one device for an operation. Times are in seconds since the beginning of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelRun {
    /// The number of the process in the job.
    pub process: u32,
    /// The device's index in the process.
    pub device: u32,
    /// The number of the operation.
    pub op: u64,
    /// Time at which the device took the operation from its queue.
    pub since: f64,
    /// Time at which the inputs were ready and the kernel began.
    pub start: f64,
    /// Time at which the kernel ended. If no end was recorded, the end of the process's trace.
    pub end: f64,
    /// True if the end of the kernel was recorded.
    pub ended: bool,
    /// Number of the operation whose output was the last input that the device waited for. `None`
    /// if all inputs were ready.
    pub waited_for: Option<u64>,
    /// Bytes of arrays on the device at the start of the kernel.
    pub memory_at_start: u64,
    /// Bytes of arrays on the device at the end of the kernel.
    pub memory_at_end: u64,
}

/// A wait of a kernel for values of other devices, in a collective. It lies within the kernel's
/// run. Times are in seconds since the beginning of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveWait {
    /// The number of the process in the job.
    pub process: u32,
    /// The device's index in the process.
    pub device: u32,
    /// The number of the operation.
    pub op: u64,
    /// Start of the wait.
    pub start: f64,
    /// End of the wait.
    pub end: f64,
}

/// A part of an array that was sent from one process to another. Times are in seconds, and `None`
/// if they were not recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TracedPiece {
    /// The number of the operation.
    pub op: u64,
    /// The number of the piece in the operation.
    pub piece: u64,
    /// The sending process.
    pub from: u32,
    /// The receiving process.
    pub to: u32,
    /// Size of the piece in bytes.
    pub bytes: u64,
    /// Time at which the bytes were ready to be sent.
    pub offered: Option<f64>,
    /// Time at which the bytes were given to the sender's transport.
    pub posted: Option<f64>,
    /// Time at which the sender's transport completed the send.
    pub left: Option<f64>,
    /// Time at which the receiver's program had issued the operation.
    pub expected: Option<f64>,
    /// Time at which the bytes arrived at the receiver.
    pub arrived: Option<f64>,
    /// Time at which the bytes were available to the receiver's operation.
    pub taken: Option<f64>,
}

/// A wait of a program's thread. Times are in seconds since the beginning of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramWait {
    /// The number of the process in the job.
    pub process: u32,
    /// Start of the wait.
    pub start: f64,
    /// End of the wait.
    pub end: f64,
    /// The name of the waiting call.
    pub call: Arc<str>,
    /// The source line of the wait, as `file:line:column`.
    pub at: Arc<str>,
}

/// A range of a program thread's time that the program gave a name. Times are in seconds since the
/// beginning of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Annotation {
    /// The number of the process in the job.
    pub process: u32,
    /// Start of the range.
    pub start: f64,
    /// End of the range.
    pub end: f64,
    /// The name that the program gave.
    pub name: Arc<str>,
    /// The source line of the range, as `file:line:column`.
    pub at: Arc<str>,
}

/// A step of the program, with the times of its kernels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunStep {
    /// Number of the step, from 1.
    pub number: u64,
    /// Number of the last operation before the step.
    pub after_op: u64,
    /// Number of the last operation of the step.
    pub last_op: u64,
    /// Start of the step's first kernel, in seconds.
    pub start: f64,
    /// Time in seconds at which all kernels of this step and of earlier steps have ended. Kernels
    /// of a later step may end before that.
    pub end: f64,
}

impl TracedPiece {
    /// Returns (start, end) of the transfer in seconds, or `None` if either was not recorded.
    pub fn on_its_way(&self) -> Option<(f64, f64)> {
        let start = self.posted.or(self.offered)?;
        let end = self.taken.or(self.arrived)?;
        Some((start, end.max(start)))
    }
}

impl TracedRun {
    /// Returns the name of a device within its process, such as `cpu 0`.
    pub(super) fn device_name(&self, process: u32, device: u32) -> String {
        let owner = self.processes.iter().find(|known| known.process == process);
        let kind = owner.and_then(|owner| owner.kinds.get(device as usize));
        format!("{} {device}", kind.map_or("cpu", String::as_str))
    }

    /// Merges the traces of a job's processes on one common clock. `problems` are the messages from
    /// reading the traces; the run keeps them.
    pub fn merge(traces: &[ProcessTrace], problems: Vec<String>) -> Self {
        let aligned = Aligned::of(traces);
        let first = |place: usize| {
            let first = traces[place].events.iter().map(begin_of).min();
            first.map(|at| (place, at))
        };

        let begin = (0..traces.len())
            .filter_map(first)
            .map(|(place, at)| aligned.time(place, at))
            .min();

        let run = Self {
            problems,
            ..Self::default()
        };
        let mut merging = Merging {
            run,
            pieces: BTreeMap::new(),
        };
        merging.run.bound = aligned.bound as f64 * 1e-9;
        merging
            .run
            .problems
            .extend(aligned.problems.iter().cloned());

        let mut step_ends: BTreeMap<u64, u64> = BTreeMap::new();
        for (place, trace) in traces.iter().enumerate() {
            let time =
                |at: u64| aligned.time(place, at).saturating_sub(begin.unwrap_or(0)) as f64 * 1e-9;
            merging.add(trace, &time);
            for event in &trace.events {
                if let TraceEventKind::StepEnd { step, op } = event.what {
                    step_ends.insert(step, op);
                }
            }
        }

        merging.finish(&step_ends)
    }

    /// Returns true if operation `op` belongs to one of the steps, or if the run has no steps.
    pub(super) fn is_of_a_step(&self, op: u64) -> bool {
        let ends = self.steps.first().zip(self.steps.last());
        ends.is_none_or(|(first, last)| first.after_op < op && op <= last.last_op)
    }

    /// Returns the part of process `process` in operation `op`, or `None` if its trace has none.
    pub fn operation(&self, process: u32, op: u64) -> Option<&TracedOperation> {
        self.operations.get(&(process, op))
    }

    /// Returns the pieces of operation `op`, from all processes.
    pub(super) fn pieces_of(&self, op: u64) -> &[TracedPiece] {
        let from = self.pieces.partition_point(|piece| piece.op < op);
        let until = self.pieces.partition_point(|piece| piece.op <= op);
        &self.pieces[from..until]
    }
}

/// Returns the time at which the activity that ends with this event began. For other events it is
/// the event's time. In nanoseconds since the process's trace began.
fn begin_of(event: &TraceEvent) -> u64 {
    match event.what {
        TraceEventKind::Waited { since, .. }
        | TraceEventKind::Annotated { since, .. }
        | TraceEventKind::CollectiveWaited { since, .. }
        | TraceEventKind::Started { since, .. } => since.min(event.at),
        _ => event.at,
    }
}

/// A [`TracedRun`] under construction, and its pieces so far.
struct Merging {
    run: TracedRun,
    pieces: BTreeMap<TracedPieceKey, TracedPiece>,
}

/// A piece of an operation, with its sender and receiver.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct TracedPieceKey {
    op: u64,
    piece: u64,
    from: u32,
    to: u32,
}

/// The state while the events of one process are merged.
struct ProcessMerge<'m> {
    run: &'m mut TracedRun,
    pieces: &'m mut BTreeMap<TracedPieceKey, TracedPiece>,
    process: u32,
    /// Time of the process's last event.
    last: f64,
    texts: Vec<Arc<str>>,
    /// For each device that runs a kernel, the kernel's index in `run.kernels`.
    running: HashMap<u32, usize>,
    /// Pieces that were posted and whose send is not complete, by ticket.
    tickets: HashMap<u64, TracedPieceKey>,
    /// Converts a time in the trace, in nanoseconds, to seconds since the beginning of the run.
    time: &'m dyn Fn(u64) -> f64,
}

impl ProcessMerge<'_> {
    fn add(&mut self, event: &TraceEvent) {
        let at = (self.time)(event.at);
        match event.what {
            TraceEventKind::Issued {
                op,
                label,
                text,
                line,
                source,
            } => {
                let operation = TracedOperation {
                    label,
                    description: self.text(text),
                    at: self.text(line),
                    issued: at,
                    started: f64::INFINITY,
                    ended: None,
                    source: (source != 0).then_some(source),
                };
                self.run.operations.insert((self.process, op), operation);
            }
            TraceEventKind::Started {
                op,
                device,
                since,
                input,
                memory,
            } => {
                self.running.insert(device, self.run.kernels.len());
                self.run.kernels.push(KernelRun {
                    process: self.process,
                    device,
                    op,
                    since: (self.time)(since),
                    start: at,
                    end: self.last.max(at),
                    ended: false,
                    waited_for: (input != 0).then_some(input),
                    memory_at_start: memory,
                    memory_at_end: memory,
                });
                self.start(op, at);
            }
            TraceEventKind::Ended { op, device, memory } => self.end_kernel(op, device, memory, at),
            TraceEventKind::Over { op } => {
                if let Some(operation) = self.run.operations.get_mut(&(self.process, op)) {
                    operation.ended = Some(at.max(operation.issued));
                }
            }
            TraceEventKind::Piece { .. } => self.add_piece(event.what, at),
            TraceEventKind::Left { ticket } => {
                let piece = self
                    .tickets
                    .remove(&ticket)
                    .and_then(|key| self.pieces.get_mut(&key));
                if let Some(piece) = piece {
                    piece.left = Some(at);
                }
            }
            TraceEventKind::Waited { since, text, line } => {
                let wait = ProgramWait {
                    process: self.process,
                    start: (self.time)(since),
                    end: at,
                    call: self.text(text),
                    at: self.text(line),
                };
                self.run.waits.push(wait);
            }
            TraceEventKind::Annotated { since, text, line } => {
                let annotation = Annotation {
                    process: self.process,
                    start: (self.time)(since),
                    end: at,
                    name: self.text(text),
                    at: self.text(line),
                };
                self.run.annotations.push(annotation);
            }
            TraceEventKind::StepEnd { .. } => {}
            TraceEventKind::CollectiveWaited { op, device, since } => {
                self.add_collective_wait(op, device, (self.time)(since), at);
            }
        }
    }

    fn text(&self, number: u32) -> Arc<str> {
        self.texts
            .get(number as usize)
            .cloned()
            .unwrap_or_else(|| Arc::from(""))
    }

    /// Moves the start of operation `op` forward to time `at` if it is later than that.
    fn start(&mut self, op: u64, at: f64) {
        if let Some(operation) = self.run.operations.get_mut(&(self.process, op)) {
            operation.started = operation.started.min(at);
        }
    }

    fn end_kernel(&mut self, op: u64, device: u32, memory: u64, at: f64) {
        let kernel = self
            .running
            .remove(&device)
            .and_then(|place| self.run.kernels.get_mut(place));
        if let Some(kernel) = kernel
            && kernel.op == op
        {
            kernel.end = at.max(kernel.start);
            kernel.ended = true;
            kernel.memory_at_end = memory;
        }
    }

    /// Adds a wait of the kernel that runs on the device. Ignores a wait of another operation: the
    /// start of its kernel was not recorded.
    fn add_collective_wait(&mut self, op: u64, device: u32, since: f64, end: f64) {
        let kernel = self.running.get(&device).map(|at| self.run.kernels[*at]);
        if let Some(kernel) = kernel.filter(|kernel| kernel.op == op) {
            // The trace may have begun during the wait.
            let start = since.max(kernel.start);
            self.run.collective_waits.push(CollectiveWait {
                process: self.process,
                device,
                op,
                start,
                end: end.max(start),
            });
        }
    }

    /// Records that a piece reached a stage of its transfer. Ignores events that are not
    /// [`TraceEventKind::Piece`].
    fn add_piece(&mut self, what: TraceEventKind, at: f64) {
        let TraceEventKind::Piece {
            step,
            op,
            piece,
            peer,
            bytes,
            ticket,
        } = what
        else {
            return;
        };

        let gives = matches!(step, PieceStep::Offered | PieceStep::Posted);
        let (from, to) = if gives {
            (self.process, peer)
        } else {
            (peer, self.process)
        };
        let key = TracedPieceKey {
            op,
            piece,
            from,
            to,
        };
        let known = self.pieces.entry(key).or_insert(TracedPiece {
            op,
            piece,
            from,
            to,
            ..TracedPiece::default()
        });
        known.bytes = known.bytes.max(bytes);
        *match step {
            PieceStep::Offered => &mut known.offered,
            PieceStep::Posted => &mut known.posted,
            PieceStep::Expected => &mut known.expected,
            PieceStep::Arrived => &mut known.arrived,
            PieceStep::Taken => &mut known.taken,
        } = Some(at);

        if step == PieceStep::Posted {
            self.tickets.insert(ticket, key);
        }
        if step != PieceStep::Expected {
            self.start(op, at);
        }
    }
}

impl Merging {
    fn add(&mut self, trace: &ProcessTrace, time: &dyn Fn(u64) -> f64) {
        self.say_what_is_missing(trace);
        let run = &mut self.run;
        if run.title.is_empty() {
            run.title.clone_from(&trace.about.program);
        }
        for schedule in &trace.schedules {
            if !run.schedules.contains(schedule) {
                run.schedules.push(schedule.clone());
            }
        }

        let process = trace.about.process;
        let last = trace.events.last().map_or(0.0, |event| time(event.at));
        run.processes.push(TracedProcess {
            process,
            devices: trace.about.devices.clone(),
            kinds: trace.about.kinds.clone(),
            last,
        });

        let texts = trace
            .texts
            .iter()
            .map(|text| Arc::from(text.as_str()))
            .collect();
        let mut merge = ProcessMerge {
            run,
            pieces: &mut self.pieces,
            process,
            last,
            texts,
            running: HashMap::new(),
            tickets: HashMap::new(),
            time,
        };
        for event in &trace.events {
            merge.add(event);
        }
    }

    fn say_what_is_missing(&mut self, trace: &ProcessTrace) {
        let process = trace.about.process;
        let problems = &mut self.run.problems;
        if let Some(why) = &trace.truncated {
            problems.push(format!(
                "the trace of process {process} is not whole: {why}"
            ));
        } else if !trace.ended {
            problems.push(format!(
                "process {process} did not end its trace: its last events are missing"
            ));
        }

        if trace.dropped > 0 {
            let events = trace.dropped;
            problems.push(format!(
                "process {process} dropped {events} events that came too fast to be written"
            ));
        }
    }

    fn finish(self, step_ends: &BTreeMap<u64, u64>) -> TracedRun {
        let Self { mut run, pieces } = self;
        run.pieces = pieces.into_values().collect();
        run.processes.sort_by_key(|process| process.process);
        run.waits
            .sort_by(|a, b| a.process.cmp(&b.process).then(a.start.total_cmp(&b.start)));
        run.annotations.sort_by(|a, b| {
            let by_start = a.process.cmp(&b.process).then(a.start.total_cmp(&b.start));
            by_start.then(b.end.total_cmp(&a.end))
        });

        let by_start = |a: &KernelRun, b: &KernelRun| {
            (a.process, a.device)
                .cmp(&(b.process, b.device))
                .then(a.start.total_cmp(&b.start))
        };
        run.kernels.sort_by(by_start);
        run.collective_waits.sort_by(|a, b| {
            (a.process, a.device)
                .cmp(&(b.process, b.device))
                .then(a.start.total_cmp(&b.start))
        });

        for operation in run.operations.values_mut() {
            // Bytes may arrive before the program issues their operation.
            let known = operation.started.is_finite();
            operation.started = if known {
                operation.started.max(operation.issued)
            } else {
                operation.issued
            };
            let started = operation.started;
            operation
                .ended
                .iter_mut()
                .for_each(|ended| *ended = ended.max(started));
        }

        let mut before = 0;
        let mut by_last: BTreeMap<u64, RunStep> = BTreeMap::new();
        for (number, op) in step_ends {
            let step = RunStep {
                number: *number,
                after_op: before,
                last_op: *op,
                start: f64::INFINITY,
                end: 0.0,
            };
            by_last.insert(*op, step);
            before = *op;
        }

        for kernel in &run.kernels {
            if let Some((_, step)) = by_last.range_mut(kernel.op..).next() {
                step.start = step.start.min(kernel.start);
                step.end = step.end.max(kernel.end);
            }
        }

        // A step without kernels took no time and is left out.
        let counts = |step: &RunStep| step.start.is_finite();
        run.steps = by_last.into_values().filter(counts).collect();

        let mut latest = 0.0;
        for step in &mut run.steps {
            step.end = step.end.max(latest);
            latest = step.end;
        }

        let kernels = run.kernels.iter().map(|kernel| kernel.end);
        let pieces = run
            .pieces
            .iter()
            .filter_map(TracedPiece::on_its_way)
            .map(|(_, end)| end);
        run.end = kernels.chain(pieces).fold(0.0, f64::max);
        run
    }
}
