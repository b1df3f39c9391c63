//! The kernel `matmul`: values on both kinds of devices, and every error that its documentation
//! names.

use crate::common::cuda::{CPU, CUDA};
use crate::common::watchdog;
use mpmd_core::aval::Element;
use mpmd_core::kernel::matmul;
use mpmd_core::prelude::*;
use mpmd_core::run_here;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::Mesh;

fn host<T: Element>(shape: &[usize], values: &[T]) -> HostArray {
    HostArray::from_slice(shape, values).unwrap()
}

fn counted(shape: &[usize]) -> HostArray {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32).collect();
    host(shape, &values)
}

/// Returns the text of the error of a call with these inputs on one device, by `run_here`.
fn refused<K: Kernel>(kernel: K, x: &<K::In as Tree>::With<HostArray>) -> String {
    match run_here(kernel, x) {
        Ok(_) => panic!("the kernel must refuse this"),
        Err(error) => error.to_string(),
    }
}

fn values<T: Element>(array: &HostArray) -> Vec<T> {
    array.to_vec().unwrap()
}

#[test]
fn products_have_leading_dimensions_and_two_dtypes() {
    let _limit = watchdog(60);
    let (a, b) = (counted(&[2, 1, 3]), counted(&[3, 2]));
    let y = run_here(matmul(), &(a, b)).unwrap();
    assert_eq!(
        (y.shape(), values::<f32>(&y)),
        (&[2, 1, 2][..], vec![10.0, 13.0, 28.0, 40.0])
    );
    let (a, b) = (host(&[1, 2], &[1.0f64, 2.0]), host(&[2, 1], &[3.0f64, 4.0]));
    assert_eq!(values::<f64>(&run_here(matmul(), &(a, b)).unwrap()), [11.0]);
    let empty = (host::<f32>(&[2, 0], &[]), host::<f32>(&[0, 2], &[]));
    assert_eq!(
        values::<f32>(&run_here(matmul(), &empty).unwrap()),
        [0.0; 4]
    );
    for (a, b) in [
        (counted(&[2, 3]), counted(&[2, 3])),
        (counted(&[3]), counted(&[3, 2])),
        (counted(&[2, 3]), counted(&[1, 3, 2])),
        (counted(&[2, 3]), host(&[3, 1], &[0.0f64; 3])),
        (host(&[1, 1], &[1i32]), host(&[1, 1], &[1i32])),
    ] {
        let said = refused(matmul(), &(a.clone(), b.clone()));
        let named = format!("not {} and {}", a.aval(), b.aval());
        assert!(
            said.contains("matmul takes [.., m, k] and [k, n]"),
            "{said}"
        );
        assert!(said.contains(&named), "{said}");
    }
}

/// Multiplies on two devices, with each input and the output in the sharding given.
fn divided(
    (a, b): (HostArray, HostArray),
    shardings: [fn(&Mesh) -> Sharding; 3],
) -> Result<Vec<f32>> {
    let mut p = Program::builder().devices(2).alone()?;
    let mesh = p.mesh(&[("x", 2)])?;
    let [of_a, of_b, of_y] = shardings.map(|sharding| sharding(&mesh));
    let a = p.device_put(&MpmdArray::from_host(a), of_a)?;
    let b = p.device_put(&MpmdArray::from_host(b), of_b)?;
    let kernel = p.jit(matmul()).on(&mesh).outputs(of_y).build()?;
    let y = kernel.call(&mut p, (a, b))?;
    let y = p.device_put(&y, mesh.replicated())?.to_host()?;
    p.finish()?;
    Ok(y.unwrap().to_vec::<f32>()?)
}

fn whole(mesh: &Mesh) -> Sharding {
    mesh.replicated()
}

fn rows(mesh: &Mesh) -> Sharding {
    mesh.sharding(spec!["x"])
}

fn columns(mesh: &Mesh) -> Sharding {
    mesh.sharding(spec![None, "x"])
}

fn sums(mesh: &Mesh) -> Sharding {
    mesh.replicated().unreduced(&["x"]).unwrap()
}

#[test]
fn arrays_that_are_divided_alike_give_the_same_values() {
    let _limit = watchdog(60);
    let both = || (counted(&[4, 4]), counted(&[4, 4]));
    let product = divided(both(), [whole; 3]).unwrap();
    for shardings in [
        [rows, whole, rows],
        [whole, columns, columns],
        // Each device has a summand.
        [columns, rows, sums],
    ] {
        assert_eq!(divided(both(), shardings).unwrap(), product);
    }
}

#[test]
fn host_values_beside_partial_sums_are_divided_as_they_are() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(4).alone().unwrap();
    let mesh = p.mesh(&[("x", 2), ("y", 2)]).unwrap();
    let host = MpmdArray::from_host(counted(&[4, 4]));
    let a = p.device_put(&host, mesh.sharding(spec!["y", "x"])).unwrap();
    let b = p.device_put(&host, mesh.sharding(spec!["x"])).unwrap();
    let sums = mesh.sharding(spec!["y"]).unreduced(&["x"]).unwrap();
    let product = p.jit(matmul()).on(&mesh).outputs(&sums).build().unwrap();
    let product = product.call(&mut p, (a, b)).unwrap();

    let scale = p.jit(elementwise(|x: f32, y: f32| x * y)).on(&mesh);
    let scale = scale.inputs(&sums).outputs(&sums).build().unwrap();
    let y = scale.call(&mut p, (product, host)).unwrap();
    let y = p.device_put(&y, mesh.replicated()).unwrap().to_host();
    let whole = run_here(matmul(), &(counted(&[4, 4]), counted(&[4, 4]))).unwrap();
    let scaled = values::<f32>(&whole).into_iter().zip(0..);
    let expected: Vec<f32> = scaled.map(|(x, i)| x * i as f32).collect();
    assert_eq!(values::<f32>(&y.unwrap().unwrap()), expected);
    p.finish().unwrap();
}

#[test]
fn dimensions_that_are_divided_in_different_ways_are_refused_at_issue() {
    let _limit = watchdog(60);
    let both = || (counted(&[4, 4]), counted(&[4, 4]));
    let refused = |shardings, expected: &str| {
        let said = divided(both(), shardings).unwrap_err().to_string();
        let call = concat!(file!(), ":");
        for part in [expected, call] {
            assert!(said.contains(part), "{said}\n lacks {part}");
        }
    };
    let inner = "dimension 1 of input 0 and dimension 0 of input 1 are divided in different ways";
    refused([columns, whole, whole], inner);
    refused([whole, rows, whole], inner);
    let outer = "dimension 1 of input 1 and dimension 1 of output 0 are divided in different ways";
    refused([whole, whole, columns], outer);
    let summands = "output 0 has 2 summands, one for each part of `k`, but its sharding is for 1";
    refused([columns, rows, whole], summands);
    refused([whole, whole, sums], "output 0 has 1 summands");
}

#[test]
fn products_are_the_same_on_cuda_devices() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let found = [CPU, CUDA].map(|kind| {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let whole = mesh.replicated();
        let product = p.jit(matmul()).on(&mesh).outputs(&whole).build().unwrap();
        let mut put = |x: HostArray| p.device_put(&MpmdArray::from_host(x), &whole).unwrap();
        let (a, b) = (put(counted(&[2, 3])), put(counted(&[3, 3])));
        let y = product.call(&mut p, (a, b)).unwrap();
        let y = y.to_host().unwrap().unwrap().to_vec::<f32>().unwrap();
        p.finish().unwrap();
        y
    });
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0], [15.0, 18.0, 21.0, 42.0, 54.0, 66.0]);
}
