//! The invariants that the architecture names: each has a test, and code that says that it keeps
//! it.

use std::collections::BTreeSet;

use super::ARCHITECTURE;
use super::source::{SourceFile, line_of};

/// The mark of an invariant in `ARCHITECTURE.md`: `**Invariant** *name*`. Its paragraph has a
/// test's name in backticks.
const INVARIANT: &str = "**Invariant**";

/// The mark of code that keeps an invariant. The invariant's name follows.
const KEPT: &str = "// invariant: ";

/// An invariant in the text of `ARCHITECTURE.md`.
struct NamedInvariant<'a> {
    line: usize,
    /// The invariant's name. `None` if no name follows the mark.
    name: Option<&'a str>,
    paragraph: &'a str,
}

fn named(architecture: &str) -> impl Iterator<Item = NamedInvariant<'_>> {
    architecture.match_indices(INVARIANT).map(|(at, _)| {
        let rest = &architecture[at + INVARIANT.len()..];
        let ends = [rest.find("\n\n"), rest.find(INVARIANT)];
        let end = ends.into_iter().flatten().min().unwrap_or(rest.len());

        let paragraph = &rest[..end];
        let name = paragraph.trim_start().strip_prefix('*');
        NamedInvariant {
            line: line_of(architecture, at),
            name: name.and_then(|rest| rest.split('*').next()),
            paragraph,
        }
    })
}

/// Checks that every invariant in `architecture` names at least one test in `tests`. Returns a
/// message for each that does not.
pub(super) fn have_tests(architecture: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let mut findings = Vec::new();
    for invariant in named(architecture) {
        let place = format!("{ARCHITECTURE}:{}", invariant.line);
        let Some(name) = invariant.name else {
            findings.push(format!(
                "{place}: an invariant needs a name: {INVARIANT} *name*"
            ));
            continue;
        };

        let quoted = invariant.paragraph.split('`').skip(1).step_by(2);
        // `crate module::test`, `module::test` or the test alone.
        let mut named = quoted.filter_map(|quoted| quoted.rsplit([':', ' ']).next());
        if !named.any(|name| tests.contains(name)) {
            findings.push(format!(
                "{place}: invariant {name} names no test that exists (in backticks)"
            ));
        }
    }
    findings
}

/// Checks that the sources have a mark for every invariant in `architecture`, and for no other
/// name. Returns a message for each difference.
pub(super) fn are_kept<'a>(
    architecture: &str,
    sources: impl Iterator<Item = &'a SourceFile>,
) -> Vec<String> {
    let known: BTreeSet<&str> = named(architecture)
        .filter_map(|invariant| invariant.name)
        .collect();
    let mut findings = Vec::new();
    let mut kept = BTreeSet::new();
    for source in sources {
        for (index, line) in source.text.lines().enumerate() {
            let Some(name) = line.trim_start().strip_prefix(KEPT) else {
                continue;
            };
            match known.get(name) {
                Some(name) => {
                    kept.insert(*name);
                }
                None => findings.push(format!(
                    "{}:{}: {ARCHITECTURE} has no invariant {name}",
                    source.path,
                    index + 1
                )),
            }
        }
    }

    let missing = known.difference(&kept);
    findings.extend(missing.map(|name| {
        format!("{ARCHITECTURE}: no code says that it keeps the invariant {name}: {KEPT}{name}")
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariants_without_an_existing_test_are_found() {
        let tests = BTreeSet::from(["order_holds".to_owned(), "bytes_only".to_owned()]);
        let good = "- **Invariant** *lower-only*: text\n  goes on. Test: `mpmd-core \
            runtime::order_holds`.\n\
                    - **Invariant** *bytes*: (`bytes_only`)\n\n## Next";
        assert_eq!(have_tests(good, &tests), [""; 0]);
        let bad = "# A\n- **Invariant** *lower-only*: no test.\n- **Invariant** *bytes*: `gone`, \
            order_holds\n\n\
                   `order_holds`\n\n**Invariant** without a name";
        let findings = have_tests(bad, &tests);
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert!(findings[0].starts_with("ARCHITECTURE.md:2: invariant lower-only names no test"));
        assert!(findings[1].starts_with("ARCHITECTURE.md:3: invariant bytes names no test"));
        assert!(findings[2].starts_with("ARCHITECTURE.md:7: an invariant needs a name"));
    }

    #[test]
    fn invariants_that_no_code_keeps_are_found() {
        let architecture = "- **Invariant** *lower-only*: `a`.\n- **Invariant** *bytes*: `b`.\n";
        let check = |text: &str| {
            let source = SourceFile::new("a.rs", text);
            are_kept(architecture, std::iter::once(&source))
        };
        let all = "// invariant: lower-only\nfn a() {\n    // invariant: bytes\n}\n";
        assert_eq!(check(all), [""; 0]);

        let findings = check("// invariant: bytes\n// invariant: byte\n");
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert_eq!(findings[0], "a.rs:2: ARCHITECTURE.md has no invariant byte");
        assert!(findings[1].ends_with("lower-only"), "{findings:?}");
    }
}
