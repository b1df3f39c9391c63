//! The stages: what runs on a machine with a GPU, in the order of priority.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::kit::{CONTENTS, KitContent};
use super::tests::{self, Kind};
use super::turn::StageTurn;

/// A part of the GPU checks with its own time limit.
pub(super) struct GpuStage {
    pub(super) name: &'static str,
    /// Time limit in seconds.
    pub(super) limit: u64,
    /// The programs that the stage starts. A kit without one of them leaves the stage out.
    pub(super) programs: &'static [&'static str],
    pub(super) run: fn(&mut StageTurn<'_>),
}

/// All stages. The limits of the stages of a kit add up to at most ten minutes, the longest time of
/// one command on some machines with GPUs.
pub(super) const STAGES: [GpuStage; 13] = [
    GpuStage {
        name: "facts",
        limit: 20,
        programs: &[],
        run: facts,
    },
    GpuStage {
        name: "doctor",
        limit: 30,
        programs: &["mpmd"],
        run: doctor,
    },
    GpuStage {
        name: "kernel",
        limit: 30,
        programs: &["cuda_kernel"],
        run: kernel,
    },
    GpuStage {
        name: "probe",
        limit: 60,
        programs: &["mpmd"],
        run: probe,
    },
    GpuStage {
        name: "tests",
        limit: 120,
        programs: &[],
        run: |turn| tests::run(turn, Kind::Usual, 8),
    },
    GpuStage {
        name: "hand-over",
        limit: 50,
        programs: &["mpmd"],
        run: hand_over,
    },
    GpuStage {
        name: "dispatch",
        limit: 25,
        programs: &["mpmd"],
        run: dispatch,
    },
    GpuStage {
        name: "reshard",
        limit: 40,
        programs: &["mpmd"],
        run: reshard,
    },
    GpuStage {
        name: "programs",
        limit: 50,
        programs: &["basic", "reshard"],
        run: programs,
    },
    GpuStage {
        name: "gpt",
        limit: 55,
        programs: &["train_gpt"],
        run: gpt,
    },
    GpuStage {
        name: "models",
        limit: 120,
        programs: &["generate", "finetune", "serve", "train_and_serve"],
        run: models,
    },
    GpuStage {
        name: "memcheck",
        limit: 60,
        programs: &["mpmd", "cuda_kernel"],
        run: memcheck,
    },
    // Last: a driver may wait for a dead process for ever.
    GpuStage {
        name: "kills",
        limit: 60,
        programs: &["mpmd"],
        run: |turn| tests::run(turn, Kind::Kill, 2),
    },
];

/// Exit code of compute-sanitizer if it has found an error.
const FOUND: &str = "86";

/// Environment variable that selects the GPUs that the driver shows.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Returns the stages with their limits as a text for people.
pub(super) fn list() -> String {
    let mut text = String::new();
    for GpuStage { name, limit, .. } in &STAGES {
        let _ = writeln!(text, "{name:10} {limit:4} s");
    }
    for content in CONTENTS {
        let _ = writeln!(text, "{:10} {:4} s", content.name, limit_of(content));
    }
    text
}

/// Returns the sum of the time limits of a kit's stages, in seconds.
fn limit_of(content: &KitContent) -> u64 {
    let has_all = |stage: &&GpuStage| {
        stage
            .programs
            .iter()
            .all(|name| content.programs.contains(name))
    };
    STAGES.iter().filter(has_all).map(|stage| stage.limit).sum()
}

/// Prints facts about the machine that may explain a failure. A program that the machine lacks is
/// not a failure.
fn facts(turn: &mut StageTurn<'_>) {
    const SCRIPT: &str = "\
        nvidia-smi; nvidia-smi -q -d COMPUTE,PERFORMANCE | head -60
        uname -a; ldd --version | head -1; nproc; free -g; df -h /dev/shm /tmp; ulimit -a
        cat /proc/sys/vm/max_map_count; readlink /proc/self/ns/pid
        echo LD_LIBRARY_PATH=$LD_LIBRARY_PATH CUDA_HOME=$CUDA_HOME
        ldconfig -p | grep -i 'libcuda\\|nvrtc\\|cublas\\|nccl'; ls -d /usr/local/cuda*
        for p in nvcc compute-sanitizer nsys ncu c++ python3; do command -v $p; done
        timeout 8 find / -xdev -name 'libnvrtc.so*' -o -name 'libcublas.so*' -o -name 'libnccl.so*'
        exit 0";
    turn.run(turn.command("/bin/sh", &["-c", SCRIPT]));
}

fn doctor(turn: &mut StageTurn<'_>) {
    turn.program("mpmd", &["doctor", "--device", "cuda", "--json"]);
}

fn kernel(turn: &mut StageTurn<'_>) {
    let elements = turn.sized("1048576", "4096");
    let said = turn.program("cuda_kernel", &["--elements", elements]);
    if said.contains("on the CPU") {
        turn.failed("cuda_kernel found no GPU and ran on the CPU", &said);
    }
}

fn probe(turn: &mut StageTurn<'_>) {
    let command = turn.bench(&["probe"], &["--events", "100"]);
    turn.run_measuring(command);
}

fn hand_over(turn: &mut StageTurn<'_>) {
    // A benchmark prints its figures at its end: one command for each size.
    for size in turn.sized(["1Mi", "256Mi"], ["64Ki", "1Mi"]) {
        let arguments = ["p2p", "--case", "handover", "--sizes", size];
        let mut command = turn.bench(&arguments, &["--repeats", "2"]);
        // Both processes share one GPU, even if there are more.
        let visible = std::env::var(VISIBLE).unwrap_or_default();
        let first = visible
            .split(',')
            .map(str::trim)
            .find(|name| !name.is_empty());
        command.env(VISIBLE, first.unwrap_or("0"));
        turn.run_measuring(command);
    }
}

fn dispatch(turn: &mut StageTurn<'_>) {
    let command = turn.bench(&["dispatch"], &["--repeats", "2"]);
    turn.run_measuring(command);
}

fn reshard(turn: &mut StageTurn<'_>) {
    let (processes, mib, repeats) = turn.sized(("1,2", "64", "3"), ("1", "1", "2"));
    let arguments = [
        "reshard",
        "--processes",
        processes,
        "--mib",
        mib,
        "--repeats",
        repeats,
    ];
    let command = turn.bench(&arguments, &[]);
    turn.run_measuring(command);
}

fn programs(turn: &mut StageTurn<'_>) {
    let small = |arguments: &'static str| turn.sized("", arguments).split_whitespace();
    let [basic, reshard] = ["--rows 32 --columns 100 --rounds 1", "--width 24"]
        .map(|arguments| small(arguments).collect::<Vec<_>>());
    for processes in ["1", "2"] {
        let on = ["--device", "cuda", "--processes", processes];
        turn.program("basic", &[&on, &basic[..]].concat());
        let said = turn.program("reshard", &[&on, &reshard[..]].concat());
        let proofs = said.matches("values proved").count();
        if proofs.to_string() != processes {
            turn.failed(&format!("reshard proved its values {proofs} times"), &said);
        }
    }
}

/// Trains on CUDA devices and on CPU devices, and compares the losses. With stages of candle, which
/// compute on the host, they must be equal; with stages of kernels they must be near. Then trains a
/// larger model with kernels.
fn gpt(turn: &mut StageTurn<'_>) {
    let sizes = turn.sized(
        "--steps 20 --sample 20",
        "--width 8 --heads 2 --time 8 --microbatches 4 --steps 3 --sample 2",
    );
    let text = turn.place.kit.folder.join("text");
    let text = text.to_string_lossy();

    let [kernels, cuda, cpu] = ["cuda --kernels", "cuda", "cpu"].map(|device| {
        let losses = turn
            .place
            .scratch
            .join(format!("losses-{}", device.replace(' ', "")));
        let out = losses.to_string_lossy();
        let how = [
            "--processes",
            "2",
            "--stages",
            "2",
            "--losses-out",
            &out,
            "--device",
        ];
        let given = device
            .split(' ')
            .chain(sizes.split(' '))
            .collect::<Vec<_>>();
        turn.program("train_gpt", &[&how[..], &given, &[&text]].concat());
        std::fs::read_to_string(&losses).unwrap_or_default()
    });

    if cuda.is_empty() || cuda != cpu {
        turn.failed(
            "the losses on CUDA and CPU devices differ",
            &format!("{cuda}\n{cpu}"),
        );
    }
    let losses = |lines: &str| -> Vec<f64> {
        lines
            .lines()
            .filter_map(|line| line.split(' ').nth(1)?.parse().ok())
            .collect()
    };

    let near = losses(&kernels);
    let far = losses(&cpu);
    let is_near = |near: f64, far: f64| (near - far).abs() <= 1e-4 * far;
    let mut pairs = near.iter().zip(&far);
    if near.is_empty() || near.len() != far.len() || !pairs.all(|(near, far)| is_near(*near, *far))
    {
        turn.failed(
            "the losses of kernels are not those of the CPU",
            &format!("{kernels}\n{cpu}"),
        );
    }

    if !turn.place.software {
        let large = "--kernels --width 1024 --layers 8 --heads 16 --time 512 --batch 8 \
                     --microbatches 4 --steps 12 --sample 0 --device cuda --stages 1 --processes 1";
        for compute in ["f32", "tf32", "bf16"] {
            let given: Vec<&str> = large
                .split(' ')
                .chain(["--compute", compute, &text])
                .collect();
            turn.program("train_gpt", &given);
        }
    }
}

/// Trains the demonstration model, continues a text with it, and starts and drains a server.
fn models(turn: &mut StageTurn<'_>) {
    let [model, text] = ["model", "text"].map(|name| turn.place.kit.folder.join(name));
    let [model, text] = [&model, &text].map(|path| path.to_string_lossy().into_owned());
    let on_cuda = ["--model", &model, "--device", "cuda"];
    let steps = turn.sized("20", "2");
    let training = ["--steps", steps, "--time", "32", &text];
    turn.program("finetune", &[&on_cuda[..], &training].concat());

    let prompt = [
        "--prompt",
        "A stage",
        "--tokens",
        turn.sized("64", "4"),
        "--temperature",
        "0",
    ];
    let said = turn.program("generate", &[&on_cuda[..], &prompt].concat());
    if !said.contains("CUDA devices compute all passes") {
        turn.failed("generate does not compute on the device", &said);
    }

    // A signal drains the servers.
    const UNTIL_READY: &str = "\
        program=$1; shift; $program \"$@\" >serve.txt 2>&1 & server=$!
        for i in $(seq 100); do grep -q listening serve.txt && break; sleep 0.5; done
        kill -TERM $server; wait $server; code=$?
        cat serve.txt; grep -q listening serve.txt && exit $code";
    let port = ["--port", "0"];
    let learning = ["--steps", steps, &text];
    for (name, more) in [("serve", &[][..]), ("train_and_serve", &learning)] {
        let program = turn.place.kit.folder.join(name);
        let program = program.to_string_lossy();
        let start = ["-c", UNTIL_READY, "sh", &program];
        turn.run(turn.command("/bin/sh", &[&start[..], &on_cuda, &port, more].concat()));
    }
}

/// Runs small programs under compute-sanitizer, for memory errors within kernels.
fn memcheck(turn: &mut StageTurn<'_>) {
    const SANITIZER: &str = "compute-sanitizer";
    let Some(sanitizer) = installed(SANITIZER).filter(|_| !turn.place.software) else {
        turn.not_run(if turn.place.software {
            "there is no GPU to look at"
        } else {
            "compute-sanitizer is not installed"
        });
        return;
    };

    let handover = ["bench", "p2p", "--case", "handover", "--sizes", "64Ki"];
    let handover = [
        &handover[..],
        &["--repeats", "2", "--device", "cuda", "--json"],
    ]
    .concat();

    for (program, arguments) in [("cuda_kernel", &[][..]), ("mpmd", &handover)] {
        let program = turn.place.kit.folder.join(program);
        let program = program.to_string_lossy();
        let how = [
            "--tool",
            "memcheck",
            "--target-processes",
            "all",
            "--error-exitcode",
            FOUND,
        ];
        let command = turn.command(&sanitizer, &[&how[..], &[&program], arguments].concat());
        turn.run(command);
    }
}

/// Returns the path of a program in `PATH` or in the usual folders of CUDA.
fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    let usual = [PathBuf::from("/usr/local/cuda/bin")];
    let folders = std::env::split_paths(&path).chain(home).chain(usual);
    folders
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod limits {
    use super::*;

    #[test]
    fn limits_of_a_kit_are_ten_minutes_at_most() {
        let sums = CONTENTS.map(limit_of);
        assert!(sums.iter().all(|sum| (100..=600).contains(sum)), "{sums:?}");
        assert!(
            list().ends_with(&format!("candle     {:4} s\n", sums[1])),
            "{}",
            list()
        );
    }
}
