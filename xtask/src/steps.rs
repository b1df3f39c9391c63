//! `cargo xtask test`: runs one step after the other, until one fails.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;

use crate::commands::{answers, cargo_in, run};
use crate::{packages, tidy};

/// The set of steps to run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extent {
    /// The inner loop: steps that find most mistakes in little time.
    Quick,
    /// All steps.
    All,
}

/// The result of a step that did not fail.
enum Outcome {
    Done,
    Skipped(String),
}

type Step = (&'static str, Extent, fn(&Path) -> anyhow::Result<Outcome>);

/// The features of a full run, except for steps that choose others.
pub(crate) const WITH_ALL: &[&str] = &["--features", "ucx"];

/// Lints against unfinished code and against ignored tests without a reason. Clippy allows these by
/// default.
const DENIED: &[&str] = &[
    "-Dclippy::dbg_macro",
    "-Dclippy::todo",
    "-Dclippy::unimplemented",
    "-Dclippy::ignore_without_reason",
];

/// The steps of a full run. A step of extent `Quick` is part of every run. Cheap ones come first.
///
/// Tests start the programs that they find, so all are built before the first test.
const STEPS: &[Step] = &[
    ("system packages", Extent::Quick, |_| {
        packages::provide(packages::ALWAYS).map(|()| Outcome::Done)
    }),
    ("system packages for UCX and launchers", Extent::All, |_| {
        packages::provide(packages::FULL).map(|()| Outcome::Done)
    }),
    ("format", Extent::Quick, format),
    ("tidy", Extent::Quick, |root| {
        tidy::check(root).map(|()| Outcome::Done)
    }),
    (
        "licences and security advisories of dependencies",
        Extent::All,
        dependencies,
    ),
    ("clippy", Extent::All, |root| {
        clippy(root, &[&["--all-targets"], WITH_ALL].concat())
    }),
    // As users build it. The features of others' crates are those of the other steps, so that
    // none of these is built once more.
    ("clippy without UCX", Extent::All, |root| clippy(root, &[])),
    ("documentation", Extent::All, documentation),
    ("tests and the programs they start", Extent::All, programs),
    ("tests", Extent::All, tests),
    ("documentation tests", Extent::All, documentation_tests),
];

/// The steps of a quick run that replace longer ones.
const QUICK: &[Step] = &[
    ("clippy", Extent::Quick, |root| {
        clippy(root, &["--all-targets"])
    }),
    ("unit tests", Extent::Quick, unit_tests),
];

/// Runs the steps of `extent` in the workspace at `root`.
///
/// # Errors
///
/// If a step fails. The error names it, and later steps do not run.
pub(crate) fn test(root: &Path, extent: Extent) -> anyhow::Result<()> {
    let instead: &[Step] = if extent == Extent::Quick { QUICK } else { &[] };
    let of_extent = STEPS
        .iter()
        .filter(|step| extent == Extent::All || step.1 == Extent::Quick);
    let steps: Vec<&Step> = of_extent.chain(instead).collect();
    let begin = Instant::now();
    let mut skipped = Vec::new();
    for (i, (name, _, run)) in steps.iter().enumerate() {
        println!("\n== {}/{} {name}", i + 1, steps.len());
        let step_begin = Instant::now();
        let outcome = run(root).with_context(|| format!("step {name:?}"))?;
        let seconds = step_begin.elapsed().as_secs_f64();
        match outcome {
            Outcome::Done => println!("   {name}: passed, {seconds:.1} s"),
            Outcome::Skipped(why) => {
                println!("   {name}: SKIPPED, {why}");
                skipped.push(*name);
            }
        }
    }
    let passed = steps.len() - skipped.len();
    let also = if skipped.is_empty() {
        String::new()
    } else {
        format!(", skipped: {}", skipped.join(", "))
    };
    println!(
        "\n{passed} steps passed{also}; {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

fn format(root: &Path) -> anyhow::Result<Outcome> {
    in_workspace(root, &["fmt", "--all", "--", "--check"])
}

fn clippy(root: &Path, selected: &[&str]) -> anyhow::Result<Outcome> {
    let command: &[&str] = &["clippy", "--workspace"];
    in_workspace(
        root,
        &[command, selected, &["--", "-D", "warnings"], DENIED].concat(),
    )
}

fn documentation(root: &Path) -> anyhow::Result<Outcome> {
    let mut command = cargo_in(
        root,
        &[&["doc", "--workspace", "--no-deps"], WITH_ALL].concat(),
    );
    run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Outcome::Done)
}

fn programs(root: &Path) -> anyhow::Result<Outcome> {
    // Tests look for programs and the driver beside their own binary. All is built at once:
    // separate builds of targets or packages would build the dependencies again with other
    // features.
    in_workspace(
        root,
        &[
            &["build", "--workspace", "--lib", "--bins", "--tests"],
            WITH_ALL,
        ]
        .concat(),
    )
}

fn tests(root: &Path) -> anyhow::Result<Outcome> {
    if !has_nextest() {
        println!(
            "   cargo-nextest is not installed: `cargo test`, without its limits on time and \
             neighbours"
        );
        return in_workspace(
            root,
            &[
                &["test", "--workspace", "--lib", "--bins", "--tests"],
                WITH_ALL,
            ]
            .concat(),
        );
    }
    // Tests that wait take one slot, tests that compute take two: see `.config/nextest.toml`.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let slots = (2 * cores).to_string();
    let run = [
        "nextest",
        "run",
        "--workspace",
        "--profile",
        "full",
        "--test-threads",
        &slots,
    ];
    in_workspace(root, &[&run, WITH_ALL].concat())
}

fn unit_tests(root: &Path) -> anyhow::Result<Outcome> {
    let runner: &[&str] = if has_nextest() {
        &["nextest", "run"]
    } else {
        &["test"]
    };
    in_workspace(root, &[runner, &["--workspace", "--lib"]].concat())
}

fn documentation_tests(root: &Path) -> anyhow::Result<Outcome> {
    in_workspace(
        root,
        &[&["test", "--workspace", "--doc"], WITH_ALL].concat(),
    )
}

/// Checks licences and advisories with cargo-deny, after `deny.toml`.
fn dependencies(root: &Path) -> anyhow::Result<Outcome> {
    if !answers("cargo-deny", &["--version"]) {
        return Ok(Outcome::Skipped("cargo-deny is not installed".to_owned()));
    }
    // The database comes from the network. A failed download says nothing about the dependencies.
    let fetched = cargo_in(root, &["deny", "fetch", "db"])
        .stdin(Stdio::null())
        .output()?;
    if !fetched.status.success() {
        in_workspace(root, &["deny", "check", "licenses"])?;
        let said = String::from_utf8_lossy(&fetched.stderr);
        return Ok(Outcome::Skipped(format!(
            "licences are allowed, but the advisory database cannot be fetched: {}",
            said.trim()
        )));
    }
    in_workspace(root, &["deny", "check", "advisories", "licenses"])
}

fn has_nextest() -> bool {
    answers("cargo-nextest", &["nextest", "--version"])
}

fn in_workspace(root: &Path, arguments: &[&str]) -> anyhow::Result<Outcome> {
    run(&mut cargo_in(root, arguments))?;
    Ok(Outcome::Done)
}
