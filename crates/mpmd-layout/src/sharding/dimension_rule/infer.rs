//! The shardings of results that follow from those of operands by a rule.

use std::collections::BTreeMap;
use std::fmt;

use super::bound::{RuleArray, RulePlace};
use crate::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use crate::topology::Mesh;

/// How a computation depends on operands that consist of summands.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Linearity {
    /// It is not linear: no operand may consist of summands.
    #[default]
    None,
    /// It is linear in all operands together, as a sum is: all of them have the same summands.
    Joint,
    /// It is linear in each operand alone, as a product is: at most one of them has summands.
    Each,
    /// It is linear in the first operand alone, as a quotient is.
    First,
}

/// Error: no single sharding of the results follows from those of the operands.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ShardingConflict {
    /// An operand is on other devices, or its sharding has no mesh.
    #[error("input {operand} is {sharding}, and not on the mesh {mesh}")]
    OtherMesh {
        /// Index of the operand.
        operand: usize,
        /// Its sharding.
        sharding: Sharding,
        /// The mesh of the other operands.
        mesh: Mesh,
    },
    /// A dimension is divided that each device needs whole.
    #[error("{place} is divided over {}, and each device needs it whole", axes(.over))]
    Divided {
        /// The dimension.
        place: RulePlace,
        /// The axes that divide it.
        over: Vec<String>,
    },
    /// Dimensions that belong together are divided over different axes.
    #[error("{first} is divided over {}, but {other} over {}", axes(&.over[0]), axes(&.over[1]))]
    Axes {
        /// A dimension.
        first: RulePlace,
        /// A dimension that must be divided alike.
        other: RulePlace,
        /// The axes that divide both.
        over: [Vec<String>; 2],
    },
    /// Two dimensions that do not belong together are divided over one axis.
    #[error("both {first} and {other} are divided over `{axis}`")]
    Twice {
        /// A dimension.
        first: RulePlace,
        /// Another dimension.
        other: RulePlace,
        /// The axis.
        axis: String,
    },
    /// An operand consists of summands, and the computation is not linear in it.
    #[error("input {operand} consists of summands over {}: reduce it first", axes(.over))]
    Summands {
        /// Index of the operand.
        operand: usize,
        /// The axes of the summands.
        over: Vec<String>,
    },
    /// Operands consist of summands over different axes.
    #[error("input {} consists of {}, but input {} of {}", .operands[0], summands(&.over[0]),
        .operands[1], summands(&.over[1]))]
    OtherSummands {
        /// Indices of two operands.
        operands: [usize; 2],
        /// The axes of the summands of both; empty for an operand without summands.
        over: [Vec<String>; 2],
    },
    /// An operand consists of summands over an axis that also divides a dimension.
    #[error("input {operand} consists of summands over `{axis}`, which also divides {place}")]
    DividedSummands {
        /// Index of the operand.
        operand: usize,
        /// The axis.
        axis: String,
        /// The divided dimension.
        place: RulePlace,
    },
}

fn axes(names: &[String]) -> String {
    let names = names.iter().map(|name| format!("`{name}`"));
    names.collect::<Vec<_>>().join(" and ")
}

fn summands(over: &[String]) -> String {
    match over {
        [] => "no summands".to_owned(),
        over => format!("summands over {}", axes(over)),
    }
}

impl fmt::Display for Linearity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "not linear",
            Self::Joint => "linear in all operands together",
            Self::Each => "linear in each operand",
            Self::First => "linear in the first operand",
        })
    }
}

/// The shardings with which a computation begins and ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ComputedShardings {
    /// The sharding of the part of each operand that each device computes with. Differs from that
    /// of the operand where this has a dimension whole of which the device takes a part.
    pub operands: Vec<Sharding>,
    /// The sharding of each result.
    pub results: Vec<Sharding>,
}

/// The axes that divide the dimensions of each number, and an operand's dimension that has them.
type Divisions = BTreeMap<usize, (Vec<String>, RulePlace)>;

/// A dimension of an operand, as a part of a computation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OperandDimension {
    /// It belongs together with all dimensions of this number, which are divided alike.
    Linked(usize),
    /// Each device needs all of it.
    Whole,
}

/// How the dimensions of a computation's operands and results belong together, by number.
///
/// A [`BoundRule`](super::BoundRule) has such links. A computation that no rule describes, such as
/// one that cuts a dimension to another size, has them all the same.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DimensionLinks {
    /// The dimensions of each operand.
    pub operands: Vec<Vec<OperandDimension>>,
    /// The dimensions of each result, by number. `None` for one that is never divided.
    pub results: Vec<Vec<Option<usize>>>,
}

impl DimensionLinks {
    /// Returns the shardings of the results on `mesh`, in device memory, and those of the operands
    /// as the devices compute with them. An operand without a sharding is whole on each device.
    ///
    /// A dimension of the results is divided as that of the operands is. Where one operand has it
    /// whole and another one divided, each device computes with its part of the first. A divided
    /// dimension that a result lacks makes it a partial sum over its axes.
    ///
    /// # Errors
    ///
    /// If the operands are divided in ways that contradict each other, if the computation needs a
    /// divided dimension whole, or if it is not linear in an operand that consists of summands.
    pub fn infer(
        &self,
        mesh: &Mesh,
        operands: &[Option<&Sharding>],
        linearity: Linearity,
    ) -> Result<ComputedShardings, ShardingConflict> {
        for (operand, sharding) in operands.iter().enumerate() {
            if let Some(sharding) = sharding
                && sharding.mesh() != Some(mesh)
            {
                return Err(ShardingConflict::OtherMesh {
                    operand,
                    sharding: (*sharding).clone(),
                    mesh: mesh.clone(),
                });
            }
        }

        let divisions = self.divisions(operands)?;
        let over = match unreduced(operands, linearity)? {
            None => Vec::new(),
            Some((operand, over)) => {
                check_apart(operand, &over, &divisions)?;
                over
            }
        };

        let parts = self.operands.iter().zip(operands).map(|(own, sharding)| {
            let own = own.iter().map(|dim| match dim {
                OperandDimension::Linked(of) => Some(*of),
                OperandDimension::Whole => None,
            });
            let over = sharding.map_or(&[][..], Sharding::unreduced_axes);
            divided(mesh, own, &divisions, over)
        });
        let results = self.results.iter().map(|own| {
            let lacking = divisions
                .iter()
                .filter(|(of, _)| !own.contains(&Some(**of)));
            let summed = lacking.flat_map(|(_, (axes, _))| axes);
            let unreduced: Vec<String> = summed.chain(&over).cloned().collect();
            divided(mesh, own.iter().copied(), &divisions, &unreduced)
        });
        Ok(ComputedShardings {
            operands: parts.collect(),
            results: results.collect(),
        })
    }

    /// Returns the axes that divide the dimensions of each number.
    fn divisions(&self, operands: &[Option<&Sharding>]) -> Result<Divisions, ShardingConflict> {
        let mut divisions = Divisions::new();
        for (operand, (own, sharding)) in self.operands.iter().zip(operands).enumerate() {
            let Some(spec) = sharding.and_then(Sharding::spec) else {
                continue;
            };
            for (dim, (entry, own)) in spec.entries().iter().zip(own).enumerate() {
                let over = entry.axes();
                if over.is_empty() {
                    continue;
                }
                let place = RulePlace {
                    array: RuleArray::Input(operand),
                    dim,
                };
                let OperandDimension::Linked(of) = own else {
                    return Err(ShardingConflict::Divided {
                        place,
                        over: over.to_vec(),
                    });
                };
                match divisions.get(of) {
                    Some((before, first)) if before != over => {
                        return Err(ShardingConflict::Axes {
                            first: *first,
                            other: place,
                            over: [before.clone(), over.to_vec()],
                        });
                    }
                    Some(_) => {}
                    None => _ = divisions.insert(*of, (over.to_vec(), place)),
                }
            }
        }
        check_once(&divisions)?;
        Ok(divisions)
    }
}

/// Checks that an operand consists of summands over other axes than those that divide dimensions.
fn check_apart(
    operand: usize,
    over: &[String],
    divisions: &Divisions,
) -> Result<(), ShardingConflict> {
    let shared = divisions.values().find_map(|(axes, place)| {
        let axis = axes.iter().find(|axis| over.contains(axis))?;
        Some((axis.clone(), *place))
    });
    match shared {
        None => Ok(()),
        Some((axis, place)) => Err(ShardingConflict::DividedSummands {
            operand,
            axis,
            place,
        }),
    }
}

/// Returns the sharding of an array whose dimensions have the numbers `own`; `None` for one that is
/// never divided. It consists of summands over `unreduced`.
fn divided(
    mesh: &Mesh,
    own: impl Iterator<Item = Option<usize>>,
    divisions: &Divisions,
    unreduced: &[String],
) -> Sharding {
    let axes = |of: Option<usize>| {
        let division = of.and_then(|of| divisions.get(&of));
        SpecEntry::from(division.map_or_else(Vec::new, |(axes, _)| axes.clone()))
    };
    let mut entries: Vec<SpecEntry> = own.map(axes).collect();
    // A sharding of no divided dimension has one spelling.
    while entries.last() == Some(&SpecEntry::None) {
        entries.pop();
    }
    let unreduced: Vec<&str> = unreduced.iter().map(String::as_str).collect();
    let sharding = Sharding::named(mesh.clone(), Spec::new(entries), MemoryKind::Device);
    // The axes are of the mesh and divide no dimension of this array: that was compared.
    sharding.unreduced(&unreduced).unwrap_or(sharding)
}

/// Checks that each axis divides one dimension only.
fn check_once(divisions: &Divisions) -> Result<(), ShardingConflict> {
    let mut divided: Vec<_> = divisions.values().collect();
    divided.sort_by_key(|(_, place)| match place.array {
        RuleArray::Input(operand) | RuleArray::Output(operand) => (operand, place.dim),
    });
    for (i, (axes, first)) in divided.iter().enumerate() {
        for (others, other) in &divided[i + 1..] {
            if let Some(axis) = axes.iter().find(|axis| others.contains(axis)) {
                return Err(ShardingConflict::Twice {
                    first: *first,
                    other: *other,
                    axis: axis.clone(),
                });
            }
        }
    }
    Ok(())
}

/// Returns an operand that consists of summands, with their axes. `None` if there is none.
fn unreduced(
    operands: &[Option<&Sharding>],
    linearity: Linearity,
) -> Result<Option<(usize, Vec<String>)>, ShardingConflict> {
    let over: Vec<&[String]> = operands
        .iter()
        .map(|sharding| sharding.map_or(&[][..], Sharding::unreduced_axes))
        .collect();
    let mut with_summands = (0..over.len()).filter(|operand| !over[*operand].is_empty());
    let Some(first) = with_summands.next() else {
        return Ok(None);
    };
    let refused = |operand: usize| ShardingConflict::Summands {
        operand,
        over: over[operand].to_vec(),
    };
    match linearity {
        Linearity::None => return Err(refused(first)),
        Linearity::First if first > 0 => return Err(refused(first)),
        Linearity::First | Linearity::Each => {
            if let Some(other) = with_summands.next() {
                return Err(refused(other));
            }
        }
        Linearity::Joint => {
            if let Some(other) = (0..over.len()).find(|other| over[*other] != over[first]) {
                return Err(ShardingConflict::OtherSummands {
                    operands: [first, other],
                    over: [over[first].to_vec(), over[other].to_vec()],
                });
            }
        }
    }
    Ok(Some((first, over[first].to_vec())))
}

#[cfg(test)]
mod tests {
    use super::super::DimensionRule;
    use super::*;
    use crate::spec;
    use crate::topology::DeviceId;

    fn mesh() -> Mesh {
        Mesh::new(&[("x", 2), ("y", 2)], (0..4).map(DeviceId).collect()).unwrap()
    }

    fn infer(
        rule: &str,
        shapes: &[&[usize]],
        result: &[usize],
        shardings: &[Option<Sharding>],
        linearity: Linearity,
    ) -> Result<Sharding, String> {
        let rule: DimensionRule = rule.parse().unwrap();
        let bound = rule.bind(shapes, &[result]).unwrap();
        let shardings: Vec<_> = shardings.iter().map(Option::as_ref).collect();
        let inferred = bound.links().infer(&mesh(), &shardings, linearity);
        let mut inferred = inferred.map_err(|why| why.to_string())?;
        Ok(inferred.results.remove(0))
    }

    fn on(spec: Spec) -> Option<Sharding> {
        Some(mesh().sharding(spec))
    }

    fn over(spec: Spec, axes: &[&str]) -> Sharding {
        mesh().sharding(spec).unreduced(axes).unwrap()
    }

    fn product(a: Option<Sharding>, b: Option<Sharding>) -> Result<Sharding, String> {
        let shapes: [&[usize]; 2] = [&[8, 4], &[4, 12]];
        infer(
            "m k, k n -> m n",
            &shapes,
            &[8, 12],
            &[a, b],
            Linearity::Each,
        )
    }

    fn sum(a: Option<Sharding>, b: Option<Sharding>) -> Result<Sharding, String> {
        let shapes: [&[usize]; 2] = [&[8, 4], &[8, 4]];
        infer(
            "..., ... -> ...",
            &shapes,
            &[8, 4],
            &[a, b],
            Linearity::Joint,
        )
    }

    #[test]
    fn results_are_divided_as_their_operands() {
        for (a, b, expected) in [
            (on(spec![]), on(spec![]), over(spec![], &[])),
            (
                on(spec!["x"]),
                on(spec![None, "y"]),
                over(spec!["x", "y"], &[]),
            ),
            (on(spec!["x"]), None, over(spec!["x"], &[])),
            (on(spec![None, "x"]), on(spec!["x"]), over(spec![], &["x"])),
            // Each device takes its part of the operand that it has whole.
            (on(spec![None, "x"]), on(spec![]), over(spec![], &["x"])),
            (
                on(spec!["y", "x"]),
                on(spec!["x"]),
                over(spec!["y"], &["x"]),
            ),
            (Some(over(spec![], &["y"])), on(spec![None, "x"]), {
                over(spec![None, "x"], &["y"])
            }),
        ] {
            assert_eq!(product(a.clone(), b.clone()), Ok(expected), "{a:?} {b:?}");
        }
        assert_eq!(
            sum(on(spec!["x"]), on(spec![None, "y"])),
            Ok(over(spec!["x", "y"], &[]))
        );
        let twice = || Some(over(spec!["x"], &["y"]));
        assert_eq!(sum(twice(), twice()), Ok(over(spec!["x"], &["y"])));
        let total = infer(
            "i j ->",
            &[&[8, 4]],
            &[],
            &[on(spec!["x", "y"])],
            Linearity::Joint,
        );
        assert_eq!(total, Ok(over(spec![], &["x", "y"])));
        let repeated: [&[usize]; 2] = [&[8, 4], &[1, 4]];
        let broadcast = infer(
            "..., ... -> ...",
            &repeated,
            &[8, 4],
            &[on(spec!["x"]), on(spec![])],
            Linearity::Joint,
        );
        assert_eq!(broadcast, Ok(over(spec!["x"], &[])));
    }

    #[test]
    fn conflicts_name_both_sides() {
        for (found, expected) in [
            (
                sum(on(spec!["x"]), on(spec!["y"])),
                "dimension 0 of input 0 is divided over `x`, but dimension 0 of input 1 over `y`",
            ),
            (
                sum(on(spec!["x"]), on(spec![None, "x"])),
                "both dimension 0 of input 0 and dimension 1 of input 1 are divided over `x`",
            ),
            (
                product(on(spec!["x"]), on(spec!["x"])),
                "both dimension 0 of input 0 and dimension 0 of input 1 are divided over `x`",
            ),
            (
                sum(Some(over(spec![], &["x"])), on(spec![])),
                "input 0 consists of summands over `x`, but input 1 of no summands",
            ),
            (
                product(Some(over(spec![], &["x"])), Some(over(spec![], &["y"]))),
                "input 1 consists of summands over `y`: reduce it first",
            ),
            (
                product(Some(over(spec![], &["x"])), on(spec![None, "x"])),
                "input 0 consists of summands over `x`, which also divides dimension 1 of input 1",
            ),
            (
                infer(
                    "... !i -> ... !i",
                    &[&[8, 4]],
                    &[8, 4],
                    &[on(spec![None, ("x", "y")])],
                    Linearity::None,
                ),
                "dimension 1 of input 0 is divided over `x` and `y`, and each device needs it \
                 whole",
            ),
            (
                infer(
                    "... -> ...",
                    &[&[4]],
                    &[4],
                    &[Some(over(spec![], &["x"]))],
                    Linearity::None,
                ),
                "input 0 consists of summands over `x`: reduce it first",
            ),
        ] {
            assert_eq!(found, Err(expected.to_owned()));
        }
        let single = Some(Sharding::single_device(DeviceId(0)));
        let found = sum(on(spec!["x"]), single).unwrap_err();
        assert!(
            found.starts_with("input 1 is ") && found.contains("not on the mesh"),
            "{found}"
        );
    }
}
