//! Comparison of texts that must be equal on all processes but belong to no array operation.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::{NewOp, Program};
use crate::error::Result;
use crate::exec::Rolling;
use mpmd_record::dry_run::{OpDescriptor, OpKind};

/// Maximum bytes of text in one comparison, and so in an error message about it.
const SHOWN: usize = 1000;

/// A piece of text that all processes compare in one operation.
struct ComparedText(String);

impl fmt::Display for ComparedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "assert_same {}", self.0)
    }
}

impl Program {
    /// Compares a text on all processes. For instance, each process has read a schedule or a
    /// setting from its own file.
    ///
    /// Takes one operation number for each piece of up to 1,000 bytes. Sends no message of its own
    /// and does not block. If the texts differ, the programs have diverged. Every process then gets
    /// an error with the texts and lines of two processes. The error comes before a later operation
    /// delivers data, or at the next [step end](Program::step_end).
    ///
    /// # Errors
    ///
    /// If this call is within a captured step.
    #[track_caller]
    pub fn assert_same(&mut self, text: impl Into<String>) -> Result<()> {
        let at = self.caller(Location::caller());
        self.refuse_in_capture(at, "assert_same")?;

        let text = text.into();
        // Cut into short pieces, so that the shown piece contains the difference.
        let mut rest = text.as_str();
        loop {
            let end = (0..=SHOWN.min(rest.len()))
                .rev()
                .find(|end| rest.is_char_boundary(*end));
            let (piece, more) = rest.split_at(end.unwrap_or(rest.len()));

            let what = Arc::new(ComparedText(piece.to_owned()));
            let word = Rolling::default().mix_bytes(what.0.as_bytes()).word();
            let descriptor = || OpDescriptor::local(&what, OpKind::AssertSame, Vec::new());
            self.issue_op(
                [0xc0a9a2e, word],
                NewOp::new(at, &|| what.clone(), &descriptor),
            );
            if more.is_empty() {
                break;
            }
            rest = more;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{ProcessId, api::program::Simulation};

    #[test]
    fn error_shows_the_differing_part_of_a_long_text() {
        let results = Simulation::new(2, 2).run(|p| {
            let end = if p.process() == ProcessId(1) {
                "0B8"
            } else {
                "0B9"
            };
            p.assert_same("0F0 \u{2014} ".repeat(2000) + end)?;
            p.broadcast_value(ProcessId(0), 0u8, || Ok(1))
        });
        let errors: Vec<String> = results
            .into_iter()
            .filter_map(|result| Some(result.err()?.to_string()))
            .collect();
        assert!(!errors.is_empty());
        assert!(
            errors
                .iter()
                .all(|error| error.contains("0B8") && error.contains("0B9")),
            "{errors:?}"
        );
    }

    #[test]
    fn differing_texts_fail_and_equal_texts_pass() {
        let run = |other: &str| {
            let results = Simulation::new(3, 3).run(|p| {
                let text = if p.process() == ProcessId(1) {
                    other
                } else {
                    "rank 0: 0F0 0B0"
                };
                p.assert_same(text)?;
                p.broadcast_value(ProcessId(0), 0u8, || Ok(1))
            });
            results
                .into_iter()
                .map(|result| result.map_err(|error| error.to_string()))
                .collect::<Vec<_>>()
        };
        assert_eq!(run("rank 0: 0F0 0B0"), vec![Ok(1); 3]);
        // The sending process does not wait; it gets the error when it ends.
        let differing = run("rank 0: 0F0 0F1");
        let errors: Vec<&String> = differing
            .iter()
            .filter_map(|result| result.as_ref().err())
            .collect();
        assert!(errors.len() >= 2, "{differing:?}");
        for error in errors {
            let shown = [
                "assert_same rank 0: 0F0 0B0",
                "assert_same rank 0: 0F0 0F1",
                "assert_same.rs:",
            ];
            assert!(shown.iter().all(|text| error.contains(text)), "{error}");
        }
    }
}
