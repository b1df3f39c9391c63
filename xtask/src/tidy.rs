//! Rules on sources that the compiler does not check: form, layers, import cycles, and a test and a
//! place for every invariant.

mod cycles;
mod invariants;
mod outline;
mod rules;
mod source;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, bail, ensure};

use rules::{PRODUCTION_RULES, RULES};
use source::SourceFile;

/// Path of the file that defines the invariants.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// Checks every source of the repository at `root` against every rule.
///
/// # Errors
///
/// If lines break a rule (the error lists all of them), or if a file cannot be read.
pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let sources = sources(root)?;
    let crates = cycles::crates(&sources);
    let production: BTreeSet<&str> = crates.iter().flat_map(cycles::Crate::files).collect();

    let mut findings = Vec::new();
    for source in &sources {
        let is_production = production.contains(source.path.as_str());
        let further = PRODUCTION_RULES.iter().filter(|_| is_production);
        let of_file = RULES.iter().chain(further).flat_map(|rule| rule(source));
        findings.extend(
            of_file.map(|found| format!("{}:{}: {}", source.path, found.line, found.message)),
        );
    }

    findings.extend(cycles::check(&crates));
    if let Some(architecture) = sources.iter().find(|source| source.path == ARCHITECTURE) {
        let names = test_names(&sources);
        findings.extend(invariants::have_tests(&architecture.text, &names));
        let in_production = sources
            .iter()
            .filter(|source| production.contains(source.path.as_str()));
        findings.extend(invariants::are_kept(&architecture.text, in_production));
        let map = rules::map(&architecture.text);
        for source in &sources {
            let of_file = rules::crates_are_below(source, &map).into_iter();
            findings.extend(
                of_file.map(|found| format!("{}:{}: {}", source.path, found.line, found.message)),
            );
        }
    }

    if !findings.is_empty() {
        bail!("{} findings:\n  {}", findings.len(), findings.join("\n  "));
    }

    let rules = RULES.len() + PRODUCTION_RULES.len() + 4;
    println!(
        "   {} files, {} crates, {rules} rules",
        sources.len(),
        crates.len()
    );
    Ok(())
}

/// Returns the names of all functions under an attribute that ends in `test`, such as `#[test]` or
/// `#[tokio::test]`.
fn test_names(sources: &[SourceFile]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for source in sources {
        let mut is_test = false;
        for window in source.tokens.windows(3) {
            match [&*window[0].text, &*window[1].text, &*window[2].text] {
                ["[" | "::", "test", "]" | "("] => is_test = true,
                ["fn", name, _] => {
                    names.extend(is_test.then(|| name.to_owned()));
                    is_test = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// Reads all files that the rules apply to: Rust, manifests and settings, prose, and scripts.
/// Leaves data out.
fn sources(root: &Path) -> anyhow::Result<Vec<SourceFile>> {
    let files = match listed_by_git(root) {
        Some(files) => files,
        None => {
            let mut found = BTreeSet::new();
            walk(root, root, &mut found)
                .with_context(|| format!("cannot read {}", root.display()))?;
            found
        }
    };

    let mut sources = Vec::new();
    for path in files.into_iter().filter(|path| is_source(path)) {
        let text =
            fs::read_to_string(root.join(&path)).with_context(|| format!("cannot read {path}"))?;
        sources.push(SourceFile::new(path, text));
    }
    ensure!(
        sources.iter().any(SourceFile::is_rust),
        "no Rust file below {}",
        root.display()
    );
    Ok(sources)
}

fn is_source(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => {
            ["rs", "toml", "md", "yml", "sh"].contains(&extension)
        }
        _ => name.starts_with("LICENSE") || path.starts_with(".ci/") || name == ".gitignore",
    }
}

/// Lists the files of the work tree that git tracks or would track; `None` without git or if there
/// are none.
fn listed_by_git(root: &Path) -> Option<BTreeSet<String>> {
    let arguments = [
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ];

    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(arguments)
        .output()
        .ok()?;

    let names = String::from_utf8(output.stdout)
        .ok()
        .filter(|_| output.status.success())?;
    let files: BTreeSet<String> = names
        .split('\0')
        .filter(|name| root.join(name).is_file())
        .map(str::to_owned)
        .collect();
    (!files.is_empty()).then_some(files)
}

fn walk(root: &Path, folder: &Path, found: &mut BTreeSet<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path: PathBuf = entry.path();
        let kind = entry.file_type()?;
        if kind.is_dir()
            && ![".git", "target"]
                .iter()
                .any(|skipped| entry.file_name() == *skipped)
        {
            walk(root, &path, found)?;
        } else if kind.is_file()
            && let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str)
        {
            found.insert(name.to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    #[test]
    fn the_repository_is_tidy() {
        check(root()).unwrap();
    }

    #[test]
    fn git_and_a_walk_find_the_same_sources() {
        let Some(listed) = listed_by_git(root()) else {
            return;
        };
        assert!(listed.contains("xtask/src/tidy.rs") && listed.contains("Cargo.toml"));
        let mut walked = BTreeSet::new();
        walk(root(), root(), &mut walked).unwrap();
        assert!(
            listed.is_subset(&walked),
            "{:?}",
            listed.difference(&walked)
        );
    }

    #[test]
    fn sources_are_distinguished_from_data() {
        for path in [
            "a/b.rs",
            "Cargo.toml",
            "README.md",
            ".ci/run",
            "LICENSE-MIT",
            ".gitignore",
            ".config/n.toml",
        ] {
            assert!(is_source(path), "{path}");
        }
        for path in ["golden/a.json", "Cargo.lock", "a.png", "data"] {
            assert!(!is_source(path), "{path}");
        }
    }

    #[test]
    fn tests_are_distinguished_from_other_functions() {
        let text = "#[test]\nfn a() {}\nfn b() {}\n#[tokio::test(start_paused = true)]\nasync fn \
            c() { fn d() {} }\n\
                    // #[test]\nfn e() {}\n#[cfg(test)]\nmod tests { fn f() {} \
                    }\n#[test]\n#[should_panic]\nfn g() {}";
        let names = test_names(&[SourceFile::new("a.rs", text)]);
        assert_eq!(
            names.iter().map(String::as_str).collect::<Vec<_>>(),
            ["a", "c", "g"]
        );
    }
}
