//! AdamW for all stages of a pipeline, with gradients clipped by their norm over the whole model.
//!
//! The norm is reduced leaf by leaf. Each stage adds up the squares of its leaves, over the axes
//! that divide them. The sums move to the last stage, which adds them in the order of the leaves.
//! The resulting factor moves back to each stage. The bits therefore do not depend on the number of
//! stages.
//!
//! Gradients and running means have the shardings of the stored parameters: each device updates its
//! own part.

use std::marker::PhantomData;

use mpmd::Jit;
use mpmd::aval::f64s;
use mpmd::cuda::{Math, Part as Values, Source};
use mpmd::pipeline::{Loss, Pipeline, StepOutput};
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::tree::PrefixTree;

use super::adamw::{self, AdamW, clip_factor, square_sum};
use super::clock::{Clock, Pass};
use super::cuda::{self, Device, KERNELS};
use super::params::Part;
use super::stages::{Float, Tokens};

/// AdamW for all stages of a pipeline: the running means, and the kernels that update the
/// parameters.
pub struct Optimizer<T: Float> {
    stages: Vec<StageOptimizer<T>>,
    clip: Jit<Clip>,
    last: Mesh,
}

struct StageOptimizer<T: Float> {
    mesh: Mesh,
    mean: Vec<MpmdArray>,
    square: Vec<MpmdArray>,
    square_sums: Jit<SquareSums<T>>,
    update: Jit<Update<T>>,
}

/// The figures of a step: scalars of doubles on the last stage's mesh.
#[derive(Clone, Debug, Tree)]
pub struct Clipped<L> {
    /// Factor of the gradients, which are sums over the rows of all microbatches. It averages and
    /// clips them.
    pub factor: L,
    /// Mean loss before the update, in nats per byte.
    pub loss: L,
    /// Norm of the mean gradient, before clipping.
    pub norm: L,
}

impl<T: Float> Optimizer<T> {
    /// Creates the optimiser of the stages `parts` on `meshes`, with its running means at zero.
    /// `places` are the shardings of each stage's stored parameters. If the norm of the mean
    /// gradient is above `limit`, a step scales the gradients down to it.
    ///
    /// # Errors
    ///
    /// If the meshes do not fit the parts.
    ///
    /// # Panics
    ///
    /// If there is no stage.
    pub fn new(
        p: &mut Program,
        parts: &[Part],
        (meshes, places): (&[Mesh], &[Vec<Sharding>]),
        adamw: AdamW,
        limit: f64,
        clock: &Clock,
    ) -> Result<Self> {
        let last = meshes.last().expect("a pipeline has a stage");
        let clip = p.jit(Clip { limit }).on(last).outputs(last.replicated()).build()?;
        let stages = parts.iter().zip(meshes).zip(places).map(|((part, mesh), places)| {
            let mean = part.zeros::<T>(p, places)?;
            let square = part.zeros::<T>(p, places)?;
            StageOptimizer::new(p, part, (mesh, places), adamw, clock, (mean, square))
        });
        let stages = stages.collect::<Result<Vec<_>>>()?;
        Ok(Self { stages, clip, last: last.clone() })
    }

    /// Issues one update of the pipeline's parameters, in place, with the gradients of a step.
    /// Returns at once.
    ///
    /// `number` counts updates from one, and `rate` is the learning rate.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn step(
        &mut self,
        p: &mut Program,
        pipeline: &mut Pipeline<Tokens<MpmdArray>, Loss<MpmdArray>>,
        output: StepOutput,
        number: u64,
        rate: f64,
    ) -> Result<Clipped<MpmdArray>> {
        let StepOutput { loss, gradients, .. } = output;
        let gradients: Vec<Vec<MpmdArray>> = gradients
            .into_iter()
            .map(|stage| stage.into_iter().map(|(_, gradient)| gradient).collect())
            .collect();
        let mut sums = Vec::with_capacity(self.stages.len());
        for (stage, gradients) in self.stages.iter().zip(&gradients) {
            if gradients.is_empty() {
                // A stage without parameters.
                continue;
            }
            let sum = stage.square_sums.call(p, gradients.clone())?;
            sums.push(p.device_put(&sum, self.last.replicated())?);
        }
        let clipped = self.clip.call(p, ClipIn { sums, loss })?;
        for (index, (stage, gradients)) in self.stages.iter_mut().zip(gradients).enumerate() {
            if gradients.is_empty() {
                continue;
            }
            let params = pipeline.params(index).into_iter().map(|(_, param)| param).collect();
            let factor = p.device_put(&clipped.factor, stage.mesh.replicated())?;
            let (mean, square) =
                (std::mem::take(&mut stage.mean), std::mem::take(&mut stage.square));
            let input = UpdateIn {
                state: State { params, mean, square },
                gradients,
                factor,
                number: MpmdArray::scalar(number),
                rate: MpmdArray::scalar(rate),
            };
            let State { params, mean, square } = stage.update.call(p, input)?;
            (stage.mean, stage.square) = (mean, square);
            pipeline.set_params(index, params)?;
        }
        Ok(clipped)
    }

    /// Returns (means of the gradients, means of their squares) of a stage. Both are running means,
    /// in the order of the stage's parameters.
    ///
    /// # Panics
    ///
    /// If there is no such stage.
    pub fn state(&self, stage: usize) -> (&[MpmdArray], &[MpmdArray]) {
        let StageOptimizer { mean, square, .. } = &self.stages[stage];
        (mean, square)
    }

    /// Replaces a stage's running means, as when a checkpoint is loaded.
    ///
    /// # Panics
    ///
    /// If there is no such stage, or the numbers of arrays differ.
    pub fn set_state(&mut self, stage: usize, mean: Vec<MpmdArray>, square: Vec<MpmdArray>) {
        let stage = &mut self.stages[stage];
        assert_eq!(
            (mean.len(), square.len()),
            (stage.mean.len(), stage.square.len()),
            "running means"
        );
        (stage.mean, stage.square) = (mean, square);
    }
}

impl<T: Float> StageOptimizer<T> {
    fn new(
        p: &Program,
        part: &Part,
        (mesh, places): (&Mesh, &[Sharding]),
        adamw: AdamW,
        clock: &Clock,
        (mean, square): (Vec<MpmdArray>, Vec<MpmdArray>),
    ) -> Result<Self> {
        let decays = part.initial().leaves().into_iter().map(|initial| initial.decays()).collect();
        let divided = divided(mesh, places)?;
        let sums =
            SquareSums { leaves: places.len(), divided, clock: clock.clone(), float: PhantomData };
        let update = Update { adamw, decays, clock: clock.clone(), float: PhantomData };
        let places: PrefixTree<Sharding> = PrefixTree::of(&places.to_vec());
        let state = ["params", "mean", "square"].map(|name| (name.to_owned(), places.clone()));
        let square_sums = p.jit(sums).on(mesh).outputs(mesh.replicated()).build()?;
        let update = p.jit(update).on(mesh).outputs(PrefixTree::Node(state.into()));
        let update = update.donate("state").donate("gradients").build()?;
        Ok(Self { mesh: mesh.clone(), mean, square, square_sums, update })
    }
}

/// Returns (axis, indices of the leaves that are divided over it) for each axis with several
/// devices. Axes are in the order of the mesh. Axes that divide no leaf are omitted.
fn divided(mesh: &Mesh, places: &[Sharding]) -> Result<Vec<(String, Vec<usize>)>> {
    let mut divided = Vec::new();
    for axis in mesh.axis_names() {
        let divides = |sharding: &Sharding| {
            sharding
                .spec()
                .is_some_and(|spec| spec.entries().iter().any(|entry| entry.axes().contains(axis)))
        };
        let leaves: Vec<usize> = (0..places.len()).filter(|leaf| divides(&places[*leaf])).collect();
        if mesh.axis_size(axis)? > 1 && !leaves.is_empty() {
            divided.push((axis.clone(), leaves));
        }
    }
    Ok(divided)
}

/// Kernel that computes the sum of each leaf's squares, `[leaves]`, from the gradients of one
/// stage. The result is the same on each device.
struct SquareSums<T> {
    leaves: usize,
    /// (axis, indices of the leaves divided over it). Sums over the devices of the axis complete
    /// these leaves' sums.
    divided: Vec<(String, Vec<usize>)>,
    clock: Clock,
    float: PhantomData<fn() -> T>,
}

impl<T: Float> Kernel for SquareSums<T> {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, gradients: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
        if gradients.len() != self.leaves {
            let found = gradients.len();
            return Err(Error::kernel(format!("{found} gradients of {} parameters", self.leaves)));
        }
        let signature = Signature::new(f64s([gradients.len()]));
        let divided = self.divided.iter();
        Ok(divided.fold(signature, |signature, (axis, leaves)| {
            signature.all_reduce(axis, f64s([leaves.len()]))
        }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        gradients: Vec<View<'_>>,
        mut sums: ViewMut<'_>,
    ) -> Result<()> {
        let _timer = self.clock.start(Pass::Update);
        if let Some(device) = device::<T>(cx)? {
            return self.run_on(cx, device, &gradients, sums);
        }
        let sums = sums.as_mut_slice::<f64>()?;
        for (sum, gradient) in sums.iter_mut().zip(&gradients) {
            *sum = square_sum(gradient.as_slice::<T>()?);
        }
        for (axis, leaves) in &self.divided {
            let mut shards: Vec<f64> = leaves.iter().map(|leaf| sums[*leaf]).collect();
            let _timer = self.clock.start(Pass::AllReduce);
            cx.all_reduce(axis, &mut shards)?;
            leaves.iter().zip(shards).for_each(|(leaf, sum)| sums[*leaf] = sum);
        }
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        let leaves = self.divided.iter().flat_map(|(axis, leaves)| {
            let axis = axis.bytes().map(u64::from).chain([leaves.len() as u64]);
            axis.chain(leaves.iter().map(|leaf| *leaf as u64))
        });
        leaves.collect()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&KERNELS]
    }
}

impl<T: Float> SquareSums<T> {
    /// Issues the work of `run` on a CUDA device. Blocks only in all-reduces with the other devices
    /// of the stage.
    fn run_on(
        &self,
        cx: &mut Context<'_>,
        device: Device<'_>,
        gradients: &[View<'_>],
        mut sums: ViewMut<'_>,
    ) -> Result<()> {
        let sums = Values::from(&mut sums);
        for (leaf, gradient) in gradients.iter().enumerate() {
            let elements = gradient.region().elements();
            cuda::sums::square_sum(device, sums.at(leaf), gradient.into(), elements)?;
        }
        for (axis, leaves) in &self.divided {
            let shards = device.doubles(leaves.len())?;
            cuda::sums::pick_sums(device, (&shards).into(), sums, leaves, false)?;
            let timer = self.clock.start(Pass::AllReduce);
            cx.all_reduce_on_cuda(axis, &shards)?;
            drop(timer);
            cuda::sums::pick_sums(device, (&shards).into(), sums, leaves, true)?;
        }
        Ok(())
    }
}

#[derive(Tree)]
struct ClipIn<L> {
    /// For each stage with parameters, an array of the sums of each leaf's squares.
    sums: Vec<L>,
    loss: Loss<L>,
}

/// Kernel that computes the factor of the gradients, the loss and the norm from the sums of squares
/// and the loss.
struct Clip {
    limit: f64,
}

impl Kernel for Clip {
    type In = ClipIn<MpmdArray>;
    type Out = Clipped<MpmdArray>;

    fn infer(&self, _: &ClipIn<ShapedArray>) -> Result<Signature<Clipped<ShapedArray>>> {
        Ok(Signature::new(Clipped { factor: f64s([]), loss: f64s([]), norm: f64s([]) }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: ClipIn<View<'_>>,
        mut y: Clipped<ViewMut<'_>>,
    ) -> Result<()> {
        if let Some(device) = device::<f32>(cx)? {
            let sums: Vec<(Values<'_>, usize)> =
                x.sums.iter().map(|sums| (sums.into(), sums.region().elements())).collect();
            let loss = (Values::from(&x.loss.sum), Values::from(&x.loss.weight));
            let y =
                (Values::from(&mut y.factor), Values::from(&mut y.loss), Values::from(&mut y.norm));
            return cuda::adamw::clip(device, self.limit, y, &sums, loss);
        }
        let (sum, weight) = (x.loss.sum.scalar::<f64>()?, x.loss.weight.scalar::<f64>()?);
        let mut sums = Vec::new();
        for stage in &x.sums {
            sums.extend_from_slice(stage.as_slice::<f64>()?);
        }
        // The sums are of gradients that are not yet divided by the weight.
        let (factor, norm) = clip_factor(sums, self.limit * weight);
        y.factor.fill(factor / weight)?;
        y.loss.fill(sum / weight)?;
        y.norm.fill(norm / weight)?;
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.limit.to_bits()]
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&KERNELS]
    }
}

/// The arrays that an update changes in place: a stage's parameters and their running means.
#[derive(Tree)]
struct State<L> {
    params: Vec<L>,
    mean: Vec<L>,
    square: Vec<L>,
}

#[derive(Tree)]
struct UpdateIn<L> {
    state: State<L>,
    gradients: Vec<L>,
    /// Factor of the gradients: an `f64`.
    factor: L,
    /// Number of the update, counted from one: a `u64`.
    number: L,
    /// The learning rate: an `f64`.
    rate: L,
}

/// Kernel that updates a stage's parameters and running means in place.
struct Update<T> {
    adamw: AdamW,
    decays: Vec<bool>,
    clock: Clock,
    float: PhantomData<fn() -> T>,
}

impl<T: Float> Kernel for Update<T> {
    type In = UpdateIn<MpmdArray>;
    type Out = State<MpmdArray>;

    fn infer(&self, x: &UpdateIn<ShapedArray>) -> Result<Signature<State<ShapedArray>>> {
        let UpdateIn { state, gradients, .. } = x;
        let State { params, mean, square } = state;
        if mean != params
            || square != params
            || gradients != params
            || params.len() != self.decays.len()
        {
            return Err(Error::kernel("parameters, gradients and running means differ in shape"));
        }
        let copy = || params.clone();
        let signature = Signature::new(State { params: copy(), mean: copy(), square: copy() });
        let paths = state.structure().paths();
        Ok(paths
            .into_iter()
            .fold(signature, |signature, path| signature.alias(format!("state/{path}"), path)))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: UpdateIn<View<'_>>,
        mut y: State<ViewMut<'_>>,
    ) -> Result<()> {
        let _timer = self.clock.start(Pass::Update);
        let device = device::<T>(cx)?;
        let (number, rate) = (x.number.scalar::<u64>()?, x.rate.scalar::<f64>()?);
        let state = y.params.iter_mut().zip(&mut y.mean).zip(&mut y.square);
        for (((w, mean), square), (gradient, decays)) in
            state.zip(x.gradients.iter().zip(&self.decays))
        {
            let decay = if *decays { self.adamw.decay } else { 0.0 };
            let adamw = AdamW { decay, ..self.adamw };
            if let Some(device) = device {
                let elements = gradient.region().elements();
                let leaf = cuda::adamw::Leaf {
                    w: w.into(),
                    mean: mean.into(),
                    square: square.into(),
                    gradient: gradient.into(),
                    elements,
                };
                cuda::adamw::update(device, adamw, (number, rate), (&x.factor).into(), leaf)?;
                continue;
            }
            let step = adamw::AdamStep { number, rate, gradient_factor: x.factor.scalar::<f64>()? };
            let (w, gradient) = (w.as_mut_slice::<T>()?, gradient.as_slice::<T>()?);
            adamw.update(step, w, mean.as_mut_slice()?, square.as_mut_slice()?, gradient);
        }
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        let AdamW { beta1, beta2, epsilon, decay } = self.adamw;
        let mut words = [beta1, beta2, epsilon, decay].map(f64::to_bits).to_vec();
        words.extend(self.decays.iter().map(|decays| u64::from(*decays)));
        words
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&KERNELS]
    }
}

/// Returns the device on which a kernel runs, or `None` if it is not a CUDA device. These kernels
/// use no matrix products.
///
/// # Errors
///
/// If it is a CUDA device and the model's float type is not `f32`.
fn device<'c, T: Float>(cx: &mut Context<'c>) -> Result<Option<Device<'c>>> {
    cuda::device::<T>(cx, Math::F32)
}
