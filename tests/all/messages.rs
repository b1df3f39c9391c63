//! The messages of mistakes, each with its exit code.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use mpmd_tests::{bare_command, package_program};

/// A mistake: the program, its arguments, the exit code, and parts of its message.
type Mistake = (
    Program,
    &'static [&'static str],
    i32,
    &'static [&'static str],
);

/// (package, program)
type Program = (&'static str, &'static str);

const MPMD: Program = ("mpmd-cli", "mpmd");
const TRAIN_GPT: Program = ("mpmd-examples", "train_gpt");
const PIPELINE: Program = ("mpmd-examples", "pipeline");

/// Files in the arguments lie in the folder that [`inputs`] fills.
const MISTAKES: [Mistake; 17] = [
    (
        MPMD,
        &["top", "4194303"],
        1,
        &[
            "no process 4194303 runs on this machine",
            "or nothing if it is the only one",
        ],
    ),
    (
        MPMD,
        &["schedule", "costs.toml"],
        2,
        &["is TOML, and no text of a schedule", "such as 0F0,0B0"],
    ),
    (
        MPMD,
        &["schedule", "1f1b"],
        2,
        &["needs --ranks and --microbatches"],
    ),
    (
        MPMD,
        &["run", "-n", "2", "--", "/etc/passwd"],
        126,
        &["/etc/passwd is no program: it may not be executed"],
    ),
    (
        MPMD,
        &["run", "-n", "2", "--", "/bin/true"],
        0,
        &[
            "no process has joined the job",
            "has ended before `Program::run`",
        ],
    ),
    (MPMD, &["trace", "."], 1, &["has no file process-<n>.trace"]),
    (
        MPMD,
        &["run", "-n", "2", "--peer-timeout", "0", "--", "/bin/true"],
        2,
        &["'--peer-timeout <SECONDS>': it must be above 0"],
    ),
    (
        TRAIN_GPT,
        &[
            "--stages",
            "2",
            "--processes",
            "2",
            "--steps",
            "1",
            "--save",
            "/proc",
            "text",
        ],
        1,
        &[
            "all 2 processes failed",
            "/proc: no file can be created there",
        ],
    ),
    (
        TRAIN_GPT,
        &["--stages", "9", "--processes", "4"],
        2,
        &["9 devices cannot be spread evenly over 4 processes; --processes may be 1, 3, 9"],
    ),
    (
        TRAIN_GPT,
        &["--stages", "1", "--schedule", "interleaved"],
        1,
        &["schedule interleaved has 2 stages on each rank: give a multiple of 2, not 1"],
    ),
    (
        TRAIN_GPT,
        &["--steps", "1", "links"],
        1,
        &[
            "no text",
            "its links (1) are skipped: name the files that they lead to",
        ],
    ),
    (
        TRAIN_GPT,
        &["--steps", "1", "nul"],
        1,
        &["is not text: byte 1 is a NUL"],
    ),
    (
        TRAIN_GPT,
        &["--steps", "1", "/dev/stdin"],
        1,
        &["cannot read /dev/stdin: it is no regular file"],
    ),
    (
        TRAIN_GPT,
        &["--steps", "1", "missing"],
        1,
        &["missing", "No such file or directory"],
    ),
    (
        TRAIN_GPT,
        &["--schedule", "zpv"],
        1,
        &["\"zpv\" is neither built in", "nor a file that can be read"],
    ),
    (
        PIPELINE,
        &["--processes", "3"],
        2,
        &[
            "8 devices cannot be spread evenly over 3 processes",
            "--processes may be 1, 2, 4, 8",
        ],
    ),
    (
        PIPELINE,
        &["--device", "gpu"],
        2,
        &["invalid value 'gpu'", "it must be cpu or cuda"],
    ),
];

/// Makes the files of [`MISTAKES`].
fn inputs(folder: &Path) {
    fs::write(folder.join("costs.toml"), "forward = 1\n").expect("a file");
    fs::write(folder.join("text"), "some text\n".repeat(1000)).expect("a file");
    fs::write(folder.join("nul"), b"a\0b").expect("a file");
    fs::create_dir(folder.join("links")).expect("a folder");
    symlink(folder.join("costs.toml"), folder.join("links/one")).expect("a link");
}

#[test]
fn every_mistake_is_told_in_one_message() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    inputs(folder.path());
    for ((package, name), arguments, code, said) in MISTAKES {
        let mut command = bare_command(package_program(package, name));
        command.current_dir(folder.path()).args(arguments);
        let output = command.output().expect("the program is there");
        let errors = String::from_utf8_lossy(&output.stderr);
        let case = format!("{name} {}: {errors}", arguments.join(" "));
        assert_eq!(output.status.code(), Some(code), "{case}");
        for said in said {
            assert_eq!(errors.matches(said).count(), 1, "{said:?} of {case}");
        }
        assert!(!errors.contains("panicked"), "{case}");
    }
}
