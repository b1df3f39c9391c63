//! Inputs that stay the same from call to call, such as the parameters of a stage within a step.
//!
//! A call compares the addresses of its leading inputs with those of the call before. As far as
//! they are equal, these inputs need no further look: their shapes fit the plan, and the hash of
//! their identities is known. So such an input costs one comparison.
//!
//! The hash of a call is the same whether its inputs were known or not: processes with different
//! parts in a call must agree on it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::plan::CallPlan;
use crate::error::IssueProblem;
use crate::exec::array::{MpmdArray, Repr, WeakHandle};
use crate::exec::{Rolling, Runtime};

/// Minimum number of leading inputs that are remembered as unchanged.
const FEWEST: usize = 4;

/// The leading inputs that were the same arrays in the last calls of a plan.
#[derive(Default)]
pub(super) struct UnchangedInputs {
    /// Weak handles of the inputs. They keep no device memory alive, but their addresses are not
    /// reused.
    leaves: Vec<WeakHandle>,
    /// Hash of the identities of `leaves`, as 64-bit words.
    hash: Rolling,
    /// The runtime's `watched_donations` when all `leaves` were last known to be usable.
    donations: u64,
    /// Identity words of the other inputs of the last call.
    others: Vec<u64>,
    /// An empty list, kept so that its memory is reused.
    words: Vec<u64>,
}

impl UnchangedInputs {
    /// Returns the number of leading inputs that are the same as in the last calls. These inputs
    /// fit the plan.
    pub(super) fn count(&self, leaves: &[&MpmdArray]) -> usize {
        let same = |(known, leaf): &(&WeakHandle, &&MpmdArray)| match &leaf.repr {
            Repr::Placed(placed) => known.is(placed),
            Repr::Host(_) => false,
        };
        self.leaves.iter().zip(leaves).take_while(same).count()
    }

    /// Returns the hash of the inputs' identities, and remembers the inputs for the next call.
    /// `known` is the result of [`count`](Self::count).
    ///
    /// Returns an error if an input was donated or belongs to another program.
    pub(super) fn check(
        &mut self,
        plan: &CallPlan,
        runtime: &Arc<Runtime>,
        leaves: &[&MpmdArray],
        known: usize,
    ) -> Result<Rolling, IssueProblem> {
        let donations = runtime.watched_donations.load(Ordering::Relaxed);
        if self.donations != donations {
            for (i, leaf) in leaves[..known].iter().enumerate() {
                leaf.check_usable(plan.input_path(i))?;
            }
        }

        self.words.clear();
        for (i, leaf) in leaves.iter().enumerate().skip(known) {
            if let Repr::Placed(placed) = &leaf.repr {
                if placed.is_donated() {
                    placed.check_usable(plan.input_path(i))?;
                }
                if !Arc::ptr_eq(&placed.made().runtime, runtime) {
                    return Err(IssueProblem::Foreign {
                        path: plan.input_path(i).to_owned(),
                    });
                }
            }
            self.words.push(leaf.word());
        }

        self.donations = donations;
        self.note(leaves, known);
        Ok(self.others.iter().copied().fold(self.hash, Rolling::mix))
    }

    /// Remembers the inputs of a call, the first `known` of which are unchanged. `self.words` has
    /// the identity words of the other inputs.
    fn note(&mut self, leaves: &[&MpmdArray], known: usize) {
        let Self { words, others, .. } = &*self;
        let same = match known == self.leaves.len() {
            true => words
                .iter()
                .zip(others)
                .take_while(|(word, last)| word == last)
                .count(),
            // `others` begin elsewhere.
            false => 0,
        };

        let kept = if known < FEWEST { 0 } else { known };
        if kept < self.leaves.len() {
            self.leaves.truncate(kept);
            let words = leaves[..kept].iter().map(|leaf| leaf.word());
            self.hash = words.fold(Rolling::default(), Rolling::mix);
            let dropped = leaves[kept..known].iter().map(|leaf| leaf.word());
            self.words.splice(..0, dropped);
        }

        let placed = |leaf: &&&MpmdArray| matches!(leaf.repr, Repr::Placed(_));
        let more = leaves[known..known + same]
            .iter()
            .take_while(placed)
            .count();
        let more = if more < FEWEST { 0 } else { more };
        for leaf in &leaves[known..known + more] {
            let Repr::Placed(placed) = &leaf.repr else {
                break;
            };
            placed.watch();
            self.leaves.push(placed.downgrade());
            self.hash = self.hash.mix(leaf.word());
        }

        self.words.drain(..more);
        std::mem::swap(&mut self.words, &mut self.others);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Jit;
    use super::*;
    use crate::kernel::{Views, ViewsMut};
    use crate::prelude::*;
    use mpmd_layout::topology::Mesh;

    /// A kernel that adds its inputs, the first once, the second twice, and so on.
    struct Weighted;

    impl Kernel for Weighted {
        type In = Vec<MpmdArray>;
        type Out = MpmdArray;

        fn infer(&self, x: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
            Ok(Signature::new(x[0].clone()))
        }

        fn run(
            &self,
            _: &mut Context<'_>,
            x: Views<'_, Self::In>,
            mut y: ViewsMut<'_, Self::Out>,
        ) -> Result<()> {
            y.fill(0.0f32)?;
            for (x, weight) in x.iter().zip(1..) {
                let y = y.as_mut_slice::<f32>()?.iter_mut();
                y.zip(x.as_slice::<f32>()?)
                    .for_each(|(y, x)| *y += x * weight as f32);
            }
            Ok(())
        }
    }

    fn weighted(p: &Program, mesh: &Mesh) -> Jit<Weighted> {
        p.jit(Weighted)
            .on(mesh)
            .outputs(mesh.replicated())
            .build()
            .unwrap()
    }

    /// Creates arrays of `elements` elements that are all `first`, `first + 1` and so on.
    fn group(p: &mut Program, mesh: &Mesh, first: usize, elements: usize) -> Vec<MpmdArray> {
        let array = |value: usize| {
            p.array_from_fn(f32s([elements]), mesh.replicated(), move |_, mut view| {
                Ok(view.fill(value as f32)?)
            })
        };
        (first..first + 6)
            .map(array)
            .collect::<Result<_>>()
            .unwrap()
    }

    /// Returns the number of inputs that the only plan of `jit` has noted as unchanged.
    fn noted(jit: &Jit<Weighted>) -> usize {
        jit.untyped.kept.lock().plans[0]
            .unchanged
            .lock()
            .leaves
            .len()
    }

    #[test]
    fn leading_inputs_of_two_equal_calls_are_noted() {
        let mut p = Program::builder().alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let (a, b) = (group(&mut p, &mesh, 0, 1), group(&mut p, &mesh, 10, 1));
        let mixed = |from: usize| [&a[..from], &b[from..]].concat();
        let jit = weighted(&p, &mesh);
        let mut counts = Vec::new();
        for x in [
            &a,
            &a,
            &mixed(5),
            &mixed(5),
            &mixed(2),
            &b,
            &mixed(5),
            &mixed(4),
            &mixed(4),
        ] {
            let y = jit
                .call(&mut p, x.clone())
                .unwrap()
                .to_host()
                .unwrap()
                .unwrap();
            let values = x
                .iter()
                .map(|x| x.to_host().unwrap().unwrap().to_vec::<f32>().unwrap()[0]);
            let expected: f32 = values.zip(1..).map(|(x, weight)| x * weight as f32).sum();
            assert_eq!(y.to_vec::<f32>().unwrap(), [expected]);
            counts.push(noted(&jit));
        }
        assert_eq!(counts, [0, 6, 5, 5, 0, 0, 0, 4, 4]);
        p.finish().unwrap();
    }

    #[test]
    fn hash_of_a_call_does_not_depend_on_what_is_noted() {
        let mut p = Program::builder().alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let (a, b) = (group(&mut p, &mesh, 0, 1), group(&mut p, &mesh, 10, 1));
        let jit = weighted(&p, &mesh);
        jit.call(&mut p, a.clone())
            .unwrap()
            .block_until_ready()
            .unwrap();
        let plan = jit.untyped.kept.lock().plans[0].clone();
        let mut noted = UnchangedInputs::default();
        let hash = |noted: &mut UnchangedInputs, x: &[MpmdArray]| {
            let x: Vec<&MpmdArray> = x.iter().collect();
            let known = noted.count(&x);
            noted
                .check(&plan.plan, &p.runtime, &x, known)
                .unwrap()
                .value()
        };
        let mut hashes = Vec::new();
        let host = || MpmdArray::scalar(1.0f32);
        for from in [6, 6, 5, 5, 1, 6, 6, 0] {
            for last in [None, Some(host())] {
                let x: Vec<MpmdArray> = a[..from]
                    .iter()
                    .chain(&b[from..])
                    .cloned()
                    .chain(last)
                    .collect();
                let fresh = hash(&mut UnchangedInputs::default(), &x);
                assert_eq!(hash(&mut noted, &x), fresh, "{from}");
                hashes.push(fresh);
            }
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(
            hashes.len(),
            8,
            "four lists of inputs, each with and without a host value"
        );
        p.finish().unwrap();
    }

    #[test]
    fn noted_inputs_keep_no_memory() {
        let mut p = Program::builder().alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let a = group(&mut p, &mesh, 0, 1 << 16);
        let jit = weighted(&p, &mesh);
        for _ in 0..2 {
            jit.call(&mut p, a.clone())
                .unwrap()
                .block_until_ready()
                .unwrap();
        }
        assert_eq!(noted(&jit), 6);
        drop(a);
        // The device lets go of the inputs before its next call.
        let b = group(&mut p, &mesh, 0, 1);
        weighted(&p, &mesh)
            .call(&mut p, b.clone())
            .unwrap()
            .block_until_ready()
            .unwrap();
        assert!(p.memory().live < 1 << 16, "{}", p.memory().live);
        p.finish().unwrap();
    }
}
