//! The lines of the report: facts with their verdicts.

use serde::Serialize;

/// One line of the report: a fact and its verdict.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct DoctorFinding {
    pub(super) name: &'static str,
    /// The fact as text, which may have several lines.
    pub(super) value: String,
    pub(super) verdict: Verdict,
    /// The consequences of the fact, and how to fix them. May be empty if the verdict is `Ok`.
    pub(super) advice: String,
}

/// The judgement of a fact.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// The fact is as it should be.
    Ok,
    /// The fact makes jobs slow, or prevents some uses.
    Note,
    /// The fact prevents the use of the requested transport or devices.
    Problem,
}

/// Creates a line of the report.
pub(super) fn finding(
    name: &'static str,
    value: impl Into<String>,
    verdict: Verdict,
    advice: impl Into<String>,
) -> DoctorFinding {
    DoctorFinding {
        name,
        value: value.into(),
        verdict,
        advice: advice.into(),
    }
}
