//! `unfinished HOW PROCESS`: a job in which `PROCESS` does not finish its program, in the way
//! `HOW`. All panic if that is `panic`.

use std::time::Duration;

use mpmd_core::ProcessId;
use mpmd_core::prelude::*;

type AnyError = Box<dyn std::error::Error>;

/// Run time of the kernel: longer than the run time of a process that does not wait for it.
const WORK: Duration = Duration::from_millis(300);

/// A slow kernel that fails if `fails` is true.
struct Slow {
    fails: bool,
}

impl Kernel for Slow {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, _: &mut Context<'_>, _: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        std::thread::sleep(WORK);
        match self.fails {
            true => Err(Error::kernel("the kernel is out of paper")),
            false => Ok(y.fill(1.0f32)?),
        }
    }
}

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [how, who] = args.as_slice() else {
        return Err("unfinished HOW PROCESS".into());
    };
    let who = ProcessId(who.parse()?);
    match how.as_str() {
        "error" => Program::run(|p| -> Result<(), AnyError> {
            work(p, who, false)?;
            if p.process() == who {
                Err("the disk is full".into())
            } else {
                Ok(())
            }
        }),
        "panic" => Program::run(|p| -> Result<(), AnyError> {
            work(p, who, false)?;
            panic!("the printer burns")
        }),
        "diverged" => Program::run(|p| {
            if p.process() == who {
                work(p, who, false)?;
            }
            // Waits for nothing: all processes reach the end before they learn of the difference.
            Ok(work(p, who, false)?)
        }),
        _ => {
            let mut p = Program::from_env()?;
            work(&mut p, who, how == "failed")?;
            if p.process() != who {
                p.finish()?;
            }
            Ok(())
        }
    }
}

/// Issues a slow kernel on the process `who`, which prints later whether the work succeeded.
fn work(p: &mut Program, who: ProcessId, fails: bool) -> Result<()> {
    let mesh = p.mesh_of(&[("one", 1)], &p.topology().devices_of(who)[..1])?;
    let slow = p
        .jit(Slow { fails })
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let x = p.array_from_fn(f32s([1]), mesh.replicated(), |_, mut view| {
        Ok(view.fill(0.0f32)?)
    })?;
    let done = slow.call(p, x)?;
    if p.process() == who {
        done.then(|ended| {
            println!(
                "the work ended {}",
                if ended.is_ok() { "well" } else { "badly" }
            )
        });
    }
    Ok(())
}
