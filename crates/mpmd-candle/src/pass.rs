//! The pass of a stage that runs on this thread. Layers reach it without an argument, since the
//! signatures of candle's layers and custom operations have no place for one.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ptr::NonNull;

use candle_core::{Device, Result, Tensor, TensorId, bail};
use mpmd_layout::random::Key;

use crate::cuda::{DeviceGradient, OnCuda};
use crate::exchange::Exchange;

/// The state of a running pass that layers use.
#[derive(Default)]
pub(crate) struct PassState<'a> {
    /// The random key of the microbatch at this stage.
    pub(crate) key: Option<Key>,
    /// The number of keys that layers have drawn so far.
    pub(crate) draws: u64,
    /// The gradient of each trainable parameter, by the id of its `Var`.
    pub(crate) gradients: HashMap<TensorId, Gradient<'a>>,
    /// Weight gradients that are deferred to the weight pass; `None` if they are computed at once.
    pub(crate) deferred: Option<Vec<Deferred>>,
    /// Bytes that custom operations save for the backward pass, in addition to the graph's tensors.
    pub(crate) kept_bytes: u64,
    /// Head dimensions of the attentions in the pass.
    pub(crate) heads: BTreeSet<usize>,
    /// The collectives of the device; `None` outside of a stage.
    pub(crate) exchange: Option<&'a mut dyn Exchange>,
    /// The CUDA device; `None` for a pass on the host.
    pub(crate) cuda: Option<&'a OnCuda<'a>>,
}

/// Memory to which layers add a parameter's gradient, row-major.
pub(crate) enum Gradient<'a> {
    Host(&'a mut [f32]),
    Cuda(DeviceGradient<'a>),
}

/// A weight gradient that is deferred to the weight pass.
pub(crate) struct Deferred {
    pub(crate) weight: TensorId,
    pub(crate) add: AddGradient,
}

/// A closure that adds the gradient of one use of a weight to the weight's gradient.
pub(crate) type AddGradient = Box<dyn FnOnce(&mut Gradient<'_>) -> Result<()> + Send>;

thread_local! {
    static PASS: Cell<Option<NonNull<PassState<'static>>>> = const { Cell::new(None) };
}

/// Runs `f` with `pass` as this thread's current pass.
pub(crate) fn enter<R>(pass: &mut PassState<'_>, f: impl FnOnce() -> R) -> R {
    struct RestorePass(Option<NonNull<PassState<'static>>>);
    impl Drop for RestorePass {
        fn drop(&mut self) {
            PASS.set(self.0);
        }
    }
    let _restore = RestorePass(PASS.replace(Some(NonNull::from(pass).cast())));
    f()
}

/// Calls `f` with this thread's current pass, or with `None` outside of a pass.
fn with<R>(f: impl FnOnce(Option<&mut PassState<'_>>) -> R) -> R {
    /// Restores the pointer when `f` returns or panics.
    struct PutBack(Option<NonNull<PassState<'static>>>);
    impl Drop for PutBack {
        fn drop(&mut self) {
            PASS.set(self.0);
        }
    }

    let taken = PutBack(PASS.take());
    // SAFETY: `enter` made the pointer from an exclusive reference that it holds until it has
    // restored the cell, and this thread is still inside it. The cell is empty while `f` runs, so
    // no second reference is made. `f` accepts any lifetime, so the reference does not escape.
    f(taken.0.map(|mut pass| unsafe { pass.as_mut() }))
}

/// Adds the gradient of one use of `weight` to the weight's gradient, or defers that to the weight
/// pass. Returns the gradient if no pass collects it, else `None`. Returns `None` too if `weight`
/// needs no gradient.
///
/// `add` adds the gradient to a row-major slice of the weight's elements.
///
/// # Errors
///
/// Returns the error of `add`.
pub(crate) fn weight_gradient(
    weight: &Tensor,
    add: impl FnOnce(&mut [f32]) -> Result<()> + Send + 'static,
) -> Result<Option<Tensor>> {
    let Some(add) = give(weight, move |into| match into {
        Gradient::Host(into) => add(into),
        Gradient::Cuda(_) => bail!("a layer on the CPU in a pass on a CUDA device"),
    })?
    else {
        return Ok(None);
    };

    let mut gradient = vec![0.0f32; weight.elem_count()];
    add(&mut Gradient::Host(&mut gradient))?;
    Tensor::from_vec(gradient, weight.shape(), &Device::Cpu)?
        .to_dtype(weight.dtype())
        .map(Some)
}

/// Does the same as [`weight_gradient`] for a weight on a CUDA device.
///
/// # Errors
///
/// Returns the error of `add`.
#[cfg(feature = "cuda")]
pub(crate) fn device_gradient(
    weight: &Tensor,
    add: impl FnOnce(&mut DeviceGradient<'_>) -> Result<()> + Send + 'static,
) -> Result<Option<Tensor>> {
    let Some(add) = give(weight, move |into| match into {
        Gradient::Host(_) => bail!("a layer on a CUDA device in a pass on the CPU"),
        Gradient::Cuda(into) => add(into),
    })?
    else {
        return Ok(None);
    };

    with(|pass| {
        let on = pass.and_then(|pass| pass.cuda);
        let mut into = Gradient::Cuda(DeviceGradient::Tensor(on, None, weight.shape().clone()));
        add(&mut into)?;

        match into {
            Gradient::Cuda(DeviceGradient::Tensor(_, Some(sum), _)) => {
                sum.to_dtype(weight.dtype()).map(Some)
            }
            _ => weight.zeros_like().map(Some),
        }
    })
}

/// Passes `add` to the current pass, which calls it at once or in the weight pass. Returns `add` if
/// no pass collects the gradient of `weight`. Returns `None` if a pass does, or if `weight` needs
/// no gradient.
fn give<F>(weight: &Tensor, add: F) -> Result<Option<F>>
where
    F: FnOnce(&mut Gradient<'_>) -> Result<()> + Send + 'static,
{
    if !weight.track_op() {
        return Ok(None);
    }
    with(|pass| {
        let Some(pass) = pass else {
            return Ok(Some(add));
        };

        let id = weight.id();
        if let Some(deferred) = &mut pass.deferred
            && pass.gradients.contains_key(&id)
        {
            deferred.push(Deferred {
                weight: id,
                add: Box::new(add),
            });
            return Ok(None);
        }

        match pass.gradients.get_mut(&id) {
            None => Ok(Some(add)),
            Some(gradient) => add(gradient).map(|()| None),
        }
    })
}

/// Returns the random key of the next call of a layer. The calls of a pass are counted, so a second
/// run of the same pass draws the same keys.
///
/// # Errors
///
/// If called outside of a stage, or if the microbatch has no key.
pub(crate) fn random_key() -> Result<Key> {
    with(|pass| match pass {
        None => bail!("random numbers need a key: call this layer inside a stage"),
        Some(PassState { key: None, .. }) => {
            bail!("the microbatch has no random key: set it with `Microbatch::key`")
        }
        Some(PassState {
            key: Some(key),
            draws,
            ..
        }) => {
            *draws += 1;
            Ok(key.fold_in(*draws))
        }
    })
}

/// Records that a custom operation saves `bytes` bytes for the backward pass, in addition to the
/// graph's tensors.
pub(crate) fn keeps(bytes: u64) {
    with(|pass| {
        if let Some(pass) = pass {
            pass.kept_bytes += bytes;
        }
    });
}

/// Records the head dimension `dim` of an attention.
pub(crate) fn attends(dim: usize) {
    with(|pass| {
        if let Some(pass) = pass {
            pass.heads.insert(dim);
        }
    });
}

/// Calls `f` with the collectives of the current pass. Returns `None` if there are none.
pub(crate) fn with_exchange<R>(f: impl FnOnce(&mut dyn Exchange) -> R) -> Option<R> {
    with(|pass| match pass {
        Some(PassState {
            exchange: Some(exchange),
            ..
        }) => Some(f(&mut **exchange)),
        _ => None,
    })
}

/// Calls `f` with the CUDA device of the current pass. Returns `None` outside of a pass on a CUDA
/// device.
#[cfg(feature = "cuda")]
pub(crate) fn with_cuda<R>(f: impl FnOnce(&OnCuda<'_>) -> R) -> Option<R> {
    with(|pass| pass.and_then(|pass| pass.cuda).map(f))
}

/// Calls `f` with the CUDA device and the collectives of the current pass. Returns `None` if the
/// pass lacks either.
#[cfg(feature = "cuda")]
pub(crate) fn with_cuda_exchange<R>(
    f: impl FnOnce(&OnCuda<'_>, &mut dyn Exchange) -> R,
) -> Option<R> {
    with(|pass| match pass {
        Some(PassState {
            cuda: Some(cuda),
            exchange: Some(exchange),
            ..
        }) => Some(f(cuda, &mut **exchange)),
        _ => None,
    })
}
