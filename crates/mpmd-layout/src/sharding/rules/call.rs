//! Parses tactics: ops joined by `|`, each a name or a call with literal arguments.

use super::error::{ArgumentError, ErrorKind, ParseError};
use super::literal::Literal;
use super::reader::{TacticReader, after_value, is_constant};

/// One op of a tactic as it is written: `fsdp(axis="data", min_size_to_shard_mb=1)`.
///
/// ```
/// use mpmd_layout::sharding::rules::{OpCall, Literal};
///
/// let [call] = &OpCall::parse_tactic("func(1, '2', a=3)")?[..] else { panic!() };
/// assert_eq!(call.name(), "func");
/// assert_eq!(call.args(), [Literal::Int(1), Literal::Str("2".into())]);
/// assert_eq!(call.keywords(), [("a".to_owned(), Literal::Int(3))]);
/// # Ok::<(), mpmd_layout::sharding::rules::ParseError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct OpCall {
    name: String,
    args: Vec<Literal>,
    keywords: Vec<(String, Literal)>,
    text: String,
}

impl OpCall {
    /// Parses the text of a tactic and returns its ops, in order.
    ///
    /// An op is a name, a name with dots, or a call of either with literal arguments. A `|` within
    /// quotes is no separator. Blanks around names and `|` are ignored. (In the Python original,
    /// blanks are ignored around calls only. Around a bare name they become part of the name, which
    /// is then not found.)
    ///
    /// # Errors
    ///
    /// If the text is not such a tactic. The error's kind is [`ErrorKind::Value`] if an op is a
    /// Python expression but not a name or call, or an argument is not a literal. Otherwise it is
    /// [`ErrorKind::Syntax`].
    pub fn parse_tactic(text: &str) -> Result<Vec<Self>, ParseError> {
        let mut reader = TacticReader { text, at: 0 };
        let mut calls = Vec::new();
        loop {
            reader.skip_blanks();
            calls.push(reader.call()?);
            reader.skip_blanks();
            match reader.peek() {
                None => return Ok(calls),
                Some('|') => reader.bump(),
                Some(c) => return Err(reader.error(after_value(c), "`|` or the end")),
            }
        }
    }

    /// Returns the op's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the positional arguments: those without a keyword.
    pub fn args(&self) -> &[Literal] {
        &self.args
    }

    /// Returns the arguments with a keyword as (keyword, value). Each keyword comes once.
    pub fn keywords(&self) -> &[(String, Literal)] {
        &self.keywords
    }

    /// Returns the call as written, without blanks around it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the argument for each parameter of `names`, in the order of `names`; `None` for a
    /// parameter that is not given. Positional arguments go to the first names.
    ///
    /// # Errors
    ///
    /// If there are more arguments than names, a keyword is none of the names, or a parameter is
    /// given twice.
    pub fn bind<const N: usize>(
        &self,
        names: [&str; N],
    ) -> Result<[Option<&Literal>; N], ArgumentError> {
        if self.args.len() > N {
            let found = self.args.len();
            return Err(ArgumentError(format!(
                "takes at most {N} arguments, found {found}"
            )));
        }

        let mut bound = [None; N];
        for (slot, value) in bound.iter_mut().zip(&self.args) {
            *slot = Some(value);
        }

        for (keyword, value) in &self.keywords {
            let Some(index) = names.iter().position(|name| name == keyword) else {
                return Err(ArgumentError(format!("has no argument `{keyword}`")));
            };
            if bound[index].replace(value).is_some() {
                return Err(ArgumentError(format!(
                    "has two values for argument `{keyword}`"
                )));
            }
        }
        Ok(bound)
    }
}

/// True if a tactic can call an op of this name: an identifier, or several joined by dots, other
/// than `None`, `True` and `False`.
pub(super) fn is_name(name: &str) -> bool {
    let mut reader = TacticReader { text: name, at: 0 };
    reader
        .dotted_name()
        .is_some_and(|found| found.len() == name.len() && !is_constant(found))
}

impl TacticReader<'_> {
    fn call(&mut self) -> Result<OpCall, ParseError> {
        let start = self.at;
        let name = match self.dotted_name() {
            Some(name) if !is_constant(name) => name.to_owned(),
            _ => {
                self.at = start;
                let kind = match self.peek() {
                    None | Some('|') => ErrorKind::Syntax,
                    Some(_) => self
                        .value(0)
                        .map_or_else(|error| error.kind(), |_| ErrorKind::Value),
                };
                self.at = start;
                return Err(self.error(kind, "an op's name"));
            }
        };

        let end_of_name = self.at;
        self.skip_blanks();
        let mut args = Vec::new();
        let mut keywords = Vec::new();
        if self.peek() == Some('(') {
            self.bump();
            self.arguments(&mut args, &mut keywords)?;
        } else {
            self.at = end_of_name;
        }

        Ok(OpCall {
            name,
            args,
            keywords,
            text: self.text[start..self.at].to_owned(),
        })
    }

    /// Reads a call's arguments after the opening bracket, up to and including the closing one.
    /// Appends them to `args` and `keywords`.
    fn arguments(
        &mut self,
        args: &mut Vec<Literal>,
        keywords: &mut Vec<(String, Literal)>,
    ) -> Result<(), ParseError> {
        loop {
            self.skip_blanks();
            if self.peek() == Some(')') {
                self.bump();
                return Ok(());
            }

            let start = self.at;
            if let Some(keyword) = self.keyword() {
                if keywords.iter().any(|(known, _)| *known == keyword) {
                    self.at = start;
                    return Err(self.error(ErrorKind::Syntax, "each keyword once"));
                }
                self.skip_blanks();
                keywords.push((keyword, self.value(0)?));
            } else {
                let value = self.value(0)?;
                if !keywords.is_empty() {
                    self.at = start;
                    return Err(self.error(ErrorKind::Syntax, "a keyword, as before it"));
                }
                args.push(value);
            }
            self.comma_or(')')?;
        }
    }

    /// Reads a keyword and its `=` (but not `==`) and returns the keyword. If other text follows,
    /// consumes nothing and returns `None`.
    fn keyword(&mut self) -> Option<String> {
        let start = self.at;
        let name = self
            .identifier()
            .filter(|name| !is_constant(name))
            .map(str::to_owned);
        self.skip_blanks();
        if name.is_some() && self.rest().starts_with('=') && !self.rest().starts_with("==") {
            self.bump();
            return name;
        }
        self.at = start;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Literal::{Bool, Dict, Float, Int, List, Set, Str, Tuple};
    use proptest::prelude::*;

    fn text(text: &str) -> Literal {
        Str(text.into())
    }

    fn one(tactic: &str) -> OpCall {
        let mut calls = OpCall::parse_tactic(tactic).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(calls.len(), 1, "{tactic}");
        calls.remove(0)
    }

    fn value(written: &str) -> Literal {
        one(&format!("f({written})")).args[0].clone()
    }

    fn kind(tactic: &str) -> ErrorKind {
        OpCall::parse_tactic(tactic).expect_err(tactic).kind()
    }

    fn message(tactic: &str) -> String {
        OpCall::parse_tactic(tactic).expect_err(tactic).to_string()
    }

    #[test]
    fn names_and_calls_are_read() {
        let call = one("func(1,'2',a=3,foo='bar')");
        assert_eq!(
            (call.name(), call.args()),
            ("func", &[Int(1), text("2")][..])
        );
        assert_eq!(
            call.keywords(),
            [("a".to_owned(), Int(3)), ("foo".to_owned(), text("bar"))]
        );
        let call = one("module.some_name ( )");
        assert_eq!(
            (call.name(), call.args().len(), call.text()),
            ("module.some_name", 0, "module.some_name ( )")
        );
        assert_eq!(one("fsdp").name(), "fsdp");
    }

    #[test]
    fn blanks_around_names_and_bars_are_harmless() {
        for tactic in [
            "a|b(1)|c",
            " a | b(1) | c ",
            "a |b( 1 )\t|\nc",
            "a|\n b(1 , )|c",
        ] {
            let calls = OpCall::parse_tactic(tactic).unwrap();
            let names: Vec<&str> = calls.iter().map(OpCall::name).collect();
            assert_eq!(
                (names, calls[1].args()),
                (vec!["a", "b", "c"], &[Int(1)][..]),
                "{tactic:?}"
            );
        }
        assert_eq!(
            one("f('a|b')").args(),
            [text("a|b")],
            "within quotes it joins nothing"
        );
    }

    #[test]
    fn every_literal() {
        assert_eq!(
            [value("-1"), value("+ 7"), value("1_000")],
            [Int(-1), Int(7), Int(1000)]
        );
        assert_eq!(
            [value("0x1F"), value("0o17"), value("0b11"), value("00")],
            [Int(31), Int(15), Int(3), Int(0)]
        );
        assert_eq!(value("0.001"), Float(0.001));
        assert_eq!(
            [value("1e3"), value("-.5"), value("2."), value("1E-2")],
            [1e3, -0.5, 2.0, 0.01].map(Float)
        );
        assert_eq!(
            [value("None"), value("True"), value("False")],
            [Literal::None, Bool(true), Bool(false)]
        );
        assert_eq!(
            [value("'a\"b'"), value("\"a'b\""), value("'a' \"b\"")],
            ["a\"b", "a'b", "ab"].map(text)
        );
        assert_eq!(
            value(r"'\\ \' \n \x41 \u00e9 \d'"),
            text("\\ ' \n A \u{e9} \\d")
        );
        assert_eq!(
            [value("()"), value("(1)"), value("(1,)")],
            [Tuple(vec![]), Int(1), Tuple(vec![Int(1)])]
        );
        assert_eq!(value("(1, 'a')"), Tuple(vec![Int(1), text("a")]));
        assert_eq!(
            [value("[]"), value("[[1], 2,]")],
            [List(vec![]), List(vec![List(vec![Int(1)]), Int(2)])]
        );
        assert_eq!(
            [value("{}"), value("{1, 2}")],
            [Dict(vec![]), Set(vec![Int(1), Int(2)])]
        );
        assert_eq!(
            value("{'a': 1, 2: {}}"),
            Dict(vec![(text("a"), Int(1)), (Int(2), Dict(vec![]))])
        );
    }

    #[test]
    fn invalid_expressions_are_syntax_errors() {
        let texts = [
            "",
            " ",
            "|",
            "replicate|",
            "|replicate",
            "a||b",
            "fsdp(",
            "fsdp(1",
            "fsdp(1 2)",
            "f(,)",
            "f)",
            "a b",
            "f('a)",
            "f(\"a)",
            "f(a=1, 2)",
            "f(a=1, a=2)",
            "f(a=)",
            "f({1: 2, 3})",
            "f([1)",
            "f(012)",
            "f(1.2.3)",
            "f(1a)",
            "f(-",
            "#",
            "f('\\u12')",
            "f(1|2)",
            "f.",
        ];
        for text in texts {
            assert_eq!(kind(text), ErrorKind::Syntax, "{text}");
        }
    }

    #[test]
    fn non_literal_expressions_are_value_errors() {
        let texts = [
            "fsdp(axis=data)",
            "fsdp(data)",
            "1|f",
            "f(1+2)",
            "f(g(1))",
            "f([x])",
            "f(*[1])",
            "f(- x)",
            "f(--1)",
            "f(2j)",
            "f(99999999999999999999)",
            "1",
            "'fsdp'",
            "None",
            "(1, 2)",
            "f(1)(2)",
            "f[0]",
            "a + b",
            "f(1)*2",
            "f(lambda: 0)",
            "f(b'a')",
        ];
        for text in texts {
            assert_eq!(kind(text), ErrorKind::Value, "{text}");
        }
    }

    #[test]
    fn errors_give_column_expected_and_found() {
        assert_eq!(
            message("fsdp(axis=data)"),
            "tactic \"fsdp(axis=data)\", column 11: expected a literal, found `data`"
        );
        assert_eq!(
            message("replicate|"),
            "tactic \"replicate|\", column 11: expected an op's name, found the end"
        );
        assert_eq!(
            message("f('\u{e9}', ]"),
            "tactic \"f('\u{e9}', ]\", column 8: expected a literal, found `]`"
        );
        assert_eq!(
            message("f(1"),
            "tactic \"f(1\", column 4: expected `,` or `)`, found the end"
        );
        assert_eq!(
            message("a b"),
            "tactic \"a b\", column 3: expected `|` or the end, found `b`"
        );
    }

    #[test]
    fn bracket_nesting_is_limited() {
        let nested = |depth: usize| format!("f({}{})", "[".repeat(depth), "]".repeat(depth));
        assert!(OpCall::parse_tactic(&nested(100)).is_ok());
        assert_eq!(kind(&nested(200)), ErrorKind::Syntax);
        assert_eq!(kind(&"(".repeat(1_000_000)), ErrorKind::Syntax);
        assert_eq!(
            kind(&format!("f({}", "{1:".repeat(1_000_000))),
            ErrorKind::Syntax
        );
    }

    #[test]
    fn arguments_are_bound_by_place_and_keyword() {
        let names = ["axis", "dim"];
        let call = one("f('x', dim=2)");
        assert_eq!(call.bind(names), Ok([Some(&text("x")), Some(&Int(2))]));
        assert_eq!(one("f(dim=2)").bind(names), Ok([None, Some(&Int(2))]));
        let error = |tactic| one(tactic).bind(names).unwrap_err().to_string();
        assert_eq!(error("f(1, 2, 3)"), "takes at most 2 arguments, found 3");
        assert_eq!(error("f(axes=1)"), "has no argument `axes`");
        assert_eq!(
            error("f('x', axis='y')"),
            "has two values for argument `axis`"
        );
    }

    #[test]
    fn is_name_accepts_only_callable_names() {
        assert!(["a", "a.b", "_x1"].into_iter().all(is_name));
        assert!(
            !["", "1a", "a b", "a.", ".a", "a|b", "None", "a()"]
                .into_iter()
                .any(is_name)
        );
    }

    proptest! {
        #[test]
        fn parsing_any_text_never_panics(text in any::<String>()) {
            let _ = OpCall::parse_tactic(&text);
        }

        #[test]
        fn parsing_tactic_like_text_never_panics(
            text in r#"[fa(){}\[\],:=|'"0-9.eEx_j+ \\\-\u{e9}\n]{0,40}"#,
        ) {
            if let Err(error) = OpCall::parse_tactic(&text) {
                prop_assert!(error.column <= text.chars().count() + 1);
            }
        }
    }
}
