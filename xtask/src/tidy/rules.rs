//! The rules on single files. Each finding names the line that breaks a rule and gives a remedy.

use super::source::{Source, line_of, taken_from, words};

/// A line that breaks a rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Finding {
    /// Line number, from one.
    pub(crate) line: usize,
    /// The problem, for people.
    pub(crate) what: String,
}

/// All rules.
pub(crate) const RULES: &[fn(&Source) -> Vec<Finding>] = &[
    nothing_unfinished,
    ignored_tests_say_why,
    lines_are_clean,
    ends_with_a_newline,
    files_stay_short,
    unsafe_stays_below,
    transport_knows_bytes,
    one_way_in,
    planners_are_pure,
    bincode_in_one_module,
];

const MOST_LINES: usize = 1000;

/// Finds `dbg!` and macros for unwritten code, which only panic.
fn nothing_unfinished(source: &Source) -> Vec<Finding> {
    let code = &source.code;
    words(code)
        .filter(|(at, word)| {
            let is_macro = code[at + word.len()..].starts_with('!')
                && !code[at + word.len()..].starts_with("!=");
            is_macro && ["dbg", "todo", "unimplemented"].contains(word)
        })
        .map(|(at, word)| finding(code, at, format!("{word}! is for code that is not done")))
        .collect()
}

/// Finds ignored tests without a reason.
fn ignored_tests_say_why(source: &Source) -> Vec<Finding> {
    let code = &source.code;
    words(code)
        .filter(|(at, word)| {
            let line_start = code[..*at].rfind('\n').map_or(0, |newline| newline + 1);
            let next = code[at + word.len()..].trim_start();
            *word == "ignore"
                && code[line_start..*at].contains("#[")
                && next.starts_with([']', ')'])
        })
        .map(|(at, _)| {
            finding(code, at, "an ignored test needs a reason: #[ignore = \"…\"]".to_owned())
        })
        .collect()
}

/// Finds blanks at the end of a line, and tabs in Rust files.
fn lines_are_clean(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (i, line) in source.text.split('\n').enumerate() {
        if line.ends_with([' ', '\t', '\r']) {
            findings
                .push(Finding { line: i + 1, what: "blanks at the end of the line".to_owned() });
        }
        if source.is_rust() && line.contains('\t') {
            findings.push(Finding { line: i + 1, what: "a tab".to_owned() });
        }
    }
    findings
}

/// Finds files without a newline at the end.
fn ends_with_a_newline(source: &Source) -> Vec<Finding> {
    let ends = source.text.is_empty() || source.text.ends_with('\n');
    let line = source.text.lines().count();
    if ends {
        Vec::new()
    } else {
        vec![Finding { line, what: "no newline at the end of the file".to_owned() }]
    }
}

/// Finds Rust files of more than 1,000 lines.
fn files_stay_short(source: &Source) -> Vec<Finding> {
    let lines = source.text.lines().count();
    if !source.is_rust() || lines <= MOST_LINES {
        return Vec::new();
    }
    vec![Finding {
        line: MOST_LINES + 1,
        what: format!("{lines} lines, more than {MOST_LINES}: split the file"),
    }]
}

/// Finds `unsafe` outside the code that touches foreign memory: the transport, the back ends, and
/// the software replacements of their drivers.
fn unsafe_stays_below(source: &Source) -> Vec<Finding> {
    let below =
        ["mpmd-transport/", "tests/softcuda/"].iter().any(|folder| source.path.starts_with(folder));
    if below || source.is_in_module("mpmd-core/src/backend") {
        return Vec::new();
    }
    words(&source.code)
        .filter(|(_, word)| *word == "unsafe")
        .map(|(at, _)| {
            let what = "unsafe is for mpmd-transport and mpmd-core/src/backend only";
            finding(&source.code, at, what.to_owned())
        })
        .collect()
}

/// Invariant *transport-knows-bytes*: the transport never names arrays, meshes or shapes.
fn transport_knows_bytes(source: &Source) -> Vec<Finding> {
    if source.path == "mpmd-transport/Cargo.toml" {
        let found = source.text.match_indices("mpmd-core");
        return found
            .map(|(at, _)| finding(&source.text, at, "depends on mpmd-core".to_owned()))
            .collect();
    }
    if !source.path.starts_with("mpmd-transport/") {
        return Vec::new();
    }
    words(&source.code)
        .filter(|(_, word)| ["mpmd_core", "Mesh", "Sharding", "ShapedArray"].contains(word))
        .map(|(at, word)| finding(&source.code, at, format!("transport-knows-bytes: names {word}")))
        .collect()
}

/// Invariant *one-way-in*: only the runtime talks to a transport, and the program sets it up. Two
/// benchmarks are exempt: one measures a transport by itself, and the other, of issuing, has a
/// transport of its own.
fn one_way_in(source: &Source) -> Vec<Finding> {
    let crates = ["mpmd-core/", "mpmd-bench/", "mpmd-cli/", "mpmd-derive/", "mpmd-examples/"];
    let inside = [
        "mpmd-core/src/runtime",
        "mpmd-core/src/program",
        "mpmd-bench/src/p2p",
        "mpmd-bench/src/issue",
    ];
    if !crates.iter().any(|c| source.path.starts_with(c))
        || inside.iter().any(|m| source.is_in_module(m))
    {
        return Vec::new();
    }
    let kept = ["Transport", "Router", "router", "tcp", "inproc", "transport", "*", "as"];
    taken_from(&source.code, "mpmd_transport")
        .into_iter()
        .filter(|(_, taken)| kept.contains(taken))
        .map(|(at, taken)| {
            let what = format!(
                "one-way-in: takes {taken} from mpmd_transport; only runtime and program may"
            );
            finding(&source.code, at, what)
        })
        .collect()
}

/// Invariant *planners-are-pure*: no clock, no I/O and no threads in code that makes plans. Unit
/// tests are exempt.
fn planners_are_pure(source: &Source) -> Vec<Finding> {
    let planners = ["mpmd-core/src/sharding", "mpmd-core/src/reshard", "mpmd-core/src/pipeline"];
    if !planners.iter().any(|m| source.is_in_module(m))
        || source.is_in_module("mpmd-core/src/pipeline/run")
    {
        return Vec::new();
    }
    let code = source.code_without_tests();
    let impure = ["time", "thread", "net", "fs", "env", "process", "*", "as"];
    taken_from(code, "std")
        .into_iter()
        .filter(|(_, taken)| impure.contains(taken))
        .map(|(at, taken)| finding(code, at, format!("planners-are-pure: takes {taken} from std")))
        .collect()
}

/// Finds uses of bincode outside its one module. It encodes control messages only.
fn bincode_in_one_module(source: &Source) -> Vec<Finding> {
    if source.path == "mpmd-transport/src/control.rs" {
        return Vec::new();
    }
    words(&source.code)
        .filter(|(_, word)| *word == "bincode")
        .map(|(at, _)| {
            finding(
                &source.code,
                at,
                "bincode is for mpmd-transport/src/control.rs only".to_owned(),
            )
        })
        .collect()
}

fn finding(text: &str, at: usize, what: String) -> Finding {
    Finding { line: line_of(text, at), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of `text`, at `path`, that break `rule`.
    fn broken(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text)).into_iter().map(|finding| finding.line).collect()
    }

    const NONE: [usize; 0] = [];

    #[test]
    fn unfinished_code_is_found() {
        let check = |text| broken(nothing_unfinished, "a.rs", text);
        assert_eq!(
            check("fn f() {\n    dbg!(1);\n    todo!()\n}\nfn g() { unimplemented!(\"x\") }"),
            [2, 3, 5]
        );
        assert_eq!(
            check("// todo!\nlet s = \"dbg!(x)\"; my_todo!(); todo(); if todo != 1 {}"),
            NONE
        );
    }

    #[test]
    fn ignored_tests_without_a_reason_are_found() {
        let check = |text| broken(ignored_tests_say_why, "a.rs", text);
        assert_eq!(
            check("#[test]\n#[ignore]\nfn f() {}\n#[cfg_attr(miri, ignore)]\nfn g() {}"),
            [2, 4]
        );
        assert_eq!(
            check("#[test]\n#[ignore = \"needs a GPU\"]\nfn f() { ignore(); (ignore) }"),
            NONE
        );
    }

    #[test]
    fn unclean_lines_are_found() {
        assert_eq!(broken(lines_are_clean, "a.rs", "a \nb\n\tc\nd\r\n"), [1, 3, 4]);
        assert_eq!(broken(lines_are_clean, "a.md", "a\n\tc\nd  \n"), [3]);
        assert_eq!(broken(lines_are_clean, "a.rs", "a\n    b\n\nc\n"), NONE);
    }

    #[test]
    fn an_open_last_line_is_found() {
        assert_eq!(broken(ends_with_a_newline, "a.rs", "a\nb"), [2]);
        assert_eq!(broken(ends_with_a_newline, "a.rs", "a\nb\n"), NONE);
        assert_eq!(broken(ends_with_a_newline, "a.rs", ""), NONE);
    }

    #[test]
    fn long_files_are_found() {
        assert_eq!(
            broken(files_stay_short, "a.rs", &"x\n".repeat(MOST_LINES + 1)),
            [MOST_LINES + 1]
        );
        assert_eq!(broken(files_stay_short, "a.rs", &"x\n".repeat(MOST_LINES)), NONE);
        assert_eq!(broken(files_stay_short, "a.md", &"x\n".repeat(MOST_LINES + 1)), NONE);
    }

    #[test]
    fn unsafe_code_in_the_wrong_place_is_found() {
        let check = |path| broken(unsafe_stays_below, path, "\n// unsafe\nunsafe { f() }\n");
        assert_eq!(check("mpmd-core/src/array.rs"), [3]);
        assert_eq!(check("tests/src/lib.rs"), [3]);
        assert_eq!(check("mpmd-core/src/backend/cpu/matmul.rs"), NONE);
        assert_eq!(check("mpmd-transport/src/memory/pool.rs"), NONE);
        assert_eq!(broken(unsafe_stays_below, "a.rs", "#![forbid(unsafe_code)] // unsafe"), NONE);
    }

    #[test]
    fn a_transport_that_knows_arrays_is_found() {
        let check = |text| broken(transport_knows_bytes, "mpmd-transport/src/a.rs", text);
        assert_eq!(
            check("use mpmd_core::x;\nfn f(m: &Mesh) {}\nfn g(s: Sharding, a: ShapedArray) {}"),
            [1, 2, 3, 3]
        );
        assert_eq!(check("//! Never hears of a Mesh.\nstruct Meshes; let x = \"Sharding\";"), NONE);
        assert_eq!(broken(transport_knows_bytes, "mpmd-core/src/a.rs", "struct Mesh;"), NONE);
        let manifest = |text| broken(transport_knows_bytes, "mpmd-transport/Cargo.toml", text);
        assert_eq!(manifest("[dependencies]\nmpmd-core.workspace = true"), [2]);
        assert_eq!(manifest("[dependencies]\ntokio.workspace = true"), NONE);
    }

    #[test]
    fn other_ways_into_a_transport_are_found() {
        let bad = "use mpmd_transport::{ProcessId, Transport};\nlet t = \
            mpmd_transport::tcp::connect();\n\
                   use mpmd_transport::*;\nuse mpmd_transport as t;";
        let check = |path, text| broken(one_way_in, path, text);
        assert_eq!(check("mpmd-core/src/device_put.rs", bad), [1, 2, 3, 4]);
        assert_eq!(check("mpmd-examples/src/bin/basic.rs", bad), [1, 2, 3, 4]);
        assert_eq!(check("mpmd-bench/src/links.rs", bad), [1, 2, 3, 4]);
        let inside = [
            "mpmd-core/src/runtime/mod.rs",
            "mpmd-core/src/program.rs",
            "mpmd-bench/src/p2p/ends.rs",
        ];
        for path in inside.into_iter().chain(["tests/src/lib.rs"]) {
            assert_eq!(check(path, bad), NONE, "{path}");
        }
        let good =
            "use mpmd_transport::memory::Pool;\nuse mpmd_transport::{ProcessId, TransportError};";
        assert_eq!(check("mpmd-core/src/array.rs", good), NONE);
    }

    #[test]
    fn impure_planners_are_found() {
        let bad = "use std::time::Instant;\nuse std::{collections::BTreeMap, fs};\nlet t = \
            std::thread::spawn(f);";
        let check = |path, text| broken(planners_are_pure, path, text);
        assert_eq!(check("mpmd-core/src/reshard/plan.rs", bad), [1, 2, 3]);
        assert_eq!(check("mpmd-core/src/sharding.rs", bad), [1, 2, 3]);
        assert_eq!(check("mpmd-core/src/pipeline/text.rs", bad), [1, 2, 3]);
        assert_eq!(check("mpmd-core/src/pipeline/run.rs", bad), NONE);
        assert_eq!(check("mpmd-core/src/runtime/mod.rs", bad), NONE);
        let good = "use std::{fmt, sync::Arc};\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}";
        assert_eq!(check("mpmd-core/src/reshard/plan.rs", good), NONE);
    }

    #[test]
    fn bincode_elsewhere_is_found() {
        let check = |path| broken(bincode_in_one_module, path, "// bincode\nuse bincode::config;");
        assert_eq!(check("mpmd-transport/src/wire.rs"), [2]);
        assert_eq!(check("mpmd-core/src/array.rs"), [2]);
        assert_eq!(check("mpmd-transport/src/control.rs"), NONE);
    }
}
