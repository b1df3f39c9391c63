//! The settings of an optimiser: its rule, the decaying parameters, and the limit of the norm.

use std::fmt;

use super::adamw::AdamW;
use super::sgd::Sgd;

/// An optimiser's update rule, with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// The AdamW rule: see [`AdamW`].
    AdamW(AdamW),
    /// Stochastic gradient descent: see [`Sgd`].
    Sgd(Sgd),
}

impl UpdateRule {
    /// Returns the names of the state arrays that the rule keeps for each parameter.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Self::AdamW(_) => &["mean", "square"],
            Self::Sgd(Sgd { momentum, .. }) if *momentum == 0.0 => &[],
            Self::Sgd(_) => &["momentum"],
        }
    }

    /// Returns the same rule with weight decay 0.
    pub(super) fn without_decay(self) -> Self {
        match self {
            Self::AdamW(adamw) => Self::AdamW(AdamW {
                decay: 0.0,
                ..adamw
            }),
            Self::Sgd(sgd) => Self::Sgd(Sgd { decay: 0.0, ..sgd }),
        }
    }

    /// Encodes the rule's constants as words, so that processes can compare them.
    pub(super) fn words(&self) -> Vec<u64> {
        match *self {
            Self::AdamW(AdamW {
                beta1,
                beta2,
                epsilon,
                decay,
            }) => [0.0, beta1, beta2, epsilon, decay]
                .map(f64::to_bits)
                .to_vec(),
            Self::Sgd(Sgd {
                momentum,
                decay,
                nesterov,
            }) => {
                vec![1, momentum.to_bits(), decay.to_bits(), u64::from(nesterov)]
            }
        }
    }
}

impl From<AdamW> for UpdateRule {
    fn from(adamw: AdamW) -> Self {
        Self::AdamW(adamw)
    }
}

impl From<Sgd> for UpdateRule {
    fn from(sgd: Sgd) -> Self {
        Self::Sgd(sgd)
    }
}

/// Decides whether weight decay applies to a parameter, by its path within the stage and its global
/// shape.
type Decays = Box<dyn Fn(&str, &[usize]) -> bool>;

/// The settings of an [`Optimizer`](super::Optimizer). An [`AdamW`] or [`Sgd`] converts to default
/// settings.
///
/// By default, weight decay applies only to parameters with two or more dimensions, and gradients
/// are not clipped.
pub struct OptimizerSettings {
    pub(super) rule: UpdateRule,
    pub(super) clip: Option<f64>,
    pub(super) decays: Decays,
}

impl OptimizerSettings {
    /// Creates default settings with this update rule.
    pub fn new(rule: impl Into<UpdateRule>) -> Self {
        Self {
            rule: rule.into(),
            clip: None,
            decays: Box::new(|_, shape| shape.len() >= 2),
        }
    }

    /// Sets the limit of the norm of the mean gradient over all parameters. Gradients with a larger
    /// norm are scaled down to the limit.
    #[must_use]
    pub fn clip(mut self, limit: f64) -> Self {
        self.clip = Some(limit);
        self
    }

    /// Applies weight decay to the parameters for which `decays` returns true. Its arguments are
    /// the parameter's path within its stage, such as `blocks/3/w`, and its global shape.
    ///
    /// `decays` must return the same on every process.
    #[must_use]
    pub fn decays(mut self, decays: impl Fn(&str, &[usize]) -> bool + 'static) -> Self {
        self.decays = Box::new(decays);
        self
    }
}

impl<R: Into<UpdateRule>> From<R> for OptimizerSettings {
    fn from(rule: R) -> Self {
        Self::new(rule)
    }
}

impl fmt::Debug for OptimizerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OptimizerSettings")
            .field("rule", &self.rule)
            .field("clip", &self.clip)
            .finish_non_exhaustive()
    }
}
