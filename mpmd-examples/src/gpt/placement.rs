//! The shardings of a stage's parameters, by rules: in computation and in storage between steps.
//!
//! A stage's mesh is `{data: F, model: T}`. The sequences of a microbatch are divided over `data`,
//! and the blocks' matrices over `model`. With fully sharded data parallelism, each device of
//! `data` stores only a part of its parameters and their running means. A step gathers the
//! parameters once for its kernels, and scatters the sums of the gradients.

use mpmd::aval::DType;
use mpmd::pipeline::ParamSharding;
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd::sharding::rules::{Inferred, Registry, Strategy, infer};
use mpmd::{DeviceId, topology::Mesh};

use super::params::Part;

/// The axis of a stage's mesh that divides the sequences of a microbatch and the stored parameters.
pub const DATA_AXIS: &str = "data";
/// The axis of a stage's mesh that divides the matrices of its blocks.
pub const MODEL_AXIS: &str = "model";

/// A rule of a strategy: (pattern of parameter names, tactic). See [`mpmd::sharding::rules`].
pub type Rule = (String, String);

/// Rules for the shardings in computation: each device of the axis `model` has some heads and
/// hidden columns.
const COMPUTE: [(&str, &str); 7] = [
    (".*/w_qkv", r#"shard_dim("model", 2)"#),
    (".*/b_qkv", r#"shard_dim("model", 1)"#),
    (".*/w_out", r#"shard_dim("model", 0)"#),
    (".*/w_up", r#"shard_dim("model", 1)"#),
    (".*/b_up", r#"shard_dim("model", 0)"#),
    (".*/w_down", r#"shard_dim("model", 0)"#),
    (".*", "replicate"),
];

/// Rules for the shardings in storage if the axis `data` has several devices: each stores a part of
/// the computed shard.
const STORED: [(&str, &str); 7] = [
    (".*/w_qkv", r#"shard_dim("model", 2)|fsdp("data", 0)"#),
    (".*/b_qkv", r#"shard_dim("model", 1)|fsdp("data", 0)"#),
    (".*/w_out", r#"shard_dim("model", 0)|fsdp("data", 0)"#),
    (".*/w_up", r#"shard_dim("model", 1)|fsdp("data", 0)"#),
    (".*/b_up", r#"shard_dim("model", 0)|fsdp("data", 0)"#),
    (".*/w_down", r#"shard_dim("model", 0)|fsdp("data", 0)"#),
    (".*", r#"fsdp("data", 0)"#),
];

/// The numbers of devices of a stage along the axes of its mesh.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Grid {
    /// Number of devices along [`DATA_AXIS`].
    pub data: usize,
    /// Number of devices along [`MODEL_AXIS`].
    pub model: usize,
}

/// The shardings of one stage's parameters, in the order of the stage's leaves.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The shardings in computation. `None` if the stage has no parameters.
    pub compute: Option<Inferred>,
    /// The shardings in storage, also of the optimiser's state. `None` if the stage has no
    /// parameters.
    pub stored: Option<Inferred>,
    grid: Grid,
}

impl Grid {
    /// Returns the number of devices of a stage.
    pub fn devices(&self) -> usize {
        self.data * self.model
    }

    /// Returns (name, number of devices) for each axis of a stage's mesh.
    pub fn axes(&self) -> [(&'static str, usize); 2] {
        [(DATA_AXIS, self.data), (MODEL_AXIS, self.model)]
    }

    /// Returns a mesh of this form for queries only: its devices do not belong to a program.
    ///
    /// # Errors
    ///
    /// If a size is zero.
    pub fn mesh(&self) -> Result<Mesh> {
        Ok(Mesh::new(&self.axes(), (0..self.devices() as u32).map(DeviceId).collect())?)
    }
}

impl Placement {
    /// Computes the shardings of the parameters of `part`, of dtype `dtype`, on a mesh with the
    /// axes of `grid`.
    ///
    /// `strategy` decides the storage by name (`blocks/3/w_qkv`). Without a strategy, parameters
    /// are stored as they are computed with. If [`DATA_AXIS`] has several devices, dimensions that
    /// divide evenly are also divided over it.
    ///
    /// # Errors
    ///
    /// If the strategy cannot be parsed, or if it divides a parameter unevenly. The message names
    /// the parameter.
    pub fn new(
        part: &Part,
        grid: Grid,
        mesh: &Mesh,
        dtype: DType,
        strategy: Option<&[Rule]>,
    ) -> Result<Self> {
        let shapes = part.shapes();
        let shapes = shapes.leaves().into_iter().map(|leaf| ShapedArray::new(&leaf.dims, dtype));
        let names = part.names().into_iter().map(|name| name.replace('.', "/"));
        let leaves: Vec<(String, ShapedArray)> = names.zip(shapes).collect();
        let compute = inferred(&leaves, &COMPUTE, mesh)?;
        let stored = match strategy {
            Some(strategy) => inferred(&leaves, strategy, mesh)?,
            None if grid.data > 1 => inferred(&leaves, &STORED, mesh)?,
            None => compute.clone(),
        };
        Ok(Self { compute, stored, grid })
    }

    /// Returns the shardings of the stored parameters. The list is empty if the stage has no
    /// parameters.
    pub fn shardings(&self) -> Vec<Sharding> {
        self.stored.iter().flat_map(Inferred::shardings).collect()
    }

    /// Returns the shardings in which kernels compute, for [`mpmd::pipeline::Pipeline::store`].
    /// `None` if the parameters are stored and computed with in the same shardings and the axis
    /// `data` has one device.
    ///
    /// # Errors
    ///
    /// If kernels compute with a parameter that is divided over [`DATA_AXIS`].
    pub fn storage(&self) -> Result<Option<ParamSharding>> {
        let compute: Vec<Sharding> = self.compute.iter().flat_map(Inferred::shardings).collect();
        let storage = ParamSharding::new(compute.clone());
        if self.grid.data > 1 {
            return storage.partial_over(&[DATA_AXIS]).map(Some);
        }
        Ok((compute != self.shardings()).then_some(storage))
    }
}

fn inferred<P: AsRef<str>, T: AsRef<str>>(
    leaves: &[(String, ShapedArray)],
    rules: &[(P, T)],
    mesh: &Mesh,
) -> Result<Option<Inferred>> {
    if leaves.is_empty() {
        return Ok(None);
    }
    let wrong = |error: &dyn std::fmt::Display| {
        Error::kernel(format!("the sharding of parameters: {error}"))
    };
    let strategy = Strategy::parse(rules, &Registry::default()).map_err(|error| wrong(&error))?;
    let inferred = infer(leaves, &strategy, mesh).map_err(|error| wrong(&error))?;
    match inferred.leaves().iter().find(|leaf| leaf.uneven) {
        None => Ok(Some(inferred)),
        Some(leaf) => Err(wrong(&format!(
            "{} {} does not divide evenly as {} on {mesh}",
            leaf.name, leaf.aval, leaf.spec
        ))),
    }
}

#[cfg(test)]
mod tests {
    use mpmd::sharding::{Spec, SpecEntry};

    use super::*;
    use crate::gpt::params::Model;
    use crate::gpt::shape::spec_of;

    const MODEL: Model = Model { layers: 2, width: 8, heads: 2, hidden: 12, time: 6 };

    fn placement(grid: Grid, strategy: Option<&[Rule]>) -> Result<Placement> {
        let part = MODEL.parts(1)?[0];
        Placement::new(&part, grid, &grid.mesh()?, DType::F32, strategy)
    }

    /// Returns the entries of `spec` without trailing `None`s.
    fn trimmed(spec: &Spec) -> Vec<SpecEntry> {
        let mut entries = spec.entries().to_vec();
        while entries.last() == Some(&SpecEntry::None) {
            entries.pop();
        }
        entries
    }

    #[test]
    fn computed_shardings_match_the_shapes_of_kernels() {
        let placement = placement(Grid { data: 2, model: 2 }, None).unwrap();
        let shapes = MODEL.parts(1).unwrap()[0].shapes();
        for (leaf, shape) in placement.compute.unwrap().leaves().iter().zip(shapes.leaves()) {
            assert_eq!(trimmed(&leaf.spec), trimmed(&spec_of(shape)), "{}", leaf.name);
        }
    }

    #[test]
    fn each_device_stores_about_an_equal_part() {
        let bytes = |data, model| {
            let placement = placement(Grid { data, model }, None).unwrap();
            (
                placement.compute.unwrap().bytes_per_device(),
                placement.stored.unwrap().bytes_per_device(),
            )
        };
        let (whole, stored) = bytes(1, 1);
        assert_eq!((whole, stored), (4 * MODEL.parameters() as u64, whole));
        for (data, model) in [(2, 1), (4, 1), (2, 2)] {
            let (compute, stored) = bytes(data, model);
            let part = compute as f64 / data as f64;
            assert!(
                stored as f64 >= part && (stored as f64) < 1.1 * part,
                "{data}, {model}: {stored} {part}"
            );
        }
        assert!(placement(Grid { data: 1, model: 2 }, None).unwrap().storage().unwrap().is_none());
        assert!(placement(Grid { data: 2, model: 1 }, None).unwrap().storage().unwrap().is_some());
    }

    #[test]
    fn user_strategy_is_applied_and_its_errors_name_the_parameter() {
        let rule = |pattern: &str, tactic: &str| vec![(pattern.to_owned(), tactic.to_owned())];
        let grid = Grid { data: 1, model: 2 };
        let placed =
            placement(grid, Some(&rule(".*/w_.*", r#"fsdp(["data", "model"], 0)"#))).unwrap();
        assert!(placed.storage().unwrap().is_some());
        assert!(placed.stored.unwrap().leaves().iter().any(|leaf| leaf.spec != Spec::default()));
        let error = |rules: &[Rule]| {
            placement(Grid { data: 2, model: 1 }, Some(rules)).unwrap_err().to_string()
        };
        let uneven = error(&rule(".*/b_qkv", r#"shard_dim("data", 0)"#));
        assert!(uneven.contains("blocks/0/b_qkv") && uneven.contains("evenly"), "{uneven}");
        let unknown = error(&rule(".*", "scatter"));
        assert!(
            unknown.contains("sharding of parameters") && unknown.contains("`scatter`"),
            "{unknown}"
        );
    }
}
