//! The rules on single files. Each finding names the line that breaks a rule and gives a remedy.

use std::collections::BTreeMap;

use super::source::{SourceFile, SourceToken};

/// A line that breaks a rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TidyFinding {
    /// Line number, from one.
    pub(crate) line: usize,
    /// A description of the problem for people.
    pub(crate) message: String,
}

/// A check of one file, which returns the lines that break the rule.
type TidyRule = fn(&SourceFile) -> Vec<TidyFinding>;

/// The rules for all files.
pub(crate) const RULES: &[TidyRule] = &[
    rust_can_be_read,
    lines_are_short,
    files_are_short,
    text_is_clean,
    bincode_in_one_module,
    examples_use_mpmd_alone,
];

/// The rules for files of libraries and programs. Unit tests in these files are exempt.
pub(crate) const PRODUCTION_RULES: &[TidyRule] = &[
    one_way_in,
    one_face_of_devices,
    planners_are_pure,
    blocking_in_one_module,
    deadlines_have_a_limit,
    version_is_told,
    tokens_become_text_in_one_module,
    texts_become_tokens_in_one_module,
    one_width_of_vectors,
];

const MOST_LINES: usize = 1000;
const MOST_COLUMNS: usize = 100;

/// Folders of the code that may use a transport: execution, and the part of a program that connects
/// it.
const TRANSPORT_USERS: &[&str] = &[
    "mpmd-transport",
    "mpmd-core/src/exec",
    "mpmd-core/src/api/program",
];

/// Paths of the types and modules through which code uses a transport.
const TRANSPORTS: &[&str] = &[
    "mpmd_transport::Transport",
    "mpmd_transport::transport::Transport",
    "mpmd_proto::router::Router",
    "mpmd_transport::inproc",
    "mpmd_transport::mixed",
    "mpmd_transport::tcp",
];

/// Folder of execution, which may use devices only through `mpmd_device::accelerator`.
const DEVICE_USERS: &[&str] = &["mpmd-core/src/exec"];

/// Folders of example programs, as a user would write them.
const EXAMPLES: &[&str] = &["mpmd-examples/", "mpmd/examples/"];

/// The crates that example programs may depend on.
const OF_EXAMPLES: &[&str] = &["anyhow", "clap", "mpmd"];

/// Crates that `mpmd` itself depends on, so that its examples could name them, but may not.
const NOT_OF_EXAMPLES: &[&str] = &["candle_core", "candle_nn", "serde_json", "tokio"];

/// Paths that name a kind of device.
const DEVICE_KINDS: &[&str] = &[
    "mpmd_device::cuda",
    "mpmd_layout::topology::DeviceKind::Cuda",
    "DeviceKind::Cuda",
];

/// Folders of the crates whose results depend on their inputs alone.
const PLANNERS: &[&str] = &["crates/mpmd-layout/src", "crates/mpmd-schedule/src"];

/// Paths of clocks, I/O, threads and processes.
const IMPURE: &[&str] = &[
    "std::time",
    "std::thread",
    "std::net",
    "std::fs",
    "std::process",
    "std::env",
    "mpmd_transport",
];

/// Folders of the code that may block only through `mpmd_base::block`, so that a simulation can
/// control it.
const SIMULATED: &[&str] = &[
    "mpmd-core/src",
    "crates/mpmd-device/src",
    "crates/mpmd-proto/src",
    "mpmd-transport/src/inproc",
    "crates/mpmd-rendezvous/src/job",
];

/// Paths of threads, locks, condition variables, channels and clocks.
const BLOCKING: &[&str] = &[
    "mpmd_base::block::Instant::now",
    "mpmd_base::block::SystemTime::now",
    "parking_lot",
    "std::sync::Barrier",
    "std::sync::Condvar",
    "std::sync::Mutex",
    "std::sync::MutexGuard",
    "std::sync::RwLock",
    "std::sync::RwLockReadGuard",
    "std::sync::RwLockWriteGuard",
    "std::sync::mpsc",
    "std::thread::Builder",
    "std::thread::JoinHandle",
    "std::thread::Thread",
    "std::thread::current",
    "std::thread::park",
    "std::thread::park_timeout",
    "std::thread::scope",
    "std::thread::sleep",
    "std::thread::spawn",
    "std::thread::yield_now",
    "std::time::Instant",
    "std::time::SystemTime",
];

/// Folders of the code that has tokenizers.
const TOKENIZER_USERS: &[&str] = &[
    "crates/mpmd-models/src",
    "crates/mpmd-programs/src",
    "crates/mpmd-serve/src",
];

/// Modules that may call the decoder of a tokenizer.
const DECODER_USERS: &[&str] = &[
    "crates/mpmd-models/src/text/piece_rule",
    "crates/mpmd-models/src/text/token_decoder",
];

/// Modules that may call the encoder of a tokenizer, and one whose encoder is another.
const ENCODER_USERS: &[&str] = &[
    "crates/mpmd-models/src/text/tokens",
    "crates/mpmd-serve/src/metrics",
];

/// Modules that may use the engine of chat templates.
const TEMPLATE_USERS: &[&str] = &["crates/mpmd-models/src/text"];

/// Methods of a tokenizer that turn texts into tokens.
const ENCODING: &[&str] = &["encode", "encode_batch", "encode_fast"];

/// Methods of a tokenizer and its decoder that turn tokens into text.
const DECODING: &[&str] = &["decode", "decode_batch", "decode_chain", "decode_stream"];

/// The module that may ask the processor for its instructions.
const WIDTH_FINDERS: &[&str] = &["crates/mpmd-device/src/cpu/width"];

/// Finds Rust files that cannot be split into tokens. No other rule can check these.
fn rust_can_be_read(source: &SourceFile) -> Vec<TidyFinding> {
    let found = source.error.iter();
    found
        .map(|(line, error)| finding(*line, format!("cannot be read as Rust: {error}")))
        .collect()
}

/// Finds lines of Rust with more than 100 columns. Raw strings are exempt.
fn lines_are_short(source: &SourceFile) -> Vec<TidyFinding> {
    if !source.is_rust() {
        return Vec::new();
    }
    let lines = source
        .text
        .lines()
        .map(|line| line.chars().count())
        .enumerate();
    lines
        .filter(|(i, columns)| *columns > MOST_COLUMNS && !source.raw_lines.contains(&(i + 1)))
        .map(|(i, columns)| finding(i + 1, format!("{columns} columns: wrap at {MOST_COLUMNS}")))
        .collect()
}

/// Finds Rust files of more than 1,000 lines.
fn files_are_short(source: &SourceFile) -> Vec<TidyFinding> {
    let lines = source.text.lines().count();
    if !source.is_rust() || lines <= MOST_LINES {
        return Vec::new();
    }
    let message = format!("{lines} lines, more than {MOST_LINES}: split the file");
    vec![finding(MOST_LINES + 1, message)]
}

/// Finds blanks at the end of a line, and files without a newline at the end. Rust is exempt:
/// rustfmt cleans it.
fn text_is_clean(source: &SourceFile) -> Vec<TidyFinding> {
    if source.is_rust() {
        return Vec::new();
    }

    let lines = source.text.split('\n').enumerate();
    let mut findings: Vec<TidyFinding> = lines
        .filter(|(_, line)| line.ends_with([' ', '\t', '\r']))
        .map(|(i, _)| finding(i + 1, "blanks at the end of the line"))
        .collect();

    if !source.text.is_empty() && !source.text.ends_with('\n') {
        findings.push(finding(
            source.text.lines().count(),
            "no newline at the end of the file",
        ));
    }
    findings
}

/// Finds crates that are missing in the map of `ARCHITECTURE.md`, and dependencies on crates that
/// are not below their user in the map. This keeps invariant *transport-knows-bytes*: the transport
/// is below the crates that know arrays, meshes and shapes. Dependencies of tests are exempt.
pub(crate) fn crates_are_below(source: &SourceFile, map: &[&str]) -> Vec<TidyFinding> {
    let row = |name: &str| map.iter().position(|row| *row == name);

    let package = source.path.strip_suffix("/Cargo.toml").map(package_in);
    let package = package.filter(|package| is_ours(package));
    let Some(package) = package else {
        return Vec::new();
    };
    let Some(own) = row(package) else {
        return vec![finding(
            1,
            format!("{package} is not in the map of ARCHITECTURE.md"),
        )];
    };

    let is_wrong = |name: &str| is_ours(name) && row(name).is_none_or(|other| other <= own);
    dependencies(&source.text)
        .into_iter()
        .filter(|(_, name)| is_wrong(name))
        .map(|(line, name)| {
            let message = format!("{package} depends on {name}, which is not below it in the map");
            finding(line, message)
        })
        .collect()
}

/// Returns the name of the package in a folder of the repository.
fn package_in(folder: &str) -> &str {
    folder.strip_prefix("crates/").unwrap_or(folder)
}

/// True for a crate of the framework itself, false for tests and tools.
fn is_ours(name: &str) -> bool {
    name == "mpmd" || name.starts_with("mpmd-") && !name.contains('/')
}

/// Returns the crates in the map of `ARCHITECTURE.md`, from top to bottom.
pub(crate) fn map(architecture: &str) -> Vec<&str> {
    let rows = architecture
        .lines()
        .filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| package_in(row).split_once('/').map(|(name, _)| name));
    let mut map: Vec<&str> = names.filter(|name| is_ours(name)).collect();
    map.dedup();
    map
}

/// True for sources of crates that users depend on or run.
fn is_of_users(source: &SourceFile) -> bool {
    source.path.starts_with("mpmd") || source.path.starts_with("crates/")
}

/// Finds uses of bincode outside of the one module that encodes control messages with it.
fn bincode_in_one_module(source: &SourceFile) -> Vec<TidyFinding> {
    if source.path == "crates/mpmd-proto/src/control.rs" {
        return Vec::new();
    }
    let message = "bincode is for crates/mpmd-proto/src/control.rs only";
    source
        .lines_with("bincode")
        .map(|line| finding(line, message))
        .collect()
}

/// Finds dependencies and paths in the example programs that name other crates than `mpmd`, `clap`
/// and `anyhow`. Dependencies of tests are exempt.
fn examples_use_mpmd_alone(source: &SourceFile) -> Vec<TidyFinding> {
    let is_example = EXAMPLES.iter().any(|place| source.path.starts_with(place));
    if !is_example || source.path.contains("/tests/") {
        return Vec::new();
    }
    let remedy = |name: &str| {
        format!(
            "an example depends on {} alone, not on {name}: let `mpmd` re-export it",
            OF_EXAMPLES.join(", ")
        )
    };

    if source.path.ends_with("/Cargo.toml") {
        let named = dependencies(&source.text).into_iter();
        return named
            .filter(|(_, name)| !OF_EXAMPLES.contains(name))
            .map(|(line, name)| finding(line, remedy(name)))
            .collect();
    }

    let paths = source.outline.paths.iter();
    let is_foreign = |name: &str| {
        let is_inner = name.starts_with("mpmd_") && name != "mpmd_examples";
        is_inner || NOT_OF_EXAMPLES.contains(&name)
    };
    paths
        .filter(|path| is_foreign(&path.segments[0]))
        .map(|path| finding(path.line, remedy(&path.segments[0])))
        .collect()
}

/// Returns (line number, name) of each dependency in a manifest, except those of tests.
fn dependencies(manifest: &str) -> Vec<(usize, &str)> {
    let mut named = Vec::new();
    let mut section = "";
    for (i, line) in manifest.lines().enumerate() {
        // `[dependencies]`, `[target.'cfg(unix)'.dependencies]`, or `[dependencies.name]`.
        let mut key = line;
        if let Some(header) = line.strip_prefix('[') {
            section = header;
            key = header
                .rsplit_once("dependencies.")
                .map_or("", |(_, name)| name);
        }

        let end = key
            .find(|c: char| !c.is_alphanumeric() && !['-', '_'].contains(&c))
            .unwrap_or(key.len());
        let is_used = section.contains("dependencies") && !section.contains("dev-dependencies");
        if is_used && end > 0 {
            named.push((i + 1, &key[..end]));
        }
    }
    named
}

/// Finds uses of a transport outside of core's execution and of the code that connects it
/// (invariant *one-way-in*).
fn one_way_in(source: &SourceFile) -> Vec<TidyFinding> {
    if is_in(source, TRANSPORT_USERS) || !is_of_users(source) {
        return Vec::new();
    }
    let named = names_of(source, TRANSPORTS).into_iter();
    named
        .map(|NamedPath { line, path }| {
            finding(
                line,
                format!("one-way-in: {path} is for exec and program only"),
            )
        })
        .collect()
}

/// Finds names of device kinds in the code of execution (invariant *one-face*).
fn one_face_of_devices(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_in(source, DEVICE_USERS) {
        return Vec::new();
    }
    let named = names_of(source, DEVICE_KINDS).into_iter();
    named
        .map(|NamedPath { line, path }| {
            finding(
                line,
                format!("one-face: names {path}: take it from mpmd_device::accelerator"),
            )
        })
        .collect()
}

/// Finds names of clocks, I/O and threads in the crates that make plans (invariant
/// *planners-are-pure*).
fn planners_are_pure(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_in(source, PLANNERS) {
        return Vec::new();
    }
    let named = names_of(source, IMPURE).into_iter();
    named
        .map(|NamedPath { line, path }| finding(line, format!("planners-are-pure: names {path}")))
        .collect()
}

/// Finds threads, locks, channels and clocks that do not come from `mpmd_base::block`.
fn blocking_in_one_module(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_in(source, SIMULATED) {
        return Vec::new();
    }
    let named = names_of(source, BLOCKING).into_iter();
    let named = named.map(|NamedPath { line, path }| {
        finding(line, format!("names {path}: take it from mpmd_base::block"))
    });

    // A time of a simulated clock must not be compared with the real one.
    let elapsed = source
        .tokens
        .windows(2)
        .filter(|two| two[0].text == "." && two[1].text == "elapsed");
    let elapsed =
        elapsed.map(|two| finding(two[0].line, "calls elapsed: use mpmd_base::block::since"));
    named.chain(elapsed).collect()
}

/// Finds sums of the current time and a variable in the crates of users. Such a sum panics if the
/// variable is `Duration::MAX`. Sums with constants are exempt.
fn deadlines_have_a_limit(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_of_users(source) {
        return Vec::new();
    }

    let text = |at: usize| {
        source
            .tokens
            .get(at)
            .map_or("", |token| token.text.as_str())
    };

    let end = start_of_tests(source);
    let is_sum = |at: &usize| {
        let sum = ["now", "(", ")", "+"];
        let added = text(at + sum.len());
        (0..sum.len()).all(|i| text(at + i) == sum[i])
            && added.starts_with(|first: char| first.is_ascii_lowercase())
    };

    let remedy = "a time of a caller may be `Duration::MAX`: write \
                  `mpmd_base::deadline::after(now(), time)`";
    (0..end)
        .filter(is_sum)
        .map(|at| finding(source.tokens[at].line, remedy))
        .collect()
}

/// Finds programs that lack the option `--version`.
fn version_is_told(source: &SourceFile) -> Vec<TidyFinding> {
    if !source.path.contains("/src/bin/") && !source.path.ends_with("/src/main.rs") {
        return Vec::new();
    }
    let lines: Vec<&str> = source.text.lines().collect();
    let lacks_version = |(_, two): &(usize, &[&str])| {
        let is_parser = two[0].starts_with("#[derive(") && two[0].contains("Parser");
        is_parser && !(two[1].starts_with("#[command(") && two[1].contains("version"))
    };
    let found = lines.windows(2).enumerate().filter(lacks_version);
    let remedy = "no --version: write #[command(name = \"…\", version)] below";
    found.map(|(i, _)| finding(i + 1, remedy)).collect()
}

/// Finds code that turns tokens into text in another way than by `TokenDecoder`, which knows what
/// stands before them.
fn tokens_become_text_in_one_module(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_in(source, TOKENIZER_USERS) || is_in(source, DECODER_USERS) {
        return Vec::new();
    }
    let remedy = "the text of tokens depends on those before: use `TokenDecoder` or `TextStream`";
    calls_of(source, DECODING)
        .map(|line| finding(line, remedy))
        .collect()
}

/// Finds code that asks the processor for its instructions. It would compute with others than the
/// rest of the job.
fn one_width_of_vectors(source: &SourceFile) -> Vec<TidyFinding> {
    if is_in(source, WIDTH_FINDERS) {
        return Vec::new();
    }
    let tokens = &source.tokens[..start_of_tests(source)];
    tokens
        .iter()
        .filter(|token| token.text == "is_x86_feature_detected")
        .map(|token| finding(token.line, "the job decides: use `mpmd_device::cpu::width`"))
        .collect()
}

/// Finds code that turns texts or conversations into tokens in another way than by
/// `PromptEncoder`, which has the limits on templates and keeps users' text apart from tokens.
fn texts_become_tokens_in_one_module(source: &SourceFile) -> Vec<TidyFinding> {
    if !is_in(source, TOKENIZER_USERS) {
        return Vec::new();
    }
    let remedy = "texts and conversations become tokens by `PromptEncoder` alone";
    let mut found = Vec::new();
    if !is_in(source, ENCODER_USERS) {
        found.extend(calls_of(source, ENCODING));
    }
    if !is_in(source, TEMPLATE_USERS) {
        let named = names_of(source, &["minijinja", "minijinja_contrib"]);
        found.extend(named.into_iter().map(|named| named.line));
    }
    found
        .into_iter()
        .map(|line| finding(line, remedy))
        .collect()
}

/// Returns the lines with calls of one of these methods, unit tests excepted.
fn calls_of(source: &SourceFile, methods: &[&str]) -> impl Iterator<Item = usize> {
    let text = |at: usize| source.tokens.get(at).map_or("", |token| &token.text);
    let is_call = move |at: usize| text(at) == "." && text(at + 2) == "(";
    (0..start_of_tests(source))
        .filter(move |at| is_call(*at) && methods.contains(&text(at + 1)))
        .map(|at| source.tokens[at + 1].line)
}

/// Returns the place of the first token of a file's unit tests, or the number of all tokens.
fn start_of_tests(source: &SourceFile) -> usize {
    let is_tests = |two: &[SourceToken]| two[0].text == "mod" && two[1].text == "tests";
    let start = source.tokens.windows(2).position(is_tests);
    start.unwrap_or(source.tokens.len())
}

fn is_in(source: &SourceFile, places: &[&str]) -> bool {
    places.iter().any(|place| source.is_in_module(place))
}

/// A path in a source file that leads to one of the searched paths.
struct NamedPath {
    line: usize,
    path: String,
}

/// Returns the paths in the code that lead to one of `places`, or to something inside it. Follows
/// the names that imports define. An import of everything from a parent of a place counts.
fn names_of(source: &SourceFile, places: &[&str]) -> Vec<NamedPath> {
    let leads_there = |path: &str| {
        places.iter().any(|place| {
            let is_below = path
                .strip_prefix(place)
                .is_some_and(|rest| rest.starts_with("::"));
            let is_around = path
                .strip_suffix('*')
                .is_some_and(|path| place.starts_with(path));
            path == *place || is_below || is_around
        })
    };

    let paths = &source.outline.paths;
    let aliases: BTreeMap<&str, String> = paths
        .iter()
        .filter_map(|path| Some((path.alias.as_deref()?, path.segments.join("::"))))
        .filter(|(_, import)| !leads_there(import))
        .collect();

    let mut found = Vec::new();
    for path in paths {
        let first = path.segments[0].as_str();
        let rest = path.segments[1..].join("::");
        let whole = path.segments.join("::");

        let followed = aliases.get(first).map(|import| format!("{import}::{rest}"));
        if let Some(named) = [Some(whole), followed]
            .into_iter()
            .flatten()
            .find(|p| leads_there(p))
        {
            found.push(NamedPath {
                line: path.line,
                path: named,
            });
        }
    }
    found
}

fn finding(line: usize, message: impl Into<String>) -> TidyFinding {
    TidyFinding {
        line,
        message: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers of the lines that break `rule` in a file with this path and text.
    fn broken(rule: TidyRule, path: &str, text: &str) -> Vec<usize> {
        rule(&SourceFile::new(path, text))
            .into_iter()
            .map(|finding| finding.line)
            .collect()
    }

    const NONE: [usize; 0] = [];

    #[test]
    fn places_of_rules_exist() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .unwrap();
        let of_tokens = [
            TOKENIZER_USERS,
            DECODER_USERS,
            ENCODER_USERS,
            TEMPLATE_USERS,
        ];
        for place in [PLANNERS, SIMULATED]
            .iter()
            .chain(&of_tokens)
            .copied()
            .flatten()
        {
            let path = root.join(place);
            assert!(
                path.is_dir() || path.with_extension("rs").is_file(),
                "{place}"
            );
        }
    }

    #[test]
    fn files_that_are_not_rust_are_found() {
        assert_eq!(broken(rust_can_be_read, "a.rs", "\nfn f( {}"), [2]);
        assert_eq!(broken(rust_can_be_read, "a.rs", "fn f() {}"), NONE);
    }

    #[test]
    fn long_lines_are_found() {
        let check = |path, text: &str| broken(lines_are_short, path, text);
        let fits = format!("// {}\n", "ö".repeat(97));
        assert_eq!(check("a.rs", &fits), NONE);
        assert_eq!(
            check("a.rs", &format!("\n{}", fits.replacen('ö', "öö", 1))),
            [2]
        );
        assert_eq!(check("a.md", &"x".repeat(101)), NONE);
        let long = format!("\n\"{}\";", "x".repeat(100));
        assert_eq!(check("a.rs", &long), [2]);
        assert_eq!(check("a.rs", &format!("r#\"{long}\"#")), NONE);
    }

    #[test]
    fn long_files_are_found() {
        let check = |path, lines| broken(files_are_short, path, &"x\n".repeat(lines));
        assert_eq!(check("a.rs", MOST_LINES + 1), [MOST_LINES + 1]);
        assert_eq!(check("a.rs", MOST_LINES), NONE);
        assert_eq!(check("a.md", MOST_LINES + 1), NONE);
    }

    #[test]
    fn unclean_text_is_found() {
        assert_eq!(broken(text_is_clean, "a.md", "a\n\tc\nd  \nb\r\n"), [3, 4]);
        assert_eq!(broken(text_is_clean, "a.toml", "a\nb"), [2]);
        assert_eq!(broken(text_is_clean, "a.toml", ""), NONE);
        assert_eq!(broken(text_is_clean, "a.rs", "a \nb"), NONE);
    }

    #[test]
    fn dependencies_that_are_not_below_are_found() {
        let architecture = "| folder | job |\n|---|---|\n| `crates/mpmd-cli/` | commands |\n\
            | `mpmd-core/src/a/` | a |\n| `mpmd-core/src/b/` | b |\n\
            | `crates/mpmd-layout/` | plans |\n| `tests/` | tests of `mpmd/` |\n";
        let map = map(architecture);
        assert_eq!(map, ["mpmd-cli", "mpmd-core", "mpmd-layout"]);
        let check = |package: &str, text| {
            let source = SourceFile::new(format!("{package}/Cargo.toml"), text);
            let findings = crates_are_below(&source, &map).into_iter();
            findings.map(|finding| finding.line).collect::<Vec<_>>()
        };
        let text = "[package]\nname = \"mpmd-x\"\n[dependencies]\nmpmd-layout.workspace = true\n\
            mpmd = { path = \"..\" }\n[target.'cfg(unix)'.dependencies.mpmd-core]\n\
            path = \"..\"\n[dev-dependencies]\nmpmd-cli.workspace = true\n\
            [build-dependencies]\nmpmd-new.workspace = true\n";
        assert_eq!(check("crates/mpmd-layout", text), [4, 5, 6, 11]);
        assert_eq!(check("mpmd-core", text), [5, 6, 11]);
        assert_eq!(check("crates/mpmd-cli", text), [5, 11]);
        assert_eq!(check("crates/mpmd-new", text), [1]);
        assert_eq!(check("tests", text), NONE);
        assert_eq!(check("tests/fuzz", text), NONE);
    }

    #[test]
    fn bincode_elsewhere_is_found() {
        let check = |path| {
            broken(
                bincode_in_one_module,
                path,
                "// bincode\nuse bincode::config;",
            )
        };
        assert_eq!(check("crates/mpmd-proto/src/wire.rs"), [2]);
        assert_eq!(check("mpmd-core/src/exec/array.rs"), [2]);
        assert_eq!(check("crates/mpmd-proto/src/control.rs"), NONE);
    }

    #[test]
    fn example_that_uses_an_inner_crate_is_found() {
        let check = |path, text| broken(examples_use_mpmd_alone, path, text);
        let manifest = "[dependencies]\n# A comment.\nanyhow.workspace = true\n\
            mpmd = { path = \"..\" }\nmpmd-core.workspace = true\nserde_json = \"1\"\n\
            [dev-dependencies]\ntempfile.workspace = true\n";
        assert_eq!(check("mpmd-examples/Cargo.toml", manifest), [5, 6]);
        assert_eq!(check("crates/mpmd-programs/Cargo.toml", manifest), NONE);

        let program = "use mpmd::prelude::*;\nuse mpmd_core::Program;\nuse mpmd_examples::layout;\n\
            fn f() { mpmd_base::parse_bytes(serde_json::from_str(t)) }\nuse std::fmt;\n";
        for path in ["mpmd-examples/src/bin/a.rs", "mpmd/examples/a.rs"] {
            assert_eq!(check(path, program), [2, 4, 4], "{path}");
        }
        for path in ["mpmd-examples/tests/all/a.rs", "mpmd/src/lib.rs"] {
            assert_eq!(check(path, program), NONE, "{path}");
        }
    }

    #[test]
    fn other_ways_into_a_transport_are_found() {
        let bad = "use mpmd_transport::{Pool, Transport};\n\
            fn f() { mpmd_transport::tcp::connect() }\n\
            use mpmd_transport::*;\nuse mpmd_proto as p;\nfn g() -> p::router::Router {}";
        let check = |path| broken(one_way_in, path, bad);
        assert_eq!(check("mpmd-core/src/api/device_put.rs"), [1, 2, 3, 5]);
        assert_eq!(check("mpmd-examples/src/bin/basic.rs"), [1, 2, 3, 5]);
        assert_eq!(check("crates/mpmd-bench/src/links.rs"), [1, 2, 3, 5]);
        for path in [
            "mpmd-core/src/exec/mod.rs",
            "mpmd-core/src/api/program.rs",
            "tests/src/lib.rs",
        ] {
            assert_eq!(check(path), NONE, "{path}");
        }
        let good = "use mpmd_memory::Pool;\nuse mpmd_proto::router::Failure;";
        assert_eq!(
            broken(one_way_in, "mpmd-core/src/api/jit/call.rs", good),
            NONE
        );
    }

    #[test]
    fn kinds_of_devices_in_execution_are_found() {
        let bad = "use mpmd_device::cuda::Gpu;\nfn f() { mpmd_device::cuda::sharing(x) }\n\
            use mpmd_layout::topology::DeviceKind;\nfn g() -> bool { k == DeviceKind::Cuda }";
        let check = |path| broken(one_face_of_devices, path, bad);
        assert_eq!(check("mpmd-core/src/exec/moves/reach.rs"), [1, 2, 4]);
        assert_eq!(check("mpmd-core/src/kernel/context.rs"), NONE);
        let good = "use mpmd_device::accelerator::Accelerator;\nfn f(k: DeviceKind) {}";
        assert_eq!(
            broken(one_face_of_devices, "mpmd-core/src/exec/mod.rs", good),
            NONE
        );
    }

    #[test]
    fn impure_planners_are_found() {
        let bad = "use std::time::Instant;\nuse std::{collections::BTreeMap, fs};\n\
            fn f() { std::thread::spawn(f) }";
        let check = |path| broken(planners_are_pure, path, bad);
        assert_eq!(check("crates/mpmd-layout/src/reshard/plan.rs"), [1, 2, 3]);
        assert_eq!(check("crates/mpmd-schedule/src/text.rs"), [1, 2, 3]);
        assert_eq!(check("mpmd-core/src/pipeline/run.rs"), NONE);
        let good = "use std::{fmt, sync::Arc};\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}";
        assert_eq!(
            broken(
                planners_are_pure,
                "crates/mpmd-layout/src/reshard/plan.rs",
                good
            ),
            NONE
        );
    }

    #[test]
    fn question_to_the_processor_is_found() {
        let text = "fn f() -> bool {\n is_x86_feature_detected!(\"avx2\")\n}";
        let check = |path| broken(one_width_of_vectors, path, text);
        assert_eq!(check("crates/mpmd-device/src/cpu/packed.rs"), [2]);
        assert_eq!(check("crates/mpmd-device/src/cpu/width.rs"), NONE);
    }

    #[test]
    fn sum_of_now_and_a_variable_is_found() {
        let text = "fn f() {\n let a = now() + timeout;\n let b = Instant::now() + self.longest;\n \
                    let c = now() + LIMIT + 2 * LIMIT;\n let d = after(now(), timeout);\n}\n\
                    #[cfg(test)]\nmod tests { fn f() { now() + timeout } }";
        assert_eq!(
            broken(deadlines_have_a_limit, "mpmd-core/src/a.rs", text),
            [2, 3]
        );
    }

    #[test]
    fn second_way_from_tokens_to_text_is_found() {
        let text = "fn f() {\n tokenizer.decode(&[1], true);\n self.all\n.decode_stream(true);\
                    \n decode(x);\n}\nmod tests { fn f() { tokenizer.decode(&[1], true) } }";
        let check = |path| broken(tokens_become_text_in_one_module, path, text);
        assert_eq!(check("crates/mpmd-serve/src/model.rs"), [2, 4]);
        assert_eq!(check("crates/mpmd-models/src/text/stream.rs"), [2, 4]);
        assert_eq!(check("crates/mpmd-models/src/text/token_decoder.rs"), NONE);
        assert_eq!(check("mpmd-transport/src/tcp/read.rs"), NONE);
    }

    #[test]
    fn second_way_from_texts_to_tokens_is_found() {
        let text = "use minijinja::Value;\nfn f() {\n tokenizer.encode(text, true);\n}\n\
                    mod tests { fn f() { tokenizer.encode(text, true) } }";
        let check = |path| broken(texts_become_tokens_in_one_module, path, text);
        assert_eq!(check("crates/mpmd-serve/src/model.rs"), [3, 1]);
        assert_eq!(check("crates/mpmd-models/src/text/examples.rs"), [3]);
        assert_eq!(check("crates/mpmd-models/src/text/tokens.rs"), NONE);
        assert_eq!(check("crates/mpmd-train/src/data/mod.rs"), NONE);
    }

    #[test]
    fn program_without_version_is_found() {
        let check = |path, text| broken(version_is_told, path, text);
        let bad =
            "use clap::Parser;\n#[derive(Debug, Parser)]\n#[command(name = \"a\")]\nstruct A;";
        assert_eq!(check("mpmd-x/src/bin/a.rs", bad), [2]);
        assert_eq!(check("mpmd-x/src/main.rs", bad), [2]);
        assert_eq!(check("mpmd-x/src/lib.rs", bad), NONE);
        let good = bad.replace("\"a\"", "\"a\", version");
        assert_eq!(check("mpmd-x/src/main.rs", &good), NONE);
    }

    #[test]
    fn blocking_in_other_ways_is_found() {
        let bad = "use std::{thread, sync::{Arc, Mutex}};\nuse parking_lot::Condvar;\n\
            fn f() { thread::sleep(d) }\nuse std::sync::*;\nuse std as s;\n\
            fn g(m: Mutex<u8>) -> s::time::Instant { Mutex::new(1) }\n\
            use mpmd_base::block::Instant;\nfn h() { Instant::now() }\nfn i(t: T) { t.elapsed() }";
        let check = |path| broken(blocking_in_one_module, path, bad);
        assert_eq!(check("mpmd-core/src/exec/mod.rs"), [1, 2, 3, 4, 6, 8, 9]);
        assert_eq!(
            check("crates/mpmd-proto/src/router/peer.rs"),
            [1, 2, 3, 4, 6, 8, 9]
        );
        assert_eq!(
            check("crates/mpmd-rendezvous/src/job.rs"),
            [1, 2, 3, 4, 6, 8, 9]
        );
        assert_eq!(check("crates/mpmd-rendezvous/src/server.rs"), NONE);
        assert_eq!(check("crates/mpmd-base/src/block.rs"), NONE);
        let good = "use mpmd_base::block::{Instant, Mutex};\nuse std::sync::{Arc, OnceLock};\n\
            use std::time::Duration;\nfn f() -> Instant { mpmd_base::block::now() }\n\
            fn g() { std::thread::panicking() }\n#[cfg(test)]\nmod tests { use std::thread; }";
        assert_eq!(
            broken(blocking_in_one_module, "mpmd-core/src/exec/mod.rs", good),
            NONE
        );
    }
}
