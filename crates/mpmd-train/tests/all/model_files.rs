//! Model files of `tensors::save`, read by the crate `safetensors`.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::{Builder, Simulation};
use mpmd_train::tensors::{TensorFile, save};
use safetensors::{Dtype, SafeTensors};

/// Returns the value of an element of matrix `w` by its row-major index.
fn value(element: u64) -> f32 {
    element as f32 * 0.37 - 3.0
}

/// Saves a matrix `w` `[8, 6]`, divided in both dimensions over four devices, the same as `bf16`,
/// and an uncommitted scalar `step`.
fn save_sample(p: &mut Program, folder: &Path, file_bytes: u64) -> Result<()> {
    let mesh = p.mesh(&[("a", 2), ("b", 2)])?;
    let w = p.array_from_fn(
        f32s([8, 6]),
        mesh.sharding(spec!["b", "a"]),
        |region, mut view| {
            let values = view
                .as_mut_slice::<f32>()?
                .iter_mut()
                .zip(region.indices(&[8, 6]));
            values.for_each(|(v, element)| *v = value(element));
            Ok(())
        },
    )?;
    let half = p.device_put(&w, mesh.sharding(spec!["a"]))?;
    let arrays = [
        ("w".to_owned(), w, DType::F32),
        ("half".to_owned(), half, DType::Bf16),
        ("step".to_owned(), MpmdArray::scalar(7u64), DType::U64),
    ];
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save(p, folder, &arrays, file_bytes, &metadata)
}

/// Returns the values of the arrays of a file as bytes, by name.
fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let array = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| {
        (
            name,
            (
                tensor.dtype(),
                tensor.shape().to_vec(),
                tensor.data().to_vec(),
            ),
        )
    };
    file.tensors().into_iter().map(array).collect()
}

fn expected() -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let w = (0..48).flat_map(|i| value(i).to_le_bytes()).collect();
    let half = (0..48)
        .flat_map(|i| bf16::from_f32(value(i)).to_le_bytes())
        .collect();
    BTreeMap::from([
        ("half".to_owned(), (Dtype::BF16, vec![8, 6], half)),
        (
            "step".to_owned(),
            (Dtype::U64, vec![], 7u64.to_le_bytes().to_vec()),
        ),
        ("w".to_owned(), (Dtype::F32, vec![8, 6], w)),
    ])
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn any_number_of_processes_writes_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for processes in [1, 2, 4] {
        let folder = folder.path().join(processes.to_string());
        let results = Simulation::new(processes, 4).run(|p| save_sample(p, &folder, 1 << 30));
        results.into_iter().for_each(|result| result.unwrap());
        assert_eq!(names(&folder), ["model.safetensors"]);
        let path = folder.join("model.safetensors");
        assert_eq!(contents(&path), expected());
        assert_eq!(
            TensorFile::open(&path).unwrap().metadata("format"),
            Some("pt")
        );
        files.push(std::fs::read(path).unwrap());
    }
    assert!(files.iter().all(|file| *file == files[0]));
}

#[test]
fn large_models_take_several_files_with_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // The first model has files that the second one lacks.
    for (file_bytes, parts) in [(1, 3), (192, 2)] {
        let results = Simulation::new(2, 4).run(|p| save_sample(p, folder, file_bytes));
        results.into_iter().for_each(|result| result.unwrap());
        let part = |number| format!("model-{number:05}-of-{parts:05}.safetensors");
        let mut expected_names: Vec<String> = (1..=parts).map(part).collect();
        expected_names.push("model.safetensors.index.json".to_owned());
        assert_eq!(names(folder), expected_names);
        let index = std::fs::read(folder.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 48 * 4 + 48 * 2 + 8);
        let mut found = BTreeMap::new();
        for (name, file) in index["weight_map"].as_object().unwrap() {
            let mut arrays = contents(&folder.join(file.as_str().unwrap()));
            found.insert(name.clone(), arrays.remove(name).unwrap());
        }
        assert_eq!(found, expected());
    }
    let results = Simulation::new(2, 4).run(|p| save_sample(p, folder, 1 << 30));
    results.into_iter().for_each(|result| result.unwrap());
    assert_eq!(names(folder), ["model.safetensors"]);
}

#[test]
fn array_with_a_star_in_its_name_becomes_several() {
    for (spec, processes) in [(spec!["a", "b"], 2), (spec![None, "a"], 4), (spec![], 1)] {
        let folder = tempfile::tempdir().unwrap();
        let results = Simulation::new(processes, 4).run(|p| {
            let mesh = p.mesh(&[("a", 2), ("b", 2)])?;
            let w = p.array_from_fn(
                f32s([4, 2, 6]),
                mesh.sharding(spec.clone()),
                |region, mut view| {
                    let values = view.as_mut_slice::<f32>()?.iter_mut();
                    values
                        .zip(region.indices(&[4, 2, 6]))
                        .for_each(|(v, element)| *v = value(element));
                    Ok(())
                },
            )?;
            let arrays = [("w.*.of".to_owned(), w, DType::F32)];
            save(p, folder.path(), &arrays, 1 << 30, &BTreeMap::new())
        });
        results.into_iter().for_each(|result| result.unwrap());
        let found = contents(&folder.path().join("model.safetensors"));
        assert_eq!(found.len(), 4);
        for (index, first) in (0..48).step_by(12).enumerate() {
            let values = (first..first + 12)
                .flat_map(|i| value(i).to_le_bytes())
                .collect();
            assert_eq!(
                found[&format!("w.{index}.of")],
                (Dtype::F32, vec![2, 6], values)
            );
        }
    }
}

#[test]
fn saved_models_change_no_file_of_others() {
    let cache = tempfile::tempdir().unwrap();
    let [folder, blobs] = ["snapshots/1f", "blobs"].map(|name| cache.path().join(name));
    [&folder, &blobs]
        .into_iter()
        .for_each(|folder| std::fs::create_dir_all(folder).unwrap());
    let blob = blobs.join("4a");
    for file_bytes in [1 << 30, 1] {
        std::fs::write(&blob, "of another model").unwrap();
        // A name that a partial file could have, that of a model as a link, and a hard link.
        let links = ["model.safetensors", "model.safetensors.partial"];
        for name in links.map(|name| folder.join(name)) {
            let _ = std::fs::remove_file(&name);
            std::os::unix::fs::symlink("../../blobs/4a", name).unwrap();
        }
        let hard = folder.join("model-00001-of-00003.safetensors");
        let _ = std::fs::remove_file(&hard);
        std::fs::hard_link(&blob, &hard).unwrap();
        std::fs::write(folder.join("model-large.safetensors"), "of somebody else").unwrap();
        let results = Simulation::new(2, 4).run(|p| save_sample(p, &folder, file_bytes));
        results.into_iter().for_each(|result| result.unwrap());
        assert_eq!(std::fs::read(&blob).unwrap(), b"of another model");
        assert_eq!(
            std::fs::read(&hard).unwrap(),
            b"of another model",
            "no index names it"
        );
        assert!(folder.join("model-large.safetensors").exists());
        assert_eq!(folder.join("model.safetensors").exists(), file_bytes > 1);
    }
    let index = std::fs::read(folder.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    // The names without this number were taken.
    assert_eq!(
        index["weight_map"]["w"],
        "model-2-00001-of-00003.safetensors"
    );
}

#[test]
fn dtype_that_is_not_offered_is_refused_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let results = Simulation::new(2, 2).run(|p| {
        let arrays = [("w".to_owned(), MpmdArray::scalar(1.5f32), DType::F64)];
        save(p, &path, &arrays, 1 << 30, &BTreeMap::new())
    });
    for result in results {
        assert_eq!(
            result.unwrap_err().to_string(),
            "w: f32[] cannot be saved as f64"
        );
    }
    assert!(!path.exists());
}

#[test]
fn folder_that_cannot_be_made_is_the_same_error_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "no folder").unwrap();
    let results = Simulation::new(2, 4).run(|p| save_sample(p, &file.join("model"), 1 << 30));
    let said: Vec<String> = results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect();
    assert_eq!(said[0], said[1]);
    assert!(
        said[0].ends_with("file/model: Not a directory (os error 20)"),
        "{said:?}"
    );
}

#[test]
fn dry_run_writes_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let mut p = Builder::default().devices(4).dry_run(2).unwrap();
    save_sample(&mut p, &path, 1 << 30).unwrap();
    p.finish().unwrap();
    assert!(!path.exists());
}
