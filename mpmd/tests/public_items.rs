//! The names that a user of the crate can meet: every type in a public signature has one, and each
//! has a reason. Both are read from the sources.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Generics, ImplItem, Item, TraitItem, UseTree, Visibility};

/// The crates whose items `mpmd` re-exports.
const CRATES: [&str; 11] = [
    "base",
    "candle",
    "core",
    "device",
    "launch",
    "layout",
    "proto",
    "record",
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
const PRELUDE: [&str; 26] = [
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
    "Vec",
];

/// Traits of the standard library whose implementations show types: `type Output = …`.
const SHOWING: [&str; 6] = ["Deref", "From", "Index", "IntoFuture", "IntoIterator", "Iterator"];

/// A name in a public signature.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Mention {
    /// The item, as `Program::jit`.
    by: String,
    name: String,
}

/// The public items of a crate by name, each with the names in its public signatures.
type Items = BTreeMap<String, Vec<Mention>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in a folder").to_owned()
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
        let text = attribute.meta.to_token_stream().to_string().replace(' ', "");
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
                let (flat, nested) =
                    (folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs"));
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
            (&item.vis, &item.attrs, &item.generics, shown(&item.ident, &item.generics, fields))
        }
        Item::Enum(item) => {
            let fields = item.variants.iter().flat_map(|variant| &variant.fields);
            let fields = fields.map(|field| field.ty.to_token_stream()).collect();
            (&item.vis, &item.attrs, &item.generics, shown(&item.ident, &item.generics, fields))
        }
        Item::Fn(item) => {
            let (sig, generics) = (&item.sig, &item.sig.generics);
            let mut tokens = sig.inputs.to_token_stream();
            sig.output.to_tokens(&mut tokens);
            (&item.vis, &item.attrs, generics, shown(&sig.ident, generics, tokens))
        }
        Item::Type(item) => {
            let tokens = item.ty.to_token_stream();
            (&item.vis, &item.attrs, &item.generics, shown(&item.ident, &item.generics, tokens))
        }
        Item::Trait(item) => {
            let tokens = item.supertraits.to_token_stream();
            (&item.vis, &item.attrs, &item.generics, shown(&item.ident, &item.generics, tokens))
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
    aliases: HashMap<String, BTreeSet<String>>,
    /// Names of the crates that are not of this workspace.
    foreign: BTreeSet<String>,
}

impl Names {
    /// Returns the names of workspace types and traits in `tokens` that are none of `generics`.
    fn mentioned(&self, tokens: TokenStream, generics: &[&Generics]) -> BTreeSet<String> {
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
            // `Item` of `Iterator<Item = u8>` and `With` of `T::With` are the traits' names.
            let binds = word(at + 1) == "=" && word(at + 2) != "=";
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
            let ours = !self.foreign.contains(root);
            match self.aliases.get(name) {
                Some(names) if ours => found.extend(names.iter().cloned()),
                None if ours => drop(found.insert(name.clone())),
                _ => {}
            }
        }
        found
    }
}

/// Returns the names of the standard library's crates and of those that the workspace depends on.
fn foreign() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("there is a manifest");
    let section = manifest.split("[workspace.dependencies]").nth(1).expect("there is a section");
    let names = section.lines().take_while(|line| !line.starts_with('['));
    let names = names.filter_map(|line| Some(line.split_once('=')?.0.trim().replace('-', "_")));
    let others = names.filter(|name| !name.starts_with("mpmd") && !name.starts_with('#'));
    others.chain(["std", "core", "alloc"].map(str::to_owned)).collect()
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

/// Adds the items of a module and their signatures to `items`.
fn collect(module: &[Item], outer: &HashMap<String, (String, String)>, items: &mut Items) {
    let (imports, aliases) = (outer.clone(), HashMap::new());
    let mut names = Names { imports, aliases, foreign: foreign() };
    for item in module {
        if let Item::Use(item) = item {
            let mut found = Vec::new();
            used(&item.tree, None, &mut found);
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
        let mentions = mentioned.map(|name| Mention { by: by.clone(), name });
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
                let syn::Type::Path(of) = &*item.self_ty else { continue };
                let Some(of) = of.path.segments.last().map(|last| last.ident.to_string()) else {
                    continue;
                };
                let shows = item.trait_.as_ref().map(|(_, path, _)| {
                    let last = path.segments.last().expect("a path has a segment");
                    (SHOWING.contains(&last.ident.to_string().as_str()), last)
                });
                if let Some((true, path)) = shows {
                    let arguments = path.arguments.to_token_stream();
                    add(&of, format!("{of} as {}", path.ident), arguments, &[&item.generics]);
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
        collect(module, &names.imports, items);
    }
}

/// The names that `mpmd` shows, and the items of the crates that it shows.
struct Facade {
    /// (crate, name, name in `mpmd`), without the prelude's.
    shown: Vec<(String, String, String)>,
    /// Every name that a program can write.
    names: BTreeSet<String>,
    /// By crate.
    items: BTreeMap<&'static str, Items>,
}

fn facade() -> Facade {
    let mut shown = Vec::new();
    let lib = parsed(&root().join("mpmd/src/lib.rs"));
    re_exported(&lib.items, &mut shown);
    let mut names: BTreeSet<String> = shown.iter().map(|(_, _, name)| name.clone()).collect();
    let core = parsed(&root().join("mpmd-core/src/lib.rs"));
    let prelude = core.items.iter().find_map(|item| match item {
        Item::Mod(item) if item.ident == "prelude" => item.content.as_ref(),
        _ => None,
    });
    let mut prelude_names = Vec::new();
    re_exported(&prelude.expect("there is a prelude").1, &mut prelude_names);
    names.extend(prelude_names.into_iter().map(|(_, _, name)| name));
    let mut items = BTreeMap::new();
    for name in CRATES {
        let folder = root().join(format!("mpmd-{name}/src"));
        let mut found = Items::new();
        for file in sources(&folder) {
            collect(&parsed(&file).items, &HashMap::new(), &mut found);
        }
        items.insert(name, found);
        if WHOLE.contains(&name) {
            let mut whole = BTreeSet::new();
            exported(&folder.join("lib.rs"), &mut whole);
            shown.extend(
                whole.iter().map(|local| (format!("mpmd_{name}"), local.clone(), local.clone())),
            );
            names.extend(whole);
        }
    }
    Facade { shown, names, items }
}

impl Facade {
    /// Returns the names in the public signatures of everything shown.
    fn mentions(&self) -> BTreeSet<Mention> {
        let mut mentions = BTreeSet::new();
        let read = |(_, name, _): &&(String, String, String)| !OPAQUE.contains(&name.as_str());
        for (home, name, _) in self.shown.iter().filter(read) {
            let home = home.trim_start_matches("mpmd_");
            let at_home = self.items.get(home).and_then(|items| items.get(name));
            // A crate may re-export what another defines.
            let elsewhere = self.items.values().filter_map(|items| items.get(name));
            match at_home {
                Some(found) => mentions.extend(found.iter().cloned()),
                None => mentions.extend(elsewhere.flatten().cloned()),
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
    let lib = include_str!("../src/lib.rs");
    for (page, text) in guide() {
        let included = format!("include_str!(\"../../docs/guide/{page}\")");
        assert!(lib.contains(&included), "`{page}` is no part of the documentation");
        let fences = text.lines().filter(|line| line.trim_start().starts_with("```"));
        let ignored: Vec<&str> = fences.filter(|fence| fence.contains("ignore")).collect();
        assert!(ignored.is_empty(), "`{page}` has programs that are not compiled: {ignored:?}");
    }
}

#[test]
fn every_type_in_a_public_signature_has_a_name() {
    let facade = facade();
    let mentions = facade.mentions();
    for (by, name) in [("Program::jit", "Kernel"), ("Registry::register", "Placement")] {
        let known = mentions.iter().any(|mention| mention.by == by && mention.name == name);
        assert!(known, "`{by}` takes a `{name}`, which was not read: {}", mentions.len());
    }
    let nameless: Vec<String> = mentions
        .iter()
        .filter(|mention| !facade.names.contains(&mention.name))
        .map(|mention| format!("{} ({})", mention.name, mention.by))
        .collect();
    assert!(nameless.is_empty(), "`mpmd` does not re-export {}", nameless.join(", "));
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
    let lines = texts[0].lines().filter(|line| line.trim_start().starts_with("//"));
    texts[0] = lines.collect::<Vec<_>>().join("\n");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut reasons: BTreeSet<&str> =
        texts.iter().flat_map(|text| text.split(|c| !is_word(c))).collect();
    let mentions = facade.mentions();
    reasons.extend(mentions.iter().map(|mention| mention.name.as_str()));
    let whole = |home: &str| WHOLE.iter().any(|name| home == format!("mpmd_{name}"));
    let idle: Vec<&String> = facade
        .shown
        .iter()
        .filter(|(home, _, _)| !whole(home))
        .map(|(_, _, name)| name)
        .filter(|name| !reasons.contains(name.as_str()))
        .collect();
    assert!(
        idle.is_empty(),
        "no signature, page of the guide or comment of `mpmd` names {idle:?}: leave them out"
    );
}
