//! The losses of a training, from the lines of its file of metrics.

use std::collections::BTreeMap;

use serde_json::Value;

/// Maximum number of line numbers that a note names.
const MOST_NUMBERS: usize = 5;

/// The losses of one training.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LossHistory {
    /// The name of the file.
    pub(super) name: String,
    /// The losses of training steps, in the order of steps.
    pub(super) training: Vec<LossPoint>,
    /// The losses on held-out data, in the order of steps.
    pub(super) held_out: Vec<LossPoint>,
    /// Notes about skipped lines and losses, for users.
    pub(super) skipped: Vec<String>,
}

/// The loss at a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LossPoint {
    pub(super) step: u64,
    pub(super) loss: f64,
}

/// A line of a file of metrics.
enum MetricsLine {
    Training(LossPoint),
    HeldOut(LossPoint),
    /// A recovery of the job, which has no loss.
    Recovery,
}

impl LossHistory {
    /// Reads the lines of the file `name`. Skips lines that cannot be read and losses that are no
    /// numbers, and adds notes about them to `skipped`.
    ///
    /// A resumed training repeats steps. The repeated steps replace all that the file had from
    /// there on, so the losses are those of one training.
    pub(super) fn parse(name: &str, text: &str) -> Self {
        let mut training = BTreeMap::new();
        let mut held_out = BTreeMap::new();
        let mut skipped: BTreeMap<&str, Vec<usize>> = BTreeMap::new();

        for (line, number) in text.lines().zip(1..) {
            if line.trim().is_empty() {
                continue;
            }
            match MetricsLine::parse(line) {
                Ok(MetricsLine::Training(LossPoint { step, loss })) => {
                    // An evaluation may stand before the lines of the last steps before it.
                    let is_repeated = training.range(step..).next().is_some();
                    if is_repeated {
                        // That after `step - 1` updates may be the last one that is kept.
                        training.split_off(&step);
                        held_out.split_off(&step);
                    }
                    training.insert(step, loss);
                }
                Ok(MetricsLine::HeldOut(LossPoint { step, loss })) => {
                    held_out.split_off(&step);
                    held_out.insert(step, loss);
                }
                Ok(MetricsLine::Recovery) => {}
                Err(why) => skipped.entry(why).or_default().push(number),
            }
        }

        let points = |losses: BTreeMap<u64, f64>| {
            losses
                .into_iter()
                .map(|(step, loss)| LossPoint { step, loss })
                .collect()
        };
        Self {
            name: name.to_owned(),
            training: points(training),
            held_out: points(held_out),
            skipped: skipped
                .into_iter()
                .map(|(why, lines)| skipped_text(name, &lines, why))
                .collect(),
        }
    }

    /// Removes losses that have no logarithm: 0 and below. Adds a note if there are any.
    pub(super) fn skip_losses_without_logarithm(&mut self) {
        let before = self.training.len() + self.held_out.len();
        self.training.retain(|point| point.loss > 0.0);
        self.held_out.retain(|point| point.loss > 0.0);

        let removed = before - self.training.len() - self.held_out.len();
        if removed > 0 {
            let name = &self.name;
            self.skipped.push(format!(
                "note: {name}: {removed} losses are skipped: a logarithmic scale has only numbers \
                 above 0"
            ));
        }
    }
}

impl MetricsLine {
    /// Reads a line. The error is the reason to skip it.
    fn parse(line: &str) -> Result<Self, &'static str> {
        let fields: Value = serde_json::from_str(line).map_err(|_| "not valid JSON")?;
        if fields.get("recovery").is_some() {
            return Ok(Self::Recovery);
        }

        let step = fields.get("step").and_then(Value::as_u64);
        let step = step.ok_or("without the number of a step")?;
        let (line, loss): (fn(LossPoint) -> Self, _) =
            match (fields.get("evaluation"), fields.get("loss")) {
                (Some(loss), _) => (Self::HeldOut, loss),
                (None, Some(loss)) => (Self::Training, loss),
                (None, None) => return Err("without a loss"),
            };
        // NaN and infinities are null in JSON.
        let loss = loss.as_f64().ok_or("a loss that is not a number")?;
        Ok(line(LossPoint { step, loss }))
    }
}

/// Returns a note about the lines with these numbers, which are skipped for the reason `why`.
fn skipped_text(name: &str, lines: &[usize], why: &str) -> String {
    let word = if lines.len() == 1 { "line" } else { "lines" };
    let is_are = if lines.len() == 1 { "is" } else { "are" };
    let numbers: Vec<String> = lines
        .iter()
        .take(MOST_NUMBERS)
        .map(usize::to_string)
        .collect();
    let more = match lines.len().saturating_sub(MOST_NUMBERS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "note: {name}: {word} {}{more} {is_are} skipped: {why}",
        numbers.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(found: &[LossPoint]) -> Vec<(u64, f64)> {
        found.iter().map(|point| (point.step, point.loss)).collect()
    }

    #[test]
    fn lines_of_a_training_are_losses_by_step() {
        let text = "{\"step\":1,\"loss\":3.5,\"norm\":1.0}\n{\"step\":2,\"loss\":3}\n\
                    {\"step\":2,\"evaluation\":3.25}\n\n{\"step\":2,\"recovery\":2,\"new\":[1]}\n";
        let history = LossHistory::parse("a", text);
        assert_eq!(points(&history.training), [(1, 3.5), (2, 3.0)]);
        assert_eq!(points(&history.held_out), [(2, 3.25)]);
        assert_eq!(history.skipped, [""; 0]);
    }

    #[test]
    fn evaluation_may_stand_before_the_steps_before_it() {
        let text = "{\"step\":1,\"loss\":3}\n{\"step\":3,\"evaluation\":3.25}\n\
                    {\"step\":2,\"loss\":2.5}\n{\"step\":3,\"loss\":2}\n\
                    {\"step\":4,\"loss\":1}\n";
        let history = LossHistory::parse("a", text);
        assert_eq!(
            points(&history.training),
            [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.0)]
        );
        assert_eq!(points(&history.held_out), [(3, 3.25)]);
    }

    #[test]
    fn resumed_training_replaces_the_steps_that_it_repeats() {
        let text = "{\"step\":1,\"loss\":5}\n{\"step\":2,\"loss\":4}\n\
                    {\"step\":2,\"evaluation\":4}\n{\"step\":3,\"loss\":3}\n\
                    {\"step\":4,\"loss\":9}\n{\"step\":4,\"evaluation\":9}\n\
                    {\"step\":3,\"loss\":2}\n{\"step\":3,\"evaluation\":2}\n";
        let history = LossHistory::parse("a", text);
        assert_eq!(points(&history.training), [(1, 5.0), (2, 4.0), (3, 2.0)]);
        assert_eq!(points(&history.held_out), [(2, 4.0), (3, 2.0)]);
    }

    #[test]
    fn broken_lines_are_named_and_skipped() {
        let lines = [
            "{\"step\":1,\"loss\":null}",
            "{\"step\":2,\"lo",
            "{\"loss\":1.0}",
            "{\"step\":3}",
            "{\"step\":4,\"loss\":1e999}",
            "[1]",
            "{\"step\":5,\"loss\":1.5}",
        ];
        let history = LossHistory::parse("run.jsonl", &lines.join("\n"));
        assert_eq!(points(&history.training), [(5, 1.5)]);
        let expected = [
            "note: run.jsonl: line 1 is skipped: a loss that is not a number",
            "note: run.jsonl: lines 2, 5 are skipped: not valid JSON",
            "note: run.jsonl: line 4 is skipped: without a loss",
            "note: run.jsonl: lines 3, 6 are skipped: without the number of a step",
        ];
        assert_eq!(history.skipped, expected);

        let many = "{\"step\":1,\"loss\":null}\n".repeat(9);
        let history = LossHistory::parse("a", &many);
        let expected =
            "note: a: lines 1, 2, 3, 4, 5 and 4 more are skipped: a loss that is not a number";
        assert_eq!(history.skipped, [expected]);
    }

    #[test]
    fn logarithms_need_losses_above_0() {
        let text = "{\"step\":1,\"loss\":0}\n{\"step\":2,\"loss\":-1}\n{\"step\":3,\"loss\":2}\n\
                    {\"step\":3,\"evaluation\":0.0}";
        let mut history = LossHistory::parse("a", text);
        history.skip_losses_without_logarithm();
        assert_eq!(points(&history.training), [(3, 2.0)]);
        assert_eq!(history.held_out, []);
        let expected =
            "note: a: 3 losses are skipped: a logarithmic scale has only numbers above 0";
        assert_eq!(history.skipped, [expected]);
    }
}
