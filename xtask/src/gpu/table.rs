//! The table of results: requirements, findings and verdicts.

use comfy_table::Table;
use comfy_table::presets::NOTHING;

/// A line of the table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Row {
    pub(super) item: String,
    pub(super) asked: String,
    pub(super) found: String,
    pub(super) verdict: Verdict,
}

/// The verdict on a row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    /// The row is a fact without a requirement.
    Told,
    Passed,
    Failed,
    /// The check did not run: a program that it needs, or a GPU, is missing.
    NotRun,
    /// The check ran on the software driver, where figures have no meaning.
    Ran,
}

impl Row {
    pub(super) fn told(item: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(item, "", found, Verdict::Told)
    }

    pub(super) fn passed(
        item: impl Into<String>,
        asked: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::new(item, asked, found, Verdict::Passed)
    }

    pub(super) fn failed(
        item: impl Into<String>,
        asked: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::new(item, asked, found, Verdict::Failed)
    }

    pub(super) fn not_run(
        item: impl Into<String>,
        asked: impl Into<String>,
        why: impl Into<String>,
    ) -> Self {
        Self::new(item, asked, why, Verdict::NotRun)
    }

    pub(super) fn new(
        item: impl Into<String>,
        asked: impl Into<String>,
        found: impl Into<String>,
        verdict: Verdict,
    ) -> Self {
        Self { item: item.into(), asked: asked.into(), found: found.into(), verdict }
    }
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Told => "",
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
            Self::Ran => "ran",
        }
    }
}

/// Formats the table, with a line of totals at the end.
pub(super) fn text(rows: &[Row], software: bool) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(["", "item", "asked", "found"]);
    for Row { item, asked, found, verdict } in rows {
        table.add_row([verdict.word(), item, asked, found]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut lines = vec![table.trim_fmt()];
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let (passed, failed, not_run) =
        (count(Verdict::Passed), count(Verdict::Failed), count(Verdict::NotRun));
    lines.push(String::new());
    lines.push(if software {
        let ran = passed + count(Verdict::Ran);
        format!(
            "on a driver in software, whose figures mean nothing: {ran} ran, {failed} failed, \
            {not_run} not run"
        )
    } else {
        format!("{passed} passed, {failed} failed, {not_run} not run")
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_totals_are_last() {
        let rows = [
            Row::told("processors", "one"),
            Row::passed("tests", "all pass", "all passed"),
            Row::failed("hand-over", "at most 20 us", "25 us"),
            Row::not_run("memcheck", "clean", "not installed"),
        ];
        let said = text(&rows, false);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.last(), Some(&"1 passed, 1 failed, 1 not run"));
        let column = lines[0].find("found").unwrap();
        for (line, row) in lines[1..].iter().zip(&rows) {
            assert_eq!(line.find(&row.found), Some(column), "{said}");
        }
        assert!(lines[3].starts_with("FAILED   hand-over"), "{said}");
        assert!(text(&rows, true).contains("figures mean nothing"));
    }
}
