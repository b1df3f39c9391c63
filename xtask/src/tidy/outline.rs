//! The outline of a Rust file: its modules with their names and imports, and every path in it.
//! Code under `cfg(test)` is left out.

use std::collections::{BTreeMap, BTreeSet};

use super::source::SourceToken;

/// The modules, imports and paths of a source file.
#[derive(Debug, Default)]
pub(crate) struct Outline {
    /// The inline modules, by their path in the file. The file's own module has the empty path.
    pub(crate) scopes: BTreeMap<Vec<String>, ModuleScope>,
    /// The modules with their own files (`mod name;`), as (path of the parent, name).
    pub(crate) declared: Vec<(Vec<String>, String)>,
    /// All paths with at least two segments, and all leaves of import trees.
    pub(crate) paths: Vec<PathUse>,
}

/// The names that are defined in a module.
#[derive(Debug, Default)]
pub(crate) struct ModuleScope {
    /// Items that are defined in the module.
    pub(crate) names: BTreeSet<String>,
    /// Imports, by their name in the module. The value is the imported path.
    pub(crate) imports: BTreeMap<String, Vec<String>>,
    /// Paths of imports of the form `path::*`, without the star.
    pub(crate) globs: Vec<Vec<String>>,
}

/// A path in the code.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct PathUse {
    /// The inline module that contains the path.
    pub(crate) scope: Vec<String>,
    /// The names in the path. In an import of everything the last one is `*`.
    pub(crate) segments: Vec<String>,
    /// Line number, from one.
    pub(crate) line: usize,
    /// The name that an import defines. `None` for imports of everything and for other paths.
    pub(crate) alias: Option<String>,
}

const ITEMS: &[&str] = &[
    "fn",
    "struct",
    "enum",
    "union",
    "trait",
    "type",
    "const",
    "static",
    "mod",
    "macro_rules",
];

impl Outline {
    pub(crate) fn new(tokens: &[SourceToken]) -> Self {
        let texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
        let mut outline = Self::default();
        let mut scope = Vec::new();

        // Open delimiters; true for the brace of a module.
        let mut open: Vec<bool> = Vec::new();
        let mut at = 0;
        outline.scopes.entry(Vec::new()).or_default();

        while at < texts.len() {
            let in_module = open.iter().all(|is_module| *is_module);
            match texts[at..] {
                ["#", ..] if is_for_tests(&texts[at..]) => at = end_of_tests(&texts, at),
                ["mod", name, "{", ..] if in_module => {
                    outline.scope(&scope).names.insert(name.to_owned());
                    scope.push(name.to_owned());
                    outline.scope(&scope);
                    open.push(true);
                    at += 3;
                }
                ["mod", name, ";", ..] => {
                    outline.declared.push((scope.clone(), name.to_owned()));
                    at += 3;
                }
                ["{" | "(" | "[", ..] => {
                    open.push(false);
                    at += 1;
                }
                ["}" | ")" | "]", ..] => {
                    if open.pop() == Some(true) {
                        scope.pop();
                    }
                    at += 1;
                }
                ["use", next, ..] if next != "<" => {
                    at += 1;
                    let first = outline.paths.len();
                    outline.import(tokens, &mut at, &scope, &[]);
                    if in_module {
                        outline.name_imports(first);
                    }
                }
                ["macro_rules", "!", name, ..] | [_, name, ..]
                    if in_module && ITEMS.contains(&texts[at]) && is_word(name) =>
                {
                    outline.scope(&scope).names.insert(name.to_owned());
                    at += 1;
                }
                [first, "::", second, ..] if is_word(first) && is_word(second) => {
                    let mut segments = vec![first.to_owned()];
                    let line = tokens[at].line;
                    let mut end = at + 1;
                    while let ["::", segment, ..] = texts[end..]
                        && is_word(segment)
                    {
                        segments.push(segment.to_owned());
                        end += 2;
                    }
                    // A name behind `>::` belongs to a type.
                    if at < 2 || texts[at - 2..at] != [">", "::"] {
                        let scope = scope.clone();
                        outline.paths.push(PathUse {
                            scope,
                            segments,
                            line,
                            alias: None,
                        });
                    }
                    at = end;
                }
                _ => at += 1,
            }
        }
        outline
    }

    fn scope(&mut self, path: &[String]) -> &mut ModuleScope {
        self.scopes.entry(path.to_vec()).or_default()
    }

    /// Appends the leaves of the import tree that begins at `at` to `paths`, and moves `at` behind
    /// the tree.
    fn import(
        &mut self,
        tokens: &[SourceToken],
        at: &mut usize,
        scope: &[String],
        prefix: &[String],
    ) {
        let mut segments = prefix.to_vec();
        while let Some(token) = tokens.get(*at) {
            *at += 1;
            match token.text.as_str() {
                "::" | "$" => {}
                "{" => {
                    while tokens.get(*at).is_some_and(|token| token.text != "}") {
                        self.import(tokens, at, scope, &segments);
                        *at += usize::from(tokens.get(*at).is_some_and(|token| token.text == ","));
                    }
                    *at += 1;
                    return;
                }
                text => {
                    // `a::{self}` imports `a`.
                    if text != "self" || segments.is_empty() {
                        segments.push(text.to_owned());
                    }
                    let next = |ahead: usize| tokens.get(*at + ahead).map(|token| &*token.text);
                    if next(0) == Some("::") {
                        continue;
                    }

                    let renamed = next(1).filter(|_| next(0) == Some("as")).map(str::to_owned);
                    *at += if renamed.is_some() { 2 } else { 0 };
                    let alias = renamed.or_else(|| segments.last().cloned());
                    let alias = alias.filter(|_| text != "*");

                    let scope = scope.to_vec();
                    let line = token.line;
                    self.paths.push(PathUse {
                        scope,
                        segments,
                        line,
                        alias,
                    });
                    return;
                }
            }
        }
    }

    /// Adds the imports in `paths` from index `first` on to the modules that contain them.
    fn name_imports(&mut self, first: usize) {
        for path in &self.paths[first..] {
            let scope = self.scopes.entry(path.scope.clone()).or_default();
            match (&path.alias, path.segments.split_last()) {
                (Some(alias), _) => {
                    scope.imports.insert(alias.clone(), path.segments.clone());
                }
                (None, Some((_, parent))) => scope.globs.push(parent.to_vec()),
                (None, None) => {}
            }
        }
    }
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// True if `texts` begins with an attribute that hides an item from all builds except tests.
fn is_for_tests(texts: &[&str]) -> bool {
    let attribute = match texts {
        ["#", "!", rest @ ..] | ["#", rest @ ..] => rest,
        _ => return false,
    };
    match attribute {
        ["[", "cfg", "(", "test", ")", ..] => true,
        ["[", "cfg", "(", "all", all @ ..] => {
            let mut depth = 0;
            let of_all = all[..end_of_group(all, 0)].iter().filter(|text| {
                depth += opening(text);
                depth == 1
            });
            of_all.into_iter().any(|text| *text == "test")
        }
        _ => false,
    }
}

fn opening(text: &str) -> isize {
    match text {
        "{" | "(" | "[" => 1,
        "}" | ")" | "]" => -1,
        _ => 0,
    }
}

/// Returns the index behind the matching end of the bracket at `at`.
fn end_of_group(texts: &[&str], at: usize) -> usize {
    let mut depth = 0;
    for (i, text) in texts.iter().enumerate().skip(at) {
        depth += opening(text);
        if depth == 0 {
            return i + 1;
        }
    }
    texts.len()
}

/// Returns the index behind the code that the attribute at `at` hides: an item, a statement, a
/// field, an arm of a `match`, or everything up to the end of the module.
fn end_of_tests(texts: &[&str], mut at: usize) -> usize {
    if texts[at + 1] == "!" {
        let mut depth = 0;
        let rest = texts.iter().enumerate().skip(at);
        let mut end = rest.skip_while(|(_, text)| {
            depth += opening(text);
            depth >= 0
        });
        return end.next().map_or(texts.len(), |(end, _)| end);
    }

    while texts.get(at) == Some(&"#") {
        at = end_of_group(texts, at + 1);
    }
    if texts.get(at) == Some(&"pub") {
        at += 1;
        if texts.get(at) == Some(&"(") {
            at = end_of_group(texts, at);
        }
    }

    let kind = match texts.get(at..).unwrap_or_default() {
        ["const", "fn" | "unsafe" | "async" | "extern", ..] => ItemEnd::Brace,
        ["use" | "const" | "static" | "let" | "type", ..] => ItemEnd::Semicolon,
        [
            "fn" | "mod" | "impl" | "struct" | "enum" | "union" | "trait" | "async" | "unsafe"
            | "extern" | "macro_rules" | "if" | "for" | "while" | "loop" | "match" | "{",
            ..,
        ] => ItemEnd::Brace,
        _ => ItemEnd::Comma,
    };

    while let Some(text) = texts.get(at) {
        match (*text, kind) {
            (")" | "]" | "}", _) => return at,
            (";", _) | (",", ItemEnd::Comma) => return at + 1,
            ("{", ItemEnd::Brace) => return end_of_group(texts, at),
            // The body of an arm or of a macro.
            ("{", ItemEnd::Comma) if [">", "!"].contains(&texts[at - 1]) => {
                return end_of_group(texts, at);
            }
            ("{" | "(" | "[", _) => at = end_of_group(texts, at),
            _ => at += 1,
        }
    }
    at
}

/// The token that ends an item, in addition to a semicolon.
#[derive(Clone, Copy, Eq, PartialEq)]
enum ItemEnd {
    Semicolon,
    Brace,
    Comma,
}

#[cfg(test)]
mod tests {
    use crate::tidy::source::SourceFile;

    fn paths(text: &str) -> Vec<String> {
        let paths = SourceFile::new("a.rs", text).outline.paths.into_iter();
        let shown = paths.map(|path| match (path.alias, path.segments.last()) {
            (Some(alias), Some(last)) if alias != *last => {
                format!("{} as {alias}", path.segments.join("::"))
            }
            _ => path.segments.join("::"),
        });
        shown.collect()
    }

    #[test]
    fn imports_are_read_in_every_form() {
        assert_eq!(paths("use std::time::Instant;"), ["std::time::Instant"]);
        let tree = "pub(crate) use std::{fs, io::{self, Read as R, *}, time::Duration,};";
        let leaves = ["std::fs", "std::io", "std::io::Read as R", "std::io::*"];
        assert_eq!(paths(tree)[..4], leaves);
        assert_eq!(paths(tree)[4..], ["std::time::Duration"]);
        assert_eq!(
            paths("use {a::b, ::c as d, self::e};"),
            ["a::b", "c as d", "self::e"]
        );
        assert_eq!(
            paths("fn f() -> impl T + use<'a> { use super::x; }"),
            ["super::x"]
        );
    }

    #[test]
    fn paths_are_read_wherever_they_stand() {
        let code = "fn f(a: crate::b::C) { m!(x, super::d(1)); ::std::e::<u8>::g(); <T>::h::i() }";
        assert_eq!(paths(code), ["crate::b::C", "super::d", "std::e"]);
        assert_eq!(
            paths("/// [`a::b`]\n#[derive(c::D)] struct E; \"f::g\""),
            ["c::D"]
        );
    }

    #[test]
    fn code_for_tests_is_left_out() {
        for code in [
            "#[cfg(test)] mod t { use a::b; } x::y;",
            "#[cfg(test)] #[allow(x)] pub(crate) fn f<A, B>() -> [u8; 3] { a::b() } x::y;",
            "#[cfg(all(feature = \"c\", test))] use a::{b, c}; x::y;",
            "struct S { #[cfg(test)] pub f: a::b, g: x::y }",
            "match m { #[cfg(test)] A { .. } => { a::b() } _ => x::y() }",
            "fn f() { #[cfg(test)] a::b(c::D { e: 1 }, 2); x::y }",
            "#[cfg(test)] proptest! { a::b } x::y;",
            "mod m { #![cfg(test)] use a::b; } x::y;",
            "#[cfg(test)] const A: a::B = a::B { c: 1 }; x::y;",
        ] {
            assert_eq!(paths(code), ["x::y"], "{code}");
        }
        assert_eq!(paths("#![cfg(test)] use a::b;"), [""; 0]);
        assert_eq!(
            paths("#[cfg(not(test))] use a::b; #[cfg(any(test, c))] use c::d;").len(),
            2
        );
        assert_eq!(paths("#[cfg(all(c, not(test)))] use a::b;").len(), 1);
    }

    #[test]
    fn modules_keep_their_names_apart() {
        let code = "mod a; fn f() { fn inner() {} } mod b { pub use c::D; use e::*; struct G; \
            mod h; } macro_rules! m { () => {} } const fn i() {}";
        let outline = SourceFile::new("a.rs", code).outline;
        let root = &outline.scopes[&[][..]];
        assert!(
            ["f", "b", "m", "i"]
                .iter()
                .all(|name| root.names.contains(*name))
        );
        assert!(!root.names.contains("inner") && root.imports.is_empty());
        let b = &outline.scopes[&["b".to_owned()][..]];
        assert_eq!(
            (b.imports["D"].join("::"), b.globs[0].join("::")),
            ("c::D".into(), "e".into())
        );
        let declared: Vec<_> = outline
            .declared
            .iter()
            .map(|(scope, name)| (scope.join("::"), &**name))
            .collect();
        assert_eq!(declared, [("".into(), "a"), ("b".into(), "h")]);
    }
}
