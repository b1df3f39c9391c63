//! Plans of moves: checked, made, and looked up in the plan cache.

use std::sync::Arc;

use crate::api::program::{Program, PutKey};
use crate::error::IssueProblem;
use crate::exec::array::{MpmdArray, Repr};
use crate::exec::{PutPlan, SourceLayout};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::reshard::scattered;
use mpmd_layout::sharding::{Layout, Sharding};

/// The one or two plans that move an array, in order.
pub(crate) struct PutSteps {
    /// The plan of the first step of two, which adds up partial sums so that each device has a part
    /// of the sum. `None` if one step is enough.
    pub(super) first: Option<Arc<PutPlan>>,
    pub(super) last: Arc<PutPlan>,
}

impl Program {
    /// Returns the plans that move an array to a sharding. With `cache`, looks them up in the plan
    /// cache and stores new ones in it. Fails if the sharding does not fit the array.
    pub(crate) fn put_steps(
        &mut self,
        path: &str,
        array: &MpmdArray,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<PutSteps, IssueProblem> {
        if array.aval().is_object() {
            let leaf = crate::error::leaf(path);
            return Err(IssueProblem::Signature(format!(
                "{leaf}it is an object, which does not leave its devices: move arrays that a \
                 method makes of it"
            )));
        }

        // This direct plan reports all mistakes, also if the array moves in two steps.
        let last = self.put_plan(path, array, to, cache)?;
        let sums = array
            .sharding()
            .filter(|from| !from.unreduced_axes().is_empty() && *from != to);
        let through = sums.and_then(|from| {
            scattered(from, array.shape(), &last.made.layout, array.dtype().size())
        });

        let Some(through) = through else {
            return Ok(PutSteps { first: None, last });
        };
        let first = self.put_plan(path, array, &through, cache)?;
        let last = self.put_plan_between(path, array.aval(), Some(&through), to, cache)?;
        Ok(PutSteps {
            first: Some(first),
            last,
        })
    }

    /// Returns the plan of the direct move of an array to a sharding. With `cache`, looks it up in
    /// the plan cache and stores a new one in it. Fails if the array belongs to another program or
    /// does not fit the sharding.
    pub(crate) fn put_plan(
        &mut self,
        path: &str,
        array: &MpmdArray,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<Arc<PutPlan>, IssueProblem> {
        if let Repr::Placed(placed) = &array.repr
            && !Arc::ptr_eq(&placed.made.runtime, &self.runtime)
        {
            return Err(IssueProblem::Foreign {
                path: path.to_owned(),
            });
        }
        self.put_plan_between(path, array.aval(), array.sharding(), to, cache)
    }

    /// Returns the plan of the direct move between two shardings, for arrays of this shape and
    /// dtype. No such array need exist. `from` is `None` for host values. With `cache`, uses the
    /// plan cache.
    pub(crate) fn put_plan_between(
        &mut self,
        path: &str,
        aval: &ShapedArray,
        from: Option<&Sharding>,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<Arc<PutPlan>, IssueProblem> {
        let wrong = |why| IssueProblem::Sharding {
            path: path.to_owned(),
            why,
        };
        let key = PutKey {
            aval: aval.clone(),
            from: from.cloned(),
            to: to.clone(),
        };
        if cache && let Some(plan) = self.put_plans.get(&key) {
            return Ok(plan);
        }

        to.check_devices(&self.runtime.topology).map_err(wrong)?;
        let layout = to.layout(aval.shape()).map_err(wrong)?;
        let source = from
            .map(|from| from.layout(aval.shape()))
            .transpose()
            .map_err(wrong)?;
        let from = from.zip(source.as_deref());
        check_partial_sums(path, aval, from, &layout)?;

        let from = from.map(|(sharding, layout)| SourceLayout { sharding, layout });
        let plan = PutPlan::new(&self.runtime, aval, from, to, layout)
            .map_err(|error| IssueProblem::Signature(error.to_string()))?;
        let plan = Arc::new(plan);
        if cache {
            self.put_plans.insert(key, plan.clone());
        }
        Ok(plan)
    }
}

/// Returns an error for a move that would have to add up partial sums of booleans.
fn check_partial_sums(
    path: &str,
    aval: &ShapedArray,
    from: Option<(&Sharding, &Layout)>,
    to: &Layout,
) -> std::result::Result<(), IssueProblem> {
    let Some((from, layout)) = from else {
        return Ok(());
    };
    if from.unreduced_axes().is_empty() || layout == to || aval.dtype() != DType::Bool {
        return Ok(());
    }

    let leaf = if path.is_empty() {
        String::new()
    } else {
        format!("{path:?}: ")
    };
    Err(IssueProblem::Signature(format!(
        "{leaf}partial sums of booleans cannot be added up: {aval} as {from}"
    )))
}
