//! What it costs to issue a call.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use mpmd_core::prelude::{Context, Kernel, MpmdArray, Program, ShapedArray, Signature, View, ViewMut, f32s};
use mpmd_core::topology::Mesh;
use mpmd_core::tree::Tree;
use mpmd_core::{Simulation, kernel};

use super::{Case, Options, show};

/// Calls issued between two looks at the clock; below the bound on running ahead.
const BATCH: usize = 500;

/// Does nothing to one array.
struct Empty;

impl Kernel for Empty {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> mpmd_core::Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, _: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> mpmd_core::Result<()> {
        Ok(y.fill(0.0f32)?)
    }
}

/// Does nothing to many arrays.
struct EmptyTree;

impl Kernel for EmptyTree {
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, x: &Vec<ShapedArray>) -> mpmd_core::Result<Signature<Vec<ShapedArray>>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        _: kernel::Views<'_, Self::In>,
        y: kernel::ViewsMut<'_, Self::Out>,
    ) -> mpmd_core::Result<()> {
        y.into_iter().try_for_each(|mut y| Ok(y.fill(0.0f32)?))
    }
}

pub(super) fn dispatch(options: Options) -> Result<ExitCode> {
    let mut cases = local(options)?;
    let mut results = Simulation::new(2, 2).run(|p| remote(p, options));
    // Process 0 has no part in the calls.
    cases.push(results.swap_remove(0)?);
    show(&cases, options.json);
    Ok(ExitCode::SUCCESS)
}

fn local(options: Options) -> Result<Vec<Case>> {
    let mut p = Program::builder().alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let x = scalar(&mut p, &mesh)?;
    let empty = p.jit(Empty).on(&mesh).outputs(mesh.replicated()).build()?;
    let one = |p: &mut Program| empty.call(p, x.clone());
    let issue = issue_times(&mut p, options.repeats, one)?;
    let mut complete = Vec::new();
    for _ in 0..options.repeats {
        let start = Instant::now();
        for _ in 0..100 {
            empty.call(&mut p, x.clone())?.block_until_ready()?;
        }
        complete.push(start.elapsed() / 100);
    }
    let many = p.jit(EmptyTree).on(&mesh).outputs(mesh.replicated()).build()?;
    let xs: Vec<MpmdArray> = (0..64).map(|_| scalar(&mut p, &mesh)).collect::<mpmd_core::Result<_>>()?;
    let leaves = issue_times(&mut p, options.repeats, |p| many.call(p, xs.clone()))?;
    p.finish()?;
    Ok(vec![
        Case::micros("jit issue", "empty, 1 leaf", issue),
        Case::micros("jit complete", "empty, 1 leaf", complete),
        Case::micros("jit issue", "64 leaves in, 64 out", leaves),
    ])
}

fn remote(p: &mut Program, options: Options) -> mpmd_core::Result<Case> {
    let device = p.topology().device_ids()[1];
    let mesh = p.mesh_of(&[("x", 1)], &[device])?;
    let x = scalar(p, &mesh)?;
    let empty = p.jit(Empty).on(&mesh).outputs(mesh.replicated()).build()?;
    let times = issue_times(p, options.repeats, |p| empty.call(p, x.clone()))?;
    Ok(Case::micros("jit issue", "no part in it", times))
}

fn scalar(p: &mut Program, mesh: &Mesh) -> mpmd_core::Result<MpmdArray> {
    p.make(f32s([]), &mesh.replicated(), |_, mut view| Ok(view.fill(1.0f32)?))
}

/// Times of one call, over batches; the device catches up between them.
fn issue_times<T: Tree<Leaf = MpmdArray>>(
    p: &mut Program,
    repeats: usize,
    mut call: impl FnMut(&mut Program) -> mpmd_core::Result<T>,
) -> mpmd_core::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(repeats);
    // As a program keeps the arrays of its last step: else the allocator gives all of a batch's memory back to
    // the system and has it faulted in again, which says nothing of a call.
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
    }
    drop(kept);
    Ok(times)
}
