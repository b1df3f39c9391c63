//! Many calls of methods on objects that are made and dropped at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::tree::Empty;
use mpmd_core::{BoundMethod, MadeObject, Method, MpmdObject, method};

use super::Say;
use super::soak::resident_bytes;

/// Number of calls between two points at which results are read.
const PERIOD: usize = 500;

/// Maximum number of objects that are held in addition to the current object of each device.
const KEPT: usize = 16;

/// Time limit for all dropped values to be gone.
const SOON: Duration = Duration::from_secs(30);

/// A value that counts its calls. Its memory makes a leak visible.
struct Counter {
    calls: u32,
    _memory: Vec<u8>,
    alive: Arc<AtomicUsize>,
}

impl Counter {
    fn new(calls: u32, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self {
            calls,
            _memory: vec![1; 16 << 10],
            alive: alive.clone(),
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns a method that adds one to the number of calls and returns that number. It panics on a
/// negative input.
fn count() -> impl Method<Object = Counter, Inputs = MpmdArray, Outputs = MpmdArray, Made = ()> {
    method(
        |_: &ShapedArray| f32s([]),
        |counter: &mut Counter, x: View<f32>, mut y: ViewMut<f32>| {
            assert!(x[0] >= 0.0, "a negative input");
            counter.calls += 1;
            y[0] = counter.calls as f32;
        },
    )
}

/// Returns a method that makes a new object with the same number of calls.
fn copy() -> impl Method<
    Object = Counter,
    Inputs = Empty<MpmdArray>,
    Outputs = Empty<MpmdArray>,
    Made = MadeObject<Counter>,
> {
    method((), |counter: &mut Counter| {
        MadeObject::new(Counter::new(counter.calls, &counter.alive))
    })
}

/// The objects and methods of one device.
struct Place<C: Method, D: Method> {
    mesh: Mesh,
    count: BoundMethod<C>,
    copy: BoundMethod<D>,
    object: MpmdObject<Counter>,
    /// Number of calls of `object`.
    calls: u32,
    kept: Vec<MpmdObject<Counter>>,
    last: MpmdArray,
}

/// Runs `counters CALLS SEED [PANIC]`: random calls on random devices. After call PANIC, one object
/// fails, its errors are compared, and the calls end. Prints `calls N` at intervals. At the end
/// prints the number of values that are left, and the resident bytes before and after.
pub(super) fn count_calls(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let number = |text: &&str| {
        text.parse::<usize>()
            .map_err(|error| Error::kernel(error.to_string()))
    };
    let numbers = args.iter().map(number).collect::<Result<Vec<usize>>>()?;
    let (calls, seed) = (numbers[0], numbers[1]);
    let panic_at = numbers.get(2).copied().unwrap_or(usize::MAX);
    let mut random = Rng::with_seed(seed as u64);
    let alive = Arc::new(AtomicUsize::new(0));
    let meshes = p.mesh(&[("x", p.processes())])?.split("x")?;
    let new = |p: &mut Program, mesh: &Mesh| {
        let alive = alive.clone();
        p.object(mesh, move |_| Ok(Counter::new(0, &alive)))
    };
    let mut places = Vec::new();
    for mesh in meshes {
        let (count, copy) = (p.method(count()).on(&mesh), p.method(copy()).on(&mesh));
        let (object, last) = (new(p, &mesh)?, MpmdArray::scalar(0.0f32));
        let (count, copy) = (count.build()?, copy.build()?);
        places.push(Place {
            mesh,
            count,
            copy,
            object,
            calls: 0,
            kept: Vec::new(),
            last,
        });
    }
    let mut warm = 0;
    for i in 0..calls {
        let from = random.usize(..places.len());
        let input = places[from].last.clone();
        let at = random.usize(..places.len());
        let place = &mut places[at];
        match random.usize(..400) {
            0 | 1 => (place.object, place.calls) = (new(p, &place.mesh)?, 0),
            2..=11 => {
                let (_, copied) = place.copy.call(p, &place.object, Empty::new())?;
                if place.kept.len() == KEPT {
                    place.kept.swap_remove(random.usize(..KEPT));
                }
                place.kept.push(copied);
            }
            12..=15 => {
                // The copy takes the place of the object, with its count.
                let (_, copied) = place.copy.call(p, &place.object, Empty::new())?;
                place.object = copied;
            }
            _ => {}
        }
        // Now and then the input comes from another device.
        let input = match random.usize(..20) {
            0 if input.sharding().is_some() => p.device_put(&input, place.mesh.replicated())?,
            _ => MpmdArray::scalar(1.0f32),
        };
        place.last = place.count.call(p, &place.object, input)?;
        place.calls += 1;
        if i == panic_at {
            // The job ends with this failure.
            say(fail(p, place)?);
            break;
        }
        if (i + 1) % PERIOD == 0 {
            for place in &places {
                let found = place
                    .last
                    .to_host()?
                    .map(|y| y.to_vec::<f32>())
                    .transpose()?;
                let wrong = found.filter(|found| place.calls > 0 && found[0] != place.calls as f32);
                if let Some(found) = wrong {
                    return Err(Error::kernel(format!("{found:?} of {} calls", place.calls)));
                }
            }
            p.step_end()?;
        }
        if (i + 1) % (PERIOD * 20) == 0 {
            say(format!("calls {}", i + 1));
        }
        if i + 1 == calls / 5 {
            warm = resident_bytes();
        }
    }
    drop(places);
    let until = Instant::now() + SOON;
    while alive.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    say(format!(
        "left {} resident {warm} {}",
        alive.load(Ordering::Relaxed),
        resident_bytes()
    ));
    Ok(())
}

/// Makes an object fail. On its owner, returns a line with the error of the later calls.
fn fail<C, D>(p: &mut Program, place: &Place<C, D>) -> Result<String>
where
    C: Method<Object = Counter, Inputs = MpmdArray, Outputs = MpmdArray, Made = ()>,
    D: Method,
{
    let mut errors = Vec::new();
    for input in [-1.0f32, 1.0, 2.0] {
        let y = place
            .count
            .call(p, &place.object, MpmdArray::scalar(input))?;
        if let Err(error) = y.to_host() {
            errors.push(error.to_string());
        }
    }
    let same = errors.iter().all(|error| *error == errors[0]);
    let first = errors
        .first()
        .cloned()
        .unwrap_or_else(|| "elsewhere".to_owned());
    Ok(format!(
        "failed {} times, same {same}: {first}",
        errors.len()
    ))
}
