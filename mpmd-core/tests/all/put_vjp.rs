//! Gradients of moves.

use std::time::Duration;

use super::simulations::simulation;
use crate::common::arrays::{check, values};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Error, IssueProblem};

#[test]
fn gradients_of_a_tree_come_back_to_the_shardings_of_its_sources() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4] {
        let job = simulation(processes, 4).delays(processes as u64, Duration::from_millis(1));
        for result in job.run(gradients_come_back) {
            result.unwrap();
        }
    }
}

fn gradients_come_back(p: &mut Program) -> Result<()> {
    let grid = p.mesh(&[("a", 2), ("b", 2)])?;
    let front = p.mesh_of(&[("x", 2)], &[DeviceId(0), DeviceId(1)])?;
    let back = p.mesh_of(&[("x", 2)], &[DeviceId(2), DeviceId(3)])?;
    let whole = values(&[4, 8], DType::F32);
    let host = MpmdArray::from_host(whole.clone());
    let rows = p.device_put(&host, front.sharding(spec!["x"]))?;
    let one = p.device_put(&host, Sharding::single_device(DeviceId(3)))?;
    let sums = p.device_put(&host, grid.sharding(spec!["b"]).unreduced(&["a"])?)?;
    let tree = (vec![rows, one], (sums, host.clone()));
    let to = back.sharding(spec![None, "x"]);
    let ((y, z), vjp) = p.put_vjp(&tree, &to)?;
    for moved in y.iter().chain([&z.0, &z.1]) {
        assert_eq!(moved.sharding(), Some(&to));
        check(p, moved, &whole)?;
    }

    // Gradients in another sharding than the results.
    let given = values(&[4, 8], DType::F32);
    let d = p.device_put(&MpmdArray::from_host(given.clone()), grid.replicated())?;
    let gradients = (vec![d.clone(), d.clone()], (d.clone(), d.clone()));
    let (dx, (d_sums, d_host)) = vjp.call(p, &gradients)?;
    assert_eq!(dx[0].sharding(), tree.0[0].sharding());
    assert_eq!(dx[1].sharding(), tree.0[1].sharding());
    let each_term = grid.sharding(spec!["b"]);
    assert_eq!(d_sums.sharding(), Some(&each_term));
    assert_eq!(d_host.sharding(), d.sharding(), "it stays where it is");
    for gradient in dx.iter().chain([&d_sums, &d_host]) {
        check(p, gradient, &given)?;
    }

    let before = p.operations();
    let short = (vec![d.clone()], (d.clone(), d));
    let error = vjp.call(p, &short).unwrap_err();
    let is_tree = |why: &IssueProblem| matches!(why, IssueProblem::Tree(_));
    assert!(
        matches!(&error, Error::Issue(issue) if is_tree(&issue.why)),
        "{error}"
    );
    assert_eq!(p.operations(), before);
    Ok(())
}

/// JAX's vjp of a `psum` of four terms, with 3 as the gradient of the sum: 3 for each term.
#[test]
fn each_term_of_a_sum_has_its_gradient() {
    let _limit = watchdog(60);
    for result in simulation(2, 4).run(|p| {
        let mesh = p.mesh(&[("x", 4)])?;
        let host = MpmdArray::scalar(6.0f32);
        let x = p.device_put(&host, mesh.replicated().unreduced(&["x"])?)?;
        let (y, vjp) = p.put_vjp(&x, mesh.replicated())?;
        let dy = p.device_put(&MpmdArray::scalar(3.0f32), y.sharding().unwrap().clone())?;
        let dx = vjp.call(p, &dy)?;
        let shards = dx.addressable_shards()?;
        assert_eq!(shards.len(), 2);
        for shard in shards {
            assert_eq!(shard.data.to_vec::<f32>()?, [3.0]);
        }
        Ok(())
    }) {
        result.unwrap();
    }
}
