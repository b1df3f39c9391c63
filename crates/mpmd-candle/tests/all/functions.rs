//! Functions of tensors as kernels.

use mpmd_candle::{DType, Tensor, Var, function};
use mpmd_core::prelude::*;
use mpmd_core::{Simulation, run_here};
use mpmd_layout::aval::DType as ArrayType;

fn host(shape: &[usize], values: &[f32]) -> HostArray {
    HostArray::from_slice(shape, values).unwrap()
}

#[test]
fn function_like_its_input_runs_as_kernel() {
    let double = function(|x: Tensor| x * 2.0).like_input();
    let y = run_here(double, &host(&[3], &[1.0, 2.0, 3.0])).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
}

#[test]
fn function_takes_and_returns_trees() {
    type Pair = (Tensor, Tensor);
    let function = function(|(a, b): Pair, c: Tensor| Ok((a.matmul(&b)?, (c + 1.0)?)))
        .outputs(|((a, b), c)| Ok((f32s([a.shape()[0], b.shape()[1]]), c.clone())));
    let (ab, c) = run_here(
        function,
        &(
            (host(&[1, 2], &[1.0, 2.0]), host(&[2, 1], &[3.0, 4.0])),
            host(&[1], &[5.0]),
        ),
    )
    .unwrap();
    assert_eq!(ab.to_vec::<f32>().unwrap(), [11.0]);
    assert_eq!(c.to_vec::<f32>().unwrap(), [6.0]);
}

#[test]
fn probe_tells_all_processes_the_shapes() {
    let results = Simulation::new(3, 3).run(|p| {
        let mesh = p.mesh(&[("x", 3)])?.split("x")?.remove(1);
        let argmax = function(|x: Tensor| x.argmax(1)).probe(p, &mesh, &f32s([2, 3]))?;
        let argmax = p.jit(argmax).on(&mesh).outputs(mesh.replicated()).build()?;
        let x = MpmdArray::from_slice(&[2, 3], &[0.0f32, 9.0, 1.0, 7.0, 2.0, 3.0])?;
        let x = p.device_put(&x, mesh.replicated())?;
        let y = argmax.call(p, x)?;
        assert_eq!(*y.aval(), ShapedArray::new(&[2], ArrayType::U32));
        Ok(y.to_host()?.map(|y| y.to_vec::<u32>()).transpose()?)
    });
    let values: Vec<_> = results.into_iter().map(|result| result.unwrap()).collect();
    assert_eq!(values, [None, Some(vec![1, 0]), None]);
}

#[test]
fn failing_probe_fails_on_every_process() {
    let results = Simulation::new(2, 2).run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let wrong = function(|x: Tensor| x.reshape((7, 7)));
        wrong.probe(p, &mesh, &f32s([2, 3])).map(drop)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the function fails in its probe"), "{error}");
    }
}

#[test]
fn function_without_shapes_says_what_to_call() {
    let error = run_here(function(|x: Tensor| x.sqr()), &host(&[1], &[1.0])).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("call `like_input`, `outputs` or `probe`"),
        "{error}"
    );
}

#[test]
fn undeclared_capture_is_refused() {
    let factor = 3.0;
    let scale = function(move |x: Tensor| x * factor).like_input();
    let error = run_here(scale, &host(&[1], &[1.0]))
        .unwrap_err()
        .to_string();
    assert!(error.contains(".with(value)"), "{error}");
    let scale = function(move |x: Tensor| x * factor)
        .like_input()
        .with(factor);
    let y = run_here(scale, &host(&[1], &[2.0])).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [6.0]);
}

#[test]
fn wrong_output_shape_fails_the_call() {
    let wrong = function(|x: Tensor| x.to_dtype(DType::F64)).like_input();
    let error = run_here(wrong, &host(&[2], &[1.0, 2.0]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("returned f64[2], and f32[2] was declared"),
        "{error}"
    );
}

/// The model of the test below: this on the first mesh, [`second`] on the other.
fn first(x: &Tensor) -> candle_core::Result<Tensor> {
    (x * 1.5)?.tanh()
}

/// The loss of each element; the sum of all is the loss.
fn second(y: &Tensor) -> candle_core::Result<Tensor> {
    y.sqr()?.exp()
}

/// The gradient of `loss(x)` summed over all elements.
fn gradient(
    x: &Tensor,
    loss: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let x = Var::from_tensor(x)?;
    let gradients = loss(&x)?.sum_all()?.backward()?;
    Ok(gradients.get(&x).expect("the loss depends on x").clone())
}

/// A move between two meshes is differentiable: candle's gradients of the two parts, moved back
/// between them, are the gradient of the whole, to the bit.
#[test]
fn gradient_goes_through_a_move_between_meshes() {
    let values: Vec<f32> = (0..24).map(|i| i as f32 / 24.0 - 0.4).collect();
    let whole = Tensor::from_slice(&values, (4, 6), &candle_core::Device::Cpu).unwrap();
    let whole = gradient(&whole, |x| second(&first(x)?)).unwrap();
    let whole: Vec<f32> = whole.flatten_all().unwrap().to_vec1().unwrap();
    for processes in [1, 2, 4] {
        let results = Simulation::new(processes, 4).run(|p| {
            let meshes = p.mesh(&[("stage", 2), ("part", 2)])?.split("stage")?;
            let rows = meshes[0].sharding(spec!["part"]);
            let columns = meshes[1].sharding(spec![None, "part"]);
            let forward = function(|x: Tensor| first(&x)).like_input();
            let forward = p
                .jit(forward)
                .on(&meshes[0])
                .outputs(rows.clone())
                .build()?;
            let of_second = function(|y: Tensor| gradient(&y, second)).like_input();
            let of_second = p
                .jit(of_second)
                .on(&meshes[1])
                .outputs(columns.clone())
                .build()?;
            let of_first = function(|x: Tensor, dy: Tensor| gradient(&x, |x| first(x)? * &dy))
                .outputs(|(x, _)| Ok(x.clone()));
            let of_first = p
                .jit(of_first)
                .on(&meshes[0])
                .outputs(rows.clone())
                .build()?;

            let x = MpmdArray::from_slice(&[4, 6], &values)?;
            let x = p.device_put(&x, rows.clone())?;
            let y = forward.call(p, x.clone())?;
            let y = p.device_put(&y, columns)?;
            let dy = of_second.call(p, y)?;
            let dy = p.device_put(&dy, rows)?;
            let dx = of_first.call(p, (x, dy))?;
            let dx = p.device_put(&dx, meshes[0].replicated())?;
            Ok(dx.to_host()?.map(|dx| dx.to_vec::<f32>()).transpose()?)
        });
        let found: Vec<_> = results
            .into_iter()
            .filter_map(|result| result.unwrap())
            .collect();
        assert_eq!(
            found.len(),
            if processes == 4 { 2 } else { 1 },
            "{processes} processes"
        );
        assert!(
            found.iter().all(|found| *found == whole),
            "{found:?} and not {whole:?}"
        );
    }
}
