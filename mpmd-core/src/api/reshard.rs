//! Moving whole trees: [`Program::reshard`] issues the leaves in groups by source devices.
//! [`Program::reshard_with_intermediate_sharding`] also moves them by way of an intermediate
//! sharding.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::api::program::{Program, PutKey};
use crate::api::put::{MoveOptions, PutSteps, refuse_twice};
use crate::api::split::{Relabel, Relabelled};
use crate::error::{Error, IssueProblem, Result};
use crate::exec::PutPlan;
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::reshard::{Intermediate, cheapest_intermediate, groups_by_devices};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Structure, Tree};

/// A function of the caller that moves arrays, given as (array, target), and returns the moved
/// arrays in order.
type MoveFn<'a> =
    dyn FnMut(&mut Program, &[(&MpmdArray, &Sharding)]) -> Result<Vec<MpmdArray>> + 'a;

/// The steps that move one array to its target.
enum LeafRoute {
    Direct(PutSteps),
    Via(Box<IntermediateRoute>),
}

/// The route through an intermediate sharding: gathers replicas on the source's devices, then moves
/// one replica to the target.
struct IntermediateRoute {
    /// The intermediate sharding.
    between: Sharding,
    gather: Arc<PutPlan>,
    replica: Relabelled,
    onward: Arc<PutPlan>,
}

/// The routes and targets of all leaves of a tree, in leaf order.
struct LeafRoutes {
    routes: Vec<LeafRoute>,
    to: Vec<Sharding>,
}

/// The key and result of the last search for an intermediate sharding.
struct LastSearch {
    key: PutKey,
    found: Option<Intermediate>,
}

impl Program {
    /// Moves every array of a tree to a sharding, grouped by source devices.
    ///
    /// `to` is one sharding for all leaves, or a tree of shardings that is a prefix of `x`. The
    /// results equal those of [`Program::device_put`], but the moves are issued in another order.
    /// Uncommitted arrays come first, then the others in groups on the same devices. So moves that
    /// share links are issued together. Returns without waiting for the moves.
    ///
    /// # Errors
    ///
    /// If the prefix does not fit the tree, a sharding does not fit its array, or an array was
    /// donated. If an array is donated twice by this call. The error is the same on every process
    /// and names the leaf's path. All leaves are checked before any is moved.
    #[track_caller]
    pub fn reshard<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
        options: MoveOptions,
    ) -> Result<T::With<MpmdArray>> {
        self.reshard_at(x, None, to.into(), options, Location::caller(), "reshard")
    }

    /// Moves every array of a tree to a sharding by a function of the caller, in the groups and
    /// order of [`Program::reshard`].
    ///
    /// `with` is called once for each group of arrays on the same devices, with (array, target) of
    /// each. It returns the moved arrays in order. For instance, it moves them by way of a sharding
    /// of its own or by a `jit` kernel. Uncommitted arrays are placed without calling `with`. All
    /// processes must make the same call.
    ///
    /// # Errors
    ///
    /// If the prefix does not fit the tree, a sharding does not fit its array, or an array was
    /// donated. The errors of `with`. If it returns another number of arrays, or one with another
    /// shape, dtype or sharding than asked for.
    #[track_caller]
    pub fn reshard_with<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
        mut with: impl FnMut(&mut Self, &[(&MpmdArray, &Sharding)]) -> Result<Vec<MpmdArray>>,
    ) -> Result<T::With<MpmdArray>> {
        let at = Location::caller();
        let wrong = |problem: IssueProblem| problem.at(at, "reshard_with");
        let to = to
            .into()
            .broadcast(&x.structure())
            .map_err(|error| wrong(IssueProblem::Tree(error)))?;

        let leaves = x.leaves_with_paths();
        for ((path, array), to) in leaves.iter().zip(&to) {
            array
                .check_usable(path)
                .and_then(|()| self.check_own(path, array))
                .map_err(wrong)?;
            let unfit = |why| {
                wrong(IssueProblem::Sharding {
                    path: path.clone(),
                    why,
                })
            };
            to.layout(array.shape()).map_err(unfit)?;
        }

        let moves: Vec<_> = leaves.iter().map(|(_, array)| *array).zip(&to).collect();
        let mut moved = self.move_groups(&moves, &mut with, wrong)?.into_iter();
        Ok(x.map_ref(&mut |_| moved.next().expect("every leaf is in one group")))
    }

    /// Moves (array, target) pairs by calling `with` for one group on the same devices after
    /// another. Returns the results in the order of `moves`. Returns the error of `wrong` if `with`
    /// returns other arrays than requested.
    #[track_caller]
    fn move_groups(
        &mut self,
        moves: &[(&MpmdArray, &Sharding)],
        with: &mut MoveFn<'_>,
        wrong: impl Copy + Fn(IssueProblem) -> Error,
    ) -> Result<Vec<MpmdArray>> {
        let groups = groups_by_devices(
            moves
                .iter()
                .map(|(array, _)| Some(array.sharding()?.devices())),
        );

        let mut moved: Vec<Option<MpmdArray>> = vec![None; moves.len()];
        for group in groups {
            let moves: Vec<_> = group.iter().map(|place| moves[*place]).collect();
            let results = match moves.first() {
                Some((array, _)) if array.sharding().is_none() => self.put_list(&moves)?,
                _ => with(self, &moves)?,
            };
            if let Some(problem) = misfit(&moves, &results) {
                return Err(wrong(IssueProblem::Signature(problem)));
            }

            group
                .into_iter()
                .zip(results)
                .for_each(|(place, y)| moved[place] = Some(y));
        }
        Ok(moved.into_iter().flatten().collect())
    }

    /// Moves every array of a tree to a sharding, as [`Program::reshard`] does. Each leaf goes by
    /// way of an [intermediate sharding](cheapest_intermediate) if there is one between its
    /// shardings in `from` and `to`.
    ///
    /// The array is first put to the intermediate sharding on its own devices. One replica of it,
    /// on some of these devices, then moves to the target. So the two sides exchange few and large
    /// pieces. In return, every source device temporarily holds a larger part of the array,
    /// gathered along the cut axes. This is the whole array, or one of as many parts as the target
    /// has, whichever moves fewer bytes.
    ///
    /// This never moves fewer bytes than `reshard`, and moves more over the network if the source
    /// spans hosts. With [`MoveOptions::donate`] the source is freed as soon as it has been
    /// gathered. Uncommitted leaves and leaves without an intermediate sharding move as in
    /// [`Program::reshard`].
    ///
    /// Like `to`, `from` is one sharding or a prefix tree of shardings. It may write a leaf's
    /// sharding in another form, such as `P(x, None)` for `P(x)`. Every device must then hold the
    /// same region, and the devices must be in the same order.
    ///
    /// # Errors
    ///
    /// The errors of [`Program::reshard`], and an error if a leaf is not sharded as `from` says.
    #[track_caller]
    pub fn reshard_with_intermediate_sharding<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        from: impl Into<PrefixTree<Sharding>>,
        to: impl Into<PrefixTree<Sharding>>,
        options: MoveOptions,
    ) -> Result<T::With<MpmdArray>> {
        let call = "reshard_with_intermediate_sharding";
        let at = Location::caller();
        self.reshard_at(x, Some(from.into()), to.into(), options, at, call)
    }

    /// Moves every array of a tree to a sharding as [`Program::reshard_with_intermediate_sharding`]
    /// does. The caller's function `with` makes the last move, from the intermediate sharding.
    ///
    /// `with` is called as in [`Program::reshard_with`]. For a leaf with an intermediate sharding
    /// it gets the first replica, an array of the leaf's shape on some of its devices. It gets any
    /// other leaf unchanged. The leaves of each group are gathered only after the groups before
    /// have moved. Donation frees the leaves that are gathered; `with` may donate the others.
    ///
    /// # Errors
    ///
    /// The errors of [`Program::reshard_with_intermediate_sharding`] and of
    /// [`Program::reshard_with`].
    #[track_caller]
    pub fn reshard_with_intermediate_sharding_by<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        from: impl Into<PrefixTree<Sharding>>,
        to: impl Into<PrefixTree<Sharding>>,
        options: MoveOptions,
        mut with: impl FnMut(&mut Self, &[(&MpmdArray, &Sharding)]) -> Result<Vec<MpmdArray>>,
    ) -> Result<T::With<MpmdArray>> {
        let at = Location::caller();
        let wrong = |problem: IssueProblem| problem.at(at, "reshard_with_intermediate_sharding_by");
        let leaves = x.leaves_with_paths();
        let LeafRoutes { routes, to } = self
            .routes(
                &x.structure(),
                &leaves,
                Some(from.into()),
                to.into(),
                options,
            )
            .map_err(wrong)?;

        let groups = groups_by_devices(
            leaves
                .iter()
                .map(|(_, array)| Some(array.sharding()?.devices())),
        );
        let mut moved: Vec<Option<MpmdArray>> = vec![None; leaves.len()];
        for group in groups {
            let gather = |place: &usize| match &routes[*place] {
                LeafRoute::Direct(_) => leaves[*place].1.clone(),
                LeafRoute::Via(via) => self.gather(leaves[*place].1, via, options, at),
            };
            let sources: Vec<MpmdArray> = group.iter().map(gather).collect();

            self.synced(at)?;
            let moves: Vec<_> = sources
                .iter()
                .zip(group.iter().map(|place| &to[*place]))
                .collect();
            let results = self.move_groups(&moves, &mut with, wrong)?;

            group
                .into_iter()
                .zip(results)
                .for_each(|(place, y)| moved[place] = Some(y));
        }
        let mut moved = moved.into_iter().flatten();
        Ok(x.map_ref(&mut |_| moved.next().expect("every leaf is in one group")))
    }

    /// Returns the route and the target of every leaf. Without `from`, all routes are direct.
    /// Issues nothing.
    fn routes(
        &mut self,
        structure: &Structure,
        leaves: &[(String, &MpmdArray)],
        from: Option<PrefixTree<Sharding>>,
        to: PrefixTree<Sharding>,
        options: MoveOptions,
    ) -> std::result::Result<LeafRoutes, IssueProblem> {
        let from = from.map(|from| from.broadcast(structure)).transpose();
        let from = from.map_err(IssueProblem::Tree)?;
        let to = to.broadcast(structure).map_err(IssueProblem::Tree)?;

        let mut routes = Vec::with_capacity(leaves.len());
        let mut last = None;
        for (place, ((path, array), to)) in leaves.iter().zip(&to).enumerate() {
            array.check_usable(path)?;
            let from = from.as_ref().map(|from| &from[place]);
            routes.push(self.route(path, array, from, to, options.cache_plans, &mut last)?);
        }

        if options.donate {
            refuse_twice(leaves)?;
            self.check_given_up(leaves)?;
        }
        Ok(LeafRoutes { routes, to })
    }

    /// Returns the route of one leaf. Without `from`, the route is direct. `last` caches the last
    /// search for an intermediate sharding.
    fn route(
        &mut self,
        path: &str,
        array: &MpmdArray,
        from: Option<&Sharding>,
        to: &Sharding,
        cache: bool,
        last: &mut Option<LastSearch>,
    ) -> std::result::Result<LeafRoute, IssueProblem> {
        // The direct plan is made in any case: it reports the mistakes of every route.
        let direct = self.put_steps(path, array, to, cache)?;
        let (Some(from), Some(found)) = (from, array.sharding()) else {
            return Ok(LeafRoute::Direct(direct));
        };

        let aval = array.aval();
        let same = found == from
            || found.memory_kind() == from.memory_kind()
                && from.layout(aval.shape()).is_ok_and(|layout| {
                    found
                        .layout(aval.shape())
                        .is_ok_and(|found| found == layout)
                });
        if !same {
            return Err(IssueProblem::SourceSharding {
                path: path.to_owned(),
                expected: from.to_string(),
                found: found.to_string(),
            });
        }

        let topology = &self.runtime.topology;
        let find = || match cheapest_intermediate(from, to, aval, topology) {
            Ok(between) => Some(between),
            Err(none) => {
                tracing::debug!(leaf = path, %from, %to, "{}", none.why);
                None
            }
        };
        let key = PutKey {
            aval: aval.clone(),
            from: Some(from.clone()),
            to: to.clone(),
        };

        // Without the cache, leaves that are alike still share the search.
        let between = match last {
            Some(last) if last.key == key => last.found.clone(),
            _ => {
                let found = match cache {
                    true => self.put_plans.intermediate(key.clone(), find),
                    false => find(),
                };
                last.insert(LastSearch { key, found }).found.clone()
            }
        };
        let Some(between) = between else {
            return Ok(LeafRoute::Direct(direct));
        };

        let replica = first_replica(path, aval, &between)?;
        let gather = self.put_plan_between(path, aval, Some(found), &between.sharding, cache)?;
        let onward = self.put_plan_between(path, aval, Some(&replica.sharding), to, cache)?;
        Ok(LeafRoute::Via(Box::new(IntermediateRoute {
            between: between.sharding,
            gather,
            replica,
            onward,
        })))
    }

    /// Moves every leaf of `x` along its route, in groups on the same devices. `from` has the
    /// leaves' shardings; without it, leaves do not use an intermediate sharding.
    fn reshard_at<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        from: Option<PrefixTree<Sharding>>,
        to: PrefixTree<Sharding>,
        options: MoveOptions,
        at: &'static Location<'static>,
        call: &str,
    ) -> Result<T::With<MpmdArray>> {
        let leaves = x.leaves_with_paths();
        let routes = self.routes(&x.structure(), &leaves, from, to, options);
        let LeafRoutes { routes, .. } = routes.map_err(|problem| problem.at(at, call))?;

        let groups = groups_by_devices(
            leaves
                .iter()
                .map(|(_, array)| Some(array.sharding()?.devices())),
        );
        let mut moved: Vec<Option<MpmdArray>> = vec![None; leaves.len()];
        for group in groups {
            let mut direct = Vec::with_capacity(group.len());
            for place in group {
                let array = leaves[place].1;
                match &routes[place] {
                    LeafRoute::Direct(steps) => direct.push((place, (array, steps))),
                    LeafRoute::Via(via) => {
                        moved[place] = Some(self.follow(array, via, options, at))
                    }
                }
            }

            let (places, moves): (Vec<usize>, Vec<_>) = direct.into_iter().unzip();
            let results = self.put_all(&moves, options, at);
            places
                .into_iter()
                .zip(results)
                .for_each(|(place, array)| moved[place] = Some(array));
        }

        let mut moved = moved.into_iter().flatten();
        self.synced(at)?;
        Ok(x.map_ref(&mut |_| moved.next().expect("every leaf is in one group")))
    }

    fn follow(
        &mut self,
        array: &MpmdArray,
        via: &IntermediateRoute,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let replica = self.gather(array, via, options, at);
        // The replica has no other handle, so it is donated, whether the source is or not.
        self.put_one(
            &replica,
            &via.onward,
            options.donate(true),
            Some(&replica),
            at,
        )
    }

    /// Gathers an array to its intermediate sharding and returns the first replica.
    fn gather(
        &mut self,
        array: &MpmdArray,
        via: &IntermediateRoute,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let IntermediateRoute {
            between,
            gather,
            replica,
            ..
        } = via;
        // The gathered array is only read, so it may alias the source. The caller's `may_alias` has
        // no effect on it.
        let gathered = self.put_one(array, gather, options.may_alias(true), None, at);

        let what = ReplicaWhat {
            aval: gathered.aval().clone(),
            between: between.clone(),
        };
        let relabel = Relabel {
            made: vec![Relabelled::clone(replica)],
            what: Arc::new(what),
            donate: true,
            awaits_sends: true,
        };
        let mut replica = self.relabel(&[&gathered], relabel, vec![0x4e91], at);
        replica.pop().expect("one was asked for")
    }
}

/// Describes how the arrays that a caller's function returned differ from the requested moves;
/// `None` if they fit.
fn misfit(moves: &[(&MpmdArray, &Sharding)], results: &[MpmdArray]) -> Option<String> {
    if results.len() != moves.len() {
        let asked = moves.len();
        let found = results.len();
        return Some(format!("the function returned {found} arrays for {asked}"));
    }

    let other = |((x, to), y): &((&MpmdArray, &Sharding), &MpmdArray)| {
        y.aval() != x.aval() || y.sharding() != Some(to)
    };
    let found = moves
        .iter()
        .map(|(x, to)| (*x, *to))
        .zip(results)
        .find(other);
    found.map(|((x, to), y)| format!("the function returned {y:?} for {} as {to}", x.aval()))
}

/// Describes the first replica of an array: the devices with index 0 on every replica axis, which
/// hold a whole array.
fn first_replica(
    path: &str,
    aval: &ShapedArray,
    between: &Intermediate,
) -> std::result::Result<Relabelled, IssueProblem> {
    let unfit = || IssueProblem::Split(format!("{} has no replicas", between.sharding));
    let mesh = between.replica_mesh().ok_or_else(unfit)?;
    Relabelled::over(path, aval.clone(), &between.sharding, mesh, 0..1)
}

struct ReplicaWhat {
    aval: ShapedArray,
    between: Sharding,
}

impl fmt::Display for ReplicaWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one replica of {} as {}", self.aval, self.between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::spec;

    #[test]
    fn plans_are_cached_unless_disabled() {
        let mut p = Program::builder().devices(2).alone().unwrap();
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let x = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        let (rows, all) = (mesh.sharding(spec!["x"]), mesh.replicated());
        let once = MoveOptions::default().cache_plans(false);
        let y = p.reshard(&x, &rows, once).unwrap();
        let y = p
            .reshard_with_intermediate_sharding(&y, &rows, &all, once)
            .unwrap();
        assert_eq!((p.metrics().plan_cache.entries, p.operations()), (0, 4));
        assert_eq!(
            y.to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
            [1.0, 2.0, 3.0, 4.0]
        );
        drop(p.reshard(&x, &rows, MoveOptions::default()).unwrap());
        assert_eq!(p.metrics().plan_cache.entries, 1);
        p.finish().unwrap();
    }
}
