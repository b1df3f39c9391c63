//! Names of packages that cargo accepts.

use std::str::FromStr;

/// Rust's keywords, which cannot be names of crates.
const KEYWORDS: &[&str] = &[
    "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate",
    "do", "dyn", "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl",
    "in", "let", "loop", "macro", "match", "mod", "move", "mut", "override", "priv", "pub", "ref",
    "return", "self", "static", "struct", "super", "trait", "true", "try", "type", "typeof",
    "unsafe", "unsized", "use", "virtual", "where", "while", "yield",
];

/// Other names that a package cannot have: of the dependency, of Rust's own crates, and of folders
/// that cargo makes beside the program.
const TAKEN: &[&str] = &[
    "mpmd",
    "alloc",
    "core",
    "proc_macro",
    "proc-macro",
    "std",
    "test",
    "build",
    "deps",
    "examples",
    "incremental",
];

/// The name of a package.
#[derive(Clone, Debug)]
pub(super) struct PackageName(String);

impl PackageName {
    /// Returns the name.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PackageName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let is_part =
            |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(is_part) {
            return Err(
                "a package's name begins with a lower-case letter, and has lower-case letters, \
                 digits, `-` and `_` after it. The folder is made in the current folder"
                    .to_owned(),
            );
        }
        if KEYWORDS.contains(&name) {
            return Err(format!(
                "`{name}` is a keyword of Rust: choose another name"
            ));
        }
        if TAKEN.contains(&name) {
            return Err(format!(
                "cargo or mpmd uses the name `{name}` itself: choose another name"
            ));
        }
        Ok(Self(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cargo_takes_are_accepted() {
        for name in ["a", "points", "two_stages", "gpt-2", "a1"] {
            assert_eq!(name.parse::<PackageName>().unwrap().as_str(), name);
        }
    }

    #[test]
    fn other_names_are_refused_with_the_reason() {
        for name in [
            "", "2d", "-a", "_a", "Points", "a b", "a/b", "../a", ".", "ä", "a.b", "a\n",
        ] {
            let refused = name.parse::<PackageName>().unwrap_err();
            assert!(refused.contains("lower-case"), "{name}: {refused}");
        }
        for (name, reason) in [("match", "keyword"), ("test", "itself"), ("mpmd", "itself")] {
            let refused = name.parse::<PackageName>().unwrap_err();
            assert!(refused.contains(reason), "{name}: {refused}");
        }
    }
}
