//! A signal to the process, which all its fronts get: so this test is alone.

use std::path::Path;

use clap::Parser;
use mpmd_models::Folder;
use mpmd_serve::{Front, HttpArgs, Model, Phase, queue};
use rustix::process::{Signal, getpid, kill_process};

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    http: HttpArgs,
}

#[test]
fn sigterm_drains_the_server() {
    let Args { http } = Args::parse_from(["serve", "--port", "0"]);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpmd-models/tests/folders/plain");
    let model = Model::of(&Folder::open(folder).unwrap(), None, 99).unwrap();
    let (queue, arrivals) = queue(http.limits());
    let front = Front::start(&http, model, queue.clone()).unwrap();
    arrivals.open();
    kill_process(getpid(), Signal::TERM).unwrap();
    front.join();
    assert!(queue.phase() == Phase::Draining && arrivals.is_over());
}
