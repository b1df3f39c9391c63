use super::*;
#[test]
fn dbg() {
    let case = case::Case::new(16);
    let alive = std::sync::Arc::default();
    let r = mpmd_core::Simulation::new(1, 6).run(|p| {
        let r = execute::execute(
            p,
            &case.steps,
            &[
                20usize, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38,
                39, 15, 16, 17, 18, 19, 12, 13, 14, 1, 4, 7, 8, 11,
            ]
            .into(),
            &Default::default(),
            &alive,
        );
        eprintln!("{:?}", r.as_ref().map(|x| x.len()));
        r
    });
    eprintln!("{:?}", r[0].as_ref().map(|x| x.len()));
    std::thread::sleep(std::time::Duration::from_secs(1));
    for t in std::fs::read_dir("/proc/self/task").unwrap() {
        eprint!("{} ", std::fs::read_to_string(t.unwrap().path().join("comm")).unwrap().trim());
    }
}
