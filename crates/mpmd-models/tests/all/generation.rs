//! Generation equals that of `transformers`, with the same bits over any number of stages.

use mpmd::{ProcessId, Program, Result};
use mpmd_models::{Folder, Sampling, Stages};

use crate::folders::{ALL, Expected, copy, expected, open, simulate};

/// Generates `most` tokens greedily. Checks that a second generation and one that ends early give
/// the same tokens.
fn generated(
    name: &str,
    (processes, stages): (usize, usize),
    most: usize,
    in_half: bool,
) -> Vec<u32> {
    let (folder, Expected { prompt, .. }) = (open(name), expected(name));
    simulate(processes, stages, |p, meshes| {
        let stages = Stages::new(&folder, stages, prompt.len() + most)?;
        let mut generator = stages.generator(p, meshes, in_half)?;
        let sampling = Sampling::default();
        let mut ends_at = |most: usize, end: usize| -> Result<Vec<u32>> {
            generator.generate(p, &prompt, &sampling, most, |_, text| Ok(text.len() == end))
        };
        let first = ends_at(most, 0)?;
        assert_eq!(ends_at(most, 5)?, first[..5]);
        assert_eq!(ends_at(most, 0)?, first);
        Ok(Some(first))
    })
}

#[test]
fn generated_tokens_equal_those_of_transformers() {
    for name in ALL {
        let greedy = expected(name).greedy;
        for job in [(1, 1), (2, 2), (3, 3)] {
            assert_eq!(
                generated(name, job, greedy.len(), false),
                greedy,
                "{name} {job:?}"
            );
        }
    }
}

#[test]
fn more_tokens_than_positions_are_refused() {
    let (folder, positions) = (open("gpt2"), 9);
    let said = simulate(2, 2, |p, meshes| {
        let stages = Stages::new(&folder, 2, positions)?;
        let mut generator = stages.generator(p, meshes, false)?;
        let mut most =
            |most| generator.generate(p, &[5, 17, 3], &Sampling::default(), most, |_, _| Ok(false));
        // The last token is in no pass.
        assert_eq!(most(7)?.len(), 7);
        let said = most(8).unwrap_err().to_string();
        assert_eq!(most(2)?.len(), 2, "later calls work");
        Ok(Some(said))
    });
    assert!(
        said.contains("token 10 of a sequence: the generator has room for 9"),
        "{said}"
    );
}

#[test]
fn weights_are_read_once() {
    let (place, Expected { prompt, greedy, .. }) = (copy("plain"), expected("plain"));
    let (folder, file) = (
        Folder::open(place.path()).unwrap(),
        place.path().join("model.safetensors"),
    );
    let all = Stages::new(&folder, 2, prompt.len() + 20).unwrap();
    let said = simulate(2, 2, |p, meshes| {
        let generated = |p: &mut Program, all: &Stages| {
            let mut generator = all.generator(p, meshes, false)?;
            generator.generate(p, &prompt, &Sampling::default(), 20, |_, _| Ok(false))
        };
        assert_eq!(generated(p, &all)?, greedy[..20]);
        p.broadcast_value(ProcessId(0), (), || {
            // It is open.
            let file = std::fs::File::options().write(true).open(&file).unwrap();
            file.set_len(0).unwrap();
            Ok(())
        })?;
        assert_eq!(generated(p, &all)?, greedy[..20]);
        let others = Stages::new(&folder, 2, prompt.len() + 20)?;
        let said = generated(p, &others).unwrap_err().to_string();
        p.forgive_failures();
        Ok(Some(said))
    });
    assert!(said.contains("model.safetensors"), "{said}");
}

#[test]
fn weights_in_bf16_change_nothing_if_the_folder_has_such() {
    for name in ["bf16", "gemma2-bf16", "mistral-bf16"] {
        let greedy = expected(name).greedy;
        assert_eq!(
            generated(name, (2, 2), greedy.len(), true),
            greedy,
            "{name}"
        );
    }
    let rounded = generated("plain", (1, 1), 40, true);
    assert_ne!(
        rounded,
        expected("plain").greedy[..40],
        "others are rounded"
    );
    assert_eq!(generated("plain", (2, 2), 40, true), rounded);
}
