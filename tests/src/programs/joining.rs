//! Devices of several processes that compute together inside kernels, by NCCL if the job asks for
//! it.

use mpmd_core::cuda::{Grid, Source};
use mpmd_core::prelude::*;
use mpmd_core::{Jit, ProcessId};

use super::Say;

/// Number of elements on each device.
const EACH: usize = 20_000;

/// Number of loop turns of the slow kernel, which take a good part of a second.
const TURNS: u64 = 100_000_000;

static SLOW: Source = Source::cuda(
    "slow.cu",
    r#"
    extern "C" __global__ void slow(unsigned long long turns, float *x) {
        volatile unsigned long long turn = 0;
        while (turn < turns) turn = turn + 1;
        x[0] = x[0] + (float)(turn - turns);
    }
    "#,
);

/// A kernel that sums over all devices, in place. On the device `slow` it starts late.
struct Sum {
    slow: Option<usize>,
}

impl Kernel for Sum {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone())
            .alias("", "")
            .all_reduce("x", f32s([EACH])))
    }

    fn run(&self, cx: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let Some(cuda) = cx.cuda() else {
            return cx.all_reduce("x", y.as_mut_slice::<f32>()?);
        };
        if self.slow == Some(cx.axis_index("x")?) {
            cuda.launch(
                &SLOW,
                "slow",
                Grid::new(1, 1),
                &[TURNS.into(), (&mut y).into()],
            )?;
        }
        cx.all_reduce_on_cuda("x", &mut y)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&SLOW]
    }
}

/// Runs `joining MODE`, where `MODE` is one of
///
/// - `sums ROUNDS`: sums over all devices, and checks the sums;
/// - `steps SLOW`: the same until the test ends it, with the slow device `SLOW`. Prints each step.
///
/// At the end each process prints how often it called NCCL, and how many NCCL groups it joined.
pub(super) fn join(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let devices = p.topology().devices().len();
    let mesh = p.mesh(&[("x", devices)])?;
    let to = mesh.sharding(spec!["x"]);
    let slow = match args {
        ["steps", slow] => slow.parse().ok(),
        _ => None,
    };
    let sum = p
        .jit(Sum { slow })
        .on(&mesh)
        .outputs(to.clone())
        .donate("")
        .build()?;
    let ones = MpmdArray::from_slice(&[EACH * devices], &vec![1.0_f32; EACH * devices])?;
    let step = |p: &mut Program, sum: &Jit<Sum>, times: u32| -> Result<()> {
        let mut x = p.device_put(&ones, to.clone())?;
        for _ in 0..times {
            x = sum.call(p, x)?;
        }
        for shard in x.addressable_shards()? {
            let expected = (devices as f32).powi(times as i32);
            if shard
                .data
                .to_vec::<f32>()?
                .iter()
                .any(|value| *value != expected)
            {
                return Err(Error::kernel("the sum is another"));
            }
        }
        Ok(())
    };
    match args {
        ["sums", rounds] => {
            let rounds: u32 = rounds.parse().map_err(|_| Error::kernel("sums ROUNDS"))?;
            for round in 0..rounds {
                step(p, &sum, 1 + round % 5)?;
            }
        }
        ["steps", _] => {
            for number in 0.. {
                step(p, &sum, 1)?;
                p.step_end()?;
                say(format!("step {number}"));
            }
        }
        _ => return Err(Error::kernel("joining MODE")),
    }
    // No process prints before all are done.
    for process in 0..p.processes() as u32 {
        p.broadcast_value(ProcessId(process), 0u8, || Ok(0))?;
    }
    for (name, function) in [
        ("reductions by NCCL", "ncclAllReduce"),
        ("groups joined", "ncclCommInitRankConfig"),
    ] {
        say(format!(
            "{name}: {}",
            softcuda::calls(function).unwrap_or(0)
        ));
    }
    Ok(())
}
