//! Pipeline errors name the user's line, the stage, the microbatch, the cause and a remedy.

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;

use crate::stages::{Rows, Scale, Square, WIDTH, chain, meshes, microbatches, params};

/// Returns the text of the error of a call. Panics if the call succeeds or the text does not begin
/// with its line.
macro_rules! refused {
    ($call:expr) => {{
        let error = $call.map(drop).expect_err(stringify!($call)).to_string();
        let line = |line: &u32| {
            error.starts_with(&format!("mpmd-core/tests/all/pipeline_errors.rs:{line}:"))
        };
        assert!(
            (line!()..line!() + 4).any(|at| line(&at)),
            "{error} is not at line {}",
            line!()
        );
        error
    }};
}

/// Runs a program on two processes with one device each. Each process must return as many texts as
/// `expected` has, each containing all parts expected at its place.
fn both_say(expected: &[&[&str]], program: impl Fn(&mut Program) -> Result<Vec<String>> + Sync) {
    for result in Simulation::new(2, 2).run(program) {
        let said = result.unwrap();
        assert_eq!(said.len(), expected.len(), "{said:#?}");
        for (said, expected) in said.iter().zip(expected) {
            for part in *expected {
                assert!(said.contains(part), "{said}\n  lacks {part}");
            }
        }
    }
}

fn schedule() -> Schedule {
    Schedule::gpipe(2, 2).unwrap()
}

/// Creates an array of `f32` ones of this shape, replicated on a mesh.
fn ones(p: &mut Program, shape: &[usize], mesh: &Mesh) -> Result<MpmdArray> {
    let count = shape.iter().product();
    p.device_put(
        &MpmdArray::from_slice(shape, &vec![1.0f32; count])?,
        mesh.replicated(),
    )
}

type Change<'a> = &'a dyn Fn(usize, Microbatch<MpmdArray>) -> Microbatch<MpmdArray>;

/// Returns a batch of two microbatches of one row; `change` has replaced each, given (number,
/// microbatch).
fn batch(
    p: &mut Program,
    pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
    change: Change<'_>,
) -> Result<Vec<Microbatch<MpmdArray>>> {
    let batch = microbatches(p, pipeline, &[1; 2])?;
    Ok(batch
        .into_iter()
        .enumerate()
        .map(|(number, microbatch)| change(number, microbatch))
        .collect())
}

#[test]
fn side_inputs_that_stages_do_not_take_are_refused_at_once() {
    let expected: [&[&str]; 6] = [
        &[
            "Pipeline::train_step: microbatch 1: stage 1 `Square` needs a side input: call \
             `.side(1, …)`",
        ],
        &[
            "Pipeline::train_step: microbatch 1: stage 0 `Scale` takes no side input: leave out \
             `.side(0, …)`",
        ],
        &[
            "microbatch 0: a side input is for stage 9, and there is no stage 9; the pipeline has \
             stages 0 to 1",
        ],
        &[
            "microbatch 0: the side input of stage 1 `Square` is not the tree that it takes",
            "at the root: expected a leaf, found [0, 1]; see `.side(1, …)`",
        ],
        &["Pipeline::forward: microbatch 0: stage 1 `Square` needs a side input"],
        &["Pipeline::forward_all: microbatch 0: stage 1 `Square` needs a side input"],
    ];
    both_say(&expected, |p| {
        let mut pipeline = chain(p, &schedule(), false)?;
        let x = ones(p, &[1, WIDTH], pipeline.mesh(0))?;
        let bare = || Microbatch::new(x.clone());
        let missing = batch(p, &pipeline, &|number, one| {
            if number == 1 { bare() } else { one }
        })?;
        let extra = |number, one: Microbatch<_>| {
            if number == 1 {
                one.side(0, x.clone())
            } else {
                one
            }
        };
        let extra = batch(p, &pipeline, &extra)?;
        let beyond = batch(p, &pipeline, &|_, one| one.side(9, x.clone()))?;
        let pair = batch(p, &pipeline, &|_, one| one.side(1, (x.clone(), x.clone())))?;
        let before = p.operations();
        let said = vec![
            refused!(pipeline.train_step(p, &schedule(), missing)),
            refused!(pipeline.train_step(p, &schedule(), extra)),
            refused!(pipeline.train_step(p, &schedule(), beyond)),
            refused!(pipeline.train_step(p, &schedule(), pair)),
            refused!(pipeline.forward(p, bare())),
            refused!(pipeline.forward_all(p, &schedule(), vec![bare(), bare()])),
        ];
        assert_eq!(p.operations(), before, "nothing was issued");
        Ok(said)
    });
}

#[test]
fn misfitting_arrays_are_named_with_their_place() {
    let expected: [&[&str]; 4] = [
        &[
            "Pipeline::train_step: stage 0 `Scale`, microbatch 1, forward: its `infer` refuses",
            "parameters (f32[3]), input (f32[1,4]), side input (): f32[1,4] * f32[3]",
        ],
        &[
            "stage 1 `Square`, microbatch 0, forward: jit Square: \"side input\": has the \
             sharding ",
            "with device_put",
        ],
        &["stage 0 `Scale`, microbatch 0, forward: jit Scale: \"input\": has the sharding "],
        &["Pipeline::forward: stage 0 `Scale`, microbatch 0, forward: its `infer` refuses"],
    ];
    both_say(&expected, |p| {
        let mut pipeline = chain(p, &schedule(), false)?;
        let labels = ones(p, &[1, WIDTH], pipeline.mesh(1))?;
        let wide = ones(p, &[1, WIDTH + 1], pipeline.mesh(0))?;
        let wide = || Microbatch::new(wide.clone()).side(1, labels.clone());
        let one_wide = batch(p, &pipeline, &|number, one| {
            if number == 1 { wide() } else { one }
        })?;
        let elsewhere = ones(p, &[1, WIDTH], pipeline.mesh(0))?;
        let elsewhere = batch(p, &pipeline, &|_, one| one.side(1, elsewhere.clone()))?;
        let from_last = || Microbatch::new(labels.clone()).side(1, labels.clone());
        let from_last = batch(p, &pipeline, &|_, _| from_last())?;
        Ok(vec![
            refused!(pipeline.train_step(p, &schedule(), one_wide)),
            refused!(pipeline.train_step(p, &schedule(), elsewhere)),
            refused!(pipeline.train_step(p, &schedule(), from_last)),
            refused!(pipeline.forward(p, wide())),
        ])
    });
}

#[test]
fn misfitting_schedules_and_counts_report_the_valid_ones() {
    let expected: [&[&str]; 2] = [
        &[
            "Pipeline::train_step: schedule GPipe is for 2 microbatches, and 1 are given: make a \
             schedule for 1",
        ],
        &["schedule GPipe is for 3 stages (on 3 ranks), and the pipeline has 2 stages"],
    ];
    both_say(&expected, |p| {
        let mut pipeline = chain(p, &schedule(), false)?;
        let [one, two] = [
            microbatches(p, &pipeline, &[1])?,
            microbatches(p, &pipeline, &[1; 2])?,
        ];
        let three = Schedule::gpipe(3, 2)?;
        Ok(vec![
            refused!(pipeline.train_step(p, &schedule(), one)),
            refused!(pipeline.train_step(p, &three, two)),
        ])
    });
}

#[test]
fn parameters_on_other_meshes_are_refused_at_the_call() {
    let expected: [&[&str]; 7] = [
        &[
            "Pipeline::first: stage 0 `Scale`: its parameter is ",
            "put it there with `device_put`",
        ],
        &["Pipeline::first: stage 0 `Scale`: its parameter is host values, and not on its mesh"],
        &["Pipeline::then: stage 1 `Square`: its parameter is "],
        &[
            "Pipeline::set_params: stage 1 `Square`: its parameter is ",
            "put it there with `device_put`",
        ],
        &["Pipeline::set_params: stage 1 `Square`: 0 arrays for the 1 parameters that it stores"],
        &["Pipeline::set_params: there is no stage 2; the pipeline has stages 0 to 1"],
        &["Pipeline::tie: there is no stage 7"],
    ];
    both_say(&expected, |p| {
        let meshes = meshes(p, 2)?;
        let w = [params(p, 0, &meshes[0])?, params(p, 1, &meshes[1])?];
        let host = MpmdArray::from_slice(&[WIDTH], &[1.0f32; WIDTH])?;
        let scale = || Scale::of(Rows::All);
        let first = Pipeline::first(scale(), &meshes[0], w[0].clone())?;
        let mut pipeline = chain(p, &schedule(), false)?;
        Ok(vec![
            refused!(Pipeline::first(scale(), &meshes[0], w[1].clone())),
            refused!(Pipeline::first(scale(), &meshes[0], host)),
            refused!(first.then(Square(Rows::All), &meshes[1], w[0].clone())),
            refused!(pipeline.set_params(1, vec![w[0].clone()])),
            refused!(pipeline.set_params(1, Vec::new())),
            refused!(pipeline.set_params(2, Vec::new())),
            refused!(pipeline.tie((0, ""), (7, ""))),
        ])
    });
}

#[test]
fn invalid_schedule_is_an_error_of_the_program() {
    let named = |name| -> Result<Schedule> { Ok(Schedule::named(name, 2, 2, None)?) };
    let error = named("gpip").unwrap_err();
    assert!(matches!(error, Error::Schedule(_)), "{error:?}");
    assert!(
        error
            .to_string()
            .starts_with("there is no schedule \"gpip\"; there are "),
        "{error}"
    );
}

#[test]
#[should_panic(expected = "there is no stage 5; the pipeline has stages 0 to 1")]
fn unknown_stage_mesh_lists_the_stages() {
    let mesh =
        |p: &mut Program| chain(p, &schedule(), false).map(|pipeline| pipeline.mesh(5).clone());
    let mut p = Program::builder().devices(2).alone().unwrap();
    let _ = mesh(&mut p);
}
