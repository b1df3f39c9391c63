//! Executes the steps of a random program on a process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use mpmd_base::block::block_on;
use mpmd_core::kernel::View;
use mpmd_core::prelude::*;
use mpmd_core::random::{Key, uniform_f32};
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{MpmdObject, ProcessId, method};

use crate::kernels::{Failing, Op, Total, Work};
use crate::program::{Step, alone};

/// The bytes of the shards that a process holds at the end, by (array, device).
pub(crate) type Shards = BTreeMap<(usize, DeviceId), Vec<u8>>;

/// Faults of the program itself, rather than of its processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wrongs {
    /// The step whose kernel or method fails on a device, and the way in which it fails.
    pub(crate) fails: Option<(usize, Failing)>,
    /// The process and the number of the step that it leaves out.
    pub(crate) leaves_out: Option<(ProcessId, usize)>,
}

/// The state of a program on one process.
struct Execution<'a> {
    arrays: Vec<Option<MpmdArray>>,
    objects: Vec<Option<(Mesh, MpmdObject<Total>)>>,
    alive: &'a Arc<AtomicUsize>,
}

/// Executes the steps. Leaves out those in `removed`, and those that need the result of a removed
/// step. Returns the shards of this process at the end. `alive` is the count of living objects.
pub(crate) fn execute(
    p: &mut Program,
    steps: &[Step],
    removed: &BTreeSet<usize>,
    wrongs: &Wrongs,
    alive: &Arc<AtomicUsize>,
) -> Result<Shards> {
    let mut execution = Execution {
        arrays: Vec::new(),
        objects: Vec::new(),
        alive,
    };
    for (number, step) in steps.iter().enumerate() {
        let is_left_out = step.is_operation() && wrongs.leaves_out == Some((p.process(), number));
        let has_arrays = step
            .uses()
            .into_iter()
            .all(|used| execution.arrays[used].is_some());
        if removed.contains(&number) || is_left_out || !has_arrays {
            execution.skip(step);
        } else {
            let fails = wrongs
                .fails
                .filter(|(at, _)| *at == number)
                .map(|(_, failing)| failing);
            execution.step(p, step, fails)?;
        }
    }
    shards_of(execution.arrays.iter().map(Option::as_ref))
}

/// Returns this process's shards of the arrays.
pub(crate) fn shards_of<'a>(arrays: impl Iterator<Item = Option<&'a MpmdArray>>) -> Result<Shards> {
    let mut shards = Shards::new();
    for (i, array) in arrays.enumerate() {
        let Some(array) = array.filter(|array| !array.is_fully_remote()) else {
            continue;
        };
        for shard in array.addressable_shards()? {
            let twice = shards.insert((i, shard.device), shard.data.bytes().to_vec());
            assert!(twice.is_none());
        }
    }
    Ok(shards)
}

/// Creates an array of random values with the sharding `to`.
pub(crate) fn made(
    p: &mut Program,
    [rows, columns]: [usize; 2],
    to: &Sharding,
    key: u64,
) -> Result<MpmdArray> {
    p.array_from_fn(f32s([rows, columns]), to, move |region, mut view| {
        let elements = region
            .range(0)
            .flat_map(|i| region.range(1).map(move |j| (i * columns + j) as u64));
        let values = view.as_mut_slice::<f32>()?.iter_mut();
        values
            .zip(elements)
            .for_each(|(value, i)| *value = uniform_f32(Key(key), i));
        Ok(())
    })
}

impl Execution<'_> {
    /// Adds an empty place for each array or object that a skipped step would have made.
    fn skip(&mut self, step: &Step) {
        self.arrays.extend((0..step.makes()).map(|_| None));
        if let Step::Object { .. } = step {
            self.objects.push(None);
        }
    }

    fn array(&self, i: usize) -> MpmdArray {
        self.arrays[i].clone().expect("a step has its arrays")
    }

    fn step(&mut self, p: &mut Program, step: &Step, fails: Option<Failing>) -> Result<()> {
        match step {
            Step::Make { shape, to, key } => {
                self.arrays.push(Some(made(p, *shape, to, *key)?));
            }
            Step::Host { shape, to, value } => {
                let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| value + i as f32).collect();
                let host = MpmdArray::from_slice(shape, &values)?;
                self.arrays.push(Some(p.device_put(&host, to)?));
            }
            Step::Put {
                source,
                to,
                options,
            } => {
                let moved = p.device_put_with(&self.array(*source), to, *options)?;
                self.arrays.push(Some(moved));
                if options.donate {
                    self.arrays[*source] = None;
                }
            }
            Step::PutTree { sources, to } => {
                let tree: Vec<MpmdArray> = sources.iter().map(|i| self.array(*i)).collect();
                self.arrays
                    .extend(p.device_put(&tree, to)?.into_iter().map(Some));
            }
            Step::Scale { source, factor } => {
                let inputs = vec![self.array(*source), MpmdArray::scalar(*factor)];
                self.call(p, Op::Scale, inputs, false, fails)?;
            }
            Step::Reduce { source, axis, size } => {
                let x = self.array(*source);
                // Every device calls it with the declared number of elements: all of its part.
                let layout = bound(&x).1.layout(x.shape()).expect("it has a layout");
                let part = layout.regions()[0].shape();
                let op = Op::Reduce {
                    axis: axis.clone(),
                    size: *size,
                    part,
                };
                self.call(p, op, vec![x], false, fails)?;
            }
            Step::Update { source, donate } => {
                self.call(p, Op::Update, vec![self.array(*source)], *donate, fails)?;
                if *donate {
                    self.arrays[*source] = None;
                }
            }
            Step::Add { left, right } => {
                let inputs = vec![self.array(*left), self.array(*right)];
                self.call(p, Op::Add, inputs, false, fails)?;
            }
            Step::Microbatches { source, m } => {
                let parts = self.array(*source).microbatches(p, 0, *m)?;
                self.arrays.extend(parts.into_iter().map(Some));
            }
            Step::Replay {
                source,
                through,
                times,
            } => {
                let x = self.array(*source);
                self.arrays.push(Some(replayed(p, x, through, *times)?));
            }
            Step::Object { device } => {
                let (mesh, alive) = (alone(*device), self.alive.clone());
                let object = p.object(&mesh, move |_| Ok(Total::new(&alive)))?;
                self.objects.push(Some((mesh, object)));
            }
            Step::Append {
                object,
                value,
                shape,
            } => {
                let appended = self.append(p, *object, (*value, *shape), fails)?;
                self.arrays.push(appended);
            }
            Step::DropObject { object } => self.objects[*object] = None,
            Step::Then { source } => self.array(*source).then(drop),
            Step::Await { source } => drop(block_on(self.array(*source).into_future())?),
            Step::Drop { source } => self.arrays[*source] = None,
            Step::Agree { from, value, count } => {
                let from = ProcessId(from % p.processes() as u32);
                let values = vec![*value; *count];
                assert_eq!(
                    p.broadcast_value(from, values.clone(), || Ok(values.clone()))?,
                    values
                );
            }
            Step::Compare => p.step_end()?,
        }
        Ok(())
    }

    /// Calls a kernel on the mesh of the first input. The outputs have that input's sharding.
    fn call(
        &mut self,
        p: &mut Program,
        op: Op,
        inputs: Vec<MpmdArray>,
        donate: bool,
        fails: Option<Failing>,
    ) -> Result<()> {
        let (mesh, sharding) = bound(&inputs[0]);
        let fails = fails.map(|failing| (mesh.devices()[0], failing));
        let mut jit = p.jit(Work { op, fails }).on(&mesh).outputs(&sharding);
        if inputs.len() > 1 {
            jit = jit.inputs((&sharding, &sharding));
        }
        let jit = if donate {
            jit.donate("0").build()?
        } else {
            jit.build()?
        };
        self.arrays
            .extend(jit.call(p, inputs)?.into_iter().map(Some));
        Ok(())
    }

    fn append(
        &self,
        p: &mut Program,
        object: usize,
        (value, shape): (f32, [usize; 2]),
        fails: Option<Failing>,
    ) -> Result<Option<MpmdArray>> {
        let Some((mesh, object)) = &self.objects[object] else {
            return Ok(None);
        };
        let append = method(
            move |_: &ShapedArray| f32s(shape),
            move |total: &mut Total, x: View<f32>, mut y: mpmd_core::kernel::ViewMut<f32>| {
                total.sum += x[0];
                y.fill(total.sum);
                fails.map_or(Ok(()), Failing::fail)
            },
        );
        let append = append.with(u32::from(fails.is_some()));
        let append = p.method(append).on(mesh).build()?;
        Ok(Some(append.call(p, object, MpmdArray::scalar(value))?))
    }
}

/// Captures a step that moves an array to a sharding and back, and replays the step `times` times.
fn replayed(p: &mut Program, x: MpmdArray, through: &Sharding, times: usize) -> Result<MpmdArray> {
    let back = bound(&x).1;
    let (mut x, captured) = p.capture(x, |p, x: MpmdArray| -> Result<MpmdArray> {
        let there = p.device_put(&x, through)?;
        p.device_put(&there, &back)
    })?;
    for _ in 0..times {
        x = captured.replay(p, x)?;
    }
    Ok(x)
}

/// Returns the mesh of an array's sharding, and the sharding.
pub(crate) fn bound(x: &MpmdArray) -> (Mesh, Sharding) {
    let sharding = x.sharding().expect("it is placed").clone();
    (sharding.mesh().expect("it has a mesh").clone(), sharding)
}
