//! Every command of the pages names a program that exists, with options that it has.

use std::collections::HashMap;

use mpmd_tests::{bare_command, package_program};

use super::blocks::{commands_of, pages};
use super::shell_words::simple_commands;

/// The programs of the repository, and the packages that have them.
pub(super) const PROGRAMS: &[(&str, &str)] = &[
    ("mpmd", "mpmd-cli"),
    ("finetune", "mpmd-programs"),
    ("generate", "mpmd-programs"),
    ("serve", "mpmd-programs"),
    ("train_and_serve", "mpmd-programs"),
    ("basic", "mpmd-examples"),
    ("cuda_kernel", "mpmd-examples"),
    ("pipeline", "mpmd-examples"),
    ("quickstart", "mpmd-examples"),
    ("reshard", "mpmd-examples"),
    ("train_gpt", "mpmd-examples"),
    ("xtask", "xtask"),
];

/// Programs of other projects, whose options are theirs.
const OTHERS: &[&str] = &[
    "base64", "cd", "chmod", "cp", "curl", "docker", "echo", "export", "head", "mpirun", "od",
    "python3", "srun", "tar", "tr",
];

/// What stands for a program of the reader.
pub(super) const READERS_PROGRAM: &str = "PROGRAM";

#[test]
fn pages_name_programs_and_options_that_exist() {
    let mut helps = Helps::default();
    let mut faults = Vec::new();
    for command in pages().iter().flat_map(|page| commands_of(page)) {
        for words in simple_commands(&command.text) {
            if let Err(fault) = check(&words, &mut helps) {
                faults.push(format!("{}: {fault}", command.place()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unknown_programs_and_options_are_found() {
    let mut helps = Helps::default();
    let mut fault = |line: &str| {
        let commands = simple_commands(line);
        check(&commands[0], &mut helps).expect_err(line)
    };
    assert!(fault("mpmd run --no-such 1").contains("--no-such"));
    assert!(fault("mpmd run -n 2 -- basic --no-such 1").contains("--no-such"));
    assert!(fault("cargo run --bin no_such").contains("no_such"));
    assert!(fault("srun -n 4 ./pipeline --no-such").contains("--no-such"));
    assert!(fault("no_such --option").contains("no_such"));
}

/// Checks a simple command.
fn check(words: &[String], helps: &mut Helps) -> Result<(), String> {
    let (program, arguments) = words.split_first().ok_or("an empty command")?;
    let name = program.rsplit('/').next().unwrap_or(program);

    if name == "cargo" {
        return check_cargo(arguments, helps);
    }
    if name == READERS_PROGRAM {
        return Ok(());
    }
    if OTHERS.contains(&name) {
        return match program_after_options(arguments) {
            Some(inner) => check(inner, helps),
            None => Ok(()),
        };
    }
    if !PROGRAMS.iter().any(|(known, _)| *known == name) {
        // The reader's own package, by the name that the page gave to `mpmd new`.
        let is_readers = program.starts_with("target/");
        return match is_readers {
            true => Ok(()),
            false => Err(format!("there is no program {name}")),
        };
    }

    let (own, inner) = split_at_dashes(arguments);
    check_options(name, own, helps)?;
    match inner {
        Some(inner) if inner[0] != "sh" => check(inner, helps),
        _ => Ok(()),
    }
}

/// Checks `cargo run`, `cargo build` and `cargo xtask`. The others are cargo's own.
fn check_cargo(arguments: &[String], helps: &mut Helps) -> Result<(), String> {
    let (own, inner) = split_at_dashes(arguments);
    let targets = own.windows(2).filter(|pair| pair[0] == "--bin");
    let targets: Vec<_> = targets.collect();
    for pair in &targets {
        if !PROGRAMS.iter().any(|(known, _)| *known == pair[1]) {
            return Err(format!("cargo finds no program {}", pair[1]));
        }
    }
    match (own.first().map(String::as_str), targets.last(), inner) {
        (Some("xtask"), ..) => check_options("xtask", &own[1..], helps),
        (Some("run"), Some(target), Some(inner)) => check_options(&target[1], inner, helps),
        _ => Ok(()),
    }
}

/// Checks that a program has all options among these arguments.
fn check_options(program: &str, arguments: &[String], helps: &mut Helps) -> Result<(), String> {
    let first_option = arguments.iter().position(|word| word.starts_with('-'));
    // Commands below the program, and values, which do not change the help.
    let path = match program {
        // Its help is one text.
        "xtask" => &[],
        _ => &arguments[..first_option.unwrap_or(arguments.len())],
    };
    let help = helps.of(program, path)?;

    for word in arguments.iter().filter(|word| word.starts_with('-')) {
        let option = word.split('=').next().unwrap_or(word);
        let is_known = help.match_indices(option).any(|(at, _)| {
            let after = help[at + option.len()..].chars().next();
            !after.is_some_and(|char| char.is_ascii_alphanumeric() || char == '-')
        });
        if !is_known && option != "--help" {
            return Err(format!(
                "{program} {} has no option {option}",
                path.join(" ")
            ));
        }
    }
    Ok(())
}

/// Returns the arguments before `--`, and those after it, if there are any.
fn split_at_dashes(arguments: &[String]) -> (&[String], Option<&[String]>) {
    match arguments.iter().position(|word| word == "--") {
        Some(at) => {
            let inner = &arguments[at + 1..];
            (&arguments[..at], (!inner.is_empty()).then_some(inner))
        }
        None => (arguments, None),
    }
}

/// Returns the command line that another launcher starts: from the first word that is a program of
/// the repository or of the reader.
fn program_after_options(arguments: &[String]) -> Option<&[String]> {
    let at = arguments.iter().position(|word| word.starts_with("./"));
    at.map(|at| &arguments[at..])
}

/// The help of programs and of their commands, which is asked for once.
#[derive(Default)]
struct Helps {
    by_command: HashMap<String, String>,
}

impl Helps {
    fn of(&mut self, program: &str, path: &[String]) -> Result<&str, String> {
        let key = format!("{program} {}", path.join(" "));
        if !self.by_command.contains_key(&key) {
            let package = PROGRAMS.iter().find(|(known, _)| *known == program);
            let (_, package) = package.ok_or(format!("there is no program {program}"))?;
            let mut command = bare_command(package_program(package, program));
            let end = command.args(path).arg("--help").output();
            let end = end.map_err(|error| format!("{key}: {error}"))?;
            let text = [end.stdout, end.stderr].concat();
            let text = String::from_utf8_lossy(&text).into_owned();
            self.by_command.insert(key.clone(), text);
        }
        Ok(&self.by_command[&key])
    }
}
