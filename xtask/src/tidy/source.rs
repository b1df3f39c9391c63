//! A source file as the rules see it: its text, and for Rust also its code without comments and
//! literals.

use std::ops::Range;

/// A file of the repository.
pub(crate) struct Source {
    /// Path relative to the repository, with `/` between folders.
    pub(crate) path: String,
    /// The whole text.
    pub(crate) text: String,
    /// For a Rust file, the text with each character of a comment or literal replaced by a blank.
    /// So lines and columns do not change. Empty for other files.
    pub(crate) code: String,
}

impl Source {
    pub(crate) fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let code = if path.ends_with(".rs") { code_of(&text) } else { String::new() };
        Self { path, text, code }
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Returns true if the file is `module` (a path without `.rs`), or lies in its folder.
    pub(crate) fn is_in_module(&self, module: &str) -> bool {
        self.path.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    /// Returns the code above the unit tests, which stand at the bottom of a file.
    pub(crate) fn code_without_tests(&self) -> &str {
        if self.path.ends_with("/tests.rs") {
            return "";
        }
        let is_tests = |rest: &str| {
            rest.strip_prefix("#[cfg(test)]")
                .is_some_and(|rest| rest.trim_start().starts_with("mod "))
        };
        let end =
            self.code.match_indices("#[cfg(test)]").find(|(at, _)| is_tests(&self.code[*at..]));
        &self.code[..end.map_or(self.code.len(), |(at, _)| at)]
    }
}

/// Returns the line number, from one, of byte `at`.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Returns the identifiers and keywords of some code, each with its byte offset.
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + code[rest..].find(is_word)?;
        let len = code[start..].find(|c| !is_word(c)).unwrap_or(code.len() - start);
        rest = start + len;
        Some((start, &code[start..rest]))
    })
}

/// Returns the names that some code takes from the crate `root`, each with its byte offset. From
/// `root::a::b` that is `a`, from `root::{a, b::c}` both `a` and `b`, from `root as x` the `as`,
/// and from `root::*` the `*`.
pub(crate) fn taken_from<'a>(code: &'a str, root: &str) -> Vec<(usize, &'a str)> {
    let mut taken = Vec::new();
    for (at, word) in words(code).filter(|(_, word)| *word == root) {
        let after = skip_blanks(code, at + word.len());
        if let Some(renamed) = code[after..].strip_prefix("as").filter(|rest| rest.starts_with(' '))
        {
            taken.push((after, &code[after..code.len() - renamed.len()]));
        }
        let Some(path) = code[after..].strip_prefix("::") else { continue };
        let start = skip_blanks(code, code.len() - path.len());
        if !code[start..].starts_with('{') {
            taken.extend(first_segment(code, start));
            continue;
        }
        let mut depth = 0;
        for (i, c) in code[start..].char_indices() {
            let begins = match c {
                '{' => {
                    depth += 1;
                    depth == 1
                }
                '}' => {
                    depth -= 1;
                    false
                }
                _ => c == ',' && depth == 1,
            };
            if begins {
                taken.extend(first_segment(code, skip_blanks(code, start + i + 1)));
            }
            if depth == 0 {
                break;
            }
        }
    }
    taken
}

fn first_segment(code: &str, at: usize) -> Option<(usize, &str)> {
    if code[at..].starts_with('*') {
        return Some((at, &code[at..at + 1]));
    }
    words(&code[at..]).next().filter(|(start, _)| *start == 0).map(|(_, word)| (at, word))
}

fn skip_blanks(code: &str, at: usize) -> usize {
    code.len() - code[at..].trim_start().len()
}

fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let hidden = hidden_at(text, at);
        if hidden.is_empty() {
            let c = text[at..].chars().next().unwrap_or(' ');
            code.push(c);
            at += c.len_utf8();
        } else {
            code.extend(text[hidden.clone()].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            at = hidden.end;
        }
    }
    code
}

/// Returns the range of the comment or literal that begins at `at`; empty if none does.
fn hidden_at(text: &str, at: usize) -> Range<usize> {
    let rest = &text[at..];
    let len = if rest.starts_with("//") {
        rest.find('\n').unwrap_or(rest.len())
    } else if rest.starts_with("/*") {
        block_comment(rest)
    } else if rest.starts_with('"') {
        quoted(rest, '"')
    } else if rest.starts_with('\'') {
        character(rest)
    } else if rest.starts_with('r') && !follows_a_word(text, at) {
        raw_string(rest)
    } else {
        0
    };
    at..at + len
}

/// Returns true if the text at `at` continues a word. The `b` or `c` of a string's prefix is no
/// word.
fn follows_a_word(text: &str, at: usize) -> bool {
    let mut before = text[..at].chars().rev();
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    match before.next() {
        Some('b' | 'c') => is_word(before.next()),
        other => is_word(other),
    }
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut characters = rest.char_indices().skip(1);
    while let Some((at, c)) = characters.next() {
        if c == '\\' {
            characters.next();
        } else if c == quote {
            return at + 1;
        }
    }
    rest.len()
}

/// Returns the length of a character literal; 0 for a lifetime.
fn character(rest: &str) -> usize {
    let mut characters = rest.chars().skip(1);
    match (characters.next(), characters.next()) {
        (Some('\\'), _) => quoted(rest, '\''),
        (Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 0,
    }
}

/// Returns the length of `r"…"`, `r#"…"#` and so on; 0 for a raw identifier or any other word.
fn raw_string(rest: &str) -> usize {
    let marks = rest[1..].len() - rest[1..].trim_start_matches('#').len();
    if !rest[1 + marks..].starts_with('"') {
        return 0;
    }
    let start = marks + 2;
    let end = format!("\"{}", "#".repeat(marks));
    rest[start..].find(&end).map_or(rest.len(), |at| start + at + end.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new("a.rs", text).code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_leave_the_code() {
        assert_eq!(code("a // hidden\nb /* h /* h */ h */ c"), "a b c");
        assert_eq!(code(r#"a("hidden \" hidden", b"h", c"h") b"#), "a( , b , c ) b");
        assert_eq!(code(r###"a(r"h\", r#"h" h"#, br##"h"# h"##) b"###), "a( , , b ) b");
        assert_eq!(code(r"match c { 'x' | '\'' | '\u{1F}' | '»' => f::<'a, 'static>(&'a x) }"), {
            "match c { | | | => f::<'a, 'static>(&'a x) }"
        });
        assert_eq!(code("r#type r for_r \"h\""), "r#type r for_r");
        assert_eq!(code("a \"not closed"), "a");
        let text = "a // ä\n/* ü\n ö */ b";
        assert_eq!(
            line_of(
                &Source::new("a.rs", text).code,
                Source::new("a.rs", text).code.find('b').unwrap()
            ),
            3
        );
    }

    #[test]
    fn names_taken_from_a_crate_are_found_in_every_form() {
        let taken = |code: &str| {
            taken_from(code, "std").into_iter().map(|(_, word)| word.to_owned()).collect()
        };
        let of = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let cases: [(&str, &[&str]); 8] = [
            ("use std::time::Instant;", &["time"]),
            ("use std::{fs, io::{self, Read}, time::Duration,};", &["fs", "io", "time"]),
            ("let t = ::std :: time::now();", &["time"]),
            ("use std::*;", &["*"]),
            ("use std as s;", &["as"]),
            ("use mystd::time; use stdx::fs;", &[]),
            ("use {std::fs, std::{net}};", &["fs", "net"]),
            ("#![no_std] std", &[]),
        ];
        for (code, expected) in cases {
            let found: Vec<String> = taken(code);
            assert_eq!(found, of(expected), "{code}");
        }
    }

    #[test]
    fn unit_tests_at_the_bottom_can_be_left_out() {
        let source =
            Source::new("m/a.rs", "a\n#[cfg(test)]\nuse x;\nb\n#[cfg(test)]\nmod tests { c }");
        assert!(
            source.code_without_tests().contains('b')
                && !source.code_without_tests().contains("{ c")
        );
        assert_eq!(Source::new("m/tests.rs", "a").code_without_tests(), "");
    }

    #[test]
    fn a_module_is_a_file_or_a_folder() {
        let is_in = |path: &str| Source::new(path, "").is_in_module("src/a");
        assert!(is_in("src/a.rs") && is_in("src/a/mod.rs") && is_in("src/a/b/c.rs"));
        assert!(!is_in("src/ab.rs") && !is_in("src/b/a.rs"));
    }
}
