//! The schedule name ByCost: searches for the order that fits given costs best.

use super::{SearchOptions, SearchResult, search};
use crate::check::Budget;
use crate::costs::Costs;
use crate::schedule::{Builtin, Schedule, ScheduleError};

/// True if `name` is the name of the search by cost instead of a built-in schedule's.
pub fn is_by_cost(name: &str) -> bool {
    name.eq_ignore_ascii_case("bycost") || name.eq_ignore_ascii_case("by-cost")
}

/// Searches for the order with the shortest step at these costs, within the memory budget of each
/// rank. If `costs` is `None`, each pass costs one unit.
///
/// The stages are placed on the ranks as in the built-in schedules with `chunks` stages per rank.
/// If these schedules differ in placement, every placement is tried and the shortest order is
/// returned.
///
/// # Errors
///
/// If no built-in schedule exists for these numbers, if `costs` has another number of stages, or if
/// no order is found.
pub fn by_cost(
    ranks: usize,
    microbatches: usize,
    chunks: Option<usize>,
    costs: Option<&Costs>,
    budget: Option<Budget>,
) -> Result<SearchResult, ScheduleError> {
    let wrong = |problem| ScheduleError::Search { problem };
    let chunks = match (chunks, costs) {
        (Some(chunks), _) => chunks,
        // With too few, the search says how many it needs.
        (None, Some(costs)) => (costs.stage.len() / ranks.max(1)).max(1),
        (None, None) => 1,
    };

    let known = Builtin::ALL
        .iter()
        .filter_map(|builtin| builtin.schedule(ranks, microbatches, chunks).ok());
    let known: Vec<Schedule> = known.filter(Schedule::has_backward).collect();
    let first = known.first().ok_or_else(|| {
        wrong(format!(
            "no schedule has {ranks} ranks of {chunks} stages and {microbatches} microbatches"
        ))
    })?;

    let units = Costs::units(first.stages());
    let costs = costs.unwrap_or(&units);
    let options = SearchOptions {
        budget,
        ..SearchOptions::default()
    };

    let mut best: Option<SearchResult> = None;
    let mut refused = None;
    let mut placements: Vec<&[usize]> = Vec::new();
    for schedule in &known {
        let placement = schedule.ranks_of_stages();
        if placements.contains(&placement) {
            continue;
        }
        placements.push(placement);

        let alike: Vec<Schedule> = known
            .iter()
            .filter(|other| other.ranks_of_stages() == placement)
            .cloned()
            .collect();
        match search(&alike, costs, &options) {
            Ok(found)
                if best
                    .as_ref()
                    .is_none_or(|best| found.makespan < best.makespan) =>
            {
                best = Some(found)
            }
            Ok(_) => {}
            Err(error) => refused = Some(error),
        }
    }
    best.ok_or_else(|| refused.unwrap_or_else(|| wrong("nothing was tried".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_best_placement_and_refuses_wrong_numbers() {
        assert!(is_by_cost("ByCost") && is_by_cost("by-cost") && !is_by_cost("1F1B"));
        let one = by_cost(4, 8, None, None, Some(Budget::Activations(4))).unwrap();
        assert!(one.makespan <= 27.0, "{}", one.makespan);
        let two = by_cost(2, 4, Some(2), None, None).unwrap();
        assert_eq!(two.schedule.stages(), 4);
        let costs = Costs::units(3);
        let wrong = by_cost(2, 4, Some(1), Some(&costs), None)
            .unwrap_err()
            .to_string();
        assert!(wrong.contains("costs of 3 stages, for 2"), "{wrong}");
        let one = Costs::units(1);
        let few = by_cost(4, 8, None, Some(&one), None)
            .unwrap_err()
            .to_string();
        assert!(few.contains("costs of 1 stages, for 4"), "{few}");
        let none = by_cost(2, 4, None, None, Some(Budget::Activations(0)))
            .unwrap_err()
            .to_string();
        assert!(none.contains("holds at most 0 activations"), "{none}");
    }
}
