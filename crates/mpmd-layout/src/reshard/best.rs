//! Chooses between the intermediate shardings of a move by the planner's count of bytes.

use super::intermediate::{Intermediate, NoIntermediate, find_cuts};
use super::plan::plan;
use crate::aval::ShapedArray;
use crate::sharding::Sharding;
use crate::topology::{LinkClass, Topology};

/// The classes of links between devices, slowest first.
const LINKS: [LinkClass; 3] = [
    LinkClass::Network,
    LinkClass::SameHost,
    LinkClass::SameProcess,
];

/// Returns the intermediate sharding that moves an array of `aval` from `src` to `dst` with the
/// fewest bytes.
///
/// The conditions are those of [`find_intermediate_sharding`](super::find_intermediate_sharding).
/// Dimensions of the array beyond the end of a spec count as undivided. There are up to two
/// candidates. In the one of `find_intermediate_sharding`, each replica is whole along the cut
/// axes. In the other, each replica has as many parts as the target: 8 parts on the way to 4 become
/// 2 replicas of 4 parts.
///
/// The cost of a candidate is the bytes from the source to it, plus those from its first replica to
/// the target. The candidate with fewer bytes over the slowest class of links wins, then over the
/// next class. If both are equal, the one of `find_intermediate_sharding` wins. Takes time linear
/// in the number of devices.
///
/// # Errors
///
/// If there is no intermediate sharding.
pub fn cheapest_intermediate(
    src: &Sharding,
    dst: &Sharding,
    aval: &ShapedArray,
    topology: &Topology,
) -> Result<Intermediate, NoIntermediate> {
    let none = |why| NoIntermediate {
        why,
        src: src.clone(),
        dst: dst.clone(),
    };

    let cuts = find_cuts(src, dst, aval.ndim()).map_err(none)?;
    let whole = cuts.whole().map_err(none)?;
    let Some(split) = cuts.split() else {
        return Ok(whole);
    };

    let cost = |between: &Intermediate| cost(src, between, dst, aval, topology);
    match (cost(&whole), cost(&split)) {
        (Some(of_whole), Some(of_split)) if of_split < of_whole => Ok(split),
        _ => Ok(whole),
    }
}

/// Returns the bytes of both steps over each class of [`LINKS`], or `None` if a sharding does not
/// fit the array or the job.
fn cost(
    src: &Sharding,
    between: &Intermediate,
    dst: &Sharding,
    aval: &ShapedArray,
    topology: &Topology,
) -> Option<[u64; 3]> {
    let spec = between.sharding.spec()?.clone();
    let replica = between.replica_mesh()?.sharding(spec);

    let bytes = |from: &Sharding, to: &Sharding| {
        let from = from.layout(aval.shape()).ok()?;
        let to = to.layout(aval.shape()).ok()?;
        Some(
            plan(&from, &to, aval.dtype().size(), topology)
                .ok()?
                .bytes_over_links(),
        )
    };

    let gather = bytes(src, &between.sharding)?;
    let onward = bytes(&replica, dst)?;
    Some(LINKS.map(|class| gather[class as usize].saturating_add(onward[class as usize])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aval::f32s;
    use crate::reshard::{WhyNoIntermediate, find_intermediate_sharding};
    use crate::sharding::Spec;
    use crate::spec;
    use crate::topology::{DeviceId, Mesh};

    fn on(axes: &[(&str, usize)], first: u32, spec: Spec) -> Sharding {
        let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (first..first + count).map(DeviceId).collect())
            .unwrap()
            .sharding(spec)
    }

    fn chosen(src: &Sharding, dst: &Sharding, shape: &[usize]) -> Result<String, &'static str> {
        let job = Topology::even(4, 8);
        let found = cheapest_intermediate(src, dst, &f32s(shape), &job)
            .map_err(|none| none.why.reason())?;
        let text = found.sharding.to_string();
        let text = text.split(" devices").next().unwrap_or_default();
        Ok(text
            .replace("_intermediate_replica", "R")
            .replace("_intermediate_split", "S"))
    }

    #[test]
    fn replicas_are_divided_as_the_target_where_that_moves_less() {
        let src = on(&[("fsdp", 8), ("tp", 1)], 0, spec!["fsdp", "tp"]);
        let dst = on(&[("fsdp", 1), ("tp", 4)], 8, spec!["fsdp", "tp"]);
        let expected = "P(fsdpS, tp) on {fsdpR:2, fsdpS:4, tp:1}";
        assert_eq!(chosen(&src, &dst, &[16, 8]).as_deref(), Ok(expected));
        let whole = find_intermediate_sharding(&src, &dst).unwrap();
        let split = cheapest_intermediate(&src, &dst, &f32s([16, 8]), &Topology::even(4, 8));
        let split = split.unwrap();
        let bytes =
            |between| cost(&src, between, &dst, &f32s([16, 8]), &Topology::even(4, 8)).unwrap();
        // 512 bytes cross to the target's process in both cases. Within the source's, a whole
        // replica on every device takes 7/8 of them 8 times, a quarter much less.
        assert_eq!(bytes(&whole), [0, 512, 8 * 448]);
        assert_eq!(bytes(&split), [0, 512, 8 * 128 - 2 * 64]);

        // Two cut axes: the target's two parts stay on the first, and the second is whole.
        let src = on(&[("a", 2), ("b", 2), ("c", 2)], 0, spec!["a", "b", None]);
        let dst = on(&[("z", 2)], 8, spec![None, None, "z"]);
        let expected = "P(a, bS, None) on {bR:2, a:2, bS:1, c:2}";
        assert_eq!(chosen(&src, &dst, &[4, 4, 4]).as_deref(), Ok(expected));
        // A target of one part: there is nothing to choose.
        let (src, dst) = (
            on(&[("x", 8)], 0, spec!["x", None]),
            on(&[("y", 4)], 8, spec![]),
        );
        assert_eq!(
            chosen(&src, &dst, &[8, 4]).as_deref(),
            Ok("P(xS, None) on {xR:8, xS:1}")
        );
    }

    /// The pieces of the gathered replicas are 2^24: listing them takes minutes.
    #[test]
    fn thousands_of_devices_need_no_list_of_pieces() {
        let src = on(&[("fsdp", 4096)], 0, spec!["fsdp", None]);
        let dst = on(&[("tp", 64)], 4096, spec![None, "tp"]);
        let job = Topology::even(1024, 8);
        let found = cheapest_intermediate(&src, &dst, &f32s([4096, 64]), &job).unwrap();
        let expected = "{fsdp_intermediate_replica:64, fsdp_intermediate_split:64}";
        assert!(
            found.sharding.to_string().contains(expected),
            "{}",
            found.sharding
        );
    }

    #[test]
    fn short_specs_are_padded_to_the_rank() {
        let (long, short) = (spec!["x", None], spec!["x"]);
        let dst = on(&[("y", 4)], 8, spec![None, "y"]);
        for spec in [long, short] {
            let src = on(&[("x", 8)], 0, spec);
            assert_eq!(
                chosen(&src, &dst, &[8, 4]).as_deref(),
                Ok("P(xS, None) on {xR:2, xS:4}"),
                "{src}"
            );
        }
        let src = on(&[("x", 8)], 0, spec!["x"]);
        let same = on(&[("y", 4)], 8, spec!["y", None]);
        assert_eq!(chosen(&src, &same, &[8, 4]), Err("not_needed"));
        let none = find_intermediate_sharding(&src, &dst).unwrap_err();
        assert_eq!(
            none.why,
            WhyNoIntermediate::RankMismatch,
            "the original's rule has no shape"
        );
    }
}
