//! What templates take from Python: tests, filters, functions, and how values are printed.

use std::fmt::Write as _;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::day::Day;
use super::growth;
use super::marks::REPLY;

/// Limit on the work of a template: instructions, and 64 bytes of text that it makes count as one.
/// An untrusted template may not end.
const FUEL: u64 = 1_000_000;
/// Limit on the indent of JSON, in blanks, since the indent is built in memory.
const WIDEST: usize = 64;
/// Largest number of digits in a width or precision.
const WIDTH_DIGITS: usize = 3;
/// Limit on lists and objects inside each other in a value that is printed.
const DEEPEST: usize = 100;
/// Limit on the text of a value, and on the text of a conversation, in bytes.
pub(super) const LONGEST: usize = 32 << 20;
/// Name of the variable with the day. A template cannot write it.
pub(super) const DAY: &str = "the day";

/// Returns an environment for templates as the library `transformers` has it.
pub(super) fn environment() -> Result<Environment<'static>, JinjaError> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_fuel(Some(FUEL));
    environment.set_debug(false);
    growth::limit(&mut environment);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| print(out, value));

    // Python's none is not iterable, and a text is a sequence.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map
        )
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| text_of(value));
    environment.add_filter("generation", |text: String| {
        format!("{}{text}{}", REPLY[0], REPLY[1])
    });
    environment.add_function("raise_exception", |why: String| -> Result<Value, _> {
        Err(invalid(why))
    });
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

fn invalid(why: impl Into<String>) -> JinjaError {
    JinjaError::new(ErrorKind::InvalidOperation, why.into())
}

/// Returns the day of the conversation in a form of `strftime`.
fn strftime_now(state: &State<'_, '_>, format: String) -> Result<String, JinjaError> {
    let day = state.lookup(DAY);
    let day: Option<Day> = day.and_then(|day| day.as_str()?.parse().ok());
    let text = day.unwrap_or_else(Day::today).formatted(&format);
    text.ok_or_else(|| invalid("strftime_now: expected a form of a date"))
}

/// Returns an error if a field of a form, such as `{:>8}`, has a width or precision that takes much
/// memory, or takes one from the arguments.
fn check_widths(form: &str) -> Result<(), JinjaError> {
    let mut rest = form;
    while let Some(at) = rest.find('{') {
        rest = &rest[at + 1..];
        if let Some(text) = rest.strip_prefix('{') {
            // Two of them are text.
            rest = text;
            continue;
        }
        let (field, behind) = rest.split_once('}').unwrap_or((rest, ""));
        let form = field.split_once(':').map_or("", |(_, form)| form);
        let mut digits = form.split(|char: char| !char.is_ascii_digit());
        if form.contains('{') || digits.any(|digits| digits.len() > WIDTH_DIGITS) {
            let why = format!("expected a form with widths of at most {WIDTH_DIGITS} digits");
            return Err(invalid(why));
        }
        rest = behind;
    }
    Ok(())
}

/// Calls a method of Python that values of the engine lack.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, JinjaError> {
    if let ("format", Some(text)) = (name, value.as_str()) {
        check_widths(text)?;
    }
    let texts = |parts: Vec<&str>| -> Value { parts.into_iter().map(str::to_owned).collect() };
    match (name, value.as_str(), args) {
        ("removeprefix", Some(text), [affix]) => {
            let affix = affix.as_str().unwrap_or_default();
            Ok(text.strip_prefix(affix).unwrap_or(text).into())
        }
        ("removesuffix", Some(text), [affix]) => {
            let affix = affix.as_str().unwrap_or_default();
            Ok(text.strip_suffix(affix).unwrap_or(text).into())
        }
        ("partition", Some(text), [mark]) => {
            let mark = mark.as_str().unwrap_or_default();
            let found = text.split_once(mark);
            let parts = found.map(|(before, after)| vec![before, mark, after]);
            Ok(texts(parts.unwrap_or_else(|| vec![text, "", ""])))
        }
        ("rpartition", Some(text), [mark]) => {
            let mark = mark.as_str().unwrap_or_default();
            let found = text.rsplit_once(mark);
            let parts = found.map(|(before, after)| vec![before, mark, after]);
            Ok(texts(parts.unwrap_or_else(|| vec!["", "", text])))
        }
        ("rsplit", Some(text), [mark, rest @ ..]) => {
            let most = rest
                .first()
                .and_then(|most| usize::try_from(most.clone()).ok());
            let most = most.unwrap_or(usize::MAX).saturating_add(1);
            let mut parts: Vec<&str> = text
                .rsplitn(most, mark.as_str().unwrap_or_default())
                .collect();
            parts.reverse();
            Ok(texts(parts))
        }
        ("index", Some(text), [part]) => {
            let part = part.as_str().unwrap_or_default();
            let at = text
                .find(part)
                .ok_or_else(|| invalid("substring not found"))?;
            Ok(text[..at].chars().count().into())
        }
        ("copy", None, []) => Ok(value.clone()),
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// Prints a value as Python does.
fn print(out: &mut Output<'_>, value: &Value) -> Result<(), JinjaError> {
    match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None if value.is_undefined() => Ok(()),
        None => Ok(out.write_str(&text_of(value)?)?),
    }
}

/// Returns the text of a value, as Python's function `str`.
fn text_of(value: &Value) -> Result<String, JinjaError> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    if !value.is_undefined() {
        write_value(&mut text, value, 0)?;
    }
    Ok(text)
}

/// Appends a value as Python's function `repr`. `depth` lists and objects are around it.
fn write_value(to: &mut String, value: &Value, depth: usize) -> Result<(), JinjaError> {
    if depth > DEEPEST {
        return Err(too_deep());
    }
    if to.len() > LONGEST {
        return Err(too_long());
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => *to += "None",
        ValueKind::Bool => *to += if value.is_true() { "True" } else { "False" },
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => *to += &float(number),
            Err(_) => *to += &value.to_string(),
        },
        ValueKind::String if depth > 0 => quote(to, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            *to += "[";
            for (at, one) in value.try_iter()?.enumerate() {
                *to += if at > 0 { ", " } else { "" };
                write_value(to, &one, depth + 1)?;
            }
            *to += "]";
        }
        ValueKind::Map => {
            *to += "{";
            for (at, key) in value.try_iter()?.enumerate() {
                *to += if at > 0 { ", " } else { "" };
                write_value(to, &key, depth + 1)?;
                *to += ": ";
                write_value(to, &value.get_item(&key)?, depth + 1)?;
            }
            *to += "}";
        }
        _ => *to += &value.to_string(),
    }
    Ok(())
}

/// Returns a number as Python prints it: with the fewest digits that tell it from others, and with
/// an exponent below -4 or above 15.
fn float(number: f64) -> String {
    if !number.is_finite() {
        let text = if number.is_nan() { "nan" } else { "inf" };
        return if number < 0.0 {
            format!("-{text}")
        } else {
            text.to_owned()
        };
    }
    let shortest = format!("{number:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent @ ..-4) | Ok(exponent @ 16..) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{number:?}"),
    }
}

/// Appends a text in quotes, as Python's function `repr`.
fn quote(to: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    to.push(mark);
    for char in text.chars() {
        match char {
            '\\' => *to += "\\\\",
            '\n' => *to += "\\n",
            '\r' => *to += "\\r",
            '\t' => *to += "\\t",
            char if char == mark => {
                to.push('\\');
                to.push(char);
            }
            char if char.is_control() => {
                _ = write!(to, "\\x{:02x}", u32::from(char));
            }
            char => to.push(char),
        }
    }
    to.push(mark);
}

/// The size of a value as a text, which is counted before the text is made.
#[derive(Default)]
struct TextSize {
    bytes: usize,
}

impl TextSize {
    /// Adds a value that has `depth` lists and objects around it. Returns an error if there are too
    /// many levels or the text becomes too long.
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), JinjaError> {
        self.bytes += value.as_str().map_or(1, str::len) + 1;
        if depth > DEEPEST {
            return Err(too_deep());
        }
        if self.bytes > LONGEST {
            return Err(too_long());
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => value
                .try_iter()?
                .try_for_each(|one| self.add(&one, depth + 1)),
            ValueKind::Map => value.try_iter()?.try_for_each(|key| {
                self.add(&key, depth + 1)?;
                self.add(&value.get_item(&key)?, depth + 1)
            }),
            _ => Ok(()),
        }
    }
}

fn too_deep() -> JinjaError {
    invalid(format!("expected a value of at most {DEEPEST} levels"))
}

pub(super) fn too_long() -> JinjaError {
    invalid(format!("expected a text of at most {LONGEST} bytes"))
}

/// Returns a value as JSON in one line.
pub(super) fn json_text(value: &Value) -> Result<String, JinjaError> {
    to_json(
        value.clone(),
        std::iter::empty::<(String, Value)>().collect(),
    )
}

/// Returns a value as JSON, as Python's module `json` writes it.
fn to_json(value: Value, options: Kwargs) -> Result<String, JinjaError> {
    let indent = options.get::<Option<usize>>("indent")?;
    let is_ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    TextSize::default().add(&value, 0)?;
    if indent.is_some_and(|width| width > WIDEST) {
        let why = format!("tojson: expected an indent of at most {WIDEST}");
        return Err(invalid(why));
    }

    let failed =
        |why: serde_json::Error| JinjaError::new(ErrorKind::BadSerialization, why.to_string());
    let value = match is_sorted {
        // Its maps are sorted.
        true => serde_json::to_value(&value)
            .and_then(serde_json::from_value)
            .map_err(failed)?,
        false => value,
    };

    let mut json = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let form = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, form))
        }
        None => {
            let [comma, colon] = separators
                .and_then(|pair| pair.try_into().ok())
                .unwrap_or_else(|| [", ".to_owned(), ": ".to_owned()]);
            let form = Separated { comma, colon };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, form))
        }
    };
    written.map_err(failed)?;

    let json = String::from_utf8_lossy(&json);
    let mut pair = [0; 2];
    let mut escaped = |char: char| -> String {
        let units = char.encode_utf16(&mut pair).iter();
        units.map(|unit| format!("\\u{unit:04x}")).collect()
    };
    Ok(match is_ascii {
        true => json
            .chars()
            .map(|char| {
                if char.is_ascii() {
                    char.into()
                } else {
                    escaped(char)
                }
            })
            .collect(),
        false => json.into_owned(),
    })
}

/// A JSON formatter for one line, with the separators of Python's module `json`.
struct Separated {
    comma: String,
    colon: String,
}

impl Formatter for Separated {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            to.write_all(self.comma.as_bytes())
        }
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(to, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(self.colon.as_bytes())
    }
}
