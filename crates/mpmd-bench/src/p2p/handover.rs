//! Measures the hand-over of an array between two processes of a host: the time from the sender's
//! `device_put` until the receiver can use the array.
//!
//! In each round a kernel of the sender writes a new array. The sender keeps the last [`KEPT`]
//! arrays, and the receiver some of those that it got. So the first rounds use new memory, and
//! later ones use memory again.
//!
//! The receiver waits for the array before it is sent. It may be asleep then, unless `--spin` keeps
//! it awake. After the hand-over the receiver, or its GPU, compares every byte.
//!
//! The sender notes when it sends, the receiver when the array arrives. Both read the clock of the
//! host, so the two times can be subtracted. Between two hosts nothing is measured.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::bytes_text;
use mpmd_core::cuda::{Grid, Source};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::prelude::{MpmdArray, Program, ShapedArray};
use mpmd_core::{Error, Jit, Result};
use mpmd_device::cuda;
use mpmd_layout::aval::{i32s, u8s};
use mpmd_layout::topology::{DeviceKind, LinkClass, Mesh};
use serde::{Deserialize, Serialize};

use super::array::{DevicePair, FIRST, arrive};
use super::memory::available;
use super::pace::SamplePace;
use super::samples::{P2pTest, Samples};
use super::wake::BareWake;
use crate::direct::Exchange;
use crate::job::now;
use crate::options::Size;

/// The process that receives the arrays.
pub(super) const SECOND: ProcessId = ProcessId(1);
/// Number of arrays that the sender holds at a time.
const KEPT: usize = 8;
/// Interval of the arrays that the receiver holds: one array in every three.
const EACH: usize = 3;
/// Maximum number of arrays that the receiver holds at a time.
const HELD: usize = 3;
/// Number of rounds after which all memory has been used at least once.
const WARM_UP: usize = KEPT + HELD + 1;
/// Minimum memory of the host, as a number of arrays of the measured size. A receiver that gets
/// copies needs memory too.
const ROOM: u64 = 16;
/// Sleep of the sender before it sends an array, so that the receiver is already waiting.
const SETTLED: Duration = Duration::from_micros(200);
/// Sleep of the sender before it sends an array in new memory. It stands for the computation of the
/// array in an ordinary program.
const SETTLED_NEW: Duration = Duration::from_millis(20);
/// Number of hand-overs per requested repeat.
const FOR_EACH_REPEAT: usize = 2;

/// Maximum number of threads of the functions in [`BYTES`]: enough to fill a GPU, each with many
/// words.
const THREADS: usize = 1 << 18;

static BYTES: Source = Source::cuda(
    "bytes.cu",
    r#"
#define EACH(i, n) \
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; \
    i < (n); i += gridDim.x * (unsigned long long)blockDim.x

extern "C" __global__ void write(
    const unsigned char *number, unsigned char *array, unsigned long long n
) {
    unsigned long long word = number[0] * 0x0101010101010101ull;
    for (EACH(i, n / 8)) ((unsigned long long *)array)[i] = word;
    for (EACH(i, n % 8)) array[n / 8 * 8 + i] = number[0];
}

/* Counts the words and bytes that do not have the number. */
extern "C" __global__ void compare(
    const unsigned char *number, const unsigned char *array, unsigned long long n, int *wrong
) {
    unsigned long long word = number[0] * 0x0101010101010101ull;
    for (EACH(i, n / 8)) {
        if (((const unsigned long long *)array)[i] != word) atomicAdd(wrong, 1);
    }
    for (EACH(i, n % 8)) {
        if (array[n / 8 * 8 + i] != number[0]) atomicAdd(wrong, 1);
    }
}
"#,
);

/// Returns the launch grid of the functions in [`BYTES`] for an array of `bytes` bytes.
fn grid(bytes: usize) -> Grid {
    Grid::over(bytes.div_ceil(8).min(THREADS))
}

/// A kernel that fills its output with the byte in its input, and stores the output's address.
struct Write(ShapedArray, Arc<AtomicU64>);

impl Kernel for Write {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(self.0.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, number: View<'_>, mut array: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            self.1.store(cuda.address(&mut array)?, Ordering::Relaxed);
            let bytes = array.region().elements();
            let args = [(&number).into(), (&mut array).into(), bytes.into()];
            return cuda.launch(&BYTES, "write", grid(bytes), &args);
        }

        let number = number.as_slice::<u8>()?[0];
        let bytes = array.as_mut_slice::<u8>()?;
        self.1
            .store(bytes.as_ptr().addr() as u64, Ordering::Relaxed);
        bytes.fill(number);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&BYTES]
    }
}

/// A kernel for GPUs: (expected byte, array) -> number of wrong words and bytes. It stores the
/// array's address.
struct Compare(Arc<AtomicU64>);

impl Kernel for Compare {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, _: &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(i32s([1])))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (number, array): (View<'_>, View<'_>),
        mut wrong: ViewMut<'_>,
    ) -> Result<()> {
        let cuda = cx
            .cuda()
            .ok_or_else(|| Error::kernel("it is for GPUs only".to_owned()))?;
        self.0.store(cuda.address(&array)?, Ordering::Relaxed);
        let bytes = array.region().elements();
        cuda.zero(&mut wrong)?;
        let args = [
            (&number).into(),
            (&array).into(),
            bytes.into(),
            (&mut wrong).into(),
        ];
        cuda.launch(&BYTES, "compare", grid(bytes), &args)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&BYTES]
    }
}

/// Measures hand-overs of arrays of `bytes` bytes; both processes must call this together. If a
/// measurement is impossible, the first process prints the reason, and both return an empty list.
pub(super) fn handover(
    p: &mut Program,
    pair: &DevicePair,
    bytes: usize,
    pace: &SamplePace,
) -> Result<Vec<Samples>> {
    let devices = p.topology().device_ids().to_vec();
    let link = p.topology().link_between(devices[0], devices[1]);
    let on_gpu = p.topology().kind_of(devices[0]) == Some(DeviceKind::Cuda);
    // Each device has memory of its own, and reports itself if it has too little.
    let known = || if on_gpu { None } else { available() };

    let room = p.broadcast_value(FIRST, u64::MAX, || Ok(known().unwrap_or(u64::MAX)))?;
    let why_not = why_not(link, room, bytes);
    if let Some(why) = why_not {
        if p.process() == FIRST {
            eprintln!(
                "mpmd: hand-overs of {} are not measured: {why}",
                Size(bytes)
            );
        }
        return Ok(Vec::new());
    }

    measure(p, pair, bytes, FOR_EACH_REPEAT * pace.repeats, on_gpu)
}

/// Returns the reason why hand-overs of `bytes` bytes cannot be measured over `link` with `room`
/// bytes of memory; `None` if they can.
fn why_not(link: Option<LinkClass>, room: u64, bytes: usize) -> Option<String> {
    if matches!(link, None | Some(LinkClass::Network)) {
        return Some("the processes are on two hosts with different clocks".to_owned());
    }
    let little = room / ROOM < bytes as u64;
    little.then(|| {
        let needed = bytes_text((bytes as u64).saturating_mul(ROOM));
        let room = bytes_text(room);
        format!("that takes {needed} of memory, and {room} is available")
    })
}

fn measure(
    p: &mut Program,
    pair: &DevicePair,
    bytes: usize,
    repeats: usize,
    on_gpu: bool,
) -> Result<Vec<Samples>> {
    let place = Arc::new(AtomicU64::new(0));
    let HandoverKernels {
        mesh,
        write,
        compare,
    } = HandoverKernels::build(p, pair, bytes, &place, on_gpu)?;
    let exchange = if on_gpu {
        meet_by_cuda(p, bytes)?
    } else {
        None
    };
    let small = p.array_from_fn(u8s([1]), &pair.here, |_, mut view| Ok(view.fill(1u8)?))?;

    let mut kept = VecDeque::new();
    let mut held = VecDeque::new();
    // The sender adds the time of each `device_put` to `given`, the receiver each arrival to `had`.
    let mut given = Vec::new();
    let mut had = Vec::new();
    // The addresses of all arrays so far, in this process.
    let mut places = HashSet::new();

    let mut wakes = vec![(P2pTest::Wake, BareWake::new(p)?)];
    if exchange.is_some() {
        wakes.extend([
            (P2pTest::BareIpc, BareWake::new(p)?),
            (P2pTest::BareIpcCopy, BareWake::new(p)?),
        ]);
    }

    // The counts of `compare`, which are read after the last round.
    let mut wrong = Vec::new();
    for number in 0..WARM_UP + repeats {
        // The sender writes a new array.
        let value = (number % 251 + 1) as u8;
        let input = p.device_put(&MpmdArray::from_slice(&[1], &[value])?, mesh.replicated())?;
        let x = write.call(p, input)?;
        x.block_until_ready()?;
        kept.push_back(x.clone());
        if kept.len() > KEPT {
            kept.pop_front();
        }

        meet(p, pair, &small)?;
        if p.process() == FIRST {
            let is_new = places.insert(place.load(Ordering::Relaxed));
            // Asleep: a busy wait might occupy the core that the receiver needs.
            std::thread::sleep(if is_new { SETTLED_NEW } else { SETTLED });
        }

        // The receiver gets it, and checks its values.
        given.push(now());
        let y = p.device_put(&x, &pair.there)?;
        arrive(&y)?;
        let ready = now();
        if let Some(compare) = &compare {
            let number = p.device_put(&MpmdArray::from_slice(&[1], &[value])?, &pair.there)?;
            let count = compare.call(p, (number, y.clone()))?;
            arrive(&count)?;
            if p.process() == SECOND {
                let is_new = places.insert(place.load(Ordering::Relaxed));
                had.push(NoticedArrival { ready, is_new });
            }
            wrong.push(count);
        } else if let Some(values) = y.to_host()? {
            // In place: after a zero-copy transfer no copy is made here.
            let place = values.bytes().as_ptr().addr() as u64;
            had.push(NoticedArrival {
                ready,
                is_new: places.insert(place),
            });
            if let Some(wrong) = values.bytes().iter().find(|byte| **byte != value) {
                let what = format!("{bytes} bytes of {value} were handed over, and one is {wrong}");
                return Err(Error::kernel(what));
            }
        }

        if number % EACH == 0 {
            held.push_back(y);
            if held.len() > HELD {
                held.pop_front();
            }
        }

        meet(p, pair, &small)?;
        measure_wakes(&mut wakes, exchange.as_ref())?;
    }
    check_counts(wrong, bytes)?;
    let had = p.broadcast_value(SECOND, Vec::new(), || Ok(had))?;
    let mut found = evaluate(bytes, &given, &had);
    for (test, wake) in wakes {
        let mut samples = Samples::new(test, bytes);
        wake.times(p)?
            .into_iter()
            .for_each(|time| samples.add(1, time));
        found.push(samples);
    }
    Ok(found)
}

/// The kernels of the sender and the receiver of hand-overs.
struct HandoverKernels {
    /// A mesh of the sender's device.
    mesh: Mesh,
    write: Jit<Write>,
    /// Compares a received array on a GPU. `None` on CPUs, where the host compares.
    compare: Option<Jit<Compare>>,
}

impl HandoverKernels {
    /// Compiles the kernels, which store the address of each array in `place`.
    fn build(
        p: &mut Program,
        pair: &DevicePair,
        bytes: usize,
        place: &Arc<AtomicU64>,
        on_gpu: bool,
    ) -> Result<Self> {
        let [mesh, other_mesh] =
            [&pair.here, &pair.there].map(|at| p.mesh_of(&[("x", 1)], at.devices()));
        let mesh = mesh?;
        let other_mesh = other_mesh?;

        let write = Write(u8s([bytes]), place.clone());
        let write = p.jit(write).on(&mesh).outputs(pair.here.clone()).build()?;
        let compare = if on_gpu {
            let compare = Compare(place.clone());
            Some(
                p.jit(compare)
                    .on(&other_mesh)
                    .outputs(pair.there.clone())
                    .build()?,
            )
        } else {
            None
        };
        Ok(Self {
            mesh,
            write,
            compare,
        })
    }
}

/// Measures one wake-up for each test. Except for the test `Wake`, each includes a hand-over
/// through `exchange` if that is there.
fn measure_wakes(wakes: &mut [(P2pTest, BareWake)], exchange: Option<&Exchange>) -> Result<()> {
    for (test, wake) in wakes {
        // A bare wake-up passes no data on.
        let exchange = exchange.filter(|_| *test != P2pTest::Wake);
        let take = |exchange: &Exchange| exchange.take(*test == P2pTest::BareIpcCopy);
        let give = || exchange.map_or(Ok(()), Exchange::give);
        wake.measure(SETTLED, give, || exchange.map_or(Ok(()), take))?;
    }
    Ok(())
}

/// Fails if a count of wrong words and bytes is not 0. Ignores counts that are on the other
/// process.
fn check_counts(counts: Vec<MpmdArray>, bytes: usize) -> Result<()> {
    for count in counts {
        if let Some(values) = count.to_host()?
            && let [count] = values.as_slice::<i32>()?
            && *count > 0
        {
            let what = format!("of {bytes} bytes that were handed over, {count} words are wrong");
            return Err(Error::kernel(what));
        }
    }
    Ok(())
}

/// Exchanges IPC handles of memory and an event between the processes' GPUs, by the driver alone.
/// Returns `None` between threads, which CUDA IPC does not support. Also returns `None` if it
/// fails, and prints the reason. Both processes must call this.
fn meet_by_cuda(p: &mut Program, bytes: usize) -> Result<Option<Exchange>> {
    let devices = p.topology().device_ids();
    if p.topology().link_between(devices[0], devices[1]) == Some(LinkClass::SameProcess) {
        return Ok(None);
    }

    let own = p
        .topology()
        .ordinals(p.process(), cuda::found()?.gpus.len() as u32)[0];
    let mut exchange = Exchange::new(own, bytes);
    let words = exchange
        .as_ref()
        .map_or(Ok(Vec::new()), Exchange::words)
        .unwrap_or_default();
    let mut words_of_both = p.gather_value(Vec::new(), || Ok(words))?;
    let other = words_of_both.swap_remove(1 - p.process().index());

    let opened = exchange
        .as_mut()
        .map_or(Ok(()), |exchange| exchange.open(&other));

    if let Some(error) = exchange.as_ref().err().or(opened.as_ref().err()) {
        eprintln!("mpmd: hand-overs by CUDA alone are not measured: {error}");
    }

    let works = exchange.is_ok() && opened.is_ok();
    let works_on = p.gather_value(false, || Ok(works))?;
    Ok(exchange.ok().filter(|_| !works_on.contains(&false)))
}

/// Synchronises both processes. Returns on the first process when the second is about to issue its
/// next operation. Both processes must call this.
fn meet(p: &mut Program, pair: &DevicePair, small: &MpmdArray) -> Result<()> {
    let there = p.device_put(small, &pair.there)?;
    arrive(&there)?;
    arrive(&p.device_put(&there, &pair.here)?)
}

/// The arrival of an array at the receiver, in nanoseconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct NoticedArrival {
    ready: u64,
    /// True if the receiver saw no earlier array at the same address.
    is_new: bool,
}

/// Returns the samples of hand-overs from the send times `given` and the arrivals `had`, in
/// nanoseconds. Arrivals in new memory have their own samples.
fn evaluate(bytes: usize, given: &[u64], had: &[NoticedArrival]) -> Vec<Samples> {
    let mut found =
        [P2pTest::Handover, P2pTest::HandoverWarmUp].map(|test| Samples::new(test, bytes));
    for (given, had) in given.iter().zip(had) {
        let took = Duration::from_nanos(had.ready.saturating_sub(*given));
        found[usize::from(had.is_new)].add(1, took);
    }
    found.into()
}

#[cfg(test)]
mod tests {
    use super::super::array::in_threads;
    use super::super::p2p_case::P2pCase;
    use super::*;

    #[test]
    fn hand_overs_in_new_memory_are_separate() {
        let given: Vec<u64> = (0..9).map(|i| i * 100_000).collect();
        // 50 us each in new memory, else 3 us.
        let numbered = given.iter().enumerate();
        let had: Vec<NoticedArrival> = numbered
            .map(|(i, given)| {
                let is_new = i % 3 == 0;
                NoticedArrival {
                    ready: given + if is_new { 50_000 } else { 3_000 },
                    is_new,
                }
            })
            .collect();
        let found = evaluate(1 << 20, &given, &had);
        let tests = [P2pTest::Handover, P2pTest::HandoverWarmUp];
        assert_eq!(
            found.iter().map(|found| found.test).collect::<Vec<_>>(),
            tests
        );
        assert_eq!(
            (&found[0].samples, &found[1].samples),
            (&vec![3.0; 6], &vec![50.0; 3])
        );
    }

    #[test]
    fn two_hosts_or_too_little_memory_are_not_measured() {
        let near = Some(LinkClass::SameHost);
        assert_eq!(why_not(near, 4 << 30, 256 << 20), None);
        let said = why_not(near, 1 << 30, 256 << 20).unwrap();
        assert_eq!(
            said,
            "that takes 4.0 GiB of memory, and 1.0 GiB is available"
        );
        assert!(
            why_not(Some(LinkClass::Network), u64::MAX, 8)
                .unwrap()
                .contains("clocks")
        );
        assert!(
            why_not(None, u64::MAX, 8).is_some() && why_not(near, u64::MAX, usize::MAX).is_some()
        );
    }

    #[test]
    fn two_threads_measure_hand_overs() {
        let pace = SamplePace {
            repeats: 2,
            sample: Duration::from_micros(200),
        };
        let found = in_threads(DeviceKind::Cpu, &[Size(3)], &[P2pCase::Handover], &pace).unwrap();
        let counts: Vec<usize> = found.iter().map(|found| found.samples.len()).collect();
        assert!(counts[..2].iter().all(|count| *count > 0), "{counts:?}");
        assert_eq!(
            (counts[0] + counts[1], counts[2]),
            (4 + WARM_UP, 4 + WARM_UP)
        );
    }
}
