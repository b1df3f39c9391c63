//! A server whose folder gets other weights while it runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::client::{Answer, LONG};
use crate::folders::copy;
use crate::serve::{Serving, process_of};

/// Number of seconds for which a server waits for a replacement of a lost process.
const PEER_TIMEOUT: &str = "15";

/// A server whose folder can be changed. Process 0 only answers clients, processes 1 and 2 are the
/// stages, and process 3 is a spare.
struct Changing {
    folder: tempfile::TempDir,
    serving: Serving,
    undisturbed: Value,
    said: String,
}

impl Changing {
    fn start() -> Self {
        let folder = copy("plain");
        let model = folder.path().to_str().unwrap();
        let args = ["--model", model, "--stages", "2", "--front", "--elastic"];
        let serving = Serving::start_with_env(&args, &[("MPMD_PEER_TIMEOUT", PEER_TIMEOUT)]);
        let mut changing = Self {
            folder,
            serving,
            undisturbed: Value::Null,
            said: String::new(),
        };
        changing.undisturbed = changing.ask();
        assert_eq!(changing.undisturbed.as_array().unwrap().len(), 60);
        changing
    }

    fn answer(&self) -> Answer {
        let ask = json!({
            "prompt": [5, 17, 3], "max_tokens": 60, "ignore_eos": true, "temperature": 0,
            "return_token_ids": true,
        });
        self.serving.send("POST", "/v1/completions", &ask)
    }

    /// Sends a request, and returns the tokens of the reply.
    fn ask(&self) -> Value {
        let answer = self.answer();
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["choices"][0]["token_ids"].clone()
    }

    fn weights(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    /// Returns the bytes of the weight file with other values.
    fn other_weights(&self) -> Vec<u8> {
        let mut bytes = fs::read(self.weights()).unwrap();
        let values = bytes.len() / 2;
        bytes[values..]
            .chunks_exact_mut(4)
            .for_each(|value| value[3] ^= 0x80);
        bytes
    }

    fn kill(&self, process: usize) {
        let process = process_of(self.serving.child.id(), process).expect("it runs");
        kill_process(process, Signal::KILL).unwrap();
    }

    /// Waits until a server that cannot replace a process has ended. Returns its exit status and
    /// output.
    fn failed(mut self) -> (ExitStatus, String) {
        let answer = self.answer();
        assert_eq!(
            answer.status, 500,
            "no process has the other weights: {answer:?}"
        );
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.serving.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LONG, "it never ends");
            thread::sleep(Duration::from_millis(20));
        };
        // Up to the end of its output.
        while self.read_line() {}
        (status, std::mem::take(&mut self.said))
    }

    /// Waits until the output of the server contains `text`.
    fn until(&mut self, text: &str) {
        while !self.said.contains(text) {
            assert!(self.read_line(), "{text}: {}", self.said);
        }
    }

    /// Waits for a line of output. Returns false if the output has ended.
    fn read_line(&mut self) -> bool {
        let line = self.serving.lines.lock().unwrap().recv_timeout(LONG);
        line.is_ok_and(|line| {
            self.said += &(line + "\n");
            true
        })
    }
}

/// Checks the output of a server that could not replace a process because the weights in the folder
/// differ.
fn check_said(folder: &Path, said: &str) {
    let file = folder.join("model.safetensors");
    let file = file.to_str().unwrap();
    for expected in [
        "weights of model.layers.",
        "put the old ones back, or start the job again",
        file,
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // The spare and the process that was started at its loss: no other one could help.
    let refused = said.matches("the job goes on without the spare").count();
    assert!((1..=2).contains(&refused), "{refused}: {said}");
}

#[test]
fn spare_with_other_weights_takes_no_place() {
    let mut changing = Changing::start();
    // A new file, as a training saves it. The spare has opened the old one.
    let new = changing.folder.path().join("new");
    fs::write(&new, changing.other_weights()).unwrap();
    fs::rename(new, changing.weights()).unwrap();
    changing.kill(2);
    assert_eq!(
        changing.ask(),
        changing.undisturbed,
        "the spare has the old weights"
    );
    // The process that was started in place of the lost one has the new ones.
    changing.until("the job goes on without the spare");
    assert_eq!(changing.ask(), changing.undisturbed);
    changing.kill(1);
    let folder = changing.folder.path().to_owned();
    let (status, said) = changing.failed();
    assert!(!status.success(), "{said}");
    check_said(&folder, &said);
    assert!(said.contains("differs from process 0"), "{said}");
    assert!(said.contains("A process that came was refused"), "{said}");
}

#[test]
fn spare_whose_open_file_changes_gives_its_place_back() {
    let changing = Changing::start();
    fs::write(changing.weights(), changing.other_weights()).unwrap();
    assert_eq!(
        changing.ask(),
        changing.undisturbed,
        "the stages have read it before"
    );
    changing.kill(2);
    let folder = changing.folder.path().to_owned();
    let (status, said) = changing.failed();
    assert!(!status.success(), "{said}");
    check_said(&folder, &said);
    assert!(
        said.contains("takes none, since its files have changed meanwhile"),
        "{said}"
    );
}
