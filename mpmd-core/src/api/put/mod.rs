//! Moving arrays: `device_put`, and creation of arrays on their owners.
//!
//! [`Program::device_put`] checks and plans all leaves first, then issues one or two operations for
//! each, or one for several small leaves. This process's part of a move is in `PutPlan`.

mod array_from_fn;
mod join;
mod options;
mod plan;
mod vjp;

use std::panic::Location;
use std::sync::Arc;

use crate::api::program::{Again, IssuedOp, NewOp, OpPart, Program, Replayed};
use crate::error::{IssueProblem, Result};
use crate::exec::array::{ArraySends, MpmdArray, Origin, Placed, Repr};
use crate::exec::{AsyncBuffer, OpGuard, PutPlan, PutSource};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Tree};
pub use options::MoveOptions;
pub(crate) use plan::PutSteps;
pub use vjp::PutVjp;

impl Program {
    /// Moves every array of a tree to a sharding.
    ///
    /// Each process derives its own part from the ownership of regions: nothing, a local copy,
    /// sends, receives, or any mix. Any sharding moves to any other, on any devices. Returns
    /// without waiting for the move, but may block while the program is too far ahead or memory is
    /// short. `to` is one sharding for all leaves, or a tree of shardings that is a prefix of `x`.
    ///
    /// An uncommitted array has the same values on every process, so placing it sends no message.
    ///
    /// Partial sums are added up, unless the target has the same layout. The terms are added in the
    /// order of the unreduced axes and in the array's dtype, so the bits do not depend on timing.
    /// Large partial sums with several target devices take two operations: each device adds up a
    /// part, then the parts are gathered. If the target has unreduced axes, the first partial sum
    /// gets the values and the others get zeros, `-0.0` for floats, so that the sum has the bits of
    /// the values.
    ///
    /// # Errors
    ///
    /// If a sharding does not fit its array, the prefix does not fit the tree, or an array was
    /// donated. If partial sums of booleans would have to be added up. The error is the same on
    /// every process, and nothing is moved.
    #[track_caller]
    pub fn device_put<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
    ) -> Result<T::With<MpmdArray>> {
        let at = self.caller(Location::caller());
        self.put_at(x, &to.into(), MoveOptions::default(), at)
    }

    /// Moves every array of a tree to a sharding, as [`Program::device_put`] does. `options` sets
    /// whether to donate the sources, share memory and cache plans.
    ///
    /// # Errors
    ///
    /// The errors of [`Program::device_put`].
    #[track_caller]
    pub fn device_put_with<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
        options: MoveOptions,
    ) -> Result<T::With<MpmdArray>> {
        let at = self.caller(Location::caller());
        self.put_at(x, &to.into(), options, at)
    }

    pub(crate) fn put_at<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: &PrefixTree<Sharding>,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> Result<T::With<MpmdArray>> {
        let wrong = |problem: IssueProblem| problem.at(at, "device_put");
        let shardings = to
            .broadcast(&x.structure())
            .map_err(|error| wrong(IssueProblem::Tree(error)))?;
        let leaves = x.leaves_with_paths();

        // All leaves are checked before any is moved.
        let mut plans = Vec::with_capacity(leaves.len());
        for ((path, array), sharding) in leaves.iter().zip(&shardings) {
            array.check_usable(path).map_err(wrong)?;
            plans.push(
                self.put_steps(path, array, sharding, options.cache_plans)
                    .map_err(wrong)?,
            );
        }
        if options.donate {
            refuse_twice(&leaves).map_err(wrong)?;
            self.check_given_up(&leaves).map_err(wrong)?;
        }

        let moves: Vec<_> = leaves.iter().map(|(_, array)| *array).zip(&plans).collect();
        let moved = self.put_all(&moves, options, at);
        self.synced(at)?;
        let mut moved = moved.into_iter();
        Ok(x.map_ref(&mut |_| moved.next().expect("one result for each leaf")))
    }

    /// Moves each array to the sharding in its pair, as [`Program::device_put`] does for a list.
    #[track_caller]
    pub(crate) fn put_list(&mut self, moves: &[(&MpmdArray, &Sharding)]) -> Result<Vec<MpmdArray>> {
        let at = self.caller(Location::caller());
        let mut plans = Vec::with_capacity(moves.len());
        for (index, (array, to)) in moves.iter().enumerate() {
            let plan = array
                .check_usable("")
                .and_then(|()| self.put_steps("", array, to, true));
            plans.push(plan.map_err(|mut problem| {
                if let Some(path) = problem.path_mut() {
                    *path = index.to_string();
                }
                problem.at(at, "device_put")
            })?);
        }
        let moves: Vec<_> = moves.iter().map(|(array, _)| *array).zip(&plans).collect();
        let moved = self.put_all(&moves, MoveOptions::default(), at);
        self.synced(at)?;
        Ok(moved)
    }

    /// Issues the planned moves of arrays and returns handles to the results. [Joins](join) the
    /// moves of small arrays between the same devices into one operation.
    pub(crate) fn put_all(
        &mut self,
        moves: &[(&MpmdArray, &PutSteps)],
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        if let [(array, steps)] = moves {
            return vec![self.put_along(array, steps, options, at)];
        }
        let all: Vec<&MpmdArray> = moves.iter().map(|(array, _)| *array).collect();
        let mut moved: Vec<Option<MpmdArray>> = vec![None; moves.len()];
        self.as_one_call(&all, |program| {
            for joined in join::groups(moves) {
                if let [alone] = joined[..] {
                    let (array, steps) = moves[alone];
                    moved[alone] = Some(program.put_along(array, steps, options, at));
                    continue;
                }

                let arrays: Vec<&MpmdArray> = joined.iter().map(|place| all[*place]).collect();
                let plans: Vec<_> = joined
                    .iter()
                    .map(|place| moves[*place].1.last.clone())
                    .collect();
                let mut made = Vec::with_capacity(joined.len());
                let call = PutCall {
                    arrays: &arrays,
                    plans: &plans,
                    options,
                    before: None,
                    at,
                };
                program.issue_put(call, None, &mut made);
                joined
                    .into_iter()
                    .zip(made)
                    .for_each(|(place, array)| moved[place] = Some(array));
            }
        });

        moved
            .into_iter()
            .map(|array| array.expect("every array is in one group"))
            .collect()
    }

    /// Issues the planned move of `array`, as one operation or two, and returns a handle to the
    /// result.
    pub(crate) fn put_along(
        &mut self,
        array: &MpmdArray,
        steps: &PutSteps,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let Some(first) = &steps.first else {
            return self.put_one(array, &steps.last, options, None, at);
        };
        let summed = self.put_one(array, first, options, None, at);

        // The intermediate array has no other handle, so it can be donated.
        let last = MoveOptions::default().donate(true);
        self.put_one(&summed, &steps.last, last, Some(&summed), at)
    }

    /// Issues the planned move of `array` as one operation and returns a handle to the result. If
    /// the move has an earlier step with result `before`, it completes only after that step's
    /// sends.
    pub(crate) fn put_one(
        &mut self,
        array: &MpmdArray,
        plan: &Arc<PutPlan>,
        options: MoveOptions,
        before: Option<&MpmdArray>,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let mut moved = Vec::with_capacity(1);
        let call = PutCall {
            arrays: &[array],
            plans: std::slice::from_ref(plan),
            options,
            before,
            at,
        };
        self.issue_put(call, None, &mut moved);
        moved.pop().expect("one was moved")
    }

    /// Issues a move of arrays by their plans as one operation, or issues it again in a replay.
    /// Starts this process's part, and releases the local shards of donated sources. Appends
    /// handles to the results to `moved`.
    fn issue_put(
        &mut self,
        call: PutCall<'_>,
        replayed: Option<Replayed<'_>>,
        moved: &mut Vec<MpmdArray>,
    ) {
        let PutCall {
            arrays,
            plans,
            options,
            before,
            at,
        } = call;
        let MoveOptions {
            donate, may_alias, ..
        } = options;
        let flags = u64::from(donate) | u64::from(may_alias) << 1;
        let dry_run = self.is_dry_run();
        let is_idle = plans.iter().all(|plan| plan.is_idle());
        let again = || {
            // A process that holds a shard of a donated source must release it, even if it takes no
            // other part in the move.
            let lets_go = donate && arrays.iter().any(|array| !array.shards().is_empty());
            let here = lets_go || !is_idle || dry_run;
            let plans = plans.to_vec();
            let continues = before.is_some();
            here.then(|| {
                Arc::new(PutAgain {
                    plans,
                    options,
                    continues,
                }) as Arc<dyn Again>
            })
        };
        let words = arrays.iter().zip(plans).flat_map(|(array, plan)| {
            let (source, leaf) = array.origin().unwrap_or_default();
            [0x9a7, plan.fingerprint, flags, source, u64::from(leaf)]
        });
        let known = match plans {
            [plan] => Some(&plan.known_descriptors[usize::from(may_alias)]),
            _ => None,
        };

        let IssuedOp { op, guard } = self.issue_op(
            words,
            NewOp {
                part: match is_idle {
                    true => OpPart::Idle,
                    false => OpPart::Work(plans.iter().map(|plan| plan.bytes()).sum()),
                },
                takes: arrays,
                donates: &|_| donate,
                source: arrays[0].origin().map(|(op, _)| op),
                known,
                again: &again,
                replayed,
                ..NewOp::new(at, &|| join::what(plans), &|| {
                    join::descriptor(plans, may_alias)
                })
            },
        );
        self.start_put(&call, op, guard, moved);
    }

    /// Starts this process's part of the issued move `op`, and appends handles to the results to
    /// `moved`.
    fn start_put(
        &self,
        call: &PutCall<'_>,
        op: u64,
        guard: Option<OpGuard>,
        moved: &mut Vec<MpmdArray>,
    ) {
        let PutCall {
            arrays,
            plans,
            options,
            before,
            at,
        } = *call;
        let runtime = self.runtime.clone();
        let guards: Vec<OpGuard> = match (&guard, plans) {
            (None, _) => Vec::new(),
            (Some(guard), [_]) => vec![guard.clone()],
            (Some(guard), _) => (0..plans.len() as u32)
                .map(|i| guard.of_result(i))
                .collect(),
        };

        let parts = || arrays.iter().zip(plans).zip(&guards);
        let send = |((array, plan), guard): ((&&MpmdArray, &Arc<PutPlan>), &OpGuard)| {
            plan.send(&runtime, guard, &source_of(array))
        };
        let left: Vec<Option<AsyncBuffer>> = runtime.send_together(|| parts().map(send).collect());
        let mut left = left.into_iter();

        for (leaf, (array, plan)) in arrays.iter().zip(plans).enumerate() {
            let guard = guards.get(leaf);
            let receive =
                |guard| plan.receive(&runtime, guard, &source_of(array), options.may_alias);
            let shards = guard.map_or_else(Vec::new, receive);
            if options.donate
                && let Repr::Placed(placed) = &array.repr
            {
                placed.donate(op, at);
                let failure = placed.donated_failure();
                for shard in placed.shards.iter() {
                    // Takes effect after every use that was issued before: each of them has
                    // registered with the slot.
                    shard.slot.give_up(failure.clone());
                }
            }

            let before = before.and_then(MpmdArray::sends).cloned();
            let sends = match left.next().flatten() {
                Some(left) => Some(ArraySends {
                    op,
                    left,
                    before: before.map(Box::new),
                }),
                None => before,
            };
            let origin = Origin {
                op,
                leaf: leaf as u32,
                at,
            };
            moved.push(Placed::array_after(
                sends,
                plan.made.clone(),
                shards,
                origin,
            ));
        }
    }
}

/// The arrays, plans and options of a move that is issued as one operation.
#[derive(Clone, Copy)]
struct PutCall<'a> {
    arrays: &'a [&'a MpmdArray],
    /// The plan of each array.
    plans: &'a [Arc<PutPlan>],
    options: MoveOptions,
    /// The result of the move's earlier step, if there is one: this step completes only after its
    /// sends. Only a move of a single array has two steps.
    before: Option<&'a MpmdArray>,
    at: &'static Location<'static>,
}

fn source_of(array: &MpmdArray) -> PutSource<'_> {
    match &array.repr {
        Repr::Host(host) => PutSource::Host(host),
        Repr::Placed(placed) => PutSource::Shards(&placed.shards),
    }
}

/// A captured move, which a replay issues again on other arrays.
struct PutAgain {
    plans: Vec<Arc<PutPlan>>,
    options: MoveOptions,
    /// True if the source is the result of an earlier step of the same move.
    continues: bool,
}

impl Again for PutAgain {
    fn again(
        self: Arc<Self>,
        program: &mut Program,
        x: &[&MpmdArray],
        replayed: Replayed<'_>,
        at: &'static Location<'static>,
        made: &mut Vec<MpmdArray>,
    ) {
        let call = PutCall {
            arrays: x,
            plans: &self.plans,
            options: self.options,
            before: x.first().copied().filter(|_| self.continues),
            at,
        };
        program.issue_put(call, Some(replayed), made);
    }
}

/// Returns an error if two of these leaves are the same array, which cannot be donated twice.
pub(crate) fn refuse_twice(
    leaves: &[(String, &MpmdArray)],
) -> std::result::Result<(), IssueProblem> {
    let twin = |j: usize| {
        leaves[..j]
            .iter()
            .position(|(_, leaf)| leaf.is_same(leaves[j].1))
    };
    match (1..leaves.len()).find_map(|j| Some((twin(j)?, j))) {
        None => Ok(()),
        Some((first, second)) => {
            let first = &leaves[first].0;
            let second = &leaves[second].0;
            let problem = format!("{second:?} is donated, and is the same array as {first:?}");
            Err(IssueProblem::Signature(problem))
        }
    }
}
