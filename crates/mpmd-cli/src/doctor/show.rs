//! Formats findings as text for people and as JSON for programs.

use anyhow::Result;
use serde_json::json;

use super::facts::DoctorFacts;
use super::verdict::{DoctorFinding, Verdict};

/// The maximum width of a line, in characters.
const WIDTH: usize = 100;

/// The column in which values begin, in characters.
const INDENT: usize = 27;

/// Returns a table of the findings, and a last line that counts problems and notes. The advice on a
/// finding stands below its value.
pub(super) fn text(facts: &DoctorFacts, findings: &[DoctorFinding]) -> String {
    let mut lines = Vec::new();
    for DoctorFinding {
        name,
        value,
        verdict,
        advice,
    } in findings
    {
        let mut said: Vec<String> = value
            .lines()
            .flat_map(|line| wrapped(line, WIDTH - INDENT))
            .collect();
        let advice = wrapped(advice, WIDTH - INDENT - 2).into_iter().enumerate();
        said.extend(advice.map(|(i, line)| format!("{} {line}", if i == 0 { '→' } else { ' ' })));

        let mut head = format!("{:<9}{name:<18}", word(*verdict));
        for line in said {
            lines.push(format!("{head}{line}"));
            head = " ".repeat(INDENT);
        }
    }

    let count = |verdict| {
        findings
            .iter()
            .filter(|finding| finding.verdict == verdict)
            .count()
    };
    let problems = count(Verdict::Problem);
    let notes = count(Verdict::Note);
    let notes = match notes {
        0 => String::new(),
        1 => "; 1 note".to_owned(),
        several => format!("; {several} notes"),
    };
    let cuda = if facts.wants_cuda() {
        " with devices of kind cuda"
    } else {
        ""
    };
    let asked = format!("{}{cuda}", facts.transport);

    lines.push(String::new());
    lines.push(match problems {
        0 => format!("nothing stands in the way of {asked}{notes}"),
        1 => format!("1 problem stands in the way of {asked}{notes}"),
        several => format!("{several} problems stand in the way of {asked}{notes}"),
    });
    lines.push(String::new());
    lines.join("\n")
}

/// Returns `{transport, device, problems, findings: [{name, value, verdict, advice}], facts}` as
/// indented JSON.
pub(super) fn json(facts: &DoctorFacts, findings: &[DoctorFinding]) -> Result<String> {
    let problems = findings
        .iter()
        .filter(|finding| finding.verdict == Verdict::Problem)
        .count();

    let all = json!({
        "transport": facts.transport,
        "device": facts.device,
        "problems": problems,
        "findings": findings,
        "facts": facts,
    });
    Ok(format!("{}\n", serde_json::to_string_pretty(&all)?))
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Ok => "ok",
        Verdict::Note => "note",
        Verdict::Problem => "problem",
    }
}

/// Breaks the text at blanks into lines of at most `width` characters. A longer word gets its own
/// line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_at_blanks() {
        assert_eq!(wrapped("a bb ccc  dddd", 6), ["a bb", "ccc", "dddd"]);
        assert_eq!(
            wrapped("/a/long/path is long", 5),
            ["/a/long/path", "is", "long"]
        );
        assert!(wrapped(" ", 5).is_empty());
    }
}
