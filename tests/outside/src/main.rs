//! Moves a derived tree of arrays from one process to another, again and again. The argument is the
//! number of rounds, 1 by default. Takes two processes: `mpmd run -n 2 -- target/debug/outside`.

use mpmd::prelude::*;

/// The parameters of a layer.
#[derive(Tree)]
struct Layer<L> {
    weight: L,
    bias: Vec<L>,
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    Program::run(|p| {
        for round in 1..=rounds {
            println!("round {round}: {:?}", moved(p)?);
            p.step_end()?;
        }
        Ok(())
    })
}

/// Returns the values of each leaf on the process that has got it.
fn moved(p: &mut Program) -> Result<Vec<Option<Vec<f32>>>> {
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
    values.collect()
}

#[test]
fn simulated_processes_move_the_tree() -> Result<()> {
    let results = mpmd::testing::simulate(2, 2, 1, moved);
    let [first, second] = &results[..] else { panic!("{results:?}") };
    assert_eq!(first.as_ref().unwrap(), &[None, None, None]);
    let values = [1.0, 2.0, 3.0].map(|value| Some(vec![value, value]));
    assert_eq!(second.as_ref().unwrap(), &values);
    Ok(())
}
