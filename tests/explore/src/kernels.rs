//! The kernels and the object of random programs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mpmd_base::block::thread;
use mpmd_core::kernel::View;
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceId;

/// Text in the error of each injected failure of a kernel or method.
pub(crate) const INJECTED: &str = "injected by the exploration";

/// The way in which a kernel or method fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failing {
    Error,
    Panic,
}

impl Failing {
    /// Fails with an error or a panic.
    pub(crate) fn fail(self) -> Result<()> {
        match self {
            Self::Error => Err(Error::kernel(INJECTED)),
            Self::Panic => panic!("{INJECTED}"),
        }
    }
}

/// A kernel on arrays with f32 elements.
pub(crate) struct Work {
    pub(crate) op: Op,
    /// The device on which the kernel fails, and the way in which it fails.
    pub(crate) fails: Option<(DeviceId, Failing)>,
}

/// The computation of a kernel.
pub(crate) enum Op {
    /// The product of an array and a host value.
    Scale,
    /// The mean over a mesh axis of `size` devices. `part` is the shape of a device's part.
    Reduce {
        axis: String,
        size: usize,
        part: Vec<usize>,
    },
    /// A change of an array in place.
    Update,
    /// The mean of two arrays.
    Add,
}

impl Kernel for Work {
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, x: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
        let signature = Signature::new(vec![x[0].clone()]);
        Ok(match &self.op {
            Op::Reduce { axis, part, .. } => signature.all_reduce(axis, f32s(part.clone())),
            Op::Update => signature.alias("0", "0"),
            Op::Scale | Op::Add => signature,
        })
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>) -> Result<()> {
        if let Some((_, failing)) = self.fails.filter(|(device, _)| *device == cx.device()) {
            failing.fail()?;
        }
        let y = y[0].as_mut_slice::<f32>()?;
        match &self.op {
            Op::Scale => {
                // Devices run at different speeds.
                thread::sleep(Duration::from_micros(u64::from(cx.device().0 % 3) * 200));
                let factor = x[1].scalar::<f32>()?;
                y.iter_mut()
                    .zip(x[0].as_slice::<f32>()?)
                    .for_each(|(y, x)| *y = x * factor);
            }
            Op::Reduce { axis, size, .. } => {
                y.copy_from_slice(x[0].as_slice()?);
                cx.all_reduce(axis, y)?;
                y.iter_mut().for_each(|y| *y /= *size as f32);
            }
            Op::Update => y.iter_mut().for_each(|y| *y = 1.0 - *y / 3.0),
            Op::Add => {
                let sums = x[0].as_slice::<f32>()?.iter().zip(x[1].as_slice::<f32>()?);
                y.iter_mut()
                    .zip(sums)
                    .for_each(|(y, (a, b))| *y = (a + b) / 2.0);
            }
        }
        Ok(())
    }

    fn name(&self) -> &str {
        match self.op {
            Op::Scale => "scale",
            Op::Reduce { .. } => "reduce",
            Op::Update => "update",
            Op::Add => "add",
        }
    }
}

/// An object that stores a sum of values. Living objects are counted.
pub(crate) struct Total {
    pub(crate) sum: f32,
    alive: Arc<AtomicUsize>,
}

impl Total {
    pub(crate) fn new(alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self {
            sum: 0.0,
            alive: alive.clone(),
        }
    }
}

impl Drop for Total {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}
