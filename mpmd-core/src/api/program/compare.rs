//! What must be equal on all processes and is part of no operation on arrays.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::Program;
use crate::dry_run::{Form, Kind};
use crate::error::Result;
use crate::exec::Rolling;

/// Bytes of a text that are compared at a time.
const SHOWN: usize = 1000;

struct Compared(String);

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compare {}", self.0)
    }
}

impl Program {
    /// Has all processes compare a text: a schedule, a setting that each has read from a file of
    /// its own.
    ///
    /// Takes a number for each 1,000 bytes, sends nothing and waits for nothing. Where the texts
    /// differ the programs have diverged: before anything of a later operation is delivered, or
    /// with the next [step end](Program::step_end), every process gets an error that shows what two
    /// of them have, with their lines.
    ///
    /// # Errors
    ///
    /// Within a step that is recorded.
    #[track_caller]
    pub fn compare(&mut self, text: impl Into<String>) -> Result<()> {
        let at = self.caller(Location::caller());
        self.refuse_recording(at, "compare")?;
        let text = text.into();
        // So that what is shown of a difference has it in it.
        let mut rest = text.as_str();
        loop {
            let end = (0..=SHOWN.min(rest.len())).rev().find(|end| rest.is_char_boundary(*end));
            let (piece, more) = rest.split_at(end.unwrap_or(rest.len()));
            let what = Arc::new(Compared(piece.to_owned()));
            let word = Rolling::default().mix_bytes(what.0.as_bytes()).word();
            self.issue([0xc0a9a2e, word], what.clone(), at);
            self.record_operation(at, [], None, || Form {
                what: what.to_string(),
                kind: Kind::Compare,
                results: Vec::new(),
                messages: Vec::new(),
            });
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
    fn of_long_texts_that_part_is_shown_which_differs() {
        let results = Simulation::new(2, 2).run(|p| {
            let end = if p.process() == ProcessId(1) { "0B8" } else { "0B9" };
            p.compare("0F0 \u{2014} ".repeat(2000) + end)?;
            p.agree(ProcessId(0), 0u8, || Ok(1))
        });
        let errors: Vec<String> =
            results.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
        assert!(!errors.is_empty());
        assert!(
            errors.iter().all(|error| error.contains("0B8") && error.contains("0B9")),
            "{errors:?}"
        );
    }

    #[test]
    fn texts_that_differ_are_shown_to_all_and_equal_ones_are_nothing() {
        let run = |other: &str| {
            let results = Simulation::new(3, 3).run(|p| {
                let text = if p.process() == ProcessId(1) { other } else { "rank 0: 0F0 0B0" };
                p.compare(text)?;
                p.agree(ProcessId(0), 0u8, || Ok(1))
            });
            results
                .into_iter()
                .map(|result| result.map_err(|error| error.to_string()))
                .collect::<Vec<_>>()
        };
        assert_eq!(run("rank 0: 0F0 0B0"), vec![Ok(1); 3]);
        // Who gives does not wait; it hears of it when it ends.
        let differing = run("rank 0: 0F0 0F1");
        let errors: Vec<&String> =
            differing.iter().filter_map(|result| result.as_ref().err()).collect();
        assert!(errors.len() >= 2, "{differing:?}");
        for error in errors {
            let shown = ["compare rank 0: 0F0 0B0", "compare rank 0: 0F0 0F1", "compare.rs:"];
            assert!(shown.iter().all(|text| error.contains(text)), "{error}");
        }
    }
}
