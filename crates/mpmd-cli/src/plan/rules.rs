//! `mpmd plan rules`: infers the specs that a strategy gives to the leaves of a tree.

use std::collections::BTreeMap;

use mpmd_base::DeviceId;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::rules::{LogicalAxes, Registry, Strategy, infer};
use mpmd_layout::topology::Mesh;
use serde_json::json;

use super::case::{read_axes, spec_json};
use super::field::{Field, Malformed};
use super::refusal::CaseRefusal;

/// Maximum number of devices of a mesh that a case gives by its sizes. The planner has the same
/// limit.
const MOST_DEVICES: usize = 1 << 20;

/// The case `{mesh: [[axis, size], …], params, strategy: [[pattern, tactic], …], rules?: [[name,
/// axes], …], names?: [[pattern, names], …], state?: [[branch, params], …]}`, read and not yet
/// checked.
#[derive(Debug)]
pub(super) struct RulesCase {
    mesh: Vec<(String, usize)>,
    leaves: Vec<CaseLeaf>,
    strategy: Vec<(String, String)>,
    rules: Vec<(String, Vec<String>)>,
    /// Logical names of dimensions, as (pattern of leaf names, names). The names hold for leaves
    /// that match the pattern.
    names: Vec<(String, Vec<Option<String>>)>,
    /// Pairs of (branch of the state, branch of the parameters with the same specs).
    state: Vec<(String, String)>,
}

/// A leaf `{shape, dtype, names?}` of `params`. `name` is its path in the tree.
#[derive(Debug)]
struct CaseLeaf {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    /// Logical names of the dimensions; `None` for a dimension without a name.
    names: Option<Vec<Option<String>>>,
}

impl RulesCase {
    /// Names of the fields of a case and of its answer.
    pub(super) const FIELDS: [&str; 8] = [
        "mesh", "params", "strategy", "rules", "names", "state", "specs", "notes",
    ];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let axis = |field: &Field<'_>| {
            let [axis, size] = field.pair()?;
            Ok((axis.text()?, size.count()?))
        };
        let rule = |field: &Field<'_>| {
            let [pattern, tactic] = field.pair()?;
            Ok((pattern.text()?, tactic.text()?))
        };
        let logical = |field: &Field<'_>| {
            let [name, axes] = field.pair()?;
            Ok((name.text()?, read_axes(&axes)?))
        };
        let names = |field: &Field<'_>| {
            let [pattern, names] = field.pair()?;
            Ok((pattern.text()?, names.list(logical_name)?))
        };
        let branches = |field: &Field<'_>| {
            let [state, params] = field.pair()?;
            Ok((state.text()?, params.text()?))
        };

        let mut leaves = Vec::new();
        read_leaves(&field.get("params")?, String::new(), &mut leaves)?;
        Ok(Self {
            mesh: field.get("mesh")?.list(axis)?,
            leaves,
            strategy: field.get("strategy")?.list(rule)?,
            rules: field
                .find("rules")?
                .map(|rules| rules.list(logical))
                .transpose()?
                .unwrap_or_default(),
            names: field
                .find("names")?
                .map(|all| all.list(names))
                .transpose()?
                .unwrap_or_default(),
            state: field
                .find("state")?
                .map(|state| state.list(branches))
                .transpose()?
                .unwrap_or_default(),
        })
    }

    /// Infers the specs of all leaves. Returns a refusal if the values of the case are invalid.
    pub(super) fn answer(self) -> Result<String, CaseRefusal> {
        let mesh = mesh(&self.mesh).map_err(|refusal| refusal.of("mesh"))?;
        let mut logical = LogicalAxes::default();
        let mut leaves: Vec<(String, ShapedArray)> = Vec::with_capacity(self.leaves.len());
        for leaf in &self.leaves {
            let aval = leaf
                .aval()
                .map_err(|refusal| refusal.of(&format!("leaf `{}`", leaf.name)))?;
            leaves.push((leaf.name.clone(), aval));
            if let Some(names) = &leaf.names {
                logical = logical.leaf(leaf.name.as_str(), &borrowed(names));
            }
        }

        for (pattern, names) in &self.names {
            logical = logical.pattern(pattern, &borrowed(names))?;
        }

        let mut names: Vec<&String> = leaves.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CaseRefusal::new(
                "duplicate_leaf",
                format!("two leaves are named `{}`", pair[0]),
            ));
        }

        for (name, axes) in &self.rules {
            let axes: Vec<&str> = axes.iter().map(String::as_str).collect();
            logical = logical.rule(name.as_str(), &axes);
        }

        let mut strategy = Strategy::parse(&self.strategy, &Registry::default())?;
        for (state, params) in &self.state {
            strategy = strategy.with_state(state, params);
        }
        let strategy = strategy.with_logical(logical);

        // The notes are in the answer: the log would only repeat those that warn.
        let silent = tracing::subscriber::NoSubscriber::new();
        let inferred =
            tracing::subscriber::with_default(silent, || infer(&leaves, &strategy, &mesh))?;

        let leaves = || inferred.leaves().iter();
        let specs: BTreeMap<_, _> = leaves()
            .map(|leaf| (leaf.name.as_str(), spec_json(&leaf.spec)))
            .collect();
        let notes: BTreeMap<_, _> = leaves()
            .filter(|leaf| !leaf.notes.is_empty())
            .map(|leaf| (leaf.name.as_str(), &leaf.notes))
            .collect();

        Ok(json!({ "specs": specs, "notes": notes }).to_string())
    }
}

impl CaseLeaf {
    fn aval(&self) -> Result<ShapedArray, CaseRefusal> {
        Ok(ShapedArray::try_new(&self.shape, self.dtype.parse()?)?)
    }
}

/// Collects the leaves below `field`, which is a leaf, a list or an object. `name` is its path, as
/// `a/0`. Fields of an object are in the order of their names, elements of a list by index.
fn read_leaves(
    field: &Field<'_>,
    name: String,
    leaves: &mut Vec<CaseLeaf>,
) -> Result<(), Malformed> {
    let below = |key: &str| {
        if name.is_empty() {
            key.to_owned()
        } else {
            format!("{name}/{key}")
        }
    };

    if let Some(elements) = field.elements() {
        let mut each = elements.iter().enumerate();
        return each
            .try_for_each(|(i, element)| read_leaves(element, below(&i.to_string()), leaves));
    }

    let Some(entries) = field.entries() else {
        return Err(field.expected("a leaf {shape, dtype}, or a list or an object of them"));
    };

    // A tree may have branches with these names.
    let entry = |key: &str| {
        entries
            .iter()
            .find(|(name, _)| *name == key)
            .map(|(_, field)| field)
    };
    if let (Some(shape), Some(dtype)) = (entry("shape"), entry("dtype"))
        && dtype.as_text().is_some()
    {
        field.only(&["shape", "dtype", "names"])?;
        let names = field
            .find("names")?
            .map(|names| names.list(logical_name))
            .transpose()?;
        leaves.push(CaseLeaf {
            name,
            shape: shape.list(Field::count)?,
            dtype: dtype.text()?,
            names,
        });
        return Ok(());
    }
    entries
        .iter()
        .try_for_each(|(key, field)| read_leaves(field, below(key), leaves))
}

fn logical_name(field: &Field<'_>) -> Result<Option<String>, Malformed> {
    if field.is_null() {
        Ok(None)
    } else {
        field.text().map(Some)
    }
}

fn borrowed(names: &[Option<String>]) -> Vec<Option<&str>> {
    names.iter().map(Option::as_deref).collect()
}

fn mesh(axes: &[(String, usize)]) -> Result<Mesh, CaseRefusal> {
    let devices = axes
        .iter()
        .fold(1usize, |product, (_, size)| product.saturating_mul(*size));
    if devices > MOST_DEVICES {
        let message = format!("{devices} devices are too many: at most {MOST_DEVICES}");
        return Err(CaseRefusal::new("too_large", message));
    }

    let axes: Vec<(&str, usize)> = axes
        .iter()
        .map(|(axis, size)| (axis.as_str(), *size))
        .collect();
    Ok(Mesh::new(
        &axes,
        (0..devices as u32).map(DeviceId).collect(),
    )?)
}
