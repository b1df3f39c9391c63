//! A look at a job as text.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use mpmd_base::{bytes_text, seconds_text};
use mpmd_record::activity::Activity;

use super::{JobLook, SeenProcess};

/// Returns a table with a row of numbers for each process. Below the table stand, for each process,
/// its host and stages, the activity of its program and devices, and its waits.
pub(super) fn text(look: &JobLook) -> String {
    let head = [
        "process",
        "pid",
        "step",
        "step time",
        "busy",
        "issued",
        "in flight",
        "memory",
        "lent",
        "sent",
        "received",
    ];
    let mut table = Table::new();
    table
        .load_style(NOTHING)
        .set_header(head)
        .add_rows(look.processes.iter().map(row));

    for column in table.column_iter_mut() {
        column
            .set_padding((0, 2))
            .set_cell_alignment(CellAlignment::Right);
    }

    let known = look.processes.iter().flat_map(|seen| &seen.activity);
    let vectors = known.filter_map(|activity| activity.vectors).min();
    let vectors = vectors.map_or_else(String::new, |width| format!(", {width} vectors"));
    let mut text = format!("job at {}{vectors}\n{}\n", look.job, table.trim_fmt());
    for seen in &look.processes {
        let _ = write!(text, "\nprocess {}", seen.process);
        match (&seen.activity, &seen.unknown) {
            (Some(activity), _) => {
                text.push_str(&place(activity));
                doing(&mut text, activity);
            }
            (None, why) => {
                let _ = write!(text, ": {}", why.as_deref().unwrap_or("unknown"));
            }
        }
    }
    text.push('\n');
    text
}

/// Returns the host and the stages of a process, as they follow its number.
fn place(activity: &Activity) -> String {
    let mut stages: Vec<u32> = activity
        .devices
        .iter()
        .flat_map(|device| device.stages.iter().copied())
        .collect();
    stages.sort_unstable();
    stages.dedup();

    let host = match activity.host.as_str() {
        "" => String::new(),
        host => format!(" on {host}"),
    };
    let names: Vec<String> = stages.iter().map(u32::to_string).collect();
    match names.len() {
        0 => format!("{host}: "),
        1 => format!("{host}, stage {}: ", names[0]),
        _ => format!("{host}, stages {}: ", names.join(", ")),
    }
}

fn row(seen: &SeenProcess) -> Vec<String> {
    let process = seen.process.to_string();
    let Some(activity) = &seen.activity else {
        return vec![process];
    };
    let memory = activity.memory;
    let of = memory
        .limit
        .map_or_else(String::new, |limit| format!(" of {}", bytes_text(limit)));

    let rate = |rate: Option<f64>| {
        rate.map_or_else(
            || "-".to_owned(),
            |rate| format!("{}/s", bytes_text(rate as u64)),
        )
    };

    vec![
        process,
        activity.pid.to_string(),
        activity.steps.to_string(),
        seen.step_seconds
            .map_or_else(|| "-".to_owned(), seconds_text),
        seen.busy_share
            .map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        activity.issued.to_string(),
        format!(
            "{} ({})",
            activity.in_flight,
            bytes_text(activity.in_flight_bytes)
        ),
        format!("{}{of}", bytes_text(memory.live + memory.host)),
        bytes_text(memory.lent),
        rate(seen.sent_per_second),
        rate(seen.received_per_second),
    ]
}

/// Appends the activity of a process to `text`: its program on the current line, its devices and
/// its wait on further lines.
fn doing(text: &mut String, activity: &Activity) {
    let _ = write!(text, "its program {}", activity.program);
    let devices = activity.devices.iter();
    let (idle, busy) = devices.partition::<Vec<_>, _>(|device| device.operation.is_none());

    for device in busy {
        let _ = write!(text, "\n  {}", brief(&device.to_string()));
    }
    match idle.len() {
        0 => {}
        1 => text.push_str(&format!("\n  {} is idle", idle[0].device)),
        several => text.push_str(&format!("\n  {several} devices are idle")),
    }

    if let Some(wait) = &activity.wait {
        let _ = write!(text, "\n  {}", brief(wait));
    }
}

/// Shortens the description of an operation. Long lists of arrays become `(…)`, and the operation's
/// place in a replayed step is left out.
fn brief(text: &str) -> String {
    const LONGEST_LIST: usize = 24;
    let mut text = text.to_owned();
    if let Some(at) = text.find(" of the step captured at ") {
        let start = text[..at].rfind(", ").unwrap_or(at);
        let end = text[start..]
            .find(')')
            .map_or(text.len(), |end| start + end);
        text.replace_range(start..end, "");
    }

    if let Some(start) = text.find(" of (").map(|start| start + " of ".len())
        && let Some(end) = closing(&text[start..]).map(|end| start + end)
        && end - start > LONGEST_LIST
    {
        text.replace_range(start + 1..end, "…");
    }
    text
}

/// Returns the index of the parenthesis that closes the first one. `None` if it is not closed.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.bytes().position(|byte| {
        depth += i32::from(byte == b'(') - i32::from(byte == b')');
        depth == 0
    })
}

#[cfg(test)]
mod tests {
    use mpmd_base::VectorWidth;
    use mpmd_record::activity::{DeviceActivity, MemoryActivity};

    use super::*;

    #[test]
    fn table_has_numbers_and_activities_of_each_process() {
        let device = |number: u32, operation: Option<&str>| DeviceActivity {
            device: format!("device {number}"),
            operation: operation.map(str::to_owned),
            seconds: operation.map(|_| 1.25),
            behind: 2,
            stages: vec![3 - number],
            ..DeviceActivity::default()
        };
        let activity = Activity {
            pid: 77,
            host: "node1".into(),
            vectors: Some(VectorWidth::Avx2),
            steps: 3,
            issued: 1200,
            in_flight: 4,
            in_flight_bytes: 2048,
            program: "waits in a read of an array at src/main.rs:7:9".into(),
            devices: vec![
                device(0, Some("operation 9 (jit f) at a.rs:5:1")),
                device(1, None),
            ],
            wait: Some("process 0 waits in operation 8".into()),
            memory: MemoryActivity {
                live: 1024,
                host: 1024,
                limit: Some(4096),
                ..Default::default()
            },
            ..Activity::default()
        };
        let known = SeenProcess {
            activity: Some(activity),
            step_seconds: Some(0.25),
            busy_share: Some(0.756),
            sent_per_second: Some(3.0 * 1024.0),
            ..SeenProcess::default()
        };
        let gone = SeenProcess {
            process: 1,
            unknown: Some("it was killed".into()),
            ..SeenProcess::default()
        };
        let look = JobLook {
            job: "127.0.0.1:7".into(),
            seconds: 1.0,
            processes: vec![known, gone],
        };
        let text = text(&look);
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        let words = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(lines[0], "job at 127.0.0.1:7, avx2 vectors");
        assert_eq!(
            words(2),
            "0 77 3 250.00 ms 76 % 1200 4 (2.0 KiB) 2.0 KiB of 4.0 KiB 0 B 3.0 KiB/s -"
        );
        assert_eq!(words(3), "1");
        let rest = [
            "",
            "process 0 on node1, stages 2, 3: its program waits in a read of an array at \
             src/main.rs:7:9",
            "  device 0 is at operation 9 (jit f) at a.rs:5:1, for 1.2 s (2 more issued to it)",
            "  device 1 is idle",
            "  process 0 waits in operation 8",
            "process 1: it was killed",
        ];
        assert_eq!(lines[4..], rest);
    }

    #[test]
    fn descriptions_of_operations_are_shortened() {
        let replayed = "1 of 123 of the step captured at a.rs:1:2 and replayed at a.rs:1:2";
        let list = "f32[128] P(None), f32[128,512] P(None, model), and 27 more";
        let long =
            format!("at operation 9 (jit f on [0] of ({list}); stage 0 at b.rs:3:4, {replayed})");
        assert_eq!(
            brief(&long),
            "at operation 9 (jit f on [0] of (…); stage 0 at b.rs:3:4)"
        );
        let alone = format!("operation 9 (jit f of ({list})) at b.rs:3:4");
        assert_eq!(brief(&alone), "operation 9 (jit f of (…)) at b.rs:3:4");
        let put = "operation 8 (device_put of f32[2] from P(x) on [0] to P() on [1]) at c.rs:5:6";
        assert_eq!(brief(put), put);
    }
}
