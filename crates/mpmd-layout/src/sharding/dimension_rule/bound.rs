//! A rule applied to shapes, and the comparison of the regions of devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use super::infer::{DimensionLinks, OperandDimension};
use super::{ArrayDimensions, DimensionRule};
use crate::region::Region;
use crate::sharding::Layout;
use crate::topology::DeviceId;

/// A [`DimensionRule`] applied to the shapes of operands and results.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct BoundRule {
    dimensions: Vec<RuleDimension>,
    operands: Vec<Vec<ArrayDimension>>,
    results: Vec<Vec<ArrayDimension>>,
}

/// A dimension of a rule: a name, or one that `...` stands for.
#[derive(Clone, Debug, Eq, PartialEq)]
struct RuleDimension {
    name: String,
    size: usize,
    is_whole: bool,
}

/// A dimension of an array.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct ArrayDimension {
    /// Index of the rule's dimension.
    of: usize,
    /// True if the array has size 1 where the rule's dimension has another size.
    is_repeated: bool,
}

/// The part of each dimension of a [`BoundRule`] that each device computes with.
#[derive(Clone, Debug)]
pub struct DeviceParts {
    operands: Vec<Vec<ArrayDimension>>,
    parts: BTreeMap<DeviceId, Vec<Range<usize>>>,
}

impl DeviceParts {
    /// Returns the region of an operand that a device computes with. `None` if the device computes
    /// nothing, or there is no such operand.
    pub fn region_of(&self, operand: usize, device: DeviceId) -> Option<Region> {
        let parts = self.parts.get(&device)?;
        let dims = self.operands.get(operand)?.iter();
        let range = |dim: &ArrayDimension| match dim.is_repeated {
            true => 0..1,
            false => parts[dim.of].clone(),
        };
        Some(Region::new(dims.map(range).collect()))
    }
}

/// An array of a computation, by its index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RuleArray {
    /// An operand.
    Input(usize),
    /// A result.
    Output(usize),
}

/// A dimension of an array of a computation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RulePlace {
    /// The array.
    pub array: RuleArray,
    /// Index of the dimension in the array.
    pub dim: usize,
}

/// Error: shapes or layouts do not fit a rule.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DimensionMisfit {
    /// The computation has another number of operands or results.
    #[error("the rule `{rule}` is not for {operands} inputs and {results} outputs")]
    Arrays {
        /// The rule.
        rule: DimensionRule,
        /// Number of operands.
        operands: usize,
        /// Number of results.
        results: usize,
    },
    /// An array has too few or too many dimensions.
    #[error("{array} has shape {shape:?}, which does not fit the rule `{rule}`")]
    Rank {
        /// The rule.
        rule: DimensionRule,
        /// The array.
        array: RuleArray,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Dimensions of one name have different sizes.
    #[error("{first} has size {}, but {other} has size {}", .sizes[0], .sizes[1])]
    Sizes {
        /// A dimension.
        first: RulePlace,
        /// A dimension that must have the same size.
        other: RulePlace,
        /// The sizes of both.
        sizes: [usize; 2],
    },
    /// A device has a part of a dimension that it needs whole.
    #[error("{place} is divided: device {} has {found:?} of {size}, and needs it whole", .device.0)]
    Divided {
        /// The dimension.
        place: RulePlace,
        /// The device.
        device: DeviceId,
        /// The device's part.
        found: Range<usize>,
        /// The size of the dimension.
        size: usize,
    },
    /// A device has different parts of two dimensions that belong together.
    #[error(
        "{first} and {other} are divided in different ways: device {} has {:?} of the one and \
         {:?} of the other", .device.0, .found[0], .found[1]
    )]
    Parts {
        /// A dimension.
        first: RulePlace,
        /// A dimension that must be divided alike.
        other: RulePlace,
        /// The device.
        device: DeviceId,
        /// The device's parts of both.
        found: [Range<usize>; 2],
    },
    /// The devices compute another number of summands of a result than its sharding has.
    #[error(
        "output {result} has {expected} summands, one for each part of {names}, but its sharding \
         is for {found}"
    )]
    Summands {
        /// Index of the result.
        result: usize,
        /// The dimensions that are summed over.
        names: String,
        /// The number of summands that the devices compute.
        expected: usize,
        /// The number of summands in the sharding of the result.
        found: usize,
    },
    /// No device computes a part of a result.
    #[error("output {result}: no device has all inputs for a part of it")]
    Missing {
        /// Index of the result.
        result: usize,
    },
}

impl fmt::Display for RuleArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(index) => write!(f, "input {index}"),
            Self::Output(index) => write!(f, "output {index}"),
        }
    }
}

impl fmt::Display for RulePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dimension {} of {}", self.dim, self.array)
    }
}

impl DimensionRule {
    /// Applies the rule to the shapes of all operands and results.
    ///
    /// # Errors
    ///
    /// If the number of arrays, of dimensions, or sizes do not fit the rule.
    pub fn bind(
        &self,
        operands: &[&[usize]],
        results: &[&[usize]],
    ) -> Result<BoundRule, DimensionMisfit> {
        if (operands.len(), results.len()) != (self.operands.len(), self.results.len()) {
            return Err(DimensionMisfit::Arrays {
                rule: self.clone(),
                operands: operands.len(),
                results: results.len(),
            });
        }
        let mut binder = Binder::new(self);
        let operands = binder.arrays(&self.operands, operands, RuleArray::Input)?;
        let results = binder.arrays(&self.results, results, RuleArray::Output)?;
        Ok(binder.bound(operands, results))
    }
}

/// The start and end of a region in each dimension.
type Bounds = Vec<(usize, usize)>;

/// Finds the size of each dimension of a rule.
struct Binder<'a> {
    rule: &'a DimensionRule,
    /// The dimensions of the rule: those with names, then those that `...` stands for, from the
    /// last one. The size is `None` as long as only arrays of size 1 have it.
    known: Vec<Option<(RulePlace, usize)>>,
}

impl<'a> Binder<'a> {
    fn new(rule: &'a DimensionRule) -> Self {
        let known = vec![None; rule.names.len()];
        Self { rule, known }
    }

    fn arrays(
        &mut self,
        arrays: &[ArrayDimensions],
        shapes: &[&[usize]],
        array: fn(usize) -> RuleArray,
    ) -> Result<Vec<Vec<(usize, usize)>>, DimensionMisfit> {
        let arrays = arrays.iter().zip(shapes).enumerate();
        arrays
            .map(|(index, (dims, shape))| self.array(dims, shape, array(index)))
            .collect()
    }

    /// Returns the rule's dimension and the size of each dimension of an array.
    fn array(
        &mut self,
        dims: &ArrayDimensions,
        shape: &[usize],
        array: RuleArray,
    ) -> Result<Vec<(usize, usize)>, DimensionMisfit> {
        let rest = shape.len().checked_sub(dims.named());
        let Some(rest) = rest.filter(|rest| *rest == 0 || dims.back.is_some()) else {
            return Err(DimensionMisfit::Rank {
                rule: self.rule.clone(),
                array,
                shape: shape.to_vec(),
            });
        };
        let names = self.rule.names.len();
        let front = dims.front.iter().copied();
        let back = dims.back.iter().flatten().copied();
        let rest = (0..rest).rev().map(|from_last| names + from_last);
        let all = front.chain(rest).chain(back).zip(shape).enumerate();
        all.map(|(dim, (of, size))| {
            self.learn(of, *size, RulePlace { array, dim })?;
            Ok((of, *size))
        })
        .collect()
    }

    /// Notes the size of a dimension.
    fn learn(&mut self, of: usize, size: usize, place: RulePlace) -> Result<(), DimensionMisfit> {
        if of >= self.known.len() {
            self.known.resize(of + 1, None);
        }
        let may_repeat = of >= self.rule.names.len();
        match &self.known[of] {
            Some((_, known)) if *known == size => Ok(()),
            Some((_, _)) if may_repeat && size == 1 => Ok(()),
            Some((first, known)) if !(may_repeat && *known == 1) => Err(DimensionMisfit::Sizes {
                first: *first,
                other: place,
                sizes: [*known, size],
            }),
            _ => {
                self.known[of] = Some((place, size));
                Ok(())
            }
        }
    }

    fn bound(
        self,
        operands: Vec<Vec<(usize, usize)>>,
        results: Vec<Vec<(usize, usize)>>,
    ) -> BoundRule {
        let names = &self.rule.names;
        let dimensions = self.known.iter().enumerate().map(|(of, known)| {
            let name = names.get(of);
            RuleDimension {
                name: name.map_or_else(|| "...".to_owned(), |name| name.text.clone()),
                size: known.as_ref().map_or(1, |(_, size)| *size),
                is_whole: name.is_some_and(|name| name.is_whole),
            }
        });
        let dimensions: Vec<RuleDimension> = dimensions.collect();
        let bound = |arrays: Vec<Vec<(usize, usize)>>| {
            let of_array = |array: Vec<(usize, usize)>| {
                let dims = array.into_iter().map(|(of, size)| ArrayDimension {
                    of,
                    is_repeated: size != dimensions[of].size,
                });
                dims.collect()
            };
            arrays.into_iter().map(of_array).collect()
        };
        let (operands, results) = (bound(operands), bound(results));
        BoundRule {
            dimensions,
            operands,
            results,
        }
    }
}

impl BoundRule {
    /// Returns how the dimensions belong together, by number.
    pub fn links(&self) -> DimensionLinks {
        let operand = |dims: &Vec<ArrayDimension>| {
            let linked =
                dims.iter().map(
                    |dim| match dim.is_repeated || self.dimensions[dim.of].is_whole {
                        true => OperandDimension::Whole,
                        false => OperandDimension::Linked(dim.of),
                    },
                );
            linked.collect()
        };
        let result = |dims: &Vec<ArrayDimension>| dims.iter().map(|dim| Some(dim.of)).collect();
        DimensionLinks {
            operands: self.operands.iter().map(operand).collect(),
            results: self.results.iter().map(result).collect(),
        }
    }

    /// Compares the parts of all arrays on each device, and returns the part that each device
    /// computes with. An operand without a layout is on every device as a whole, and each device
    /// takes its part.
    ///
    /// All results are on the same devices. Operands may be on more devices. All arrays have the
    /// shapes for which the rule was bound. If an operand consists of summands, those of the
    /// results are not compared: only the computation knows whether it is linear.
    ///
    /// # Errors
    ///
    /// If a device has other parts than it needs, or the sharding of a result has not the summands
    /// that the devices compute.
    pub fn check(
        &self,
        operands: &[Option<&Layout>],
        results: &[&Layout],
    ) -> Result<DeviceParts, DimensionMisfit> {
        let outputs = results.iter().copied();
        let mut placed = outputs.chain(operands.iter().copied().flatten());
        let devices = placed.next().map_or(&[][..], Layout::devices);
        let parts = devices
            .iter()
            .map(|device| self.parts(*device, operands, results))
            .collect::<Result<Vec<_>, _>>()?;
        let is_reduced = |layout: &&Layout| layout.terms() == 1;
        if operands
            .iter()
            .copied()
            .flatten()
            .all(|layout| is_reduced(&layout))
        {
            for (result, layout) in results.iter().enumerate() {
                self.check_summands(result, layout, devices, &parts)?;
            }
        }
        let operands = self.operands.clone();
        Ok(DeviceParts {
            operands,
            parts: devices.iter().copied().zip(parts).collect(),
        })
    }

    /// Returns a device's part of each dimension of the rule.
    fn parts(
        &self,
        device: DeviceId,
        operands: &[Option<&Layout>],
        results: &[&Layout],
    ) -> Result<Vec<Range<usize>>, DimensionMisfit> {
        let inputs = operands.iter().zip(&self.operands).enumerate();
        let inputs = inputs.map(|(i, (layout, dims))| (RuleArray::Input(i), *layout, dims));
        let outputs = results.iter().zip(&self.results).enumerate();
        let outputs =
            outputs.map(|(i, (layout, dims))| (RuleArray::Output(i), Some(*layout), dims));

        let mut found: Vec<Option<(RulePlace, Range<usize>)>> = vec![None; self.dimensions.len()];
        for (array, layout, dims) in inputs.chain(outputs) {
            let Some(region) = layout.and_then(|layout| layout.region_of(device)) else {
                continue;
            };
            for (dim, of) in dims.iter().enumerate().filter(|(_, of)| !of.is_repeated) {
                let place = RulePlace { array, dim };
                let part = region.range(dim);
                let dimension = &self.dimensions[of.of];
                if dimension.is_whole && part != (0..dimension.size) {
                    return Err(DimensionMisfit::Divided {
                        place,
                        device,
                        found: part,
                        size: dimension.size,
                    });
                }
                match &found[of.of] {
                    Some((first, known)) if *known != part => {
                        return Err(DimensionMisfit::Parts {
                            first: *first,
                            other: place,
                            device,
                            found: [known.clone(), part],
                        });
                    }
                    _ => found[of.of] = Some((place, part)),
                }
            }
        }
        let parts = found.into_iter().zip(&self.dimensions);
        Ok(parts
            .map(|(found, dimension)| found.map_or(0..dimension.size, |(_, part)| part))
            .collect())
    }

    /// Compares the summands of a result that the devices compute with those of its layout. `parts`
    /// has each device's part of each dimension.
    fn check_summands(
        &self,
        result: usize,
        layout: &Layout,
        devices: &[DeviceId],
        parts: &[Vec<Range<usize>>],
    ) -> Result<(), DimensionMisfit> {
        let own = &self.results[result];
        let is_summed = |of: &usize| own.iter().all(|dim| dim.of != *of);
        let summed: Vec<usize> = (0..self.dimensions.len()).filter(is_summed).collect();
        let size: usize = summed.iter().map(|of| self.dimensions[*of].size).product();
        if size == 0 {
            // Each sum is 0, in any number of summands.
            return Ok(());
        }

        // For each part of the result, the parts of the summed dimensions and the summand of each
        // device.
        let mut summands: BTreeMap<Bounds, BTreeSet<(Bounds, usize)>> = BTreeMap::new();
        for (device, parts) in devices.iter().zip(parts) {
            let Some(place) = layout.place_of(*device) else {
                continue;
            };
            let of_result = layout.regions()[place].ranges();
            let of_result = of_result.map(|range| (range.start, range.end)).collect();
            let of_summed = summed.iter().map(|of| (parts[*of].start, parts[*of].end));
            let summand = (of_summed.collect(), layout.term_of(place));
            summands.entry(of_result).or_default().insert(summand);
        }

        for pairs in summands.values() {
            let computed: BTreeSet<&Bounds> = pairs.iter().map(|(part, _)| part).collect();
            let terms: BTreeSet<usize> = pairs.iter().map(|(_, term)| *term).collect();
            let volume =
                |part: &&Bounds| -> usize { part.iter().map(|(start, end)| end - start).product() };
            if computed.iter().map(volume).sum::<usize>() != size {
                return Err(DimensionMisfit::Missing { result });
            }
            if computed.len() != pairs.len() || terms.len() != pairs.len() {
                let names = summed
                    .iter()
                    .map(|of| format!("`{}`", self.dimensions[*of].name));
                return Err(DimensionMisfit::Summands {
                    result,
                    names: names.collect::<Vec<_>>().join(", "),
                    expected: computed.len(),
                    found: layout.terms(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::{Sharding, Spec};
    use crate::spec;
    use crate::topology::Mesh;

    fn mesh() -> Mesh {
        Mesh::new(&[("x", 2), ("y", 2)], (0..4).map(DeviceId).collect()).unwrap()
    }

    /// Checks a rule with operands and results of these shapes and shardings.
    fn check(
        rule: &str,
        operands: &[(&[usize], Sharding)],
        results: &[(&[usize], Sharding)],
    ) -> Result<(), DimensionMisfit> {
        let operand_shapes: Vec<&[usize]> = operands.iter().map(|(shape, _)| *shape).collect();
        let result_shapes: Vec<&[usize]> = results.iter().map(|(shape, _)| *shape).collect();
        let rule: DimensionRule = rule.parse().unwrap();
        let bound = rule.bind(&operand_shapes, &result_shapes)?;
        let layout = |(shape, sharding): &(&[usize], Sharding)| sharding.layout(shape).unwrap();
        let operands: Vec<_> = operands.iter().map(layout).collect();
        let results: Vec<_> = results.iter().map(layout).collect();
        let operands: Vec<_> = operands.iter().map(|layout| Some(&**layout)).collect();
        let results: Vec<_> = results.iter().map(|layout| &**layout).collect();
        bound.check(&operands, &results).map(|_| ())
    }

    fn on(spec: Spec) -> Sharding {
        mesh().sharding(spec)
    }

    const PRODUCT: &str = "... m k, k n -> ... m n";

    /// Checks a product of `[8, 4]` and `[4, 12]` in these shardings.
    fn product(a: Sharding, b: Sharding, y: Sharding) -> Result<(), DimensionMisfit> {
        check(PRODUCT, &[(&[8, 4], a), (&[4, 12], b)], &[(&[8, 12], y)])
    }

    #[test]
    fn products_fit_with_rows_columns_and_summands() {
        let sum = |spec: Spec, axes: &[&str]| on(spec).unreduced(axes).unwrap();
        for (a, b, y) in [
            (on(spec![]), on(spec![]), on(spec![])),
            (on(spec!["x"]), on(spec![]), on(spec!["x"])),
            (on(spec!["x"]), on(spec![None, "y"]), on(spec!["x", "y"])),
            (on(spec![("y", "x")]), on(spec![]), on(spec![("y", "x")])),
            (on(spec![None, "x"]), on(spec!["x"]), sum(spec![], &["x"])),
            (on(spec!["y", "x"]), on(spec!["x"]), sum(spec!["y"], &["x"])),
            (
                on(spec![None, ("x", "y")]),
                on(spec![("x", "y")]),
                sum(spec![], &["x", "y"]),
            ),
        ] {
            assert_eq!(product(a, b, y), Ok(()));
        }
    }

    #[test]
    fn misfits_name_arrays_dimensions_and_a_device() {
        let text = |a, b, y| product(a, b, y).unwrap_err().to_string();
        assert_eq!(
            text(on(spec![None, "x"]), on(spec![]), on(spec![])),
            "dimension 1 of input 0 and dimension 0 of input 1 are divided in different ways: \
             device 0 has 0..2 of the one and 0..4 of the other"
        );
        assert_eq!(
            text(on(spec!["x"]), on(spec![]), on(spec![])),
            "dimension 0 of input 0 and dimension 0 of output 0 are divided in different ways: \
             device 0 has 0..4 of the one and 0..8 of the other"
        );
        assert_eq!(
            text(on(spec![None, "x"]), on(spec!["x"]), on(spec![])),
            "output 0 has 2 summands, one for each part of `k`, but its sharding is for 1"
        );
        let twice = on(spec![]).unreduced(&["x"]).unwrap();
        assert_eq!(
            text(on(spec![]), on(spec![]), twice.clone()),
            "output 0 has 1 summands, one for each part of `k`, but its sharding is for 2"
        );
        // The summands of results are not compared then.
        assert_eq!(product(twice.clone(), on(spec![]), twice.clone()), Ok(()));
        assert_eq!(product(twice.clone(), on(spec![]), on(spec![])), Ok(()));
        assert_eq!(
            text(twice, on(spec!["x"]), on(spec![])),
            "dimension 1 of input 0 and dimension 0 of input 1 are divided in different ways: \
             device 0 has 0..4 of the one and 0..2 of the other"
        );
    }

    #[test]
    fn sizes_and_numbers_of_dimensions_are_compared() {
        let bind = |rule: &str, operands: &[&[usize]], results: &[&[usize]]| {
            let rule: DimensionRule = rule.parse().unwrap();
            rule.bind(operands, results).map_err(|why| why.to_string())
        };
        assert_eq!(
            bind(PRODUCT, &[&[8, 4], &[5, 12]], &[&[8, 12]]).unwrap_err(),
            "dimension 1 of input 0 has size 4, but dimension 0 of input 1 has size 5"
        );
        assert_eq!(
            bind(PRODUCT, &[&[8], &[5, 12]], &[&[8, 12]]).unwrap_err(),
            "input 0 has shape [8], which does not fit the rule `... m k, k n -> ... m n`"
        );
        assert_eq!(
            bind("i -> i", &[&[8], &[8]], &[&[8]]).unwrap_err(),
            "the rule `i -> i` is not for 2 inputs and 1 outputs"
        );
        let broadcast =
            |a: &[usize], b: &[usize], y: &[usize]| bind("..., ... -> ...", &[a, b], &[y]);
        assert!(broadcast(&[8, 1, 4], &[3, 1], &[8, 3, 4]).is_ok());
        assert!(broadcast(&[], &[3, 1], &[3, 1]).is_ok());
        assert_eq!(
            broadcast(&[2, 3], &[4], &[2, 4]).unwrap_err(),
            "dimension 1 of input 0 has size 3, but dimension 0 of input 1 has size 4"
        );
        assert!(
            bind("i, i -> i", &[&[1], &[4]], &[&[4]]).is_err(),
            "names do not repeat"
        );
    }

    #[test]
    fn repeated_elements_are_whole_on_each_device() {
        let add = |b: &'static [usize], b_spec: Spec| {
            let operands: [(&[usize], Sharding); 2] =
                [(&[8, 4], on(spec!["x", "y"])), (b, on(b_spec))];
            check(
                "..., ... -> ...",
                &operands,
                &[(&[8, 4], on(spec!["x", "y"]))],
            )
        };
        assert_eq!(add(&[], spec![]), Ok(()));
        assert_eq!(add(&[4], spec!["y"]), Ok(()));
        assert_eq!(add(&[8, 1], spec!["x"]), Ok(()));
        assert!(matches!(
            add(&[4], spec!["x"]),
            Err(DimensionMisfit::Parts { .. })
        ));
        assert!(matches!(
            add(&[4], spec![]),
            Err(DimensionMisfit::Parts { .. })
        ));
    }

    #[test]
    fn whole_dimensions_may_not_be_divided() {
        let softmax = |spec: Spec| {
            let x = (&[8, 4][..], on(spec));
            let x = std::slice::from_ref(&x);
            check("... !i -> ... !i", x, x)
        };
        assert_eq!(softmax(spec!["x"]), Ok(()));
        assert_eq!(
            softmax(spec![None, "y"]).unwrap_err().to_string(),
            "dimension 1 of input 0 is divided: device 0 has 0..2 of 4, and needs it whole"
        );
    }

    #[test]
    fn sums_of_nothing_have_any_number_of_summands() {
        let sum = on(spec![]).unreduced(&["x"]).unwrap();
        assert_eq!(
            check("i j -> j", &[(&[0, 4], on(spec!["x"]))], &[(&[4], sum)]),
            Ok(())
        );
    }

    #[test]
    fn host_values_follow_and_parts_that_nobody_computes_are_found() {
        let rule: DimensionRule = "..., ... -> ...".parse().unwrap();
        let bound = rule.bind(&[&[4, 8], &[4, 1]], &[&[4, 8]]).unwrap();
        let tiles = on(spec!["x", "y"]).layout(&[4, 8]).unwrap();
        let parts = bound.check(&[Some(&tiles), None], &[&tiles]).unwrap();
        let of_last = parts.region_of(1, DeviceId(3));
        assert_eq!(of_last, Some(Region::new(vec![2..4, 0..1])));
        assert_eq!(parts.region_of(1, DeviceId(4)), None);
        assert_eq!(parts.region_of(2, DeviceId(3)), None);

        // Each device has its own rows, but only half of the columns of each.
        let devices: Vec<DeviceId> = (0..2).map(DeviceId).collect();
        let part = |i: usize, j: usize| Region::new(vec![i..i + 1, j..j + 1]);
        let diagonal = Layout::new(
            &[2, 2],
            devices.clone(),
            vec![part(0, 0), part(1, 1)],
            false,
        );
        let line = |i: usize| Region::new(std::iter::once(i..i + 1).collect());
        let rows = Layout::new(&[2], devices, vec![line(0), line(1)], false);
        let sum: DimensionRule = "i j -> i".parse().unwrap();
        let bound = sum.bind(&[&[2, 2]], &[&[2]]).unwrap();
        let found = bound.check(&[Some(&diagonal)], &[&rows]);
        assert_eq!(found.unwrap_err(), DimensionMisfit::Missing { result: 0 });
    }
}
