//! Checks the licences of all dependencies: each must offer one that requires no more than a
//! notice.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

/// The allowed licences. `deny.toml` has the same list.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Checks every package of the workspace's dependency graph, on all platforms and with all
/// features.
///
/// # Errors
///
/// If cargo cannot read the graph, or if packages have no allowed licence; the error names all of
/// them.
pub(crate) fn check(cargo: &OsStr, root: &Path) -> anyhow::Result<()> {
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["metadata", "--format-version", "1", "--all-features", "--locked"])
        .output()
        .context("cargo cannot be started")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    ensure!(!packages.is_empty(), "cargo metadata names no packages");
    let refused: Vec<String> = packages.iter().filter_map(refusal).collect();
    if !refused.is_empty() {
        bail!("{} of {} packages:\n  {}", refused.len(), packages.len(), refused.join("\n  "));
    }
    println!("   {} packages, each under an allowed licence", packages.len());
    Ok(())
}

/// Returns the reason why a package may not be used, or `None` if it may.
fn refusal(package: &Value) -> Option<String> {
    let text = |key: &str| package[key].as_str();
    let name = format!("{} {}", text("name").unwrap_or("?"), text("version").unwrap_or("?"));
    let Some(expression) = text("license") else {
        return Some(format!("{name} has no licence expression"));
    };
    match is_allowed(expression) {
        Ok(true) => None,
        Ok(false) => Some(format!("{name} is under {expression}")),
        Err(error) => Some(format!("{name}: licence {expression:?}: {error}")),
    }
}

/// Returns true if allowed licences alone satisfy an SPDX expression.
fn is_allowed(expression: &str) -> anyhow::Result<bool> {
    // Before SPDX, cargo's manifests separated alternatives by a slash.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let allowed = alternatives(&mut words)?;
    match words.next() {
        None => Ok(allowed),
        Some(word) => bail!("{word:?} where it should end"),
    }
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn alternatives(words: &mut Words<'_>) -> anyhow::Result<bool> {
    let mut allowed = conjunction(words)?;
    while words.next_if_eq(&"OR").is_some() {
        allowed |= conjunction(words)?;
    }
    Ok(allowed)
}

fn conjunction(words: &mut Words<'_>) -> anyhow::Result<bool> {
    let mut allowed = licence(words)?;
    while words.next_if_eq(&"AND").is_some() {
        allowed &= licence(words)?;
    }
    Ok(allowed)
}

fn licence(words: &mut Words<'_>) -> anyhow::Result<bool> {
    match words.next() {
        Some("(") => {
            let allowed = alternatives(words)?;
            ensure!(words.next() == Some(")"), "a parenthesis is not closed");
            Ok(allowed)
        }
        None | Some("OR" | "AND" | "WITH" | ")") => bail!("a licence is missing"),
        Some(id) if words.next_if_eq(&"WITH").is_some() => {
            let exception = words.next().context("an exception is missing")?;
            Ok(ALLOWED.contains(&format!("{id} WITH {exception}").as_str()))
        }
        Some(id) => Ok(ALLOWED.contains(&id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_evaluated() {
        for expression in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/Apache-2.0",
            "GPL-3.0-only OR MIT",
            "MIT OR Apache-2.0 OR LGPL-2.1-or-later",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
            "GPL-2.0-only OR (MIT AND (BSD-3-Clause OR MPL-2.0))",
            "MPL-2.0 AND GPL-3.0-only OR MIT",
        ] {
            assert!(is_allowed(expression).unwrap(), "{expression}");
        }
        for expression in [
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "MIT AND (GPL-3.0-only OR MPL-2.0)",
            "Apache-2.0 WITH Other-exception",
            "GPL-2.0-only WITH LLVM-exception",
            "mit",
        ] {
            assert!(!is_allowed(expression).unwrap(), "{expression}");
        }
        for expression in ["", "MIT OR", "(MIT", "MIT)", "MIT Apache-2.0", "MIT WITH", "OR MIT"] {
            assert!(is_allowed(expression).is_err(), "{expression}");
        }
    }

    #[test]
    fn refused_package_is_named() {
        let package = |licence: Value| serde_json::json!({"name": "x", "version": "1.2.3", "license": licence});
        assert_eq!(refusal(&package("MIT".into())), None);
        assert_eq!(refusal(&package("SSPL-1.0".into())).unwrap(), "x 1.2.3 is under SSPL-1.0");
        assert_eq!(refusal(&package(Value::Null)).unwrap(), "x 1.2.3 has no licence expression");
    }

    #[test]
    fn cargo_deny_has_the_same_list() {
        let settings = include_str!("../../deny.toml");
        let start = settings.find("\nallow = [").unwrap();
        let list = &settings[start..start + settings[start..].find("\n]").unwrap()];
        let listed: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
        assert_eq!(listed, ALLOWED);
    }
}
