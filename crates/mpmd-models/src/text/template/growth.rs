//! Limits on the operands of a template's operators.
//!
//! The engine takes fuel for the texts that a template makes. It takes none for joined lists and
//! compared values. A list that is joined with itself in a loop would take all memory. Lists that
//! share their parts would be compared for ever.
//!
//! So the operands of `+` and `*` get a filter that refuses long lists and large factors. The
//! operands of comparisons get one that takes fuel for all values in them.

use std::ops::Range;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, State, Value, filters};

/// Largest number of values in a list that is joined or repeated, and largest factor.
const LONGEST: usize = 100_000;
/// The filters of operands.
const ADDED: &str = "|__added";
const MULTIPLIED: &str = "|__multiplied";
const COMPARED: &str = "|__compared";
/// Number of comparisons that each value of a sorted list counts for.
const COMPARISONS: usize = 4;
/// Largest number of filters that a template gets.
const MOST_FILTERS: usize = 10_000;
/// Names that are no operands.
const KEYWORDS: [&str; 11] = [
    "and", "block", "elif", "else", "if", "in", "is", "not", "or", "print", "return",
];

/// Adds the filters of operands to an environment, and removes what joins lists without them.
pub(super) fn limit(environment: &mut Environment<'_>) {
    environment.add_filter("__added", |value: Value| check_list(value));
    environment.add_filter("__multiplied", |value: Value| {
        match usize::try_from(value.clone()) {
            Ok(factor) if factor > LONGEST && value.is_integer() => Err(too_long()),
            _ => check_list(value),
        }
    });
    environment.add_filter("__compared", |state: &State<'_, '_>, value: Value| {
        charge(state, &value)?;
        Ok::<_, JinjaError>(value)
    });
    limit_comparisons(environment);
    // Not a filter of Python's engine.
    environment.remove_filter("chain");
    environment.add_filter("sum", |values: Value| -> Result<Value, JinjaError> {
        let mut sum = 0.0;
        let mut is_whole = true;
        for value in values.try_iter()? {
            is_whole &= value.is_integer();
            sum += f64::try_from(value)?;
        }
        Ok(match is_whole {
            true => Value::from(sum as i64),
            false => Value::from(sum),
        })
    });
}

/// Replaces the tests and filters that compare values by ones that take fuel for all values in
/// them.
fn limit_comparisons(environment: &mut Environment<'_>) {
    type Compare = fn(&Value, &Value) -> bool;
    let tests: [(&[&str], Compare); 6] = [
        (&["eq", "equalto", "=="], |a, b| a == b),
        (&["ne", "!="], |a, b| a != b),
        (&["lt", "lessthan", "<"], |a, b| a < b),
        (&["le", "<="], |a, b| a <= b),
        (&["gt", "greaterthan", ">"], |a, b| a > b),
        (&["ge", ">="], |a, b| a >= b),
    ];
    for (names, compare) in tests {
        for name in names {
            let test = move |state: &State<'_, '_>, a: Value, b: Value| {
                charge(state, &a)?;
                charge(state, &b)?;
                Ok::<_, JinjaError>(compare(&a, &b))
            };
            environment.add_test(*name, test);
        }
    }
    environment.add_test("in", |state: &State<'_, '_>, a: Value, b: Value| {
        charge(state, &a)?;
        charge(state, &b)?;
        minijinja::tests::is_in(state, &a, &b)
    });

    type Filter = fn(&State<'_, '_>, Value, Kwargs) -> Result<Value, JinjaError>;
    let filters: [(&str, Filter); 5] = [
        ("sort", filters::sort),
        ("unique", filters::unique),
        ("min", filters::min),
        ("max", filters::max),
        ("dictsort", |_, value, kwargs| {
            filters::dictsort(&value, kwargs)
        }),
    ];
    for (name, filter) in filters {
        let limited = move |state: &State<'_, '_>, value: Value, kwargs: Kwargs| {
            // Each value is compared with several others.
            (0..COMPARISONS).try_for_each(|_| charge(state, &value))?;
            filter(state, value, kwargs)
        };
        environment.add_filter(name, limited);
    }
}

/// Takes fuel for a value and all values in it.
fn charge(state: &State<'_, '_>, value: &Value) -> Result<(), JinjaError> {
    state.consume_fuel(1)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.try_for_each(|one| charge(state, &one))
        }
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            charge(state, &key)?;
            charge(state, &value.get_item(&key)?)
        }),
        _ => Ok(()),
    }
}

/// Returns a value, or an error if it is a list that is too long or whose length is unknown.
fn check_list(value: Value) -> Result<Value, JinjaError> {
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    match value.len() {
        Some(len) if is_list && len > LONGEST => Err(too_long()),
        None if is_list && value.try_iter()?.nth(LONGEST).is_some() => Err(too_long()),
        _ => Ok(value),
    }
}

fn too_long() -> JinjaError {
    let why = format!("a list of more than {LONGEST} values, or a factor above it");
    JinjaError::new(ErrorKind::InvalidOperation, why)
}

/// Returns a template with filters at the operands of `+`, `*` and comparisons.
///
/// A line end behind the tag `raw` is kept, as Python's engine keeps it.
///
/// # Errors
///
/// If the template has so many operators that reading it would take long.
pub(super) fn limited(source: &str) -> Result<String, JinjaError> {
    let mut insertions: Vec<(usize, &str)> = Vec::new();
    for tag in tags(source) {
        match tag {
            Tag::Expressions(place) => insertions.extend(insertions_of(source, place)),
            Tag::Raw { end } if source[..end].ends_with(['-', '+']) => {}
            Tag::Raw { end } => insertions.push((end, "+")),
        }
    }
    if insertions.len() > MOST_FILTERS {
        let why = format!("expected at most {} operators", MOST_FILTERS / 2);
        return Err(JinjaError::new(ErrorKind::InvalidOperation, why));
    }
    insertions.sort_by_key(|(at, _)| *at);

    let mut text = String::with_capacity(source.len());
    let mut done = 0;
    for (at, filter) in insertions {
        text += &source[done..at];
        text += filter;
        done = at;
    }
    Ok(text + &source[done..])
}

/// A tag of a template.
enum Tag {
    /// A tag that may have expressions, and the place of its content.
    Expressions(Range<usize>),
    /// The tag before raw text. Its content ends at `end`.
    Raw { end: usize },
}

/// Returns the tags of a template, without comments and raw text.
fn tags(source: &str) -> Vec<Tag> {
    let mut tags = Vec::new();
    let mut at = 0;
    let mut is_raw = false;
    while let Some(start) = source[at..].find('{').map(|found| at + found) {
        let rest = &source[start..];
        let end = if rest.starts_with("{#") && !is_raw {
            rest.find("#}").map(|end| start + end + 2)
        } else if rest.starts_with("{%") || (rest.starts_with("{{") && !is_raw) {
            let end = end_of_tag(source, start + 2);
            let name = source[start + 2..end].trim_matches(['-', '+', ' ', '\n', '\t']);
            match name {
                "raw" if !is_raw => {
                    is_raw = true;
                    tags.push(Tag::Raw { end });
                }
                "endraw" => is_raw = false,
                _ if !is_raw => tags.push(Tag::Expressions(start + 2..end)),
                _ => {}
            }
            Some(end)
        } else {
            Some(start + 1)
        };
        at = end.unwrap_or(source.len());
    }
    tags
}

/// Returns the end of the tag whose content begins at `start`.
fn end_of_tag(source: &str, start: usize) -> usize {
    let is_end = |token: &Token| matches!(token.text, "%}" | "}}");
    let mut depth = 0usize;
    for token in Lexer::new(source, start..source.len()) {
        match token.text {
            "{" | "[" | "(" => depth += 1,
            "}" | "]" | ")" => depth = depth.saturating_sub(1),
            // Two objects may end here.
            "}}" if depth >= 2 => depth -= 2,
            _ if is_end(&token) => return token.start,
            _ => {}
        }
    }
    source.len()
}

/// Returns the filters for the operands in a tag, each with its place.
fn insertions_of(source: &str, tag: Range<usize>) -> Vec<(usize, &'static str)> {
    let tokens: Vec<Token<'_>> = Lexer::new(source, tag).collect();
    // The first `in` of a loop is no operator.
    let mut names = tokens
        .iter()
        .skip_while(|token| matches!(token.text, "-" | "+"));
    let is_loop = names.next().is_some_and(|first| first.text == "for");
    let first = match tokens.iter().position(|token| token.text == "in") {
        Some(at) if is_loop => at + 1,
        _ => 1,
    };
    let mut insertions: Vec<(&Token<'_>, &'static str)> = Vec::new();
    for at in first..tokens.len() {
        let filter = match tokens[at].text {
            "+" => ADDED,
            "*" => MULTIPLIED,
            "==" | "!=" | "<" | "<=" | ">" | ">=" | "in" => COMPARED,
            _ => continue,
        };
        let is_negated = tokens[at].text == "in" && tokens[at - 1].text == "not";
        let before = tokens.get(at - 1 - usize::from(is_negated));
        let Some(before) = before.filter(|before| before.ends_operand()) else {
            continue;
        };
        let Some(end) = operand_end(&tokens, at + 1) else {
            continue;
        };
        let operands = [before, &tokens[end]].map(|token| (token, filter));
        insertions.extend(operands);
    }
    insertions.extend(keys(&tokens).map(|at| (&tokens[at], COMPARED)));
    // A literal is compared fast.
    let is_needed =
        |(token, filter): &(&Token<'_>, &str)| *filter != COMPARED || !token.is_literal();
    let insertions = insertions.into_iter().filter(is_needed);
    insertions
        .map(|(token, filter)| (token.end(), filter))
        .collect()
}

/// Returns the last tokens of the keys in a tag, by which objects are made and their values taken.
fn keys(tokens: &[Token<'_>]) -> impl Iterator<Item = usize> {
    // The brackets around a token, each with its text and true if a value stands before it.
    let mut open: Vec<(&str, bool)> = Vec::new();
    let mut keys = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let follows_operand = at > 0 && tokens[at - 1].ends_operand();
        let is_key = match (token.text, open.last()) {
            (":", Some(("{", _))) | ("]", Some(("[", true))) => follows_operand,
            _ => false,
        };
        keys.extend(is_key.then(|| at - 1));
        match token.text {
            "(" | "[" | "{" => open.push((token.text, follows_operand)),
            ")" | "]" | "}" => drop(open.pop()),
            "}}" => drop((open.pop(), open.pop())),
            _ => {}
        }
    }
    keys.into_iter()
}

/// Returns the last token of the operand that begins at `at`: a name, a literal, or something in
/// brackets, with what is taken or called of it. `None` if there is no operand.
fn operand_end(tokens: &[Token<'_>], mut at: usize) -> Option<usize> {
    // Signs stand before an operand.
    while matches!(tokens.get(at)?.text, "-" | "+") {
        at += 1;
    }
    let mut end = match tokens[at].text {
        "(" | "[" | "{" => closing(tokens, at)?,
        _ if tokens[at].ends_operand() => at,
        _ => return None,
    };
    while let Some(next) = tokens.get(end + 1) {
        end = match next.text {
            "." | "|" if tokens.get(end + 2).is_some_and(Token::is_name) => end + 2,
            "(" | "[" => closing(tokens, end + 1)?,
            _ => break,
        };
    }
    Some(end)
}

/// Returns the token that closes the bracket at `open`.
fn closing(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            "}}" => depth = depth.checked_sub(2)?,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// A part of an expression.
struct Token<'a> {
    text: &'a str,
    start: usize,
}

impl Token<'_> {
    fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn is_name(&self) -> bool {
        self.text
            .starts_with(|char: char| char.is_alphabetic() || char == '_')
    }

    /// True for a number or a text.
    fn is_literal(&self) -> bool {
        self.text
            .starts_with(|char: char| char.is_ascii_digit() || "'\"".contains(char))
    }

    /// True for a token that can be the last one of an operand.
    fn ends_operand(&self) -> bool {
        let first = self.text.chars().next().unwrap_or(' ');
        let is_value = first.is_alphanumeric() || "_'\")]}".contains(first);
        is_value && self.text != "}}" && !KEYWORDS.contains(&self.text)
    }
}

/// Cuts an expression into tokens.
struct Lexer<'a> {
    source: &'a str,
    place: Range<usize>,
}

impl<'a> Lexer<'a> {
    fn new(source: &'a str, place: Range<usize>) -> Self {
        Self { source, place }
    }
}

impl<'a> Iterator for Lexer<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        const PAIRS: [&str; 10] = ["%}", "}}", "**", "//", "==", "!=", "<=", ">=", "-%", "+%"];
        let rest = &self.source[self.place.clone()];
        let rest = rest.trim_start();
        let start = self.place.end - rest.len();
        let first = rest.chars().next()?;

        let is_word = |char: char| char.is_alphanumeric() || char == '_';
        let len = match first {
            '\'' | '"' => text_len(rest, first),
            _ if is_word(first) => rest.find(|char| !is_word(char)).unwrap_or(rest.len()),
            _ => match PAIRS.iter().find(|pair| rest.starts_with(**pair)) {
                // The sign belongs to the end of the tag behind it.
                Some(&("-%" | "+%")) if rest[2..].starts_with('}') => 1,
                Some(&("-%" | "+%")) | None => first.len_utf8(),
                Some(pair) => pair.len(),
            },
        };
        self.place.start = start + len;
        Some(Token {
            text: &rest[..len],
            start,
        })
    }
}

/// Returns the length of the text literal at the start of `rest`, with its quotes.
fn text_len(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, char) in rest.char_indices().skip(1) {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            char if char == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_get_filters() {
        for (source, expected) in [
            ("a + b {# a + b #}", "a + b {# a + b #}"),
            ("{{ a + b }}", "{{ a|A + b|A }}"),
            ("{{ a + b + c }}", "{{ a|A + b|A|A + c|A }}"),
            (
                "{{- 'x+y' + m['role'] + '}}' -}}",
                "{{- 'x+y'|A + m['role']|A|A + '}}'|A -}}",
            ),
            (
                "{%+ set n.x = n.x + [f(1 + 2)] +%}",
                "{%+ set n.x = n.x|A + [f(1|A + 2|A)]|A +%}",
            ),
            (
                "{{ -a + +b.c(d)[e].f | trim ~ g }}",
                "{{ -a|A + +b.c(d)[e|C].f | trim|A ~ g }}",
            ),
            ("{{ a * 2 ** 3 }}", "{{ a|M * 2|M ** 3 }}"),
            ("{{ {'a': {'b': c + d}} }}", "{{ {'a': {'b': c|A + d|A}} }}"),
            (
                "{{ f({'a': {'b': 1}}) + c }}",
                "{{ f({'a': {'b': 1}})|A + c|A }}",
            ),
            ("{{ x if +y else +z }}", "{{ x if +y else +z }}"),
            (
                "{% raw %}{{ a + b }}{% endraw %}{{ a + b }}",
                "{% raw +%}{{ a + b }}{% endraw %}{{ a|A + b|A }}",
            ),
            (
                "{% for i in (a + b)[1:] + c %}",
                "{% for i in (a|A + b|A)[1:]|A + c|A %}",
            ),
            (
                "{% for m in messages if m.role == 'user' and m['a'] not in b[1:] %}",
                "{% for m in messages if m.role|C == 'user' and m['a']|C not in b[1:]|C %}",
            ),
            ("{%- for a in b in c -%}", "{%- for a in b|C in c|C -%}"),
            (
                "{%+ for a, b in c if a in b %}",
                "{%+ for a, b in c if a|C in b|C %}",
            ),
            (
                "{% if 'a' in b %}{{ x is eq(y) }}",
                "{% if 'a' in b|C %}{{ x is eq(y) }}",
            ),
            (
                "{{ {a: 1, 'b': c[d:e]}[f] }}",
                "{{ {a|C: 1, 'b': c[d:e|C]}[f|C] }}",
            ),
            ("{{ a <= -b }}", "{{ a|C <= -b|C }}"),
            ("{{ a + }}", "{{ a + }}"),
            ("{{ 'a", "{{ 'a"),
            ("{{ a + (b", "{{ a + (b"),
        ] {
            let found = limited(source)
                .unwrap()
                .replace(ADDED, "|A")
                .replace(MULTIPLIED, "|M")
                .replace(COMPARED, "|C");
            assert_eq!(found, expected, "{source}");
        }
    }
}
