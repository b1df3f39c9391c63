//! The first program that a user reads, over any number of processes.

use mpmd_core::prelude::*;
use mpmd_core::random::{Key, normal_f32};
use mpmd_core::{Builder, Simulation, simulate};

/// A kernel that computes h = x @ w, with a part of w's columns on each device.
struct Up;

impl Kernel for Up {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (w, x): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        if w.shape()[0] != x.shape()[1] {
            return Err(Error::kernel(format!("{x} @ {w}: inner dimensions differ")));
        }
        Ok(Signature::new(ShapedArray::new(
            &[x.shape()[0], w.shape()[1]],
            x.dtype(),
        )))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (w, x): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        product(&x, &w, y.as_mut_slice()?)
    }
}

/// A kernel that computes y = h @ w, with a part of w's rows on each device. The partial products
/// are summed over the axis `model`.
struct Down;

impl Kernel for Down {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (w, h): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        let y = ShapedArray::new(&[h.shape()[0], w.shape()[1]], h.dtype());
        Ok(Signature::new(y.clone()).all_reduce("model", y))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (w, h): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        product(&h, &w, y.as_mut_slice()?)?;
        cx.all_reduce("model", y.as_mut_slice::<f32>()?)
    }
}

fn product(a: &View<'_>, b: &View<'_>, c: &mut [f32]) -> Result<()> {
    let (m, k, n) = (a.shape()[0], a.shape()[1], b.shape()[1]);
    let (a, b) = (a.as_slice::<f32>()?, b.as_slice::<f32>()?);
    for i in 0..m {
        for j in 0..n {
            c[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
        }
    }
    Ok(())
}

fn init(key: u64) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> {
    move |region, mut view| {
        let (rows, cols) = (region.range(0), region.range(1));
        let width = view.global().shape()[1];
        let elements = rows.flat_map(|row| cols.clone().map(move |col| (row * width + col) as u64));
        for (value, element) in view.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
            *value = normal_f32(Key(key), element);
        }
        Ok(())
    }
}

fn two_stages(p: &mut Program) -> Result<Option<Vec<f32>>> {
    let stages = p.mesh(&[("stage", 2), ("model", 2)])?.split("stage")?;
    let (front, back) = (&stages[0], &stages[1]);
    let w0 = p.array_from_fn(
        f32s([16, 64]),
        front.sharding(spec![None, "model"]),
        init(0),
    )?;
    let w1 = p.array_from_fn(f32s([64, 8]), back.sharding(spec!["model", None]), init(1))?;
    let first = p
        .jit(Up)
        .on(front)
        .outputs(front.sharding(spec![None, "model"]))
        .build()?;
    let second = p.jit(Down).on(back).outputs(back.replicated()).build()?;

    let host = MpmdArray::from_slice(
        &[4, 16],
        &(0..64).map(|i| i as f32 / 64.0).collect::<Vec<_>>(),
    )?;
    let x = p.device_put(&host, front.replicated())?;
    let h = first.call(p, (w0, x))?;
    let h = p.device_put(&h, back.sharding(spec![None, "model"]))?;
    let y = second.call(p, (w1, h))?;
    p.step_end()?;
    y.to_host()?
        .map(|y| y.to_vec::<f32>().map_err(Error::from))
        .transpose()
}

#[test]
fn two_stages_give_same_values_at_every_process_count() {
    let alone = simulate(1, 4, 0, two_stages)
        .remove(0)
        .unwrap()
        .expect("owned");
    assert!(alone.iter().all(|value| value.is_finite() && *value != 0.0));
    for processes in [2, 4] {
        for seed in 0..10 {
            let results = simulate(processes, 4, seed, two_stages);
            let owners = results
                .into_iter()
                .map(|result| result.unwrap())
                .collect::<Vec<_>>();
            assert!(
                owners[..processes / 2].iter().all(Option::is_none),
                "the front has no part of y"
            );
            for values in &owners[processes / 2..] {
                assert_eq!(
                    values.as_ref(),
                    Some(&alone),
                    "{processes} processes, seed {seed}"
                );
            }
        }
    }
}

#[test]
fn sync_waits_for_all_operations_and_returns_a_failure() {
    for processes in [1, 2] {
        let results = simulate(processes, 2, 3, |p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let (rows, all) = (mesh.sharding(spec!["x"]), mesh.replicated());
            let twice = p
                .jit(elementwise(|x: f32| 2.0 * x))
                .on(&mesh)
                .outputs(rows.clone())
                .build()?;
            let mut x = p.device_put(&MpmdArray::from_slice(&[4], &[1.0f32; 4])?, &rows)?;
            for _ in 0..20 {
                let moved = p.device_put(&x, &all)?;
                let y = p.device_put(&moved, &rows)?;
                x = twice.call(p, y)?;
            }
            p.sync()?;
            assert!(x.is_complete());
            let fails = kernel(like_input, |_: View<f32>, _: ViewMut<f32>| -> Result<()> {
                Err(Error::kernel("no such luck"))
            });
            let fails = p.jit(fails).on(&mesh).outputs(rows).build()?;
            drop(fails.call(p, x)?);
            let error = p.sync().expect_err("the kernel failed").to_string();
            assert!(error.contains("no such luck"), "{error}");
            Ok(())
        });
        assert!(
            results
                .iter()
                .all(|result| !matches!(result, Err(Error::Issue(_))))
        );
    }
}

#[test]
fn lost_process_is_an_error_on_every_other() {
    let results = Simulation::new(4, 4)
        .lose(mpmd_core::ProcessId(1), 4)
        .run(two_stages);
    for (process, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("process 1"), "process {process}: {error}");
    }
}

#[test]
fn processes_may_have_unequal_numbers_of_devices() {
    let job = |counts: &'static [usize]| {
        let simulation = Simulation::new(counts.len(), counts.iter().sum());
        simulation.settings(|builder| builder.devices_by_process(counts))
    };
    let expected: Vec<f32> = (0..12).map(|i| i as f32).collect();
    for (counts, own) in [
        (&[2, 0, 1][..], [2, 0, 1]),
        (&[1, 1, 1], [1, 1, 1]),
        (&[0, 0, 3], [0, 0, 3]),
    ] {
        let results = job(counts).run(|p| {
            let mesh = p.mesh(&[("model", -1)])?;
            let me = p.process().index();
            assert_eq!(
                (mesh.shape(), p.topology().devices_of(p.process()).len()),
                (&[3][..], own[me])
            );
            let x =
                MpmdArray::from_slice(&[1, 12], &(0..12).map(|i| i as f32).collect::<Vec<_>>())?;
            let eye = (0..144)
                .map(|i| f32::from(u8::from(i % 13 == 0)))
                .collect::<Vec<_>>();
            let w = p.device_put(
                &MpmdArray::from_slice(&[12, 12], &eye)?,
                mesh.sharding(spec!["model"]),
            )?;
            let h = p.device_put(&x, mesh.sharding(spec![None, "model"]))?;
            assert_eq!(h.is_fully_remote(), own[me] == 0);
            let down = p.jit(Down).on(&mesh).outputs(mesh.replicated()).build()?;
            let y = down.call(p, (w, h))?;
            let y = p.reshard(
                &y,
                mesh.sharding(spec![None, "model"]),
                MoveOptions::default(),
            )?;
            let y = p.reshard(&y, mesh.replicated(), MoveOptions::default())?;
            y.to_host()?
                .map(|y| y.to_vec::<f32>().map_err(Error::from))
                .transpose()
        });
        for (process, result) in results.into_iter().enumerate() {
            let expected = (own[process] > 0).then_some(&expected);
            assert_eq!(
                result.unwrap().as_ref(),
                expected,
                "process {process} of {counts:?}"
            );
        }
    }
    let refused = |builder: fn(Builder) -> Builder| {
        builder(Program::builder())
            .alone()
            .expect_err("it is refused")
            .to_string()
    };
    for (builder, count) in [
        (
            (|b: Builder| b.devices_by_process(&[1, 2])) as fn(Builder) -> Builder,
            "[1, 2]",
        ),
        (|b: Builder| b.devices_by_process(&[0]), "[0]"),
        (
            |b: Builder| b.devices_by_process(&[2]).devices(3),
            "`Builder::devices` says 3",
        ),
    ] {
        let said = refused(builder);
        assert!(
            said.contains(count) && said.contains("give a number for each process"),
            "{said}"
        );
    }
}
