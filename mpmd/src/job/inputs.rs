//! The options and inputs of a program that must be equal on all processes of its job.

use std::ffi::OsStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::Fact;
use clap::{ArgMatches, Command, Id};

/// Ids of options that say where or how one process runs. Their values may differ between
/// processes.
///
/// The first four belong to [`JobArgs`](crate::job::JobArgs), and are ignored under a launcher. The
/// others are the addresses and the number of one process.
const OF_ONE_PROCESS: [&str; 7] = [
    "processes",
    "transport",
    "device",
    "trace",
    "host",
    "port",
    "rank",
];

/// Maximum number of characters of an option's value in a message. A longer value is cut, and
/// compared by its hash.
const LONGEST_VALUE: usize = 200;

/// The values of all options on the program's command line, including those outside of
/// [`JobArgs`](crate::job::JobArgs).
///
/// An option of files or folders counts by its number of values alone, because paths may differ
/// from host to host. Contents are compared as inputs: see
/// [`JobArgs::input`](crate::job::JobArgs::input).
#[derive(Clone, Debug, Default)]
pub struct ComparedOptions {
    /// The options that have a value, as (option id, fact).
    facts: Vec<(String, Fact)>,
}

impl ComparedOptions {
    /// Returns a fact for each option that has a value. Leaves out the options in `OF_ONE_PROCESS`
    /// and those with ids in `may_differ`.
    pub(crate) fn facts(&self, may_differ: &[String]) -> Vec<Fact> {
        let is_compared =
            |id: &String| !OF_ONE_PROCESS.contains(&id.as_str()) && !may_differ.contains(id);
        let compared = self.facts.iter().filter(|(id, _)| is_compared(id));
        compared.map(|(_, fact)| fact.clone()).collect()
    }
}

impl clap::FromArgMatches for ComparedOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        // A group has the ids of its options as values.
        let is_group = |id: &Id| matches.try_get_many::<Id>(id.as_str()).is_ok();
        let ids = matches.ids().filter(|id| !is_group(id));
        let facts = ids.filter_map(|id| {
            let values = matches.try_get_raw(id.as_str()).ok()??;
            let value = match matches.try_get_many::<PathBuf>(id.as_str()) {
                Ok(paths) => match paths.map_or(0, Iterator::count) {
                    1 => "a path".to_owned(),
                    count => format!("{count} paths"),
                },
                Err(_) => values.map(shown).collect::<Vec<_>>().join(" "),
            };
            Some((id.to_string(), Fact::new(name_of(id.as_str()), cut(value))))
        });

        Ok(Self {
            facts: facts.collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for ComparedOptions {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

/// Returns the name of an option as users write it, such as `--save-every`. Returns an id with a
/// capital first letter unchanged: it names a positional argument.
fn name_of(id: &str) -> String {
    match id.starts_with(|first: char| first.is_uppercase()) {
        true => id.to_owned(),
        false => format!("--{}", id.replace('_', "-")),
    }
}

/// Returns the value as one word with control characters escaped. A value that is empty or has
/// blanks is quoted.
fn shown(value: &OsStr) -> String {
    let text = value.to_string_lossy();
    match text.is_empty() || text.contains(char::is_whitespace) {
        true => format!("{text:?}"),
        false => text.escape_debug().to_string(),
    }
}

/// Shortens a value of more than `LONGEST_VALUE` characters for messages. The result has the length
/// and a hash of the whole value.
fn cut(value: String) -> String {
    if value.chars().count() <= LONGEST_VALUE {
        return value;
    }

    let start: String = value.chars().take(LONGEST_VALUE / 2).collect();
    let key = crate::random::Key(value.len() as u64);
    let hash = value
        .bytes()
        .fold(key, |key, byte| key.fold_in(byte.into()));
    format!("{start}… ({} bytes, hash {:016x})", value.len(), hash.0)
}

type FindFacts = dyn Fn() -> Vec<Fact> + Send + Sync;

/// The inputs of a program, such as files, as functions that return facts about them.
#[derive(Clone, Default)]
pub struct JobInputs {
    find: Vec<Arc<FindFacts>>,
}

impl JobInputs {
    pub(crate) fn add(&mut self, find: impl Fn() -> Vec<Fact> + Send + Sync + 'static) {
        self.find.push(Arc::new(find));
    }

    pub(crate) fn facts(&self) -> impl Iterator<Item = Fact> + '_ {
        self.find.iter().flat_map(|find| find())
    }
}

impl fmt::Debug for JobInputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inputs({})", self.find.len())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::job::JobArgs;

    #[derive(Parser)]
    struct Args {
        #[command(flatten)]
        job: JobArgs,
        #[arg(id = "TEXT")]
        texts: Vec<PathBuf>,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long)]
        save_every: Option<usize>,
        #[arg(long)]
        verbose: bool,
        #[arg(long)]
        prompt: Option<String>,
        #[command(flatten)]
        more: More,
    }

    #[derive(clap::Args)]
    #[group(multiple = false)]
    struct More {
        #[arg(long, value_delimiter = ',')]
        cut: Vec<usize>,
        #[arg(long)]
        host: Option<String>,
    }

    fn facts(args: &[&str]) -> Vec<String> {
        let Args {
            job,
            texts,
            seed,
            save_every,
            verbose,
            prompt,
            more,
        } = Args::parse_from([&["program"], args].concat());
        _ = (
            texts, seed, save_every, verbose, prompt, more.cut, more.host,
        );
        let facts = job.options.facts(&["verbose".to_owned()]).into_iter();
        let mut facts: Vec<String> = facts
            .map(|fact| format!("{} {}", fact.name, fact.value.unwrap()))
            .collect();
        facts.sort_unstable();
        facts
    }

    #[test]
    fn options_of_all_structs_are_facts_by_name() {
        assert_eq!(facts(&[]), ["--seed 1"]);
        assert_eq!(
            facts(&[
                "--save-every",
                "3",
                "--cut",
                "1,2",
                "/a",
                "/b",
                "--prompt",
                "a b",
                "--seed=2"
            ]),
            [
                "--cut 1 2",
                "--prompt \"a b\"",
                "--save-every 3",
                "--seed 2",
                "TEXT 2 paths"
            ]
        );
    }

    #[test]
    fn options_of_one_process_are_no_facts() {
        let args = [
            "--host",
            "a",
            "--processes",
            "2",
            "--trace",
            "/t",
            "--verbose",
        ];
        assert_eq!(facts(&args), ["--seed 1"]);
    }

    #[test]
    fn values_of_options_are_short_and_printable() {
        assert_eq!(
            facts(&["--prompt", "\u{1b}[31m"])[0],
            "--prompt \\u{1b}[31m"
        );
        let [a, b] =
            ["a", "b"].map(|end| facts(&["--prompt", &("x".repeat(5000) + end)])[0].clone());
        assert!(a != b && a.len() < 250, "{a}");
    }
}
