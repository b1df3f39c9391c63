//! Reads the fields of a case. An error names the path of the field.

use std::fmt;

use serde_json::Value;

/// The maximum number of characters of a value in an error message.
const SHOWN: usize = 60;

/// Description of the values of [`Field::id`], for error messages.
pub(super) const ID: &str = "a number from 0 to 4294967295";

/// A JSON value of a case and its path, as `sharding.mesh.shape[1]`.
#[derive(Clone, Debug)]
pub(super) struct Field<'a> {
    value: &'a Value,
    path: String,
}

/// The error of a case that does not have the form of its command's cases.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Malformed {
    path: String,
    problem: String,
}

impl<'a> Field<'a> {
    /// Returns the field that is the whole case.
    pub(super) fn case(value: &'a Value) -> Self {
        Self {
            value,
            path: String::new(),
        }
    }

    /// Returns the field `name` of this object. Fails if the field is missing or null, or if this
    /// value is not an object.
    pub(super) fn get(&self, name: &str) -> Result<Field<'a>, Malformed> {
        match self.find(name)? {
            Some(field) => Ok(field),
            None => Err(self.malformed(format!("has no field `{name}`"))),
        }
    }

    /// Returns the field `name` of this object; `None` if the field is missing or null. Fails if
    /// this value is not an object.
    pub(super) fn find(&self, name: &str) -> Result<Option<Field<'a>>, Malformed> {
        let Value::Object(fields) = self.value else {
            return Err(self.expected("an object"));
        };
        let dot = if self.path.is_empty() { "" } else { "." };
        let field = |value| Field {
            value,
            path: format!("{}{dot}{name}", self.path),
        };
        Ok(fields.get(name).filter(|value| !value.is_null()).map(field))
    }

    /// Checks that all fields of this object are in `known`. Fails for other fields, or if this
    /// value is not an object.
    pub(super) fn only(&self, known: &[&str]) -> Result<(), Malformed> {
        let Value::Object(fields) = self.value else {
            return Err(self.expected("an object"));
        };
        let mut unknown: Vec<&String> = fields
            .keys()
            .filter(|name| !known.contains(&name.as_str()))
            .collect();
        // Sorted, because the parser may keep any order.
        unknown.sort_unstable();

        let Some(name) = unknown.first() else {
            return Ok(());
        };
        Err(self.malformed(format!(
            "has the unknown field `{name}`; known are {}",
            known.join(", ")
        )))
    }

    /// Returns the (name, value) fields of an object, sorted by name. `None` if this value is not
    /// an object.
    pub(super) fn entries(&self) -> Option<Vec<(&'a str, Field<'a>)>> {
        let Value::Object(fields) = self.value else {
            return None;
        };
        let field = |name: &str, value| Field {
            value,
            path: format!("{}[{name:?}]", self.path),
        };

        let fields = fields.iter();
        let mut entries: Vec<_> = fields
            .map(|(name, value)| (name.as_str(), field(name, value)))
            .collect();
        // Sorted, because the parser may keep any order.
        entries.sort_by_key(|(name, _)| *name);
        Some(entries)
    }

    /// Returns the elements of a list. `None` if this value is not a list.
    pub(super) fn elements(&self) -> Option<Vec<Field<'a>>> {
        let Value::Array(elements) = self.value else {
            return None;
        };
        let field = |(i, value)| Field {
            value,
            path: format!("{}[{i}]", self.path),
        };
        Some(elements.iter().enumerate().map(field).collect())
    }

    /// Reads the elements of a list, each by `read`. Fails if this value is not a list, or with the
    /// first error of `read`.
    pub(super) fn list<T>(
        &self,
        read: impl Fn(&Field<'a>) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let elements = self.elements().ok_or_else(|| self.expected("a list"))?;
        elements.iter().map(read).collect()
    }

    /// Returns the elements of a list of two. Fails for any other value.
    pub(super) fn pair(&self) -> Result<[Field<'a>; 2], Malformed> {
        let elements = self
            .elements()
            .and_then(|elements| elements.try_into().ok());
        elements.ok_or_else(|| self.expected("a list of two"))
    }

    /// Returns the text of this field. Fails if the value is not a text.
    pub(super) fn text(&self) -> Result<String, Malformed> {
        self.as_text()
            .map(str::to_owned)
            .ok_or_else(|| self.expected("a text"))
    }

    /// Returns the text of this field. `None` if the value is not a text.
    pub(super) fn as_text(&self) -> Option<&'a str> {
        self.value.as_str()
    }

    pub(super) fn is_null(&self) -> bool {
        self.value.is_null()
    }

    /// Returns a whole number from 0 up. Fails for any other value.
    pub(super) fn count(&self) -> Result<usize, Malformed> {
        let number = self
            .value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| self.expected("a whole number from 0"))
    }

    /// Returns the number of a device, a process or a host. Fails if the value is not a `u32`.
    pub(super) fn id(&self) -> Result<u32, Malformed> {
        let number = self
            .value
            .as_u64()
            .and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| self.expected(ID))
    }

    /// Returns a whole number, which may be below 0. Fails for any other value.
    pub(super) fn integer(&self) -> Result<isize, Malformed> {
        let number = self
            .value
            .as_i64()
            .and_then(|number| isize::try_from(number).ok());
        number.ok_or_else(|| self.expected("a whole number"))
    }

    /// Reads an object with `u32` numbers as keys and values. Returns its (key, value) pairs,
    /// sorted by key. Fails for any other value.
    pub(super) fn id_map(&self) -> Result<Vec<(u32, u32)>, Malformed> {
        let entries = self.entries().ok_or_else(|| self.expected("an object"))?;
        let entry = |(name, field): &(&str, Field<'a>)| {
            // Only one spelling of each number is valid, so that no number comes twice.
            let id = name.parse().ok().filter(|id: &u32| id.to_string() == *name);
            let id = id
                .ok_or_else(|| self.malformed(format!("has a key {name:?}, which is no number")))?;
            Ok((id, field.id()?))
        };

        let mut map = entries
            .iter()
            .map(entry)
            .collect::<Result<Vec<_>, Malformed>>()?;
        map.sort_unstable();
        Ok(map)
    }

    /// Returns the error that `kind` was expected in place of this field's value. The error shows
    /// the value, cut to `SHOWN` characters.
    pub(super) fn expected(&self, kind: &str) -> Malformed {
        let mut found = match self.value {
            Value::Array(elements) => format!("a list of {}", elements.len()),
            Value::Object(fields) => format!("an object of {} fields", fields.len()),
            other => other.to_string(),
        };

        if found.chars().count() > SHOWN {
            found = format!("{}…", found.chars().take(SHOWN).collect::<String>());
        }
        self.malformed(format!("expected {kind}, found {found}"))
    }

    /// Returns an error with this field's path and the given message.
    pub(super) fn malformed(&self, problem: String) -> Malformed {
        Malformed {
            path: self.path.clone(),
            problem,
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            return write!(f, "the case: {}", self.problem);
        }
        write!(f, "`{}`: {}", self.path, self.problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn wrong<T: fmt::Debug>(found: Result<T, Malformed>) -> String {
        found.unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_path_of_the_field() {
        let value = json!({"a": {"b": [1, -2, "x", 4.5]}, "n": null});
        let case = Field::case(&value);
        let b = case.get("a").unwrap().get("b").unwrap();
        assert_eq!(
            wrong(b.list(Field::count)),
            "`a.b[1]`: expected a whole number from 0, found -2"
        );
        assert_eq!(
            wrong(b.list(Field::integer)),
            "`a.b[2]`: expected a whole number, found \"x\""
        );
        assert_eq!(
            wrong(b.elements().unwrap()[3].id()),
            "`a.b[3]`: expected a number from 0 to 4294967295, found 4.5"
        );
        assert_eq!(wrong(case.get("c")), "the case: has no field `c`");
        assert_eq!(
            wrong(case.get("a").unwrap().get("c")),
            "`a`: has no field `c`"
        );
        assert_eq!(
            wrong(b.get("c")),
            "`a.b`: expected an object, found a list of 4"
        );
        assert_eq!(
            wrong(b.pair()),
            "`a.b`: expected a list of two, found a list of 4"
        );
        assert_eq!(
            wrong(case.text()),
            "the case: expected a text, found an object of 2 fields"
        );
        assert!(
            case.find("n").unwrap().is_none() && case.get("n").is_err(),
            "null is missing"
        );
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        let value = json!({"b": 1, "a": null});
        let case = Field::case(&value);
        assert_eq!(case.only(&["a", "b", "c"]), Ok(()));
        assert_eq!(
            wrong(case.only(&["b", "c"])),
            "the case: has the unknown field `a`; known are b, c"
        );
        assert_eq!(
            wrong(case.get("b").unwrap().only(&[])),
            "`b`: expected an object, found 1"
        );
    }

    #[test]
    fn maps_between_numbers() {
        let map = |value: Value| Field::case(&value).id_map();
        assert_eq!(map(json!({"10": 1, "9": 0})), Ok(vec![(9, 0), (10, 1)]));
        for key in ["07", "+7", "x", "", "-1", "4294967296"] {
            let wrong = wrong(map(json!({ key: 0 })));
            assert_eq!(
                wrong,
                format!("the case: has a key {key:?}, which is no number")
            );
        }
        assert_eq!(
            wrong(map(json!({"1": "a"}))),
            "`[\"1\"]`: expected a number from 0 to 4294967295, found \"a\""
        );
    }

    #[test]
    fn long_values_are_cut() {
        let value = json!("x".repeat(500));
        let wrong = wrong(Field::case(&value).count());
        assert!(
            wrong.ends_with('…') && wrong.chars().count() < 130,
            "{wrong}"
        );
    }
}
