//! Paths of a tree's leaves.

use std::borrow::Cow;
use std::fmt;

/// The name of a branch, one step of a [`Path`].
///
/// A field and a key are equal if their texts are. An index is equal to the same index alone: field
/// `0` of a tuple is element 0 of a vector, but the key "0" of a map is neither.
#[derive(Clone, Debug)]
pub enum Name {
    /// The name of a struct's field.
    Field(&'static str),
    /// The index of an element of a sequence, or of a field of a tuple, from 0.
    Index(usize),
    /// A key of a map.
    Key(String),
}

impl Name {
    /// True if this is the name of element `index` of a sequence.
    #[inline]
    pub(super) fn is_index(&self, index: usize) -> bool {
        *self == Self::Index(index)
    }

    /// True if the name's text is `text`.
    #[inline]
    pub(super) fn is(&self, text: &str) -> bool {
        match self {
            // Mostly the same constant.
            Self::Field(name) => std::ptr::eq(*name, text) || *name == text,
            Self::Index(_) => self.text() == text,
            Self::Key(key) => key == text,
        }
    }

    /// Returns the name for messages beside other names: a key that reads as an index has quotes.
    pub(super) fn label(&self) -> Cow<'_, str> {
        match self {
            Self::Key(key) if key.parse::<usize>().is_ok() => Cow::Owned(format!("{key:?}")),
            _ => self.text(),
        }
    }

    /// Returns the name as text.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Field(name) => Cow::Borrowed(name),
            Self::Index(index) => Cow::Owned(index.to_string()),
            Self::Key(key) => Cow::Borrowed(key),
        }
    }
}

impl PartialEq for Name {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Index(a), Self::Index(b)) => a == b,
            (Self::Index(_), _) | (_, Self::Index(_)) => false,
            (_, Self::Field(name)) => self.is(name),
            (_, Self::Key(key)) => self.is(key),
        }
    }
}

impl Eq for Name {}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => f.write_str(name),
            Self::Index(index) => write!(f, "{index}"),
            Self::Key(key) => f.write_str(key),
        }
    }
}

/// The steps from the root of a tree to a leaf, shown as `blocks/3/w`; empty at the root.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Path {
    names: Vec<Name>,
}

impl Path {
    /// Appends a step to the end of the path.
    pub fn push(&mut self, name: Name) {
        self.names.push(name);
    }

    /// Removes the last step and returns it, or `None` at the root.
    pub fn pop(&mut self) -> Option<Name> {
        self.names.pop()
    }

    /// Returns all steps, from the root on.
    pub fn names(&self) -> &[Name] {
        &self.names
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.names.iter().enumerate() {
            let separator = if i == 0 { "" } else { "/" };
            write!(f, "{separator}{name}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_joined_by_slashes() {
        let mut path = Path::default();
        assert_eq!(path.to_string(), "");
        path.push(Name::Field("blocks"));
        path.push(Name::Index(3));
        path.push(Name::Key("w".into()));
        assert_eq!(path.to_string(), "blocks/3/w");
        assert_eq!(path.pop(), Some(Name::Field("w")));
        assert_eq!(path.names().len(), 2);
    }

    #[test]
    fn fields_and_keys_are_compared_as_texts() {
        assert_eq!(Name::Field("a"), Name::Key("a".into()));
        assert_ne!(Name::Index(0), Name::Key("0".into()));
        assert_ne!(Name::Index(0), Name::Index(1));
        assert_ne!(Name::Field("a"), Name::Field("b"));
    }
}
