//! Layers on CUDA devices: each function against double precision, in `f32` and `bf16`.

mod attention;
mod paged;
mod pointwise;
mod rotary;
mod rows;

use half::bf16;
use mpmd_core::aval::{DType, Element};
use mpmd_core::cuda::{Cuda, Source, layers};
use mpmd_core::prelude::*;

use crate::cuda_kernels::on_device;

/// Both dtypes that layers have.
const BOTH: [DType; 2] = [DType::F32, DType::Bf16];

/// Numbers of a normal distribution, the same ones for the same `seed`.
fn random(count: usize, seed: u64) -> Vec<f64> {
    let mut numbers = fastrand::Rng::with_seed(seed);
    let mut one = || (0..6).map(|_| numbers.f64()).sum::<f64>() * 2f64.sqrt() - 3.0 * 2f64.sqrt();
    (0..count).map(|_| one()).collect()
}

/// An array on the host, whose numbers are rounded to `dtype`.
fn array(dtype: DType, numbers: &[f64]) -> HostArray {
    let shape = [numbers.len()];
    match dtype {
        DType::F32 => of(&numbers.iter().map(|x| *x as f32).collect::<Vec<_>>()),
        DType::Bf16 => {
            let halves: Vec<bf16> = numbers.iter().map(|x| bf16::from_f32(*x as f32)).collect();
            HostArray::from_slice(&shape, &halves).unwrap()
        }
        other => panic!("an array of {other}"),
    }
}

fn of<E: Element>(values: &[E]) -> HostArray {
    HostArray::from_slice(&[values.len()], values).unwrap()
}

fn numbers(array: &HostArray) -> Vec<f64> {
    match array.dtype() {
        DType::F32 => array
            .to_vec::<f32>()
            .unwrap()
            .iter()
            .map(|x| f64::from(*x))
            .collect(),
        DType::Bf16 => array
            .to_vec::<bf16>()
            .unwrap()
            .iter()
            .map(|x| x.to_f64())
            .collect(),
        other => panic!("numbers of {other}"),
    }
}

/// Random numbers that `dtype` has, on the host and as they are.
fn sample(dtype: DType, count: usize, seed: u64) -> (HostArray, Vec<f64>) {
    let array = array(dtype, &random(count, seed));
    let exact = numbers(&array);
    (array, exact)
}

fn shape(dtype: DType, elements: usize) -> ShapedArray {
    ShapedArray::new(&[elements], dtype)
}

/// Runs `work` twice in a kernel on a CUDA device. Returns the values of the outputs, which must
/// have the same bits both times.
fn device<F>(
    pair: &'static layers::SourcePair,
    inputs: &[HostArray],
    outputs: &[ShapedArray],
    work: F,
) -> Vec<HostArray>
where
    F: Fn(&Cuda<'_>, &[View<'_>], &mut [ViewMut<'_>]) -> Result<()> + Clone + Send + Sync + 'static,
{
    let sources: Vec<&'static Source> = BOTH.iter().filter_map(|dtype| pair.of(*dtype)).collect();
    let run = || {
        let work = work.clone();
        on_device(&sources, inputs, outputs, move |cuda, x, y| {
            work(&cuda, x, y)
        })
        .unwrap()
    };
    let (first, second) = (run(), run());
    for (first, second) in first.iter().zip(&second) {
        assert_eq!(
            first.bytes()[..],
            second.bytes()[..],
            "other bits in a second run"
        );
    }
    first
}

/// Checks that values differ from `exact` by at most `bound` in f32, and by 1e-2 in bf16, each
/// relative to one plus its size. NaN must be NaN.
#[track_caller]
fn close(name: &str, found: &HostArray, exact: &[f64], bound: f64) {
    let bound = if found.dtype() == DType::Bf16 {
        1e-2
    } else {
        bound
    };
    let found = numbers(found);
    assert_eq!(found.len(), exact.len(), "{name}");
    let mut most = 0.0f64;
    for (at, (found, exact)) in found.iter().zip(exact).enumerate() {
        if exact.is_nan() || found.is_nan() {
            assert!(
                exact.is_nan() && found.is_nan(),
                "{name} {at}: {found}, not {exact}"
            );
            continue;
        }
        let off = (found - exact).abs() / (1.0 + exact.abs());
        assert!(
            off <= bound,
            "{name} {at}: {found}, not {exact}: off by {off:.1e}"
        );
        most = most.max(off);
    }
    println!("{name}: off by {most:.1e} of {bound:.0e}");
}

#[test]
fn sources_are_those_of_a_dtype() {
    let names = |dtype, dim| {
        let sources = layers::sources(dtype, dim);
        sources
            .iter()
            .map(|source| source.name())
            .collect::<Vec<_>>()
    };
    let names_of_bf16 = names(DType::Bf16, 128);
    assert!(
        names_of_bf16.contains(&"attention.cu 128 of bf16"),
        "{names_of_bf16:?}"
    );
    assert!(
        names_of_bf16.iter().all(|name| name.ends_with("of bf16")),
        "{names_of_bf16:?}"
    );
    assert_eq!(
        (names(DType::F32, 64).len(), names(DType::F32, 257).len()),
        (9, 8)
    );
    assert_eq!(names(DType::F64, 64), [""; 0]);
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    if softcuda::again!() {
        return;
    }
    use layers::{CudaAttention, CudaNorm, Heads};
    let (x, _) = sample(DType::F32, 12, 1);
    let said = |work: fn(&Cuda<'_>, &[View<'_>], &mut [ViewMut<'_>]) -> Result<()>| {
        let inputs = [x.clone(), of(&[1u32; 12])];
        let outputs = [shape(DType::F32, 12), shape(DType::F32, 8)];
        let ran = on_device(&[], &inputs, &outputs, move |cuda, x, y| work(&cuda, x, y));
        ran.unwrap_err().to_string()
    };
    let norm = said(|cuda, x, y| {
        let [out, statistics] = y else {
            panic!("two outputs")
        };
        let norm = CudaNorm {
            rows: 4,
            width: 4,
            eps: 1e-5,
            remove_mean: true,
        };
        norm.forward(cuda, &x[0], x[0].at(0), None, out, statistics)
    });
    assert!(
        norm.contains("norm: x has 12 elements: expected 16"),
        "{norm}"
    );
    let dtype = said(|cuda, x, y| {
        layers::activate(
            cuda,
            layers::ActivationCurve::Gelu,
            layers::MatrixShape::new(1, 4),
            &x[1],
            None,
            &mut y[0],
        )
    });
    assert!(
        dtype.contains("activation of u32: expected f32 or bf16"),
        "{dtype}"
    );
    let other = said(|cuda, x, y| layers::add(cuda, 4, &x[0], &x[1], &mut y[0]));
    assert!(
        other.contains("sum: the residual is of u32: expected f32"),
        "{other}"
    );
    let only_read = said(|cuda, x, _| layers::add(cuda, 4, &x[0], &x[0], &x[0]));
    assert!(
        only_read.contains("cannot go to values that are only read"),
        "{only_read}"
    );
    let heads = said(|cuda, x, y| {
        let [out, normalizers] = y else {
            panic!("two outputs")
        };
        let q = Heads::in_rows(&x[0], 2, 6, 3);
        let attention = CudaAttention {
            groups: 3,
            ..CudaAttention::causal(1, 2, 2, 3)
        };
        attention.forward(cuda, [q; 3], Heads::in_rows(out, 2, 6, 3), normalizers)
    });
    assert!(
        heads.contains("2 heads cannot share 3 heads of keys"),
        "{heads}"
    );
    let short = said(|cuda, x, y| {
        let [out, normalizers] = y else {
            panic!("two outputs")
        };
        let q = Heads::in_rows(&x[0], 3, 6, 3);
        let attention = CudaAttention::causal(1, 2, 3, 3);
        attention.forward(cuda, [q; 3], Heads::in_rows(out, 3, 6, 3), normalizers)
    });
    assert!(
        short.contains("attention: q has 12 elements: expected 18"),
        "{short}"
    );
}
