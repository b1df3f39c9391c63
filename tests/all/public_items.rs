//! The names that a user of the crate `mpmd` can meet: every type in a public signature has one,
//! and each has a reason. Both are read from the sources.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Generics, ImplItem, Item, TraitItem, UseTree, Visibility};

/// The crates whose items `mpmd` re-exports.
const CRATES: [&str; 14] = [
    "base",
    "candle",
    "core",
    "device",
    "handshake",
    "launch",
    "layout",
    "memory",
    "proto",
    "record",
    "rendezvous",
    "schedule",
    "train",
    "transport",
];

/// The crates that are re-exported whole: `mpmd::candle` and `mpmd::train`.
const WHOLE: [&str; 2] = ["candle", "train"];

/// Types of which users read the bytes. Their other methods are for transports and devices, whose
/// types `mpmd` does not show.
const OPAQUE: [&str; 1] = ["SharedBuffer"];

/// The names of the standard prelude that signatures use.
const PRELUDE: [&str; 27] = [
    "AsRef",
    "Box",
    "Clone",
    "Copy",
    "Default",
    "DoubleEndedIterator",
    "Drop",
    "Eq",
    "ExactSizeIterator",
    "Fn",
    "FnMut",
    "FnOnce",
    "From",
    "Into",
    "IntoIterator",
    "Iterator",
    "Option",
    "Ord",
    "PartialEq",
    "Result",
    "Send",
    "Sized",
    "String",
    "Sync",
    "ToString",
    "TryInto",
    "Vec",
];

/// Traits of the standard library whose implementations show types: `type Output = …`.
const SHOWING: [&str; 6] = [
    "Deref",
    "From",
    "Index",
    "IntoFuture",
    "IntoIterator",
    "Iterator",
];

/// A name and the crate that it is of, without `mpmd_`.
type Name = (String, String);

/// A name in a public signature.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Mention {
    /// The item, as `Program::jit`.
    by: String,
    name: Name,
}

/// The public items of a crate by name, each with the names in its public signatures.
type Items = BTreeMap<String, Vec<Mention>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate is in a folder")
        .to_owned()
}

/// Returns the folder of a crate of the framework.
fn folder_of(name: &str) -> PathBuf {
    let folders = [format!("mpmd-{name}"), format!("crates/mpmd-{name}")];
    let mut folders = folders.map(|folder| root().join(folder)).into_iter();
    folders
        .find(|folder| folder.is_dir())
        .expect("the crate has a folder")
}

fn parsed(file: &Path) -> syn::File {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"))
}

/// Returns the Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("its entries can be read").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// True for an item that is hidden from the documentation or belongs to a test.
fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute
            .meta
            .to_token_stream()
            .to_string()
            .replace(' ', "");
        text == "doc(hidden)" || text == "cfg(test)"
    })
}

/// Appends (first segment, name, local name) of everything that a `use` brings in.
fn used(tree: &UseTree, first: Option<&str>, found: &mut Vec<(String, String, String)>) {
    match tree {
        UseTree::Path(path) => {
            let ident = path.ident.to_string();
            used(&path.tree, Some(first.unwrap_or(&ident)), found);
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| used(tree, first, found)),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            found.push((first.unwrap_or(&name).to_owned(), name.clone(), name));
        }
        UseTree::Rename(rename) => {
            let name = rename.ident.to_string();
            let first = first.unwrap_or(&name).to_owned();
            found.push((first, name, rename.rename.to_string()));
        }
        UseTree::Glob(_) => {}
    }
}

/// Appends (crate, name, local name) of the items that the public modules of `items` re-export.
fn re_exported(items: &[Item], found: &mut Vec<(String, String, String)>) {
    for item in items {
        match item {
            Item::Use(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                used(&item.tree, None, found);
            }
            Item::Mod(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                if let Some((_, items)) = &item.content {
                    re_exported(items, found);
                }
            }
            _ => {}
        }
    }
}

/// Returns the crates of this workspace of which `items` re-export all names of a module.
fn globbed(items: &[Item]) -> impl Iterator<Item = String> {
    let text = |item: &Item| match item {
        Item::Use(item) if is_public(&item.vis) => item.tree.to_token_stream().to_string(),
        _ => String::new(),
    };
    items
        .iter()
        .map(text)
        .filter(|text| text.ends_with('*'))
        .filter_map(|text| {
            Some(
                text.strip_prefix("mpmd_")?
                    .split(|c: char| !c.is_alphanumeric())
                    .next()?
                    .to_owned(),
            )
        })
}

/// Appends the names of the items of a crate's file and of its public modules.
fn exported(file: &Path, names: &mut BTreeSet<String>) {
    let items = parsed(file).items;
    let mut used = Vec::new();
    re_exported(&items, &mut used);
    names.extend(used.into_iter().map(|(_, _, name)| name));
    for item in &items {
        match item {
            Item::Mod(item) if is_public(&item.vis) && item.content.is_none() => {
                let folder = match file.file_stem().and_then(|stem| stem.to_str()) {
                    Some("lib" | "mod") | None => file.with_file_name(""),
                    Some(stem) => file.with_file_name(stem),
                };
                let name = item.ident.to_string();
                let (flat, nested) = (
                    folder.join(format!("{name}.rs")),
                    folder.join(&name).join("mod.rs"),
                );
                exported(if flat.exists() { &flat } else { &nested }, names);
            }
            _ => names.extend(signature(item).map(|(name, ..)| name)),
        }
    }
}

/// Returns (name, generics, what its public signature shows) of a public item, `None` for others.
fn signature(item: &Item) -> Option<(String, Option<&Generics>, TokenStream)> {
    let shown = |name: &syn::Ident, generics: &'_ Generics, mut tokens: TokenStream| {
        generics.to_tokens(&mut tokens);
        generics.where_clause.to_tokens(&mut tokens);
        (name.to_string(), tokens)
    };
    let (visibility, attributes, generics, (name, tokens)) = match item {
        Item::Struct(item) => {
            let public = item.fields.iter().filter(|field| is_public(&field.vis));
            let fields = public.map(|field| field.ty.to_token_stream()).collect();
            (
                &item.vis,
                &item.attrs,
                &item.generics,
                shown(&item.ident, &item.generics, fields),
            )
        }
        Item::Enum(item) => {
            let fields = item.variants.iter().flat_map(|variant| &variant.fields);
            let fields = fields.map(|field| field.ty.to_token_stream()).collect();
            (
                &item.vis,
                &item.attrs,
                &item.generics,
                shown(&item.ident, &item.generics, fields),
            )
        }
        Item::Fn(item) => {
            let (sig, generics) = (&item.sig, &item.sig.generics);
            let mut tokens = sig.inputs.to_token_stream();
            sig.output.to_tokens(&mut tokens);
            (
                &item.vis,
                &item.attrs,
                generics,
                shown(&sig.ident, generics, tokens),
            )
        }
        Item::Type(item) => {
            let tokens = item.ty.to_token_stream();
            (
                &item.vis,
                &item.attrs,
                &item.generics,
                shown(&item.ident, &item.generics, tokens),
            )
        }
        Item::Trait(item) => {
            let tokens = item.supertraits.to_token_stream();
            (
                &item.vis,
                &item.attrs,
                &item.generics,
                shown(&item.ident, &item.generics, tokens),
            )
        }
        _ => return None,
    };
    let shown = is_public(visibility) && !is_hidden(attributes);
    shown.then_some((name, Some(generics), tokens))
}

/// The names of a file: what it imports, for the names in its signatures.
struct Names {
    /// (first segment, name) by local name.
    imports: HashMap<String, (String, String)>,
    /// The names in the private aliases of types: callers see what these stand for.
    aliases: HashMap<String, BTreeSet<Name>>,
    /// Names of the crates that are not of this workspace.
    foreign: BTreeSet<String>,
    /// The crate of the file, without `mpmd_`.
    home: String,
}

impl Names {
    /// Returns the names of workspace types and traits in `tokens` that are none of `generics`.
    fn mentioned(&self, tokens: TokenStream, generics: &[&Generics]) -> BTreeSet<Name> {
        let parameters: BTreeSet<String> = generics
            .iter()
            .flat_map(|generics| &generics.params)
            .map(|parameter| match parameter {
                syn::GenericParam::Type(parameter) => parameter.ident.to_string(),
                syn::GenericParam::Const(parameter) => parameter.ident.to_string(),
                syn::GenericParam::Lifetime(parameter) => parameter.lifetime.to_string(),
            })
            .collect();
        let mut words = Vec::new();
        flatten(tokens, &mut words);
        let word = |at: usize| words.get(at).map_or("", String::as_str);
        let mut found = BTreeSet::new();
        for (at, name) in words.iter().enumerate() {
            // `Item` of `Iterator<Item = u8>`, and `With` of `Tree<With<M> = Y>` and of `T::With`,
            // are the traits' names.
            let after = after_arguments(&words, at + 1);
            let binds = word(after) == "=" && word(after + 1) != "=";
            let is_type = name.starts_with(|first: char| first.is_ascii_uppercase());
            if !is_type || binds || name == "Self" || parameters.contains(name) {
                continue;
            }
            let mut first = at;
            while first >= 3 && word(first - 1) == ":" && word(first - 2) == ":" {
                first -= 3;
            }
            let start = word(first);
            // A sealed trait has no name on purpose.
            let sealed = start == "sealed";
            if first < at && (sealed || start == ">" || start.starts_with(char::is_uppercase)) {
                continue;
            }
            let (root, name) = match self.imports.get(start) {
                Some((root, original)) if first == at => (root.as_str(), original),
                Some((root, _)) => (root.as_str(), name),
                None if first == at && PRELUDE.contains(&name.as_str()) => continue,
                None if first == at => ("crate", name),
                None => (start, name),
            };
            if self.foreign.contains(root) {
                continue;
            }
            match self.aliases.get(name) {
                Some(names) => found.extend(names.iter().cloned()),
                None => {
                    let home = root.strip_prefix("mpmd_").unwrap_or(&self.home);
                    found.insert((home.to_owned(), name.clone()));
                }
            }
        }
        found
    }
}

/// Returns the position behind the arguments in angle brackets that begin at `at`, or `at` if none
/// begin there.
fn after_arguments(words: &[String], at: usize) -> usize {
    let mut depth = 0;
    for (end, word) in words.iter().enumerate().skip(at) {
        match word.as_str() {
            "<" => depth += 1,
            ">" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return if end == at { at } else { end + 1 };
        }
    }
    at
}

/// Returns the names of the standard library's crates and of those that the workspace depends on.
fn foreign() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("there is a manifest");
    let section = manifest
        .split("[workspace.dependencies]")
        .nth(1)
        .expect("there is a section");
    let names = section.lines().take_while(|line| !line.starts_with('['));
    let names = names.filter_map(|line| Some(line.split_once('=')?.0.trim().replace('-', "_")));
    let others = names.filter(|name| !name.starts_with("mpmd") && !name.starts_with('#'));
    others
        .chain(["std", "core", "alloc"].map(str::to_owned))
        .collect()
}

/// Appends the identifiers and punctuation of `tokens` in order, without lifetimes.
fn flatten(tokens: TokenStream, words: &mut Vec<String>) {
    let mut lifetime = false;
    for token in tokens {
        match token {
            TokenTree::Group(group) => {
                words.push("(".into());
                flatten(group.stream(), words);
                words.push(")".into());
            }
            TokenTree::Ident(_) if lifetime => {}
            TokenTree::Ident(ident) => words.push(ident.to_string()),
            TokenTree::Punct(punct) if punct.as_char() == '\'' => {
                lifetime = true;
                continue;
            }
            TokenTree::Punct(punct) => words.push(punct.to_string()),
            TokenTree::Literal(_) => {}
        }
        lifetime = false;
    }
}

/// Adds the items of a module of the crate `home` and their signatures to `items`.
fn collect(
    home: &str,
    module: &[Item],
    outer: &HashMap<String, (String, String)>,
    items: &mut Items,
) {
    let (imports, aliases) = (outer.clone(), HashMap::new());
    let mut names = Names {
        imports,
        aliases,
        foreign: foreign(),
        home: home.to_owned(),
    };
    for item in module {
        if let Item::Use(item) = item {
            let mut found = Vec::new();
            used(&item.tree, None, &mut found);
            // A macro may have the name of a trait, which signatures mean.
            found.retain(|(first, ..)| first != "mpmd_derive");
            let import = |(first, name, local): (String, String, String)| (local, (first, name));
            names.imports.extend(found.into_iter().map(import));
        }
    }
    for item in module {
        if let Item::Type(item) = item
            && !is_public(&item.vis)
        {
            let stands_for = names.mentioned(item.ty.to_token_stream(), &[&item.generics]);
            names.aliases.insert(item.ident.to_string(), stands_for);
        }
    }
    let mut add = |of: &str, by: String, tokens: TokenStream, generics: &[&Generics]| {
        let mentioned = names.mentioned(tokens, generics).into_iter();
        let mentions = mentioned.map(|name| Mention {
            by: by.clone(),
            name,
        });
        items.entry(of.to_owned()).or_default().extend(mentions);
    };
    let method = |sig: &syn::Signature| {
        let mut tokens = sig.inputs.to_token_stream();
        sig.output.to_tokens(&mut tokens);
        sig.generics.to_tokens(&mut tokens);
        sig.generics.where_clause.to_tokens(&mut tokens);
        tokens
    };
    let mut modules = Vec::new();
    for item in module {
        if let Some((name, generics, tokens)) = signature(item) {
            add(&name, name.clone(), tokens, generics.as_slice());
        }
        match item {
            Item::Trait(item) if is_public(&item.vis) => {
                let of = item.ident.to_string();
                for inner in &item.items {
                    match inner {
                        TraitItem::Fn(inner) if !is_hidden(&inner.attrs) => {
                            let by = format!("{of}::{}", inner.sig.ident);
                            let generics = [&item.generics, &inner.sig.generics];
                            add(&of, by, method(&inner.sig), &generics);
                        }
                        TraitItem::Type(inner) => {
                            let by = format!("{of}::{}", inner.ident);
                            let generics = [&item.generics, &inner.generics];
                            add(&of, by, inner.bounds.to_token_stream(), &generics);
                        }
                        _ => {}
                    }
                }
            }
            Item::Impl(item) => {
                let syn::Type::Path(of) = &*item.self_ty else {
                    continue;
                };
                let Some(of) = of.path.segments.last().map(|last| last.ident.to_string()) else {
                    continue;
                };
                let shows = item.trait_.as_ref().map(|(_, path, _)| {
                    let last = path.segments.last().expect("a path has a segment");
                    (SHOWING.contains(&last.ident.to_string().as_str()), last)
                });
                if let Some((true, path)) = shows {
                    let arguments = path.arguments.to_token_stream();
                    add(
                        &of,
                        format!("{of} as {}", path.ident),
                        arguments,
                        &[&item.generics],
                    );
                }
                for inner in &item.items {
                    match inner {
                        ImplItem::Fn(inner)
                            if shows.is_none()
                                && is_public(&inner.vis)
                                && !is_hidden(&inner.attrs) =>
                        {
                            let by = format!("{of}::{}", inner.sig.ident);
                            let generics = [&item.generics, &inner.sig.generics];
                            add(&of, by, method(&inner.sig), &generics);
                        }
                        ImplItem::Type(inner) if shows.is_some_and(|(shows, _)| shows) => {
                            let by = format!("{of}::{}", inner.ident);
                            add(&of, by, inner.ty.to_token_stream(), &[&item.generics]);
                        }
                        _ => {}
                    }
                }
            }
            Item::Mod(inner) if !is_hidden(&inner.attrs) => {
                modules.extend(inner.content.as_ref().map(|(_, content)| content));
            }
            _ => {}
        }
    }
    for module in modules {
        collect(home, module, &names.imports, items);
    }
}

/// The names that `mpmd` shows, and the items of the crates that it shows.
struct Facade {
    /// (crate, name, name in `mpmd`), without the prelude's.
    shown: Vec<(String, String, String)>,
    /// Every name that a program can write, by the crate that defines it.
    names: BTreeSet<Name>,
    known: Known,
}

/// The definitions of the crates.
struct Known {
    /// By crate.
    items: BTreeMap<&'static str, Items>,
    /// The crate and name of what a crate re-exports of another, by the crate and its own name.
    re_exports: HashMap<Name, Name>,
    /// The crates of which a crate re-exports a module, or all names of one, by that crate.
    globs: BTreeMap<&'static str, Vec<String>>,
}

impl Known {
    /// Returns the name where it is defined. `home` may re-export it, with or without `mpmd_`.
    fn defined(&self, home: &str, name: &str) -> Name {
        let home = home.trim_start_matches("mpmd_");
        let has = |home: &str| {
            self.items
                .get(home)
                .is_some_and(|items| items.contains_key(name))
        };
        let here = (home.to_owned(), name.to_owned());
        match self.re_exports.get(&here) {
            _ if has(home) => here,
            Some((home, name)) => self.defined(home, name),
            None => {
                let found = self
                    .globs
                    .get(home)
                    .into_iter()
                    .flatten()
                    .find(|other| has(other));
                found.map_or(here, |other| (other.clone(), name.to_owned()))
            }
        }
    }
}

fn facade() -> Facade {
    let mut shown = Vec::new();
    let lib = parsed(&root().join("mpmd/src/lib.rs"));
    re_exported(&lib.items, &mut shown);
    let core = parsed(&root().join("mpmd-core/src/lib.rs"));
    let prelude = core.items.iter().find_map(|item| match item {
        Item::Mod(item) if item.ident == "prelude" => item.content.as_ref(),
        _ => None,
    });
    let mut prelude_names = Vec::new();
    re_exported(&prelude.expect("there is a prelude").1, &mut prelude_names);
    let (mut items, mut re_exports, mut globs) = (BTreeMap::new(), HashMap::new(), BTreeMap::new());
    for name in CRATES {
        let folder = folder_of(name).join("src");
        let mut found = Items::new();
        for file in sources(&folder) {
            let file = parsed(&file);
            collect(name, &file.items, &HashMap::new(), &mut found);
            globs
                .entry(name)
                .or_insert_with(Vec::new)
                .extend(globbed(&file.items));
            let mut used = Vec::new();
            re_exported(&file.items, &mut used);
            for (first, original, local) in used {
                if let Some(other) = first.strip_prefix("mpmd_") {
                    if local.starts_with(char::is_lowercase) {
                        // It may be a module, with what is in it.
                        globs.entry(name).or_default().push(other.to_owned());
                    }
                    re_exports.insert((name.to_owned(), local), (other.to_owned(), original));
                }
            }
        }
        items.insert(name, found);
        if WHOLE.contains(&name) {
            let mut whole = BTreeSet::new();
            exported(&folder.join("lib.rs"), &mut whole);
            shown.extend(
                whole
                    .iter()
                    .map(|local| (format!("mpmd_{name}"), local.clone(), local.clone())),
            );
        }
    }
    let known = Known {
        items,
        re_exports,
        globs,
    };
    let in_core = |first: &str| {
        if first.starts_with("mpmd_") {
            first.to_owned()
        } else {
            "core".to_owned()
        }
    };
    let prelude_names = prelude_names
        .iter()
        .map(|(first, name, _)| (in_core(first), name));
    let named = shown.iter().map(|(home, name, _)| (home.clone(), name));
    let names = named
        .chain(prelude_names)
        .map(|(home, name)| known.defined(&home, name))
        .collect();
    Facade {
        shown,
        names,
        known,
    }
}

impl Facade {
    /// Returns the names in the public signatures of everything shown, by the crates that define
    /// them.
    fn mentions(&self) -> BTreeSet<Mention> {
        let read = |(_, name, _): &&(String, String, String)| !OPAQUE.contains(&name.as_str());
        let mut mentions = BTreeSet::new();
        for (home, name, _) in self.shown.iter().filter(read) {
            let (home, name) = self.known.defined(home, name);
            let items = self
                .known
                .items
                .get(home.as_str())
                .and_then(|items| items.get(&name));
            for Mention {
                by,
                name: (home, name),
            } in items.into_iter().flatten()
            {
                let name = self.known.defined(home, name);
                mentions.insert(Mention {
                    by: by.clone(),
                    name,
                });
            }
        }
        mentions
    }
}

/// Returns (file name, text) of each page of the guide.
fn guide() -> Vec<(String, String)> {
    let entries = fs::read_dir(root().join("docs/guide")).expect("there is a guide");
    let page = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.expect("the folder can be read");
        let text = fs::read_to_string(entry.path()).expect("a page is text");
        (entry.file_name().to_string_lossy().into_owned(), text)
    };
    entries.map(page).collect()
}

#[test]
fn every_program_of_the_guide_is_compiled() {
    let lib = include_str!("../../mpmd/src/lib.rs");
    for (page, text) in guide() {
        let included = format!("include_str!(\"../../docs/guide/{page}\")");
        assert!(
            lib.contains(&included),
            "`{page}` is no part of the documentation"
        );
        let fences = text
            .lines()
            .filter(|line| line.trim_start().starts_with("```"));
        let ignored: Vec<&str> = fences.filter(|fence| fence.contains("ignore")).collect();
        assert!(
            ignored.is_empty(),
            "`{page}` has programs that are not compiled: {ignored:?}"
        );
    }
}

#[test]
fn every_type_in_a_public_signature_has_a_name() {
    let facade = facade();
    let mentions = facade.mentions();
    for (by, home, name) in [
        ("Program::jit", "core", "Kernel"),
        ("Registry::register", "layout", "LeafPlacement"),
    ] {
        let mention = Mention {
            by: by.into(),
            name: (home.into(), name.into()),
        };
        assert!(
            mentions.contains(&mention),
            "of {} mentions, none is {mention:?}",
            mentions.len()
        );
    }
    let nameless: Vec<String> = mentions
        .iter()
        .filter(|mention| !facade.names.contains(&mention.name))
        .map(
            |Mention {
                 by,
                 name: (home, name),
             }| format!("{name} of mpmd-{home} ({by})"),
        )
        .collect();
    assert!(
        nameless.is_empty(),
        "`mpmd` does not re-export {}",
        nameless.join(", ")
    );
}

#[test]
fn every_name_has_a_reason() {
    let facade = facade();
    let mut texts = vec![
        fs::read_to_string(root().join("mpmd/src/lib.rs")).unwrap(),
        fs::read_to_string(root().join("README.md")).unwrap(),
    ];
    texts.extend(guide().into_iter().map(|(_, text)| text));
    // Of this crate only its comments, not what it re-exports.
    let lines = texts[0]
        .lines()
        .filter(|line| line.trim_start().starts_with("//"));
    texts[0] = lines.collect::<Vec<_>>().join("\n");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| text.split(|c| !is_word(c)))
        .collect();
    let mentions = facade.mentions();
    // An item's own signatures are no reason to show it.
    let is_mentioned = |item: &Name| {
        let by_other = |by: &str| by.split("::").next() != Some(&item.1);
        mentions
            .iter()
            .any(|mention| mention.name == *item && by_other(&mention.by))
    };
    let whole = |home: &str| WHOLE.iter().any(|name| home == format!("mpmd_{name}"));
    let idle: Vec<&String> = facade
        .shown
        .iter()
        .filter(|(home, _, _)| !whole(home))
        .filter(|(home, name, local)| {
            !words.contains(local.as_str()) && !is_mentioned(&facade.known.defined(home, name))
        })
        .map(|(_, _, local)| local)
        .collect();
    assert!(
        idle.is_empty(),
        "no signature, page of the guide or comment of `mpmd` names {idle:?}: leave them out"
    );
}
