//! The plans of functions that a program has computed by `compute`.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

/// Most plans that are kept.
const KEPT: usize = 512;

/// The plans of functions, by a hash that tells each from all others. Empties itself when it is
/// full. A program holds it, which need not know how plans are made.
#[derive(Default)]
pub(crate) struct KeptPlans(HashMap<u128, Arc<dyn Any + Send + Sync>>);

impl KeptPlans {
    /// Returns the plan of a function.
    pub(crate) fn get<T: Send + Sync + 'static>(&self, function: u128) -> Option<Arc<T>> {
        self.0.get(&function)?.clone().downcast().ok()
    }

    /// Keeps the plan of a function.
    pub(crate) fn insert<T: Send + Sync + 'static>(&mut self, function: u128, plan: Arc<T>) {
        if self.0.len() >= KEPT {
            self.0.clear();
        }
        self.0.insert(function, plan);
    }
}
