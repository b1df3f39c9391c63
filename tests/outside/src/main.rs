//! Moves a derived tree of arrays from one process to another.

use mpmd::prelude::*;

/// The parameters of a layer.
#[derive(Tree)]
struct Layer<L> {
    weight: L,
    bias: Vec<L>,
}

fn main() -> Result<()> {
    let results = mpmd::testing::simulate(2, 2, 1, |p| {
        let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
        let array = |value: f32| MpmdArray::from_slice(&[2], &[value, value]);
        let layer = Layer { weight: array(1.0)?, bias: vec![array(2.0)?, array(3.0)?] };
        let first = stages[0].replicated();
        let placed = p.device_put(&layer.weight, &first)?;
        let layer = Layer { weight: placed, bias: layer.bias };
        let moved = p.reshard(&layer, stages[1].replicated(), MoveOptions::default())?;
        let values = moved
            .leaves()
            .into_iter()
            .map(|leaf| Ok(leaf.to_host()?.map(|host| host.to_vec::<f32>()).transpose()?));
        values.collect::<Result<Vec<_>>>()
    });
    for result in results {
        println!("{:?}", result?);
    }
    Ok(())
}
