//! The scalars of a training, in a file that TensorBoard reads.
//!
//! The file is a sequence of records. A record is a length, a checksum of the length, a message,
//! and a checksum of the message. The messages are in the encoding of protocol buffers; those here
//! have the fields of TensorFlow's `event.proto` and `summary.proto` that scalars take.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mpmd_core::Result;
use prost::Message;

use super::report::{EvaluationReport, StepReport};
use crate::tensors::failed;

/// The version that a file names in its first event.
const VERSION: &str = "brain.Event:2";

/// A file of events.
pub(super) struct Events {
    file: File,
    path: PathBuf,
    /// Time of the step before, in seconds.
    before: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Always written, also if it is zero.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

impl Events {
    /// Creates a new file in `folder`, and the folder if it is missing.
    pub(super) fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanos) = (now.as_secs(), now.subsec_nanos());
        let process = std::process::id();
        // TensorBoard finds files by `tfevents`, and reads those of one folder in order.
        let name = format!("events.out.tfevents.{seconds:010}.{nanos:09}.{process}");
        let path = folder.join(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(|error| failed(&path, &error))?;
        let mut events = Self { file, path, before: None };
        events.write(Event { file_version: Some(VERSION.to_owned()), ..Event::default() })?;
        Ok(events)
    }

    /// Writes the scalars of a step.
    pub(super) fn step(&mut self, report: &StepReport) -> Result<()> {
        let StepReport { step, loss, weight, metrics, norm, rate, seconds, .. } = report;
        let mut scalars = vec![("loss/training".to_owned(), *loss)];
        scalars.extend(metrics.iter().map(|(name, mean)| (format!("{name}/training"), *mean)));
        scalars.extend([("norm".to_owned(), *norm), ("rate".to_owned(), *rate)]);
        if let Some(before) = self.before.replace(*seconds)
            && *seconds > before
        {
            scalars.push(("tokens_per_second".to_owned(), weight / (seconds - before)));
        }
        self.scalars(*step, scalars)
    }

    /// Writes the mean loss and metrics of an evaluation.
    pub(super) fn evaluation(&mut self, report: &EvaluationReport) -> Result<()> {
        let mut scalars = vec![("loss/evaluation".to_owned(), report.loss())];
        let metrics = report.metrics.iter();
        scalars.extend(metrics.map(|(name, mean)| (format!("{name}/evaluation"), *mean)));
        self.scalars(report.step, scalars)
    }

    fn scalars(&mut self, step: u64, scalars: Vec<(String, f64)>) -> Result<()> {
        let scalar = |(tag, value)| Scalar { tag, simple_value: Some(value as f32) };
        let summary = Summary { value: scalars.into_iter().map(scalar).collect() };
        let step = step.cast_signed();
        self.write(Event { step, summary: Some(summary), ..Event::default() })
    }

    /// Writes an event at once, so that a killed process leaves whole events.
    fn write(&mut self, mut event: Event) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        event.wall_time = now.as_secs_f64();
        let message = event.encode_to_vec();
        let length = (message.len() as u64).to_le_bytes();
        let sums = [checksum(&length), checksum(&message)].map(u32::to_le_bytes);
        let record = [&length[..], &sums[0], &message, &sums[1]].concat();
        self.file.write_all(&record).map_err(|error| failed(&self.path, &error))
    }
}

/// Returns the masked CRC-32C that records have.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Returns the events of a file. Panics if a checksum is wrong.
    fn events(mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let (sum, rest) = rest.split_at(4);
            let (message, rest) =
                rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (sum_of_message, rest) = rest.split_at(4);
            assert_eq!(sum, checksum(length).to_le_bytes());
            assert_eq!(sum_of_message, checksum(message).to_le_bytes());
            events.push(Event::decode(message).unwrap());
            bytes = rest;
        }
        events
    }

    #[test]
    fn checksum_is_the_one_of_the_format() {
        // The length of the usual first event, 24 bytes, and its checksum in TensorFlow's files.
        assert_eq!(checksum(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn scalars_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = Events::create(folder.path()).unwrap();
        let report = |step: u64, seconds| StepReport {
            step,
            loss: 0.5,
            weight: 48.0,
            metrics: [("right".to_owned(), 0.25)].into(),
            norm: 2.0,
            rate: 0.0,
            seconds,
            stop: None,
        };
        file.step(&report(1, 1.0)).unwrap();
        file.step(&report(2, 1.5)).unwrap();
        let (step, sum, weight, metrics, stop) = (2, 1.0, 4.0, BTreeMap::new(), None);
        file.evaluation(&EvaluationReport { step, sum, weight, metrics, stop }).unwrap();
        let events = events(&fs::read(&file.path).unwrap());
        assert_eq!(events[0].file_version.as_deref(), Some(VERSION));
        let found: Vec<_> = events[1..]
            .iter()
            .map(|event| {
                let values = event.summary.iter().flat_map(|summary| &summary.value);
                let values: Vec<_> =
                    values.map(|value| (value.tag.as_str(), value.simple_value.unwrap())).collect();
                (event.step, values)
            })
            .collect();
        let step = [("loss/training", 0.5), ("right/training", 0.25), ("norm", 2.0), ("rate", 0.0)];
        let mut second = step.to_vec();
        second.push(("tokens_per_second", 96.0));
        let expected = vec![(1, step.to_vec()), (2, second), (2, vec![("loss/evaluation", 0.25)])];
        assert_eq!(found, expected);
    }
}
