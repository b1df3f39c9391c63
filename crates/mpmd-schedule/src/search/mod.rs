//! Searches an order of actions for stages with unequal costs.
//!
//! The fixed orders meet their closed forms if all passes cost the same. Other orders are better if
//! stages, or input and weight gradients, differ in cost. The search minimises the makespan under a
//! memory budget. Microbatches advance in ascending order within each stage and kind, so every
//! result has the same bits as 1F1B.
//!
//! The problem is a job shop, with no exact solution in useful time. Starting points are greedy
//! orders under several rules, and the fixed ones. The best are improved by swaps on the critical
//! path, which never make a cycle. See van Laarhoven, Aarts and Lenstra, "Job shop scheduling by
//! simulated annealing", 1992. The same costs give the same order everywhere: the search reads no
//! clock, and a seed determines its random choices.

mod anneal;
mod by_cost;
mod greedy;
mod shop;

use anneal::Random;
pub use by_cost::{by_cost, is_by_cost};
use greedy::Rules;
use shop::{Shop, TimedOrder};

use super::check::Budget;
use super::costs::Costs;
use super::schedule::{Schedule, ScheduleError};

/// Budget and effort of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchOptions {
    /// Limit of the memory that a rank may hold at a time, over all its stages; `None` means no
    /// limit.
    pub budget: Option<Budget>,
    /// Total number of changed orders to try. Each try takes time proportional to the number of
    /// actions. Very large orders get fewer tries.
    pub tries: usize,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self {
            budget: None,
            tries: 20_000,
            seed: 0,
        }
    }
}

/// The result of [`search`].
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// The best order found, named `by cost`.
    pub schedule: Schedule,
    /// The makespan of `schedule`, in the unit of the costs. A transfer delays only the passes that
    /// wait for it.
    pub makespan: f64,
    /// (name, makespan) of each schedule in `fixed`, in the order given. The makespan is `None` if
    /// the schedule deadlocks or exceeds the budget.
    pub fixed: Vec<(String, Option<f64>)>,
}

/// Limit of the work of a search: the number of actions in all tried orders together.
const MOST_WORK: usize = 400_000_000;

/// Searches for an order of forward passes, input gradients and weight gradients with a short
/// makespan.
///
/// `fixed` are schedules with the same numbers of ranks and microbatches; there must be at least
/// one. They also give the rank of each stage. The result is never worse than a schedule of `fixed`
/// that is within the budget and runs microbatches in ascending order.
///
/// # Errors
///
/// - If `fixed` is empty or its placements differ.
/// - If costs are for another number of stages, are negative, or are not finite.
/// - If the budget is in bytes and the costs have none.
/// - If no order was found within the budget.
pub fn search(
    fixed: &[Schedule],
    costs: &Costs,
    options: &SearchOptions,
) -> Result<SearchResult, ScheduleError> {
    let first = check_inputs(fixed, costs, options)?;
    let shop = Shop {
        placement: ranks_of_stages(first),
        ranks: first.ranks(),
        microbatches: first.microbatches(),
        costs,
        budget: options.budget,
    };

    let FixedOrders { makespans, orders } = fixed_orders(&shop, fixed);
    let starts = starting_orders(&shop, orders);
    if starts.is_empty() {
        return Err(wrong(match options.budget {
            Some(Budget::Activations(most)) => {
                format!("none was found that holds at most {most} activations")
            }
            Some(Budget::Bytes(most)) => format!("none was found that holds at most {most} bytes"),
            None => "none was found".to_owned(),
        }));
    }

    /// Number of starting orders that the search improves.
    const IMPROVED: usize = 3;
    let chosen = starts.len().min(IMPROVED);
    // Limits the tries so that large orders also end in seconds.
    let tries = options.tries.min(MOST_WORK / shop.actions().max(1)) / chosen;
    let mut random = Random(options.seed ^ 0x9e37_79b9_7f4a_7c15);
    let improved = starts
        .into_iter()
        .take(chosen)
        .map(|start| shop.anneal(start, tries, &mut random));
    let Some(best) = improved.min_by(|a, b| a.makespan.total_cmp(&b.makespan)) else {
        return Err(wrong("nothing was tried".to_owned()));
    };

    let rows = best
        .rows
        .iter()
        .map(|row| row.iter().map(|id| shop.action(*id)).collect())
        .collect();
    Ok(SearchResult {
        schedule: Schedule::new("by cost", rows)?,
        makespan: best.makespan,
        fixed: makespans,
    })
}

fn wrong(problem: String) -> ScheduleError {
    ScheduleError::Search { problem }
}

fn ranks_of_stages(schedule: &Schedule) -> Vec<usize> {
    (0..schedule.stages())
        .map(|stage| schedule.rank_of(stage))
        .collect()
}

/// Checks that the schedules, costs and budget fit each other. Returns the first schedule.
fn check_inputs<'s>(
    fixed: &'s [Schedule],
    costs: &Costs,
    options: &SearchOptions,
) -> Result<&'s Schedule, ScheduleError> {
    let Some(first) = fixed.first() else {
        return Err(wrong(
            "no schedule is given: at least one must give the rank of each stage".to_owned(),
        ));
    };
    let placement = ranks_of_stages(first);
    if let Some(other) = fixed.iter().find(|other| {
        ranks_of_stages(other) != placement
            || other.microbatches() != first.microbatches()
            || other.ranks() != first.ranks()
    }) {
        return Err(wrong(format!(
            "{} and {} are for other ranks or microbatches",
            first.name(),
            other.name()
        )));
    }

    if costs.stage.len() != placement.len() {
        return Err(wrong(format!(
            "costs of {} stages, for {}",
            costs.stage.len(),
            placement.len()
        )));
    }
    if matches!(options.budget, Some(Budget::Bytes(_))) && !costs.says_bytes() {
        return Err(wrong(
            "the budget is in bytes, but the costs have no bytes that stages keep".to_owned(),
        ));
    }

    for (stage, cost) in costs.stage.iter().enumerate() {
        let times = [
            cost.forward,
            cost.backward_input,
            cost.backward_weight,
            cost.send_forward,
            cost.send_backward,
        ];
        if let Some(cost) = times.iter().find(|cost| !cost.is_finite() || **cost < 0.0) {
            return Err(wrong(format!("stage {stage} costs {cost}")));
        }
    }
    Ok(first)
}

/// The orders of the schedules that the caller gave.
struct FixedOrders {
    /// Name and makespan of each schedule; `None` for one that deadlocks or exceeds the budget.
    makespans: Vec<(String, Option<f64>)>,
    /// The orders that the search can start from.
    orders: Vec<TimedOrder>,
}

fn fixed_orders(shop: &Shop<'_>, fixed: &[Schedule]) -> FixedOrders {
    let mut makespans = Vec::with_capacity(fixed.len());
    let mut orders = Vec::new();
    for schedule in fixed {
        let rows = shop.rows_of(schedule);
        let within = rows.iter().all(|row| shop.holds(row));
        let makespan = shop.run(&rows).map(|run| run.makespan);
        makespans.push((schedule.name().to_owned(), makespan.filter(|_| within)));

        if within
            && shop.ascends(&rows)
            && let Some(makespan) = makespan
        {
            orders.push(TimedOrder { makespan, rows });
        }
    }
    FixedOrders { makespans, orders }
}

/// Adds greedy orders to the orders of the given schedules. Returns the distinct ones, the shortest
/// first.
fn starting_orders(shop: &Shop<'_>, fixed: Vec<TimedOrder>) -> Vec<TimedOrder> {
    let mut starts = fixed;
    // Each takes time in proportion to ranks times actions.
    let most = (MOST_WORK / (shop.actions() * shop.ranks).max(1)).max(1);
    for rules in Rules::all().take(most) {
        if let Some(rows) = shop.greedy(rules)
            && let Some(run) = shop.run(&rows)
        {
            starts.push(TimedOrder {
                makespan: run.makespan,
                rows,
            });
        }
    }

    starts.sort_by(|a, b| a.makespan.total_cmp(&b.makespan));
    starts.dedup_by(|a, b| a.rows == b.rows);
    starts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::schedule::ActionKind;
    use super::*;
    use crate::costs::StageCosts;

    fn costs(stages: &[[f64; 3]]) -> Costs {
        let stage = |[forward, backward_input, backward_weight]: &[f64; 3]| StageCosts {
            forward: *forward,
            backward_input: *backward_input,
            backward_weight: *backward_weight,
            ..StageCosts::default()
        };
        Costs {
            unit: "unit".to_owned(),
            stage: stages.iter().map(stage).collect(),
        }
    }

    fn one_f_one_b(ranks: usize, microbatches: usize) -> Schedule {
        Schedule::one_f_one_b(ranks, microbatches).unwrap()
    }

    fn best(fixed: &Schedule, costs: &Costs, budget: impl Into<Option<Budget>>) -> SearchResult {
        let options = SearchOptions {
            budget: budget.into(),
            tries: 3000,
            seed: 1,
        };
        search(std::slice::from_ref(fixed), costs, &options).unwrap()
    }

    #[test]
    fn equal_costs_with_1f1b_memory_reach_zb_h1() {
        let found = best(&one_f_one_b(4, 8), &Costs::units(4), Budget::Activations(4));
        // If input gradients leave before the weight gradients, its bubble is (p - 1)(F + I).
        assert_eq!(found.fixed, [("1F1B".to_owned(), Some(30.0))]);
        // (p - 1)(F + I - min(F, I, W)) beyond the ideal 24.
        assert!(found.makespan <= 27.0, "{}", found.makespan);
    }

    #[test]
    fn unlimited_memory_leaves_only_the_skew() {
        let found = best(&one_f_one_b(4, 8), &Costs::units(4), None);
        // No order is shorter than the work of the last rank plus the way to it and back.
        assert_eq!(found.makespan, 24.0 + 3.0);
    }

    #[test]
    fn a_slow_stage_is_kept_busy() {
        let unequal = costs(&[
            [1.0, 1.0, 4.0],
            [1.0, 1.0, 1.0],
            [1.0, 2.0, 1.0],
            [1.0, 1.0, 1.0],
        ]);
        let found = best(&one_f_one_b(4, 8), &unequal, Budget::Activations(8));
        let Some(fixed) = found.fixed[0].1 else {
            panic!("1F1B holds 4")
        };
        // Stage 0 works for 48. With only four forward passes ahead, it would wait for the first
        // gradient.
        assert!(
            found.makespan >= 48.0 && found.makespan < fixed - 3.0,
            "{} of {fixed}",
            found.makespan
        );
    }

    #[test]
    fn empty_budgets_and_invalid_costs_are_refused() {
        let fixed = one_f_one_b(2, 4);
        let refused = |costs: &Costs, budget: Option<Budget>| {
            let options = SearchOptions {
                budget,
                ..SearchOptions::default()
            };
            search(std::slice::from_ref(&fixed), costs, &options)
                .unwrap_err()
                .to_string()
        };
        let none = refused(&Costs::units(2), Some(Budget::Activations(0)));
        assert!(
            none.contains("none was found that holds at most 0 activations"),
            "{none}"
        );
        assert!(refused(&Costs::units(3), None).contains("costs of 3 stages, for 2"));
        let negative = costs(&[[1.0, -1.0, 1.0], [1.0; 3]]);
        assert!(refused(&negative, None).contains("stage 0 costs -1"));
        let nothing = search(&[], &negative, &SearchOptions::default())
            .unwrap_err()
            .to_string();
        assert!(nothing.contains("no schedule is given"), "{nothing}");
    }

    #[test]
    fn byte_budget_holds_at_every_action() {
        let mut heavy = Costs::units(2);
        heavy.stage.iter_mut().for_each(|stage| {
            (stage.activation_bytes, stage.weight_residual_bytes) = (100, 10);
        });
        // One forward pass at a time, plus the residual of its input gradient.
        let found = best(&one_f_one_b(2, 4), &heavy, Budget::Bytes(110));
        for row in found.schedule.rows() {
            let mut held = 0;
            for action in row {
                let (takes, gives) = match action.kind {
                    ActionKind::Forward => (100, 0),
                    ActionKind::BackwardInput => (10, 100),
                    _ => (0, 10),
                };
                held += takes;
                assert!(held <= 110, "{row:?}");
                held -= gives;
            }
        }
        assert_eq!(found.fixed[0].1, None, "1F1B holds two");
    }

    #[test]
    fn several_stages_a_rank_are_searched_too() {
        for name in ["interleaved", "zbv"] {
            let fixed = Schedule::named(name, 4, 8, Some(2)).unwrap();
            let mut unequal = Costs::units(8);
            unequal.stage[3].backward_weight = 3.0;
            unequal.stage[6].forward = 2.0;
            let found = best(&fixed, &unequal, None);
            let Some(before) = found.fixed[0].1 else {
                panic!("there is no budget")
            };
            assert!(
                found.makespan < before,
                "{name}: {} of {before}",
                found.makespan
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn found_order_is_complete_within_budget_and_not_worse(
            stages in prop::collection::vec(prop::array::uniform3(1u8..6), 1..5),
            microbatches in 1usize..7,
            more in 0usize..3,
        ) {
            let each: Vec<[f64; 3]> = stages.iter().map(|costs| costs.map(f64::from)).collect();
            let fixed = one_f_one_b(each.len(), microbatches);
            let budget = each.len() + more;
            let found = best(&fixed, &costs(&each), Budget::Activations(budget as u64));
            let Some(before) = found.fixed[0].1 else { panic!("1F1B is within the budget") };
            prop_assert!(found.makespan <= before);
            let actions: usize = found.schedule.rows().iter().map(Vec::len).sum();
            prop_assert_eq!(actions, 3 * each.len() * microbatches);
            for row in found.schedule.rows() {
                let mut held = 0usize;
                for action in row {
                    match action.kind {
                        ActionKind::Forward => held += 1,
                        ActionKind::BackwardWeight => held -= 1,
                        _ => {}
                    }
                    prop_assert!(held <= budget);
                }
            }
            let again = best(&fixed, &costs(&each), Budget::Activations(budget as u64));
            prop_assert_eq!(again, found);
        }
    }
}
