//! `#[derive(Tree)]` for structures of arrays. Re-exported as `mpmd::tree::Tree`, beside the
//! trait.

#![forbid(unsafe_code)]

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{
    Data, DeriveInput, Error, Field, Fields, GenericParam, Member, Result, TypeParam,
    TypeParamBound,
};

/// Implements `Tree` for a struct. The struct's one type parameter is the leaf type.
///
/// Fields may be leaves (`L`), containers of them (`Vec<L>`, `(L, L)`) and other such structs
/// (`Other<L>`). The struct and references to it also convert into a `PrefixTree`, if the leaves
/// are `Clone`. Misuse is a compile error at the wrong field, parameter or bound.
#[proc_macro_derive(Tree)]
pub fn derive_tree(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let derived = syn::parse2(input.into()).and_then(|input| derive(&input));
    derived.unwrap_or_else(Error::into_compile_error).into()
}

fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let fields = fields(input)?;
    let leaf = leaf_parameter(input)?;
    for field in fields {
        if !mentions(field.ty.to_token_stream(), &leaf.ident) {
            let message = format!(
                "a field of a tree holds leaves, but this type does not name `{}`",
                leaf.ident
            );
            return Err(Error::new(field.ty.span(), message));
        }
    }

    let parts: Vec<TreeField> = fields
        .iter()
        .enumerate()
        .map(|(index, field)| TreeField::new(index, field))
        .collect();
    let tree = tree_impl(input, &leaf.ident, &parts);
    let prefix = prefix_impls(input, &leaf.ident);
    Ok(quote! {
        #tree
        #prefix
    })
}

/// Returns the path of the module whose items the generated code refers to.
fn private() -> TokenStream {
    quote!(::mpmd::__private)
}

/// Returns the implementation of `Tree`.
fn tree_impl(input: &DeriveInput, leaf: &Ident, parts: &[TreeField]) -> TokenStream {
    let name = &input.ident;
    let tree = private();
    let mapped = Ident::new("__M", Span::mixed_site());
    let implemented = parameters(input, &quote!(#tree::Leaf));
    let own = arguments(input, leaf);
    let with = arguments(input, &mapped);
    let reading = reading_methods(leaf, parts);
    let mapping = mapping_methods(input, leaf, &mapped, parts);

    quote! {
        #[automatically_derived]
        impl <#implemented> #tree::Tree for #name <#own> {
            type Leaf = #leaf;
            type With<#mapped: #tree::Leaf> = #name <#with>;

            #reading
            #mapping
        }
    }
}

/// Returns the methods of `Tree` that read a tree.
fn reading_methods(leaf_name: &Ident, parts: &[TreeField]) -> TokenStream {
    let tree = private();
    let members: Vec<_> = parts.iter().map(|part| &part.member).collect();
    let names: Vec<_> = parts.iter().map(|part| part.name(&tree)).collect();
    let count = parts.len();
    let indices: Vec<_> = (0..count).collect();

    quote! {
        fn structure(&self) -> #tree::Structure {
            #tree::Structure::node([
                #((#names, #tree::Tree::structure(&self.#members)),)*
            ])
        }

        fn has_structure(&self, structure: &#tree::Structure) -> bool {
            match structure {
                #tree::Structure::Node(branches) => {
                    branches.len() == #count
                        #(
                            && branches[#indices].0 == #names
                            && #tree::Tree::has_structure(
                                &self.#members, &branches[#indices].1
                            )
                        )*
                }
                _ => false,
            }
        }

        fn visit<'a>(
            &'a self,
            path: &mut #tree::Path,
            f: &mut dyn ::core::ops::FnMut(&#tree::Path, &'a #leaf_name),
        ) {
            #(
                path.push(#names);
                #tree::Tree::visit(&self.#members, path, f);
                path.pop();
            )*
        }

        fn each_leaf<'a>(&'a self, f: &mut dyn ::core::ops::FnMut(&'a #leaf_name)) {
            #(#tree::Tree::each_leaf(&self.#members, f);)*
        }
    }
}

/// Returns the methods of `Tree` that build a tree from another tree or from leaves.
fn mapping_methods(
    input: &DeriveInput,
    leaf_name: &Ident,
    mapped: &Ident,
    parts: &[TreeField],
) -> TokenStream {
    let name = &input.ident;
    let tree = private();
    let with = arguments(input, mapped);
    let members: Vec<_> = parts.iter().map(|part| &part.member).collect();
    let texts: Vec<_> = parts.iter().map(|part| &part.text).collect();
    let indices: Vec<_> = (0..parts.len()).collect();

    quote! {
        fn try_map<#mapped: #tree::Leaf, __E>(
            self,
            f: &mut dyn ::core::ops::FnMut(#leaf_name) -> ::core::result::Result<#mapped, __E>,
        ) -> ::core::result::Result<#name <#with>, __E> {
            ::core::result::Result::Ok(#name {
                #(#members: #tree::Tree::try_map(self.#members, f)?,)*
            })
        }

        fn try_map_ref<#mapped: #tree::Leaf, __E>(
            &self,
            f: &mut dyn ::core::ops::FnMut(&#leaf_name) -> ::core::result::Result<#mapped, __E>,
        ) -> ::core::result::Result<#name <#with>, __E> {
            ::core::result::Result::Ok(#name {
                #(#members: #tree::Tree::try_map_ref(&self.#members, f)?,)*
            })
        }

        fn build(
            structure: &#tree::Structure,
            leaves: &mut dyn ::core::iter::Iterator<Item = #leaf_name>,
        ) -> ::core::result::Result<Self, #tree::TreeError> {
            let branches = structure.fields(&[#(#texts),*])?;
            ::core::result::Result::Ok(#name {
                #(#members: #tree::Tree::build(&branches[#indices].1, leaves)
                    .map_err(|error| error.below(&branches[#indices].0))?,)*
            })
        }
    }
}

/// Returns the conversions of a tree to a `PrefixTree`.
fn prefix_impls(input: &DeriveInput, leaf_name: &Ident) -> TokenStream {
    let name = &input.ident;
    let tree = private();
    let with_clone = parameters(input, &quote!(#tree::Leaf + ::core::clone::Clone));
    let own = arguments(input, leaf_name);

    quote! {
        #[automatically_derived]
        impl <#with_clone> ::core::convert::From<&#name <#own>> for #tree::PrefixTree<#leaf_name> {
            fn from(tree: &#name <#own>) -> Self {
                #tree::PrefixTree::of(tree)
            }
        }

        #[automatically_derived]
        impl <#with_clone> ::core::convert::From<#name <#own>> for #tree::PrefixTree<#leaf_name> {
            fn from(tree: #name <#own>) -> Self {
                #tree::PrefixTree::of(&tree)
            }
        }
    }
}

/// A field of the struct that the generated code handles.
struct TreeField {
    member: Member,
    /// The field's name, or its index in a tuple struct, as it appears in the paths of leaves.
    text: String,
}

impl TreeField {
    fn new(index: usize, field: &Field) -> Self {
        let Some(ident) = &field.ident else {
            return Self {
                member: index.into(),
                text: index.to_string(),
            };
        };
        let text = ident.to_string();
        let text = text.strip_prefix("r#").unwrap_or(&text).to_owned();
        Self {
            member: ident.clone().into(),
            text,
        }
    }

    fn name(&self, tree: &TokenStream) -> TokenStream {
        let text = &self.text;
        match &self.member {
            Member::Named(_) => quote!(#tree::Name::Field(#text)),
            Member::Unnamed(index) => {
                let index = index.index as usize;
                quote!(#tree::Name::Index(#index))
            }
        }
    }
}

fn fields(input: &DeriveInput) -> Result<&Fields> {
    let fields = match &input.data {
        Data::Struct(data) => &data.fields,
        Data::Enum(data) => {
            return Err(Error::new(
                data.enum_token.span(),
                "a tree is a struct, not an enum",
            ));
        }
        Data::Union(data) => {
            return Err(Error::new(
                data.union_token.span(),
                "a tree is a struct, not a union",
            ));
        }
    };

    if fields.is_empty() {
        return Err(Error::new(
            input.ident.span(),
            "a tree has at least one field",
        ));
    }
    Ok(fields)
}

/// Returns the struct's one type parameter, the leaf type. Fails if there is none or a second one,
/// or if it has a bound other than `Leaf`. Also fails for lifetimes and where clauses.
fn leaf_parameter(input: &DeriveInput) -> Result<&TypeParam> {
    let mut leaf = None;
    for parameter in &input.generics.params {
        match parameter {
            GenericParam::Type(parameter) if leaf.is_none() => leaf = Some(parameter),
            GenericParam::Type(second) => {
                return Err(Error::new(
                    second.span(),
                    "a tree has one type parameter, its leaf",
                ));
            }
            GenericParam::Lifetime(lifetime) => {
                let message = "a tree has no lifetime; its leaves may";
                return Err(Error::new(lifetime.span(), message));
            }
            GenericParam::Const(_) => {}
        }
    }

    let Some(leaf) = leaf else {
        let message = format!(
            "a tree has a type parameter, its leaf: `struct {}<L>`",
            input.ident
        );
        return Err(Error::new(input.ident.span(), message));
    };
    let is_leaf = |bound: &TypeParamBound| {
        matches!(bound, TypeParamBound::Trait(bound)
            if bound.path.segments.last().is_some_and(|segment| segment.ident == "Leaf"))
    };

    if let Some(bound) = leaf.bounds.iter().find(|bound| !is_leaf(bound)) {
        let message = "a tree takes every leaf: its parameter has no bound, or only `Leaf`";
        return Err(Error::new(bound.span(), message));
    }

    if let Some(clause) = input
        .generics
        .where_clause
        .as_ref()
        .filter(|clause| !clause.predicates.is_empty())
    {
        return Err(Error::new(
            clause.span(),
            "a tree takes every leaf: it has no where clause",
        ));
    }
    Ok(leaf)
}

/// Returns the generic parameters for an `impl` block, separated by commas and without angle
/// brackets. The leaf type gets the bound `bound`.
fn parameters(input: &DeriveInput, bound: &TokenStream) -> TokenStream {
    let parameters = input
        .generics
        .params
        .iter()
        .map(|parameter| match parameter {
            GenericParam::Type(leaf) => {
                let ident = &leaf.ident;
                quote!(#ident: #bound)
            }
            GenericParam::Const(parameter) => {
                let ident = &parameter.ident;
                let ty = &parameter.ty;
                quote!(const #ident: #ty)
            }
            GenericParam::Lifetime(lifetime) => lifetime.to_token_stream(),
        });
    quote!(#(#parameters),*)
}

/// Returns the generic arguments of the struct, separated by commas and without angle brackets,
/// with `leaf` as the leaf type.
fn arguments(input: &DeriveInput, leaf: &Ident) -> TokenStream {
    let arguments = input
        .generics
        .params
        .iter()
        .map(|parameter| match parameter {
            GenericParam::Type(_) => leaf.to_token_stream(),
            GenericParam::Const(parameter) => parameter.ident.to_token_stream(),
            GenericParam::Lifetime(lifetime) => lifetime.lifetime.to_token_stream(),
        });
    quote!(#(#arguments),*)
}

fn mentions(tokens: TokenStream, ident: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(found) => found == *ident,
        TokenTree::Group(group) => mentions(group.stream(), ident),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        derive(&syn::parse_str(text).unwrap())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn structs_of_leaves_are_accepted() {
        for text in [
            "struct A<L> { a: L, b: Vec<L>, c: (L, [L; 2]), d: Other<L> }",
            "struct A<L: Leaf>(L, L);",
            "struct A<L: mpmd_core::tree::Leaf = f32, const N: usize = 2> { a: [L; N] }",
        ] {
            let derived = derive(&syn::parse_str(text).unwrap()).unwrap();
            syn::parse2::<syn::File>(derived).unwrap();
        }
    }

    #[test]
    fn misuse_is_a_compile_error_with_the_cause() {
        for (text, expected) in [
            ("enum A<L> { A(L) }", "not an enum"),
            ("union A<L> { a: L }", "not a union"),
            ("struct A<L>;", "at least one field"),
            ("struct A { a: f32 }", "its leaf: `struct A<L>`"),
            ("struct A<L, M> { a: L, b: M }", "one type parameter"),
            ("struct A<'a, L> { a: &'a L }", "no lifetime"),
            ("struct A<L> { a: L, b: usize }", "does not name `L`"),
            ("struct A<L: Clone> { a: L }", "only `Leaf`"),
            ("struct A<L> where L: Clone { a: L }", "no where clause"),
        ] {
            let error = error(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
