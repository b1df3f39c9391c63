//! Parses torch's text of a schedule, cell by cell.

use std::fmt;

use super::{Action, Cell, Dialect, Entry, ScheduleText, Step, StepKind};
use crate::ActionKind;

/// Maximum number of faults that an error lists; further ones are only counted.
const NAMED: usize = 8;
/// Maximum number of characters of a bad cell that a message shows.
const SHOWN: usize = 40;

/// An error in the text of a schedule. The caller is at fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{}{}",
    .faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    and_more(.more)
)]
pub struct TextError {
    /// The first faults, at most 8, in the order of the text.
    pub faults: Vec<CellFault>,
    /// The number of further faults, which are not listed.
    pub more: usize,
}

/// A cell or a line that violates the format.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CellFault {
    /// The line, from 1: the rank plus one.
    pub line: usize,
    /// The index of the cell in its line, from 1.
    pub column: usize,
    /// The offset of the cell in bytes from the beginning of the text.
    pub byte: usize,
    /// The text of the cell; only its beginning if it is long.
    pub cell: String,
    /// The reason that the cell or line is invalid.
    pub problem: CellProblem,
}

/// The reason that a cell or a line violates the format. Quoted parts of the text are cut to 40
/// characters.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CellProblem {
    /// A line has no characters.
    #[error("an empty line is, to torch, a rank that does nothing; remove it")]
    EmptyLine,
    /// The text has no lines.
    #[error("there are no lines")]
    NoLines,
    /// A `compute_only` text has a send, a receive, a gather or a release of weights.
    #[error("moves and gathers are not in a compute_only text: read it as compute_comms")]
    Move,
    /// A line of a `compute_comms` text ends with empty cells.
    #[error(
        "a compute_comms text has no empty cells, and this line ends with {cells}: a spreadsheet \
        that makes all lines equally long does that; remove the commas at its end"
    )]
    Padding {
        /// The number of empty cells.
        cells: usize,
    },
    /// A `compute_comms` text has an empty cell before one that is not empty.
    #[error("a compute_comms text has no empty cells: a wait is not written in it")]
    EmptyCell,
    /// The parenthesis of an overlapped pair is not closed.
    #[error("a `)` is missing")]
    OpenPair,
    /// The closing parenthesis of an overlapped pair is not followed by `OVERLAP_F_B`.
    #[error("`OVERLAP_F_B` must stand after `)`, not `{found}`")]
    PairKind {
        /// The text after the closing parenthesis.
        found: String,
    },
    /// An action of an overlapped pair is invalid.
    #[error("in the pair: {0}")]
    InPair(Box<Self>),
    /// An entry of an overlapped pair is no computation.
    #[error("{entry} is not computed")]
    NotComputed {
        /// The entry that is no computation.
        entry: Entry,
    },
    /// Both actions of an overlapped pair are forward passes, or neither is.
    #[error("{one} and {other} are not a forward and a backward pass")]
    PairKinds {
        /// The first action of the pair.
        one: Action,
        /// The second action of the pair.
        other: Action,
    },
    /// An overlapped pair has more or fewer than two actions.
    #[error("two actions overlap, not {found}")]
    PairLength {
        /// The number of actions in the pair.
        found: usize,
    },
    /// An action has no stage.
    #[error("an action begins with the number of its stage")]
    NoStage,
    /// The number of a stage or microbatch exceeds 32 bits.
    #[error("{field} {digits} is too large")]
    Large {
        /// The field that is too large: `stage` or `microbatch`.
        field: &'static str,
        /// The digits of the number.
        digits: String,
    },
    /// Further characters follow an action.
    #[error("`{rest}` stands after the action")]
    Rest {
        /// The characters after the action.
        rest: String,
    },
    /// An action for a whole stage has a microbatch.
    #[error("{kind} is for all microbatches and takes no microbatch number")]
    WithMicrobatch {
        /// The kind of the action.
        kind: String,
    },
    /// An action for one microbatch lacks the microbatch's number.
    #[error("{kind} is for one microbatch, and its number is missing")]
    NoMicrobatch {
        /// The kind of the action.
        kind: String,
    },
    /// The text has the action `BW` of torch's old format.
    #[error(
        "BW is of old files, where it was the whole backward pass and B the input gradient; today \
        these are B and I: {stage}B{microbatch} here, and {stage}I for {stage}B elsewhere in the \
        file"
    )]
    OldBackward {
        /// The digits of the stage's number.
        stage: String,
        /// The digits of the microbatch's number.
        microbatch: String,
    },
    /// The kind of an action is unknown.
    #[error("there is no action `{kind}`; there are {}", KINDS.join(", "))]
    Unknown {
        /// The unknown kind.
        kind: String,
    },
    /// The kind of an action is not in upper case.
    #[error("there is no action `{kind}`: letters are upper case, {}", kind.to_ascii_uppercase())]
    LowerCase {
        /// The kind, as in the text.
        kind: String,
    },
}

impl fmt::Display for CellFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            line,
            column,
            byte,
            cell,
            problem,
        } = self;
        write!(
            f,
            "line {line}, column {column} (byte {byte}), `{}`: {problem}",
            cell.escape_debug()
        )
    }
}

fn and_more(more: &usize) -> String {
    if *more == 0 {
        String::new()
    } else {
        format!("; and {more} more")
    }
}

pub(super) fn parse(text: &str, asked: Option<Dialect>) -> Result<ScheduleText, TextError> {
    let mut faults = CellFaults::default();
    let mut rows = Vec::new();
    let mut moves = false;
    // The first empty cell of each line, for `compute_comms`.
    let mut empty = Vec::new();
    for (line, TextLine { start, content }) in lines(text).enumerate() {
        let mut place = TextPosition {
            line: line + 1,
            column: 1,
            byte: start,
        };

        if content.is_empty() {
            faults.add(place, content, CellProblem::EmptyLine);
        }

        let mut row = Vec::new();
        let mut first_empty = None;
        for raw in content.split(',') {
            match cell(raw) {
                Ok(cell) => {
                    moves |= is_move(cell);
                    if asked == Some(Dialect::ComputeOnly) && is_move(cell) {
                        faults.add(place, raw, CellProblem::Move);
                    }
                    if cell == Cell::Empty && first_empty.is_none() {
                        first_empty = Some((place, row.len()));
                    }
                    row.push(cell);
                }
                Err(problem) => faults.add(place, raw, problem),
            }

            place.column += 1;
            place.byte += raw.len() + 1;
        }

        if let Some((place, index)) = first_empty
            && !content.is_empty()
        {
            let padded = row[index..].iter().all(|cell| *cell == Cell::Empty);
            empty.push((place, padded.then_some(row.len() - index)));
        }
        rows.push(row);
    }

    if rows.is_empty() {
        faults.add(
            TextPosition {
                line: 1,
                column: 1,
                byte: 0,
            },
            "",
            CellProblem::NoLines,
        );
    }

    let found = if moves {
        Dialect::ComputeComms
    } else {
        Dialect::ComputeOnly
    };
    let flavour = asked.unwrap_or(found);

    if flavour == Dialect::ComputeComms {
        for (place, padding) in empty {
            let problem = match padding {
                Some(cells) => CellProblem::Padding { cells },
                None => CellProblem::EmptyCell,
            };
            faults.add(place, "", problem);
        }
    }

    faults.end()?;
    Ok(ScheduleText { flavour, rows })
}

/// One line of a text.
struct TextLine<'t> {
    /// Offset of the line in the text, in bytes.
    start: usize,
    content: &'t str,
}

/// Returns the lines as Python's `csv` module splits them. The last line needs no line end.
fn lines(text: &str) -> impl Iterator<Item = TextLine<'_>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = text.get(start..).filter(|rest| !rest.is_empty())?;
        let end = rest.find(['\r', '\n']).unwrap_or(rest.len());
        let ends = if rest[end..].starts_with("\r\n") {
            2
        } else {
            1
        };
        let line = TextLine {
            start,
            content: &rest[..end],
        };
        start += end + ends;
        Some(line)
    })
}

fn is_move(cell: Cell) -> bool {
    match cell {
        Cell::One(Entry::Step(step)) => step.action().is_none(),
        Cell::One(Entry::Unshard(_) | Entry::Reshard(_)) => true,
        Cell::One(Entry::ReduceGrad(_)) | Cell::Overlapped(..) | Cell::Empty => false,
    }
}

fn cell(raw: &str) -> Result<Cell, CellProblem> {
    let unquoted = raw
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
        .unwrap_or(raw);
    let cell = unquoted.trim();
    if cell.is_empty() {
        return Ok(Cell::Empty);
    }

    let Some(rest) = cell.strip_prefix('(') else {
        return entry(cell).map(Cell::One);
    };
    let Some((inner, kind)) = rest.split_once(')') else {
        return Err(CellProblem::OpenPair);
    };

    if kind != "OVERLAP_F_B" {
        return Err(CellProblem::PairKind { found: shown(kind) });
    }

    let halves: Vec<Action> = inner
        .split(';')
        .map(|half| {
            let entry = entry(half.trim())?;
            let action = match entry {
                Entry::Step(step) => step.action(),
                _ => None,
            };
            action.ok_or(CellProblem::NotComputed { entry })
        })
        .collect::<Result<_, _>>()
        .map_err(|problem| CellProblem::InPair(Box::new(problem)))?;

    match halves[..] {
        [one, other]
            if (one.kind == ActionKind::Forward) != (other.kind == ActionKind::Forward) =>
        {
            Ok(Cell::Overlapped(one, other))
        }
        [one, other] => Err(CellProblem::PairKinds { one, other }),
        _ => Err(CellProblem::PairLength {
            found: halves.len(),
        }),
    }
}

/// Parses one operation, `STAGE KIND [MICROBATCH]` without spaces.
fn entry(text: &str) -> Result<Entry, CellProblem> {
    let (stage, rest) = leading(text, |c| c.is_ascii_digit());
    let (kind, rest) = leading(rest, |c| c.is_ascii_alphabetic() || c == '_');
    let (microbatch, rest) = leading(rest, |c| c.is_ascii_digit());

    if stage.is_empty() {
        return Err(CellProblem::NoStage);
    }

    let number = |field: &'static str, digits: &str| {
        digits.parse::<u32>().map_err(|_| CellProblem::Large {
            field,
            digits: shown(digits),
        })
    };
    let stage_number = number("stage", stage)?;

    let moved = match kind {
        "F" => StepKind::Compute(ActionKind::Forward),
        "I" => StepKind::Compute(ActionKind::BackwardInput),
        "W" => StepKind::Compute(ActionKind::BackwardWeight),
        "B" => StepKind::Compute(ActionKind::Backward),
        "SEND_F" => StepKind::SendForward,
        "RECV_F" => StepKind::ReceiveForward,
        "SEND_B" => StepKind::SendBackward,
        "RECV_B" => StepKind::ReceiveBackward,
        "UNSHARD" | "RESHARD" | "REDUCE_GRAD" => {
            if !rest.is_empty() {
                return Err(CellProblem::Rest { rest: shown(rest) });
            }
            if !microbatch.is_empty() {
                return Err(CellProblem::WithMicrobatch {
                    kind: kind.to_owned(),
                });
            }
            return Ok(match kind {
                "UNSHARD" => Entry::Unshard(stage_number),
                "RESHARD" => Entry::Reshard(stage_number),
                _ => Entry::ReduceGrad(stage_number),
            });
        }
        "BW" => {
            return Err(CellProblem::OldBackward {
                stage: stage.to_owned(),
                microbatch: microbatch.to_owned(),
            });
        }
        _ => {
            let upper = kind.to_ascii_uppercase();
            let kind_text = shown(kind);
            return Err(if upper != kind && KINDS.contains(&upper.as_str()) {
                CellProblem::LowerCase { kind: kind_text }
            } else {
                CellProblem::Unknown { kind: kind_text }
            });
        }
    };

    if microbatch.is_empty() {
        return Err(CellProblem::NoMicrobatch {
            kind: kind.to_owned(),
        });
    }
    if !rest.is_empty() {
        return Err(CellProblem::Rest { rest: shown(rest) });
    }

    let microbatch = number("microbatch", microbatch)?;
    Ok(Entry::Step(Step {
        stage: stage_number,
        kind: moved,
        microbatch,
    }))
}

const KINDS: [&str; 11] = [
    "F",
    "I",
    "W",
    "B",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "UNSHARD",
    "RESHARD",
    "REDUCE_GRAD",
];

/// Splits the text behind its leading characters that satisfy `is`. Returns both parts.
fn leading(text: &str, is: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !is(c)).unwrap_or(text.len()))
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

#[derive(Clone, Copy)]
struct TextPosition {
    line: usize,
    column: usize,
    byte: usize,
}

#[derive(Default)]
struct CellFaults {
    named: Vec<CellFault>,
    more: usize,
}

impl CellFaults {
    fn add(&mut self, place: TextPosition, cell: &str, problem: CellProblem) {
        let TextPosition { line, column, byte } = place;
        if self.named.len() < NAMED {
            self.named.push(CellFault {
                line,
                column,
                byte,
                cell: shown(cell),
                problem,
            });
        } else {
            self.more += 1;
        }
    }

    fn end(self) -> Result<(), TextError> {
        if self.named.is_empty() {
            Ok(())
        } else {
            Err(TextError {
                faults: self.named,
                more: self.more,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use fancy_regex::Regex;
    use proptest::prelude::*;

    use super::*;
    use crate::Schedule;

    fn fault(text: &str) -> String {
        ScheduleText::parse(text, None).unwrap_err().to_string()
    }

    #[test]
    fn each_malformed_cell_is_refused_with_its_problem() {
        for (cell, expected) in [
            (
                "2BW0",
                "today these are B and I: 2B0 here, and 2I for 2B elsewhere",
            ),
            ("0F1junk", "`junk` stands after the action"),
            ("0F", "F is for one microbatch, and its number is missing"),
            ("0SEND_F", "SEND_F is for one microbatch"),
            ("0UNSHARD1", "UNSHARD is for all microbatches"),
            ("0REDUCE_GRAD0", "REDUCE_GRAD is for all microbatches"),
            ("0UNSHARDx", "no action `UNSHARDx`"),
            ("F0", "begins with the number of its stage"),
            ("-1F0", "begins with the number of its stage"),
            ("0f0", "letters are upper case, F"),
            ("0X0", "no action `X`; there are F, I,"),
            ("0OPT", "no action `OPT`"),
            ("99999999999F0", "stage 99999999999 is too large"),
            ("0F99999999999", "microbatch 99999999999 is too large"),
            ("0F1.5", "`.5` stands after"),
            ("0 F1", "no action ``"),
            ("(0F0;0B0", "a `)` is missing"),
            ("(0F0;0B0)", "`OVERLAP_F_B` must stand after `)`"),
            ("(0F0;0B0)OVERLAP_F_B1", "not `OVERLAP_F_B1`"),
            ("(0F0)OVERLAP_F_B", "two actions overlap, not 1"),
            (
                "(0F0;1F0)OVERLAP_F_B",
                "0F0 and 1F0 are not a forward and a backward pass",
            ),
            ("(0F0;1BW0)OVERLAP_F_B", "in the pair: BW is of old files"),
            ("(0F0;1SEND_B0)OVERLAP_F_B", "1SEND_B0 is not computed"),
            ("(0F0;1UNSHARD)OVERLAP_F_B", "1UNSHARD is not computed"),
            ("()OVERLAP_F_B", "in the pair: an action begins"),
            ("\"0F0", "begins with the number"),
            ("\u{feff}0F0", "begins with the number"),
        ] {
            let found = fault(&format!("0F0,{cell}"));
            assert!(
                found.contains("line 1, column 2 (byte 4)") && found.contains(expected),
                "{cell}: {found}"
            );
        }
    }

    #[test]
    fn faults_give_line_column_and_byte() {
        let error = ScheduleText::parse("0F0,0B0\r\n1F0, 1BW0,1X\r\n", None).unwrap_err();
        let places: Vec<_> = error
            .faults
            .iter()
            .map(|f| (f.line, f.column, f.byte, f.cell.as_str()))
            .collect();
        assert_eq!(places, [(2, 2, 13, " 1BW0"), (2, 3, 19, "1X")]);
        let many = ScheduleText::parse(&vec!["x"; 100].join(","), None).unwrap_err();
        assert_eq!((many.faults.len(), many.more), (8, 92));
        assert!(many.to_string().ends_with("; and 92 more"));
        assert!(
            fault("0F0,0B0\n\n1F0,1B0").contains("line 2, column 1 (byte 8), ``: an empty line")
        );
        assert!(fault("0F0,0B0\n\n").contains("line 2"));
        assert!(fault("").contains("there are no lines"));
    }

    #[test]
    fn only_compute_only_allows_empty_cells() {
        let padded = fault("0UNSHARD,0F0,0B0,,\n1F0,,1B0");
        assert!(padded.contains("line 1, column 4 (byte 17)"), "{padded}");
        assert!(
            padded.contains("this line ends with 2: a spreadsheet"),
            "{padded}"
        );
        assert!(
            padded.contains("line 2, column 2 (byte 23), ``: a compute_comms text has no empty"),
            "{padded}"
        );
        let asked = ScheduleText::parse("0F0,,0B0", Some(Dialect::ComputeComms))
            .unwrap_err()
            .to_string();
        assert!(asked.contains("a wait is not written"), "{asked}");
        assert!(ScheduleText::parse("0F0,0B0", Some(Dialect::ComputeComms)).is_ok());
        let moves = ScheduleText::parse("0F0,0SEND_F0", Some(Dialect::ComputeOnly))
            .unwrap_err()
            .to_string();
        assert!(moves.contains("read it as compute_comms"), "{moves}");
        let reduced = ScheduleText::parse("0F0,,0B0,0REDUCE_GRAD", None).unwrap();
        assert_eq!(reduced.flavour, Dialect::ComputeOnly);
    }

    /// Returns the grammar of a cell as a regular expression, including spaces around the cell.
    fn grammar() -> Regex {
        // All 32-bit numbers that the pieces below can form.
        let number = "0*([0-9]{1,9}|[1-3][0-9]{9})";
        let computed = |kinds: &str| format!("{number}{kinds}{number}");
        let (forward, backward) = (computed("F"), computed("[IWB]"));
        let moved = computed("(F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B)");
        let other = format!("{number}(UNSHARD|RESHARD|REDUCE_GRAD)");
        let pair = format!(
            r"\(\s*({forward}\s*;\s*{backward}|{backward}\s*;\s*{forward})\s*\)OVERLAP_F_B"
        );
        Regex::new(&format!(r"\A\s*({moved}|{other}|{pair})?\s*\z")).unwrap()
    }

    /// Generates strings of up to 8 pieces of cells, valid and invalid.
    fn pieces() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "0",
            "1",
            "27",
            "007",
            "F",
            "I",
            "W",
            "B",
            "BW",
            "SEND_F",
            "RECV_F",
            "SEND_B",
            "RECV_B",
            "SEND",
            "UNSHARD",
            "RESHARD",
            "REDUCE_GRAD",
            "OVERLAP_F_B",
            "(",
            ")",
            ";",
            " ",
            "\t",
            "x",
            "_",
            "f",
            "é",
        ]);
        prop::collection::vec(piece, 0..9).prop_map(|pieces| pieces.concat())
    }

    /// Generates cells: operations, overlapped pairs, and the strings of `pieces`. Some are
    /// invalid.
    fn cells() -> impl Strategy<Value = String> {
        let kind = prop::sample::select(KINDS.to_vec());
        let one = (
            0..30_u32,
            kind.clone(),
            prop::option::weighted(0.8, 0..30_u32),
        )
            .prop_map(|(stage, kind, mb)| {
                format!(
                    "{stage}{kind}{}",
                    mb.map(|mb| mb.to_string()).unwrap_or_default()
                )
            });
        let pair = (one.clone(), one.clone())
            .prop_map(|(one, other)| format!("({one};{other})OVERLAP_F_B"));
        prop_oneof![4 => one, 1 => pair, 4 => pieces()]
    }

    proptest! {
        #[test]
        fn cell_is_read_if_it_matches_the_grammar(cell in cells()) {
            let expected = grammar().is_match(&cell).unwrap();
            // A second cell, so that an empty cell is not an empty line.
            let found = ScheduleText::parse(&format!("0F0,{cell}"), None);
            let empty = cell.trim().is_empty();
            prop_assert_eq!(found.is_ok(), expected, "{:?} {:?}", cell, found);
            if let Ok(text) = found && !empty {
                let again = ScheduleText::parse(&text.to_csv(), None).unwrap();
                prop_assert_eq!(again, text);
            }
        }

        #[test]
        fn text_is_read_if_all_cells_are_and_faults_have_places(
            mut rows in prop::collection::vec(prop::collection::vec(cells(), 1..6), 1..5)
        ) {
            // Makes sure that no line is empty.
            rows.iter_mut().for_each(|row| row.insert(0, "0F0".to_owned()));
            let text = rows.iter().map(|row| row.join(",")).collect::<Vec<_>>().join("\r\n");
            let grammar = grammar();
            let bad = |cell: &&String| !grammar.is_match(cell).unwrap();
            let count = rows.iter().flatten().filter(bad).count();
            match ScheduleText::parse(&text, None) {
                Ok(read) => {
                    prop_assert_eq!(count, 0);
                    prop_assert_eq!(read.rows.iter().map(Vec::len).collect::<Vec<_>>(),
                        rows.iter().map(Vec::len).collect::<Vec<_>>());
                }
                Err(error) => {
                    for fault in &error.faults {
                        let cell = &rows[fault.line - 1][fault.column - 1];
                        prop_assert!(text[fault.byte..].starts_with(cell.as_str()));
                    }
                    // Empty cells and empty lines are faults of the line, and cells alone do not
                    // show them.
                    prop_assert!(error.faults.len() + error.more >= count);
                }
            }
        }
    }

    #[test]
    fn fuzz_schedule_text() {
        let schedule = Schedule::named("zbv", 2, 2, None).unwrap();
        let of = |flavour| {
            ScheduleText::of(&schedule, flavour)
                .unwrap()
                .to_csv()
                .into_bytes()
        };
        let mut samples = vec![of(Dialect::ComputeOnly), of(Dialect::ComputeComms)];
        samples.push(b"0F0,,(0F1;0B0)OVERLAP_F_B,\"0B1\"\n1F0, 1I0,1W0,1F1,1B1,\n".to_vec());
        samples.push(b"0F0,0B0,0F1,0B1\r\n1F0,1B0,1F1,1B1\r\n".to_vec());
        mpmd_fuzz::bytes("schedule-text", &samples, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            for flavour in [
                None,
                Some(Dialect::ComputeOnly),
                Some(Dialect::ComputeComms),
            ] {
                match ScheduleText::parse(&text, flavour) {
                    Ok(read) => {
                        let again =
                            ScheduleText::parse(&read.to_csv(), Some(read.flavour)).unwrap();
                        assert_eq!((again.hash(), &again), (read.hash(), &read));
                        let _ = read.steps();
                        if let Ok(schedule) = read.schedule("x") {
                            let written =
                                ScheduleText::of(&schedule, Dialect::ComputeComms).unwrap();
                            assert_eq!(written.schedule("x").unwrap(), schedule);
                        }
                    }
                    Err(error) => {
                        assert!(
                            error
                                .faults
                                .iter()
                                .all(|fault| text.is_char_boundary(fault.byte))
                        );
                        assert!(error.to_string().len() < 8000);
                    }
                }
            }
        });
    }
}
