//! Kernels made of two closures, and one that several topics use.

use mpmd_core::Jit;
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceId;

/// A kernel over lists of arrays that calls `infer` for its signature and `run` for its work.
pub(crate) struct Fun<I, R> {
    name: &'static str,
    infer: I,
    run: R,
}

/// Creates a kernel called `name` from two closures: `infer` declares the outputs, `run` computes
/// them.
pub(crate) fn fun<I, R>(name: &'static str, infer: I, run: R) -> Fun<I, R>
where
    I: Fn(&[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> + Send + Sync + 'static,
    R: Fn(&mut Context<'_>, Vec<View<'_>>, Vec<ViewMut<'_>>) -> Result<()> + Send + Sync + 'static,
{
    Fun { name, infer, run }
}

/// Declares one output with the first input's shape and dtype; for the `infer` of a kernel.
pub(crate) fn like_first(x: &[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> {
    Ok(Signature::new(vec![x[0].clone()]))
}

impl<I, R> Kernel for Fun<I, R>
where
    I: Fn(&[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> + Send + Sync + 'static,
    R: Fn(&mut Context<'_>, Vec<View<'_>>, Vec<ViewMut<'_>>) -> Result<()> + Send + Sync + 'static,
{
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, x: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
        (self.infer)(x)
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, y: Vec<ViewMut<'_>>) -> Result<()> {
        (self.run)(cx, x, y)
    }

    fn name(&self) -> &str {
        self.name
    }
}

/// Builds a kernel that adds one to each value of its input, in place, on one device. It donates
/// the input.
pub(crate) fn add_one(
    p: &Program,
    device: u32,
) -> Result<Jit<impl Kernel<In = Vec<MpmdArray>, Out = Vec<MpmdArray>> + use<>>> {
    let kernel = fun(
        "add one",
        |x| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0")),
        |_, _, mut y| {
            y[0].as_mut_slice::<f32>()?
                .iter_mut()
                .for_each(|y| *y += 1.0);
            Ok(())
        },
    );
    let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(device)])?;
    p.jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("0")
        .build()
}
