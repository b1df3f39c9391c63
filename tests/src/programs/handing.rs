//! Arrays in the memory of CUDA devices, sent from process to process. Also runs on CPU devices.

use mpmd_core::cuda::{Grid, Source};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::{Jit, ProcessId};

use super::Say;

/// Number of elements of an array: more than fit into an eager message.
const ELEMENTS: usize = 64 << 10;

/// Number of rows of arrays that are moved in parts. They have half as many columns.
const ROWS: usize = 96;

/// Number of arrays that are sent before one of them is checked.
const AT_ONCE: usize = 200;

static ADD: Source = Source::cuda(
    "add.cu",
    r#"
    extern "C" __global__ void add(unsigned long long n, float a, const float *x, float *y) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] + a;
    }
    "#,
);

static NEVER: Source = Source::cuda(
    "never.cu",
    r#"
    extern "C" __global__ void never(volatile float *y) {
        while (y[0] == y[0] || y[0] != y[0]) {}
    }
    "#,
);

/// A kernel that never ends on a CUDA device.
struct Never;

impl Kernel for Never {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let cuda = cx
            .cuda()
            .ok_or_else(|| Error::kernel("it needs a CUDA device"))?;
        cuda.launch(&NEVER, "never", Grid::over(1), &[(&mut y).into()])
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&NEVER]
    }
}

/// A kernel that adds a number to all elements.
struct Add(f32);

impl Kernel for Add {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            let n = x.region().elements();
            let args = [n.into(), self.0.into(), (&x).into(), (&mut y).into()];
            return cuda.launch(&ADD, "add", Grid::over(n), &args);
        }
        for (y, x) in y
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(x.as_slice::<f32>()?)
        {
            *y = x + self.0;
        }
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&ADD]
    }
}

/// Runs `handing MODE`, where `MODE` is one of
///
/// - `whole ROUNDS`: arrays go around all processes, each of which adds 1. Process 0 checks the
///   results;
/// - `parts`: an array in rows becomes one in columns, then one in rows again, then a whole one on
///   each process;
/// - `at-once`: each process and the one after it hold many arrays before any is checked;
/// - `unfinished`: process 1 gets an array that the device of process 0 never finishes. The test
///   kills process 0, so the array fails. Then process 1 checks that its device still works;
/// - `steps`: like `whole`, until the test ends it. Prints each step. Every process holds some
///   arrays of all others.
///
/// At the end each process prints how often it opened memory of others, and the bytes that its
/// device copied.
pub(super) fn hand(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let mut hand = Hand::new(p)?;
    // The first round causes everything that is done only once.
    hand.round(p, 0)?;
    let before = counted();
    match args {
        ["whole", rounds] => {
            let rounds: usize = rounds.parse().map_err(|_| Error::kernel("whole ROUNDS"))?;
            let mut home = Vec::new();
            for round in 0..rounds {
                home.push((round, hand.once_around(p, round)?));
                if home.len() == 10 {
                    home.drain(..)
                        .try_for_each(|(round, x)| hand.check(p, round, &x))?;
                }
            }
            home.drain(..)
                .try_for_each(|(round, x)| hand.check(p, round, &x))?;
        }
        ["parts"] => parts(p)?,
        ["at-once"] => hand.at_once(p)?,
        ["unfinished"] => return hand.unfinished(p, say),
        ["steps"] => {
            let mut held = std::collections::VecDeque::new();
            for step in 0.. {
                held.extend(hand.around(p, step)?);
                while held.len() > 20 * p.processes() {
                    held.pop_front();
                }
                hand.round(p, step)?;
                p.step_end()?;
                say(format!("step {step}"));
            }
        }
        _ => return Err(Error::kernel("handing MODE")),
    }
    // No process prints before all have received their arrays.
    for process in 0..p.processes() as u32 {
        p.broadcast_value(ProcessId(process), 0u8, || Ok(0))?;
    }
    let after = counted();
    let names = [
        "memory opened",
        "memory opened later",
        "bytes copied on the device",
    ];
    let figures = [after[0], after[0] - before[0], after[1] - before[1]];
    names
        .iter()
        .zip(figures)
        .for_each(|(name, figure)| say(format!("{name}: {figure}")));
    Ok(())
}

/// Returns how often memory of other processes was opened, and the bytes that devices have copied
/// among themselves. Both are 0 without the software driver.
fn counted() -> [u64; 2] {
    let memory = softcuda::calls("cuIpcOpenMemHandle_v2").unwrap_or(0);
    [memory, softcuda::bytes("device_to_device").unwrap_or(0)]
}

struct Hand {
    on: Vec<Sharding>,
    add: Vec<Jit<Add>>,
}

impl Hand {
    fn new(p: &mut Program) -> Result<Self> {
        let meshes = p.mesh(&[("process", p.processes())])?.split("process")?;
        let mut add = Vec::new();
        for mesh in &meshes {
            add.push(
                p.jit(Add(1.0))
                    .on(mesh)
                    .outputs(mesh.replicated())
                    .build()?,
            );
        }
        Ok(Self {
            on: meshes.iter().map(|mesh| mesh.replicated()).collect(),
            add,
        })
    }

    /// Sends an array around all processes, each of which adds 1 to it. Returns the array after
    /// each hop; the last one is back on process 0.
    fn around(&mut self, p: &mut Program, number: usize) -> Result<Vec<MpmdArray>> {
        let mut x = p.array_from_fn(f32s([ELEMENTS]), &self.on[0], move |_, mut view| {
            let values = view.as_mut_slice::<f32>()?.iter_mut().enumerate();
            values.for_each(|(i, value)| *value = (number + i % 100) as f32);
            Ok(())
        })?;
        let mut seen = Vec::new();
        for at in 0..self.on.len() {
            // Sent on before it is computed.
            x = self.add[at].call(p, x)?;
            x = p.device_put(&x, &self.on[(at + 1) % self.on.len()])?;
            seen.push(x.clone());
        }
        Ok(seen)
    }

    fn once_around(&mut self, p: &mut Program, number: usize) -> Result<MpmdArray> {
        let mut seen = self.around(p, number)?;
        seen.pop()
            .ok_or_else(|| Error::kernel("there are no processes"))
    }

    fn round(&mut self, p: &mut Program, number: usize) -> Result<()> {
        let x = self.once_around(p, number)?;
        self.check(p, number, &x)
    }

    fn check(&self, p: &Program, number: usize, x: &MpmdArray) -> Result<()> {
        let Some(values) = x.to_host()? else {
            return Ok(());
        };
        let added = number + p.processes();
        let expected = (0..ELEMENTS).map(|i| (added + i % 100) as f32);
        match values
            .to_vec::<f32>()?
            .into_iter()
            .zip(expected)
            .position(|(found, wanted)| found != wanted)
        {
            None => Ok(()),
            Some(at) => Err(Error::kernel(format!(
                "WRONG value in round {number} at {at}"
            ))),
        }
    }

    fn unfinished(&mut self, p: &mut Program, say: &mut Say<'_>) -> Result<()> {
        let ones = |p: &mut Program, on: &Sharding| {
            p.array_from_fn(f32s([ELEMENTS]), on, |_, mut view| Ok(view.fill(1f32)?))
        };
        let mesh = p
            .mesh(&[("process", p.processes())])?
            .split("process")?
            .remove(0);
        let never = p.jit(Never).on(&mesh).outputs(mesh.replicated()).build()?;
        let x = ones(p, &self.on[0])?;
        let x = never.call(p, x)?;
        let x = p.device_put(&x, &self.on[1])?;
        let y = self.add[1].call(p, x)?;
        let local = ones(p, &self.on[1])?;
        say("issued".to_owned());
        if let Ok(Some(_)) = y.to_host() {
            return Err(Error::kernel(
                "WRONG: an array that is never finished was read",
            ));
        }
        let z = self.add[1].call(p, local)?;
        if let Some(values) = z.to_host()? {
            let right = values.to_vec::<f32>()?.iter().all(|value| *value == 2.0);
            say(format!("the device works: {right}"));
        }
        Ok(())
    }

    /// Sends many arrays to other processes, which send them on, before any is checked. Fails if a
    /// value is wrong.
    fn at_once(&mut self, p: &mut Program) -> Result<()> {
        let n = p.processes();
        let mut all = Vec::new();
        for number in 0..AT_ONCE {
            let x = p.array_from_fn(
                f32s([ELEMENTS / 16]),
                &self.on[number % n],
                move |_, mut view| Ok(view.fill(number as f32)?),
            )?;
            let x = self.add[number % n].call(p, x)?;
            let y = p.device_put(&x, &self.on[(number + 1) % n])?;
            let z = p.device_put(&y, &self.on[(number + 2) % n])?;
            all.push((number, [x, y, z]));
        }
        for (number, arrays) in all {
            for x in arrays {
                let Some(values) = x.to_host()? else { continue };
                if values
                    .to_vec::<f32>()?
                    .iter()
                    .any(|value| *value != number as f32 + 1.0)
                {
                    return Err(Error::kernel(format!("WRONG value in array {number}")));
                }
            }
        }
        Ok(())
    }
}

/// Moves an array from rows to columns, back to rows, and whole to all processes. Fails if a value
/// is wrong.
fn parts(p: &mut Program) -> Result<()> {
    let n = p.processes();
    let mesh = p.mesh(&[("x", n)])?;
    let shape = [ROWS, ROWS / 2];
    let rows = mesh.sharding(spec!["x"]);
    let x = p.array_from_fn(f32s(shape), &rows, |region, mut view| {
        let (rows, columns) = (region.range(0), region.range(1));
        let values = rows.flat_map(|i| columns.clone().map(move |j| (i * ROWS + j) as f32));
        view.as_mut_slice::<f32>()?
            .iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = value);
        Ok(())
    })?;
    let columns = p.device_put(&x, mesh.sharding(spec![None, "x"]))?;
    let back = p.device_put(&columns, &rows)?;
    let all = p.device_put(&back, mesh.replicated())?;
    for y in [&columns, &back, &all] {
        for shard in y.addressable_shards()? {
            let (rows, columns) = (shard.region.range(0), shard.region.range(1));
            let expected = rows.flat_map(|i| columns.clone().map(move |j| (i * ROWS + j) as f32));
            if shard.data.to_vec::<f32>()? != expected.collect::<Vec<_>>() {
                return Err(Error::kernel(format!("WRONG values in {}", shard.region)));
            }
        }
    }
    Ok(())
}
