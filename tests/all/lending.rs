//! Arrays in memory that processes share. They are transferred without copies, held, lent on,
//! changed and dropped at random. Arrays that are checked are right, all memory comes back and none
//! is left, also when processes die or stop.
//!
//! For larger runs by hand: `MPMD_SOAK=1000000` sets the number of transfers of the first test, and
//! `MPMD_SOAK_KILLS=50` the number of killed processes.

use std::time::{Duration, Instant};

use mpmd_tests::{Carrier, Job, Processes, rng_of_this_run};

const PROCESSES: usize = 4;

/// Bytes that a warm run may still take from the system: the same limit for pools and for the
/// process.
const LITTLE: u64 = 32 << 20;

/// Mappings and descriptors that may come and go: large arrays have their own, here and in each
/// peer.
const FEW: u64 = 200;

/// Time limit for the end of all processes after a death.
const SOON: Duration = Duration::from_secs(5);

fn asked(variable: &str, default: usize) -> usize {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn options(processes: usize) -> Processes {
    Carrier::SHM.processes(env!("CARGO_BIN_EXE_named"), processes)
}

#[test]
fn zero_copy_arrays_are_right_and_memory_stays_flat() {
    let hand_overs = asked("MPMD_SOAK", 30_000);
    let limit = Duration::from_secs(200 + hand_overs as u64 / 500);
    let begin = Instant::now();
    let mut job = Job::start(
        options(PROCESSES).deadline(limit),
        &["lending", &hand_overs.to_string(), "7", "20"],
    );
    let said = job.wait_well();
    println!("{hand_overs} hand-overs took {:?}", begin.elapsed());
    let mut looked_at = 0;
    let mut to_look_at = Vec::new();
    for (process, said) in said.iter().enumerate() {
        let numbers = |line: &str| -> Vec<u64> {
            let line = said.lines().find_map(|said| said.strip_prefix(line));
            println!("process {process}: {line:?}");
            let words = line.unwrap_or_default().split(' ');
            words.filter_map(|word| word.parse().ok()).collect()
        };
        let (warm, end) = (numbers("memory 2: "), numbers("memory 5: "));
        let ([mapped_warm, resident_warm, segments_warm], [mapped, resident, segments]) =
            (&warm[..], &end[..])
        else {
            panic!(
                "process {process} does not print its memory use:\n{}",
                job.report()
            )
        };
        assert!(
            *mapped <= mapped_warm + LITTLE,
            "process {process}: {mapped_warm}, then {mapped} mapped"
        );
        assert!(
            *resident <= resident_warm + 2 * LITTLE,
            "process {process}: {resident_warm}, then {resident}"
        );
        let bounded = *segments <= segments_warm + FEW / 4 && *segments <= FEW;
        assert!(
            bounded,
            "process {process}: {segments_warm}, then {segments} segments"
        );
        let [here, all] = numbers("looked at ")[..] else {
            panic!("{}", job.report())
        };
        looked_at += here;
        to_look_at.push(all);
    }
    assert_eq!(
        to_look_at, [looked_at; PROCESSES],
        "every array is looked at, on exactly one process"
    );
    assert!(
        looked_at as usize > hand_overs / 4,
        "only {looked_at} of {hand_overs} are looked at"
    );
}

#[test]
fn killed_lender_is_named_and_no_data_is_wrong() {
    let mut random = rng_of_this_run();
    let mut longest = Duration::ZERO;
    for round in 0..asked("MPMD_SOAK_KILLS", PROCESSES) {
        let (victim, seed) = (round % PROCESSES, random.usize(..1 << 30).to_string());
        let mut job = Job::start(options(PROCESSES), &["lending", "1000000000", &seed, "2"]);
        job.wait_for_output("array 300\n").unwrap();
        let delay = Duration::from_micros(random.usize(..400_000) as u64);
        std::thread::sleep(delay);
        let begin = Instant::now();
        job.kill(victim).unwrap();
        // Also checks that nothing is left.
        let ended = job.wait();
        let told = format!("process {victim}, killed after {delay:?}, seed {seed}");
        for (process, end) in ended
            .iter()
            .enumerate()
            .filter(|(process, _)| *process != victim)
        {
            assert_eq!(
                end.code(),
                1,
                "{told}: process {process} ends with an error\n{}",
                job.report()
            );
            let named = end.stderr.contains(&format!("process {victim} is gone"));
            assert!(
                named,
                "{told}: process {process} does not name it\n{}",
                job.report()
            );
            assert!(
                !end.stderr.contains("WRONG"),
                "{told}: process {process}\n{}",
                job.report()
            );
            longest = longest.max(end.ended_at - begin);
        }
        assert!(
            longest <= SOON,
            "{told}: the last ended after {longest:?}\n{}",
            job.report()
        );
    }
    println!("the last ended {longest:?} after a death at most");
}

#[test]
fn memory_lent_to_a_stopped_process_returns_at_its_death() {
    let mut job = Job::start(options(2), &["holding"]);
    job.wait_for_output_of(1, "look 5: right\n").unwrap();
    job.stop(1).unwrap();
    // Twenty times the time that it takes to notice an end.
    let looks = job.output(0).unwrap().lines().count();
    job.wait_for_output_of(0, &format!("look {}: ", looks + 100))
        .unwrap();
    let lent = format!("live {} lent {}", 4 << 20, 4 << 20);
    let said = job.output(0).unwrap();
    assert!(
        said.lines().skip(1).all(|line| line.ends_with(&lent)),
        "{}",
        job.report()
    );
    let looks = job.output(1).unwrap().lines().count();
    job.resume(1).unwrap();
    job.wait_for_output_of(1, &format!("look {}: right\n", looks + 5))
        .unwrap();
    job.stop(1).unwrap();
    job.kill(1).unwrap();
    job.wait_for_output_of(0, "all is back\n").unwrap();
    job.wait();
    assert!(!job.report().contains("WRONG"), "{}", job.report());
}
