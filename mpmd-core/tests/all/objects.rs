//! Objects: values that stay on their devices, and their methods.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::cuda::CUDA;
use crate::common::watchdog;
use mpmd_core::dry_run::DryRun;
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::tree::Empty;
use mpmd_core::{BoundMethod, MadeObject, Method, ObjectBytes, Simulation, method, simulate};

/// The values that were appended to it. Counts the caches that exist.
struct Cache {
    values: Vec<f32>,
    alive: Arc<AtomicUsize>,
}

impl Cache {
    fn new(alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self {
            values: Vec::new(),
            alive: alive.clone(),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A method that appends a value and returns the sum of all.
fn append() -> impl Method<Object = Cache, Inputs = MpmdArray, Outputs = MpmdArray, Made = ()> {
    method(
        like_input,
        |cache: &mut Cache, x: View<f32>, mut y: ViewMut<f32>| {
            if x[0] < 0.0 {
                return Err(Error::kernel("a negative value"));
            }
            assert!(x[0] < 1000.0, "too large");
            cache.values.push(x[0]);
            y[0] = cache.values.iter().sum();
            Ok(())
        },
    )
}

fn value(array: &MpmdArray) -> Option<f32> {
    array
        .to_host()
        .unwrap()
        .map(|values| values.to_vec::<f32>().unwrap()[0])
}

fn stages(p: &Program) -> Result<Vec<Mesh>> {
    Ok(p.mesh(&[("stage", p.topology().devices().len())])?
        .split("stage")?)
}

fn bind<M: Method>(p: &Program, method: M, mesh: &Mesh) -> BoundMethod<M> {
    p.method(method).on(mesh).build().unwrap()
}

#[test]
fn calls_run_in_order_on_the_owner_alone() {
    let _limit = watchdog(60);
    let alive = Arc::new(AtomicUsize::new(0));
    let results = simulate(2, 2, 3, |p| {
        let stages = stages(p)?;
        let cache = p.object(&stages[0], {
            let alive = alive.clone();
            move |_| Ok(Cache::new(&alive))
        })?;
        assert_eq!(cache.is_fully_remote(), p.process().0 == 1);
        let append = bind(p, append(), &stages[0]);
        let mut moved = Vec::new();
        for i in 1..=20 {
            let y = append.call(p, &cache, MpmdArray::scalar(i as f32))?;
            moved.push(p.device_put(&y, stages[1].replicated())?);
        }
        cache.block_until_ready()?;
        Ok(moved.iter().map(value).collect::<Vec<_>>())
    });
    let [first, second] = results.try_into().unwrap();
    assert!(first.unwrap().iter().all(Option::is_none));
    let sums: Vec<Option<f32>> = (1..=20).map(|i| Some((i * (i + 1) / 2) as f32)).collect();
    assert_eq!(second.unwrap(), sums);
    assert_eq!(
        alive.load(Ordering::Relaxed),
        0,
        "dropped before the program has finished"
    );
}

#[test]
fn failed_call_fails_later_ones_with_its_line() {
    let _limit = watchdog(60);
    for (first, why) in [
        (-1.0f32, "a negative value"),
        (5000.0, "panicked: too large"),
    ] {
        // A failed operation also ends the program with its error.
        let results = Mutex::new(Vec::new());
        let ended = Simulation::new(2, 2).run(|p| {
            let stages = stages(p)?;
            let alive = Arc::new(AtomicUsize::new(0));
            let cache = p.object(&stages[0], move |_| Ok(Cache::new(&alive)))?;
            let append = bind(p, append(), &stages[0]);
            for x in [first, 1.0, 2.0] {
                let y = append.call(p, &cache, MpmdArray::scalar(x))?;
                let moved = p.device_put(&y, stages[1].replicated())?;
                let array = if p.process().0 == 0 { y } else { moved };
                let error = array.to_host().unwrap_err().to_string();
                results.lock().unwrap().push(error);
            }
            Ok(())
        });
        assert!(ended.iter().all(Result::is_err));
        let results = results.into_inner().unwrap();
        assert_eq!(results.len(), 6, "{ended:?}");
        for error in &results {
            assert!(
                error.contains(why) && error.contains("objects.rs:"),
                "{error}"
            );
            assert_eq!(error, &results[0], "the first failure, on every process");
        }
    }
}

#[test]
fn failed_input_fails_later_calls() {
    let _limit = watchdog(60);
    let ended = Simulation::new(1, 1).run(|p| {
        let mesh = p.mesh(&[("x", 1)])?;
        let alive = Arc::new(AtomicUsize::new(0));
        let cache = p.object(&mesh, move |_| Ok(Cache::new(&alive)))?;
        let append = bind(p, append(), &mesh);
        let bad = p.array_from_fn(f32s([]), mesh.replicated(), |_, _| {
            Err(Error::kernel("no value to be had"))
        })?;
        let skipped = append.call(p, &cache, bad)?;
        let later = append.call(p, &cache, MpmdArray::scalar(1.0f32))?;
        let errors = [skipped, later].map(|y| y.to_host().unwrap_err().to_string());
        assert!(errors[0].contains("no value to be had"), "{errors:?}");
        assert_eq!(errors[0], errors[1]);
        Ok(())
    });
    assert!(ended[0].is_err());
}

#[test]
fn object_that_cannot_be_made_fails_its_calls() {
    let _limit = watchdog(60);
    let ended = Simulation::new(1, 1).run(|p| {
        let mesh = p.mesh(&[("x", 1)])?;
        let cache = p.object::<Cache>(&mesh, |device| panic!("nothing on {device}"))?;
        let error = cache.block_until_ready().unwrap_err().to_string();
        assert!(
            error.contains("nothing on 0") && error.contains("object Cache at"),
            "{error}"
        );
        let y = bind(p, append(), &mesh).call(p, &cache, MpmdArray::scalar(1.0f32))?;
        assert_eq!(y.to_host().unwrap_err().to_string(), error);
        Ok(())
    });
    assert!(ended[0].is_err());
}

/// A method that returns a copy of the cache's values as a new object.
fn copy() -> impl Method<Object = Cache, Inputs = Empty<MpmdArray>, Made = MadeObject<Vec<f32>>> {
    method((), |cache: &mut Cache| {
        MadeObject::new(cache.values.clone())
    })
}

/// A method that returns the number of values.
fn count()
-> impl Method<Object = Vec<f32>, Inputs = Empty<MpmdArray>, Outputs = MpmdArray, Made = ()> {
    method(
        || f32s([]),
        |values: &mut Vec<f32>, mut y: ViewMut<f32>| y[0] = values.len() as f32,
    )
}

#[test]
fn methods_make_objects_also_in_replayed_steps() {
    let _limit = watchdog(60);
    let results = simulate(2, 2, 11, |p| {
        let stages = stages(p)?;
        let alive = Arc::new(AtomicUsize::new(0));
        let cache = p.object(&stages[1], move |_| Ok(Cache::new(&alive)))?;
        let append = bind(p, append(), &stages[1]);
        let (copy, count) = (bind(p, copy(), &stages[1]), bind(p, count(), &stages[1]));
        let step = |p: &mut Program, x: MpmdArray| {
            let x = p.device_put(&x, stages[1].replicated())?;
            let sum = append.call(p, &cache, x)?;
            let (_, copied) = copy.call(p, &cache, Empty::new())?;
            Ok((sum, count.call(p, &copied, Empty::new())?))
        };
        let input =
            |p: &mut Program, x: f32| p.device_put(&MpmdArray::scalar(x), stages[0].replicated());
        let x = input(p, 1.0)?;
        let refused = p.capture(x.clone(), |p, x| {
            p.object(&stages[1], |_| Ok(0u8))?;
            Ok(x)
        });
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains("not within a step that is captured"),
            "{refused}"
        );
        let ((sum, number), captured) = p.capture(x, step)?;
        let mut found = vec![(value(&sum), value(&number))];
        for i in 2..=4 {
            let x = input(p, i as f32)?;
            let (sum, number) = captured.replay(p, x)?;
            found.push((value(&sum), value(&number)));
        }
        Ok(found)
    });
    let [first, second] = results.try_into().unwrap();
    assert_eq!(first.unwrap(), [(None, None); 4]);
    let expected = [(1.0, 1.0), (3.0, 2.0), (6.0, 3.0), (10.0, 4.0)];
    assert_eq!(
        second.unwrap(),
        expected.map(|(sum, number)| (Some(sum), Some(number)))
    );
}

#[test]
fn misuse_is_an_issue_error_or_names_the_types() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let meshes = stages(&p).unwrap();
    let object = p.object(&meshes[0], |_| Ok(7u32)).unwrap();
    let error = p
        .device_put(object.array(), meshes[1].replicated())
        .unwrap_err()
        .to_string();
    assert!(error.contains("does not leave its devices"), "{error}");
    let next = method((), |number: &mut u32| *number += 1);
    let elsewhere = bind(&p, next, &meshes[1]).call(&mut p, &object, Empty::new());
    let error = elsewhere.unwrap_err().to_string();
    assert!(error.contains("the kernel runs on"), "{error}");
    let factor = 3u32;
    let captured = method((), move |number: &mut u32| *number *= factor);
    let error = bind(&p, captured, &meshes[0]).call(&mut p, &object, Empty::new());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("declare each by `.with(value)`"), "{error}");
    let captured = method((), move |number: &mut u32| *number *= factor).with(factor);
    bind(&p, captured, &meshes[0])
        .call(&mut p, &object, Empty::new())
        .unwrap();
    let read = |_: &mut Context<'_>, x: View<'_>| x.object::<i64>().map(|_| ());
    let error = p
        .jit(Reads(read))
        .on(&meshes[0])
        .outputs(meshes[0].replicated())
        .build()
        .unwrap();
    let y = error.call(&mut p, object.array().clone()).unwrap();
    let error = y.to_host().unwrap_err().to_string();
    assert!(
        error.contains("the object is a u32, and was asked for as i64"),
        "{error}"
    );
}

/// A kernel that calls a function with its input.
struct Reads<F>(F);

impl<F> Kernel for Reads<F>
where
    F: Fn(&mut Context<'_>, View<'_>) -> std::result::Result<(), mpmd_core::ViewError>
        + Send
        + Sync
        + 'static,
{
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(f32s([])))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        (self.0)(cx, x)?;
        Ok(y.fill(0.0f32)?)
    }
}

/// Bytes that report themselves.
struct Bytes(usize);

impl ObjectBytes for Bytes {
    fn bytes(&self) -> u64 {
        self.0 as u64
    }
}

const KIB: u64 = 1 << 10;

/// A method that adds `added` bytes.
fn grow(added: usize) -> impl Method<Object = Bytes, Inputs = Empty<MpmdArray>, Made = ()> {
    method((), move |bytes: &mut Bytes| bytes.0 += added).with(added)
}

#[test]
fn declared_bytes_count_against_the_limit() {
    let _limit = watchdog(60);
    let builder = Program::builder().device_memory(64 * KIB);
    let mut p = builder.alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    for _ in 0..20 {
        // Each waits until the one before is dropped.
        let half = p
            .object_of_bytes(&mesh, 32 * KIB, |_| Ok(Bytes(KIB as usize)))
            .unwrap();
        half.block_until_ready().unwrap();
        bind(&p, grow(16 << 10), &mesh)
            .call(&mut p, &half, Empty::new())
            .unwrap();
        drop(half);
        drop(p.object_of_bytes(&mesh, 60 * KIB, |_| Ok(Bytes(1))));
    }
    let half = p
        .object_of_bytes(&mesh, 32 * KIB, |_| Ok(Bytes(1)))
        .unwrap();
    half.block_until_ready().unwrap();
    let more = p
        .object_of_bytes(&mesh, 48 * KIB, |_| Ok(Bytes(1)))
        .unwrap();
    let error = more.block_until_ready().unwrap_err().to_string();
    assert!(
        error.contains("out of memory") && error.contains("object Bytes at"),
        "{error}"
    );
    drop(p.finish().unwrap_err());
}

#[test]
fn objects_that_report_more_than_declared_fail() {
    let _limit = watchdog(60);
    let mut p = Program::builder().alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let large = p.object_of_bytes(&mesh, KIB, |_| Ok(Bytes(2000))).unwrap();
    let error = large.block_until_ready().unwrap_err().to_string();
    assert!(
        error.contains("reports 2000 bytes, but 1024 are declared"),
        "{error}"
    );
    let bytes = p.object_of_bytes(&mesh, 1124, |_| Ok(Bytes(1024))).unwrap();
    let read = |p: &mut Program| {
        let size = method(
            || f32s([]),
            |x: &mut Bytes, mut y: ViewMut<f32>| y[0] = x.0 as f32,
        );
        bind(p, size, &mesh).call(p, &bytes, Empty::new()).unwrap()
    };
    let grow = bind(&p, grow(100), &mesh);
    grow.call(&mut p, &bytes, Empty::new()).unwrap();
    assert_eq!(value(&read(&mut p)), Some(1124.0));
    grow.call(&mut p, &bytes, Empty::new()).unwrap();
    let error = read(&mut p).to_host().unwrap_err().to_string();
    assert!(
        error.contains("reports 1224 bytes, but 1124 are declared"),
        "{error}"
    );
}

/// Issues objects with declared bytes and returns the dry run.
fn dry_run_of(p: &mut Program) -> DryRun {
    let meshes = stages(p).unwrap();
    let object = p
        .object_of_bytes(&meshes[1], 128, |_| Ok(Bytes(1)))
        .unwrap();
    let grow = bind(p, grow(64), &meshes[1]);
    for _ in 0..2 {
        grow.call(p, &object, Empty::new()).unwrap();
    }
    drop(object);
    p.dry_run().unwrap()
}

#[test]
fn dry_runs_have_the_declared_bytes_until_the_drop() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).dry_run(2).unwrap();
    let dry_run = dry_run_of(&mut p);
    assert_eq!(dry_run.operations.len(), 3);
    let memory = dry_run.memory(&dry_run.flow());
    let peaks: Vec<u64> = memory
        .devices
        .iter()
        .map(|device| device.in_time.bytes)
        .collect();
    assert_eq!(peaks, [0, 128]);
    assert!(memory.devices.iter().all(|device| device.left == 0));
    assert_eq!(dry_run.drops.len(), 1);
}

/// Notes the thread that drops it, and panics if told to.
struct Noisy(Arc<Mutex<Vec<String>>>, bool);

impl Drop for Noisy {
    fn drop(&mut self) {
        let thread = std::thread::current();
        self.0
            .lock()
            .unwrap()
            .push(thread.name().unwrap_or("?").to_owned());
        assert!(!self.1, "a drop that panics");
    }
}

#[test]
fn values_are_dropped_on_device_threads_after_the_last_call() {
    let _limit = watchdog(60);
    let (noted, calls) = (
        Arc::new(Mutex::new(Vec::new())),
        Arc::new(AtomicUsize::new(0)),
    );
    let mut p = Program::builder().devices(2).alone().unwrap();
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    for panics in [true, false] {
        let of = noted.clone();
        let noisy = p
            .object(&mesh, move |_| Ok(Noisy(of.clone(), panics)))
            .unwrap();
        let done = calls.clone();
        let slow = method((), move |_: &mut Noisy| {
            std::thread::sleep(Duration::from_millis(20));
            done.fetch_add(1, Ordering::Relaxed);
        });
        let slow = bind(&p, slow.with("a counter"), &mesh);
        for _ in 0..3 {
            slow.call(&mut p, &noisy, Empty::new()).unwrap();
        }
        drop(noisy);
    }
    p.finish().unwrap();
    let mut threads = noted.lock().unwrap().clone();
    threads.sort_unstable();
    assert_eq!(calls.load(Ordering::Relaxed), 12);
    assert_eq!(threads.len(), 4, "each value once");
    assert_eq!(
        (&threads[0], &threads[2]),
        (&threads[1], &threads[3]),
        "on its device's thread"
    );
    assert!(threads[0] != threads[2], "{threads:?}");
}

#[test]
fn two_hundred_seeds_give_the_same_values() {
    let _limit = watchdog(300);
    let alive = Arc::new(AtomicUsize::new(0));
    for seed in 0..200 {
        let made = alive.clone();
        let results = simulate(3, 3, seed, |p| {
            let meshes = stages(p)?;
            let made = made.clone();
            let caches = meshes.iter().map(|mesh| {
                let made = made.clone();
                p.object(mesh, move |_| Ok(Cache::new(&made)))
            });
            let caches = caches.collect::<Result<Vec<_>>>()?;
            let appends: Vec<_> = meshes.iter().map(|mesh| bind(p, append(), mesh)).collect();
            let mut x = p.device_put(&MpmdArray::scalar(1.0f32), meshes[0].replicated())?;
            for i in 0..9 {
                let stage = i % 3;
                x = p.device_put(&x, meshes[stage].replicated())?;
                x = appends[stage].call(p, &caches[stage], x)?;
            }
            Ok(value(&x))
        });
        let results: Vec<Option<f32>> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(results, [None, None, Some(13.0)], "seed {seed}");
        assert_eq!(alive.load(Ordering::Relaxed), 0, "seed {seed}");
    }
}

#[test]
fn objects_on_cuda_devices_work_by_the_host() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let mut p = Program::builder()
        .devices(2)
        .device_kinds(&[CUDA])
        .alone()
        .unwrap();
    let meshes = stages(&p).unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let made = alive.clone();
    let cache = p
        .object(&meshes[0], move |_| Ok(Cache::new(&made)))
        .unwrap();
    let append_here = bind(&p, append(), &meshes[0]);
    let (copy, count) = (bind(&p, copy(), &meshes[0]), bind(&p, count(), &meshes[0]));
    let mut sums = Vec::new();
    for i in 1..=4 {
        let x = p
            .device_put(&MpmdArray::scalar(i as f32), meshes[1].replicated())
            .unwrap();
        let x = p.device_put(&x, meshes[0].replicated()).unwrap();
        sums.push(append_here.call(&mut p, &cache, x).unwrap());
    }
    assert_eq!(
        sums.iter().map(value).collect::<Vec<_>>(),
        [1.0, 3.0, 6.0, 10.0].map(Some)
    );
    let (_, copied) = copy.call(&mut p, &cache, Empty::new()).unwrap();
    assert_eq!(
        value(&count.call(&mut p, &copied, Empty::new()).unwrap()),
        Some(4.0)
    );
    let bad = append_here
        .call(&mut p, &cache, MpmdArray::scalar(-1.0f32))
        .unwrap();
    let later = append_here
        .call(&mut p, &cache, MpmdArray::scalar(1.0f32))
        .unwrap();
    let errors = [bad, later].map(|y| y.to_host().unwrap_err().to_string());
    assert!(errors[0].contains("a negative value"), "{errors:?}");
    assert_eq!(errors[0], errors[1]);
    drop((cache, copied));
    drop(p.finish().unwrap_err());
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}
