//! Measures the time to issue a `jit` call.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use mpmd_core::cuda::{Cuda, Grid, Source};
use mpmd_core::prelude::{
    Context, Kernel, MpmdArray, Program, ShapedArray, Signature, View, ViewMut, f32s,
};
use mpmd_core::{Simulation, kernel};
use mpmd_layout::topology::{DeviceKind, Mesh};
use mpmd_layout::tree::Tree;

use crate::case::{BenchOutput, Case};
use crate::direct::Launches;
use crate::options::{BenchOptions, DeviceOption};

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct DispatchArgs {
    #[command(flatten)]
    options: BenchOptions,
    #[command(flatten)]
    on: DeviceOption,
}

/// Number of calls in a batch, between two reads of the clock. It is below the limit on running
/// ahead.
const BATCH: usize = 500;

/// The source of a kernel that does almost nothing. The reference measurement launches it by the
/// driver alone.
static NOTHING: Source = Source::cuda(
    "nothing.cu",
    r#"
extern "C" __global__ void nothing(const float *x, float *y) {
    if (threadIdx.x == 0) y[0] = x[0];
}
"#,
);

fn nothing(cuda: Cuda<'_>, x: &View<'_>, y: &mut ViewMut<'_>) -> mpmd_core::Result<()> {
    cuda.launch(&NOTHING, "nothing", Grid::new(1, 32), &[x.into(), y.into()])
}

/// A kernel from one array to one array that does almost nothing.
struct EmptyKernel;

impl Kernel for EmptyKernel {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> mpmd_core::Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> mpmd_core::Result<()> {
        match cx.cuda() {
            Some(cuda) => nothing(cuda, &x, &mut y),
            None => Ok(y.fill(0.0f32)?),
        }
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&NOTHING]
    }
}

/// A kernel from a list of arrays to an equally long list that does almost nothing.
struct EmptyTree;

impl Kernel for EmptyTree {
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, x: &Vec<ShapedArray>) -> mpmd_core::Result<Signature<Vec<ShapedArray>>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: kernel::Views<'_, Self::In>,
        mut y: kernel::ViewsMut<'_, Self::Out>,
    ) -> mpmd_core::Result<()> {
        if let (Some(cuda), Some(x), Some(y)) = (cx.cuda(), x.first(), y.first_mut()) {
            // One launch, as for one array: the rest is the subject of the measurement.
            return nothing(cuda, x, y);
        }
        y.into_iter().try_for_each(|mut y| Ok(y.fill(0.0f32)?))
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&NOTHING]
    }
}

/// A kernel from many arrays to one that does almost nothing. It has the form of a stage's forward
/// pass with its parameters.
struct First;

impl Kernel for First {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, x: &Vec<ShapedArray>) -> mpmd_core::Result<Signature<ShapedArray>> {
        Ok(Signature::new(x[0].clone()))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        _: kernel::Views<'_, Self::In>,
        mut y: ViewMut<'_>,
    ) -> mpmd_core::Result<()> {
        Ok(y.fill(0.0f32)?)
    }
}

pub(super) fn dispatch(args: &DispatchArgs) -> Result<ExitCode> {
    let options = args.options;
    let device = args.on.device;
    let mut cases = BenchOutput::new(options.json);
    local(options, device, &mut cases)?;
    // The other cases do not depend on the kind of the devices.
    if device == DeviceKind::Cpu {
        let mut results = Simulation::new(2, 2).run(|p| remote(p, options));
        // Process 0 takes no part in the calls.
        cases.extend(results.swap_remove(0)?);
        cases.extend(traced(options)?);
    }
    cases.end();
    Ok(ExitCode::SUCCESS)
}

/// Measures calls on a device of this process. On a GPU, batches of the first case alternate with
/// batches of launches by the driver alone.
fn local(options: BenchOptions, device: DeviceKind, cases: &mut BenchOutput) -> Result<()> {
    let mut p = Program::builder().device_kinds(&[device]).alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let x = scalar(&mut p, &mesh)?;
    let empty = p
        .jit(EmptyKernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let one = |p: &mut Program| empty.call(p, x.clone());

    let launches = match device {
        DeviceKind::Cuda => Some(Launches::new(&NOTHING, "nothing")?),
        DeviceKind::Cpu => None,
    };

    let mut bare = Vec::new();
    let issue = issue_times_with(&mut p, options.repeats, one, || {
        bare.extend(
            launches
                .as_ref()
                .map(|launches| launches.time(BATCH))
                .transpose()?,
        );
        Ok(())
    })?;
    let issue = Case::micros("jit issue", "empty, 1 leaf", issue);
    if bare.is_empty() {
        cases.push(issue.within(1.0));
    } else {
        let launch = Case::micros("launch", "by the driver alone", bare);
        cases.extend([issue.over("launch", &launch), launch]);
    }

    let complete = complete_times(&mut p, options.repeats, one)?;
    cases.push(Case::micros("jit complete", "empty, 1 leaf", complete).within(5.0));

    let many = p
        .jit(EmptyTree)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let xs: Vec<MpmdArray> = (0..64)
        .map(|_| scalar(&mut p, &mesh))
        .collect::<mpmd_core::Result<_>>()?;
    let all = |p: &mut Program| many.call(p, xs.clone());

    let leaves = issue_times(&mut p, options.repeats, all)?;
    p.finish()?;
    cases.push(Case::micros("jit issue", "64 leaves in, 64 out", leaves).within(5.0));
    Ok(())
}

fn remote(p: &mut Program, options: BenchOptions) -> mpmd_core::Result<Vec<Case>> {
    let device = p.topology().device_ids()[1];
    let mesh = p.mesh_of(&[("x", 1)], &[device])?;
    let x = scalar(p, &mesh)?;
    let empty = p
        .jit(EmptyKernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let one = |p: &mut Program| empty.call(p, x.clone());
    let times = issue_times(p, options.repeats, one)?;
    let mut cases = vec![Case::micros("jit issue", "no part in it", times).within(0.1)];

    let many = p
        .jit(EmptyTree)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let first = p.jit(First).on(&mesh).outputs(mesh.replicated()).build()?;

    for leaves in [64, 300] {
        let xs = (0..leaves)
            .map(|_| scalar(p, &mesh))
            .collect::<mpmd_core::Result<Vec<_>>>()?;
        // Each call takes clones of the handles, so no call with as many leaves costs less.
        let clones = Case::micros(
            "handles cloned",
            format!("{leaves} leaves"),
            clone_times(options.repeats, &xs),
        );

        let times = issue_times(p, options.repeats, |p| many.call(p, xs.clone()))?;
        let parameters = format!("no part, {leaves} leaves in, {leaves} out");
        let issued = Case::micros("jit issue", parameters, times);
        let times = issue_times(p, options.repeats, |p| first.call(p, xs.clone()))?;
        let parameters = format!("no part, {leaves} leaves in, 1 out");
        let reduced = Case::micros("jit issue", parameters, times);

        cases.extend([
            issued.over("clones", &clones),
            reduced.over("clones", &clones),
            clones,
        ]);
    }
    Ok(cases)
}

/// Measures issue and completion of a call with one array while the program is traced. Each call
/// records four events, on two threads.
fn traced(options: BenchOptions) -> Result<Vec<Case>> {
    let folder = tempfile::tempdir()?;
    let mut p = Program::builder().trace(folder.path()).alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let x = scalar(&mut p, &mesh)?;
    let empty = p
        .jit(EmptyKernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let one = |p: &mut Program| empty.call(p, x.clone());
    let issue = issue_times(&mut p, options.repeats, one)?;
    let complete = complete_times(&mut p, options.repeats, one)?;
    p.finish()?;
    Ok(vec![
        Case::micros("jit issue", "empty, 1 leaf, traced", issue),
        Case::micros("jit complete", "empty, 1 leaf, traced", complete),
    ])
}

/// Returns the mean time from a call until its result is ready, over a hundred calls for each
/// sample.
fn complete_times(
    p: &mut Program,
    repeats: usize,
    call: impl Fn(&mut Program) -> mpmd_core::Result<MpmdArray>,
) -> mpmd_core::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        let start = Instant::now();
        for _ in 0..100 {
            call(p)?.block_until_ready()?;
        }
        times.push(start.elapsed() / 100);
    }
    Ok(times)
}

fn scalar(p: &mut Program, mesh: &Mesh) -> mpmd_core::Result<MpmdArray> {
    p.array_from_fn(f32s([]), mesh.replicated(), |_, mut view| {
        Ok(view.fill(1.0f32)?)
    })
}

/// Returns the mean time to clone the handles `xs` and drop the clones, for each of `repeats`
/// batches.
fn clone_times(repeats: usize, xs: &[MpmdArray]) -> Vec<Duration> {
    let batch = |_| {
        let start = Instant::now();
        for _ in 0..BATCH {
            drop(black_box(xs.to_vec()));
        }
        start.elapsed() / BATCH as u32
    };
    (0..repeats).map(batch).collect()
}

/// Returns the mean time to issue a call, for each of `repeats` batches. Waits for all results
/// between two batches.
fn issue_times<T: Tree<Leaf = MpmdArray>>(
    p: &mut Program,
    repeats: usize,
    call: impl FnMut(&mut Program) -> mpmd_core::Result<T>,
) -> mpmd_core::Result<Vec<Duration>> {
    issue_times_with(p, repeats, call, || Ok(()))
}

/// Measures like [`issue_times`], and calls `between` after each batch.
fn issue_times_with<T: Tree<Leaf = MpmdArray>>(
    p: &mut Program,
    repeats: usize,
    mut call: impl FnMut(&mut Program) -> mpmd_core::Result<T>,
    mut between: impl FnMut() -> mpmd_core::Result<()>,
) -> mpmd_core::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(repeats);
    // Keeps the results of the previous batch, as a program keeps the arrays of its last step.
    // Otherwise the allocator would return the memory to the system and fault it in again.
    let mut kept = Vec::new();
    for _ in 0..repeats {
        let mut results = Vec::with_capacity(BATCH);
        let start = Instant::now();
        for _ in 0..BATCH {
            results.push(call(p)?);
        }
        times.push(start.elapsed() / BATCH as u32);
        for y in results.iter().flat_map(Tree::leaves) {
            y.block_until_ready()?;
        }
        kept = results;
        between()?;
    }
    drop(kept);
    Ok(times)
}
