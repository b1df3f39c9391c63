//! Computes with an array in two stages, each on devices of its own.

use mpmd::prelude::*;

fn main() -> Result<()> {
    Program::builder().devices(4).run(|p| {
        if let Some(values) = compute(p)? {
            println!("process {} has {values:?}", p.process());
        }
        Ok(())
    })
}

/// Doubles an array in the first stage and adds one in the second. Returns the values on a process
/// that owns devices of the second stage, elsewhere `None`.
fn compute(p: &mut Program) -> Result<Option<Vec<f32>>> {
    // Two stages of two devices each.
    let stages = p.mesh(&[("stage", 2), ("part", 2)])?.split("stage")?;
    let (front, back) = (&stages[0], &stages[1]);
    let halves = front.sharding(spec!["part"]); // a half of the array on each device
    let whole = back.replicated(); // all of it on each device

    let double = elementwise(|x: f32| 2.0 * x);
    let double = p.jit(double).on(front).outputs(&halves).build()?;
    let add_one = elementwise(|x: f32| x + 1.0);
    let add_one = p.jit(add_one).on(back).outputs(&whole).build()?;

    let x = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
    let x = p.device_put(&x, &halves)?;
    let x = double.call(p, x)?;
    let x = p.device_put(&x, &whole)?; // from the first stage to the second
    let x = add_one.call(p, x)?;
    Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)
}

#[cfg(test)]
mod tests {
    use mpmd::testing::simulate;

    use super::*;

    #[test]
    fn second_of_two_processes_has_the_values() {
        // The processes are threads. The number 7 decides the order of all events.
        let results = simulate(2, 4, 7, compute);
        let [front, back] = &results[..] else {
            panic!("{results:?}")
        };
        assert_eq!(front.as_ref().unwrap(), &None);
        assert_eq!(back.as_ref().unwrap(), &Some(vec![3.0, 5.0, 7.0, 9.0]));
    }
}
