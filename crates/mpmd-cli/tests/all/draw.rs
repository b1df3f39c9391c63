//! `mpmd draw` on files of metrics.

use std::fs;

use crate::common::{call, temporary};

/// Writes files with these texts, and returns their folder and paths.
fn files(name: &str, texts: &[&str]) -> (std::path::PathBuf, Vec<String>) {
    let folder = temporary(name);
    fs::create_dir_all(&folder).unwrap();
    let write = |(at, text): (usize, &&str)| {
        let path = folder.join(format!("{at}.jsonl"));
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let paths = texts.iter().enumerate().map(write).collect();
    (folder, paths)
}

#[test]
fn losses_of_two_trainings_are_drawn() {
    // The first is resumed at step 2, and has a broken line.
    let first = "{\"step\":1,\"loss\":4.0}\n{\"step\":2,\"loss\":9.0}\n{\"step\":2,\"loss\":2.0}\n\
                 {\"step\":2,\"evaluation\":3.0}\n{\"step\":3,\"lo";
    let second = "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"loss\":null}\n";
    let (folder, paths) = files("losses", &[first, second]);
    let output = folder.join("loss.svg").display().to_string();
    let told = call(&["draw", &paths[0], &paths[1], "-o", &output], "");
    assert_eq!((told.status, &*told.stdout), (Some(0), ""), "{told:?}");
    let notes = format!(
        "note: {}: line 5 is skipped: not valid JSON\n\
         note: {}: line 2 is skipped: a loss that is not a number\n",
        paths[0], paths[1]
    );
    assert_eq!(told.stderr, notes);

    // Losses from 1 to 4 are from 398 up to 18, steps from 0 to 2 from 70 to 876.
    let svg = fs::read_to_string(&output).unwrap();
    for (class, places) in [
        ("training", "M473.0 18.0L876.0 271.3"),
        ("held-out", "M876.0 144.7h0"),
        ("training", "M473.0 398.0h0"),
    ] {
        let curve = format!("class=\"curve {class}\"");
        let is_drawn = |line: &str| line.contains(&curve) && line.contains(places);
        assert!(svg.lines().any(is_drawn), "{class} {places}: {svg}");
    }
    assert!(svg.contains(": held-out, lowest 3 at step 2<"), "{svg}");

    let told = call(&["draw", &paths[0], "--log", "--title", "A & B"], "");
    assert!(told.stdout.starts_with("<svg "), "{told:?}");
    assert!(told.stdout.contains(">A &amp; B</text>"), "{told:?}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn files_without_losses_are_refused() {
    let (folder, paths) = files("none", &["{\"step\":1,\"loss\":null}\n", ""]);
    for (args, message) in [
        (
            vec!["draw", &paths[0]],
            "0.jsonl has no losses to draw: it needs lines such as",
        ),
        (vec!["draw", &paths[1]], "1.jsonl has no losses to draw"),
        (vec!["draw", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (
            [&["draw"][..], &["a"; 9]].concat(),
            "a picture has at most 8 files, and 9 are given",
        ),
    ] {
        let told = call(&args, "");
        assert_eq!((told.status, &*told.stdout), (Some(1), ""), "{told:?}");
        assert!(told.stderr.contains(message), "{told:?}");
    }
    fs::remove_dir_all(&folder).unwrap();
}
