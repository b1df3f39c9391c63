//! Facts that must be equal on all processes of a job, and how they differ.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use mpmd_proto::wire::ProcessId;

/// Limit on the total size of a process's facts in bytes.
pub(super) const MAX_FACT_BYTES: usize = 128 << 10;

/// Largest number of differences that an error message shows.
const SHOWN: usize = 6;

/// A named value that must be equal on all processes of a job, such as a program option or the
/// content of a file.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Fact {
    /// The fact's name, for messages. No other fact of the process has it.
    pub name: String,
    /// The value to compare. `None` if this process does not know it, such as the content of a file
    /// that only another process has. `None` agrees with every value.
    pub value: Option<String>,
    /// Additional text for messages, such as a file's path, size and time. It is not compared.
    pub note: String,
}

impl Fact {
    /// Creates a fact without a note.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            value: Some(value.into()),
            note: String::new(),
        }
    }

    /// Returns the value as text for a message. Appends the note unless it equals `last_note`.
    fn shown<'a>(&'a self, last_note: &mut &'a str) -> String {
        let value = self.value.as_deref().unwrap_or("no value");
        let note = self.note.as_str();
        match note.is_empty() || std::mem::replace(last_note, note) == note {
            true => value.to_owned(),
            false => format!("{value} ({note})"),
        }
    }
}

/// A fact whose values differ on two processes, or at two times.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Difference {
    /// The name of the fact.
    pub name: String,
    /// The value on the first process, for messages.
    pub first: String,
    /// The value on the second process, for messages.
    pub second: String,
}

impl Difference {
    /// Returns the facts that differ, including facts that only one of the lists contains. Of
    /// consecutive facts with the same note, such as parts of one file, only the first shows the
    /// note.
    pub fn between(first: &[Fact], second: &[Fact]) -> Vec<Self> {
        let [of_first, of_second] = [first, second].map(by_name);
        let only_second = second
            .iter()
            .filter(|fact| !of_first.contains_key(&*fact.name));
        let names = first
            .iter()
            .chain(only_second)
            .map(|fact| fact.name.as_str());

        let mut last_notes = [""; 2];
        names
            .filter_map(|name| {
                let pair = [of_first.get(name), of_second.get(name)];
                let is_unknown = pair.iter().flatten().any(|fact| fact.value.is_none());
                let [first, second] = pair.map(|fact| fact.map(|fact| &fact.value));
                if is_unknown || first == second {
                    return None;
                }

                let mut shown =
                    pair.iter()
                        .zip(&mut last_notes)
                        .map(|(fact, last_note)| match fact {
                            Some(fact) => fact.shown(last_note),
                            None => "none".to_owned(),
                        });
                let first = shown.next().unwrap_or_default();
                let second = shown.next().unwrap_or_default();
                drop(shown);
                Some(Self {
                    name: name.to_owned(),
                    first,
                    second,
                })
            })
            .collect()
    }
}

fn by_name(facts: &[Fact]) -> BTreeMap<&str, &Fact> {
    facts
        .iter()
        .map(|fact| (fact.name.as_str(), fact))
        .collect()
}

/// Formats the facts that differ on two processes. The values of the process with the lower number
/// come first.
pub(super) fn on_two(
    facts: &[Difference],
    process: ProcessId,
    other: ProcessId,
) -> impl fmt::Display {
    list(facts, move |Difference { first, second, .. }| {
        match process <= other {
            true => format!("process {process} has {first}, process {other} has {second}"),
            false => format!("process {other} has {second}, process {process} has {first}"),
        }
    })
}

/// Formats the facts of one process that have changed.
pub(super) fn over_time(facts: &[Difference]) -> impl fmt::Display {
    list(facts, |Difference { first, second, .. }| {
        format!("it was {first}, and is {second}")
    })
}

fn list(facts: &[Difference], values: impl Fn(&Difference) -> String) -> String {
    let shown = facts.iter().take(SHOWN);
    let mut parts: Vec<String> = shown
        .map(|fact| format!("{}: {}", fact.name, values(fact)))
        .collect();
    if facts.len() > SHOWN {
        parts.push(format!("and {} more", facts.len() - SHOWN));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(value: &str) -> Fact {
        Fact::new("--seed", value)
    }

    fn file(value: Option<&str>, note: &str) -> Fact {
        Fact {
            name: "--data".into(),
            value: value.map(str::to_owned),
            note: note.into(),
        }
    }

    #[test]
    fn differing_facts_are_named_with_both_values() {
        let first = [
            seed("1"),
            file(Some("hash 7"), "/a, 3 B"),
            Fact::new("--lr", "0.1"),
        ];
        let second = [
            file(Some("hash 8"), "/b, 3 B"),
            seed("2"),
            Fact::new("--clip", "1"),
        ];
        let found = Difference::between(&first, &second);
        assert_eq!(
            on_two(&found, ProcessId(2), ProcessId(0)).to_string(),
            "--seed: process 0 has 2, process 2 has 1; --data: process 0 has hash 8 (/b, 3 B), \
             process 2 has hash 7 (/a, 3 B); --lr: process 0 has none, process 2 has 0.1; --clip: \
             process 0 has 1, process 2 has none"
        );
        let changed = Difference::between(&[seed("1")], &[seed("2")]);
        assert_eq!(
            over_time(&changed).to_string(),
            "--seed: it was 1, and is 2"
        );
    }

    #[test]
    fn unknown_values_and_other_notes_are_no_difference() {
        assert_eq!(
            Difference::between(&[file(None, "")], &[file(Some("hash 7"), "/a")]),
            []
        );
        assert_eq!(
            Difference::between(&[file(Some("7"), "/b")], &[file(Some("7"), "/a")]),
            []
        );
        assert_eq!(
            Difference::between(&[], &[file(Some("7"), "")]).len(),
            1,
            "it is not given"
        );
    }

    #[test]
    fn note_of_several_facts_is_shown_by_the_first_that_differs() {
        let facts = |values: [&str; 3]| {
            let names = ["a", "b", "c"].into_iter().zip(values);
            let fact = |(name, value)| Fact {
                note: "/m, 3 B".into(),
                ..Fact::new(name, value)
            };
            names.map(fact).collect::<Vec<_>>()
        };
        let found = Difference::between(&facts(["1", "2", "3"]), &facts(["1", "4", "5"]));
        let said = on_two(&found, ProcessId(0), ProcessId(1)).to_string();
        let expected = "b: process 0 has 2 (/m, 3 B), process 1 has 4 (/m, 3 B); c: process 0 has \
                        3, process 1 has 5";
        assert_eq!(said, expected);
    }

    #[test]
    fn long_lists_of_differences_are_cut() {
        let facts = |value: &str| -> Vec<Fact> {
            (0..100)
                .map(|layer| Fact::new(format!("layer {layer}"), value))
                .collect()
        };
        let found = Difference::between(&facts("a"), &facts("b"));
        let said = on_two(&found, ProcessId(0), ProcessId(1)).to_string();
        assert!(said.ends_with("process 1 has b; and 94 more"), "{said}");
    }
}
