//! `mpmd draw` as people see it: pages opened, pointed at and zoomed in a browser.

mod chromium;
mod timelines;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use mpmd_core::trace::Timeline;
use serde_json::json;
use tempfile::TempDir;

use chromium::Chromium;
use timelines::{one_forward_one_backward, zero_bubble_v};

/// A usual window.
const WINDOW: [u32; 2] = [1280, 800];

/// Pictures of a timeline, by the program itself.
struct Drawn {
    folder: TempDir,
}

impl Drawn {
    fn new(timeline: &Timeline) -> Self {
        let drawn = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(drawn.path("json"), serde_json::to_vec(timeline).unwrap()).unwrap();
        for format in ["html", "svg"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_mpmd"));
            command.arg("draw").arg(drawn.path("json")).args(["--format", format]).arg("--output");
            let output = command.arg(drawn.path(format)).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        drawn
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.folder.path().join(format!("timeline.{extension}"))
    }
}

#[test]
fn look() {
    let Some(mut browser) = Chromium::start() else { return };
    for (name, timeline) in [
        ("1f1b-4", one_forward_one_backward(4, 8)),
        ("zbv-4", zero_bubble_v(4, 8)),
        ("1f1b-64", one_forward_one_backward(64, 128)),
        ("zbv-64", zero_bubble_v(64, 128)),
    ] {
        let drawn = Drawn::new(&timeline);
        for scheme in ["light", "dark"] {
            browser.open(&drawn.path("html"), WINDOW, scheme);
            assert_eq!(browser.complaints(), [""; 0]);
            browser.picture(&format!("{name}-{scheme}"));
            browser.open(&drawn.path("svg"), WINDOW, scheme);
            browser.picture(&format!("{name}-{scheme}-svg"));
        }
        eprintln!(
            "{name} {} {}",
            fs::metadata(drawn.path("html")).unwrap().len(),
            fs::metadata(drawn.path("svg")).unwrap().len()
        );
    }
    browser.end();
}
