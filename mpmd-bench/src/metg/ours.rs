//! A graph as a program of the framework: a `jit` call for each task, and a `device_put` for each
//! output that other processes need.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mpmd_core::prelude::{Error, MpmdArray, Program, Result};
use mpmd_core::{Jit, ProcessId, Recorded};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceId;
use rustix::time::{ClockId, clock_gettime};

use super::graph::Graph;
use super::task::Task;

/// A graph with tasks of a set length. Each process has one device with `points` points of every
/// row.
pub(super) struct Ours {
    /// The points of this process.
    own: Range<usize>,
    graph: Graph,
    points: usize,
    /// The nodes of each row.
    rows: Vec<Vec<Node>>,
    /// Tasks of this process that have succeeded.
    done: Arc<AtomicU64>,
}

/// A task in the graph.
struct Node {
    task: Jit<Task>,
    makers: Vec<usize>,
    /// The other devices that need the output, if there are any.
    readers: Option<Sharding>,
}

/// The output of a task, and its copies on other devices.
struct Output {
    here: MpmdArray,
    there: Option<MpmdArray>,
}

impl Ours {
    /// Builds the graph with tasks of `iterations` iterations and outputs of `bytes` bytes. The job
    /// has one device for each process.
    pub(super) fn new(
        p: &Program,
        graph: Graph,
        points: usize,
        bytes: usize,
        iterations: u64,
    ) -> Result<Self> {
        let devices = p.topology().device_ids().to_vec();
        let meshes = devices
            .iter()
            .map(|device| p.mesh_of(&[("device", 1)], &[*device]))
            .collect::<Result<Vec<_>>>()?;
        let done = Arc::<AtomicU64>::default();
        let mut rows: Vec<Vec<Node>> = Vec::with_capacity(graph.rows);
        for row in 0..graph.rows {
            let width = graph.width_at(row);
            let mut nodes = Vec::with_capacity(width);
            let mut readers = vec![BTreeSet::<DeviceId>::new(); graph.width];
            for point in 0..width {
                let makers = graph.dependencies(row, point);
                for maker in makers.iter().filter(|maker| *maker / points != point / points) {
                    readers[*maker].insert(devices[point / points]);
                }
                let mesh = &meshes[point / points];
                let elements = bytes / size_of::<i64>();
                let (makers_of_task, done) = (makers.clone(), done.clone());
                let task = Task { row, point, makers: makers_of_task, elements, iterations, done };
                let task = p.jit(task).on(mesh).outputs(mesh.replicated()).build()?;
                nodes.push(Node { task, makers, readers: None });
            }
            for (node, readers) in rows.last_mut().into_iter().flatten().zip(readers) {
                let readers: Vec<DeviceId> = readers.into_iter().collect();
                if !readers.is_empty() {
                    let mesh = p.mesh_of(&[("reader", readers.len())], &readers)?;
                    node.readers = Some(mesh.replicated());
                }
            }
            rows.push(nodes);
        }
        let first = p.process().index() * points;
        Ok(Self { own: first..first + points, graph, points, rows, done })
    }

    /// Issues the graph call by call. Returns the outputs of the last row.
    fn issue(&self, p: &mut Program) -> Result<Vec<MpmdArray>> {
        let mut before: Vec<Output> = Vec::new();
        for nodes in &self.rows {
            let mut now = Vec::with_capacity(nodes.len());
            for (point, Node { task, makers, readers }) in nodes.iter().enumerate() {
                let input = |maker: &usize| {
                    let Output { here, there } = &before[*maker];
                    let is_near = maker / self.points == point / self.points;
                    there.as_ref().filter(|_| !is_near).unwrap_or(here).clone()
                };
                let here = task.call(p, makers.iter().map(input).collect())?;
                let to = readers.as_ref();
                let there = to.map(|to| p.device_put(&here, to)).transpose()?;
                now.push(Output { here, there });
            }
            before = now;
        }
        Ok(before.into_iter().map(|output| output.here).collect())
    }

    /// Runs the graph once and records it.
    pub(super) fn record(&self, p: &mut Program) -> Result<Replay> {
        let (last, step) = p.record(Vec::new(), |p, _: Vec<MpmdArray>| self.issue(p))?;
        ready(&last)?;
        Ok(step)
    }

    /// Runs the graph `rounds` times: replays `step`, or issues it call by call if that is `None`.
    /// Returns the time from the first start of a process to the last end, on every process. With
    /// fewer cores than processes, some start late. All processes must call this together.
    ///
    /// # Errors
    ///
    /// If an operation or a task fails, or if a task has not run.
    pub(super) fn run(
        &self,
        p: &mut Program,
        step: Option<&Replay>,
        rounds: u64,
    ) -> Result<Duration> {
        all(p, ())?;
        self.done.store(0, Ordering::Relaxed);
        let start = now();
        let mut last = Vec::new();
        for _ in 0..rounds {
            last = match step {
                Some(step) => step.replay(p, Vec::new())?,
                None => self.issue(p)?,
            };
        }
        ready(&last)?;
        let end = now();
        let (done, expected) =
            (self.done.load(Ordering::Relaxed), rounds * self.graph.tasks(&self.own) as u64);
        if done != expected {
            return Err(Error::kernel(format!("{done} tasks have run here, not {expected}")));
        }
        let times = all(p, (start, end))?;
        let first = times.iter().map(|(start, _)| *start).min().unwrap_or_default();
        let last = times.iter().map(|(_, end)| *end).max().unwrap_or_default();
        Ok(last - first)
    }
}

/// A recorded graph.
pub(super) type Replay = Recorded<Vec<MpmdArray>, Vec<MpmdArray>>;

/// Blocks until this process's part of the arrays is ready.
fn ready(arrays: &[MpmdArray]) -> Result<()> {
    arrays.iter().try_for_each(|array| array.block_until_ready().map(drop))
}

/// Returns the time of the clock that all processes of this machine share.
fn now() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().expect("a time after the start of the machine")
}

/// Sends `mine` to all processes. Returns the values of all, by process. All processes must call
/// this together.
fn all<T>(p: &mut Program, mine: T) -> Result<Vec<T>>
where
    T: Clone + serde::Serialize + serde::de::DeserializeOwned,
{
    let processes = p.processes();
    let of = |from| p.broadcast_value(ProcessId(from as u32), mine.clone(), || Ok(mine.clone()));
    (0..processes).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use mpmd_core::Simulation;

    use super::super::graph::Pattern;

    /// Runs `program` on three processes with two points each.
    fn on_three(pattern: Pattern, program: impl Fn(&mut Program, Ours) -> Result<()> + Sync) {
        let graph = Graph { pattern, width: 6, rows: 7 };
        let results = Simulation::new(3, 3).run(|p| {
            let ours = Ours::new(p, graph, 2, 32, 1)?;
            program(p, ours)
        });
        results.into_iter().for_each(|result| result.unwrap());
    }

    #[test]
    fn every_graph_runs_issued_and_replayed() {
        for pattern in Pattern::value_variants() {
            on_three(*pattern, |p, ours| {
                let step = ours.record(p)?;
                ours.run(p, Some(&step), 3)?;
                ours.run(p, None, 2)?;
                // A second run counts its own tasks only.
                ours.run(p, Some(&step), 1).map(drop)
            });
        }
    }

    #[test]
    fn missing_task_is_an_error() {
        on_three(Pattern::Fft, |p, mut ours| {
            ours.graph.rows += 1;
            let error = ours.run(p, None, 2).unwrap_err().to_string();
            assert!(error.contains("28 tasks have run here, not 32"), "{error}");
            Ok(())
        });
    }

    #[test]
    fn output_goes_only_to_other_devices_that_read_it() {
        on_three(Pattern::Stencil, |p, ours| {
            let devices = p.topology().device_ids().to_vec();
            let readers = |node: &Node| node.readers.as_ref().map(|to| to.devices().to_vec());
            let found: Vec<_> = ours.rows[0].iter().map(readers).collect();
            let to = |device: usize| Some(vec![devices[device]]);
            assert_eq!(found, [None, to(1), to(0), to(2), to(1), None]);
            // Nothing reads the last row.
            assert!(ours.rows[6].iter().all(|node| node.readers.is_none()));
            Ok(())
        });
    }
}
