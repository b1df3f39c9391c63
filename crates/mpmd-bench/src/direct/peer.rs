//! The other process of a probe: opens the memory that the first one shows, and answers by lines of
//! JSON.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use mpmd_device::cuda::CudaError;
use mpmd_device::cuda::direct::{Direct, DirectEvent, DirectMemory, Handle};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::job::now;

/// Time limit for an answer of the other process, which may hang in the driver.
const WITHIN: Duration = Duration::from_secs(20);

/// A request to the other process of the probe.
#[derive(Debug, Deserialize, Serialize)]
pub(super) enum Request {
    /// Opens memory by its IPC handle. The second field is the number of bytes.
    Memory(Vec<u8>, usize),
    /// Closes the memory that was opened first.
    CloseFirst,
    CloseAll,
    /// Opens an event by its IPC handle.
    Event(Vec<u8>),
    /// Makes the device wait for the event that was opened last, and waits on the host for work
    /// queued behind it.
    Wait,
    /// Opens invalid IPC handles.
    Garbage,
}

/// The other process of the probe, seen from the first one. Killed when dropped.
pub(super) struct Peer {
    child: Child,
    answers: Receiver<String>,
}

impl Peer {
    /// Starts this program again as the other process.
    pub(super) fn start() -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "probe", "--device", "cuda", "--peer"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting this program again")?;
        let (sender, answers) = channel();
        if let Some(output) = child.stdout.take() {
            // Ends with the other process, or with the first error.
            std::thread::spawn(move || {
                let lines = BufReader::new(output).lines().map_while(Result::ok);
                lines.map(|line| sender.send(line)).find(Result::is_err)
            });
        }
        Ok(Self { child, answers })
    }

    pub(super) fn ask(&mut self, request: &Request) -> Result<Value> {
        self.tell(request)?;
        self.answer()
    }

    /// Sends a request, and does not wait for its [`answer`](Self::answer).
    pub(super) fn tell(&mut self, request: &Request) -> Result<()> {
        let input = self
            .child
            .stdin
            .as_mut()
            .ok_or_else(|| anyhow!("it has no input"))?;
        writeln!(input, "{}", serde_json::to_string(request)?)
            .context("the other process has ended")
    }

    pub(super) fn answer(&mut self) -> Result<Value> {
        match self.answers.recv_timeout(WITHIN) {
            Ok(line) => Ok(serde_json::from_str(&line)?),
            Err(RecvTimeoutError::Disconnected) => bail!("the other process has ended"),
            Err(RecvTimeoutError::Timeout) => {
                // A late answer would be taken for that of the next request.
                let _ = self.child.kill();
                bail!("the other process did not answer within {WITHIN:?}")
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only if it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns "ok" for a success, or the driver's name of the error.
pub(super) fn word<T>(result: &Result<T, CudaError>) -> String {
    match result {
        Ok(_) => "ok".to_owned(),
        Err(error) if error.name().is_empty() => error.to_string(),
        Err(error) => error.name().to_owned(),
    }
}

/// Answers the requests on standard input until its end.
pub(super) fn serve() -> Result<()> {
    let direct = Direct::open(0)?;
    let small = direct.allocate(64)?;
    let (mut memory, mut events) = (Vec::new(), Vec::new());
    for line in std::io::stdin().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Request::Memory(handle, bytes) => open(&direct, &handle, bytes, &mut memory)?,
            Request::CloseFirst => {
                if !memory.is_empty() {
                    drop(memory.remove(0));
                }
                json!({})
            }
            Request::CloseAll => {
                memory.clear();
                json!({})
            }
            Request::Event(handle) => {
                let start = Instant::now();
                let opened = direct.open_event(handle_of(&handle)?);
                let answer = json!({ "open": word(&opened), "us": us(start) });
                events.extend(opened);
                answer
            }
            Request::Wait => wait(&direct, &small, events.last()),
            Request::Garbage => json!({
                "memory": word(&direct.open_memory([7; 64], 1)),
                "event": word(&direct.open_event([7; 64])),
            }),
        };
        println!("{answer}");
    }
    Ok(())
}

fn open(
    direct: &Direct,
    handle: &[u8],
    bytes: usize,
    memory: &mut Vec<DirectMemory>,
) -> Result<Value> {
    let start = Instant::now();
    let opened = direct.open_memory(handle_of(handle)?, bytes);
    let mut answer = json!({ "open": word(&opened), "us": us(start) });
    if let Ok(opened) = opened {
        let range = opened.range();
        answer["range"] = json!(word(&range));
        if let Ok((start, bytes)) = range {
            answer["range_offset"] = json!(opened.address().wrapping_sub(start));
            answer["range_bytes"] = json!(bytes);
        }
        answer["address"] = json!(opened.address());
        answer["first_byte"] = json!(opened.first_byte().ok());
        memory.push(opened);
    }
    Ok(answer)
}

/// Makes the device wait for `event`, queues a fill of memory, and waits for the device. Returns
/// the results and times as JSON.
fn wait(direct: &Direct, small: &DirectMemory, event: Option<&DirectEvent>) -> Value {
    let start = Instant::now();
    let issued = event.map_or(Ok(()), |event| direct.come_after(event));
    let issued = issued.and_then(|()| direct.fill(small, 1));
    let issue = us(start);
    let ended = direct.wait();
    json!({ "issue": word(&issued), "wait": word(&ended), "issue_us": issue, "end": now() })
}

fn handle_of(bytes: &[u8]) -> Result<Handle> {
    bytes.try_into().context("a handle has 64 bytes")
}

/// Returns the microseconds since `start`.
pub(super) fn us(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}
