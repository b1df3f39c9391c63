//! Compares patterns of names with Python's `re`.

use std::collections::BTreeSet;

use mpmd_layout::sharding::rules::NamePattern;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    names: Vec<String>,
    patterns: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    pattern: String,
    #[serde(flatten)]
    expected: Expected,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Names {
        /// The names that the pattern matches as a whole.
        matches: BTreeSet<String>,
        /// The names in which the pattern is found.
        found: BTreeSet<String>,
    },
    Refused {
        #[serde(rename = "refused")]
        _message: String,
    },
}

/// Patterns that are refused although `re` takes them: our engine reads them in another way, or
/// not at all.
const REFUSED: [&str; 21] = [
    r"(?a)\w+",
    r"[!--]+",
    r"[+--]+",
    r"[--a]+",
    r"[[:alpha:]]",
    r"[[]0]",
    r"[[a]b]",
    r"[\b]",
    r"[a&&b]+",
    r"[a[:alpha:]]",
    r"[a[b]]",
    r"[a||b]+",
    r"[a~~b]+",
    r"\0",
    r"\01",
    r"\141",
    r"\141b",
    r"\<x\>",
    r"\N{LATIN SMALL LETTER A}b",
    r"a\Z",
    r"a{ 2}",
];

/// Patterns that `re` refuses, but our engine takes. There is no group 1.
const TAKEN: [&str; 1] = ["(?(1)a|b)"];

/// Pairs of a pattern and a name that are matched in another way: `\w` and `(?i)` differ in some
/// characters beyond ASCII, and `$` before a line's end.
const DIFFERENT: [(&str, &str); 6] = [
    ("(?i)[a-z]+", "\u{130}"),
    (r"(?u)\w+", "i\u{307}"),
    (r"[\w.]+", "i\u{307}"),
    (r"[^\W\d_]+", "i\u{307}"),
    (r"\w+", "i\u{307}"),
    ("ab$", "ab\n"),
];

#[test]
fn patterns_match_as_in_python_or_are_refused() {
    let golden: Golden = serde_json::from_str(include_str!("name_patterns.json")).unwrap();
    let mut refused = Vec::new();
    let mut taken = Vec::new();
    let mut different = Vec::new();
    for Case { pattern, expected } in &golden.patterns {
        let (whole, anywhere) = (NamePattern::whole(pattern), NamePattern::anywhere(pattern));
        match (expected, whole, anywhere) {
            (Expected::Refused { .. }, Err(_), Err(_)) => {}
            (Expected::Names { .. }, Err(_), Err(_)) => refused.push(pattern.as_str()),
            (Expected::Names { matches, found }, Ok(whole), Ok(anywhere)) => {
                for name in &golden.names {
                    let is_equal = whole.matches(name) == Ok(matches.contains(name))
                        && anywhere.matches(name) == Ok(found.contains(name));
                    if !is_equal {
                        different.push((pattern.as_str(), name.as_str()));
                    }
                }
            }
            (Expected::Refused { .. }, ..) => taken.push(pattern.as_str()),
            (_, whole, anywhere) => panic!("{pattern:?}: {whole:?}, {anywhere:?}"),
        }
    }
    assert_eq!(taken, TAKEN);
    assert_eq!(refused, REFUSED);
    assert_eq!(different, DIFFERENT);
}
