//! Invalid calls fail at the line that caused them, in the same way on every process.

use std::sync::Mutex;

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{Error, FailureKind, ProcessId, Simulation, simulate};

/// Returns the text of the error of a call. Panics unless it is an issue error that names the
/// calling line, without a new operation in the program.
macro_rules! refused {
    ($p:ident, $call:expr) => {{
        let before = $p.operations();
        let error = $call.map(drop).expect_err(stringify!($call));
        let Error::Issue(issue) = &error else {
            panic!("{}: {error}", stringify!($call))
        };
        let lines = line!()..line!() + 6;
        assert!(issue.at.file().ends_with("bad_use.rs"), "{error}");
        assert!(
            lines.contains(&issue.at.line()),
            "{error} is not at lines {lines:?}"
        );
        assert!(
            error
                .to_string()
                .contains(&format!("bad_use.rs:{}:", issue.at.line())),
            "{error}"
        );
        assert_eq!($p.operations(), before, "{error}");
        error.to_string()
    }};
}

/// Runs a program on two processes with a device each. Both must succeed with the same texts, which
/// are returned.
fn on_two(program: impl Fn(&mut Program) -> Result<Vec<String>> + Sync) -> Vec<String> {
    let mut results = simulate(2, 2, 1, program).into_iter().map(Result::unwrap);
    let first = results.next().expect("two processes");
    assert_eq!(
        results.next().as_ref(),
        Some(&first),
        "the processes say the same"
    );
    first
}

fn assert_contains(texts: &[String], expected: &[&str]) {
    assert_eq!(texts.len(), expected.len(), "{texts:#?}");
    for (text, expected) in texts.iter().zip(expected) {
        assert!(text.contains(expected), "{text}\n  lacks {expected}");
    }
}

#[track_caller]
fn ones(p: &mut Program, shape: &[usize], to: &Sharding) -> Result<MpmdArray> {
    p.array_from_fn(f32s(shape), to, |_, mut view| Ok(view.fill(1.0f32)?))
}

#[test]
fn shardings_that_do_not_fit_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2), ("y", 1)])?;
        let x = ones(p, &[4], &mesh.replicated())?;
        let fill = |_: &Region, _: ViewMut<'_>| Ok(());
        let same = p.jit(fun("same", like_first, |_, _, _| Ok(()))).on(&mesh);
        let same = same.outputs(mesh.sharding(spec![None, "x"])).build()?;
        let foreign = Mesh::new(&[("x", 2)], vec![DeviceId(0), DeviceId(9)])?;
        Ok(vec![
            refused!(p, p.device_put(&x, mesh.sharding(spec![None, "x"]))),
            refused!(p, p.device_put(&x, mesh.sharding(spec!["z"]))),
            refused!(p, p.device_put(&x, mesh.sharding(spec![("x", "x")]))),
            refused!(
                p,
                p.array_from_fn(f32s([4, 2]), mesh.sharding(spec!["x", "x"]), fill)
            ),
            refused!(
                p,
                p.array_from_fn(f32s([3]), mesh.sharding(spec!["x"]), fill)
            ),
            refused!(
                p,
                p.device_put(&MpmdArray::scalar(1u8), mesh.sharding(spec!["x"]))
            ),
            refused!(p, same.call(p, vec![x.clone()])),
            refused!(p, p.device_put(&x, Sharding::single_device(DeviceId(2)))),
            refused!(p, p.device_put(&x, foreign.replicated())),
            refused!(
                p,
                p.array_from_fn(f32s([4]), foreign.sharding(spec!["x"]), fill)
            ),
        ])
    });
    let expected = [
        "P(None, x) has 2 entries, but shape [4] has 1 dimensions",
        "axis `z`, but the mesh is",
        "axis `x` divides dimension 0 and again dimension 0",
        "axis `x` divides dimension 0 and again dimension 1",
        "dimension 0 of shape [3] has size 3, which {x:2} cannot divide into 2 equal parts: pad it \
         to 4, or leave it whole",
        "P(x) has 1 entries, but shape [] has 0 dimensions",
        "output 0",
        "there is no device 2 in a job of 2 devices",
        "there is no device 9 in a job of 2 devices",
        "there is no device 9 in a job of 2 devices",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn inputs_that_do_not_match_the_declaration_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let one = p.mesh_of(&[("x", 1)], &[DeviceId(0)])?;
        let rows = mesh.sharding(spec!["x"]);
        let kernel = || fun("pick", like_first, |_, _, _| Ok(()));
        let x = ones(p, &[4, 4], &rows)?;
        let elsewhere = ones(p, &[4, 4], &one.replicated())?;
        let strict = p
            .jit(kernel())
            .on(&mesh)
            .inputs(mesh.sharding(spec![None, "x"]))
            .outputs(&rows)
            .build()?;
        let free = p.jit(kernel()).on(&mesh).outputs(&rows).build()?;
        let picky = p
            .jit(fun(
                "picky",
                |x| Err(Error::kernel(format!("{} is no matrix", x[0]))),
                |_, _, _| Ok(()),
            ))
            .on(&mesh)
            .outputs(&rows)
            .build()?;
        let two_for_one = p.jit(kernel()).on(&mesh).outputs((&rows, &rows)).build()?;
        let foreign = Mesh::new(&[("x", 2)], vec![DeviceId(0), DeviceId(9)])?;
        let beyond = p
            .jit(kernel())
            .on(&foreign)
            .outputs(foreign.replicated())
            .build()?;
        Ok(vec![
            refused!(p, strict.call(p, vec![x.clone()])),
            refused!(p, free.call(p, vec![x.clone(), elsewhere.clone()])),
            refused!(p, picky.call(p, vec![x.clone()])),
            refused!(p, two_for_one.call(p, vec![x.clone()])),
            refused!(p, beyond.call(p, vec![MpmdArray::scalar(1.0f32)])),
            refused!(p, p.jit(kernel()).on(&mesh).build()),
            refused!(p, p.jit(kernel()).outputs(&rows).build()),
            refused!(p, p.jit(kernel()).on(&one).outputs(&rows).build()),
        ])
    });
    let expected = [
        "jit pick: \"0\": is sharded P(x) on {x:2} devices [0, 1], but `.inputs(…)` says \
         P(None, x)",
        "jit pick: \"1\": has the sharding P() on {x:1} devices [0], but the kernel runs on",
        "jit picky: f32[4,4] is no matrix",
        "not a prefix",
        "there is no device 9",
        "missing output shardings",
        "missing mesh",
        "is not on the devices of the kernel's mesh",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn invalid_shards_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let devices = |devices: [u32; 2]| devices.map(DeviceId).to_vec();
        let fill = |_: &Region, _: ViewMut<'_>| Ok(());
        let diagonal = [(0, [(0, 2), (0, 2)]), (1, [(2, 4), (2, 4)])];
        let shard = |(device, bounds): (u32, [(usize, usize); 2])| {
            (DeviceId(device), bounds.into_iter().collect::<Region>())
        };
        let diagonal = Sharding::enumerated(diagonal.map(shard).to_vec())?;
        let x = ones(p, &[4, 4], &Sharding::single_device(DeviceId(0)))?;
        Ok(vec![
            refused!(p, p.device_put(&x, Sharding::chunk(2, devices([0, 1]))?)),
            refused!(p, p.device_put(&x, Sharding::chunk(0, devices([0, 7]))?)),
            refused!(
                p,
                p.array_from_fn(f32s([]), &Sharding::chunk(0, devices([0, 1]))?, fill)
            ),
            refused!(p, p.device_put(&x, &diagonal)),
            refused!(p, p.array_from_fn(f32s([4, 3]), &diagonal, fill)),
            refused!(p, p.array_from_fn(f32s([4]), &diagonal, fill)),
        ])
    });
    let expected = [
        "chunks of dimension 2: shape [4, 4] has dimensions -2 to 1",
        "there is no device 7 in a job of 2 devices",
        "chunks of dimension 0: shape [] has none",
        "no device has [0..2, 2..4] of shape [4, 4]; there are 2 shards",
        "device 1 has [2..4, 2..4], which is past the end of dimension 1 of shape [4, 3]",
        "device 0 has [0..2, 0..2], but shape [4] has 1 dimensions",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn undeclared_partial_sums_and_host_memory_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2), ("y", 1)])?;
        let whole = mesh.replicated();
        let sums = whole.unreduced(&["x"])?;
        let host = whole.with_memory_kind(MemoryKind::Host);
        let kernel = || fun("pick", like_first, |_, _, mut y| Ok(y[0].fill(0.0f32)?));
        let x = ones(p, &[4], &whole)?;
        let in_host = p.device_put(&x, &host)?;
        let terms = p
            .jit(kernel())
            .on(&mesh)
            .outputs(&sums)
            .build()?
            .call(p, vec![x.clone()])?
            .remove(0);
        let free = p.jit(kernel()).on(&mesh).outputs(&whole).build()?;
        let declares_whole = p
            .jit(kernel())
            .on(&mesh)
            .inputs(&whole)
            .outputs(&whole)
            .build()?;
        let declares_sums = p
            .jit(kernel())
            .on(&mesh)
            .inputs(&sums)
            .outputs(&whole)
            .build()?;
        let declares_host = p
            .jit(kernel())
            .on(&mesh)
            .inputs(&host)
            .outputs(&whole)
            .build()?;
        let one_term = whole.unreduced(&["y"])?;
        let in_place = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0"));
        let update = p
            .jit(fun("update", in_place, |_, _, _| Ok(())))
            .on(&mesh)
            .inputs(&host);
        let update = update.outputs(&whole).build()?;
        declares_sums.call(p, vec![terms.clone()])?[0].block_until_ready()?;
        declares_host.call(p, vec![in_host.clone()])?[0].block_until_ready()?;
        Ok(vec![
            refused!(p, free.call(p, vec![x.clone(), terms.clone()])),
            refused!(p, declares_whole.call(p, vec![terms.clone()])),
            refused!(p, declares_sums.call(p, vec![x.clone()])),
            refused!(p, free.call(p, vec![in_host.clone()])),
            refused!(p, declares_whole.call(p, vec![in_host.clone()])),
            refused!(p, declares_host.call(p, vec![x.clone()])),
            refused!(p, update.call(p, vec![in_host.clone()])),
            refused!(p, p.jit(kernel()).on(&mesh).outputs(&host).build()),
            refused!(p, ones(p, &[4], &sums)),
            refused!(p, ones(p, &[4], &one_term)),
        ])
    });
    let expected = [
        "jit pick: \"1\": is sharded P() unreduced over {x} on {x:2, y:1} devices [0, 1]; a \
         kernel takes partial \
         sums only where `.inputs(…)` declares exactly that sharding",
        "\"0\": is sharded P() unreduced over {x} on {x:2, y:1} devices [0, 1], but `.inputs(…)` \
         says P() on",
        "\"0\": is sharded P() on {x:2, y:1} devices [0, 1], but `.inputs(…)` says P() \
         unreduced over {x} on",
        "\"0\": is sharded P() on {x:2, y:1} devices [0, 1] in host memory; a kernel takes arrays \
         in host memory only where",
        "in host memory, but `.inputs(…)` says P() on {x:2, y:1} devices [0, 1]; jit never",
        "but `.inputs(…)` says P() on {x:2, y:1} devices [0, 1] in host memory; jit never",
        "cannot be input \"0\"",
        "in host memory: a kernel writes the memory of its devices",
        "array_from_fn: P() unreduced over {x} on {x:2, y:1} devices [0, 1] is of partial sums, \
         which only \
         a kernel \
         writes: make it as P() on",
        "array_from_fn: P() unreduced over {y} on",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn donated_arrays_are_gone_on_every_process() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let rows = mesh.sharding(spec!["x"]);
        let in_place = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0"));
        let update = p.jit(fun("update", in_place, |_, _, _| Ok(()))).on(&mesh);
        let update = update.outputs(&rows).donate("0").build()?;
        let [a, b, c] = [
            ones(p, &[4], &rows)?,
            ones(p, &[4], &rows)?,
            ones(p, &[4], &rows)?,
        ];
        let cold = refused!(p, update.call(p, vec![a.clone(), a.clone()]));
        let _kept = update.call(p, vec![a.clone(), b.clone()])?;
        let donated_at = line!() - 1;
        let warm = refused!(p, update.call(p, vec![b.clone(), b.clone()]));
        let twice = vec![c.clone(), b.clone(), c.clone()];
        let texts = vec![
            cold,
            warm,
            refused!(p, update.call(p, vec![a.clone(), b.clone()])),
            refused!(p, p.device_put(&a.clone(), &rows)),
            refused!(p, p.device_put(&(b, vec![a.clone()]), &rows)),
            refused!(p, a.microbatches(p, 0, 1)),
            refused!(
                p,
                p.device_put_with(&twice, &rows, MoveOptions::default().donate(true))
            ),
        ];
        c.block_until_ready()?;
        for text in &texts[2..6] {
            assert!(
                text.contains(&format!("bad_use.rs:{donated_at}:")),
                "{text} lacks the donating line"
            );
        }
        Ok(texts)
    });
    let expected = [
        "\"0\" is donated, and is the same array as \"1\"",
        "\"0\" is donated, and is the same array as \"1\"",
        "\"0\": was donated to operation 4",
        "was donated to operation 4",
        "\"1/0\": was donated to operation 4",
        "was donated to operation 4",
        "\"2\" is donated, and is the same array as \"0\"",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn twins_among_many_donated_arrays_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let rows = mesh.sharding(spec!["x"]);
        let first = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0"));
        let update = p.jit(fun("update", first, |_, _, _| Ok(()))).on(&mesh);
        let donating = ["0", "1", "2", "3", "4", "5"];
        let update = donating
            .iter()
            .fold(update, |update, path| update.donate(*path));
        let update = update.outputs(&rows).build()?;
        let mut x = (0..8)
            .map(|_| ones(p, &[4], &rows))
            .collect::<Result<Vec<_>>>()?;
        let last = x[7].clone();
        // Twins that are not donated are allowed.
        x.push(last);
        let mut twins = x.clone();
        twins[4] = x[2].clone();
        let both = refused!(p, update.call(p, twins.clone()));
        twins[4] = x[7].clone();
        let one = refused!(p, update.call(p, twins));
        update.call(p, x)?[0].block_until_ready()?;
        Ok(vec![both, one])
    });
    let expected = [
        "\"2\" is donated, and is the same array as \"4\"",
        "\"4\" is donated, and is the same array as \"7\"",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn contradictory_signatures_are_refused() {
    let _limit = watchdog(60);
    type Declared = Result<Signature<Vec<ShapedArray>>>;
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let x = ones(p, &[4, 2], &mesh.sharding(spec!["x"]))?;
        let mut texts = Vec::new();
        let signatures: [fn(&[ShapedArray]) -> Declared; 6] = [
            |_| Ok(Signature::new(vec![f32s([2, 2])]).alias("0", "0")),
            |_| Ok(Signature::new(vec![mpmd_core::aval::f64s([4, 2])]).alias("0", "0")),
            |x| Ok(Signature::new(vec![x[0].clone()]).alias("1", "0")),
            |x| Ok(Signature::new(vec![x[0].clone()]).alias("0", "weights")),
            |x| {
                Ok(Signature::new(vec![x[0].clone(); 2])
                    .alias("0", "0")
                    .alias("0", "1"))
            },
            |x| Ok(Signature::new(vec![x[0].clone()]).all_reduce("y", x[0].clone())),
        ];
        for signature in signatures {
            let jit = p.jit(fun("odd", signature, |_, _, _| Ok(()))).on(&mesh);
            let jit = jit.outputs(mesh.sharding(spec!["x"])).build()?;
            texts.push(refused!(p, jit.call(p, vec![x.clone()])));
        }
        let other_layout = p.jit(fun("odd", signatures[4], |_, _, _| Ok(()))).on(&mesh);
        let other_layout = other_layout.outputs(mesh.replicated()).build()?;
        texts.push(refused!(p, other_layout.call(p, vec![x.clone()])));
        let nothing = p.jit(fun("odd", like_first, |_, _, _| Ok(()))).on(&mesh);
        let nothing = nothing.outputs(mesh.replicated()).donate("bias").build()?;
        texts.push(refused!(p, nothing.call(p, vec![x.clone()])));
        Ok(texts)
    });
    let expected = [
        "shape, dtype and sharding must be the same",
        "shape, dtype and sharding must be the same",
        "names input \"1\"; there are 0",
        "names output \"weights\"; there are 0",
        "is aliased twice",
        "there is no axis `y`",
        "shape, dtype and sharding must be the same",
        "donate(\"bias\") names none of the inputs",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn invalid_microbatches_and_agreements_are_refused() {
    let _limit = watchdog(60);
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let x = ones(p, &[4, 6], &mesh.sharding(spec!["x"]))?;
        Ok(vec![
            refused!(p, x.microbatches(p, 0, 4)),
            refused!(p, x.microbatches(p, 1, 0)),
            refused!(p, x.microbatches(p, 1, 4)),
            refused!(p, x.microbatches(p, 2, 1)),
            refused!(p, MpmdArray::scalar(1u8).microbatches(p, 0, 1)),
            refused!(p, p.broadcast_value(ProcessId(2), 0u8, || Ok(1))),
        ])
    });
    let expected = [
        "dimension 0 of f32[4,6] as P(x) on {x:2} devices [0, 1] cannot be cut in 4 equal parts",
        "cannot be cut in 0 equal parts",
        "cannot be cut in 4 equal parts",
        "has no dimension 2",
        "is uncommitted",
        "there is no process 2 among 2",
    ];
    assert_contains(&texts, &expected);
}

#[test]
fn arrays_and_kernels_of_another_program_are_refused() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let mut other = Program::builder().devices(2).alone().unwrap();
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    let kernel = || fun("same", like_first, |_, _, _| Ok(()));
    let mine = p
        .jit(kernel())
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let theirs = other
        .jit(kernel())
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = ones(&mut p, &[2], &mesh.replicated()).unwrap();
    let y = ones(&mut other, &[2], &mesh.replicated()).unwrap();
    let texts = [
        refused!(other, other.device_put(&x, mesh.replicated())),
        refused!(other, x.microbatches(&mut other, 0, 1)),
        refused!(other, theirs.call(&mut other, vec![x])),
        refused!(p, theirs.call(&mut p, vec![y.clone()])),
        refused!(p, mine.call(&mut p, vec![y])),
    ];
    assert_contains(&texts, &["belongs to another program"; 5]);
    p.finish().unwrap();
    other.finish().unwrap();
}

#[test]
fn trees_with_equal_leaves_but_other_structure_differ() {
    let _limit = watchdog(60);
    struct Count;
    impl Kernel for Count {
        type In = (Vec<MpmdArray>, Vec<MpmdArray>);
        type Out = Vec<MpmdArray>;

        fn infer(
            &self,
            (a, _): &(Vec<ShapedArray>, Vec<ShapedArray>),
        ) -> Result<Signature<Vec<ShapedArray>>> {
            Ok(Signature::new(a.clone()))
        }

        fn run(
            &self,
            _: &mut Context<'_>,
            (a, b): (Vec<View<'_>>, Vec<View<'_>>),
            y: Vec<ViewMut<'_>>,
        ) -> Result<()> {
            y.into_iter()
                .try_for_each(|mut y| Ok(y.fill((10 * a.len() + b.len()) as f32)?))
        }
    }
    let texts = on_two(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let jit = p.jit(Count).on(&mesh).outputs(mesh.replicated()).build()?;
        let x = ones(p, &[2], &mesh.replicated())?;
        let all = |n: usize| vec![x.clone(); n];
        let mut counts = Vec::new();
        for (a, b) in [(1, 2), (2, 1), (3, 0), (1, 2)] {
            let y = jit.call(p, (all(a), all(b)))?;
            assert_eq!(y.len(), a);
            counts.push(format!(
                "{:?}",
                y[0].to_host()?.map(|y| y.to_vec::<f32>()).transpose()?
            ));
        }
        Ok(counts)
    });
    assert_contains(
        &texts,
        &[
            "[12.0, 12.0]",
            "[21.0, 21.0]",
            "[30.0, 30.0]",
            "[12.0, 12.0]",
        ],
    );
}

/// Runs a failing kernel on the first two of four processes; the other two only receive its result.
/// Checks that every array fails because of this kernel, and every program ends with an error.
/// Returns the errors' texts.
fn failing<I, R>(infer: I, run: R) -> Vec<String>
where
    I: Fn(&[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> + Copy + Send + Sync + 'static,
    R: Fn(&mut Context<'_>, Vec<View<'_>>, Vec<ViewMut<'_>>) -> Result<()>
        + Copy
        + Send
        + Sync
        + 'static,
{
    let texts = Mutex::new(Vec::new());
    let results = Simulation::new(4, 4).run(|p| {
        let halves = p.mesh(&[("half", 2), ("x", 2)])?.split("half")?;
        let x = ones(p, &[4], &halves[0].sharding(spec!["x"]))?;
        let jit = p.jit(fun("broken", infer, run)).on(&halves[0]);
        let jit = jit.outputs(halves[0].sharding(spec!["x"])).build()?;
        let y = jit.call(p, vec![x])?.remove(0);
        let z = p.device_put(&y, halves[1].replicated())?;
        let mine = if y.is_fully_remote() { &z } else { &y };
        let error = mine.block_until_ready().expect_err("it cannot succeed");
        let failure = error.failure().expect("a failure of an operation");
        assert_eq!(failure.kind, FailureKind::Kernel, "{error}");
        assert_eq!(failure.op, 2, "{error}");
        texts.lock().unwrap().push(error.to_string());
        assert!(mine.addressable_shards().is_err(), "as often as asked");
        Ok(())
    });
    for (process, result) in results.into_iter().enumerate() {
        let error = result.expect_err("finish reports it").to_string();
        assert!(
            error.contains("kernel broken of operation 2 at"),
            "process {process}: {error}"
        );
    }
    let texts = texts.into_inner().unwrap();
    assert_eq!(texts.len(), 4);
    for text in &texts {
        assert!(
            text.contains("kernel broken of operation 2 at mpmd-core/tests/all/bad_use.rs:"),
            "{text}"
        );
    }
    texts
}

fn reduced(x: &[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> {
    Ok(Signature::new(vec![x[0].clone()]).all_reduce("x", f32s([2])))
}

#[test]
fn failed_kernel_fails_everything_made_from_it() {
    let _limit = watchdog(60);
    let all_contain = |texts: Vec<String>, reason: &str| {
        texts
            .iter()
            .for_each(|text| assert!(text.contains(reason), "{text}\n  lacks {reason}"));
    };
    all_contain(
        failing(like_first, |_, _, _| Err(Error::kernel("out of luck"))),
        "out of luck",
    );
    all_contain(
        failing(like_first, |_, _, _| panic!("lost the thread")),
        "panicked: lost the thread",
    );
    all_contain(
        failing(like_first, |_, x, _| {
            x[0].as_slice::<i32>()?;
            Ok(())
        }),
        "a view of f32 elements was asked for i32 elements",
    );
    all_contain(
        failing(like_first, |_, x, _| {
            x[0].scalar::<f32>().map(drop).map_err(Error::from)
        }),
        "a single value was asked of a view of 2 elements",
    );
    all_contain(
        failing(
            |x| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0")),
            |_, x, _| x[0].as_slice::<f32>().map(drop).map_err(Error::from),
        ),
        "updated in place",
    );
}

#[test]
fn undeclared_collective_calls_are_errors() {
    let _limit = watchdog(60);
    let all_contain = |texts: Vec<String>, reason: &str| {
        texts
            .iter()
            .for_each(|text| assert!(text.contains(reason), "{text}\n  lacks {reason}"));
    };
    let call = |cx: &mut Context<'_>, _: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>| {
        cx.all_reduce("x", y[0].as_mut_slice::<f32>()?)
    };
    all_contain(
        failing(like_first, call),
        "its signature declares only 0 collectives",
    );
    all_contain(
        failing(reduced, |_, _, _| Ok(())),
        "its signature declares 1 more collectives than it calls",
    );
    all_contain(
        failing(reduced, |cx, _, _| cx.all_reduce("y", &mut [0.0f32; 2])),
        "over \"y\" where",
    );
    all_contain(
        failing(reduced, |cx, _, _| cx.all_reduce("x", &mut [0.0f32; 3])),
        "of 3 f32 elements",
    );
    all_contain(
        failing(reduced, |cx, _, _| cx.all_reduce("x", &mut [0u8; 2])),
        "of 2 u8 elements",
    );
    // Only one device is at fault. The other waits for it in vain and reports the reason.
    let one = |cx: &mut Context<'_>, _: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>| {
        if cx.axis_index("x")? == 1 {
            return Err(Error::kernel("not today"));
        }
        cx.all_reduce("x", y[0].as_mut_slice::<f32>()?)
    };
    all_contain(failing(reduced, one), "failed on device 1: not today");
    let uneven = |cx: &mut Context<'_>, _: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>| {
        let count = 1 + cx.axis_index("x")?;
        cx.all_reduce("x", &mut y[0].as_mut_slice::<f32>()?[..count])
    };
    let texts = Simulation::new(2, 2).run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let x = ones(p, &[4], &mesh.sharding(spec!["x"]))?;
        let jit = p
            .jit(fun("uneven", reduced, uneven))
            .on(&mesh)
            .outputs(mesh.sharding(spec!["x"]))
            .build()?;
        jit.call(p, vec![x])?[0].block_until_ready().map(drop)
    });
    texts
        .into_iter()
        .for_each(|result| assert!(result.is_err()));
}

#[test]
fn wrong_numbers_of_values_are_refused() {
    for (values, given) in [(&[1.0f64; 5][..], "5"), (&[1.0; 7], "7"), (&[], "0")] {
        let (line, result) = (line!(), MpmdArray::from_slice(&[2, 3], values));
        let said = result.unwrap_err().to_string();
        assert!(
            said.starts_with(&format!("mpmd-core/tests/all/bad_use.rs:{line}:")),
            "{said}"
        );
        assert!(
            said.ends_with(&format!(
                ": shape [2, 3] has 6 elements, but {given} values are given"
            )),
            "{said}"
        );
    }
}

#[test]
fn failed_make_fails_everything_made_from_it() {
    let _limit = watchdog(60);
    for panics in [false, true] {
        let results = Simulation::new(3, 3).run(|p| {
            let [first, last] = [0, 2].map(|device| Sharding::single_device(DeviceId(device)));
            let x = p.array_from_fn(f32s([4]), &first, move |_, _| {
                if panics {
                    panic!("no values")
                } else {
                    Err(Error::kernel("no values"))
                }
            })?;
            let y = p.device_put(&x, &last)?;
            x.block_until_ready()?;
            y.block_until_ready()?;
            Ok(())
        });
        for (process, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains("array_from_fn (operation 1) at mpmd-core/tests/all/bad_use.rs:"),
                "{process}: {error}"
            );
            assert!(
                error.contains("failed on device 0: ") && error.contains("no values"),
                "{process}: {error}"
            );
        }
    }
}
