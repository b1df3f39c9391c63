//! What a kernel declares before it runs.

use std::fmt;

use crate::device::collective::{CollectiveKind, Reduce};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::topology::Mesh;

/// A kernel's outputs, and what else the framework must know before it runs.
///
/// Collectives are declared in the order in which every device calls them. A declaration names a
/// mesh axis and bounds the elements that each device gives: a call may be of fewer, as long as all
/// devices of a group call with as many.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Signature<O> {
    pub(crate) outputs: O,
    pub(crate) aliases: Vec<(String, String)>,
    pub(crate) collectives: Vec<Collective>,
}

/// A collective operation that a kernel declares, in the order of its calls.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Collective {
    pub(crate) kind: CollectiveKind,
    pub(crate) axis: String,
    /// What each device gives at most.
    pub(crate) aval: ShapedArray,
}

impl<O> Signature<O> {
    /// A kernel that makes `outputs`, a tree of global shapes, and communicates nothing.
    pub fn new(outputs: O) -> Self {
        Self { outputs, aliases: Vec::new(), collectives: Vec::new() }
    }

    /// The output leaf at path `output` is the input leaf at path `input`, updated in place.
    ///
    /// Both must have one shape and dtype. The kernel finds the input's values in the output's
    /// view, and the input's own view is empty. Where the input is donated and nobody else holds
    /// its memory the output takes that memory over; otherwise the values are copied first. A tree
    /// of one leaf has the path `""`.
    #[must_use]
    pub fn alias(mut self, input: impl Into<String>, output: impl Into<String>) -> Self {
        self.aliases.push((input.into(), output.into()));
        self
    }

    /// The kernel's next call to a collective is
    /// [`Context::all_reduce`](super::Context::all_reduce) over mesh axis `axis`, summing at most
    /// as many elements per device as `aval` has.
    #[must_use]
    pub fn all_reduce(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.all_reduce_with(axis, aval, Reduce::Sum)
    }

    /// As [`all_reduce`](Self::all_reduce), with this reduction. The call of the kernel with a
    /// dtype [without it](Reduce::is_defined_for) is refused.
    #[must_use]
    pub fn all_reduce_with(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        reduce: Reduce,
    ) -> Self {
        self.collective(CollectiveKind::AllReduce(reduce), axis, aval)
    }

    /// The kernel's next call to a collective is
    /// [`Context::all_gather`](super::Context::all_gather) over mesh axis `axis`; each device's
    /// part has at most as many elements as `aval`.
    #[must_use]
    pub fn all_gather(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.collective(CollectiveKind::AllGather, axis, aval)
    }

    /// The kernel's next call to a collective is
    /// [`Context::reduce_scatter`](super::Context::reduce_scatter) over mesh axis `axis`, summing
    /// at most as many elements per device as `aval` has.
    #[must_use]
    pub fn reduce_scatter(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.reduce_scatter_with(axis, aval, Reduce::Sum)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with this reduction. The call of the kernel
    /// with a dtype [without it](Reduce::is_defined_for) is refused.
    #[must_use]
    pub fn reduce_scatter_with(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        reduce: Reduce,
    ) -> Self {
        self.collective(CollectiveKind::ReduceScatter(reduce), axis, aval)
    }

    /// The kernel's next call to a collective is
    /// [`Context::all_to_all`](super::Context::all_to_all) over mesh axis `axis`; each device gives
    /// at most as many elements, to all together, as `aval` has.
    #[must_use]
    pub fn all_to_all(self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.collective(CollectiveKind::AllToAll, axis, aval)
    }

    /// The kernel's next call to a collective is [`Context::permute`](super::Context::permute) over
    /// mesh axis `axis` of at most as many elements per device as `aval` has, by pairs `(from, to)`
    /// of indices along the axis.
    ///
    /// The call of the kernel is refused where an index is not on the axis, or where a device gives
    /// or gets twice.
    #[must_use]
    pub fn permute(
        self,
        axis: impl Into<String>,
        aval: ShapedArray,
        pairs: impl IntoIterator<Item = (usize, usize)>,
    ) -> Self {
        self.collective(CollectiveKind::Permute(pairs.into_iter().collect()), axis, aval)
    }

    /// The kernel's next call to a collective is [`Context::broadcast`](super::Context::broadcast)
    /// over mesh axis `axis` of at most as many elements as `aval` has, from the device with index
    /// `root` along it.
    ///
    /// The call of the kernel is refused where that index is not on the axis.
    #[must_use]
    pub fn broadcast(self, axis: impl Into<String>, root: usize, aval: ShapedArray) -> Self {
        self.collective(CollectiveKind::Broadcast(root), axis, aval)
    }

    /// The declared outputs.
    pub fn outputs(&self) -> &O {
        &self.outputs
    }

    fn collective(
        mut self,
        kind: CollectiveKind,
        axis: impl Into<String>,
        aval: ShapedArray,
    ) -> Self {
        self.collectives.push(Collective { kind, axis: axis.into(), aval });
        self
    }
}

impl Collective {
    /// Why it cannot be on this mesh, if it cannot.
    pub(crate) fn check(&self, mesh: &Mesh) -> Result<(), String> {
        let size = mesh.axis_size(&self.axis).map_err(|error| error.to_string())?;
        let on_axis = |index: usize| {
            if index < size {
                Ok(())
            } else {
                Err(format!("axis {:?} has only {size} devices", self.axis))
            }
        };
        match &self.kind {
            CollectiveKind::AllReduce(reduce) | CollectiveKind::ReduceScatter(reduce) => {
                let dtype = self.aval.dtype();
                if reduce.is_defined_for(dtype) {
                    Ok(())
                } else {
                    Err(format!("{dtype} has no {reduce}"))
                }
            }
            CollectiveKind::AllGather | CollectiveKind::AllToAll => Ok(()),
            CollectiveKind::Broadcast(root) => on_axis(*root),
            CollectiveKind::Permute(pairs) => {
                let (mut gives, mut gets) = (vec![false; size], vec![false; size]);
                for (from, to) in pairs {
                    on_axis(*from)?;
                    on_axis(*to)?;
                    if std::mem::replace(&mut gives[*from], true) {
                        return Err(format!("device {from} of the axis gives twice"));
                    }
                    if std::mem::replace(&mut gets[*to], true) {
                        return Err(format!("device {to} of the axis gets twice"));
                    }
                }
                Ok(())
            }
        }
    }
}

impl CollectiveKind {
    /// The name of its call.
    pub(crate) fn verb(&self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Permute(_) => "permute",
            Self::Broadcast(_) => "broadcast",
        }
    }
}

/// Everything that processes must agree on: this text is part of what they compare.
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
            CollectiveKind::Broadcast(root) => write!(f, " from {root}")?,
        }
        write!(f, " of {} over {:?}", self.aval, self.axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::aval::{DType, f32s};
    use mpmd_layout::topology::DeviceId;

    #[test]
    fn declarations_that_cannot_be_say_why() {
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
            new().broadcast("x", 2, v()),
        ] {
            assert_eq!(check(fine.clone()), Ok(()), "{}", fine.collectives[0]);
        }
        for (wrong, expected) in [
            (new().all_gather("y", v()), "there is no axis `y`"),
            (new().all_reduce("x", ShapedArray::new(&[1], DType::Bool)), "bool has no sum"),
            (
                new().reduce_scatter_with("x", ShapedArray::new(&[1], DType::C64), Reduce::Min),
                "c64 has no min",
            ),
            (new().broadcast("x", 3, v()), "axis \"x\" has only 3 devices"),
            (new().permute("x", v(), [(0, 3)]), "axis \"x\" has only 3 devices"),
            (new().permute("x", v(), [(0, 1), (0, 2)]), "device 0 of the axis gives twice"),
            (new().permute("x", v(), [(0, 1), (2, 1)]), "device 1 of the axis gets twice"),
        ] {
            let why = check(wrong).unwrap_err();
            assert!(why.contains(expected), "{why}\n  lacks {expected}");
        }
    }

    #[test]
    fn the_text_of_a_declaration_tells_all_of_it() {
        let all = Signature::new(())
            .all_reduce("x", f32s([2, 3]))
            .all_reduce_with("x", f32s([2]), Reduce::Max)
            .reduce_scatter("y", f32s([2]))
            .permute("x", f32s([2]), [(0, 1)])
            .broadcast("x", 1, f32s([2]));
        let texts: Vec<String> = all.collectives.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "all_reduce of f32[2,3] over \"x\"",
                "all_reduce (max) of f32[2] over \"x\"",
                "reduce_scatter of f32[2] over \"y\"",
                "permute by [(0, 1)] of f32[2] over \"x\"",
                "broadcast from 1 of f32[2] over \"x\"",
            ]
        );
    }
}
