//! A kernel's declaration: its outputs, aliases and collectives, known before it runs.

use std::fmt;

use mpmd_device::collective::{CollectiveKind, Reduce};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::topology::{Mesh, MeshError};

/// A kernel's outputs, aliases and collectives.
///
/// Declare collectives in the order in which every device calls them. A declaration names a mesh
/// axis and the maximum number of elements per device. A call may use fewer, but the same number on
/// all devices of a group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Signature<O> {
    pub(crate) outputs: O,
    pub(crate) aliases: Vec<(String, String)>,
    pub(crate) collectives: Vec<Collective>,
    /// Path of each output object with declared memory, and its bytes on each device.
    pub(crate) object_bytes: Vec<(String, u64)>,
}

/// A collective that a kernel declares.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Collective {
    pub(crate) kind: CollectiveKind,
    pub(crate) axis: String,
    /// The maximum shape of the values that each device passes.
    pub(crate) aval: ShapedArray,
}

impl<O> Signature<O> {
    /// Creates a signature with `outputs`, a tree of global shapes, and without collectives.
    pub fn new(outputs: O) -> Self {
        Self {
            outputs,
            aliases: Vec::new(),
            collectives: Vec::new(),
            object_bytes: Vec::new(),
        }
    }

    /// Returns the same signature with other outputs, computed from these.
    pub(crate) fn with_outputs<P>(self, outputs: impl FnOnce(O) -> P) -> Signature<P> {
        Signature {
            outputs: outputs(self.outputs),
            aliases: self.aliases,
            collectives: self.collectives,
            object_bytes: self.object_bytes,
        }
    }

    /// Updates an input in place: the output leaf at path `output` starts with the values of the
    /// input leaf at path `input`. A tree of one leaf has the path `""`.
    ///
    /// Both must have the same shape and dtype. The kernel finds the values in the output's view;
    /// the input's own view has none. If the input is donated and not used elsewhere, the output
    /// takes over its memory. Otherwise the values are copied first.
    #[must_use]
    pub fn alias(mut self, input: impl Into<String>, output: impl Into<String>) -> Self {
        self.aliases.push((input.into(), output.into()));
        self
    }

    /// Declares that the new object at path `output` takes `bytes` bytes on each device. The bytes
    /// count against the device's memory limit, and in estimates of memory, until the object is
    /// dropped.
    #[must_use]
    pub fn object_bytes(mut self, output: impl Into<String>, bytes: u64) -> Self {
        self.object_bytes.push((output.into(), bytes));
        self
    }

    /// Declares the kernel's next collective as [`Context::all_reduce`](super::Context::all_reduce)
    /// over mesh axis `axis`. Each device passes at most as many elements as `aval` has.
    #[must_use]
    pub fn all_reduce(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.all_reduce_with(axis, aval, Reduce::Sum)
    }

    /// Declares an [`all_reduce`](Self::all_reduce) with another reduction. A kernel call with a
    /// dtype [without that reduction](Reduce::is_defined_for) is refused.
    #[must_use]
    pub fn all_reduce_with(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        reduce: Reduce,
    ) -> Self {
        self.collective(CollectiveKind::AllReduce(reduce), axis, aval)
    }

    /// Declares the kernel's next collective as [`Context::all_gather`](super::Context::all_gather)
    /// over mesh axis `axis`. Each device's part has at most as many elements as `aval`.
    #[must_use]
    pub fn all_gather(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.collective(CollectiveKind::AllGather, axis, aval)
    }

    /// Declares the kernel's next collective as
    /// [`Context::reduce_scatter`](super::Context::reduce_scatter) over mesh axis `axis`. Each
    /// device passes at most as many elements as `aval` has.
    #[must_use]
    pub fn reduce_scatter(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.reduce_scatter_with(axis, aval, Reduce::Sum)
    }

    /// Declares a [`reduce_scatter`](Self::reduce_scatter) with another reduction. A kernel call
    /// with a dtype [without that reduction](Reduce::is_defined_for) is refused.
    #[must_use]
    pub fn reduce_scatter_with(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        reduce: Reduce,
    ) -> Self {
        self.collective(CollectiveKind::ReduceScatter(reduce), axis, aval)
    }

    /// Declares the kernel's next collective as [`Context::all_to_all`](super::Context::all_to_all)
    /// over mesh axis `axis`. Each device passes, for all receivers together, at most as many
    /// elements as `aval` has.
    #[must_use]
    pub fn all_to_all(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.collective(CollectiveKind::AllToAll, axis, aval)
    }

    /// Declares the kernel's next collective as [`Context::permute`](super::Context::permute) over
    /// mesh axis `axis`. The values move by pairs `(from, to)` of indices along the axis. Each
    /// device passes at most as many elements as `aval` has.
    ///
    /// A kernel call is refused if an index is beyond the axis, or if a device is in two pairs as
    /// sender or in two as receiver.
    #[must_use]
    pub fn permute(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        pairs: impl IntoIterator<Item = (usize, usize)>,
    ) -> Self {
        self.collective(
            CollectiveKind::Permute(pairs.into_iter().collect()),
            axis,
            aval,
        )
    }

    /// Returns the declared outputs.
    pub fn outputs(&self) -> &O {
        &self.outputs
    }

    fn collective(
        mut self,
        kind: CollectiveKind,
        axis: impl Into<String>,
        aval: ShapedArray,
    ) -> Self {
        self.collectives.push(Collective {
            kind,
            axis: axis.into(),
            aval,
        });
        self
    }
}

/// The reason why a declared collective is invalid.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum CollectiveError {
    /// The array is an object.
    #[error("objects do not leave their devices")]
    Object,
    /// The mesh has no such axis.
    #[error(transparent)]
    Axis(#[from] MeshError),
    /// A permutation has an index that is not below the axis's size.
    #[error("axis {axis:?} has only {size} devices")]
    BeyondAxis { axis: String, size: usize },
    /// The dtype has no such reduction.
    #[error("{dtype} has no {reduce}")]
    NoReduction { dtype: DType, reduce: Reduce },
    /// A device is the source of two pairs of a permutation.
    #[error("device {index} of the axis gives twice")]
    GivesTwice { index: usize },
    /// A device is the target of two pairs of a permutation.
    #[error("device {index} of the axis gets twice")]
    GetsTwice { index: usize },
}

impl Collective {
    /// Checks the declaration against a mesh.
    pub(crate) fn check(&self, mesh: &Mesh) -> Result<(), CollectiveError> {
        if self.aval.is_object() {
            return Err(CollectiveError::Object);
        }

        let size = mesh.axis_size(&self.axis)?;

        let on_axis = |index: usize| {
            if index < size {
                Ok(())
            } else {
                Err(CollectiveError::BeyondAxis {
                    axis: self.axis.clone(),
                    size,
                })
            }
        };

        match &self.kind {
            CollectiveKind::AllReduce(reduce) | CollectiveKind::ReduceScatter(reduce) => {
                let dtype = self.aval.dtype();
                if reduce.is_defined_for(dtype) {
                    Ok(())
                } else {
                    Err(CollectiveError::NoReduction {
                        dtype,
                        reduce: *reduce,
                    })
                }
            }
            CollectiveKind::AllGather | CollectiveKind::AllToAll => Ok(()),
            CollectiveKind::Permute(pairs) => {
                let mut gives = vec![false; size];
                let mut gets = vec![false; size];
                for (from, to) in pairs {
                    on_axis(*from)?;
                    on_axis(*to)?;
                    if std::mem::replace(&mut gives[*from], true) {
                        return Err(CollectiveError::GivesTwice { index: *from });
                    }
                    if std::mem::replace(&mut gets[*to], true) {
                        return Err(CollectiveError::GetsTwice { index: *to });
                    }
                }
                Ok(())
            }
        }
    }
}

/// Writes the complete declaration. Processes compare this text.
impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.verb())?;
        match &self.kind {
            CollectiveKind::AllReduce(Reduce::Sum) | CollectiveKind::ReduceScatter(Reduce::Sum) => {
            }
            CollectiveKind::AllReduce(reduce) | CollectiveKind::ReduceScatter(reduce) => {
                write!(f, " ({reduce})")?;
            }
            CollectiveKind::AllGather | CollectiveKind::AllToAll => {}
            CollectiveKind::Permute(pairs) => write!(f, " by {pairs:?}")?,
        }
        write!(f, " of {} over {:?}", self.aval, self.axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::aval::f32s;
    use mpmd_layout::topology::DeviceId;

    #[test]
    fn invalid_declarations_are_refused_with_a_reason() {
        let mesh = Mesh::new(&[("x", 3)], (0..3).map(DeviceId).collect()).unwrap();
        let check = |signature: Signature<()>| signature.collectives[0].check(&mesh);
        let new = || Signature::new(());
        let v = || f32s([4]);
        for fine in [
            new().all_reduce("x", v()),
            new().all_reduce_with("x", ShapedArray::new(&[1], DType::U8), Reduce::Max),
            new().reduce_scatter("x", ShapedArray::new(&[1], DType::C64)),
            new().all_gather("x", ShapedArray::new(&[1], DType::Bool)),
            new().all_to_all("x", v()),
            new().permute("x", v(), []),
            new().permute("x", v(), [(0, 0), (1, 2)]),
        ] {
            assert_eq!(check(fine.clone()), Ok(()), "{}", fine.collectives[0]);
        }
        for (wrong, expected) in [
            (new().all_gather("y", v()), "there is no axis `y`"),
            (
                new().all_reduce("x", ShapedArray::new(&[1], DType::Bool)),
                "bool has no sum",
            ),
            (
                new().reduce_scatter_with("x", ShapedArray::new(&[1], DType::C64), Reduce::Min),
                "c64 has no min",
            ),
            (
                new().permute("x", v(), [(0, 3)]),
                "axis \"x\" has only 3 devices",
            ),
            (
                new().permute("x", v(), [(0, 1), (0, 2)]),
                "device 0 of the axis gives twice",
            ),
            (
                new().permute("x", v(), [(0, 1), (2, 1)]),
                "device 1 of the axis gets twice",
            ),
        ] {
            let why = check(wrong).unwrap_err().to_string();
            assert!(why.contains(expected), "{why}\n  lacks {expected}");
        }
    }

    #[test]
    fn declaration_text_is_complete() {
        let all = Signature::new(())
            .all_reduce("x", f32s([2, 3]))
            .all_reduce_with("x", f32s([2]), Reduce::Max)
            .reduce_scatter("y", f32s([2]))
            .permute("x", f32s([2]), [(0, 1)]);
        let texts: Vec<String> = all.collectives.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "all_reduce of f32[2,3] over \"x\"",
                "all_reduce (max) of f32[2] over \"x\"",
                "reduce_scatter of f32[2] over \"y\"",
                "permute by [(0, 1)] of f32[2] over \"x\"",
            ]
        );
    }
}
