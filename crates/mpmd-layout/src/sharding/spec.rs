//! Partition specs: assign the dimensions of an array to the axes of a mesh.

use std::fmt;

use crate::fingerprint::Fingerprint;

/// The mesh axes that divide each dimension of an array, one entry for each of the first
/// dimensions. Dimensions beyond the last entry are not divided.
///
/// `spec![None, "model"]` divides dimension 1 over axis `model`. `spec![("data", "model"), None]`
/// divides dimension 0 over two axes, the first of them major.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Spec(Vec<SpecEntry>);

/// The mesh axes that divide one dimension.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub enum SpecEntry {
    /// The dimension is not divided.
    #[default]
    None,
    /// The dimension is divided over the axis of this name.
    Axis(String),
    /// The dimension is divided over the axes of these names, major to minor.
    Axes(Vec<String>),
}

/// Creates a [`Spec`] from its entries: `None`, an axis name, or a tuple of names.
///
/// ```
/// use mpmd_layout::spec;
///
/// assert_eq!(spec![None, "model"].to_string(), "P(None, model)");
/// assert_eq!(spec![("data", "model"), None].to_string(), "P((data, model), None)");
/// assert_eq!(spec![].to_string(), "P()");
/// ```
#[macro_export]
macro_rules! spec {
    ($($entry:expr),* $(,)?) => {
        $crate::sharding::Spec::new(vec![$($crate::sharding::SpecEntry::from($entry)),*])
    };
}

impl Spec {
    /// Creates a spec with these entries. A list of one axis becomes that axis, an empty list
    /// becomes `None`.
    pub fn new(entries: Vec<SpecEntry>) -> Self {
        Self(entries.into_iter().map(SpecEntry::simplified).collect())
    }

    /// Returns the entries, one for each of the first dimensions.
    pub fn entries(&self) -> &[SpecEntry] {
        &self.0
    }

    pub(super) fn add_to(&self, fingerprint: &mut Fingerprint) {
        fingerprint.word(self.0.len() as u64);
        for entry in &self.0 {
            fingerprint.word(entry.axes().len() as u64);
            entry.axes().iter().for_each(|axis| fingerprint.text(axis));
        }
    }
}

impl SpecEntry {
    /// Returns the names of the axes, major to minor; none if the dimension is not divided.
    pub fn axes(&self) -> &[String] {
        match self {
            Self::None => &[],
            Self::Axis(axis) => std::slice::from_ref(axis),
            Self::Axes(axes) => axes,
        }
    }

    fn simplified(self) -> Self {
        match self {
            Self::Axes(mut axes) if axes.len() < 2 => axes.pop().map_or(Self::None, Self::Axis),
            other => other,
        }
    }
}

impl From<Option<&str>> for SpecEntry {
    fn from(axis: Option<&str>) -> Self {
        axis.map_or(Self::None, Self::from)
    }
}

impl From<&str> for SpecEntry {
    fn from(axis: &str) -> Self {
        Self::Axis(axis.to_owned())
    }
}

impl From<String> for SpecEntry {
    fn from(axis: String) -> Self {
        Self::Axis(axis)
    }
}

impl From<&String> for SpecEntry {
    fn from(axis: &String) -> Self {
        Self::Axis(axis.clone())
    }
}

impl From<Vec<String>> for SpecEntry {
    fn from(axes: Vec<String>) -> Self {
        Self::Axes(axes).simplified()
    }
}

macro_rules! from_tuples {
    ($(($($axis:ident),+))*) => {$(
        impl<$($axis: Into<String>),+> From<($($axis,)+)> for SpecEntry {
            fn from(axes: ($($axis,)+)) -> Self {
                #[allow(non_snake_case, reason = "each type parameter names its value too")]
                let ($($axis,)+) = axes;
                Self::from(vec![$($axis.into()),+])
            }
        }
    )*};
}

from_tuples! { (A) (A, B) (A, B, C) (A, B, C, D) }

impl fmt::Display for SpecEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Axis(axis) => f.write_str(axis),
            Self::Axes(axes) => write!(f, "({})", axes.join(", ")),
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<String> = self.0.iter().map(SpecEntry::to_string).collect();
        write!(f, "P({})", entries.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_an_entry() {
        let owned = String::from("c");
        let spec = spec![
            None,
            "model",
            ("a", "b"),
            &owned,
            Some("d"),
            ("e",),
            Vec::<String>::new()
        ];
        assert_eq!(spec.to_string(), "P(None, model, (a, b), c, d, e, None)");
        assert_eq!(
            spec![("a", String::from("b"), "c", "d"),].entries()[0]
                .axes()
                .len(),
            4
        );
        assert_eq!(spec![].entries(), []);
    }

    #[test]
    fn lists_of_one_axis_are_that_axis() {
        let one = SpecEntry::Axes(vec!["x".into()]);
        assert_eq!(
            Spec::new(vec![one, SpecEntry::Axes(vec![])]),
            spec!["x", None]
        );
        assert_ne!(spec!["x", None], spec!["x"], "specs, not layouts");
    }
}
