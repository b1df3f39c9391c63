//! A source file as the rules see it: its text, and for Rust also its tokens, names and paths.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use super::outline::Outline;

/// A file of the repository.
pub(crate) struct SourceFile {
    /// Path relative to the repository, with `/` between folders.
    pub(crate) path: String,
    /// The content of the file.
    pub(crate) text: String,
    /// The tokens of a Rust file. Empty for other files, and for a file that cannot be split into
    /// Rust tokens.
    pub(crate) tokens: Vec<SourceToken>,
    /// The modules, names and paths of a Rust file without its unit tests.
    pub(crate) outline: Outline,
    /// The numbers of all lines that contain a part of a raw string.
    pub(crate) raw_lines: BTreeSet<usize>,
    /// The line at which the file stops being valid Rust, and the reason.
    pub(crate) error: Option<(usize, String)>,
}

/// A token of Rust. Comments are left out; a doc comment has the form of an attribute.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct SourceToken {
    /// The token's text; `::` is one token. Empty for a literal.
    pub(crate) text: String,
    /// Line number, from one.
    pub(crate) line: usize,
}

impl SourceFile {
    pub(crate) fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let mut source = Self {
            path: path.into(),
            text: text.into(),
            tokens: Vec::new(),
            outline: Outline::default(),
            raw_lines: BTreeSet::new(),
            error: None,
        };

        if source.is_rust() {
            match source.text.parse() {
                Ok(stream) => source.flatten(stream),
                Err(error) => source.error = Some((error.span().start().line, error.to_string())),
            }
            source.outline = Outline::new(&source.tokens);
        }
        source
    }

    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// True if the file is `module` (a path without `.rs`), or is in the folder of that name.
    pub(crate) fn is_in_module(&self, module: &str) -> bool {
        self.path
            .strip_prefix(module)
            .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    /// Returns the line numbers of all tokens with this text.
    pub(crate) fn lines_with<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.tokens
            .iter()
            .filter(move |token| token.text == text)
            .map(|token| token.line)
    }

    /// Appends the tokens of `stream`, each delimiter as a token of its own.
    fn flatten(&mut self, stream: TokenStream) {
        let mut trees = stream.into_iter().peekable();
        while let Some(tree) = trees.next() {
            let span = tree.span();
            let text = match tree {
                TokenTree::Group(group) => {
                    let (open, close) = match group.delimiter() {
                        Delimiter::Parenthesis => ("(", ")"),
                        Delimiter::Brace => ("{", "}"),
                        Delimiter::Bracket => ("[", "]"),
                        Delimiter::None => ("", ""),
                    };
                    self.push(open, group.span_open().start().line);
                    self.flatten(group.stream());
                    self.push(close, group.span_close().start().line);
                    continue;
                }
                TokenTree::Ident(name) => name.to_string(),
                TokenTree::Punct(mark) => {
                    let is_joint = mark.as_char() == ':' && mark.spacing() == Spacing::Joint;
                    if is_joint && trees.next_if(is_colon).is_some() {
                        "::".to_owned()
                    } else {
                        mark.to_string()
                    }
                }
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    if text.trim_start_matches(['b', 'c']).starts_with('r') {
                        self.raw_lines.extend(span.start().line..=span.end().line);
                    }
                    String::new()
                }
            };

            self.push(text, span.start().line);
        }
    }

    fn push(&mut self, text: impl Into<String>, line: usize) {
        self.tokens.push(SourceToken {
            text: text.into(),
            line,
        });
    }
}

fn is_colon(tree: &TokenTree) -> bool {
    matches!(tree, TokenTree::Punct(mark) if mark.as_char() == ':')
}

/// Returns the line number, from one, of byte `at`.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> String {
        let source = SourceFile::new("a.rs", text);
        assert_eq!(source.error, None);
        let texts: Vec<&str> = source
            .tokens
            .iter()
            .map(|token| token.text.as_str())
            .collect();
        texts.join(" ")
    }

    #[test]
    fn comments_and_literals_are_no_tokens() {
        assert_eq!(tokens("a // hidden\nb /* h /* h */ h */ c"), "a b c");
        assert_eq!(
            tokens(r##"a("h \" h", b"h", r#"h" h"#, 'x')"##),
            "a (  ,  ,  ,  )"
        );
        assert_eq!(tokens("a::b: c :: d<'a>"), "a :: b : c :: d < ' a >");
        let source = SourceFile::new("a.rs", "a // ä\n/* ü\n ö */ b");
        assert_eq!(source.lines_with("b").collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn lines_of_raw_strings_are_known() {
        let source = SourceFile::new("a.rs", "r; \"r\";\nf(r#\"\nx\n\"#);\nbr\"x\";\n");
        assert_eq!(
            source.raw_lines.into_iter().collect::<Vec<_>>(),
            [2, 3, 4, 5]
        );
    }

    #[test]
    fn text_that_is_not_rust_is_an_error() {
        assert_eq!(
            SourceFile::new("a.rs", "a\n\"not closed").error.unwrap().0,
            2
        );
        assert_eq!(SourceFile::new("a.md", "\"not closed").error, None);
    }

    #[test]
    fn a_module_is_a_file_or_a_folder() {
        let is_in = |path: &str| SourceFile::new(path, "").is_in_module("src/a");
        assert!(is_in("src/a.rs") && is_in("src/a/mod.rs") && is_in("src/a/b/c.rs"));
        assert!(!is_in("src/ab.rs") && !is_in("src/b/a.rs"));
    }
}
