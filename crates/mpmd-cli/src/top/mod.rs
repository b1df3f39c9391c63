//! `mpmd top`: the activity of the processes of a running job.

pub(crate) mod find;
mod show;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use mpmd_base::ProcessId;
use mpmd_record::activity::Activity;
use mpmd_rendezvous::{JobObserver, ProcessStatus, RendezvousError};
use serde::Serialize;

use crate::files::{say, say_to_reader};
use crate::run::seconds;

/// Time limit for the connection to the job and for its answers.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum interval between two looks, because each look queries all processes.
const SHORTEST: Duration = Duration::from_millis(20);

/// Terminal codes that clear the screen and move the cursor to the upper left corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Arguments of `mpmd top`.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// The job: the id of one of its processes or of its launcher on this machine, or the address
    /// of its rendezvous as host:port, with the job's token in MPMD_JOB_TOKEN. By default the only
    /// job of this user on this machine
    #[arg(value_name = "PID|ADDRESS")]
    job: Option<String>,
    /// Time between two looks, at least 0.02
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// End after the first full look, which takes one interval
    #[arg(long)]
    once: bool,
    /// Print one line of JSON for each look instead of a table
    #[arg(long)]
    json: bool,
}

/// The state of a job at one moment, as `mpmd top` shows it.
#[derive(Debug, Default, Serialize)]
struct JobLook {
    /// The address of the job's rendezvous.
    job: String,
    /// Time since the previous look, in seconds.
    seconds: f64,
    processes: Vec<SeenProcess>,
}

/// The state of one process in a look.
#[derive(Debug, Default, Serialize)]
struct SeenProcess {
    process: u32,
    /// The reason why the activity of the process is unknown. `None` if it is known.
    unknown: Option<String>,
    activity: Option<Activity>,
    /// Mean time of the steps that have ended since the previous look, in seconds. The time of the
    /// last step if none has ended.
    step_seconds: Option<f64>,
    /// The share of time (0 to 1) since the previous look in which the devices of the process had
    /// operations, as a mean over them.
    busy_share: Option<f64>,
    /// Bytes that the process has sent per second since the previous look.
    sent_per_second: Option<f64>,
    /// Bytes that others have sent to the process per second since the previous look.
    received_per_second: Option<f64>,
}

/// Shows the activity of a job until the job ends.
pub(crate) fn top(args: &TopArgs) -> Result<ExitCode> {
    let (address, token) = find::job(args.job.as_deref())?;
    let observer = JobObserver::connect(&address, token, TIMEOUT)
        .with_context(|| format!("attaching to the job at {address}"))?;

    let clears = std::io::stdout().is_terminal() && !args.json && !args.once;
    let mut before = (Instant::now(), look(&observer, &address)?);
    loop {
        std::thread::sleep(args.interval.max(SHORTEST));
        let now = Instant::now();
        let mut seen = match look(&observer, &address) {
            Err(error) if !args.once && has_ended(&error) => {
                if !args.json {
                    say(&format!("the job has ended: {error}\n"))?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            seen => seen?,
        };

        seen.compare(&before.1, now - before.0);
        let text = match args.json {
            true => format!("{}\n", serde_json::to_string(&seen)?),
            false => show::text(&seen),
        };

        let is_read = say_to_reader(if clears { CLEAR } else { "" }, &text)?;
        if args.once || !is_read {
            return Ok(ExitCode::SUCCESS);
        }
        before = (now, seen);
    }
}

fn has_ended(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(RendezvousError::ServerGone { .. })
    )
}

/// Queries all processes of a job for their activity.
fn look(observer: &JobObserver, address: &str) -> Result<JobLook> {
    let read = |status: Vec<u8>| {
        serde_json::from_slice::<Activity>(&status).map_err(|error| {
            format!("it runs another version of mpmd: its status cannot be read ({error})")
        })
    };
    let seen = |process: ProcessId, status: ProcessStatus| {
        let (activity, unknown) = match status.and_then(read) {
            Ok(activity) => (Some(activity), None),
            Err(why) => (None, Some(why)),
        };
        SeenProcess {
            process: process.0,
            unknown,
            activity,
            ..SeenProcess::default()
        }
    };

    let processes = observer
        .look(&[], TIMEOUT)?
        .into_iter()
        .map(|(process, status)| seen(process, status))
        .collect();
    Ok(JobLook {
        job: address.to_owned(),
        processes,
        ..JobLook::default()
    })
}

impl JobLook {
    /// Adds the figures of the time since the look `before`, which was taken `passed` ago.
    fn compare(&mut self, before: &JobLook, passed: Duration) {
        self.seconds = passed.as_secs_f64();
        for seen in &mut self.processes {
            let process = seen.process;
            let mut earlier = before.processes.iter();
            let earlier = earlier.find(|earlier| earlier.process == process);
            if let Some(now) = &seen.activity {
                // Counts begin anew in each epoch of a job.
                let earlier = earlier
                    .and_then(|earlier| earlier.activity.as_ref())
                    .filter(|earlier| earlier.pid == now.pid && earlier.samples <= now.samples);
                seen.step_seconds = step_seconds(now, earlier, self.seconds);
                seen.busy_share = busy_share(now, earlier);
            }
        }

        // By process: the bytes sent to each process since the earlier look.
        let grown = |now: &SeenProcess| {
            let earlier = before
                .processes
                .iter()
                .find(|seen| seen.process == now.process)?;
            let earlier = earlier.activity.as_ref()?;
            let now = now.activity.as_ref()?;
            let pairs = now.bytes_sent.iter().zip(&earlier.bytes_sent);
            Some(
                pairs
                    .map(|(now, earlier)| now.saturating_sub(*earlier))
                    .collect::<Vec<_>>(),
            )
        };

        let grown: Vec<_> = self.processes.iter().map(grown).collect();
        let per_second = |bytes: u64| bytes as f64 / self.seconds;

        for (at, seen) in self.processes.iter_mut().enumerate() {
            let Some(sent) = &grown[at] else { continue };
            let to_it = |sent: &Vec<u64>| sent.get(seen.process as usize).copied().unwrap_or(0);
            let received = grown.iter().flatten().map(to_it).sum();
            seen.sent_per_second = Some(per_second(sent.iter().sum()));
            seen.received_per_second = Some(per_second(received));
        }
    }
}

/// Returns the mean time of the steps that ended in the `passed` seconds since `earlier`, or the
/// time of the last step.
fn step_seconds(now: &Activity, earlier: Option<&Activity>, passed: f64) -> Option<f64> {
    let ended = earlier.map_or(0, |earlier| now.steps.saturating_sub(earlier.steps));
    match ended {
        0 | 1 => now.step_seconds,
        steps => Some(passed / steps as f64),
    }
}

/// Returns the mean share of the samples since `earlier` in which a device had an operation. `None`
/// without samples or devices.
fn busy_share(now: &Activity, earlier: Option<&Activity>) -> Option<f64> {
    let busy = |activity: &Activity| -> u64 {
        let devices = activity.devices.iter();
        devices.map(|device| device.busy_samples).sum()
    };
    let samples = now.samples - earlier.map_or(0, |earlier| earlier.samples);
    let possible = samples * now.devices.len() as u64;
    let busy = busy(now).saturating_sub(earlier.map_or(0, busy));
    (possible > 0).then(|| busy as f64 / possible as f64)
}

#[cfg(test)]
mod tests {
    use mpmd_record::activity::DeviceActivity;

    use super::*;

    fn seen(process: u32, sent: Option<[u64; 3]>) -> SeenProcess {
        let activity = |sent: [u64; 3]| Activity {
            bytes_sent: sent.into(),
            ..Activity::default()
        };
        SeenProcess {
            process,
            activity: sent.map(activity),
            ..SeenProcess::default()
        }
    }

    #[test]
    fn rates_are_those_since_the_look_before() {
        let before = [
            seen(0, Some([0, 10, 10])),
            seen(1, Some([5, 0, 0])),
            seen(2, None),
        ];
        let now = [
            seen(0, Some([0, 30, 10])),
            seen(1, Some([5, 0, 8])),
            seen(2, Some([9, 0, 0])),
        ];
        let before = JobLook {
            processes: before.into(),
            ..JobLook::default()
        };
        let mut look = JobLook {
            processes: now.into(),
            ..JobLook::default()
        };
        look.compare(&before, Duration::from_secs(2));
        let rates = |seen: &SeenProcess| (seen.sent_per_second, seen.received_per_second);
        let rates: Vec<_> = look.processes.iter().map(rates).collect();
        assert_eq!(
            rates,
            [
                (Some(10.0), Some(0.0)),
                (Some(4.0), Some(10.0)),
                (None, None)
            ]
        );
    }

    #[test]
    fn step_time_and_busy_share_are_those_since_the_look_before() {
        let activity = |steps, samples, busy: [u64; 2]| Activity {
            steps,
            step_seconds: Some(0.75),
            samples,
            devices: busy
                .map(|busy_samples| DeviceActivity {
                    busy_samples,
                    ..DeviceActivity::default()
                })
                .into(),
            ..Activity::default()
        };
        let look = |activity| JobLook {
            processes: vec![SeenProcess {
                activity: Some(activity),
                ..SeenProcess::default()
            }],
            ..JobLook::default()
        };
        let figures = |before, now| {
            let mut now = look(now);
            now.compare(&look(before), Duration::from_secs(2));
            (now.processes[0].step_seconds, now.processes[0].busy_share)
        };

        let before = || activity(10, 100, [50, 50]);
        let many = figures(before(), activity(14, 140, [90, 60]));
        assert_eq!(many, (Some(0.5), Some(0.625)));
        // Within one step, its length is not known from the looks.
        let one = figures(before(), activity(11, 140, [50, 50]));
        assert_eq!(one, (Some(0.75), Some(0.0)));
        assert_eq!(figures(before(), before()), (Some(0.75), None));
        // The counts of another epoch are no earlier ones of this one.
        let anew = figures(before(), activity(2, 40, [40, 0]));
        assert_eq!(anew, (Some(0.75), Some(0.5)));
    }
}
