//! Ready kernels: values on both kinds of devices, and every error that their documentation names.

use std::ops::Range;

use crate::common::cuda::{CPU, CUDA};
use crate::common::watchdog;
use mpmd_core::aval::{DType, Element};
use mpmd_core::kernel::ready;
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
    let y = run_here(ready::matmul(), &(a, b)).unwrap();
    assert_eq!((y.shape(), values::<f32>(&y)), (&[2, 1, 2][..], vec![10.0, 13.0, 28.0, 40.0]));
    let (a, b) = (host(&[1, 2], &[1.0f64, 2.0]), host(&[2, 1], &[3.0f64, 4.0]));
    assert_eq!(values::<f64>(&run_here(ready::matmul(), &(a, b)).unwrap()), [11.0]);
    let empty = (host::<f32>(&[2, 0], &[]), host::<f32>(&[0, 2], &[]));
    assert_eq!(values::<f32>(&run_here(ready::matmul(), &empty).unwrap()), [0.0; 4]);
    for (a, b) in [
        (counted(&[2, 3]), counted(&[2, 3])),
        (counted(&[3]), counted(&[3, 2])),
        (counted(&[2, 3]), counted(&[1, 3, 2])),
        (counted(&[2, 3]), host(&[3, 1], &[0.0f64; 3])),
        (host(&[1, 1], &[1i32]), host(&[1, 1], &[1i32])),
    ] {
        let said = refused(ready::matmul(), &(a.clone(), b.clone()));
        let named = format!("not {} and {}", a.aval(), b.aval());
        assert!(said.contains("matmul takes [.., m, k] and [k, n]"), "{said}");
        assert!(said.contains(&named), "{said}");
    }
}

#[test]
fn sums_and_multiples_keep_the_dtype() {
    let _limit = watchdog(60);
    let y = run_here(ready::add(), &(host(&[2], &[1u8, 255]), host(&[2], &[2u8, 2]))).unwrap();
    assert_eq!(values::<u8>(&y), [3, 1]);
    let said = refused(ready::add(), &(counted(&[2]), counted(&[1, 2])));
    assert!(said.contains("not f32[2] and f32[1,2]"), "{said}");
    let said = refused(ready::add(), &(host(&[1], &[true]), host(&[1], &[true])));
    assert!(said.contains("not bool[1] and bool[1]"), "{said}");
    let y = run_here(ready::scale(0.5), &counted(&[3])).unwrap();
    assert_eq!(values::<f32>(&y), [0.0, 0.5, 1.0]);
    let y = run_here(ready::scale(3.0), &host(&[1], &[half::bf16::from_f32(2.0)])).unwrap();
    assert_eq!(values::<half::bf16>(&y), [half::bf16::from_f32(6.0)]);
    let said = refused(ready::scale(2.0), &host(&[1], &[1i32]));
    assert!(said.contains("scale takes f32, f64, f16, bf16, not i32[1]: use `cast`"), "{said}");
}

#[test]
fn sums_run_over_any_dimensions() {
    let _limit = watchdog(60);
    let x = counted(&[2, 3, 4]);
    let whole = values::<f32>(&x);
    for dims in [&[][..], &[0], &[1], &[2], &[0, 1], &[2, 0], &[1, 2], &[0, 1, 2]] {
        let y = run_here(ready::sum(dims), &x).unwrap();
        let kept: Vec<usize> = (0..3).filter(|dim| !dims.contains(dim)).collect();
        let shape: Vec<usize> = kept.iter().map(|dim| [2, 3, 4][*dim]).collect();
        let mut expected = vec![0.0; shape.iter().product()];
        for (i, x) in whole.iter().enumerate() {
            let index = [i / 12, i / 4 % 3, i % 4];
            let to = kept.iter().zip(&shape).fold(0, |to, (dim, size)| to * size + index[*dim]);
            expected[to] += x;
        }
        assert_eq!((y.shape(), values::<f32>(&y)), (&shape[..], expected), "{dims:?}");
    }
    assert_eq!(
        values::<i32>(&run_here(ready::sum(&[0]), &host(&[2], &[i32::MAX, 1])).unwrap()),
        [i32::MIN]
    );
    // In single precision, 2^24 + 1 + 1 is 2^24.
    let large = host(&[3], &[16_777_216.0f32, 1.0, 1.0]);
    assert_eq!(values::<f32>(&run_here(ready::sum(&[0]), &large).unwrap()), [16_777_218.0]);
    let none = run_here(ready::sum(&[1]), &host::<f64>(&[2, 0], &[])).unwrap();
    assert_eq!(values::<f64>(&none), [0.0, 0.0]);
    let scalar = run_here(ready::sum(&[]), &HostArray::scalar(7i64)).unwrap();
    assert_eq!(values::<i64>(&scalar), [7]);
    for dims in [[3, 0], [1, 1]] {
        let said = refused(ready::sum(&dims), &x);
        assert!(said.contains("of f32[2,3,4] cannot be summed"), "{said}");
    }
    assert!(
        refused(ready::sum(&[0]), &host(&[1], &[1u8])).contains("sum takes f32, f64, i32, i64")
    );
}

#[test]
fn casts_follow_the_rules_of_as() {
    let _limit = watchdog(60);
    let x = host(&[5], &[-1.5f32, 300.7, f32::NAN, 0.25, f32::INFINITY]);
    let cast = |dtype| run_here(ready::cast(dtype), &x).unwrap();
    assert_eq!(values::<u8>(&cast(DType::U8)), [0, 255, 0, 0, 255]);
    assert_eq!(values::<i64>(&cast(DType::I64)), [-1, 300, 0, 0, i64::MAX]);
    assert_eq!(values::<bool>(&cast(DType::Bool)), [true, true, true, true, true]);
    assert_eq!(values::<f64>(&cast(DType::F64))[1], f64::from(300.7f32));
    let x = host(&[3], &[-1i64, 1 << 40, (1 << 53) + 1]);
    let cast = |dtype| run_here(ready::cast(dtype), &x).unwrap();
    assert_eq!(values::<u8>(&cast(DType::U8)), [255, 0, 1]);
    assert_eq!(values::<u64>(&cast(DType::U64))[0], u64::MAX);
    assert_eq!(values::<f32>(&cast(DType::F32))[..2], [-1.0, 1.099_511_6e12]);
    assert_eq!(
        values::<half::f16>(&cast(DType::F16))[..2],
        [-1.0, f32::INFINITY].map(half::f16::from_f32)
    );
    let x = host(&[1], &[u64::MAX]);
    assert_eq!(values::<f64>(&run_here(ready::cast(DType::F64), &x).unwrap()), [u64::MAX as f64]);
    let said = refused(ready::cast(DType::C64), &x);
    assert!(said.contains("cast has neither complex numbers nor objects: u64[1] to c64"), "{said}");
}

#[test]
fn concatenated_and_sliced_parts_are_the_originals() {
    let _limit = watchdog(60);
    let (a, b) = (counted(&[2, 3]), counted(&[2, 1]));
    let joined = run_here(ready::concatenate(1), &vec![a.clone(), b.clone(), a.clone()]).unwrap();
    let expected = [0.0, 1.0, 2.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 3.0, 4.0, 5.0];
    assert_eq!((joined.shape(), values::<f32>(&joined)), (&[2, 7][..], expected.to_vec()));
    let back = run_here(ready::slice(&[0..2, 4..7]), &joined).unwrap();
    assert_eq!(values::<f32>(&back), values::<f32>(&a));
    let none = run_here(ready::slice(&[1..1, 0..7]), &joined).unwrap();
    assert_eq!(none.shape(), [0, 7]);
    let scalar = run_here(ready::slice(&[]), &HostArray::scalar(true)).unwrap();
    assert_eq!(values::<bool>(&scalar), [true]);
    for (dim, x, named) in [
        (1, vec![], "at least one"),
        (2, vec![a.clone()], "f32[2,3] has no dimension 2"),
        (0, vec![a.clone(), b], "f32[2,1] cannot be joined with f32[2,3] along dimension 0"),
        (0, vec![a.clone(), host(&[1, 3], &[0u8; 3])], "u8[1,3] cannot be joined"),
        (0, vec![a.clone(), counted(&[3])], "f32[3] cannot be joined"),
    ] {
        let said = refused(ready::concatenate(dim), &x);
        assert!(said.contains(named), "{said}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "an invalid range")]
    let wrong: [&[Range<usize>]; 3] = [&[0..2, 0..3, 0..1], &[0..3, 0..3], &[1..0, 0..3]];
    for ranges in wrong {
        let said = refused(ready::slice(ranges), &a);
        assert!(said.contains("are not ranges of f32[2,3]"), "{said}");
    }
}

#[test]
fn one_hot_marks_the_class_of_each_label() {
    let _limit = watchdog(60);
    let y = run_here(ready::one_hot(3), &host(&[2, 1], &[2i32, 0])).unwrap();
    assert_eq!((y.shape(), values(&y)), (&[2, 1, 3][..], vec![0.0f32, 0.0, 1.0, 1.0, 0.0, 0.0]));
    for label in [3, -1] {
        let said = refused(ready::one_hot(3), &host(&[2], &[0, label]));
        assert!(said.contains("label 1 of the region [0..2]"), "{said}");
        assert!(said.contains(&format!("there is no class {label} among 3")), "{said}");
    }
    assert!(
        refused(ready::one_hot(3), &host(&[1], &[1u8])).contains("one_hot takes i32, not u8[1]")
    );
}

#[test]
fn losses_and_gradients_match_the_formula() {
    let _limit = watchdog(60);
    let logits = [0.3, -1.2, 2.0, 1000.0, 999.0, -1000.0];
    let labels = host(&[2], &[1i32, 0]);
    let run = |logits: &[f64]| {
        let x = (host(&[2, 3], logits), labels.clone());
        let (sum, gradient) = run_here(ready::softmax_cross_entropy(), &x).unwrap();
        (values::<f64>(&sum)[0], values::<f64>(&gradient))
    };
    let (sum, gradient) = run(&logits);
    let first: f64 = logits[..3].iter().map(|z: &f64| z.exp()).sum::<f64>().ln() + 1.2;
    let second = (1.0 + (-1.0f64).exp()).ln();
    assert!((sum - first - second).abs() < 1e-12, "{sum} {first} {second}");
    for i in 0..6 {
        let moved = |by: f64| {
            let mut logits = logits;
            logits[i] += by;
            run(&logits).0
        };
        let slope = (moved(1e-4) - moved(-1e-4)) / 2e-4;
        assert!((slope - gradient[i]).abs() < 1e-6, "{i}: {slope} {}", gradient[i]);
    }
    let single: Vec<f32> = logits.map(|z| z as f32).to_vec();
    let x = (host(&[2, 3], &single), labels);
    let (sum32, gradient32) = run_here(ready::softmax_cross_entropy(), &x).unwrap();
    assert!((f64::from(values::<f32>(&sum32)[0]) - sum).abs() < 1e-6);
    for (single, double) in values::<f32>(&gradient32).iter().zip(gradient) {
        assert!((f64::from(*single) - double).abs() < 1e-6);
    }
}

#[test]
fn invalid_labels_and_shapes_of_losses_are_named() {
    let _limit = watchdog(60);
    for label in [3, -1, i32::MAX] {
        let x = (counted(&[2, 3]), host(&[2], &[0i32, label]));
        let said = refused(ready::softmax_cross_entropy(), &x);
        let named = format!("row 1 of the labels: there is no class {label} among 3");
        assert!(said.contains(&named), "{said}");
    }
    for x in [
        (counted(&[2, 3]), host(&[3], &[0i32; 3])),
        (counted(&[2]), host(&[2], &[0i32; 2])),
        (counted(&[2, 3]), host(&[2], &[0u8; 2])),
        (host(&[1, 1], &[0i32]), host(&[1], &[0i32])),
    ] {
        let said = refused(ready::softmax_cross_entropy(), &x);
        assert!(said.contains("takes logits [n, c], f32 or f64, and labels i32[n]"), "{said}");
    }
}

/// Runs `kernel` on two devices, with each input and the output in the sharding given. Returns the
/// first output's values.
fn divided<K: Kernel<In = (MpmdArray, MpmdArray), Out: FirstOutput>>(
    kernel: K,
    (a, b): (HostArray, HostArray),
    shardings: impl Fn(&Mesh) -> [Sharding; 3],
) -> Result<Vec<f32>> {
    let mut p = Program::builder().devices(2).alone()?;
    let mesh = p.mesh(&[("x", 2)])?;
    let [of_a, of_b, of_y] = shardings(&mesh);
    let a = p.device_put(&MpmdArray::from_host(a), of_a)?;
    let b = p.device_put(&MpmdArray::from_host(b), of_b)?;
    let kernel = p.jit(kernel).on(&mesh).outputs(K::Out::prefix(of_y, &mesh)).build()?;
    let y = kernel.call(&mut p, (a, b))?.first().to_host().map(|y| y.unwrap().to_vec::<f32>());
    let _ = p.finish();
    Ok(y??)
}

/// The outputs of a kernel, of which the first is looked at.
trait FirstOutput {
    fn first(self) -> MpmdArray;

    /// Returns the shardings of all outputs; the last one has `sharding`.
    fn prefix(sharding: Sharding, mesh: &Mesh) -> mpmd_core::tree::PrefixTree<Sharding>;
}

impl FirstOutput for MpmdArray {
    fn first(self) -> MpmdArray {
        self
    }

    fn prefix(sharding: Sharding, _: &Mesh) -> mpmd_core::tree::PrefixTree<Sharding> {
        sharding.into()
    }
}

impl FirstOutput for (MpmdArray, MpmdArray) {
    fn first(self) -> MpmdArray {
        self.0
    }

    fn prefix(sharding: Sharding, mesh: &Mesh) -> mpmd_core::tree::PrefixTree<Sharding> {
        (mesh.replicated(), sharding).into()
    }
}

/// A kernel of one input, as one that ignores a second.
struct First<K>(K);

impl<K: Kernel<In = MpmdArray, Out = MpmdArray>> Kernel for First<K> {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (x, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        self.0.infer(x)
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (x, _): (View<'_>, View<'_>),
        y: ViewMut<'_>,
    ) -> Result<()> {
        self.0.run(cx, x, y)
    }
}

/// A kernel of a list of inputs, with two.
struct Two<K>(K);

impl<K: Kernel<In = Vec<MpmdArray>, Out = MpmdArray>> Kernel for Two<K> {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (a, b): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        self.0.infer(&vec![a.clone(), b.clone()])
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (a, b): (View<'_>, View<'_>),
        y: ViewMut<'_>,
    ) -> Result<()> {
        self.0.run(cx, vec![a, b], y)
    }
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

#[test]
fn arrays_that_are_divided_alike_give_the_same_values() {
    let _limit = watchdog(60);
    let (a, b) = (counted(&[4, 4]), counted(&[4, 4]));
    let both = || (a.clone(), b.clone());
    type Shard = fn(&Mesh) -> Sharding;
    let on = |shards: [Shard; 3]| move |mesh: &Mesh| shards.map(|shard| shard(mesh));
    let product = divided(ready::matmul(), both(), on([whole; 3])).unwrap();
    assert_eq!(divided(ready::matmul(), both(), on([rows, whole, rows])).unwrap(), product);
    assert_eq!(divided(ready::matmul(), both(), on([whole, columns, columns])).unwrap(), product);
    let twice: Vec<f32> = (0..16).map(|i| 2.0 * i as f32).collect();
    assert_eq!(divided(ready::add(), both(), on([columns; 3])).unwrap(), twice);
    assert_eq!(divided(First(ready::scale(2.0)), both(), on([rows; 3])).unwrap(), twice);
    let sums = divided(First(ready::sum(&[1])), both(), on([rows, whole, rows])).unwrap();
    assert_eq!(sums, [6.0, 22.0, 38.0, 54.0]);
    let joined = divided(Two(ready::concatenate(1)), both(), on([rows; 3])).unwrap();
    assert_eq!(joined[4..12], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    // Whole inputs may give a divided output.
    let joined = divided(Two(ready::concatenate(0)), both(), on([whole, whole, rows])).unwrap();
    assert_eq!(joined[12..20], [12.0, 13.0, 14.0, 15.0, 0.0, 1.0, 2.0, 3.0]);
    let cut = divided(First(ready::slice(&[0..4, 1..3])), both(), on([rows, whole, rows]));
    assert_eq!(cut.unwrap(), [1.0, 2.0, 5.0, 6.0, 9.0, 10.0, 13.0, 14.0]);
    let labels = (host(&[4], &[1i32, 0, 3, 2]), b.clone());
    let marks = divided(First(ready::one_hot(4)), labels, on([whole, whole, columns])).unwrap();
    assert_eq!(marks.iter().enumerate().filter(|(_, mark)| **mark == 1.0).count(), 4);
    assert_eq!((marks[1], marks[4], marks[11], marks[14]), (1.0, 1.0, 1.0, 1.0));
}

#[test]
fn divided_dimensions_that_are_needed_whole_are_errors() {
    let _limit = watchdog(60);
    let (a, b) = (counted(&[4, 4]), counted(&[4, 4]));
    let both = || (a.clone(), b.clone());
    type Shard = fn(&Mesh) -> Sharding;
    let on = |shards: [Shard; 3]| move |mesh: &Mesh| shards.map(|shard| shard(mesh));
    let named = |result: Result<Vec<f32>>, part: &str| {
        let said = result.expect_err("never a wrong value").to_string();
        assert!(said.contains(part), "{said}\n lacks {part}");
    };
    let inner = "dimension 1 of input 0, f32[4,4], is divided: this device has";
    named(divided(ready::matmul(), both(), on([columns, whole, whole])), inner);
    let inner = "dimension 0 of input 1, f32[4,4], is divided: this device has";
    named(divided(ready::matmul(), both(), on([whole, rows, whole])), inner);
    let product = "of the output, but [0..4, 0..4] of the product of its inputs";
    named(divided(ready::matmul(), both(), on([whole, whole, columns])), product);
    named(divided(ready::add(), both(), on([rows, columns, rows])), "of input 1, but");
    named(divided(First(ready::scale(2.0)), both(), on([rows, whole, whole])), "of the input, but");
    named(divided(First(ready::cast(DType::F32)), both(), on([rows, whole, whole])), "shard them");
    let summed = "dimension 0 of the input, f32[4,4], is divided";
    named(divided(First(ready::sum(&[0])), both(), on([rows, whole, whole])), summed);
    let kept = "of the output, but [0..2] of the sums of its input";
    named(divided(First(ready::sum(&[1])), both(), on([rows, whole, whole])), kept);
    let joined = "of input 0, but its part of the output needs";
    named(divided(Two(ready::concatenate(0)), both(), on([rows; 3])), joined);
    let cut = "of the input, but its part of the output needs";
    named(divided(First(ready::slice(&[0..2, 0..4])), both(), on([rows; 3])), cut);
    let labels = || (host(&[4], &[0i32; 4]), b.clone());
    named(
        divided(First(ready::one_hot(2)), labels(), on([rows, whole, whole])),
        "of the labels, but",
    );
    let losses = || (a.clone(), host(&[4], &[0i32; 4]));
    let loss = |shards| divided(ready::softmax_cross_entropy(), losses(), on(shards));
    named(loss([columns, whole, columns]), "dimension 1 of the logits");
    named(loss([rows, rows, rows]), "dimension 0 of the logits");
    named(loss([whole, rows, whole]), "dimension 0 of the labels");
    named(loss([whole, whole, rows]), "of the gradient, but");
}

#[test]
fn ready_kernels_compute_the_same_on_cuda_devices() {
    if elsewhere!() {
        return;
    }
    let _limit = watchdog(100);
    let found = [CPU, CUDA].map(|kind| {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let whole = mesh.replicated();
        let matmul = p.jit(ready::matmul()).on(&mesh).outputs(&whole).build().unwrap();
        let loss = p.jit(ready::softmax_cross_entropy()).on(&mesh).outputs(&whole).build().unwrap();
        let join = p.jit(ready::concatenate(0)).on(&mesh).outputs(&whole).build().unwrap();
        let mut put = |x: HostArray| p.device_put(&MpmdArray::from_host(x), &whole).unwrap();
        let (a, b) = (put(counted(&[2, 3])), put(counted(&[3, 3])));
        let labels = put(host(&[2], &[2i32, 0]));
        let logits = matmul.call(&mut p, (a, b)).unwrap();
        let (_, gradient) = loss.call(&mut p, (logits.clone(), labels)).unwrap();
        let y = join.call(&mut p, vec![logits, gradient]).unwrap();
        let y = y.to_host().unwrap().unwrap().to_vec::<f32>().unwrap();
        p.finish().unwrap();
        y
    });
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0][..6], [15.0, 18.0, 21.0, 42.0, 54.0, 66.0]);
}
