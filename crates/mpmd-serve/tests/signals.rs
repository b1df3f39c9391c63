//! A signal to the process, which all its fronts get: so this test is alone.

use std::path::Path;

use mpmd_models::{Folder, PromptEncoder};
use mpmd_serve::{Front, FrontSettings, Model, ServerPhase, queue};
use rustix::process::{Signal, getpid, kill_process};

#[test]
fn signals_drain_the_server() {
    for signal in [Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2] {
        drains_at(signal);
    }
}

fn drains_at(signal: Signal) {
    let settings = FrontSettings {
        port: 0,
        ..FrontSettings::default()
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpmd-models/tests/folders/plain");
    let folder = Folder::open(folder).unwrap();
    let model = Model::of(&folder, PromptEncoder::of(&folder).unwrap(), None, 99).unwrap();
    let (queue, arrivals) = queue(settings.waiting);
    let front = Front::start(&settings, model, queue.clone()).unwrap();
    arrivals.open();
    kill_process(getpid(), signal).unwrap();
    front.join();
    assert!(queue.phase() == ServerPhase::Draining && arrivals.is_over());
}
