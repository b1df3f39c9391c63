//! `mpmd top --trace`: traces a job that runs, for a time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use mpmd_base::ProcessId;
use mpmd_record::activity::{TraceAction, TraceRequest, TraceState};
use mpmd_record::trace::file;
use mpmd_transport::deadline::after;
use mpmd_transport::rendezvous::Observer;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

use super::{answers, has_ended};
use crate::files::say;

/// Interval at which the processes are asked for the state of the trace.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Time for the processes to end their files, after that of the trace.
const END_WITHIN: Duration = Duration::from_secs(30);

/// By process, the state of its trace, or the reason why there is none.
type States = BTreeMap<ProcessId, Result<TraceState, String>>;

/// Makes all processes of a job write a trace for `time`, and waits for its end. Ctrl-C ends it
/// early. The default folder is a new one in the current directory.
pub(super) fn record(
    observer: &Observer,
    time: Duration,
    folder: Option<&Path>,
) -> Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The order matters: the first signal finds `stop` unset, and then sets it.
        register_conditional_shutdown(signal, 128 + signal, stop.clone())?;
        register(signal, stop.clone())?;
    }
    let (folder, is_new) = match folder {
        Some(folder) => (std::path::absolute(folder)?, false),
        None => (new_folder()?, true),
    };
    let ask = |action| ask(observer, &TraceRequest { folder: folder.clone(), action });
    let begun = ask(TraceAction::Begin(time)).and_then(|states| {
        let refused = refusals(&states);
        if refused.is_empty() {
            return Ok(states);
        }
        if states.values().any(Result::is_ok) {
            // The reason above is more to the point than an error of this.
            let _ = ask(TraceAction::End);
        }
        bail!("the job is not traced:{refused}")
    });
    let ended = begun.and_then(|states| wait(ask, states, time, &stop, &folder));
    if ended.is_err() && is_new {
        // One that has files stays.
        let _ = fs::remove_dir(&folder);
    }
    ended
}

/// Waits for the end of a trace that has begun, and says where it is.
fn wait(
    ask: impl Fn(TraceAction) -> Result<States>,
    states: States,
    time: Duration,
    stop: &AtomicBool,
    folder: &Path,
) -> Result<ExitCode> {
    let count = states.len();
    say(&format!("traces {count} processes for {time:?}, or until Ctrl-C\n"))?;
    let (begin, ends) = (SystemTime::now(), after(Instant::now(), time));
    let (mut end_is_asked, mut last, mut over) = (false, states, ends);
    let how = loop {
        std::thread::sleep(ASK_EVERY.min(time));
        if stop.load(Ordering::Relaxed) && !end_is_asked {
            (end_is_asked, over) = (true, Instant::now());
            // The next look tells of the end of the job.
            let _ = ask(TraceAction::End);
        }
        match ask(TraceAction::Look) {
            Err(error) if has_ended(&error) => break ", up to the end of the job",
            states => last = states?,
        }
        let failed = reasons(&last, |state| match state {
            Ok(TraceState::Failed(why)) => Some(why),
            _ => None,
        });
        if !failed.is_empty() {
            let _ = ask(TraceAction::End);
            bail!("the job cannot be traced:{failed}");
        }
        let runs = last.values().any(|state| *state == Ok(TraceState::Runs));
        let (is_over, refused) = (Instant::now() >= over, refusals(&last));
        if !runs && (is_over || refused.is_empty()) {
            break "";
        }
        if Instant::now() >= after(over, END_WITHIN) {
            bail!("the trace in {} does not end, of {count} processes{refused}", folder.display());
        }
    };
    let refused = refusals(&last);
    let mut text = format!("the trace{how} is in {}\n", folder.display());
    // An older file is a copy of another trace. Clocks of file systems may be a little behind.
    let is_new = |time: SystemTime| time + Duration::from_secs(2) >= begin;
    let is_here = |process: &&ProcessId| {
        let found = fs::metadata(folder.join(file::name(process.0)));
        found.and_then(|found| found.modified()).is_ok_and(is_new)
    };
    let here = last.keys().filter(is_here).count();
    if here < count {
        text += &format!(
            "{here} of its {count} files are here: the others are in the folder of this name on \
             the hosts of their processes; copy them here first\n"
        );
    }
    text += &format!(
        "mpmd trace {0}    # a summary; -o FILE.html for a page, --json FILE for ui.perfetto.dev\n",
        folder.display()
    );
    say(&text)?;
    if how.is_empty() && !refused.is_empty() {
        bail!("the trace may lack the last events of processes:{refused}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks all processes.
fn ask(observer: &Observer, request: &TraceRequest) -> Result<States> {
    let words = serde_json::to_vec(request).with_context(|| {
        format!("the name of the folder {} is no text", request.folder.display())
    })?;
    let states = answers::<Result<TraceState, String>>(observer, &words)?;
    Ok(states.map(|(process, state)| (process, state.and_then(|state| state))).collect())
}

/// Returns the reasons of the processes that gave none of their trace, with a line for each.
fn refusals(states: &States) -> String {
    reasons(states, |state| state.as_ref().err())
}

/// Returns a line for each process with a reason.
fn reasons(
    states: &States,
    reason: impl Fn(&Result<TraceState, String>) -> Option<&String>,
) -> String {
    let lines = states
        .iter()
        .filter_map(|(process, state)| Some(format!("\n  process {process}: {}", reason(state)?)));
    lines.collect()
}

/// Creates a folder in the current directory, with the first number that is free.
fn new_folder() -> Result<PathBuf> {
    for number in 1.. {
        let folder = std::path::absolute(format!("mpmd-trace-{number}"))?;
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => {
                return made.map(|()| folder.clone()).with_context(|| {
                    format!("cannot create {}: name a folder by --trace-folder", folder.display())
                });
            }
        }
    }
    unreachable!("there are more numbers than folders")
}
