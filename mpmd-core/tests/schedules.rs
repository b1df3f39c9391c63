//! Built-in schedules: their orders, and what those cost.

use mpmd_core::pipeline::Schedule;

#[test]
fn orders_agree_with_the_golden_ones() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("golden/schedules.json")).expect("well-formed");
    let cases = golden["cases"].as_array().expect("cases");
    for case in cases {
        let number = |key: &str| case[key].as_u64().expect("a number") as usize;
        let name = case["schedule"].as_str().expect("a name");
        let (ranks, microbatches, chunks) =
            (number("ranks"), number("microbatches"), number("chunks_per_rank"));
        let schedule = Schedule::named(name, ranks, microbatches, Some(chunks)).expect("a schedule");
        let rows: Vec<Vec<String>> = serde_json::from_value(case["rows"].clone()).expect("rows of cells");
        let ours: Vec<Vec<String>> = (0..ranks).map(|rank| schedule.cells(rank)).collect();
        assert_eq!(ours, rows, "{name} {ranks} {microbatches} {chunks}");
        assert_eq!((schedule.name(), schedule.stages()), (name, ranks * chunks));
    }
    assert_eq!(cases.len(), 101);
}
