//! Measures hand-overs: zero-copy transfers of an array from its writer's `device_put` until the
//! other program can use it.
//!
//! The sender works like a program that passes on a new result each step. A kernel writes each
//! array, and the last ones are kept, so that each array takes other memory for a while. The
//! receiver waits before the array is sent, and may have fallen asleep unless `--spin` keeps it
//! awake. After the measurement it adds up every byte, and keeps some arrays for a while.
//!
//! Each side reads a clock that all processes of a host share, so no answer is measured. Two hosts
//! have no such clock, and nothing is measured between them.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use mpmd_core::cuda::{Grid, Source};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::prelude::{MpmdArray, Program, ShapedArray};
use mpmd_core::{Error, Result};
use mpmd_ids::ProcessId;
use mpmd_layout::aval::u8s;
use mpmd_layout::bytes_text;
use mpmd_layout::topology::{DeviceKind, LinkClass};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::array::{FIRST, Pair, arrive};
use super::found::{Samples, Test};
use super::memory::available;
use super::pace::Pace;
use super::wake::Wake;
use crate::options::Size;

/// The process that receives the arrays.
pub(super) const SECOND: ProcessId = ProcessId(1);
/// The number of arrays that the sender keeps at a time.
const KEPT: usize = 8;
/// The receiver keeps one of this many arrays.
const EACH: usize = 3;
/// The maximum number of arrays that the receiver keeps at a time.
const HELD: usize = 3;
/// Number of hand-overs until every piece of memory has been used once.
const WARM_UP: usize = KEPT + HELD + 1;
/// The host must have room for this many arrays of the measured size: if they are copied, the
/// receiver needs memory too.
const ROOM: u64 = 16;
/// The time that the sender sleeps before each array is sent. The receiver already waits then.
const SETTLED: Duration = Duration::from_micros(200);
/// The time that the sender sleeps before it sends an array in new memory: an ordinary program
/// computes the array meanwhile.
const SETTLED_NEW: Duration = Duration::from_millis(20);
/// The smallest array, in bytes, for which the reading time is shown. Reading a smaller one
/// measures the clock rather than the memory.
const WORTH_READING: usize = 1 << 20;

/// Measured hand-overs for each repeat of the other cases.
const FOR_EACH_REPEAT: usize = 2;

static WRITE: Source = Source::cuda(
    "write.cu",
    r#"
extern "C" __global__ void write(
    const unsigned char *number, unsigned char *array, unsigned long long n
) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (; i < n; i += gridDim.x * (unsigned long long)blockDim.x) array[i] = number[0];
}
"#,
);

/// A kernel that writes the number of its input into every byte of its output.
struct Write(ShapedArray);

impl Kernel for Write {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(self.0.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, number: View<'_>, mut array: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            let bytes = array.region().elements();
            let args = [(&number).into(), (&mut array).into(), bytes.into()];
            return cuda.launch(&WRITE, "write", Grid::over(bytes), &args);
        }
        let number = number.as_slice::<u8>()?[0];
        array.as_mut_slice::<u8>()?.fill(number);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&WRITE]
    }
}

/// Measures hand-overs of arrays of `bytes` bytes; both processes must call this together. If they
/// cannot be measured, the first process prints the reason, and both return an empty list.
pub(super) fn handover(
    p: &mut Program,
    pair: &Pair,
    bytes: usize,
    pace: &Pace,
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
            eprintln!("mpmd: hand-overs of {} are not measured: {why}", Size(bytes));
        }
        return Ok(Vec::new());
    }
    let mut found = measure(p, pair, bytes, FOR_EACH_REPEAT * pace.repeats)?;
    if on_gpu {
        // To add up the bytes, the receiver would copy them to the host.
        found.retain(|found| {
            matches!(found.test, Test::Handover | Test::HandoverWarmUp | Test::Wake)
        });
    }
    Ok(found)
}

/// Returns the reason why hand-overs of `bytes` bytes cannot be measured over `link` with `room`
/// bytes of memory; `None` if they can.
fn why_not(link: Option<LinkClass>, room: u64, bytes: usize) -> Option<String> {
    if matches!(link, None | Some(LinkClass::Network)) {
        return Some("the processes are on two hosts with different clocks".to_owned());
    }
    let little = room / ROOM < bytes as u64;
    little.then(|| {
        let (needed, room) = (bytes_text((bytes as u64).saturating_mul(ROOM)), bytes_text(room));
        format!("that takes {needed} of memory, and {room} is available")
    })
}

fn measure(p: &mut Program, pair: &Pair, bytes: usize, repeats: usize) -> Result<Vec<Samples>> {
    let mesh = p.mesh_of(&[("x", 1)], pair.here.devices())?;
    let write = p.jit(Write(u8s([bytes]))).on(&mesh).outputs(pair.here.clone()).build()?;
    let small = p.array_from_fn(u8s([1]), &pair.here, |_, mut view| Ok(view.fill(1u8)?))?;
    let (mut kept, mut held) = (VecDeque::new(), VecDeque::new());
    // The moments that this process records: as the sender, of each `device_put`; as the receiver,
    // of each arrival, with the time to read the array.
    let (mut given, mut had) = (Vec::new(), Vec::new());
    // The places of all arrays so far, as this process sees them.
    let mut places = HashSet::new();
    let mut wake = Wake::new(p)?;
    for number in 0..WARM_UP + repeats {
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
            let is_new = x.to_host()?.is_some_and(|values| places.insert(values.bytes().as_ptr()));
            // Asleep: a busy wait might occupy the core that the receiver needs.
            std::thread::sleep(if is_new { SETTLED_NEW } else { SETTLED });
        }
        given.push(now());
        let y = p.device_put(&x, &pair.there)?;
        arrive(&y)?;
        let ready = now();
        // In place: after a zero-copy transfer no copy is made here.
        if let Some(values) = y.to_host()? {
            let start = Instant::now();
            let sum = sum_of(values.bytes());
            let read = start.elapsed().as_nanos() as u64;
            had.push(Had { ready, read, is_new: places.insert(values.bytes().as_ptr()) });
            if sum != u64::from(value) * bytes as u64 {
                let what =
                    format!("{bytes} bytes of {value} were handed over, and their sum is {sum}");
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
        wake.measure(SETTLED)?;
    }
    let had = p.broadcast_value(SECOND, Vec::new(), || Ok(had))?;
    let mut found = evaluate(bytes, &given, &had);
    let mut wakes = Samples::new(Test::Wake, bytes);
    wake.times(p)?.into_iter().for_each(|time| wakes.add(1, time));
    found.push(wakes);
    Ok(found)
}

/// Synchronises both processes: returns on the first one once the second is about to issue its next
/// operation. Both must call this.
fn meet(p: &mut Program, pair: &Pair, small: &MpmdArray) -> Result<()> {
    let there = p.device_put(small, &pair.there)?;
    arrive(&there)?;
    arrive(&p.device_put(&there, &pair.here)?)
}

/// Returns the sum of all bytes. Each piece has sums that fit in 16 bits, so that compilers emit
/// wide additions.
fn sum_of(bytes: &[u8]) -> u64 {
    const LANES: usize = 64;
    let (blocks, rest) = bytes.as_chunks::<LANES>();
    let piece = |blocks: &[[u8; LANES]]| {
        let mut lanes = [0u16; LANES];
        for block in blocks {
            for (lane, byte) in lanes.iter_mut().zip(block) {
                *lane += u16::from(*byte);
            }
        }
        lanes.iter().map(|lane| u64::from(*lane)).sum::<u64>()
    };
    let whole: u64 = blocks.chunks(256).map(piece).sum();
    whole + rest.iter().map(|byte| u64::from(*byte)).sum::<u64>()
}

/// Returns the nanoseconds of a clock that all processes of a host share.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// An arrival as the receiver saw it, in nanoseconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Had {
    ready: u64,
    /// The time to read the array.
    read: u64,
    /// True if no array was at this place before.
    is_new: bool,
}

/// Computes the samples: `given` has the send times in nanoseconds.
fn evaluate(bytes: usize, given: &[u64], had: &[Had]) -> Vec<Samples> {
    let of = |test: Test, is_new: bool, spans: &[u64]| {
        let mut found = Samples::new(test, bytes);
        let spans = had.iter().zip(spans).filter(|(had, _)| had.is_new == is_new);
        spans.for_each(|(_, nanos)| found.add(1, Duration::from_nanos(*nanos)));
        found
    };
    let took: Vec<u64> =
        given.iter().zip(had).map(|(given, had)| had.ready.saturating_sub(*given)).collect();
    let read: Vec<u64> = had.iter().map(|had| had.read).collect();
    let parts =
        [(Test::Handover, Test::HandoverWarmUp, took), (Test::Read, Test::ReadWarmUp, read)];
    let shown = parts.into_iter().take(if bytes < WORTH_READING { 1 } else { 2 });
    let split = |(steady, new, spans): (Test, Test, Vec<u64>)| {
        [of(steady, false, &spans), of(new, true, &spans)]
    };
    shown.flat_map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::super::array::in_threads;
    use super::super::words::Case;
    use super::*;

    #[test]
    fn new_memory_is_separate_and_small_reads_are_left_out() {
        let given: Vec<u64> = (0..9).map(|i| i * 100_000).collect();
        // 50 us each in new memory, else 3 us.
        let had = |(i, given): (usize, &u64)| {
            let is_new = i % 3 == 0;
            Had { ready: given + if is_new { 50_000 } else { 3_000 }, read: 1 << 20, is_new }
        };
        let had: Vec<Had> = given.iter().enumerate().map(had).collect();
        let found = evaluate(1 << 20, &given, &had);
        let tests = [Test::Handover, Test::HandoverWarmUp, Test::Read, Test::ReadWarmUp];
        assert_eq!(found.iter().map(|found| found.test).collect::<Vec<_>>(), tests);
        assert_eq!((&found[0].samples, &found[1].samples), (&vec![3.0; 6], &vec![50.0; 3]));
        assert!(found[2].samples.iter().all(|sample| (sample - 1.0).abs() < 1e-9), "{found:?}");
        assert_eq!(evaluate(8, &given, &had).len(), 2);
    }

    #[test]
    fn two_hosts_or_too_little_memory_are_not_measured() {
        let near = Some(LinkClass::SameHost);
        assert_eq!(why_not(near, 4 << 30, 256 << 20), None);
        let said = why_not(near, 1 << 30, 256 << 20).unwrap();
        assert_eq!(said, "that takes 4.0 GiB of memory, and 1.0 GiB is available");
        assert!(why_not(Some(LinkClass::Network), u64::MAX, 8).unwrap().contains("clocks"));
        assert!(
            why_not(None, u64::MAX, 8).is_some() && why_not(near, u64::MAX, usize::MAX).is_some()
        );
    }

    #[test]
    fn every_byte_is_added_up() {
        for bytes in [0, 1, 63, 64, 65, 256 * 64, 256 * 64 + 1, 100_000] {
            let values: Vec<u8> = (0..bytes).map(|i| (i % 256) as u8).collect();
            assert_eq!(sum_of(&values), values.iter().map(|value| u64::from(*value)).sum::<u64>());
            assert_eq!(sum_of(&vec![255; bytes]), 255 * bytes as u64);
        }
    }

    #[test]
    fn two_threads_measure_hand_overs() {
        let pace = Pace { repeats: 2, sample: Duration::from_micros(200) };
        let found = in_threads(DeviceKind::Cpu, &[Size(3)], &[Case::Handover], &pace).unwrap();
        let counts: Vec<usize> = found.iter().map(|found| found.samples.len()).collect();
        assert!(counts[..2].iter().all(|count| *count > 0), "{counts:?}");
        assert_eq!((counts[0] + counts[1], counts[2]), (4 + WARM_UP, 4 + WARM_UP));
    }
}
