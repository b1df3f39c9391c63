//! `cargo xtask test`: runs one step after the other, until one fails.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::Context as _;

use crate::commands::{answers, cargo_in, run};
use crate::{packages, tidy};

/// The set of steps to run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum TestExtent {
    /// Steps for frequent use, which find most mistakes in little time.
    Quick,
    /// All steps.
    All,
}

/// The result of a step that did not fail.
enum StepOutcome {
    Done,
    Skipped(String),
}

/// One step of `cargo xtask test`.
struct TestStep {
    name: &'static str,
    /// `Quick` for a step of both quick and full runs.
    extent: TestExtent,
    run: fn(&Path) -> anyhow::Result<StepOutcome>,
}

impl TestStep {
    const fn new(
        name: &'static str,
        extent: TestExtent,
        run: fn(&Path) -> anyhow::Result<StepOutcome>,
    ) -> Self {
        Self { name, extent, run }
    }
}

/// The cargo features of a full run, except in steps that choose others.
pub(crate) const WITH_ALL: &[&str] = &["--features", "ucx"];

/// Lints against unfinished code and against ignored tests without a reason. Clippy allows these by
/// default.
const DENIED: &[&str] = &[
    "-Dclippy::dbg_macro",
    "-Dclippy::todo",
    "-Dclippy::unimplemented",
    "-Dclippy::ignore_without_reason",
];

/// The steps of a full run, cheap ones first. Steps of extent `Quick` are part of every run.
///
/// All programs are built before the first test, because tests start the programs that they find.
const STEPS: &[TestStep] = &[
    TestStep::new("system packages", TestExtent::Quick, |_| {
        packages::provide(packages::ALWAYS).map(|()| StepOutcome::Done)
    }),
    TestStep::new(
        "system packages for UCX and launchers",
        TestExtent::All,
        |_| packages::provide(packages::FULL).map(|()| StepOutcome::Done),
    ),
    TestStep::new("format", TestExtent::Quick, format),
    TestStep::new("tidy", TestExtent::Quick, |root| {
        tidy::check(root).map(|()| StepOutcome::Done)
    }),
    TestStep::new(
        "licences and security advisories of dependencies",
        TestExtent::All,
        dependencies,
    ),
    TestStep::new("clippy", TestExtent::All, |root| {
        clippy(root, &[&["--all-targets"], WITH_ALL].concat())
    }),
    // As users build it. The features of others' crates are those of the other steps, so that
    // none of these is built once more.
    TestStep::new("clippy without UCX", TestExtent::All, |root| {
        clippy(root, &[])
    }),
    TestStep::new("documentation", TestExtent::All, documentation),
    TestStep::new(
        "tests and the programs they start",
        TestExtent::All,
        programs,
    ),
    TestStep::new("tests", TestExtent::All, tests),
    TestStep::new("documentation tests", TestExtent::All, documentation_tests),
];

/// Further steps of a quick run, in place of longer steps of a full run.
const QUICK: &[TestStep] = &[
    TestStep::new("clippy", TestExtent::Quick, |root| {
        clippy(root, &["--all-targets"])
    }),
    TestStep::new("unit tests", TestExtent::Quick, unit_tests),
];

/// Runs the steps of `extent` in the workspace at `root`.
///
/// # Errors
///
/// If a step fails. The error names it, and later steps do not run.
pub(crate) fn test(root: &Path, extent: TestExtent) -> anyhow::Result<()> {
    let instead: &[TestStep] = if extent == TestExtent::Quick {
        QUICK
    } else {
        &[]
    };
    let of_extent = STEPS
        .iter()
        .filter(|step| extent == TestExtent::All || step.extent == TestExtent::Quick);
    let steps: Vec<&TestStep> = of_extent.chain(instead).collect();

    let begin = Instant::now();
    let mut skipped = Vec::new();
    for (i, TestStep { name, run, .. }) in steps.iter().enumerate() {
        println!("\n== {}/{} {name}", i + 1, steps.len());

        let step_begin = Instant::now();
        let outcome = run(root).with_context(|| format!("step {name:?}"))?;
        let seconds = step_begin.elapsed().as_secs_f64();
        match outcome {
            StepOutcome::Done => println!("   {name}: passed, {seconds:.1} s"),
            StepOutcome::Skipped(why) => {
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

fn format(root: &Path) -> anyhow::Result<StepOutcome> {
    in_workspace(root, &["fmt", "--all", "--", "--check"])
}

fn clippy(root: &Path, selected: &[&str]) -> anyhow::Result<StepOutcome> {
    let command: &[&str] = &["clippy", "--workspace"];
    in_workspace(
        root,
        &[command, selected, &["--", "-D", "warnings"], DENIED].concat(),
    )
}

fn documentation(root: &Path) -> anyhow::Result<StepOutcome> {
    let mut command = cargo_in(
        root,
        &[&["doc", "--workspace", "--no-deps"], WITH_ALL].concat(),
    );
    run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(StepOutcome::Done)
}

fn programs(root: &Path) -> anyhow::Result<StepOutcome> {
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

fn tests(root: &Path) -> anyhow::Result<StepOutcome> {
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

fn unit_tests(root: &Path) -> anyhow::Result<StepOutcome> {
    let runner: &[&str] = if has_nextest() {
        &["nextest", "run"]
    } else {
        &["test"]
    };
    in_workspace(root, &[runner, &["--workspace", "--lib"]].concat())
}

fn documentation_tests(root: &Path) -> anyhow::Result<StepOutcome> {
    in_workspace(
        root,
        &[&["test", "--workspace", "--doc"], WITH_ALL].concat(),
    )
}

/// Checks licences and security advisories of dependencies with cargo-deny, by the rules in
/// `deny.toml`.
fn dependencies(root: &Path) -> anyhow::Result<StepOutcome> {
    if !answers("cargo-deny", &["--version"]) {
        return Ok(StepOutcome::Skipped(
            "cargo-deny is not installed".to_owned(),
        ));
    }

    // The database comes from the network. A failed download says nothing about the dependencies.
    let fetched = cargo_in(root, &["deny", "fetch", "db"])
        .stdin(Stdio::null())
        .output()?;
    if !fetched.status.success() {
        in_workspace(root, &["deny", "check", "licenses"])?;
        let said = String::from_utf8_lossy(&fetched.stderr);
        return Ok(StepOutcome::Skipped(format!(
            "licences are allowed, but the advisory database cannot be fetched: {}",
            said.trim()
        )));
    }

    in_workspace(root, &["deny", "check", "advisories", "licenses"])
}

fn has_nextest() -> bool {
    answers("cargo-nextest", &["nextest", "--version"])
}

fn in_workspace(root: &Path, arguments: &[&str]) -> anyhow::Result<StepOutcome> {
    run(&mut cargo_in(root, arguments))?;
    Ok(StepOutcome::Done)
}
