//! Reads a rule from its text.

use std::str::FromStr;

use super::{ArrayDimensions, DimensionName, DimensionRule};

/// Error: a text is no rule.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DimensionRuleError {
    /// The text has no `->`, or several.
    #[error("{text:?}: expected operands -> results, such as \"b k, k n -> b n\"")]
    Arrow {
        /// The text.
        text: String,
    },
    /// A word is neither a name nor `...`.
    #[error("{text:?}: expected names of letters, digits and `_`, or `...`, found {word:?}")]
    Word {
        /// The text.
        text: String,
        /// The word.
        word: String,
    },
    /// An array has `...` twice.
    #[error("{text:?}: an array has `...` twice")]
    TwoEllipses {
        /// The text.
        text: String,
    },
    /// An array has a dimension twice.
    #[error("{text:?}: an array has the dimension {name:?} twice")]
    Twice {
        /// The text.
        text: String,
        /// The dimension's name.
        name: String,
    },
    /// A result has a dimension that no operand has.
    #[error("{text:?}: no operand has the dimension {name:?} of a result")]
    Unknown {
        /// The text.
        text: String,
        /// The dimension's name.
        name: String,
    },
}

impl FromStr for DimensionRule {
    type Err = DimensionRuleError;

    fn from_str(text: &str) -> Result<Self, DimensionRuleError> {
        let mut sides = text.split("->");
        let (Some(operands), Some(results), None) = (sides.next(), sides.next(), sides.next())
        else {
            let text = text.to_owned();
            return Err(DimensionRuleError::Arrow { text });
        };
        let mut reader = RuleReader {
            text,
            names: Vec::new(),
        };
        let operands = reader.arrays(operands)?;
        let known = reader.names.len();
        let results = reader.arrays(results)?;
        if let Some(name) = reader.names.get(known) {
            return Err(DimensionRuleError::Unknown {
                text: text.to_owned(),
                name: name.text.clone(),
            });
        }
        Ok(Self {
            names: reader.names,
            operands,
            results,
        })
    }
}

/// Reads the arrays of a rule, and gives each name an index.
struct RuleReader<'a> {
    text: &'a str,
    names: Vec<DimensionName>,
}

impl RuleReader<'_> {
    fn arrays(&mut self, side: &str) -> Result<Vec<ArrayDimensions>, DimensionRuleError> {
        side.split(',').map(|array| self.array(array)).collect()
    }

    fn array(&mut self, array: &str) -> Result<ArrayDimensions, DimensionRuleError> {
        let mut read = ArrayDimensions::default();
        for word in array.split_whitespace() {
            if word == "..." {
                if read.back.replace(Vec::new()).is_some() {
                    let text = self.text.to_owned();
                    return Err(DimensionRuleError::TwoEllipses { text });
                }
                continue;
            }
            let name = self.name(word)?;
            if read
                .front
                .iter()
                .chain(read.back.iter().flatten())
                .any(|known| *known == name)
            {
                return Err(DimensionRuleError::Twice {
                    text: self.text.to_owned(),
                    name: self.names[name].text.clone(),
                });
            }
            read.back.as_mut().unwrap_or(&mut read.front).push(name);
        }
        Ok(read)
    }

    /// Returns the index of a name. A dimension with `!` anywhere is whole everywhere.
    fn name(&mut self, word: &str) -> Result<usize, DimensionRuleError> {
        let name = word.strip_prefix('!').unwrap_or(word);
        let is_of_name = |c: char| c.is_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(is_of_name) {
            return Err(DimensionRuleError::Word {
                text: self.text.to_owned(),
                word: word.to_owned(),
            });
        }
        let is_whole = name.len() < word.len();
        if let Some(known) = self.names.iter().position(|known| known.text == name) {
            self.names[known].is_whole |= is_whole;
            return Ok(known);
        }
        self.names.push(DimensionName {
            text: name.to_owned(),
            is_whole,
        });
        Ok(self.names.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<DimensionRule>().unwrap_err().to_string()
    }

    #[test]
    fn rules_are_read_and_written() {
        for text in [
            "b k, k n -> b n",
            "..., ... -> ...",
            "... !i -> ... !i",
            "h ... d, d -> ... h",
            "i -> ",
            ", i -> i, ",
        ] {
            let rule: DimensionRule = text.parse().unwrap();
            assert_eq!(rule.to_string(), text);
        }
        let spaced: DimensionRule = "b  k,k n->b n".parse().unwrap();
        assert_eq!(spaced.to_string(), "b k, k n -> b n");
        let once: DimensionRule = "b !k, k -> b".parse().unwrap();
        assert_eq!(once.to_string(), "b !k, !k -> b");
    }

    #[test]
    fn texts_that_are_no_rules_are_refused_by_word() {
        assert!(error("a b").contains("expected operands -> results"));
        assert!(error("a -> b -> c").contains("expected operands -> results"));
        assert!(error("a-b -> a").contains("found \"a-b\""));
        assert!(error("! -> ").contains("found \"!\""));
        assert!(error("a .. -> a").contains("found \"..\""));
        assert!(error("... a ... -> a").contains("`...` twice"));
        assert!(error("a b a -> b").contains("the dimension \"a\" twice"));
        assert!(error("a -> a, b").contains("no operand has the dimension \"b\""));
    }
}
