//! Import cycles between the top-level modules of a crate, between the sub-folders of core's, and
//! between files.
//!
//! An edge leads to the module that defines the imported item, however often it is re-exported on
//! the way. Items in the root of a crate belong to no module. An import from a module around the
//! importing one is no edge: a file may use what its folder's `mod.rs` defines.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::outline::ModuleScope;
use super::source::SourceFile;

/// Folder of the sources of `mpmd-core`, the crate whose sub-folders are checked as well.
const CORE: &str = "mpmd-core/src/";

/// Maximum number of files that may import each other.
const MOST_FILES: usize = 3;

/// The names of the modules from a crate's root down to a module.
type ModulePath = Vec<String>;

/// The modules of a crate that are compiled without `cfg(test)`.
pub(crate) struct Crate<'a> {
    root: &'a str,
    files: Vec<ModuleFile<'a>>,
    modules: BTreeMap<ModulePath, &'a ModuleScope>,
}

/// A source file of a crate, and the path of its module.
struct ModuleFile<'a> {
    module: ModulePath,
    source: &'a SourceFile,
}

/// The target of a path in the code: a module, or the module that defines the named item.
enum ResolvedPath {
    Module(ModulePath),
    Item(ModulePath),
}

/// For each importing node, the nodes that it imports, each with a line of code that imports it.
type ImportGraph = BTreeMap<String, BTreeMap<String, String>>;

/// Finds all crates that are libraries or programs. Test targets are left out.
pub(crate) fn crates(sources: &[SourceFile]) -> Vec<Crate<'_>> {
    let by_path: BTreeMap<&str, &SourceFile> = sources
        .iter()
        .map(|source| (source.path.as_str(), source))
        .collect();

    let is_root = |path: &str| {
        let is_program = |name: &str| {
            !name.contains('/') || name.ends_with("/main.rs") && name.matches('/').count() == 1
        };
        path.ends_with("src/lib.rs")
            || path.ends_with("src/main.rs")
            || path
                .split_once("src/bin/")
                .is_some_and(|(_, name)| is_program(name))
    };
    let roots = sources
        .iter()
        .filter(|source| source.is_rust() && is_root(&source.path));
    roots.map(|root| Crate::new(root, &by_path)).collect()
}

/// Returns a description of one shortest import cycle for each group of modules, or of more than
/// [`MOST_FILES`] files, that import each other.
pub(crate) fn check(crates: &[Crate<'_>]) -> Vec<String> {
    let mut findings = Vec::new();
    for krate in crates {
        let top = krate.graph(|module| module.first().cloned());
        findings.extend(cycles(&top, krate.root, "modules", 1));

        if krate.root.starts_with(CORE) {
            let of_folder = |file: &ModuleFile<'_>| {
                let parts: Vec<&str> = file.source.path.strip_prefix(CORE)?.split('/').collect();
                (parts.len() > 2).then(|| parts[..2].join("/"))
            };
            let folders: BTreeSet<String> = krate.files.iter().filter_map(of_folder).collect();
            let below = krate.graph(|module| {
                let folder = module.get(..2)?.join("/");
                folders.contains(&folder).then_some(folder)
            });
            findings.extend(cycles(&below, krate.root, "folders", 1));
        }

        let of_file: BTreeSet<&[String]> =
            krate.files.iter().map(|file| &file.module[..]).collect();
        let files = krate.graph(|module| {
            let lengths = (1..=module.len()).rev();
            let mut prefixes = lengths.map(|length| &module[..length]);
            prefixes
                .find(|prefix| of_file.contains(prefix))
                .map(|file| file.join("/"))
        });
        let kind = format!("more than {MOST_FILES} files");
        findings.extend(cycles(&files, krate.root, &kind, MOST_FILES));
    }
    findings
}

impl<'a> Crate<'a> {
    fn new(root: &'a SourceFile, by_path: &BTreeMap<&str, &'a SourceFile>) -> Self {
        let mut krate = Self {
            root: &root.path,
            files: Vec::new(),
            modules: BTreeMap::default(),
        };

        let mut todo = vec![(ModulePath::new(), root)];
        while let Some((module, source)) = todo.pop() {
            let path = source.path.as_str();
            let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
            let has_folder = module.is_empty() || name == "mod.rs";
            let folder = if has_folder {
                folder
            } else {
                path.trim_end_matches(".rs")
            };

            for (scope, name) in &source.outline.declared {
                let below = [&scope[..], std::slice::from_ref(name)].concat();
                let base = format!("{folder}/{}", below.join("/"));
                let files = [format!("{base}.rs"), format!("{base}/mod.rs")];
                if let Some(file) = files.iter().find_map(|file| by_path.get(file.as_str())) {
                    todo.push(([&module[..], &below].concat(), file));
                }
            }

            for (scope, names) in &source.outline.scopes {
                krate.modules.insert([&module[..], scope].concat(), names);
            }
            krate.files.push(ModuleFile { module, source });
        }

        krate.files.sort_by_key(|file| &file.source.path);
        krate
    }

    /// Returns the paths of all files of the crate.
    pub(crate) fn files(&self) -> impl Iterator<Item = &'a str> {
        self.files.iter().map(|file| file.source.path.as_str())
    }

    /// Returns the import graph of the crate's modules, grouped into nodes. `node` returns the node
    /// of a module as a path with `/`, or `None` to leave the module out. A node's imports from
    /// itself and from its parents are left out.
    fn graph(&self, node: impl Fn(&[String]) -> Option<String>) -> ImportGraph {
        let mut graph = ImportGraph::new();
        for ModuleFile { module, source } in &self.files {
            for path in &source.outline.paths {
                let from = [&module[..], &path.scope].concat();
                let Some(importer) = node(&from) else {
                    continue;
                };

                let Some(ResolvedPath::Module(to) | ResolvedPath::Item(to)) =
                    self.resolve(&from, &path.segments, &mut BTreeSet::new())
                else {
                    continue;
                };
                let is_within = |other: &String| {
                    importer
                        .strip_prefix(other)
                        .is_some_and(|r| r.is_empty() || r.starts_with('/'))
                };

                if let Some(imported) = node(&to).filter(|imported| !is_within(imported)) {
                    let by = format!(
                        "{}:{}: {}",
                        source.path,
                        path.line,
                        path.segments.join("::")
                    );
                    graph
                        .entry(importer)
                        .or_default()
                        .entry(imported)
                        .or_insert(by);
                }
            }
        }
        graph
    }

    /// Returns the module or item that a path in module `from` leads to. `None` if it is in another
    /// crate. An unknown name in a known module counts as an item of that module. Names in `seen`
    /// are not followed again.
    fn resolve(
        &self,
        from: &[String],
        segments: &[String],
        seen: &mut BTreeSet<(ModulePath, String)>,
    ) -> Option<ResolvedPath> {
        let mut module = from.to_vec();
        for (i, segment) in segments.iter().enumerate() {
            match segment.as_str() {
                "crate" => module.clear(),
                "super" => drop(module.pop()),
                "self" | "*" => {}
                name => match self.look_up(&module, name, seen) {
                    Some(ResolvedPath::Module(found)) => module = found,
                    None if i == 0 => return None,
                    None => return Some(ResolvedPath::Item(module)),
                    item => return item,
                },
            }
        }
        Some(ResolvedPath::Module(module))
    }

    /// Returns the module or item that `name` stands for in `module`. `None` if `name` is unknown
    /// or in `seen`. An import from another crate counts as an item of `module`.
    fn look_up(
        &self,
        module: &[String],
        name: &str,
        seen: &mut BTreeSet<(ModulePath, String)>,
    ) -> Option<ResolvedPath> {
        if !seen.insert((module.to_vec(), name.to_owned())) {
            return None;
        }

        let child = [module, &[name.to_owned()]].concat();
        if self.modules.contains_key(&child) {
            return Some(ResolvedPath::Module(child));
        }
        let scope = self.modules.get(module)?;
        if scope.names.contains(name) {
            return Some(ResolvedPath::Item(module.to_vec()));
        }

        if let Some(path) = scope.imports.get(name) {
            let target = self.resolve(module, path, seen);
            return Some(target.unwrap_or_else(|| ResolvedPath::Item(module.to_vec())));
        }
        scope
            .globs
            .iter()
            .find_map(|glob| match self.resolve(module, glob, seen)? {
                ResolvedPath::Module(globbed) => self.look_up(&globbed, name, seen),
                ResolvedPath::Item(_) => None,
            })
    }
}

/// Returns a description of one shortest cycle for each group of more than `most` nodes in `graph`
/// that reach each other.
fn cycles(graph: &ImportGraph, root: &str, kind: &str, most: usize) -> Vec<String> {
    let paths: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = graph
        .keys()
        .map(|node| (node.as_str(), shortest_paths(graph, node)))
        .collect();
    let reaches = |from: &str, to: &str| {
        paths
            .get(from)
            .is_some_and(|to_all| to_all.contains_key(to))
    };

    let mut findings = Vec::new();
    let mut reported: BTreeSet<&str> = BTreeSet::new();
    for node in paths.keys().filter(|node| reaches(node, node)) {
        if reported.contains(node) {
            continue;
        }

        let group: Vec<&str> = paths
            .keys()
            .copied()
            .filter(|m| reaches(node, m) && reaches(m, node))
            .collect();
        reported.extend(&group);
        if group.len() <= most {
            continue;
        }

        let cycle = group
            .iter()
            .map(|m| &paths[m][m])
            .min_by_key(|cycle| cycle.len());
        let cycle = cycle.map_or(&[][..], Vec::as_slice);

        let mut text = format!("{root}: {kind} import each other: {}", cycle.join(" -> "));
        for edge in cycle.windows(2) {
            text += &format!(
                "\n    {} -> {}: {}",
                edge[0], edge[1], graph[edge[0]][edge[1]]
            );
        }
        if cycle.len() <= group.len() {
            text += &format!(
                "\n    part of a knot of {}: {}",
                group.len(),
                group.join(", ")
            );
        }

        findings.push(text);
    }
    findings
}

/// Returns a shortest path from `from` to each node that it can reach over at least one edge. Both
/// ends are part of the path.
fn shortest_paths<'a>(graph: &'a ImportGraph, from: &'a str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut paths: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut todo = VecDeque::from([vec![from]]);

    while let Some(path) = todo.pop_front() {
        let last = path[path.len() - 1];
        for next in graph.get(last).into_iter().flat_map(BTreeMap::keys) {
            if !paths.contains_key(next.as_str()) {
                let longer = [&path[..], &[next.as_str()]].concat();
                paths.insert(next, longer.clone());
                todo.push_back(longer);
            }
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the findings for a crate with these files below `mpmd-core/src/`.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<SourceFile> = files
            .iter()
            .map(|(path, text)| SourceFile::new(format!("{CORE}{path}"), *text))
            .collect();
        check(&crates(&sources))
    }

    const ROOT: (&str, &str) = ("lib.rs", "mod a;\nmod b;\npub use b::Y;\npub struct Root;");

    #[test]
    fn cycle_of_imports_is_found() {
        let b = ("b.rs", "pub struct Y;\nuse crate::{x, a::{self as other}};");
        let findings = found(&[
            ROOT,
            ("a/mod.rs", "mod deep;"),
            ("a/deep.rs", "use crate::b::Y;"),
            b,
        ]);
        let expected = "mpmd-core/src/lib.rs: modules import each other: a -> b -> a\
            \n    a -> b: mpmd-core/src/a/deep.rs:1: crate::b::Y\
            \n    b -> a: mpmd-core/src/b.rs:2: crate::a";
        assert_eq!(findings, [expected]);
    }

    #[test]
    fn cycle_of_inline_paths_is_found() {
        let a = ("a.rs", "fn f() { vec![crate::b::g()] }");
        let findings = found(&[
            ROOT,
            a,
            ("b.rs", "mod m { fn g() { super::super::a::f() } }"),
        ]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].ends_with("b -> a: mpmd-core/src/b.rs:1: super::super::a::f"));
        let root = (
            "lib.rs",
            "mod a { use b::X; } mod b { use crate::*; use a::X; }",
        );
        assert_eq!(
            found(&[root]),
            [""; 0],
            "without `crate::` these are other crates"
        );
    }

    #[test]
    fn re_export_leads_to_the_defining_module() {
        let b = ("b.rs", "pub struct Y;\nuse crate::a::f;");
        for import in ["use crate::Y;", "use super::*; fn g() { crate::Y::new() }"] {
            assert_eq!(found(&[ROOT, ("a.rs", import), b]).len(), 1, "{import}");
        }
        // `a` offers `Y`, but `c` imports it from `b`.
        let root = ("lib.rs", "mod a; mod b; mod c;");
        let files = [
            root,
            ("a.rs", "pub use crate::b::*; use crate::c::f;"),
            ("b.rs", "struct Y;"),
        ];
        assert_eq!(
            found(&[&files[..], &[("c.rs", "use crate::a::Y;")]].concat()),
            [""; 0]
        );
        let renamed = ("c.rs", "use crate::a as z; fn f() { z::g() }");
        assert_eq!(found(&[&files[..], &[renamed]].concat()).len(), 1);
    }

    #[test]
    fn code_for_tests_makes_no_cycle() {
        let a = (
            "a.rs",
            "#[cfg(test)] mod tests; #[cfg(test)] mod m { use crate::b::Y; }\n\
            #[cfg(all(test, feature = \"f\"))] fn f() { crate::b::g() }",
        );
        let tests = ("a/tests.rs", "use crate::b::Y;");
        assert_eq!(
            found(&[ROOT, a, tests, ("b.rs", "use crate::a::f;")]),
            [""; 0]
        );
    }

    #[test]
    fn paths_within_a_module_make_no_cycle() {
        let a = (
            "a/mod.rs",
            "mod m; mod n { use super::m; } struct X; use self::m::Y;",
        );
        let m = ("a/m.rs", "use super::X; use crate::a::n; use crate::Root;");
        assert_eq!(found(&[ROOT, a, m, ("b.rs", "use crate::a::X;")]), [""; 0]);
    }

    #[test]
    fn folders_of_core_import_each_other() {
        let root = ("lib.rs", "mod a;");
        let a = ("a/mod.rs", "mod x; mod y; mod loose; pub use y::Y;");
        let x = ("a/x/mod.rs", "use super::Y; struct X;");
        let loose = ("a/loose.rs", "use super::x::X; use super::y::Y;");
        let y = |text| ("a/y/mod.rs", text);
        let findings = found(&[root, a, x, loose, y("struct Y; use crate::a::x::X;")]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("folders import each other: a/x -> a/y -> a/x"));
        assert_eq!(
            found(&[root, a, x, loose, y("struct Y; use super::loose::f;")]),
            [""; 0]
        );
    }

    #[test]
    fn knot_of_more_than_three_files_is_found() {
        let knot = |z| {
            let root = ("lib.rs", "mod a; struct Root;");
            let a = ("a/mod.rs", "mod w; mod x; mod y; mod z; struct A;");
            let w = ("a/w.rs", "use super::x::X; use crate::Root; struct W;");
            let x = ("a/x.rs", "use super::y; struct X;");
            let y = ("a/y.rs", "mod m { use crate::a::z::Z; } struct Y;");
            found(&[root, a, w, x, y, ("a/z.rs", z)])
        };
        let findings = knot("fn f() { super::w::W::new() } struct Z;");
        assert_eq!(findings.len(), 1);
        let expected = "files import each other: a/w -> a/x -> a/y -> a/z -> a/w\n";
        assert!(findings[0].contains(expected), "{}", findings[0]);
        assert_eq!(
            knot("use super::x::X; struct Z;"),
            [""; 0],
            "three files may"
        );
        assert_eq!(
            knot("use super::A; struct Z;"),
            [""; 0],
            "a file may use its folder"
        );
    }

    #[test]
    fn import_of_a_file_in_the_own_folder_counts() {
        let knot = |folder| {
            let root = ("lib.rs", "mod m;");
            let m = ("m/mod.rs", "mod a; mod b; mod c;");
            let x = ("m/a/x.rs", "use crate::m::b::B; use super::A; struct X;");
            let b = ("m/b.rs", "use super::c::C; struct B;");
            found(&[
                root,
                m,
                ("m/a/mod.rs", folder),
                x,
                b,
                ("m/c.rs", "use super::a::A; struct C;"),
            ])
        };
        let findings = knot("mod x; use x::X; struct A;");
        assert_eq!(findings.len(), 1);
        assert!(
            findings[0].contains("m/a -> m/a/x -> m/b -> m/c -> m/a\n"),
            "{}",
            findings[0]
        );
        assert_eq!(knot("mod x; struct A;"), [""; 0]);
    }

    #[test]
    fn shortest_cycle_stands_for_its_group() {
        let root = (
            "lib.rs",
            "mod a { use crate::b::B; } mod b { use crate::c::C; use crate::d; }\n\
            mod c { use crate::a::A; } mod d { use crate::b::B; } mod e { use crate::a::A; }",
        );
        let findings = found(&[root]);
        assert_eq!(findings.len(), 1);
        assert!(
            findings[0].contains("import each other: b -> d -> b\n"),
            "{}",
            findings[0]
        );
        assert!(
            findings[0].ends_with("part of a knot of 4: a, b, c, d"),
            "{}",
            findings[0]
        );
    }

    #[test]
    fn each_program_is_a_crate() {
        let paths = ["c/src/main.rs", "c/src/bin/p.rs", "c/src/bin/q/main.rs"];
        let others = [
            "c/src/bin/q/m.rs",
            "c/tests/t.rs",
            "c/src/lib.md",
            "c/src/m/x.rs",
        ];
        let sources: Vec<SourceFile> = paths
            .iter()
            .chain(&others)
            .map(|path| SourceFile::new(*path, "mod m;"))
            .collect();
        let crates = crates(&sources);
        assert_eq!(
            crates.iter().map(|krate| krate.root).collect::<Vec<_>>(),
            paths
        );
        assert_eq!(
            crates[2].files().collect::<Vec<_>>(),
            ["c/src/bin/q/m.rs", paths[2]]
        );
    }
}
