//! The number of names that a user of the crate can meet.

use std::collections::BTreeSet;

/// Returns the names that the public modules of `src/lib.rs` re-export, without the prelude's.
/// A crate that is re-exported whole (`as candle`, `as train`) has its own names, and is not
/// counted.
fn names() -> BTreeSet<String> {
    let source = include_str!("../src/lib.rs");
    let code: String = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .map(|line| format!("{line}\n"))
        .collect();
    let shown = code.split("#[doc(hidden)]").next().expect("there is text");
    let mut names = BTreeSet::new();
    for item in shown.split("pub use ").skip(1) {
        let path = item.split(';').next().expect("an item ends");
        let list = path.rsplit_once('{').map_or_else(
            || path.rsplit("::").next().expect("a path has a last segment"),
            |(_, list)| list.trim_end_matches('}'),
        );
        let found = list.trim_end().trim_end_matches('}').split(',').map(str::trim);
        let counted = found.filter(|name| !["", "*"].contains(name) && !name.contains(" as "));
        names.extend(counted.map(str::to_owned));
    }
    names
}

#[test]
fn users_meet_at_most_127_names() {
    let names = names();
    assert!(names.contains("MpmdArray") && names.contains("Pipeline"), "{names:?}");
    assert!((60..=127).contains(&names.len()), "{} names: {names:?}", names.len());
}
