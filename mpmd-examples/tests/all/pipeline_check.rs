//! The check job in simulation: the same figures on any number of processes, with messages delayed
//! at random.

use std::time::Duration;

use mpmd::testing::Simulation;
use mpmd_examples::pipeline::{DEVICES, LEARNING_RATE, check};

#[test]
fn check_gives_reference_figures_on_any_number_of_processes() {
    for processes in [1, 2, 4, 8] {
        for seed in 0..4 {
            let simulation =
                Simulation::new(processes, DEVICES).delays(seed, Duration::from_micros(500));
            for (process, report) in simulation
                .run(|p| check(p, LEARNING_RATE))
                .into_iter()
                .enumerate()
            {
                let report = report.unwrap();
                let place = format!("process {process} of {processes}, seed {seed}");
                assert_eq!(report.first_off(), None, "{place}:\n{report}");
            }
        }
    }
}

#[test]
fn wrong_learning_rate_is_found_on_every_process() {
    for processes in [1, 4, 8] {
        let reports = Simulation::new(processes, DEVICES).run(|p| check(p, 1.01 * LEARNING_RATE));
        let reports: Vec<_> = reports.into_iter().map(|report| report.unwrap()).collect();
        for report in &reports {
            // The losses of the first step are those before any update.
            let off = report.first_off().unwrap();
            assert!(off.contains("losses, step 1, number 0"), "{off}\n{report}");
            assert!(
                report.to_string().contains("OFF, expected 1.206537"),
                "{report}"
            );
            assert_eq!(report.to_string(), reports[0].to_string());
        }
    }
}
