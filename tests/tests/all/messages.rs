//! The messages of mistakes, each with its exit code.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use mpmd_tests::{bare_command, package_program};

/// A mistake: the program, its arguments, the exit code, and the end of what it says.
struct Mistake {
    program: (&'static str, &'static str),
    arguments: &'static [&'static str],
    code: i32,
    said: &'static [&'static str],
}

const MPMD: (&str, &str) = ("mpmd-cli", "mpmd");
const TRAIN_GPT: (&str, &str) = ("mpmd-examples", "train_gpt");
const PIPELINE: (&str, &str) = ("mpmd-examples", "pipeline");

/// Files in the arguments lie in the folder that [`inputs`] fills.
const MISTAKES: [Mistake; 16] = [
    Mistake {
        program: MPMD,
        arguments: &["top", "4194303"],
        code: 1,
        said: &["no process 4194303 runs on this machine", "or nothing if it is the only one"],
    },
    Mistake {
        program: MPMD,
        arguments: &["schedule", "costs.toml"],
        code: 2,
        said: &["is TOML, and no text of a schedule", "such as 0F0,0B0"],
    },
    Mistake { program: MPMD, arguments: &["schedule", "1f1b"], code: 2, said: &["--ranks"] },
    Mistake {
        program: MPMD,
        arguments: &["run", "-n", "2", "--", "/etc/passwd"],
        code: 126,
        said: &["/etc/passwd is no program: it may not be executed"],
    },
    Mistake {
        program: MPMD,
        arguments: &["run", "-n", "2", "--", "/bin/true"],
        code: 0,
        said: &["no process has joined the job", "has ended before `Program::run`"],
    },
    Mistake {
        program: MPMD,
        arguments: &["run", "-n", "2", "--peer-timeout", "0", "--", "/bin/true"],
        code: 2,
        said: &["--peer-timeout"],
    },
    Mistake {
        program: MPMD,
        arguments: &["trace", "."],
        code: 1,
        said: &["has no file process-<n>.trace"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--stages", "9", "--processes", "4"],
        code: 2,
        said: &["9 devices cannot be spread evenly over 4 processes; --processes may be 1, 3, 9"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--stages", "1", "--schedule", "interleaved"],
        code: 1,
        said: &["schedule interleaved has 2 stages on each rank: give a multiple of 2, not 1"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--steps", "1", "links"],
        code: 1,
        said: &["no text", "its links (1) are skipped: name the files that they lead to"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--steps", "1", "nul"],
        code: 1,
        said: &["is not text: byte 1 is a NUL"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--steps", "1", "/dev/stdin"],
        code: 1,
        said: &["cannot read /dev/stdin: it is no regular file"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--steps", "1", "missing"],
        code: 1,
        said: &["missing", "No such file or directory"],
    },
    Mistake {
        program: TRAIN_GPT,
        arguments: &["--schedule", "zpv"],
        code: 1,
        said: &["\"zpv\" is neither built in", "nor a file that can be read"],
    },
    Mistake {
        program: PIPELINE,
        arguments: &["--processes", "3"],
        code: 2,
        said: &[
            "8 devices cannot be spread evenly over 3 processes; --processes may be 1, 2, 4, 8",
        ],
    },
    Mistake {
        program: PIPELINE,
        arguments: &["--device", "gpu"],
        code: 2,
        said: &["invalid value 'gpu'", "it must be cpu or cuda"],
    },
];

/// Makes the files of [`MISTAKES`].
fn inputs(folder: &Path) {
    fs::write(folder.join("costs.toml"), "forward = 1\n").expect("a file");
    fs::write(folder.join("nul"), b"a\0b").expect("a file");
    fs::create_dir(folder.join("links")).expect("a folder");
    symlink(folder.join("costs.toml"), folder.join("links/one")).expect("a link");
}

#[test]
fn every_mistake_is_told_in_one_message() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    inputs(folder.path());
    for Mistake { program: (package, name), arguments, code, said } in MISTAKES {
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
