//! Generation equals that of `transformers`, with the same bits over any number of stages.

use mpmd::Result;
use mpmd_models::{Sampling, Stages};

use crate::folders::{ALL, Expected, expected, open, simulate};

/// Generates `most` tokens, and once more, with other lengths of the prompt's passes in between.
fn generated(name: &str, (processes, stages): (usize, usize), most: usize) -> Vec<u32> {
    let (folder, Expected { prompt, .. }) = (open(name), expected(name));
    simulate(processes, stages, |p, meshes| {
        let stages = Stages::new(&folder, stages, prompt.len() + most)?;
        let mut generator = stages.generator(p, meshes)?;
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
            assert_eq!(generated(name, job, greedy.len()), greedy, "{name} {job:?}");
        }
    }
}
