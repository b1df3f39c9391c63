//! Measures `device_put` between host memory and a GPU while kernels run, beside the driver's own
//! copies of pinned memory.

use std::time::{Duration, Instant};

use mpmd_core::Jit;
use mpmd_core::cuda::{Grid, Source};
use mpmd_core::prelude::*;
use mpmd_layout::sharding::{MemoryKind, Sharding};

use crate::case::Case;
use crate::direct::{self, Way};
use crate::options::Size;

/// Number of elements that the background kernel changes: enough to keep every multiprocessor busy.
const WORK: usize = 1 << 20;

/// Number of transfers in flight at a time, so that pauses between transfers are not measured.
const WINDOW: usize = 4;

/// Minimum run time of one background kernel, so that it covers the transfers.
const LONG_ENOUGH: Duration = Duration::from_millis(5);

/// Number of rounds in the first trial of the background kernel. `MOST_ROUNDS` is the largest
/// number.
const FIRST_ROUNDS: u32 = 1 << 8;
const MOST_ROUNDS: u32 = 1 << 24;

/// The source of a kernel that computes for a while, with almost no memory access.
static FUNCTIONS: Source = Source::cuda(
    "busy.cu",
    r#"
extern "C" __global__ void busy(unsigned long long n, unsigned int rounds, float *x) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float y = x[i];
    for (unsigned int round = 0; round < rounds; round++) y = y * 0.999f + 0.001f;
    x[i] = y;
}
"#,
);

/// A kernel that applies this number of rounds of `busy` to its input, in place.
struct Busy(u32);

impl Kernel for Busy {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()).alias("", ""))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let n = x.region().elements();
        if let Some(cuda) = cx.cuda() {
            let args = [n.into(), self.0.into(), (&mut y).into()];
            return cuda.launch(&FUNCTIONS, "busy", Grid::over(n), &args);
        }
        for y in y.as_mut_slice::<f32>()? {
            *y = (0..self.0).fold(*y, |y, _| y * 0.999 + 0.001);
        }
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.0.into()]
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&FUNCTIONS]
    }
}

/// The background kernel and its array, which keep the device busy during the measurement.
struct Meanwhile {
    kernel: Jit<Busy>,
    x: MpmdArray,
}

impl Meanwhile {
    /// Finds a number of rounds for which the kernel runs for `LONG_ENOUGH`, by trials on the
    /// device of `on`.
    fn new(p: &mut Program, on: &Sharding) -> Result<Self> {
        let device = on.layout(&[WORK])?.devices()[0];
        let mesh = p.mesh_of(&[("x", 1)], &[device])?;
        let mut x = p.array_from_fn(f32s([WORK]), on, |_, mut view| Ok(view.fill(1.0f32)?))?;

        let mut rounds = FIRST_ROUNDS;
        loop {
            let kernel = p
                .jit(Busy(rounds))
                .on(&mesh)
                .outputs(on.clone())
                .donate("")
                .build()?;

            // The first call may load the compiled kernel.
            x = kernel.call(p, x)?;
            x.block_until_ready()?;
            let start = Instant::now();
            x = kernel.call(p, x)?;
            x.block_until_ready()?;
            if start.elapsed() >= LONG_ENOUGH || rounds >= MOST_ROUNDS {
                return Ok(Self { kernel, x });
            }

            rounds *= 4;
        }
    }

    /// Queues another run of the kernel, and does not wait for it.
    fn more(&mut self, p: &mut Program) -> Result<()> {
        self.x = self.kernel.call(p, self.x.clone())?;
        Ok(())
    }
}

/// Measures transfers of `bytes` bytes, a multiple of 4, between the host and one device, in both
/// directions. The job must have one process.
pub(super) fn cases(p: &mut Program, bytes: usize, repeats: usize) -> Result<Vec<Case>> {
    let device = p.topology().device_ids()[0];
    let there = Sharding::single_device(device);
    let here = there.clone().with_memory_kind(MemoryKind::Host);

    let mut meanwhile = Meanwhile::new(p, &there)?;
    let on_host = p.array_from_fn(f32s([bytes / 4]), &here, |_, mut view| {
        Ok(view.fill(1.0f32)?)
    })?;
    let on_device = p.device_put(&on_host, &there)?;
    on_device.block_until_ready()?;

    let mut cases = Vec::new();
    for (name, way, x, to) in [
        ("host to device", Way::In, &on_host, &there),
        ("device to host", Way::Out, &on_device, &here),
    ] {
        let times = moves(p, &mut meanwhile, x, to, repeats)?;
        let pinned = direct::case(way, bytes, direct::copies(way, bytes, repeats)?);
        let case = Case::bandwidth(
            name,
            format!("{}, kernels meanwhile", Size(bytes)),
            bytes,
            times,
        );
        cases.extend([case.ratio_to("pinned", &pinned), pinned]);
    }
    meanwhile.x.block_until_ready()?;
    Ok(cases)
}

/// Returns the mean time of one `device_put` for each sample, with `WINDOW` transfers in flight at
/// once.
fn moves(
    p: &mut Program,
    meanwhile: &mut Meanwhile,
    x: &MpmdArray,
    to: &Sharding,
    repeats: usize,
) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(repeats);
    // The first puts map and pin memory.
    for repeat in 0..=repeats {
        meanwhile.more(p)?;
        let start = Instant::now();
        let puts = (0..WINDOW)
            .map(|_| p.device_put(x, to))
            .collect::<Result<Vec<_>>>()?;
        meanwhile.more(p)?;

        for y in puts {
            y.block_until_ready()?;
        }
        if repeat > 0 {
            times.push(start.elapsed() / WINDOW as u32);
        }
        // Without this wait the queue of kernels would grow.
        meanwhile.x.block_until_ready()?;
    }
    Ok(times)
}
