//! The working form of a stage's parameters: an object that
//! [`Stage::prepare`](super::Stage::prepare) makes, and updates when the parameters have changed.

use std::sync::Arc;

use super::context::WorkingForm;
use super::erased::ErasedStage;
use super::erased_tree::ErasedTree;
use super::kernels::{PassKernel, StagePass};
use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Shapes, Signature, Views, ViewsMut};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::topology::Mesh;

/// The kernel that makes or updates the working form: (parameters, optional working form) ->
/// optional working form. With a working form as input, it updates that in place and has no output.
struct PrepareKernel {
    stage: Arc<dyn ErasedStage>,
    bytes: u64,
}

/// The state of the working form, which `Stage::prepare` makes of a stage's parameters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Freshness {
    /// The working form does not exist yet.
    Missing,
    /// The parameters have changed since the working form was made or updated.
    Stale,
    /// The working form is up to date, or the stage has none.
    Fresh,
}

/// The runner's handle to the working form of a stage's parameters, with its kernel and state.
pub(super) struct PreparedParams {
    /// The declared bytes of the working form on each device; `None` if the stage has no working
    /// form.
    bytes: Option<u64>,
    jit: Option<Jit<PassKernel<PrepareKernel>>>,
    object: Option<MpmdArray>,
    stale: bool,
}

impl StagePass for PrepareKernel {
    type In = (ErasedTree, Option<MpmdArray>);
    type Out = Option<MpmdArray>;

    fn stage(&self) -> &dyn ErasedStage {
        &*self.stage
    }

    fn signature(&self, (_, form): &Shapes<Self::In>) -> Result<Signature<Option<ShapedArray>>> {
        Ok(match form {
            Some(_) => Signature::new(None),
            None => Signature::new(Some(ShapedArray::object())).object_bytes("", self.bytes),
        })
    }

    fn words(&self) -> Vec<u64> {
        vec![u64::from(b'P'), self.bytes]
    }

    fn pass(
        &self,
        cx: &mut Context<'_>,
        (params, form): Views<'_, Self::In>,
        made: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let mut new = WorkingForm(None);
        let mut known = form.map(|form| form.object::<WorkingForm>()).transpose()?;
        let form = known.as_deref_mut().unwrap_or(&mut new);
        self.stage.prepare(cx, params, &mut form.0)?;
        if form.0.is_none() {
            let stage = self.stage.name();
            return Err(Error::kernel(format!(
                "`prepare` of stage {stage} has made nothing: set `prepared`, or return `None` \
                 from `prepared_bytes`"
            )));
        }

        if let Some(mut made) = made {
            made.put_object(new)?;
        }
        Ok(())
    }
}

impl PreparedParams {
    /// Creates a handle to a working form, not made yet, of `bytes` bytes on each device.
    pub(super) fn new(bytes: Option<u64>) -> Self {
        Self {
            bytes,
            jit: None,
            object: None,
            stale: true,
        }
    }

    /// Returns a second handle to the same working form, for the same stage in another pipeline.
    pub(super) fn shared(&self) -> Self {
        Self {
            bytes: self.bytes,
            jit: None,
            object: self.object.clone(),
            stale: self.stale,
        }
    }

    pub(super) fn object(&self) -> Option<&MpmdArray> {
        self.object.as_ref()
    }

    pub(super) fn freshness(&self) -> Freshness {
        match (self.bytes, &self.object) {
            (None, _) => Freshness::Fresh,
            (_, None) => Freshness::Missing,
            (_, Some(_)) if self.stale => Freshness::Stale,
            (_, Some(_)) => Freshness::Fresh,
        }
    }

    /// Sets whether the parameters have changed since the last call of [`PreparedParams::update`].
    pub(super) fn set_stale(&mut self, stale: bool) {
        self.stale = stale;
    }

    /// Drops the working form. The next [`PreparedParams::update`] makes a new one.
    pub(super) fn forget(&mut self) {
        self.object = None;
    }

    /// Issues the operation that makes or updates the working form from `params`, in the compute
    /// shardings. Does nothing if the stage has no working form.
    pub(super) fn update(
        &mut self,
        program: &mut Program,
        stage: &Arc<dyn ErasedStage>,
        mesh: &Mesh,
        params: ErasedTree,
    ) -> Result<()> {
        let Some(bytes) = self.bytes else {
            return Ok(());
        };

        let jit = match &self.jit {
            Some(jit) => jit,
            None => {
                let kernel = PrepareKernel {
                    stage: stage.clone(),
                    bytes,
                };
                let jit = program
                    .jit(PassKernel(kernel))
                    .on(mesh)
                    .outputs(mesh.replicated())
                    .build()?;
                self.jit.insert(jit)
            }
        };

        if let Some(made) = jit.call(program, (params, self.object.clone()))? {
            self.object = Some(made);
        }
        self.stale = false;
        Ok(())
    }
}
