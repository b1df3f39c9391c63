//! Strategies: ordered rules that map names of leaves to ops.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

use super::call::{OpCall, is_name};
use super::error::{ArgumentError, OpError, RulesError};
use super::logical::LogicalAxes;
use super::ops::{Fsdp, LeafPlacement, LogicalPartitioning, Replicate, ShardDim, ShardingOp};
use super::pattern::NamePattern;

type Factory = dyn Fn(&OpCall) -> Result<Arc<dyn ShardingOp>, ArgumentError> + Send + Sync;

/// A table of the ops that tactics can call, by name. [`Registry::default`] has the built-in ops.
///
/// ```
/// use mpmd_layout::sharding::rules::{ArgumentError, OpCall, Literal, Registry};
///
/// let mut registry = Registry::default();
/// let axes = |call: &OpCall| {
///     let [axis] = call.bind(["axis"])?;
///     axis.and_then(Literal::axes).ok_or_else(|| ArgumentError("needs an axis".into()))
/// };
/// registry.register("last_dim", axes, |axes, leaf| match leaf.aval().ndim() {
///     0 => Ok(()),
///     ndim => leaf.shard(ndim - 1, axes),
/// })?;
/// assert!(registry.names().any(|name| name == "last_dim"));
/// # Ok::<(), mpmd_layout::sharding::rules::RulesError>(())
/// ```
#[derive(Clone)]
pub struct Registry {
    factories: BTreeMap<String, Arc<Factory>>,
}

/// Ordered rules `(pattern, tactic)`, ready to be applied to leaves.
///
/// A *pattern* is a regular expression in the notation of Python, with look-around. It must match
/// the **whole** name of a leaf. The first matching rule applies to a leaf. (Unlike Python's,
/// classes nest: `[a[b]]`, `[a&&b]` and `[a--b]` are set operations here. A verbose pattern must
/// not end in a comment.)
///
/// A *tactic* is ops joined by `|`. They are applied from left to right to the leaf's spec, which
/// at first divides no dimension. [`OpCall::parse_tactic`] describes the notation, [the
/// module](super) the ops.
#[derive(Clone, Debug)]
pub struct Strategy {
    pub(super) rules: Vec<StrategyRule>,
    pub(super) logical: LogicalAxes,
    /// Added by [`Strategy::with_state`], in the order of the calls.
    state: Vec<StatePrefix>,
}

/// Two branches of a tree: optimizer state, and the parameters that the state follows.
#[derive(Clone, Debug)]
struct StatePrefix {
    /// Path of the branch of optimizer state.
    state: String,
    /// Path of the branch of parameters; empty for the root.
    params: String,
}

/// The pattern of a rule and the ops of its tactic.
#[derive(Clone)]
pub(super) struct StrategyRule {
    /// The pattern, which matches only whole names of leaves.
    pub(super) pattern: NamePattern,
    pub(super) steps: Vec<TacticOp>,
}

/// One op of a tactic.
#[derive(Clone)]
pub(super) struct TacticOp {
    /// Text of the op, as written in the tactic.
    pub(super) text: String,
    pub(super) op: Arc<dyn ShardingOp>,
}

impl Registry {
    /// Adds the op `name`. `read` converts the arguments of a call in a tactic. It runs once for
    /// each call when a strategy is parsed; if it fails, so does the parsing. `apply` is the op: it
    /// divides one leaf's dimensions over axes of the mesh, with the arguments from `read`. If it
    /// fails, so does the whole inference.
    ///
    /// Every process infers shardings for itself. So both functions must be pure: no clock, no
    /// files, no process id, no map in random order.
    ///
    /// # Errors
    ///
    /// If the registry has an op of that name, or the name is no identifier, nor several joined by
    /// dots.
    pub fn register<A: Send + Sync + 'static>(
        &mut self,
        name: &str,
        read: impl Fn(&OpCall) -> Result<A, ArgumentError> + Send + Sync + 'static,
        apply: impl Fn(&A, &mut LeafPlacement<'_>) -> Result<(), OpError> + Send + Sync + 'static,
    ) -> Result<(), RulesError> {
        let name = checked(name)?;
        match self.factories.entry(name) {
            Entry::Occupied(taken) => Err(RulesError::NameTaken {
                name: taken.key().clone(),
            }),
            Entry::Vacant(free) => {
                free.insert(factory(read_and_applied(read, apply)));
                Ok(())
            }
        }
    }

    /// Adds the op `name`, or replaces the op of that name. `read` and `apply` are as in
    /// [`register`](Self::register). Strategies that are parsed already do not change.
    ///
    /// # Errors
    ///
    /// If the name is no identifier, nor several joined by dots.
    pub fn replace<A: Send + Sync + 'static>(
        &mut self,
        name: &str,
        read: impl Fn(&OpCall) -> Result<A, ArgumentError> + Send + Sync + 'static,
        apply: impl Fn(&A, &mut LeafPlacement<'_>) -> Result<(), OpError> + Send + Sync + 'static,
    ) -> Result<(), RulesError> {
        self.factories
            .insert(checked(name)?, factory(read_and_applied(read, apply)));
        Ok(())
    }

    /// Returns the names of the ops, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.factories.keys().map(String::as_str)
    }
}

impl Default for Registry {
    fn default() -> Self {
        let factories = [
            ("replicate", factory(Replicate::new)),
            ("fsdp", factory(Fsdp::new)),
            ("shard_dim", factory(ShardDim::new)),
            ("logical_partitioning", factory(LogicalPartitioning::new)),
        ];
        Self {
            factories: factories
                .into_iter()
                .map(|(name, make)| (name.to_owned(), make))
                .collect(),
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

impl Strategy {
    /// Parses rules, each `(pattern, tactic)`, with the ops of `registry`.
    ///
    /// Checks all patterns first, then all tactics. Tactics of patterns that match no leaf are
    /// checked too.
    ///
    /// # Errors
    ///
    /// - There is no rule.
    /// - A pattern starts with `/` or is not a regular expression.
    /// - A tactic cannot be parsed, calls an op that `registry` lacks, or calls one with wrong
    ///   arguments.
    pub fn parse<P: AsRef<str>, T: AsRef<str>>(
        rules: &[(P, T)],
        registry: &Registry,
    ) -> Result<Self, RulesError> {
        if rules.is_empty() {
            return Err(RulesError::EmptyStrategy);
        }

        let patterns = rules
            .iter()
            .enumerate()
            .map(|(rule, (pattern, _))| compile(rule, pattern.as_ref()));
        let patterns = patterns.collect::<Result<Vec<NamePattern>, RulesError>>()?;

        let rules = rules
            .iter()
            .zip(patterns)
            .enumerate()
            .map(|(rule, ((_, tactic), pattern))| {
                let steps = steps(rule, pattern.as_str(), tactic.as_ref(), registry)?;
                Ok(StrategyRule { pattern, steps })
            })
            .collect::<Result<_, RulesError>>()?;

        Ok(Self {
            rules,
            logical: LogicalAxes::default(),
            state: Vec::new(),
        })
    }

    /// Sets the logical axes that the op `logical_partitioning()` uses.
    #[must_use]
    pub fn with_logical(mut self, logical: LogicalAxes) -> Self {
        self.logical = logical;
        self
    }

    /// Makes leaves below `state`, such as the moments of an optimizer, follow the parameters below
    /// `params`. Both are paths of branches without a trailing `/`; an empty `params` is the root.
    ///
    /// The leaf `state/a/w` gets the spec of the leaf `params/a/w` if the shapes are equal.
    /// Otherwise patterns and logical names apply to the leaf `state/a/w` as if it were named
    /// `params/a/w`.
    ///
    /// ```
    /// use mpmd_layout::aval::{bf16s, f32s};
    /// use mpmd_layout::sharding::rules::{Registry, Strategy, infer};
    /// use mpmd_layout::topology::{DeviceId, Mesh};
    ///
    /// let strategy = Strategy::parse(&[("params/.*", "fsdp('x')")], &Registry::default())?;
    /// let strategy = strategy.with_state("opt/mean", "params");
    /// let mesh = Mesh::new(&[("x", 8)], (0..8).map(DeviceId).collect())?;
    /// let leaves = [
    ///     ("params/w".to_owned(), f32s([1024, 2048])),
    ///     // Too small to be divided by itself.
    ///     ("opt/mean/w".to_owned(), bf16s([1024, 2048])),
    /// ];
    /// let inferred = infer(&leaves, &strategy, &mesh)?;
    /// assert_eq!(inferred.leaves()[1].spec, inferred.leaves()[0].spec);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_state(mut self, state: impl Into<String>, params: impl Into<String>) -> Self {
        self.state.push(StatePrefix {
            state: state.into(),
            params: params.into(),
        });
        self
    }

    /// Returns the name of the parameter that the leaf follows, by the first matching
    /// [`Strategy::with_state`]. `None` for a leaf that is no optimizer state.
    pub(super) fn parameter_of(&self, leaf: &str) -> Option<String> {
        self.state.iter().find_map(|StatePrefix { state, params }| {
            let path = leaf.strip_prefix(state.as_str())?.strip_prefix('/')?;
            Some(if params.is_empty() {
                path.to_owned()
            } else {
                format!("{params}/{path}")
            })
        })
    }

    /// Returns the patterns, in the order of the rules.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.pattern.as_str())
    }

    /// Returns the index of the first rule that matches the leaf's name, or `None` if no pattern
    /// matches.
    ///
    /// # Errors
    ///
    /// If a pattern with look-around or back references takes too many steps on the name.
    pub(super) fn rule_of(&self, leaf: &str) -> Result<Option<usize>, RulesError> {
        for (index, rule) in self.rules.iter().enumerate() {
            match rule.pattern.matches(leaf) {
                Ok(true) => return Ok(Some(index)),
                Ok(false) => {}
                Err(error) => {
                    return Err(RulesError::PatternGaveUp {
                        rule: index,
                        pattern: rule.pattern.as_str().to_owned(),
                        leaf: leaf.to_owned(),
                        message: error.to_string(),
                    });
                }
            }
        }
        Ok(None)
    }
}

impl fmt::Debug for StrategyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<&str> = self.steps.iter().map(|step| step.text.as_str()).collect();
        f.debug_struct("Rule")
            .field("pattern", &self.pattern.as_str())
            .field("steps", &steps)
            .finish_non_exhaustive()
    }
}

/// A user's op, with the arguments of one call of it.
struct UserOp<A, F> {
    arguments: A,
    apply: Arc<F>,
}

impl<A, F> ShardingOp for UserOp<A, F>
where
    A: Send + Sync,
    F: Fn(&A, &mut LeafPlacement<'_>) -> Result<(), OpError> + Send + Sync,
{
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError> {
        (self.apply)(&self.arguments, leaf)
    }
}

fn read_and_applied<A, F>(
    read: impl Fn(&OpCall) -> Result<A, ArgumentError>,
    apply: F,
) -> impl Fn(&OpCall) -> Result<UserOp<A, F>, ArgumentError> {
    let apply = Arc::new(apply);
    move |call| {
        Ok(UserOp {
            arguments: read(call)?,
            apply: apply.clone(),
        })
    }
}

fn factory<O: ShardingOp + 'static>(
    make: impl Fn(&OpCall) -> Result<O, ArgumentError> + Send + Sync + 'static,
) -> Arc<Factory> {
    Arc::new(move |call| make(call).map(|op| Arc::new(op) as Arc<dyn ShardingOp>))
}

fn checked(name: &str) -> Result<String, RulesError> {
    let name = name.to_owned();
    if is_name(&name) {
        Ok(name)
    } else {
        Err(RulesError::BadName { name })
    }
}

fn compile(rule: usize, pattern: &str) -> Result<NamePattern, RulesError> {
    if pattern.starts_with('/') {
        return Err(RulesError::PatternStartsWithSlash {
            rule,
            pattern: pattern.to_owned(),
        });
    }
    NamePattern::whole(pattern).map_err(|fault| RulesError::BadPattern {
        rule,
        pattern: pattern.to_owned(),
        position: fault.position,
        message: fault.message,
    })
}

fn steps(
    rule: usize,
    pattern: &str,
    tactic: &str,
    registry: &Registry,
) -> Result<Vec<TacticOp>, RulesError> {
    let pattern = || pattern.to_owned();
    let calls = OpCall::parse_tactic(tactic).map_err(|error| RulesError::Tactic {
        rule,
        pattern: pattern(),
        source: Box::new(error),
    })?;

    calls
        .iter()
        .map(|call| {
            let Some(make) = registry.factories.get(call.name()) else {
                return Err(RulesError::UnknownOp {
                    rule,
                    pattern: pattern(),
                    op: call.name().to_owned(),
                    known: registry.names().map(str::to_owned).collect(),
                });
            };

            let text = call.text().to_owned();
            match make(call) {
                Ok(op) => Ok(TacticOp { text, op }),
                Err(ArgumentError(message)) => Err(RulesError::Arguments {
                    rule,
                    pattern: pattern(),
                    op: text,
                    message,
                }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::ErrorKind;
    use super::super::pattern::repeats_too_often;
    use super::*;

    fn parse(rules: &[(&str, &str)]) -> Result<Strategy, RulesError> {
        Strategy::parse(rules, &Registry::default())
    }

    fn error(rules: &[(&str, &str)]) -> (ErrorKind, String) {
        let error = parse(rules).expect_err("no strategy");
        (error.kind(), error.to_string())
    }

    #[test]
    fn first_pattern_that_matches_the_whole_name_applies() {
        let rules = [
            (".*/x", "replicate"),
            ("b/.*", "replicate"),
            ("kern", "replicate"),
            ("a|ab", "replicate"),
        ];
        let strategy = parse(&rules).unwrap();
        let rule_of = |name| strategy.rule_of(name).unwrap();
        let names = ["a/b", "a/x", "b/x", "b/y", "kernel", "ab", ""];
        assert_eq!(
            names.map(rule_of),
            [None, Some(0), Some(0), Some(1), None, Some(3), None]
        );
        assert_eq!(
            strategy.patterns().collect::<Vec<_>>(),
            [".*/x", "b/.*", "kern", "a|ab"]
        );
    }

    #[test]
    fn patterns_support_look_around_and_back_references() {
        let rules = [
            (r"(?!frozen/).*/w", "replicate"),
            (r"(?P<n>\w+)/(?P=n)", "replicate"),
        ];
        let strategy = parse(&rules).unwrap();
        let names = ["frozen/w", "a/w", "abc/abc", "abc/ab"];
        assert_eq!(
            names.map(|name| strategy.rule_of(name).unwrap()),
            [None, Some(0), Some(1), None]
        );
    }

    #[test]
    fn a_pattern_that_takes_too_long_is_an_error() {
        let strategy = parse(&[(r"(?:(x+)*)*\1y", "replicate")]).unwrap();
        let error = strategy
            .rule_of(&"x".repeat(40))
            .expect_err("more than a million steps");
        assert!(
            matches!(&error, RulesError::PatternGaveUp { rule: 0, .. }),
            "{error}"
        );
        assert_eq!(error.kind(), ErrorKind::Value);
    }

    #[test]
    fn patterns_with_too_many_repeats_are_refused() {
        let nested = format!("{}x{}", "(".repeat(9), "){999}".repeat(9));
        for pattern in [
            "x{18446744073709551608,9}",
            "ab{1001}",
            "a{,99999999999999999999}",
            &nested,
        ] {
            let (kind, message) = error(&[(pattern, "replicate")]);
            assert!(
                kind == ErrorKind::Value && message.contains("more than 1000 times"),
                "{message}"
            );
        }
        for pattern in ["x{1000}", r"x\{2000}", "x{2,3}y{4,}", "{a}", "x{}"] {
            assert_eq!(repeats_too_often(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn strategy_errors_name_the_rule() {
        let none: [(&str, &str); 0] = [];
        assert_eq!(error(&none).0, ErrorKind::Value);
        let (kind, message) = error(&[(".*", "replicate"), ("/k", "nope")]);
        assert_eq!(kind, ErrorKind::Assertion);
        assert_eq!(
            message,
            "rule 1: pattern \"/k\" starts with `/`, but names of leaves do not"
        );
        let (kind, message) = error(&[("a)(b", "replicate")]);
        assert!(
            kind == ErrorKind::Value && message.starts_with("rule 0: pattern \"a)(b\", position 1"),
            "{message}"
        );
        let (kind, message) = error(&[("k", "replicate|")]);
        assert_eq!(kind, ErrorKind::Syntax);
        assert_eq!(
            message,
            "rule 0, pattern \"k\": tactic \"replicate|\", column 11: expected an op's name, \
             found the end"
        );
        assert_eq!(error(&[("k", "fsdp(axis=data)")]).0, ErrorKind::Value);
        let (kind, message) = error(&[("k", "fsdp")]);
        assert_eq!(kind, ErrorKind::Type);
        assert_eq!(
            message,
            "rule 0, pattern \"k\": `fsdp` needs the name of an axis, or a list of names, as `axis`"
        );
        let (kind, message) = error(&[("matches nothing", "shard_all('x')")]);
        assert_eq!(kind, ErrorKind::Key);
        assert_eq!(
            message,
            "rule 0, pattern \"matches nothing\": there is no op `shard_all`; \
             known are fsdp, logical_partitioning, replicate, shard_dim"
        );
    }

    #[test]
    fn names_are_registered_once_or_replaced() {
        let mut registry = Registry::default();
        registry
            .register("my.op", |_| Ok(()), |_, _| Ok(()))
            .unwrap();
        let taken = registry
            .register("my.op", |_| Ok(()), |_, _| Ok(()))
            .unwrap_err();
        assert_eq!(
            (taken.kind(), taken.to_string().contains("`my.op`")),
            (ErrorKind::Key, true)
        );
        registry
            .replace("my.op", |_| Ok(()), |_, _| Ok(()))
            .unwrap();
        registry.replace("fsdp", |_| Ok(()), |_, _| Ok(())).unwrap();
        assert!(Strategy::parse(&[("k", "my.op|fsdp")], &registry).is_ok());
        let bad = registry
            .register("my op", |_| Ok(()), |_, _| Ok(()))
            .unwrap_err();
        assert_eq!(
            bad.to_string(),
            "\"my op\" cannot be an op's name: names are identifiers, or several joined by dots"
        );
    }
}
