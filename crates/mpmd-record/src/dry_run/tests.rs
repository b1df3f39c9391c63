//! A small dry run for the tests of this module, and tests of dry runs.

use super::*;

/// A dry run that makes one array of 64 bytes on device 0. Then twice: it puts the array to
/// device 1 of another process, runs a kernel there, and drops both results.
pub(crate) fn small() -> DryRun {
    let own = |device| ResultShard {
        device,
        bytes: 64,
        memory: ShardMemory::Own,
    };
    let make = OpDescriptor {
        what: "array_from_fn".into(),
        kind: OpKind::ArrayFromFn,
        results: vec![vec![own(0)]],
        messages: Vec::new(),
    };
    let put = OpDescriptor {
        what: "put".into(),
        kind: OpKind::Put,
        results: vec![vec![own(1)]],
        messages: vec![OpMessage {
            from: 0,
            to: 1,
            bytes: 64,
            step: 1,
            leaf: 0,
        }],
    };
    let call = OpDescriptor {
        what: "jit k".into(),
        kind: OpKind::Call {
            kernel: "k".into(),
            devices: vec![1],
        },
        results: vec![vec![own(1)]],
        messages: Vec::new(),
    };
    let first = Array {
        operation: 1,
        result: 0,
    };
    let take = |operation| {
        vec![TakenArray {
            array: Some(Array {
                operation,
                result: 0,
            }),
            donated: false,
        }]
    };
    let operation = |descriptor, takes| IssuedOperation {
        descriptor,
        line: 0,
        label: None,
        takes,
    };
    DryRun {
        lines: vec!["train.rs:1:2".into()],
        descriptors: vec![make, put, call],
        operations: vec![
            operation(0, Vec::new()),
            operation(1, take(1)),
            operation(2, take(2)),
            operation(1, take(1)),
            operation(2, take(4)),
        ],
        drops: [(2, 3), (3, 3), (4, 5), (5, 5)]
            .map(|(operation, after)| Dropped {
                array: Array {
                    operation,
                    result: 0,
                },
                after,
            })
            .to_vec(),
        reads: vec![Read {
            array: first,
            after: 5,
            line: 0,
            values: true,
        }],
        steps: [(1, 0), (3, 2), (5, 4)]
            .map(|(operation, drops)| StepEnd {
                operation,
                drops,
                reads: 0,
            })
            .to_vec(),
        ..DryRun::new(2, vec![0, 1])
    }
}

#[test]
fn dry_run_survives_a_write_and_a_read() {
    let folder = std::env::temp_dir().join(format!("mpmd-dry-run-{}.json", std::process::id()));
    small().write(&folder).unwrap();
    assert_eq!(DryRun::read(&folder).unwrap(), small());
    std::fs::remove_file(&folder).unwrap();
    assert!(matches!(
        DryRun::read(&folder),
        Err(DryRunError::File { .. })
    ));
}

#[test]
fn invalid_dry_runs_are_refused_with_the_reason() {
    let wrong = |change: fn(&mut DryRun)| {
        let mut dry_run = small();
        change(&mut dry_run);
        DryRun::from_json(&serde_json::to_vec(&dry_run).unwrap())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        wrong(|dry_run| dry_run.version = 7),
        "it has version 7, and this is for 1"
    );
    assert_eq!(
        wrong(|dry_run| dry_run.devices.truncate(1)),
        "there is no device 1 among 1"
    );
    assert_eq!(
        wrong(|dry_run| dry_run.processes = 1),
        "there is no process 1 among 1"
    );
    assert_eq!(
        wrong(|dry_run| dry_run.descriptors.truncate(2)),
        "operation 3 has no descriptor"
    );
    let late = wrong(|dry_run| dry_run.operations[1].takes = dry_run.operations[4].takes.clone());
    assert_eq!(
        late,
        "result 0 of operation 4 is not made before it is used"
    );
    assert_eq!(wrong(|dry_run| dry_run.lines.clear()), "there is no line 0");
    assert_eq!(
        wrong(|dry_run| dry_run.steps[2].operation = 9),
        "its steps are not in order"
    );
    assert_eq!(
        wrong(|dry_run| dry_run.hashes = vec![1]),
        "it has 1 hashes for 5 operations"
    );
    assert!(DryRun::from_json(b"{}").is_err());
}

#[test]
fn links_count_messages_between_processes() {
    let dry_run = small();
    let twice = BTreeMap::from([(
        (0, 1),
        MessageTotals {
            messages: 2,
            bytes: 128,
        },
    )]);
    assert_eq!(dry_run.links(1..6), twice);
    assert_eq!(dry_run.links(dry_run.step(1).unwrap())[&(0, 1)].bytes, 64);
    assert_eq!(dry_run.step(2), Some(4..6));
    assert_eq!(dry_run.step(3), None);
    assert_eq!(dry_run.describe(2), "operation 2 (put) at train.rs:1:2");
}
