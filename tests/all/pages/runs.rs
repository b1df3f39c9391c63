//! The commands of the pages that can run on any machine, run as they stand there, page by page in
//! the order of each page. A word of the reader gets a value, and a training few steps.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use mpmd_tests::{Sandbox, package_program};

use super::blocks::{PageCommand, commands_of, pages, repository};
use super::known::{PROGRAMS, READERS_PROGRAM};
use super::shell_words::simple_commands;

/// No command takes this long, on any machine.
const LONG: Duration = Duration::from_secs(240);

/// Parts of commands that this test does not run, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    ("cargo build", "builds"),
    ("cargo install", "installs"),
    ("cargo test", "builds"),
    ("cargo xtask", "has tests of its own, or runs them"),
    ("kit/xtask", "needs a packed kit"),
    ("mpmd bench", "measures"),
    ("mpmd new", "its tests build and run what it writes"),
    ("target/debug/points", "belongs to `mpmd new`"),
    ("mpmd top", "needs a running job, as its tests have"),
    ("--add", "needs a running job"),
    ("--chaos", "ends when enough processes have died"),
    ("serve", "a server does not end: its tests ask it"),
    ("--publish", "waits for a server"),
    ("cuda", "needs a graphics processor"),
    ("--transport ucx", "needs a build with UCX"),
    ("MPMD_CORES", "needs cores of its own"),
    (
        "export MPMD_JOB_TOKEN",
        "is for a launcher of several hosts",
    ),
    ("~/notes", "is the reader's folder"),
    (".jsonl", "is the reader's file"),
    ("--chat", "the folder at hand has no chat template"),
    (
        "--tensor-parallel 2",
        "the folder at hand has heads that two processes do not divide",
    ),
    ("--expert-parallel", "the folder at hand has no experts"),
    ("crossed.csv", "is written by the page's text"),
    ("handles", "an example, which its own test runs"),
];

/// Words of the reader, and what they are here.
const WORDS: &[(&str, &str)] = &[
    ("DIR", "grouped"),
    ("TEXT...", "LICENSE-MIT"),
    ("TEXT", "LICENSE-MIT"),
    ("FILE", "LICENSE-MIT"),
    ("CONFIG", "grouped"),
    ("ADAPTER", "adapter"),
    (READERS_PROGRAM, "train_gpt --elastic"),
];

/// Programs of other projects that every system has.
const EVERYWHERE: &[&str] = &["chmod", "echo", "head"];

#[test]
fn commands_that_can_run_do_what_the_page_shows() {
    let mut faults = Vec::new();
    let mut runs = 0;
    for page in pages() {
        let site = Sandbox::new().unwrap();
        furnish(site.path());
        for command in commands_of(&page) {
            if let Some(costs) = &command.costs {
                fs::write(site.path().join("costs.toml"), costs).unwrap();
            }
            let Some(script) = script(&command) else {
                continue;
            };
            runs += 1;
            if let Err(fault) = run(&site, &command, &script) {
                faults.push(format!("{}: {}\n{fault}", command.place(), command.text));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    // Far below the true number: a reader of pages that finds nothing would pass.
    assert!(runs > 25, "only {runs} commands ran");
}

#[test]
fn no_reason_to_leave_a_command_out_is_stale() {
    let all: Vec<PageCommand> = pages().iter().flat_map(|page| commands_of(page)).collect();
    for (part, _) in LEFT_OUT {
        let is_met = all.iter().any(|command| command.text.contains(part));
        assert!(is_met, "no page has a command with `{part}`");
    }
}

/// Puts the files of the repository that pages name into a folder.
fn furnish(folder: &Path) {
    let root = repository();
    let grouped = "crates/mpmd-models/tests/folders/grouped";
    let files = [
        ("docs", "docs"),
        ("README.md", "README.md"),
        ("LICENSE-MIT", "LICENSE-MIT"),
        ("LICENSE-APACHE", "LICENSE-APACHE"),
        (grouped, "grouped"),
        (
            "crates/mpmd-models/tests/gguf/plain-q8_0.gguf",
            "model-Q8_0.gguf",
        ),
        ("crates/mpmd-models/tests/adapters/grouped", "adapter"),
        ("crates/mpmd-programs/mpmd-demo", "config"),
    ];
    for (file, name) in files {
        symlink(root.join(file), folder.join(name)).unwrap();
    }

    fs::create_dir(folder.join("bin")).unwrap();
    for (program, package) in PROGRAMS {
        symlink(
            package_program(package, program),
            folder.join("bin").join(program),
        )
        .unwrap();
    }
}

/// Returns the command with the reader's words filled in, or `None` if it is left out.
fn script(command: &PageCommand) -> Option<String> {
    if LEFT_OUT.iter().any(|(part, _)| command.text.contains(part)) {
        return None;
    }
    let mut script = plain_programs(&command.text);
    for (word, value) in WORDS {
        script = replace_word(&script, word, value);
    }

    let is_known = |words: &Vec<String>| {
        let name = words[0].as_str();
        EVERYWHERE.contains(&name) || PROGRAMS.iter().any(|(known, _)| *known == name)
    };
    let commands = simple_commands(&script);
    if commands.is_empty() || !commands.iter().all(is_known) {
        return None;
    }
    Some(few_steps(&script))
}

/// Replaces `cargo run … --bin NAME --` and `target/release/NAME` by `NAME`, which has been built.
fn plain_programs(text: &str) -> String {
    let text = text.replace("target/release/", "");
    let Some((before, bin)) = text.split_once("cargo run ").and_then(|(before, rest)| {
        let (_, bin) = rest.split_once("--bin ")?;
        Some((before, bin))
    }) else {
        return text;
    };
    format!("{before}{}", bin.replacen(" -- ", " ", 1))
}

/// Gives a training few steps, with an evaluation after each, and `train_gpt` a short text.
fn few_steps(script: &str) -> String {
    let mut words: Vec<&str> = script.split(' ').collect();
    for (option, value) in [("--steps", "3"), ("--evaluate-every", "1")] {
        if let Some(at) = words.iter().position(|word| *word == option) {
            words[at + 1] = value;
        }
    }
    let script = words.join(" ");
    replace_word(
        &script,
        "train_gpt",
        "train_gpt --steps 3 --sample 0 LICENSE-MIT",
    )
}

/// Replaces a word that stands between blanks or at an end.
fn replace_word(text: &str, word: &str, value: &str) -> String {
    let replace = |line: &str| {
        let words = line.split(' ');
        let words = words.map(|found| if found == word { value } else { found });
        words.collect::<Vec<_>>().join(" ")
    };
    text.split('\n').map(replace).collect::<Vec<_>>().join("\n")
}

/// Runs a command in the page's folder, and compares its output with that of the page. The output
/// of the reader's own program is not compared.
fn run(site: &Sandbox, command: &PageCommand, script: &str) -> Result<(), String> {
    let mut shell = site.command("sh");
    let path = std::env::var("PATH").unwrap_or_default();
    shell.env(
        "PATH",
        format!("{}:{path}", site.path().join("bin").display()),
    );
    shell.args(["-c", &format!("exec 2>&1; {script}")]);
    let mut process = site
        .start(shell, "page")
        .map_err(|error| error.to_string())?;
    let end = process
        .wait(Instant::now() + LONG)
        .map_err(|error| error.to_string())?;

    let said = format!("$ {script}\n{}", end.stdout);
    if end.code() != 0 && command.output.is_none() {
        return Err(format!("exit code {}: {said}", end.code()));
    }
    let left = site.processes();
    if !left.is_empty() {
        return Err(format!("processes {left:?} are left: {said}"));
    }
    match &command.output {
        Some(_) if command.text.contains(READERS_PROGRAM) => Ok(()),
        Some(shown) if !shows(shown, &end.stdout) => {
            Err(format!("the page shows other lines: {said}"))
        }
        _ => Ok(()),
    }
}

/// Returns true if a page's lines are those of the output, figures aside. A line `…` stands for any
/// lines, and `…` in a line for any text.
///
/// A process of a job prints results, which are JSON, and messages by two streams. Their lines may
/// come in any order.
fn shows(page: &[String], output: &str) -> bool {
    let output: Vec<String> = output.lines().map(without_figures).collect();
    let page: Vec<String> = page.iter().map(|line| without_figures(line)).collect();
    let results_last = |lines: &[String]| {
        let (results, messages): (Vec<_>, Vec<_>) = lines
            .iter()
            .cloned()
            .partition(|line| line.starts_with('{'));
        [messages, results].concat()
    };
    lines_match(&page, &output) || lines_match(&results_last(&page), &results_last(&output))
}

fn lines_match(page: &[String], output: &[String]) -> bool {
    match page.split_first() {
        None => output.is_empty(),
        Some((line, rest)) if line == "…" => {
            (0..=output.len()).any(|skipped| lines_match(rest, &output[skipped..]))
        }
        Some((line, rest)) => output
            .split_first()
            .is_some_and(|(first, others)| line_matches(line, first) && lines_match(rest, others)),
    }
}

fn line_matches(page: &str, output: &str) -> bool {
    let mut parts = page.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = output.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    for part in &parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty() || parts.last().is_some_and(|last| last.is_empty())
}

/// Returns a line with `#` in place of each number, and one blank in place of several.
fn without_figures(line: &str) -> String {
    let mut plain = String::new();
    let mut chars = line.trim().chars().peekable();
    while let Some(char) = chars.next() {
        let is_within = |next: &char| next.is_ascii_digit() || *next == '.';
        match char {
            ' ' if plain.ends_with(' ') => {}
            '0'..='9' => {
                while chars.next_if(is_within).is_some() {}
                plain.push('#');
            }
            char => plain.push(char),
        }
    }
    plain
}

#[test]
fn output_is_compared_figures_aside() {
    let page = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let output = "begin 1.5 s\none\ntwo\nat main.rs:17\n";
    assert!(shows(&page("begin 20 s\n…\nat …:3"), output));
    assert!(shows(&page("begin   2 s\none\ntwo\nat main.rs:1"), output));
    assert!(!shows(&page("begin 20 s\none\nat main.rs:1"), output));
    assert!(!shows(&page("begin 20 s\n…\nat other.rs:…"), output));
    let results = "{\"loss\":0.5}\nend\n";
    assert!(shows(&page("end\n{\"loss\":1.5}"), results));
    assert!(!shows(&page("end"), results));
    assert!(!shows(&page("begin 20 s\none"), output));
}
