//! Export of a merged run as Trace Event JSON, which Perfetto and `chrome://tracing` open.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::drawn::name;
use super::merge::{Operation, Run};

/// Thread ids of a process in the export: its program, its devices, then rows for outgoing and
/// incoming pieces. There are enough rows that the pieces of a row do not overlap.
const PROGRAM: u64 = 1;
const DEVICES: u64 = 10;
const GIVES: u32 = 1000;
const GETS: u32 = 2000;

impl Run {
    /// Returns the run as Trace Event JSON. Each process has its program's annotations with the
    /// waits in them, its devices' kernels, its outgoing and incoming pieces, and its memory.
    /// Arrows connect both ends of a piece. Times are in microseconds.
    pub fn to_trace_events(&self) -> Value {
        let mut events = Vec::new();
        for process in &self.processes {
            let number = process.process;
            events.push(json!({
                "name": "process_name", "ph": "M", "pid": number, "tid": 0,
                "args": {"name": format!("process {number}")},
            }));
            events.push(json!({
                "name": "process_sort_index", "ph": "M", "pid": number, "tid": 0,
                "args": {"sort_index": number},
            }));
            name_thread(&mut events, number, PROGRAM, "program");
            for device in 0..process.devices.len() as u32 {
                name_thread(
                    &mut events,
                    number,
                    DEVICES + u64::from(device),
                    &self.device_name(number, device),
                );
            }
        }
        self.kernel_events(&mut events);
        self.program_events(&mut events);
        self.piece_events(&mut events);
        for step in &self.steps {
            events.push(json!({
                "name": format!("step {}", step.number), "cat": "step", "ph": "i", "s": "g",
                "pid": self.processes.first().map_or(0, |process| process.process), "tid": PROGRAM,
                "ts": micros(step.start),
            }));
        }
        json!({
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "title": self.title,
                "times of different processes agree within, in us": micros(self.bound),
                "problems": self.problems,
            },
        })
    }

    fn kernel_events(&self, events: &mut Vec<Value>) {
        for kernel in &self.kernels {
            let operation = self.operation(kernel.process, kernel.op);
            let mut args = args(operation, kernel.op);
            if let Some(input) = kernel.waited_for {
                args["waited for"] = self.reason(kernel.process, input, kernel.since).into();
                args["waited, in us"] = micros(kernel.start - kernel.since).into();
            }
            if !kernel.ended {
                args["ended"] = false.into();
            }
            let label = operation.and_then(|operation| operation.label);
            events.push(json!({
                "name": name(operation, kernel.op),
                "cat": label.map_or("kernel", |label| label.role.name()),
                "ph": "X", "pid": kernel.process, "tid": DEVICES + u64::from(kernel.device),
                "ts": micros(kernel.start), "dur": length(kernel.start, kernel.end), "args": args,
            }));
            let memory_name =
                format!("memory of {}", self.device_name(kernel.process, kernel.device));
            for (at, memory) in [(kernel.start, kernel.memory.0), (kernel.end, kernel.memory.1)] {
                events.push(json!({
                    "name": memory_name,
                    "ph": "C",
                    "pid": kernel.process, "ts": micros(at), "args": {"bytes": memory},
                }));
            }
        }
    }

    /// Adds the annotations and the waits of the programs. Readers nest slices by their times; of
    /// slices with the same times the outer one must come first.
    fn program_events(&self, events: &mut Vec<Value>) {
        for range in &self.annotations {
            events.push(json!({
                "name": range.name, "cat": "annotation", "ph": "X", "pid": range.process,
                "tid": PROGRAM, "ts": micros(range.start), "dur": length(range.start, range.end),
                "args": {"at": range.at},
            }));
        }
        for wait in &self.waits {
            events.push(json!({
                "name": wait.call, "cat": "wait", "ph": "X", "pid": wait.process, "tid": PROGRAM,
                "ts": micros(wait.start), "dur": length(wait.start, wait.end),
                "args": {"at": wait.at},
            }));
        }
    }

    fn piece_events(&self, events: &mut Vec<Value>) {
        let mut lanes = Lanes::default();
        let known = |process: u32| self.processes.iter().any(|known| known.process == process);
        let mut pieces: Vec<_> =
            self.pieces.iter().filter_map(|piece| Some((piece, piece.on_its_way()?))).collect();
        pieces.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
        for (id, (piece, (start, end))) in pieces.into_iter().enumerate() {
            let ends = [(GIVES, piece.from), (GETS, piece.to)]
                .into_iter()
                .filter(|(_, process)| known(*process));
            let ends: Vec<(u32, u32)> = ends.collect();
            for (first, process) in &ends {
                let operation = self.operation(*process, piece.op);
                let name = name(operation, piece.op);
                let (word, other) =
                    if *first == GIVES { ("to", piece.to) } else { ("from", piece.from) };
                let mut args = args(operation, piece.op);
                args["piece"] = piece.piece.into();
                args["bytes"] = piece.bytes.into();
                for (name, time) in [
                    ("offered", piece.offered),
                    ("expected", piece.expected),
                    ("arrived", piece.arrived),
                    ("taken", piece.taken),
                ] {
                    if let Some(time) = time {
                        args[name] = micros(time).into();
                    }
                }
                let tid = lanes.place(*process, *first, start, end);
                let (ts, dur) = (micros(start), length(start, end));
                events.push(json!({
                    "name": format!("{name} {word} process {other}"), "cat": "piece", "ph": "X",
                    "pid": process, "tid": tid, "ts": ts, "dur": dur, "args": args,
                }));
                if ends.len() == 2 {
                    // An arrow is bound to the slice that contains its start or end.
                    let last = (ts + dur - 1e-3).max(ts);
                    let (ph, at) = if *first == GIVES { ("s", ts) } else { ("f", last) };
                    let mut arrow = json!({
                        "name": "piece", "cat": "piece", "ph": ph, "id": id, "pid": process,
                        "tid": tid, "ts": at,
                    });
                    if ph == "f" {
                        arrow["bp"] = "e".into();
                    }
                    events.push(arrow);
                }
            }
        }
        for ((process, tid), _) in lanes.ends {
            let (word, lane) =
                if tid >= GETS { ("gets", tid - GETS) } else { ("gives", tid - GIVES) };
            name_thread(events, process, tid.into(), &format!("{word} {lane}"));
        }
    }
}

/// The rows in use: the end of the last piece in each, by (process, thread id).
#[derive(Default)]
struct Lanes {
    ends: BTreeMap<(u32, u32), f64>,
}

impl Lanes {
    /// Returns the thread id of the first row, from `first` on, in which the piece overlaps no
    /// other. Takes the row. Above a thousand rows, all pieces share the last.
    fn place(&mut self, process: u32, first: u32, start: f64, end: f64) -> u32 {
        let last = first + GETS - GIVES - 1;
        let free = |tid: &u32| self.ends.get(&(process, *tid)).is_none_or(|taken| *taken <= start);
        let tid = (first..last).find(free).unwrap_or(last);
        self.ends.insert((process, tid), end);
        tid
    }
}

fn name_thread(events: &mut Vec<Value>, process: u32, tid: u64, name: &str) {
    events.push(json!({
        "name": "thread_name", "ph": "M", "pid": process, "tid": tid, "args": {"name": name},
    }));
    events.push(json!({
        "name": "thread_sort_index", "ph": "M", "pid": process, "tid": tid,
        "args": {"sort_index": tid},
    }));
}

fn args(operation: Option<&Operation>, op: u64) -> Value {
    let mut args = json!({"operation": op});
    if let Some(operation) = operation {
        args["what"] = (&*operation.description).into();
        args["at"] = (&*operation.at).into();
        args["issued"] = micros(operation.issued).into();
        if let Some(label) = operation.label {
            args["for"] = label.to_string().into();
        }
    }
    args
}

/// Returns the microseconds between two times in seconds, after rounding. Slices with a common end
/// keep it.
fn length(start: f64, end: f64) -> f64 {
    ((micros(end) - micros(start)) * 1e3).round() / 1e3
}

/// Converts seconds to microseconds, rounded to nanoseconds.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}
